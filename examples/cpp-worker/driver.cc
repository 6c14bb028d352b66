#include "driver.h"

#include <google/protobuf/util/json_util.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "strata/files.h"
#include "leases.h"
#include "link.h"
#include "strata/permutation.h"
#include "strata/worker.h"

namespace strata {
namespace {

using nlohmann::json;
using Stub = v1::Coordinator::Stub;

// JSON numbers are exact to 2^53 only in some languages: whatever may be larger travels as text.
std::uint64_t big(const json& value) { return std::stoull(value.get<std::string>()); }

std::string hex(std::uint64_t value) {
  char digits[19];
  std::snprintf(digits, sizeof digits, "0x%016llx", static_cast<unsigned long long>(value));
  return digits;
}

json shown(const Error& error) {
  json found{{"code", name_of(error.code)}, {"reason", word_of(error.reason)}, {"message", error.what()}};
  if (error.generation) found["generation"] = error.generation;
  if (error.retry_after) found["retry_after_ms"] = error.retry_after->count();
  for (const std::uint64_t lease_id : error.leases) found["leases"].push_back(std::to_string(lease_id));
  return found;
}

json shown(const Shard& shard) {
  json slices = json::array();
  for (const auto& slice : shard.slices) slices.push_back({slice.path, slice.start, slice.end});
  return {{"shard_id", shard.shard_id}, {"epoch", shard.epoch}, {"lease_id", std::to_string(shard.lease_id)},
          {"start", shard.start},       {"end", shard.end},     {"slices", slices}};
}

json shown(const Manifest& manifest) {
  json parts = json::array();
  for (const auto& part : manifest.parts) {
    parts.push_back({{"rank", part.rank}, {"uri", part.uri}, {"size", part.size}, {"digest", part.digest}});
  }
  return {{"checkpoint_id", manifest.checkpoint_id}, {"step", manifest.step}, {"generation", manifest.generation},
          {"parts", parts}};
}

// One message exactly as it is given, without any of the library's care: how the contract itself is tested.
using Raw = std::function<std::string(Stub&, grpc::ClientContext*, const std::string&)>;

template <class Request, class Reply>
Raw unary(Link::Method<Request, Reply> method) {
  return [method](Stub& stub, grpc::ClientContext* context, const std::string& given) {
    Request request;
    const auto read = google::protobuf::util::JsonStringToMessage(given, &request);
    if (!read.ok()) throw Error(grpc::StatusCode::INVALID_ARGUMENT, read.ToString());
    Reply reply;
    const grpc::Status status = (stub.*method)(context, request, &reply);
    if (!status.ok()) throw error_of(status, *context);
    google::protobuf::util::JsonPrintOptions options;
    options.preserve_proto_field_names = true;
    std::string answer;
    const auto written = google::protobuf::util::MessageToJsonString(reply, &answer, options);
    if (!written.ok()) throw Error(grpc::StatusCode::INTERNAL, written.ToString());
    return answer;
  };
}

const std::map<std::string, Raw>& methods() {
  static const std::map<std::string, Raw> known{
      {"RegisterWorker", unary(&Stub::RegisterWorker)},     {"Heartbeat", unary(&Stub::Heartbeat)},
      {"GetNextShards", unary(&Stub::GetNextShards)},       {"AckDataset", unary(&Stub::AckDataset)},
      {"Barrier", unary(&Stub::Barrier)},                   {"ReportCheckpoint", unary(&Stub::ReportCheckpoint)},
      {"RequestRecovery", unary(&Stub::RequestRecovery)},   {"HeartbeatBatch", unary(&Stub::HeartbeatBatch)},
      {"LeaveWorker", unary(&Stub::LeaveWorker)},
  };
  return known;
}

json call(const json& given) {
  const Settings settings = settings_from_environment();
  const auto method = methods().find(given.at("method"));
  if (method == methods().end()) throw Error(grpc::StatusCode::UNIMPLEMENTED, "no such method");
  const auto stub = v1::Coordinator::NewStub(connect(settings.addresses.front(), settings.tls));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  if (!settings.token.empty()) context.AddMetadata("authorization", "Bearer " + settings.token);
  const json metadata = given.value("metadata", json::object());
  for (const auto& [key, value] : metadata.items()) context.AddMetadata(key, value);
  return json::parse(method->second(*stub, &context, given.at("request").dump()));
}

json order(const json& given) {
  const std::uint64_t n = given.at("n");
  const std::string dataset_id = given.at("dataset_id");
  const std::uint64_t key = key_of(dataset_id, big(given.at("seed")), big(given.at("epoch")));
  const Order found = given.value("shuffle", true) ? Order(n, key) : Order::identity(n);
  json items = json::array(), round_keys = json::array();
  for (const auto& position : given.at("positions")) items.push_back(found.at(position));
  for (const std::uint64_t each : found.round_keys()) round_keys.push_back(hex(each));
  return {{"key", hex(key)}, {"half", found.half()}, {"round_keys", round_keys}, {"items", items}};
}

json slice(const json& given) {
  const Slice found =
      slice_of(given.at("step"), given.at("rank"), given.at("world_size"), given.at("global_batch"), given.at("n"));
  return {{"epoch", found.epoch}, {"start", found.start}, {"stop", found.stop}};
}

// The worker of this process, and what the commands refer to by id.
class Driver {
 public:
  json answer(const json& given) {
    const std::string name = given.at("do");
    const auto command = commands_.find(name);
    if (command == commands_.end()) throw Error(grpc::StatusCode::UNIMPLEMENTED, "no such command: " + name);
    return command->second(given);
  }

