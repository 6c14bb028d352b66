// The driver of the conformance suite: commands as lines of JSON in, answers as lines of JSON out. The protocol is in
// docs/coordinator-protocol.md, "How to write a worker in another language".
#pragma once

#include <istream>
#include <ostream>

namespace strata {

// Until the input ends; the exit status.
int drive(std::istream& commands, std::ostream& answers);

}  // namespace strata
