// The GPU backend: runs a checked and planned problem as a chain of programs. Free of toolkit headers. Failures are thrown as Error
// (device.hpp), which the C boundary turns into a status and a message; nothing runs on another backend instead.
#pragma once

#include "cake_gdn_det/cake_gdn_det.h"
#include "plan/plan.hpp"

namespace cake_gdn::cuda {

// Throws for what the chain, or this build on this device, cannot run; names it.
void check_supported(const cake_gdn_problem &problem);

// Queues `direction` on `stream` (chain.cpp); `workspace` has plan.bytes bytes.
void run(const cake_gdn_problem &problem, const plan::GpuPlan &plan, cake_gdn_direction direction, void *workspace,
         void *stream);

}  // namespace cake_gdn::cuda
