// The smallest program on the installed package: sums the numbers of a text file, one on each line. It is the one worker of
// its job; main.cc beside it shows many.
//
//   STRATA_WORKER_ADDRESS=127.0.0.1:7070 STRATA_WORKER_ID=worker-0 sum-lines numbers.txt
#include <strata/files.h>
#include <strata/worker.h>

#include <exception>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 2) return std::cerr << "usage: sum-lines FILE\n", 2;
  try {
    strata::Worker worker(strata::settings_from_environment());
    if (worker.start()) throw std::runtime_error("the sum of an earlier start is not kept anywhere: reset the job");
    worker.dataset({"numbers", {argv[1]}});
    long long sum = 0;
    worker.for_each_shard("numbers", 0, [&](const strata::Shard& shard) {
      strata::for_each_line(shard, [&](const std::string& line) { sum += std::stoll(line); });
    });
    worker.leave();
    std::cout << sum << "\n";
    return 0;
  } catch (const std::exception& error) {
    return std::cerr << error.what() << "\n", 1;
  }
}
