// Calls to whichever coordinator leads: channels, who we are, and patience while nobody answers. One call is one message
// sent until it is answered: every message that this library sends may arrive twice.
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "strata/settings.h"
#include "strata/v1/coordinator.grpc.pb.h"

namespace strata {

// `attempt` is for one answer, without it the call may take for ever; `patience` is for all attempts after the first
// failure.
struct Deadline {
  std::optional<Milliseconds> attempt;
  Milliseconds patience;
};

// How another thread ends the calls and the waiting of a thread, or wakes it.
class Background {
 public:
  void stop();
  bool stopped() const;
  void wake();
  // Until the time is over, or stop(); `wakeful`: or wake(), also one from before.
  void wait(Milliseconds time, bool wakeful = false);
  void enter(grpc::ClientContext* context);
  void leave(grpc::ClientContext* context);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  bool woken_ = false;
  std::set<grpc::ClientContext*> running_;
};

class Link {
 public:
  template <class Request, class Reply>
  using Method = grpc::Status (v1::Coordinator::Stub::*)(grpc::ClientContext*, const Request&, Reply*);

  explicit Link(const Settings& settings);

  // The answer. While there is none, ask again; throws UNAVAILABLE when patience is over.
  template <class Request, class Reply>
  Reply call(Method<Request, Reply> method, const Request& request, const Deadline& within,
             Background* background = nullptr) {
    Reply reply;
    run([&](v1::Coordinator::Stub& stub, grpc::ClientContext* context) { return (stub.*method)(context, request, &reply); },
        within, background);
    return reply;
  }

  std::pair<std::size_t, v1::Coordinator::Stub*> stub();
  void identify(grpc::ClientContext* context);
  // In all later calls: the successor that a heartbeat brings before the token expires.
  void use_token(const std::string& token);
  // Others may have moved on already from the address that failed.
  void try_next(std::size_t failed);
  // How long to wait after a failed attempt, counted from 0: as told, or longer and longer, scattered so that no herd forms.
  Milliseconds pause(int attempt, std::optional<Milliseconds> retry_after = std::nullopt);

 private:
  using Attempt = std::function<grpc::Status(v1::Coordinator::Stub&, grpc::ClientContext*)>;
  void run(const Attempt& attempt, const Deadline& within, Background* background);
  void pause_before_next(Milliseconds time, Background* background);
  std::optional<Error> try_once(const Attempt& attempt, const Deadline& within, Background* background,
                                std::size_t* index);

  const Settings settings_;
  std::mutex mutex_;
  std::string token_;
  std::size_t index_ = 0;
  // One for each address, connected when it is first needed.
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  std::vector<std::unique_ptr<v1::Coordinator::Stub>> stubs_;
  std::mt19937_64 chance_;
};

// What a status and its trailing metadata say.
Error error_of(const grpc::Status& status, const grpc::ClientContext& context);

std::shared_ptr<grpc::Channel> connect(const std::string& address, const std::optional<Tls>& tls);

}  // namespace strata
