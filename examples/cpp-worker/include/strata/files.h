// Local files: the samples of a shard, which are lines, and the digest of a part of a checkpoint.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "strata/worker.h"

namespace strata {

// The lines of a file; a last one without a line break counts too.
std::uint64_t count_lines(const std::string& path);

// The lines of a shard in order, without their line breaks.
void for_each_line(const Shard& shard, const std::function<void(const std::string&)>& take);
std::vector<std::string> lines_of(const Shard& shard);

// As every worker has to write it, so that two that name one file mean one dataset: absolute, without `.` and doubled
// `/`, with `..` and links as they are. A URI stays as it is.
std::string place_of(const std::string& path);

// `sha256:` and 64 hex digits.
std::string digest_of(const std::string& path);

}  // namespace strata
