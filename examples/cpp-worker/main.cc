// Counts the words of text files, and of one field of JSONL files, with as many workers as are started, in any
// language: every line counts once per epoch.
//
//   strata coordinator --listen 127.0.0.1:7070 --database sqlite:coord.db &
//   examples/cpp-worker/build/strata-worker --out counts *.txt &
//   python examples/count_words/count_words.py --out counts *.txt
//
// A worker writes what it counted in a shard before it asks for the next one, under the name of the shard's lease. Words are
// what stands between ASCII white space. Where and who: STRATA_WORKER_ADDRESS, STRATA_WORKER_ID, … as in Python.
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "driver.h"
#include "strata/files.h"
#include "strata/worker.h"

namespace {

using Counts = std::map<std::string, std::uint64_t>;

struct Arguments {
  std::vector<std::string> files;
  std::string out;
  std::string field = "text";
  std::uint32_t epochs = 1;
  std::uint64_t shard_size = 100;
  bool conformance = false;
};

constexpr const char* kUsage =
    "usage: strata-worker --out FOLDER [--epochs N] [--shard-size N] [--field NAME] FILE...\n"
    "       strata-worker --conformance\n";

Arguments parse(int argc, char** argv) {
  Arguments given;
  const auto value = [&](int& index) -> std::string {
    if (++index == argc) throw std::invalid_argument(std::string(argv[index - 1]) + " needs a value");
    return argv[index];
  };
  for (int index = 1; index < argc; ++index) {
    const std::string name = argv[index];
    if (name == "--conformance") {
      given.conformance = true;
    } else if (name == "--out") {
      given.out = value(index);
    } else if (name == "--field") {
      given.field = value(index);
    } else if (name == "--epochs") {
      given.epochs = static_cast<std::uint32_t>(std::stoul(value(index)));
    } else if (name == "--shard-size") {
      given.shard_size = std::stoull(value(index));
    } else if (name.rfind("--", 0) == 0) {
      throw std::invalid_argument("unknown option " + name);
    } else {
      given.files.push_back(name);
    }
  }
  if (!given.conformance && (given.files.empty() || given.out.empty())) {
    throw std::invalid_argument("--out and files are needed");
  }
  return given;
}

bool is_jsonl(const std::string& path) {
  const std::string suffix = std::filesystem::path(path).extension();
  return suffix == ".jsonl" || suffix == ".ndjson";
}

Counts count(const strata::Shard& shard, const std::string& field) {
  Counts counts;
  for (const auto& slice : shard.slices) {
    strata::Shard part = shard;
    part.slices = {slice};
    strata::for_each_line(part, [&](const std::string& line) {
      std::istringstream words(is_jsonl(slice.path) ? nlohmann::json::parse(line).at(field).get<std::string>() : line);
      for (std::string word; words >> word;) ++counts[word];
    });
  }
  return counts;
}

// The epochs in turn. A loss is no failure: those shards are somebody else's, and what was written of them stands under a
// lease that does not count.
std::uint64_t count_all(strata::Worker& worker, const Arguments& given) {
  std::uint64_t total = 0;
  for (std::uint32_t epoch = 0; epoch < given.epochs && !worker.should_stop();) {
    try {
      worker.for_each_shard("corpus", epoch, [&](const strata::Shard& shard) {
        const Counts counts = count(shard, given.field);
        const auto name = std::to_string(shard.epoch) + "-" + std::to_string(shard.lease_id) + ".json";
        std::ofstream file(std::filesystem::path(given.out) / name);
        if (!(file << nlohmann::json(counts)) || !file.flush()) throw std::runtime_error("cannot write " + name);
        for (const auto& [word, times] : counts) total += times;
      });
      ++epoch;
    } catch (const strata::Error& error) {
      if (error.reason != strata::Reason::kLeaseLost) throw;
    }
  }
  return total;
}

int count_words(const Arguments& given) {
  std::filesystem::create_directories(given.out);
  strata::Settings settings = strata::settings_from_environment();
  settings.elastic = true;
  strata::Worker worker(settings);
  strata::Dataset corpus{"corpus", given.files};
  corpus.shard_size = given.shard_size;
  worker.dataset(corpus);
  const std::uint64_t total = count_all(worker, given);
  worker.leave();
  std::cout << "this worker counted " << total << " words\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments given;
  try {
    given = parse(argc, argv);
  } catch (const std::logic_error& error) {
    std::cerr << error.what() << "\n" << kUsage;
    return 2;
  }
  try {
    return given.conformance ? strata::drive(std::cin, std::cout) : count_words(given);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
