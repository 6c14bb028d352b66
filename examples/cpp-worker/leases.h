// What a worker holds: its leases, how far it has consumed them, and how much of that the coordinator knows. No I/O.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "strata/errors.h"
#include "strata/v1/coordinator.pb.h"

namespace strata {

// One lease. Samples before `at` are consumed; the coordinator knows of those before `acked`.
struct Held {
  std::string dataset_id;
  std::uint32_t epoch;
  v1::Shard shard;
  std::uint64_t at;
  std::uint64_t acked;
  bool begun = false;  // handed to the loop that trains
  std::optional<std::string> failure;
  bool returned = false;  // not begun, and given to others

  bool is_over() const { return at == shard.end_index() || failure || returned; }
  bool is_news() const { return is_over() || at > acked; }
};

// An ack on its way, as it was when it was sent.
struct Sent {
  std::uint64_t at;
  bool over;
  v1::ShardAck message;
};

// What had been consumed when a worker took its part of a checkpoint.
struct Capture {
  std::string checkpoint_id;
  std::uint64_t step = 0;
  std::vector<v1::ConsumedLease> consumed;
};

// All leases of a worker, for any thread. Between `begin` and `end` of a capture nothing is acked: an ack that overtook the
// report would be counted into a checkpoint that does not have it.
class Leases {
 public:
  // New leases; one that is known already was handed out again and stays as it is.
  void take(const std::string& dataset_id, std::uint32_t epoch, const google::protobuf::RepeatedPtrField<v1::Shard>& shards);
  // A new loop begins: what an earlier one left unfinished is read on.
  void restart(const std::string& dataset_id, std::uint32_t epoch);
  // The next one that nobody reads yet, now begun.
  std::optional<Held> next_unread(const std::string& dataset_id, std::uint32_t epoch);
  // Of a lease that was lost nothing is said: the next call tells.
  void consume(std::uint64_t lease_id, std::optional<std::uint64_t> until);
  void fail(std::uint64_t lease_id, const std::string& reason);
  // Gives to others what is not begun; the next acks say so.
  void return_unread();

  std::vector<std::uint64_t> ids(const std::string& dataset_id = "") const;
  // What to ack now, of one dataset or of all.
  std::vector<Sent> acks(const std::string& dataset_id = "") const;
  // Datasets and epochs that have something to ack.
  std::vector<std::pair<std::string, std::uint32_t>> unacked() const;
  std::vector<v1::LeaseProgress> progress() const;
  // The coordinator has answered: these acks count, except the rejected ones, whose leases are lost.
  void confirm(const std::vector<Sent>& sent, const google::protobuf::RepeatedField<std::uint64_t>& rejected);

  Capture begin(const std::string& checkpoint_id, std::uint64_t step);
  void end(const Capture& capture);
  bool has_capture() const;

  // Not known as ours any more. One that is over may just have been acked: the answer to its ack will tell.
  void forfeit(const google::protobuf::RepeatedField<std::uint64_t>& leases);
  // Leases that the loop that trains had begun and lost since it was last told.
  std::vector<std::uint64_t> take_lost();
  // Everything held is void, and that is no surprise to anybody.
  void clear();

 private:
  Held* find(std::uint64_t lease_id);
  void lose(std::uint64_t lease_id);

  mutable std::mutex mutex_;
  std::vector<Held> held_;  // in the order in which they came
  std::vector<std::uint64_t> lost_;
  std::optional<std::string> capture_;
};

}  // namespace strata
