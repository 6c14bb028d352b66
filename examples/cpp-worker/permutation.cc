#include "strata/permutation.h"

#include <algorithm>
#include <utility>

#include "strata/errors.h"

namespace strata {
namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr std::uint64_t kMaxItems = std::uint64_t{1} << 62;

std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

std::uint64_t fnv(const std::string& bytes) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001B3u;
  return hash;
}

Error invalid(const std::string& message) { return Error(grpc::StatusCode::INVALID_ARGUMENT, message); }

}  // namespace

std::uint64_t key_of(const std::string& dataset_id, std::uint64_t seed, std::uint64_t epoch) {
  std::uint64_t key = mix(fnv(dataset_id) + kGolden);
  key = mix((key ^ seed) + kGolden);
  return mix((key ^ epoch) + kGolden);
}

Order::Order(std::uint64_t n, std::uint64_t key) : n_(n) {
  if (n > kMaxItems) throw invalid("an order has at most 2^62 items");
  // With n at most 2^62 the shift stays below 64.
  while ((std::uint64_t{1} << (2 * half_)) < n) ++half_;
  for (int round = 0; round < kRounds; ++round) {
    round_keys_[round] = mix(key + static_cast<std::uint64_t>(round + 1) * kGolden);
  }
}

Order Order::identity(std::uint64_t n) {
  Order order(n, 0);
  order.shuffled_ = false;
  return order;
}

std::uint64_t Order::at(std::uint64_t position) const {
  if (position >= n_) throw invalid("there is no position " + std::to_string(position));
  if (!shuffled_) return position;
  std::uint64_t point = scramble(position);
  // Every cycle comes back to its start, which is below n: the walk ends.
  while (point >= n_) point = scramble(point);
  return point;
}

std::uint64_t Order::scramble(std::uint64_t point) const {
  const std::uint64_t low = (std::uint64_t{1} << half_) - 1;
  std::uint64_t left = point >> half_;
  std::uint64_t right = point & low;
  for (const std::uint64_t round_key : round_keys_) {
    left = std::exchange(right, (left + mix(round_key ^ right)) & low);
  }
  return (left << half_) | right;
}

Slice slice_of(std::uint64_t step, std::uint64_t rank, std::uint64_t world_size, std::uint64_t global_batch,
               std::uint64_t n) {
  if (n == 0 || global_batch == 0) throw invalid("no items or no batch make no steps");
  if (world_size == 0 || global_batch % world_size != 0) throw invalid("the world size does not divide the batch");
  if (rank >= world_size) throw invalid("there is no such rank");
  const std::uint64_t steps = n / global_batch + (n % global_batch != 0);
  const std::uint64_t first = step % steps * global_batch;
  const std::uint64_t size = std::min(n - first, global_batch);
  const std::uint64_t each = size / world_size;
  const std::uint64_t extra = size % world_size;
  const std::uint64_t start = first + rank * each + std::min(rank, extra);
  return {step / steps, start, start + each + (rank < extra)};
}

}  // namespace strata
