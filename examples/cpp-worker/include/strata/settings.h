// Who the worker is and where the coordinator is, from the same variables as the worker in Python.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "strata/errors.h"

namespace strata {

// PEM files; `certificate` and `key` are for a coordinator that asks its clients for one.
struct Tls {
  std::string ca;
  std::string certificate;
  std::string key;
  std::string server_name;  // the name in the coordinator's certificate, if it is not that of the address
};

struct Settings {
  std::vector<std::string> addresses{"127.0.0.1:7070"};  // one leads, the others stand by
  std::string job;        // empty: what the token says, else `default`
  std::string worker_id;  // a name that survives a restart; empty: what the token says
  std::string token;
  std::optional<Tls> tls;
  std::string ip;
  std::uint32_t port = 0;
  std::uint32_t gpus = 0;
  std::optional<double> weight;
  bool elastic = false;  // members may come and go: go on in the new generation instead of throwing
  Milliseconds patience{300'000};  // how long the coordinator may be unreachable, and members may be too few
};

// From STRATA_WORKER_ADDRESS, _JOB, _ID, _TOKEN or _TOKEN_FILE, _TLS_CA, … A secret never stands in an argument, which
// every user of the machine could read. A variable that is not known is refused: it would be a setting without effect.
Settings settings_from_environment();

// Addresses with commas between.
std::vector<std::string> split_addresses(const std::string& text);

// Throws INVALID_ARGUMENT if a token would leave this machine in the clear.
void check_settings(const Settings& settings);

std::string read_file(const std::string& path);

}  // namespace strata