 private:
  using Run = std::function<json(const json&)>;

  Worker& worker() {
    if (!worker_) throw Error(grpc::StatusCode::FAILED_PRECONDITION, "the worker is not joined");
    return *worker_;
  }

  const Shard& shard(const json& given) { return shards_.at(given.at("lease_id")); }

  json identity() {
    const Identity me = worker().identity();
    return {{"job", me.job},   {"worker_id", me.worker_id},   {"incarnation", me.incarnation}, {"generation", me.generation},
            {"rank", me.rank}, {"world_size", me.world_size}, {"parameters", worker().parameters()}};
  }

  json join(const json& given) {
    Settings settings = settings_from_environment();
    settings.job = given.value("job", settings.job);
    settings.worker_id = given.value("worker_id", settings.worker_id);
    settings.elastic = given.value("elastic", settings.elastic);
    worker_ = std::make_unique<Worker>(settings);
    json answer = identity();
    answer["start"] = worker_->start() ? shown(*worker_->start()) : json(nullptr);
    return answer;
  }

  json state(const json&) {
    json found = identity();
    found["should_stop"] = worker().should_stop();
    return found;
  }

  json dataset(const json& given) {
    Dataset dataset;
    dataset.dataset_id = given.at("dataset_id");
    dataset.files = given.value("files", dataset.files);
    dataset.samples = given.value("samples", dataset.samples);
    dataset.shard_size = given.value("shard_size", dataset.shard_size);
    if (given.contains("seed")) dataset.seed = big(given.at("seed"));
    dataset.shuffle = given.value("shuffle", dataset.shuffle);
    dataset.global_batch_shards = given.value("global_batch_shards", dataset.global_batch_shards);
    return {{"num_shards", worker().dataset(dataset)}};
  }

  json next_shard(const json& given) {
    const auto found = worker().next_shard(given.at("dataset_id"), given.at("epoch"), given.value("at_once", 1u));
    if (!found) return {{"shard", nullptr}};
    shards_.insert_or_assign(std::to_string(found->lease_id), *found);
    return {{"shard", shown(*found)}};
  }

  json step_shards(const json& given) {
    json found = json::array();
    for (const auto& each : worker().step_shards(given.at("dataset_id"), given.at("step"))) found.push_back(shown(each));
    return {{"shards", found}};
  }

