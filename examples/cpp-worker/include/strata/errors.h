// The one error of this library: a gRPC status, and what its trailing metadata says about it.
#pragma once

#include <grpcpp/support/status_code_enum.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace strata {

using Milliseconds = std::chrono::milliseconds;

// Why a worker cannot simply go on. The words are those of `strata-reason`, and one that only a worker itself can know.
enum class Reason {
  kNone,
  kNotRegistered,      // not-registered
  kMembershipChanged,  // stale-generation: recover() goes back with everybody, follow() goes on as it is
  kRecoverFirst,       // recover-first: the job has moved or went back without this worker; recover() says what to load
  kReplaced,           // stale-incarnation: another process of this worker id has joined; this one must end
  kEvicted,            // evicted: taken for dead; everything held is somebody else's
  kUnknownWorker,      // unknown-worker
  kUnknownDataset,     // unknown-dataset
  kUnknownJob,         // unknown-job
  kJobFinished,        // job-finished: nothing is left to do before an operator resets the job
  kLeaseLost,          // lease-lost, from this library: shards are somebody else's now; what was made of them must not count
};

const char* word_of(Reason reason);
Reason reason_of(const std::string& word);
const char* name_of(grpc::StatusCode code);

struct Error : std::runtime_error {
  Error(grpc::StatusCode code, const std::string& message, Reason reason = Reason::kNone)
      : std::runtime_error(message), code(code), reason(reason) {}

  grpc::StatusCode code;
  Reason reason;
  std::uint64_t generation = 0;  // with kMembershipChanged: the current one
  std::optional<Milliseconds> retry_after;
  std::vector<std::uint64_t> leases;  // with kLeaseLost
};

}  // namespace strata
