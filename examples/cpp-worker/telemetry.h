// What this process uses, for heartbeats; from /proc, so on Linux only. GPUs are left to whoever has them.
#pragma once

#include <chrono>
#include <cstdint>

#include "strata/v1/coordinator.pb.h"

namespace strata {

class Telemetry {
 public:
  Telemetry();
  v1::ResourceUsage usage();

 private:
  std::chrono::steady_clock::time_point measured_at_;
  double cpu_s_;
  std::uint64_t first_received_ = 0;
  std::uint64_t first_sent_ = 0;
};

}  // namespace strata
