#include "strata/files.h"

#include <openssl/evp.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>

namespace strata {
namespace {

Error invalid(const std::string& message) { return Error(grpc::StatusCode::INVALID_ARGUMENT, message); }

std::ifstream open_file(const std::string& path) {
  if (path.find("://") != std::string::npos && path.rfind("file://", 0) != 0) {
    throw Error(grpc::StatusCode::UNIMPLEMENTED, "cannot read " + path + ": only local files");
  }
  const std::string local = path.rfind("file://", 0) == 0 ? path.substr(7) : path;
  std::ifstream file(local, std::ios::binary);
  if (!file) throw invalid("cannot read " + local);
  return file;
}

void for_each_block(const std::string& path, const std::function<void(const char*, std::size_t)>& take) {
  std::ifstream file = open_file(path);
  std::vector<char> block(1 << 20);
  while (file.read(block.data(), static_cast<std::streamsize>(block.size())), file.gcount() > 0) {
    take(block.data(), static_cast<std::size_t>(file.gcount()));
  }
  if (file.bad()) throw invalid("cannot read " + path);
}

}  // namespace

std::uint64_t count_lines(const std::string& path) {
  std::uint64_t lines = 0;
  char last = '\n';
  for_each_block(path, [&](const char* bytes, std::size_t size) {
    for (std::size_t index = 0; index < size; ++index) lines += bytes[index] == '\n';
    last = bytes[size - 1];
  });
  return lines + (last != '\n');
}

void for_each_line(const Shard& shard, const std::function<void(const std::string&)>& take) {
  for (const auto& slice : shard.slices) {
    std::ifstream file = open_file(slice.path);
    std::string line;
    for (std::uint64_t index = 0; index < slice.end; ++index) {
      if (!std::getline(file, line)) {
        throw Error(grpc::StatusCode::DATA_LOSS, slice.path + " has fewer samples than were registered");
      }
      if (index >= slice.start) take(line);
    }
  }
}

std::vector<std::string> lines_of(const Shard& shard) {
  std::vector<std::string> lines;
  for_each_line(shard, [&](const std::string& line) { lines.push_back(line); });
  return lines;
}

std::string place_of(const std::string& path) {
  if (path.find("://") != std::string::npos) return path;
  std::string place;
  for (const auto& part : std::filesystem::absolute(path)) {
    if (!part.empty() && part != "." && part != "/") place += "/" + part.string();
  }
  return place;
}

std::string digest_of(const std::string& path) {
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  bool good = context && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1;
  for_each_block(path, [&](const char* bytes, std::size_t size) {
    good = good && EVP_DigestUpdate(context.get(), bytes, size) == 1;
  });
  std::array<unsigned char, EVP_MAX_MD_SIZE> bytes{};
  unsigned size = 0;
  if (!good || EVP_DigestFinal_ex(context.get(), bytes.data(), &size) != 1) {
    throw Error(grpc::StatusCode::INTERNAL, "SHA-256 failed");
  }
  std::string digest = "sha256:";
  for (unsigned index = 0; index < size; ++index) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", bytes[index]);
    digest += digits;
  }
  return digest;
}

}  // namespace strata
