// The session of a worker with the coordinator: registration, heartbeats, presence, commands, and calls under the right identity.
// Decides whether a refusal can be overcome or is for the loop that trains; data and checkpoints are in worker.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "leases.h"
#include "link.h"
#include "strata/worker.h"
#include "telemetry.h"

namespace strata {

constexpr Milliseconds kAttempt{10'000};  // an answer that takes longer got lost

class Session {
 public:
  explicit Session(const Settings& settings);
  ~Session();
  Session(const Session&) = delete;

  // Register and wait until there are enough members for a generation.
  void begin();
  // Ends heartbeats and presence; then either goodbye, with the last acks, or tell that this incarnation failed.
  void leave(const std::string& reason);
  void fail();

  // A safe point: throws what the loop that trains has to know.
  void check();
  void throw_failure() const;
  void check_leases();
  // The same, and in an elastic job goes on to the current generation.
  void sync_generation();
  // Take the current generation without going back.
  void follow();
  void adopt(std::uint64_t generation, std::uint32_t rank, std::uint32_t world_size);
  // Tell a coordinator that took over what we hold, and hear what of it is lost. With `asking` held.
  void reattach(Background* background = nullptr);
  // Our generation is over, though the next one may not have begun.
  void mark_stale(std::uint64_t generation);

  // Ask as who we are now; `make` is asked again when that changed. Not `settled`: in any generation.
  template <class Request, class Reply>
  Reply call(Link::Method<Request, Reply> method, const std::function<Request(const Identity&)>& make,
             std::optional<Milliseconds> attempt = kAttempt, bool settled = true) {
    for (;;) {
      settled ? sync_generation() : throw_failure();
      try {
        return link_.call<Request, Reply>(method, make(identity()), {attempt, settings_.patience});
      } catch (const Error& error) {
        handle_call_error(error, settled);
      }
    }
  }

  Identity identity() const;
  std::map<std::string, std::string> parameters() const;
  // Whether the last registration said that this incarnation has to ask where to start.
  bool recover_first() const;
  bool stopping() const;
  bool draining() const;
  bool waits(CommandKind kind) const;
  // Whether all ranks write a checkpoint of the step that is finished; waits if that is not known yet.
  bool agree_on_checkpoint();
  // What the answer to the report of a checkpoint of this step says.
  void checkpoint_reported(std::uint64_t step, const v1::CheckpointAck& ack);
  // Commands that wait for the loop that trains; taking one acknowledges it.
  std::vector<Command> take_commands(std::optional<CommandKind> kind = std::nullopt);
  void set_status(v1::WorkerStatus status);
  void set_busy(bool busy);
  void set_step(std::uint64_t step, std::optional<double> compute_s);
  std::optional<std::uint64_t> step() const;

  Leases leases;
  // Held during a call that may bring leases: whoever tells the coordinator what is held must not be overtaken by it.
  std::mutex asking;

 private:
  void handle_call_error(const Error& error, bool settled);
  bool is_member();
  void set_failure(const Error& error);
  void evicted(const Error& error);
  void catch_up();
  void register_worker(bool adopt_place, Background* background);
  v1::WorkerConfig registered(Background* background);
  v1::HeartbeatRequest heartbeat();
  void start_threads();
  void end_threads();

  void heartbeat_loop();
  void send_heartbeat();
  void presence_loop();
  grpc::Status open_presence();
  template <class Update>
  void on_job_update(const Update& update);
  void receive(const v1::Command& message);

  const Settings settings_;
  Link link_;
  Telemetry telemetry_;
  Background background_;
  std::mutex registering_;
  std::thread beating_;
  std::thread attaching_;

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable attached_changed_;
  bool attached_ = false;
  Identity identity_;
  std::map<std::string, std::string> parameters_;
  bool recover_first_ = false;
  std::uint64_t current_ = 0;  // the job's generation as last heard of; the worker's own may be older
  std::uint32_t leader_epoch_ = 0;
  std::uint32_t heard_epoch_ = 0;  // newer than ours: another coordinator leads, and has to hear what we hold
  Milliseconds interval_{5'000};
  std::optional<Error> failure_;
  v1::WorkerStatus status_ = v1::WORKER_STATUS_INITIALIZING;
  bool busy_ = false;  // the program has announced a phase without steps
  std::chrono::steady_clock::time_point busy_since_;
  std::optional<std::uint64_t> step_;
  std::optional<double> step_time_ms_;
  std::deque<float> compute_times_ms_;
  std::chrono::steady_clock::time_point stepped_at_;
  // The step that this worker goes past only when the ranks agree on it, or whose checkpoint it writes; 0: none. Nothing: the
  // program does not agree on steps.
  std::optional<std::uint64_t> checkpoint_step_;
  // The last step after which the program asked whether a checkpoint is due, and its distance from the one before; 0: there was none.
  std::optional<std::uint64_t> asked_step_;
  std::uint64_t asked_stride_ = 0;
  std::pair<std::uint64_t, std::uint64_t> agreed_{0, 0};  // the generation and the step that its ranks agreed on
  std::condition_variable agreement_changed_;
  bool stopping_ = false;
  bool draining_ = false;
  std::vector<Command> waiting_;
  std::set<std::uint64_t> seen_;
  std::set<std::uint64_t> to_ack_;
};

std::string random_name(const std::string& kind);

}  // namespace strata
