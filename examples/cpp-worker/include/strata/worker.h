// A worker of a job: what a training loop in C++ does with the coordinator.
//
//   strata::Worker worker(strata::settings_from_environment());        // joined; heartbeats go on in a thread of their own
//   if (worker.start()) load(*worker.start());                         // a start is a recovery; nothing: from the beginning
//   worker.dataset({"corpus", {"a.txt", "b.txt"}});
//   worker.for_each_shard("corpus", 0, [&](const strata::Shard& shard) { train(strata::lines_of(shard)); });
//   worker.barrier("epoch_0");
//   worker.leave();                                                    // a worker that ends without has failed
//
// Every call may throw strata::Error. kMembershipChanged: recover() goes back with everybody and returns the checkpoint to
// load; in an elastic job the worker goes on by itself. kLeaseLost: drop what was made of those shards, and ask for more.
// kEvicted and kReplaced end this worker. One thread uses a Worker.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "strata/errors.h"
#include "strata/settings.h"

namespace strata {

struct Identity {
  std::string job;
  std::string worker_id;
  std::string incarnation;
  std::uint64_t generation = 0;
  std::uint32_t rank = 0;
  std::uint32_t world_size = 0;
};

// Numbered like the contract's.
enum class CommandKind { kStop = 1, kRebalance = 2, kCheckpointNow = 3, kReload = 4, kDrain = 5 };

struct Command {
  std::uint64_t command_id;
  CommandKind kind;
  std::map<std::string, std::string> arguments;
  std::string reason;
};

// With `files` their lines are the samples; without, `samples` says how many there are. With nothing but its id, a
// dataset that is registered is meant. `global_batch_shards` makes it DETERMINISTIC: so many shards are one step of all
// workers together.
struct Dataset {
  std::string dataset_id;
  std::vector<std::string> files = {};
  std::uint64_t samples = 0;
  std::uint64_t shard_size = 0;
  std::uint64_t seed = 0;
  bool shuffle = true;
  std::uint32_t buckets = 0;
  std::uint32_t global_batch_shards = 0;
};

// Samples of one file, counted from its beginning.
struct FileSlice {
  std::string path;
  std::uint64_t start;
  std::uint64_t end;
};

// Samples from `start` up to, without, `end`. What was consumed before, by this worker or another, is not part of it.
struct Shard {
  std::string shard_id;
  std::string dataset_id;
  std::uint32_t epoch;
  std::uint64_t lease_id;
  std::uint64_t start;
  std::uint64_t end;
  std::vector<FileSlice> slices;
};

struct Reported {
  std::uint64_t step;
  bool committed;
  std::vector<std::uint32_t> missing_ranks;
  std::vector<std::string> tombstones;  // older parts that no recovery needs any more: delete them
  bool drained;                         // an operator has drained this worker: it has to leave, the others go on from here
};

struct Part {
  std::uint32_t rank;
  std::string uri;
  std::uint64_t size;
  std::string digest;
};

// A committed checkpoint: what to load.
struct Manifest {
  std::string checkpoint_id;
  std::uint64_t step;
  std::uint64_t generation;
  std::vector<Part> parts;
};

struct Capture;
class Session;

class Worker {
 public:
  explicit Worker(const Settings& settings);
  // Tells that this incarnation failed, unless it left.
  ~Worker();
  Worker(const Worker&) = delete;

  // The checkpoint to load before the first shard; nothing: start from the beginning. A process that joins a job whose data has
  // moved went back to it, with everybody. No shard comes before it was looked at.
  const std::optional<Manifest>& start();

  // Goes on purpose, with the last acks.
  void leave(const std::string& reason = "");

  Identity identity() const;
  std::map<std::string, std::string> parameters() const;
  // An operator wants this worker to end: no more shards come.
  bool should_stop() const;
  // CHECKPOINT_NOW and RELOAD wait here; taking them acknowledges them.
  std::vector<Command> commands();

  // Registers a dataset or confirms that it is registered like this; the number of its shards.
  std::uint64_t dataset(const Dataset& dataset);
  // All shards of an epoch for this worker, until all are consumed by somebody. One is consumed when `train` returns.
  void for_each_shard(const std::string& dataset_id, std::uint32_t epoch, const std::function<void(const Shard&)>& train);
  // Begin such a loop by hand: what an earlier one left unfinished comes again.
  void restart(const std::string& dataset_id, std::uint32_t epoch);
  // The next shard; nothing at the end of the epoch.
  std::optional<Shard> next_shard(const std::string& dataset_id, std::uint32_t epoch, std::uint32_t at_once = 1);
  void done(const Shard& shard);
  // Samples before this index are consumed: after a death, and in a checkpoint, only the rest is left.
  void progress(const Shard& shard, std::uint64_t until);
  // The rest cannot be read: somebody else shall try.
  void fail(const Shard& shard, const std::string& reason);
  // Ack what is consumed, now; throws kLeaseLost if some of it does not count.
  void flush();
  // This rank's shards of a global step of a DETERMINISTIC dataset; they need no acks.
  std::vector<Shard> step_shards(const std::string& dataset_id, std::uint64_t step);

  // Waits for all members, or for `expected` of them. Timeout 0: the job's own.
  void barrier(const std::string& barrier_id, Milliseconds timeout = Milliseconds(0), std::uint32_t expected = 0);
  // A global step is finished. A safe point: throws what the loop has to know. `compute_s` is what this worker spent on the
  // step itself, without waiting for others: by it the slow one among workers that step together is found.
  void step(std::uint64_t number, std::optional<double> compute_s = std::nullopt);

  // A long phase without steps begins or ends, such as an evaluation: meanwhile the worker does not count as hung, and its
  // next step does not count as slow.
  void busy(bool on);

  // Whether an operator wants a checkpoint of the step that step() has just named: the same on all ranks. Call it after every
  // step: a step that no rank has finished is agreed on, and ranks that reach it wait here until all of them have agreed.
  bool checkpoint_due();
  // Takes note of what is consumed now; until the report nothing is acked. Inside a shard: progress() first.
  std::shared_ptr<const Capture> begin_checkpoint(std::uint64_t step);
  // This rank's part is stored. Of a local file, size and digest are read. May be repeated, to see whether it is committed.
  Reported report_checkpoint(const Capture& capture, const std::string& path);
  Reported report_checkpoint(const Capture& capture, const std::string& uri, std::uint64_t size, const std::string& digest);
  // It could not be written: acks go on.
  void give_up_checkpoint(const Capture& capture);

  // Back with everybody to the last committed checkpoint; nothing means from the beginning. What this worker held is void.
  std::optional<Manifest> recover(const std::string& reason = "", const std::string& bad_checkpoint_id = "");
  // Go on in the current generation with what is held: right where nothing has to be undone.
  void follow();

 private:
  struct Known;
  void check_started() const;
  void confirm(const std::string& dataset_id);
  bool ask(const std::string& dataset_id, std::uint32_t epoch, std::uint32_t count, Milliseconds wait);

  std::unique_ptr<Session> session_;
  std::map<std::string, Known> datasets_;
  std::optional<Manifest> start_;
  bool start_taken_ = true;
  bool left_ = false;
};

}  // namespace strata
