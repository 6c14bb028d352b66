#include "leases.h"

#include <algorithm>
#include <set>

namespace strata {

void Leases::take(const std::string& dataset_id, std::uint32_t epoch,
                  const google::protobuf::RepeatedPtrField<v1::Shard>& shards) {
  const std::lock_guard lock(mutex_);
  for (const auto& shard : shards) {
    if (find(shard.lease_id())) continue;
    held_.push_back({dataset_id, epoch, shard, shard.start_index(), shard.start_index(), false, std::nullopt, false});
  }
}

void Leases::restart(const std::string& dataset_id, std::uint32_t epoch) {
  const std::lock_guard lock(mutex_);
  for (auto& held : held_) {
    if (held.dataset_id == dataset_id && held.epoch == epoch) held.begun = false;
  }
}

std::optional<Held> Leases::next_unread(const std::string& dataset_id, std::uint32_t epoch) {
  const std::lock_guard lock(mutex_);
  for (auto& held : held_) {
    if (held.dataset_id != dataset_id || held.epoch != epoch || held.begun || held.is_over()) continue;
    held.begun = true;
    return held;
  }
  return std::nullopt;
}

void Leases::consume(std::uint64_t lease_id, std::optional<std::uint64_t> until) {
  const std::lock_guard lock(mutex_);
  Held* held = find(lease_id);
  if (!held || held->failure) return;
  const std::uint64_t at = until.value_or(held->shard.end_index());
  if (at < held->at || at > held->shard.end_index()) {
    throw Error(grpc::StatusCode::INVALID_ARGUMENT,
                std::to_string(at) + " is not a place in the rest of shard " + held->shard.shard_id());
  }
  held->at = at;
}

void Leases::fail(std::uint64_t lease_id, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (Held* held = find(lease_id)) held->failure = reason;
}

void Leases::return_unread() {
  const std::lock_guard lock(mutex_);
  for (auto& held : held_) held.returned = held.returned || !(held.begun || held.is_over());
}

std::vector<std::uint64_t> Leases::ids(const std::string& dataset_id) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> found;
  for (const auto& held : held_) {
    if (dataset_id.empty() || held.dataset_id == dataset_id) found.push_back(held.shard.lease_id());
  }
  return found;
}

std::vector<Sent> Leases::acks(const std::string& dataset_id) const {
  const std::lock_guard lock(mutex_);
  std::vector<Sent> found;
  for (const auto& held : held_) {
    if (capture_ || !held.is_news() || (!dataset_id.empty() && held.dataset_id != dataset_id)) continue;
    Sent sent{held.at, held.is_over(), {}};
    sent.message.set_lease_id(held.shard.lease_id());
    if (held.failure || held.at < held.shard.end_index()) sent.message.set_consumed_until(held.at);
    sent.message.set_returned(held.returned);
    if (held.failure) {
      sent.message.set_failed(true);
      sent.message.set_reason(*held.failure);
    }
    found.push_back(sent);
  }
  return found;
}

std::vector<std::pair<std::string, std::uint32_t>> Leases::unacked() const {
  const std::lock_guard lock(mutex_);
  std::set<std::pair<std::string, std::uint32_t>> found;
  for (const auto& held : held_) {
    if (!capture_ && held.is_news()) found.emplace(held.dataset_id, held.epoch);
  }
  return {found.begin(), found.end()};
}

std::vector<v1::LeaseProgress> Leases::progress() const {
  const std::lock_guard lock(mutex_);
  std::vector<v1::LeaseProgress> found;
  for (const auto& held : held_) {
    if (capture_ || held.at == held.shard.start_index()) continue;
    found.emplace_back();
    found.back().set_lease_id(held.shard.lease_id());
    found.back().set_consumed_until(held.at);
  }
  return found;
}

void Leases::confirm(const std::vector<Sent>& sent, const google::protobuf::RepeatedField<std::uint64_t>& rejected) {
  const std::lock_guard lock(mutex_);
  for (const std::uint64_t lease_id : rejected) lose(lease_id);
  for (const auto& each : sent) {
    Held* held = find(each.message.lease_id());
    if (!held) continue;
    held->acked = std::max(held->acked, each.at);
    if (each.over) held_.erase(held_.begin() + (held - held_.data()));
  }
}

Capture Leases::begin(const std::string& checkpoint_id, std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  if (capture_) {
    throw Error(grpc::StatusCode::FAILED_PRECONDITION, "a checkpoint is begun and not reported: report it, or give it up");
  }
  Capture capture{checkpoint_id, step, {}};
  for (const auto& held : held_) {
    v1::ConsumedLease consumed;
    consumed.set_dataset_id(held.dataset_id);
    consumed.set_epoch(held.epoch);
    consumed.set_lease_id(held.shard.lease_id());
    consumed.set_consumed_until(held.at);
    capture.consumed.push_back(consumed);
  }
  capture_ = checkpoint_id;
  return capture;
}

bool Leases::has_capture() const {
  const std::lock_guard lock(mutex_);
  return capture_.has_value();
}

void Leases::end(const Capture& capture) {
  const std::lock_guard lock(mutex_);
  if (capture_ == capture.checkpoint_id) capture_.reset();
}

void Leases::forfeit(const google::protobuf::RepeatedField<std::uint64_t>& leases) {
  const std::lock_guard lock(mutex_);
  for (const std::uint64_t lease_id : leases) {
    const Held* held = find(lease_id);
    if (held && !held->is_over()) lose(lease_id);
  }
}

std::vector<std::uint64_t> Leases::take_lost() {
  const std::lock_guard lock(mutex_);
  return std::exchange(lost_, {});
}

void Leases::clear() {
  const std::lock_guard lock(mutex_);
  held_.clear();
  lost_.clear();
  capture_.reset();
}

Held* Leases::find(std::uint64_t lease_id) {
  const auto found =
      std::find_if(held_.begin(), held_.end(), [&](const Held& held) { return held.shard.lease_id() == lease_id; });
  return found == held_.end() ? nullptr : &*found;
}

void Leases::lose(std::uint64_t lease_id) {
  const Held* held = find(lease_id);
  if (!held) return;
  if (held->begun) lost_.push_back(lease_id);
  held_.erase(held_.begin() + (held - held_.data()));
}

}  // namespace strata
