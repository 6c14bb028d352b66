#include "link.h"

#include <algorithm>
#include <cmath>
#include <thread>

namespace strata {
namespace {

constexpr double kFirstPauseMs = 50;
constexpr double kLongestPauseMs = 2'000;

std::string trailing(const grpc::ClientContext& context, const std::string& key) {
  const auto& said = context.GetServerTrailingMetadata();
  const auto found = said.find(key);
  return found == said.end() ? "" : std::string(found->second.data(), found->second.size());
}

bool may_pass(const Error& error, const Deadline& within) {
  switch (error.code) {
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      // Ours, if the call had one; a barrier has none, and its timeout is an answer.
      return within.attempt.has_value();
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::CANCELLED:  // a coordinator that ends cancels the calls it did not finish
      return true;
    default:
      return false;
  }
}

}  // namespace

void Background::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  for (auto* context : running_) context->TryCancel();
  changed_.notify_all();
}

bool Background::stopped() const {
  const std::lock_guard lock(mutex_);
  return stopped_;
}

void Background::wake() {
  const std::lock_guard lock(mutex_);
  woken_ = true;
  changed_.notify_all();
}

void Background::wait(Milliseconds time, bool wakeful) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, time, [&] { return stopped_ || (wakeful && woken_); });
  if (wakeful) woken_ = false;
}

void Background::enter(grpc::ClientContext* context) {
  const std::lock_guard lock(mutex_);
  running_.insert(context);
  if (stopped_) context->TryCancel();
}

void Background::leave(grpc::ClientContext* context) {
  const std::lock_guard lock(mutex_);
  running_.erase(context);
}

Link::Link(const Settings& settings)
    : settings_(settings),
      channels_(settings.addresses.size()),
      stubs_(settings.addresses.size()),
      chance_(std::random_device{}()) {
  check_settings(settings);
  token_ = settings.token;
}

std::pair<std::size_t, v1::Coordinator::Stub*> Link::stub() {
  const std::lock_guard lock(mutex_);
  if (!stubs_[index_]) {
    channels_[index_] = connect(settings_.addresses[index_], settings_.tls);
    stubs_[index_] = v1::Coordinator::NewStub(channels_[index_]);
  }
  return {index_, stubs_[index_].get()};
}

void Link::identify(grpc::ClientContext* context) {
  if (!settings_.job.empty()) context->AddMetadata("strata-job", settings_.job);
  if (!settings_.worker_id.empty()) context->AddMetadata("strata-worker", settings_.worker_id);
  const std::lock_guard lock(mutex_);
  if (!token_.empty()) context->AddMetadata("authorization", "Bearer " + token_);
}

void Link::use_token(const std::string& token) {
  const std::lock_guard lock(mutex_);
  token_ = token;
}

void Link::try_next(std::size_t failed) {
  const std::lock_guard lock(mutex_);
  if (failed == index_) index_ = (failed + 1) % stubs_.size();
}

Milliseconds Link::pause(int attempt, std::optional<Milliseconds> retry_after) {
  const std::lock_guard lock(mutex_);
  const double chance = std::uniform_real_distribution<>(0, 0.5)(chance_);
  const double longest = std::min(kLongestPauseMs, std::ldexp(kFirstPauseMs, std::min(attempt, 16)));
  const double pause = retry_after ? static_cast<double>(retry_after->count()) * (1 + chance) : longest * (0.5 + chance);
  return Milliseconds(static_cast<long>(std::ceil(pause)));
}

std::optional<Error> Link::try_once(const Attempt& attempt, const Deadline& within, Background* background,
                                    std::size_t* index) {
  grpc::ClientContext context;
  identify(&context);
  if (within.attempt) context.set_deadline(std::chrono::system_clock::now() + *within.attempt);
  const auto [used, stub] = this->stub();
  *index = used;
  if (background) background->enter(&context);
  const grpc::Status status = attempt(*stub, &context);
  if (background) background->leave(&context);
  return status.ok() ? std::nullopt : std::optional(error_of(status, context));
}

void Link::run(const Attempt& attempt, const Deadline& within, Background* background) {
  std::optional<std::chrono::steady_clock::time_point> until;
  for (int failures = 0;; ++failures) {
    std::size_t index = 0;
    const auto error = try_once(attempt, within, background, &index);
    if (!error) return;
    if (!may_pass(*error, within) || (background && background->stopped())) throw *error;
    const auto now = std::chrono::steady_clock::now();
    if (!until) until = now + within.patience;
    const Milliseconds wait = pause(failures, error->retry_after);
    if (now + wait > *until) {
      throw Error(grpc::StatusCode::UNAVAILABLE, std::string("no answer of the coordinator: ") + error->what());
    }
    try_next(index);
    pause_before_next(wait, background);
  }
}

// A connection makes progress only while somebody waits for something of it: a thread that just sleeps between two attempts
// never sees it come about.
void Link::pause_before_next(Milliseconds time, Background* background) {
  const auto until = std::chrono::steady_clock::now() + time;
  const std::size_t index = stub().first;
  channels_[index]->WaitForConnected(std::chrono::system_clock::now() + time);
  const auto left = std::chrono::duration_cast<Milliseconds>(until - std::chrono::steady_clock::now());
  if (left > Milliseconds(0)) background ? background->wait(left) : std::this_thread::sleep_for(left);
}

Error error_of(const grpc::Status& status, const grpc::ClientContext& context) {
  Error error(status.error_code(), status.error_message(), reason_of(trailing(context, "strata-reason")));
  const std::string generation = trailing(context, "strata-generation");
  if (!generation.empty()) error.generation = std::stoull(generation);
  const std::string retry_after = trailing(context, "strata-retry-after-ms");
  if (!retry_after.empty()) error.retry_after = Milliseconds(std::stol(retry_after));
  return error;
}

std::shared_ptr<grpc::Channel> connect(const std::string& address, const std::optional<Tls>& tls) {
  grpc::ChannelArguments options;
  // Two workers in one process must not share a connection whose break counts as a death.
  options.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  options.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  options.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  // In spite of its name, how long one attempt to connect may take, TLS included.
  options.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);
  // A coordinator whose machine vanished closes nothing: only unanswered pings tell.
  options.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 5'000);
  options.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 15'000);
  options.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  options.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  options.SetMaxReceiveMessageSize(64 << 20);
  if (!tls) return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), options);
  grpc::SslCredentialsOptions files;
  files.pem_root_certs = read_file(tls->ca);
  if (!tls->key.empty()) files.pem_private_key = read_file(tls->key);
  if (!tls->certificate.empty()) files.pem_cert_chain = read_file(tls->certificate);
  if (!tls->server_name.empty()) options.SetSslTargetNameOverride(tls->server_name);
  return grpc::CreateCustomChannel(address, grpc::SslCredentials(files), options);
}

}  // namespace strata
