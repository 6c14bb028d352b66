// The canonical order of a dataset and the slices of the DETERMINISTIC mode: pure arithmetic on 64 bits, the same in every
// language. Specified in src/strata/coord/core/permutation.py; docs/vectors/permutation.json says whether this is right.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace strata {

constexpr int kRounds = 10;

std::uint64_t key_of(const std::string& dataset_id, std::uint64_t seed, std::uint64_t epoch);

// A bijection of the positions 0 … n-1 onto the items 0 … n-1.
class Order {
 public:
  Order(std::uint64_t n, std::uint64_t key);
  static Order identity(std::uint64_t n);  // of a dataset that is not shuffled

  std::uint64_t at(std::uint64_t position) const;
  int half() const { return half_; }
  const std::array<std::uint64_t, kRounds>& round_keys() const { return round_keys_; }

 private:
  std::uint64_t scramble(std::uint64_t point) const;

  std::uint64_t n_;
  int half_ = 1;
  bool shuffled_ = true;
  std::array<std::uint64_t, kRounds> round_keys_{};
};

// Positions of one epoch's order, from `start` up to, without, `stop`.
struct Slice {
  std::uint64_t epoch;
  std::uint64_t start;
  std::uint64_t stop;
};

// What one rank reads at one step; `step` counts on through all epochs.
Slice slice_of(std::uint64_t step, std::uint64_t rank, std::uint64_t world_size, std::uint64_t global_batch,
               std::uint64_t n);

}  // namespace strata
