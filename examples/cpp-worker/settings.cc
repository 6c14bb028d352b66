#include "strata/settings.h"

#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>

namespace strata {
namespace {

const std::string kPrefix = "STRATA_WORKER_";

Error invalid(const std::string& message) { return Error(grpc::StatusCode::INVALID_ARGUMENT, message); }

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

bool yes_or_no(const std::string& text) {
  std::string lower;
  for (const char each : text) lower += static_cast<char>(std::tolower(static_cast<unsigned char>(each)));
  if (lower == "true" || lower == "yes" || lower == "on" || lower == "1") return true;
  if (lower == "false" || lower == "no" || lower == "off" || lower == "0") return false;
  throw invalid("is neither yes nor no");
}

double number(const std::string& text) {
  std::size_t used = 0;
  double found = -1;
  try {
    found = std::stod(text, &used);
  } catch (const std::logic_error&) {
    used = 0;
  }
  if (used == 0 || used != text.size() || !(found >= 0)) throw invalid("is not a number from 0 on");
  return found;
}

Tls& tls_of(Settings& settings) {
  if (!settings.tls) settings.tls.emplace();
  return *settings.tls;
}

using Set = std::function<void(Settings&, const std::string&)>;

const std::map<std::string, Set>& variables() {
  static const std::map<std::string, Set> known{
      {"ADDRESS", [](Settings& s, const std::string& v) { s.addresses = split_addresses(v); }},
      {"JOB", [](Settings& s, const std::string& v) { s.job = v; }},
      {"ID", [](Settings& s, const std::string& v) { s.worker_id = v; }},
      {"TOKEN", [](Settings& s, const std::string& v) { s.token = trimmed(v); }},
      {"TOKEN_FILE", [](Settings& s, const std::string& v) { s.token = trimmed(read_file(v)); }},
      {"TLS_CA", [](Settings& s, const std::string& v) { tls_of(s).ca = v; }},
      {"TLS_CERTIFICATE", [](Settings& s, const std::string& v) { tls_of(s).certificate = v; }},
      {"TLS_KEY", [](Settings& s, const std::string& v) { tls_of(s).key = v; }},
      {"TLS_SERVER_NAME", [](Settings& s, const std::string& v) { tls_of(s).server_name = v; }},
      {"IP", [](Settings& s, const std::string& v) { s.ip = v; }},
      {"PORT", [](Settings& s, const std::string& v) { s.port = static_cast<std::uint32_t>(number(v)); }},
      {"GPUS", [](Settings& s, const std::string& v) { s.gpus = static_cast<std::uint32_t>(number(v)); }},
      {"WEIGHT", [](Settings& s, const std::string& v) { s.weight = number(v); }},
      {"ELASTIC", [](Settings& s, const std::string& v) { s.elastic = yes_or_no(v); }},
      {"PATIENCE_S",
       [](Settings& s, const std::string& v) { s.patience = Milliseconds(static_cast<long>(number(v) * 1000)); }},
  };
  return known;
}

bool stays_here(const std::string& address) {
  if (address.rfind("unix:", 0) == 0) return true;
  const std::string host = address.substr(0, address.rfind(':'));
  return host == "localhost" || host == "[::1]" || host.rfind("127.", 0) == 0;
}

}  // namespace

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (!file || !(content << file.rdbuf())) throw invalid("cannot read " + path);
  return content.str();
}

std::vector<std::string> split_addresses(const std::string& text) {
  std::vector<std::string> found;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    if (!trimmed(part).empty()) found.push_back(trimmed(part));
  }
  return found;
}

void check_settings(const Settings& settings) {
  if (settings.addresses.empty()) throw invalid("the address of the coordinator is empty");
  if (settings.tls && settings.tls->ca.empty()) throw invalid("STRATA_WORKER_TLS_CA is not set");
  if (settings.token.empty() || settings.tls) return;
  for (const auto& address : settings.addresses) {
    if (!stays_here(address)) {
      throw invalid("the token would be sent to " + address + " in the clear: set STRATA_WORKER_TLS_CA");
    }
  }
}

Settings settings_from_environment() {
  Settings settings;
  if (std::getenv("STRATA_WORKER_TOKEN") && std::getenv("STRATA_WORKER_TOKEN_FILE")) {
    throw invalid("STRATA_WORKER_TOKEN and STRATA_WORKER_TOKEN_FILE are both set; only one of them can be meant");
  }
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string text = *each;
    if (text.rfind(kPrefix, 0) != 0) continue;
    const auto equals = text.find('=');
    const std::string name = text.substr(0, equals);
    const auto known = variables().find(name.substr(kPrefix.size()));
    if (known == variables().end()) throw invalid(name + ": unknown variable");
    try {
      known->second(settings, text.substr(equals + 1));
    } catch (const Error& error) {
      throw invalid(name + ": " + error.what());
    }
  }
  if (settings.worker_id.empty() && settings.token.empty()) {
    char host[256] = {};
    gethostname(host, sizeof host - 1);
    settings.worker_id = std::string(host) + "-" + std::to_string(getpid());
  }
  check_settings(settings);
  return settings;
}

}  // namespace strata
