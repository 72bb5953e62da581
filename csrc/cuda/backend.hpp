// The GPU backend: runs a checked problem as a chain of programs. Free of toolkit headers. Failures are thrown as Error
// (device.hpp), which the C boundary turns into a status and a message; nothing runs on another backend instead.
#pragma once

#include <cstdint>

#include "cake_gdn_det/cake_gdn_det.h"
#include "plan/plan.hpp"

namespace cake_gdn::cuda {

// Bytes of scratch. Throws for what the chain cannot run: it is asked before every run.
int64_t workspace_size(const cake_gdn_problem &problem, cake_gdn_direction direction);

// Queues `direction` on `stream`; `workspace` has workspace_size bytes.
void run(const cake_gdn_problem &problem, cake_gdn_direction direction, void *workspace, void *stream);

// The order of the programs and what flows between them (chain.cpp).
void run_chain(const cake_gdn_problem &problem, const plan::GpuPlan &plan, cake_gdn_direction direction,
               void *workspace, void *stream);

}  // namespace cake_gdn::cuda
