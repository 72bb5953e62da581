// The CPU engine: runs a checked problem by its plan. Results depend on the inputs and on the unit, never on the number
// of threads: the work is cut into (sequence, key head) pairs, each computed by one thread from start to end.
#pragma once

#include "cake_gdn_det/cake_gdn_det.h"
#include "plan/plan.hpp"

namespace cake_gdn::cpu {

struct Call {
    const cake_gdn_problem *problem;
    const plan::CpuPlan *plan;
    cake_gdn_direction direction;
    double *gate_partials;  // [N, HV, 2]: sums over a sequence of dA_log and ddt_bias; null when not wanted
};

// The engine compiled for one instruction set.
struct Unit {
    const char *name;
    bool (*supported)();
    // Runs the pair `index` = n * H + h on scratch of plan->scratch.bytes, aligned to plan::kAlignment.
    void (*run)(const Call &call, int64_t index, char *scratch);
};

// The widest unit that this machine can run.
const Unit &selected_unit();

void run(const Unit &unit, const cake_gdn_problem &problem, const plan::CpuPlan &plan, cake_gdn_direction direction,
         char *workspace);

// Tokens of the packed sequence n, or of the batch row n: [begin, begin + length) of the batch row b.
struct Sequence {
    int64_t b, begin, length;
};
static inline Sequence sequence(const cake_gdn_problem &p, int64_t n) {
    if (p.cu_seqlens.data == nullptr) return {n, 0, p.T};
    if (p.cu_seqlens.dtype == CAKE_GDN_INT32) {
        const int32_t *at = static_cast<const int32_t *>(p.cu_seqlens.data) + n;
        return {0, at[0], int64_t(at[1]) - at[0]};
    }
    const int64_t *at = static_cast<const int64_t *>(p.cu_seqlens.data) + n;
    return {0, at[0], at[1] - at[0]};
}

}  // namespace cake_gdn::cpu
