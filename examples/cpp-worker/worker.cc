#include "strata/worker.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <thread>
#include <utility>

#include "strata/files.h"
#include "leases.h"
#include "session.h"

namespace strata {
namespace {

using Stub = v1::Coordinator::Stub;

constexpr Milliseconds kWaitForShards{2'000};  // how long one call waits for a shard that others may give back
constexpr std::uint32_t kAcksOnly = 0;

// For every message that has these fields.
template <class Request>
Request from(const Identity& me) {
  Request request;
  request.set_job_id(me.job);
  request.set_worker_id(me.worker_id);
  request.set_incarnation(me.incarnation);
  return request;
}

Shard shard_of(const std::string& dataset_id, std::uint32_t epoch, const v1::Shard& shard, std::uint64_t at) {
  Shard found{shard.shard_id(), dataset_id, epoch, shard.lease_id(), at, shard.end_index(), {}};
  std::uint64_t skip = at - shard.start_index();
  for (const auto& slice : shard.slices()) {
    const std::uint64_t start = std::min(slice.start_index() + skip, slice.end_index());
    skip -= start - slice.start_index();
    if (start < slice.end_index()) found.slices.push_back({slice.path(), start, slice.end_index()});
  }
  return found;
}

v1::DatasetInfo message_of(const Dataset& dataset) {
  v1::DatasetInfo message;
  message.set_dataset_id(dataset.dataset_id);
  message.set_mode(dataset.global_batch_shards ? v1::DATASET_MODE_DETERMINISTIC : v1::DATASET_MODE_LEASED);
  std::uint64_t samples = 0;
  for (const auto& path : dataset.files) {
    auto* file = message.add_files();
    file->set_path(place_of(path));
    file->set_num_samples(count_lines(path));
    samples += file->num_samples();
  }
  message.set_num_samples(dataset.files.empty() ? dataset.samples : samples);
  message.set_shard_size(dataset.shard_size);
  message.set_seed(dataset.seed);
  message.set_shuffle(dataset.shuffle);
  message.set_buckets(dataset.buckets);
  message.set_global_batch_shards(dataset.global_batch_shards);
  return message;
}

Manifest manifest_of(const v1::CheckpointManifest& message) {
  Manifest manifest{message.checkpoint_id(), message.step(), message.generation(), {}};
  for (const auto& part : message.parts()) {
    manifest.parts.push_back({part.rank(), part.uri(), part.size_bytes(), part.digest()});
  }
  return manifest;
}

}  // namespace

// A dataset as this worker defined it, and what the coordinator said of it.
struct Worker::Known {
  v1::DatasetInfo message;
  std::uint64_t num_shards = 0;
};

Worker::Worker(const Settings& settings) : session_(std::make_unique<Session>(settings)) {
  session_->begin();
  if (!session_->recover_first()) return;
  start_ = recover("start");
  start_taken_ = !start_;
}

Worker::~Worker() {
  if (left_) return;
  try {
    session_->fail();
  } catch (const Error&) {
    // The coordinator will notice the silence.
  }
}

const std::optional<Manifest>& Worker::start() {
  start_taken_ = true;
  return start_;
}

void Worker::check_started() const {
  if (start_taken_) return;
  throw Error(grpc::StatusCode::FAILED_PRECONDITION,
              "the job starts from checkpoint " + start_->checkpoint_id +
                  ", and this program has not looked at it: load start() before the first shard");
}

void Worker::leave(const std::string& reason) {
  left_ = true;
  session_->leave(reason);
}

Identity Worker::identity() const { return session_->identity(); }
std::map<std::string, std::string> Worker::parameters() const { return session_->parameters(); }
bool Worker::should_stop() const { return session_->stopping() || session_->draining(); }
std::vector<Command> Worker::commands() { return session_->take_commands(); }

// Data

std::uint64_t Worker::dataset(const Dataset& dataset) {
  datasets_[dataset.dataset_id].message = message_of(dataset);
  confirm(dataset.dataset_id);
  return datasets_[dataset.dataset_id].num_shards;
}

void Worker::confirm(const std::string& dataset_id) {
  Known& known = datasets_[dataset_id];
  // Workers that start together define it while others still join.
  const auto ack = session_->call<v1::DatasetInfo, v1::DatasetAck>(
      &Stub::AckDataset,
      [&](const Identity& me) {
        auto request = from<v1::DatasetInfo>(me);
        request.MergeFrom(known.message);
        return request;
      },
      kAttempt, false);
  known.num_shards = ack.num_shards();
}

void Worker::for_each_shard(const std::string& dataset_id, std::uint32_t epoch,
                            const std::function<void(const Shard&)>& train) {
  restart(dataset_id, epoch);
  while (const auto shard = next_shard(dataset_id, epoch)) {
    train(*shard);
    done(*shard);
  }
}

void Worker::restart(const std::string& dataset_id, std::uint32_t epoch) { session_->leases.restart(dataset_id, epoch); }

std::optional<Shard> Worker::next_shard(const std::string& dataset_id, std::uint32_t epoch, std::uint32_t at_once) {
  check_started();
  for (;;) {
    session_->sync_generation();
    // Leaving acks what is consumed.
    if (session_->stopping()) return std::nullopt;
    if (const auto held = session_->leases.next_unread(dataset_id, epoch)) {
      session_->set_status(v1::WORKER_STATUS_TRAINING);
      return shard_of(dataset_id, epoch, held->shard, held->at);
    }
    if (session_->draining()) return std::nullopt;
    session_->set_status(v1::WORKER_STATUS_LOADING_DATA);
    if (ask(dataset_id, epoch, std::max(at_once, 1u), kWaitForShards)) return std::nullopt;
  }
}

// Acks, and asks for `count` shards or none; whether the epoch is over.
bool Worker::ask(const std::string& dataset_id, std::uint32_t epoch, std::uint32_t count, Milliseconds wait) {
  const std::lock_guard lock(session_->asking);
  session_->reattach();
  std::vector<Sent> sent;
  const auto reply = session_->call<v1::ShardRequest, v1::ShardAssignment>(
      &Stub::GetNextShards,
      [&](const Identity& me) {
        sent = session_->leases.acks(dataset_id);
        auto request = from<v1::ShardRequest>(me);
        request.set_dataset_id(dataset_id);
        request.set_epoch(epoch);
        request.set_generation(me.generation);
        request.set_explicit_acks(true);
        for (const auto& each : sent) *request.add_acks() = each.message;
        for (const std::uint64_t lease_id : session_->leases.ids(dataset_id)) request.add_held_leases(lease_id);
        request.set_max_shards(count);
        request.set_acks_only(count == kAcksOnly);
        request.set_wait_ms(static_cast<std::uint32_t>(wait.count()));
        return request;
      },
      wait + kAttempt);
  session_->leases.confirm(sent, reply.rejected_leases());
  session_->leases.take(dataset_id, epoch, reply.shards());
  return reply.end_of_epoch();
}

void Worker::done(const Shard& shard) { session_->leases.consume(shard.lease_id, std::nullopt); }
void Worker::progress(const Shard& shard, std::uint64_t until) { session_->leases.consume(shard.lease_id, until); }
void Worker::fail(const Shard& shard, const std::string& reason) { session_->leases.fail(shard.lease_id, reason); }

void Worker::flush() {
  for (const auto& [dataset_id, epoch] : session_->leases.unacked()) ask(dataset_id, epoch, kAcksOnly, Milliseconds(0));
  // A heartbeat may have learned of the eviction before us; then nothing is left to ack, and nothing counts.
  session_->throw_failure();
  session_->check_leases();
}

std::vector<Shard> Worker::step_shards(const std::string& dataset_id, std::uint64_t step) {
  check_started();
  const auto known = datasets_.find(dataset_id);
  if (known == datasets_.end() || known->second.message.global_batch_shards() == 0) {
    throw Error(grpc::StatusCode::FAILED_PRECONDITION,
                dataset_id + " is not known to be deterministic: call dataset() first");
  }
  const std::uint64_t batch = known->second.message.global_batch_shards();
  const std::uint64_t steps = (known->second.num_shards + batch - 1) / batch;
  const auto epoch = static_cast<std::uint32_t>(step / steps);
  const auto reply = session_->call<v1::ShardRequest, v1::ShardAssignment>(&Stub::GetNextShards, [&](const Identity& me) {
    auto request = from<v1::ShardRequest>(me);
    request.set_dataset_id(dataset_id);
    request.set_epoch(epoch);
    request.set_generation(me.generation);
    request.set_explicit_acks(true);
    request.set_step(step);
    return request;
  });
  std::vector<Shard> shards;
  for (const auto& each : reply.shards()) shards.push_back(shard_of(dataset_id, epoch, each, each.start_index()));
  return shards;
}

// Together

void Worker::barrier(const std::string& barrier_id, Milliseconds timeout, std::uint32_t expected) {
  flush();
  session_->set_status(v1::WORKER_STATUS_IDLE);
  for (;;) {
    const auto reply = session_->call<v1::BarrierRequest, v1::BarrierResponse>(
        &Stub::Barrier,
        [&](const Identity& me) {
          auto request = from<v1::BarrierRequest>(me);
          request.set_barrier_id(barrier_id);
          request.set_step(session_->step().value_or(0));
          request.set_expected_participants(expected);
          request.set_generation(me.generation);
          request.set_timeout_ms(static_cast<std::uint32_t>(timeout.count()));
          return request;
        },
        std::nullopt);
    if (reply.released()) return;
    session_->mark_stale(reply.generation());
  }
}

void Worker::step(std::uint64_t number, std::optional<double> compute_s) {
  session_->set_step(number, compute_s);
  session_->check();
}

void Worker::busy(bool on) { session_->set_busy(on); }

// Checkpoints

bool Worker::checkpoint_due() {
  if (session_->agree_on_checkpoint()) return true;
  // A lone worker has to agree with nobody.
  return session_->identity().world_size == 1 && session_->waits(CommandKind::kCheckpointNow);
}

std::shared_ptr<const Capture> Worker::begin_checkpoint(std::uint64_t step) {
  session_->check();
  session_->take_commands(CommandKind::kCheckpointNow);
  auto capture = std::make_shared<const Capture>(session_->leases.begin(random_name("checkpoint"), step));
  session_->set_status(v1::WORKER_STATUS_CHECKPOINTING);
  return capture;
}

Reported Worker::report_checkpoint(const Capture& capture, const std::string& path) {
  std::error_code failed;
  const auto size = std::filesystem::file_size(path, failed);
  if (failed) throw Error(grpc::StatusCode::INVALID_ARGUMENT, "cannot read the part " + path + ": " + failed.message());
  return report_checkpoint(capture, place_of(path), size, digest_of(path));
}

Reported Worker::report_checkpoint(const Capture& capture, const std::string& uri, std::uint64_t size,
                                   const std::string& digest) {
  const auto ack = session_->call<v1::CheckpointInfo, v1::CheckpointAck>(&Stub::ReportCheckpoint, [&](const Identity& me) {
    auto request = from<v1::CheckpointInfo>(me);
    request.set_checkpoint_id(capture.checkpoint_id);
    request.set_path(uri);
    request.set_size_bytes(size);
    request.set_digest(digest);
    request.set_generation(me.generation);
    request.set_step(capture.step);
    request.set_rank(me.rank);
    request.set_world_size(me.world_size);
    for (const auto& each : capture.consumed) *request.add_consumed() = each;
    request.set_explicit_consumed(true);
    return request;
  });
  session_->leases.end(capture);
  session_->set_status(v1::WORKER_STATUS_TRAINING);
  session_->checkpoint_reported(capture.step, ack);
  return {ack.step(),
          ack.committed(),
          {ack.missing_ranks().begin(), ack.missing_ranks().end()},
          {ack.tombstones().begin(), ack.tombstones().end()},
          ack.drain()};
}

void Worker::give_up_checkpoint(const Capture& capture) { session_->leases.end(capture); }

std::optional<Manifest> Worker::recover(const std::string& reason, const std::string& bad_checkpoint_id) {
  session_->set_status(v1::WORKER_STATUS_RECOVERING);
  session_->leases.clear();
  const std::uint64_t observed = identity().generation;
  v1::RecoveryResponse reply;
  for (;;) {
    reply = session_->call<v1::RecoveryRequest, v1::RecoveryResponse>(
        &Stub::RequestRecovery,
        [&](const Identity& me) {
          auto request = from<v1::RecoveryRequest>(me);
          request.set_observed_generation(observed);
          request.set_reason(reason);
          request.set_bad_checkpoint_id(bad_checkpoint_id);
          return request;
        },
        kAttempt, false);
    if (reply.retry_after_ms() == 0) break;
    std::this_thread::sleep_for(Milliseconds(reply.retry_after_ms()));
  }
  session_->adopt(reply.generation(), reply.rank(), reply.world_size());
  start_taken_ = true;
  for (const auto& [dataset_id, known] : datasets_) confirm(dataset_id);
  return reply.has_checkpoint() ? std::optional(manifest_of(reply.checkpoint())) : std::nullopt;
}

void Worker::follow() { session_->follow(); }

}  // namespace strata
