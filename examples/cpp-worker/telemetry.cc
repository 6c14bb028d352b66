#include "telemetry.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

namespace strata {
namespace {

double cpu_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// Received and sent by the whole machine, in all interfaces.
std::pair<std::uint64_t, std::uint64_t> network() {
  std::ifstream lines("/proc/net/dev");
  std::uint64_t received = 0, sent = 0;
  for (std::string line; std::getline(lines, line, ':');) {
    std::uint64_t fields[9] = {};
    for (auto& field : fields) lines >> field;
    if (lines) {
      received += fields[0];
      sent += fields[8];
      lines.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
    }
  }
  return {received, sent};
}

}  // namespace

Telemetry::Telemetry() : measured_at_(std::chrono::steady_clock::now()), cpu_s_(cpu_seconds()) {
  std::tie(first_received_, first_sent_) = network();
}

v1::ResourceUsage Telemetry::usage() {
  v1::ResourceUsage found;
  const auto now = std::chrono::steady_clock::now();
  const double cpu_s = cpu_seconds();
  const double passed_s = std::chrono::duration<double>(now - measured_at_).count();
  if (passed_s > 0) found.set_cpu_percent(100 * (cpu_s - cpu_s_) / passed_s);
  measured_at_ = now;
  cpu_s_ = cpu_s;

  std::uint64_t all_pages = 0, pages = 0;
  if (std::ifstream("/proc/self/statm") >> all_pages >> pages) {
    found.set_memory_used_bytes(pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)));
  }
  std::ifstream counters("/proc/self/io");
  for (std::string name; counters >> name;) {
    std::uint64_t value = 0;
    counters >> value;
    if (name == "read_bytes:") found.set_disk_read_bytes(value);
    if (name == "write_bytes:") found.set_disk_write_bytes(value);
  }
  const auto [received, sent] = network();
  found.set_network_rx_bytes(std::max(received, first_received_) - first_received_);
  found.set_network_tx_bytes(std::max(sent, first_sent_) - first_sent_);
  return found;
}

}  // namespace strata
