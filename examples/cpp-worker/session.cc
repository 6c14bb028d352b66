#include "session.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <random>

namespace strata {
namespace {

constexpr Milliseconds kGoodbye{2'000};
constexpr Milliseconds kPresence{2'000};

using Stub = v1::Coordinator::Stub;

std::string hostname() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace

std::string random_name(const std::string& kind) {
  std::random_device chance;
  std::string name = kind + "_";
  for (int word = 0; word < 4; ++word) {
    char digits[9];
    std::snprintf(digits, sizeof digits, "%08x", static_cast<unsigned>(chance()));
    name += digits;
  }
  return name;
}

Session::Session(const Settings& settings) : settings_(settings), link_(settings) {
  identity_.job = settings.job;
  identity_.worker_id = settings.worker_id;
  identity_.incarnation = random_name("incarnation");
}

Session::~Session() { end_threads(); }

void Session::begin() {
  register_worker(true, nullptr);
  set_status(v1::WORKER_STATUS_IDLE);
  // From here on a death is noticed at once. It may take a coordinator that is just being replaced to say so.
  std::unique_lock lock(mutex_);
  attached_changed_.wait_for(lock, kPresence, [&] { return attached_; });
}

void Session::end_threads() {
  background_.stop();
  if (beating_.joinable()) beating_.join();
  if (attaching_.joinable()) attaching_.join();
}

void Session::leave(const std::string& reason) {
  end_threads();
  throw_failure();
  const Identity me = identity();
  const auto sent = leases.acks();
  v1::LeaveWorkerRequest request;
  request.set_job_id(me.job);
  request.set_worker_id(me.worker_id);
  request.set_incarnation(me.incarnation);
  request.set_reason(reason);
  for (const auto& each : sent) *request.add_acks() = each.message;
  // One that gives a reason or was told to stop is not done.
  request.set_finished(reason.empty() && !stopping() && !draining());
  const auto reply = link_.call<v1::LeaveWorkerRequest, v1::LeaveWorkerResponse>(
      &Stub::LeaveWorker, request, {kAttempt, sent.empty() ? kGoodbye : settings_.patience});
  leases.confirm(sent, reply.rejected_leases());
  check_leases();
}

void Session::fail() {
  end_threads();
  set_status(v1::WORKER_STATUS_ERROR);
  link_.call<v1::HeartbeatRequest, v1::HeartbeatResponse>(&Stub::Heartbeat, heartbeat(), {kGoodbye, kGoodbye});
}

// Calls under the current identity

void Session::throw_failure() const {
  const std::lock_guard lock(mutex_);
  if (failure_) throw *failure_;
}

void Session::check_leases() {
  const auto lost = leases.take_lost();
  if (lost.empty()) return;
  Error error(grpc::StatusCode::FAILED_PRECONDITION,
              std::to_string(lost.size()) + " shards of this worker are somebody else's now", Reason::kLeaseLost);
  error.leases = lost;
  throw error;
}

void Session::check() {
  throw_failure();
  check_leases();
  const std::lock_guard lock(mutex_);
  if (!settings_.elastic && current_ > identity_.generation) {
    Error error(grpc::StatusCode::FAILED_PRECONDITION,
                "generation " + std::to_string(identity_.generation) + " is over: it is " +
                    std::to_string(current_) + " now",
                Reason::kMembershipChanged);
    error.generation = current_;
    throw error;
  }
}

void Session::sync_generation() {
  check();
  const auto is_behind = [&] {
    const std::lock_guard lock(mutex_);
    return current_ > identity_.generation;
  };
  if (is_behind()) {
    catch_up();
    check();
  }
}

void Session::follow() {
  throw_failure();
  catch_up();
  check();
}

void Session::catch_up() {
  // Registering would revive an evicted incarnation unnoticed: ask first.
  if (is_member()) register_worker(true, nullptr);
}

void Session::adopt(std::uint64_t generation, std::uint32_t rank, std::uint32_t world_size) {
  const std::lock_guard lock(mutex_);
  identity_.generation = generation;
  identity_.rank = rank;
  identity_.world_size = world_size;
  step_time_ms_.reset();
  compute_times_ms_.clear();
  current_ = std::max(current_, generation);
  if (checkpoint_step_) checkpoint_step_ = 0;
}

void Session::mark_stale(std::uint64_t generation) {
  const std::lock_guard lock(mutex_);
  current_ = std::max({current_, generation, identity_.generation + 1});
}

// Returns if it makes sense to call again, or if the next check tells why not.
void Session::handle_call_error(const Error& error, bool settled) {
  if (error.reason == Reason::kMembershipChanged && settled) {
    mark_stale(error.generation);
  } else if (error.reason == Reason::kReplaced) {
    set_failure(error);
  } else if (error.reason == Reason::kNotRegistered || error.reason == Reason::kEvicted) {
    evicted(error);
  } else if (error.reason != Reason::kUnknownWorker || is_member()) {
    throw error;
  }
}

// Whether this incarnation still counts; if not, the next check tells.
bool Session::is_member() {
  try {
    const auto reply = link_.call<v1::HeartbeatRequest, v1::HeartbeatResponse>(&Stub::Heartbeat, heartbeat(),
                                                                               {kAttempt, settings_.patience});
    on_job_update(reply);
    return true;
  } catch (const Error& error) {
    if (error.reason == Reason::kReplaced) {
      set_failure(error);
    } else if (error.code == grpc::StatusCode::NOT_FOUND) {
      evicted(error);
    } else {
      throw;
    }
    return false;
  }
}

void Session::set_failure(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = error;
}

void Session::evicted(const Error& error) {
  // The failure first: whoever finds no lease left must also find why.
  set_failure(Error(grpc::StatusCode::FAILED_PRECONDITION, std::string("this worker was taken for dead: ") + error.what(),
                    Reason::kEvicted));
  leases.clear();
}

Identity Session::identity() const {
  const std::lock_guard lock(mutex_);
  return identity_;
}

std::map<std::string, std::string> Session::parameters() const {
  const std::lock_guard lock(mutex_);
  return parameters_;
}

bool Session::recover_first() const {
  const std::lock_guard lock(mutex_);
  return recover_first_;
}

void Session::set_status(v1::WorkerStatus status) {
  const std::lock_guard lock(mutex_);
  status_ = status;
}

void Session::set_busy(bool busy) {
  const std::lock_guard lock(mutex_);
  if (busy == busy_) return;
  const auto now = std::chrono::steady_clock::now();
  // What it was busy with is no part of the next step.
  if (!busy) stepped_at_ = std::min(now, stepped_at_ + (now - busy_since_));
  busy_ = busy;
  busy_since_ = now;
  if (busy) background_.wake();
}

void Session::set_step(std::uint64_t step, std::optional<double> compute_s) {
  constexpr std::size_t kept = 32;
  const std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (step_) step_time_ms_ = std::chrono::duration<double, std::milli>(now - stepped_at_).count();
  if (compute_s) {
    compute_times_ms_.push_back(static_cast<float>(*compute_s * 1000));
    if (compute_times_ms_.size() > kept) compute_times_ms_.pop_front();
  } else {
    compute_times_ms_.clear();
  }
  step_ = step;
  stepped_at_ = now;
  status_ = v1::WORKER_STATUS_TRAINING;
}

std::optional<std::uint64_t> Session::step() const {
  const std::lock_guard lock(mutex_);
  return step_;
}

// Registering

// `adopt_place`: take the place in the current generation; else only learn that there is one.
void Session::register_worker(bool adopt_place, Background* background) {
  const std::lock_guard one_at_a_time(registering_);
  const auto until = std::chrono::steady_clock::now() + settings_.patience;
  for (;;) {
    const v1::WorkerConfig found = registered(background);
    leases.forfeit(found.lost_leases());
    {
      const std::lock_guard lock(mutex_);
      identity_.job = found.job_id();
      identity_.incarnation = found.incarnation();
      parameters_ = {found.training_parameters().begin(), found.training_parameters().end()};
      recover_first_ = found.recover_first();
      interval_ = Milliseconds(found.heartbeat_interval_ms());
      leader_epoch_ = std::max(leader_epoch_, found.leader_epoch());
      heard_epoch_ = std::max(heard_epoch_, found.leader_epoch());
      current_ = std::max(current_, found.generation());
    }
    start_threads();
    if (!adopt_place) return;
    if (found.generation() != 0) return adopt(found.generation(), found.rank(), found.world_size());
    if (std::chrono::steady_clock::now() > until) {
      throw Error(grpc::StatusCode::DEADLINE_EXCEEDED, "there were not enough members in time");
    }
  }
}

v1::WorkerConfig Session::registered(Background* background) {
  const Identity me = identity();
  v1::WorkerInfo info;
  info.set_job_id(me.job);
  info.set_worker_id(me.worker_id);
  info.set_incarnation(me.incarnation);
  info.set_ip(settings_.ip);
  info.set_port(settings_.port);
  info.set_gpu_count(settings_.gpus);
  if (settings_.weight) info.set_weight(*settings_.weight);
  info.set_hostname(hostname());
  info.set_elastic(settings_.elastic);
  info.set_sdk_version("strata-cpp/1");
  for (const std::uint64_t lease_id : leases.ids()) info.add_held_leases(lease_id);
  const auto until = std::chrono::steady_clock::now() + settings_.patience;
  for (;;) {
    try {
      return link_.call<v1::WorkerInfo, v1::WorkerConfig>(&Stub::RegisterWorker, info, {kAttempt, settings_.patience},
                                                          background);
    } catch (const Error& error) {
      // Evicted while it waited for the others to come.
      if (error.code != grpc::StatusCode::NOT_FOUND || std::chrono::steady_clock::now() > until) throw;
    }
  }
}

// From the first registration on, also while there are too few members for a generation.
void Session::start_threads() {
  if (!beating_.joinable()) beating_ = std::thread(&Session::heartbeat_loop, this);
  if (!attaching_.joinable()) attaching_ = std::thread(&Session::presence_loop, this);
}

}  // namespace strata
