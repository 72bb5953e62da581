// The programs' host functions, one a row of programs.def: each checks its params, launches on the stream and throws
// Error when it cannot.
#pragma once

#include "cuda/stages.h"

namespace cake_gdn::cuda {

#define PROGRAM(name, arches) void run_##name(const cake_gdn_##name##_params &params, void *stream);
#include "programs.def"

}  // namespace cake_gdn::cuda