  json report_checkpoint(const json& given) {
    if (!capture_) throw Error(grpc::StatusCode::FAILED_PRECONDITION, "no checkpoint is begun");
    const Reported found = worker().report_checkpoint(*capture_, given.at("path").get<std::string>());
    return {{"step", found.step},
            {"committed", found.committed},
            {"missing_ranks", found.missing_ranks},
            {"tombstones", found.tombstones},
            {"drained", found.drained}};
  }

  json recover(const json& given) {
    const auto found = worker().recover(given.value("reason", ""), given.value("bad_checkpoint_id", ""));
    json answer = identity();
    answer["checkpoint"] = found ? shown(*found) : json(nullptr);
    return answer;
  }

  json take_commands(const json&) {
    json found = json::array();
    for (const auto& each : worker().commands()) {
      found.push_back({{"kind", static_cast<int>(each.kind)}, {"arguments", each.arguments}, {"reason", each.reason}});
    }
    return {{"commands", found}};
  }

  template <class Act>
  static Run does(Act act) {
    return [act](const json& given) {
      act(given);
      return json::object();
    };
  }

  std::unique_ptr<Worker> worker_;
  std::map<std::string, Shard> shards_;
  std::shared_ptr<const Capture> capture_;

  const std::map<std::string, Run> commands_{
      {"join", [this](const json& given) { return join(given); }},
      {"state", [this](const json& given) { return state(given); }},
      {"dataset", [this](const json& given) { return dataset(given); }},
      {"next_shard", [this](const json& given) { return next_shard(given); }},
      {"read", [this](const json& given) { return json{{"samples", lines_of(shard(given))}}; }},
      {"progress", does([this](const json& given) { worker().progress(shard(given), given.at("until")); })},
      {"done", does([this](const json& given) { worker().done(shard(given)); })},
      {"fail", does([this](const json& given) { worker().fail(shard(given), given.at("reason")); })},
      {"flush", does([this](const json&) { worker().flush(); })},
      {"step_shards", [this](const json& given) { return step_shards(given); }},
      {"barrier", does([this](const json& given) {
         worker().barrier(given.at("barrier_id"), Milliseconds(given.value("timeout_ms", 0)), given.value("expected", 0u));
       })},
      {"step", does([this](const json& given) {
         std::optional<double> compute_s;
         if (given.contains("compute_s")) compute_s = given.at("compute_s").get<double>();
         worker().step(given.at("number"), compute_s);
       })},
      {"busy", does([this](const json& given) { worker().busy(given.at("on")); })},
      {"checkpoint_due", [this](const json&) { return json{{"due", worker().checkpoint_due()}}; }},
      {"begin_checkpoint", does([this](const json& given) { capture_ = worker().begin_checkpoint(given.at("step")); })},
      {"report_checkpoint", [this](const json& given) { return report_checkpoint(given); }},
      {"recover", [this](const json& given) { return recover(given); }},
      {"follow", [this](const json&) { return worker().follow(), identity(); }},
      {"commands", [this](const json& given) { return take_commands(given); }},
      {"leave", does([this](const json&) {
         // Whatever comes of it, this incarnation is over.
         const auto leaving = std::move(worker_);
         if (!leaving) throw Error(grpc::StatusCode::FAILED_PRECONDITION, "the worker is not joined");
         leaving->leave();
       })},
      {"crash", does([this](const json&) { worker_.reset(); })},
      {"order", order},
      {"slice", slice},
      {"call", call},
      {"die", [](const json&) -> json { _exit(1); }},
  };
};

}  // namespace

int drive(std::istream& commands, std::ostream& answers) {
  Driver driver;
  for (std::string line; std::getline(commands, line);) {
    json answer;
    try {
      answer = {{"ok", driver.answer(json::parse(line))}};
    } catch (const Error& error) {
      answer = {{"error", shown(error)}};
    } catch (const std::exception& error) {
      answer = {{"error", {{"code", "INTERNAL"}, {"reason", ""}, {"message", error.what()}}}};
    }
    answers << answer.dump() << std::endl;
  }
  return 0;
}

}  // namespace strata
