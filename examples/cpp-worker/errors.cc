#include "strata/errors.h"

#include <array>

namespace strata {
namespace {

constexpr std::array<std::pair<Reason, const char*>, 11> kWords{{
    {Reason::kNone, ""},
    {Reason::kNotRegistered, "not-registered"},
    {Reason::kMembershipChanged, "stale-generation"},
    {Reason::kRecoverFirst, "recover-first"},
    {Reason::kReplaced, "stale-incarnation"},
    {Reason::kLeaseLost, "lease-lost"},
    {Reason::kEvicted, "evicted"},
    {Reason::kUnknownWorker, "unknown-worker"},
    {Reason::kUnknownDataset, "unknown-dataset"},
    {Reason::kUnknownJob, "unknown-job"},
    {Reason::kJobFinished, "job-finished"},
}};

// By number.
constexpr std::array<const char*, 17> kCodes{
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
};

}  // namespace

const char* word_of(Reason reason) {
  for (const auto& [each, word] : kWords) {
    if (each == reason) return word;
  }
  return "";
}

Reason reason_of(const std::string& word) {
  for (const auto& [reason, each] : kWords) {
    if (word == each) return reason;
  }
  return Reason::kNone;
}

const char* name_of(grpc::StatusCode code) {
  const auto index = static_cast<std::size_t>(code);
  return index < kCodes.size() ? kCodes[index] : "UNKNOWN";
}

}  // namespace strata
