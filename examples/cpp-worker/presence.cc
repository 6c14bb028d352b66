// The threads of heartbeats and of the presence stream, and the commands that both bring.
#include <algorithm>

#include "session.h"

namespace strata {
namespace {

using Stub = v1::Coordinator::Stub;

constexpr Milliseconds kAgreement{1'000};  // between two looks at whether this worker is still a member

}  // namespace

void Session::heartbeat_loop() {
  int failures = 0;
  while (!background_.stopped()) {
    Milliseconds wait;
    try {
      send_heartbeat();
      failures = 0;
      const std::lock_guard lock(mutex_);
      wait = interval_;
    } catch (const Error&) {
      wait = link_.pause(failures++);
      const std::lock_guard lock(mutex_);
      if (failure_) return;
      wait = std::min(wait, interval_);
    }
    background_.wait(wait, true);
  }
}

v1::HeartbeatRequest Session::heartbeat() {
  v1::HeartbeatRequest request;
  const auto progress = leases.progress();
  const std::lock_guard lock(mutex_);
  // What an incarnation that failed made of its samples is nothing to count on.
  if (status_ != v1::WORKER_STATUS_ERROR) *request.mutable_progress() = {progress.begin(), progress.end()};
  *request.mutable_resources() = telemetry_.usage();
  request.set_job_id(identity_.job);
  request.set_worker_id(identity_.worker_id);
  request.set_incarnation(identity_.incarnation);
  request.set_generation(identity_.generation);
  // To the coordinator, a worker that does something else than training cannot hang.
  request.set_status(busy_ && status_ == v1::WORKER_STATUS_TRAINING ? v1::WORKER_STATUS_IDLE : status_);
  if (step_) request.set_step(*step_);
  if (step_time_ms_) request.set_step_time_ms(*step_time_ms_);
  for (const float time_ms : compute_times_ms_) request.add_compute_times_ms(time_ms);
  for (const std::uint64_t command_id : to_ack_) request.add_acked_command_ids(command_id);
  request.set_explicit_acks(true);
  if (checkpoint_step_) request.set_checkpoint_step(*checkpoint_step_);
  request.set_checkpoint_asked_step(asked_step_.value_or(0));
  request.set_checkpoint_stride(asked_stride_);
  return request;
}

void Session::send_heartbeat() {
  Milliseconds interval;
  bool joined = false;
  {
    const std::lock_guard lock(mutex_);
    interval = interval_;
    joined = identity_.generation != 0;
  }
  const auto request = heartbeat();
  v1::HeartbeatResponse reply;
  try {
    reply = link_.call<v1::HeartbeatRequest, v1::HeartbeatResponse>(
        &Stub::Heartbeat, request, {std::max(interval, Milliseconds(1'000)), interval}, &background_);
  } catch (const Error& error) {
    if (error.reason == Reason::kReplaced || error.code == grpc::StatusCode::UNAUTHENTICATED ||
        error.code == grpc::StatusCode::PERMISSION_DENIED || error.code == grpc::StatusCode::INVALID_ARGUMENT) {
      set_failure(error);
    } else if (joined && (error.code == grpc::StatusCode::NOT_FOUND || error.reason == Reason::kNotRegistered)) {
      evicted(error);
    }
    throw;
  }
  {
    const std::lock_guard lock(mutex_);
    for (const std::uint64_t command_id : request.acked_command_ids()) to_ack_.erase(command_id);
    interval_ = Milliseconds(reply.heartbeat_interval_ms());
  }
  if (!reply.token().empty()) link_.use_token(reply.token());
  on_job_update(reply);
  // A call that is under way may bring a lease that would not be named, and so go to somebody else: then later.
  const std::unique_lock lock(asking, std::try_to_lock);
  if (lock.owns_lock()) reattach(&background_);
}

void Session::reattach(Background* background) {
  {
    const std::lock_guard lock(mutex_);
    if (heard_epoch_ <= leader_epoch_) return;
  }
  register_worker(false, background);
}

void Session::presence_loop() {
  for (int failures = 0; !background_.stopped(); ++failures) {
    const auto began = std::chrono::steady_clock::now();
    open_presence();
    if (std::chrono::steady_clock::now() - began > std::chrono::seconds(1)) failures = 0;
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
    }
    // A broken stream is suspicion after half a second: open the next one before.
    background_.wait(std::min(Milliseconds(500), link_.pause(failures)));
  }
}

grpc::Status Session::open_presence() {
  const Identity me = identity();
  v1::AttachRequest request;
  request.set_job_id(me.job);
  request.set_worker_id(me.worker_id);
  request.set_incarnation(me.incarnation);
  grpc::ClientContext context;
  link_.identify(&context);
  const auto [index, stub] = link_.stub();
  background_.enter(&context);
  const auto stream = stub->Attach(&context, request);
  for (v1::AttachResponse news; stream->Read(&news);) {
    {
      const std::lock_guard lock(mutex_);
      attached_ = true;
    }
    attached_changed_.notify_all();
    on_job_update(news);
  }
  const grpc::Status status = stream->Finish();
  background_.leave(&context);
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    link_.try_next(index);
  } else {
    background_.wake();  // a heartbeat finds out what it means
  }
  return status;
}

template <class Update>
void Session::on_job_update(const Update& update) {
  const std::lock_guard lock(mutex_);
  current_ = std::max(current_, update.generation());
  const bool another_leads = update.leader_epoch() > heard_epoch_;
  heard_epoch_ = std::max(heard_epoch_, update.leader_epoch());
  if (update.checkpoint_step() != 0) agreed_ = {update.generation(), update.checkpoint_step()};
  for (const auto& command : update.commands()) receive(command);
  if (!to_ack_.empty() || another_leads) background_.wake();
  agreement_changed_.notify_all();
}

template void Session::on_job_update(const v1::HeartbeatResponse& update);
template void Session::on_job_update(const v1::AttachResponse& update);

bool Session::agree_on_checkpoint() {
  const auto until = std::chrono::steady_clock::now() + settings_.patience;
  const bool is_writing = leases.has_capture();
  std::unique_lock lock(mutex_);
  if (step_ && step_ != asked_step_) {
    // After a recovery the steps begin at an earlier one, at the same distance.
    if (asked_step_ && *asked_step_ < *step_) asked_stride_ = *step_ - *asked_step_;
    asked_step_ = step_;
  }
  if (!checkpoint_step_) {
    checkpoint_step_ = 0;
    background_.wake();
  }
  // The program did not write the checkpoint: the coordinator names another step.
  if (*checkpoint_step_ < step_.value_or(0) && !is_writing) checkpoint_step_ = 0;
  while (*checkpoint_step_ != 0 && checkpoint_step_ == step_) {
    if (failure_) throw *failure_;
    if (agreed_ == std::make_pair(identity_.generation, *step_)) return true;
    if (current_ > identity_.generation) {
      checkpoint_step_ = 0;
      lock.unlock();
      check();  // throws, unless the job is elastic
      return false;
    }
    if (std::chrono::steady_clock::now() > until) {
      throw Error(grpc::StatusCode::UNAVAILABLE, "whether the step is a checkpoint was not decided in time");
    }
    agreement_changed_.wait_for(lock, kAgreement);
  }
  return false;
}

void Session::checkpoint_reported(std::uint64_t step, const v1::CheckpointAck& ack) {
  const std::lock_guard lock(mutex_);
  if (checkpoint_step_ == step) checkpoint_step_ = 0;
  if (ack.drain()) {
    draining_ = true;
  } else if (ack.generation_ends()) {
    current_ = std::max(current_, identity_.generation + 1);
  }
}

// A command that is known was not acknowledged yet, or its ack got lost: it is carried out once.
void Session::receive(const v1::Command& message) {
  const auto same = [&](const Command& each) { return each.command_id == message.command_id(); };
  if (!seen_.insert(message.command_id()).second) {
    if (std::none_of(waiting_.begin(), waiting_.end(), same)) to_ack_.insert(message.command_id());
    return;
  }
  switch (message.kind()) {
    case v1::COMMAND_KIND_STOP:
      stopping_ = true;
      to_ack_.insert(message.command_id());
      break;
    case v1::COMMAND_KIND_DRAIN:
      // Else the answer to the report of a checkpoint says when.
      if (message.arguments().count("after") == 0) draining_ = true;
      to_ack_.insert(message.command_id());
      break;
    case v1::COMMAND_KIND_REBALANCE:  // the new generation comes with every heartbeat
      leases.return_unread();
      to_ack_.insert(message.command_id());
      break;
    case v1::COMMAND_KIND_CHECKPOINT_NOW:
      if (const auto named = message.arguments().find("step"); named != message.arguments().end()) {
        const std::uint64_t step = std::stoull(named->second);
        // One that named no step was sent before all programs agreed on steps.
        for (const auto& each : waiting_) {
          if (each.kind == CommandKind::kCheckpointNow) to_ack_.insert(each.command_id);
        }
        const auto is_now = [](const Command& each) { return each.kind == CommandKind::kCheckpointNow; };
        waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_now), waiting_.end());
        // Without the promise the ack is a refusal: the step is finished.
        if (checkpoint_step_) checkpoint_step_ = step_ && step > *step_ ? step : 0;
        to_ack_.insert(message.command_id());
        break;
      }
      [[fallthrough]];
    case v1::COMMAND_KIND_RELOAD:
      waiting_.push_back({message.command_id(), static_cast<CommandKind>(message.kind()),
                          {message.arguments().begin(), message.arguments().end()}, message.reason()});
      break;
    default:
      seen_.erase(message.command_id());  // of a later coordinator: not ours to acknowledge
  }
}

bool Session::stopping() const {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

bool Session::draining() const {
  const std::lock_guard lock(mutex_);
  return draining_;
}

bool Session::waits(CommandKind kind) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(waiting_.begin(), waiting_.end(), [&](const Command& each) { return each.kind == kind; });
}

std::vector<Command> Session::take_commands(std::optional<CommandKind> kind) {
  const std::lock_guard lock(mutex_);
  std::vector<Command> taken, left;
  for (const auto& each : waiting_) {
    (!kind || each.kind == *kind ? taken : left).push_back(each);
  }
  waiting_ = left;
  for (const auto& each : taken) to_ack_.insert(each.command_id);
  if (!taken.empty()) background_.wake();
  return taken;
}

}  // namespace strata
