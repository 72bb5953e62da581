#include "cpu/engine.hpp"

#include <atomic>
#include <cfenv>
#include <exception>
#include <thread>
#include <vector>

#include "cpu/io.hpp"

namespace cake_gdn::cpu {

extern const Unit unit_baseline;
#if defined(__x86_64__)
extern const Unit unit_avx2;
extern const Unit unit_avx512;
#endif

const Unit &selected_unit() {
    static const Unit &unit = [&]() -> const Unit & {
#if defined(__x86_64__)
        if (unit_avx512.supported()) return unit_avx512;
        if (unit_avx2.supported()) return unit_avx2;
#endif
        return unit_baseline;
    }();
    return unit;
}

namespace {

// Rows of h that no chunk owns: packing leaves a gap of at most one row between sequences. They are zeroed, so that
// every byte of the saved tensor is defined.
void clear_unused_slots(const cake_gdn_problem &p, int64_t state_bytes) {
    const int64_t row = p.HV * p.K * p.V * state_bytes;
    char *h = static_cast<char *>(p.h.data);
    int64_t next = 0;
    const auto clear_up_to = [&](int64_t slot) {
        if (slot > next) std::memset(h + next * row, 0, size_t((slot - next) * row));
    };
    for (int64_t n = 0; n < p.N; ++n) {
        const Sequence s = sequence(p, n);
        if (s.length <= plan::kChunk) continue;
        const int64_t first = plan::state_slot(s.b, p.T, s.begin + plan::kChunk);
        clear_up_to(first);
        next = first + plan::ceil_div(s.length, plan::kChunk) - 1;
    }
    clear_up_to(p.slots);
}

void store_gate_gradients(const cake_gdn_problem &p, const double *partials) {
    for (int64_t hv = 0; hv < p.HV; ++hv) {
        double sums[2] = {0, 0};
        for (int64_t n = 0; n < p.N; ++n) {
            sums[0] += partials[2 * (n * p.HV + hv)];
            sums[1] += partials[2 * (n * p.HV + hv) + 1];
        }
        const cake_gdn_tensor *targets[2] = {&p.dA_log, &p.ddt_bias};
        for (int i = 0; i < 2; ++i) {
            const cake_gdn_tensor &to = *targets[i];
            if (to.data) store_rows(View{to.data, to.dtype, hv * to.stride[0], 0, 1}, &sums[i], 1, 1, 1);
        }
    }
}

// The caller's rounding mode and flushing of denormals (both are the thread's, and new threads inherit them) would
// decide bits; a trap it has enabled would end the process. Put back at the end, with its exception flags.
class DefaultFloatingPoint {
public:
    DefaultFloatingPoint() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatingPoint() { std::fesetenv(&before_); }
    DefaultFloatingPoint(const DefaultFloatingPoint &) = delete;
    DefaultFloatingPoint &operator=(const DefaultFloatingPoint &) = delete;

private:
    std::fenv_t before_;
};

// Runs `work(thread)` on `threads` threads, the caller's among them. When the system has no thread left to give, or no
// memory for one, the others do its share.
template <class F>
void on_threads(int threads, const F &work) {
    std::vector<std::thread> helpers;
    helpers.reserve(size_t(threads));
    try {
        for (int i = 1; i < threads; ++i) helpers.emplace_back(work, i);
    } catch (const std::exception &) {
        // Those that run hold references to this frame: it must not be left before they are joined.
    }
    work(0);
    for (std::thread &helper : helpers) helper.join();
}

}  // namespace

void run(const Unit &unit, const cake_gdn_problem &p, const plan::CpuPlan &plan, cake_gdn_direction direction,
         char *workspace) {
    workspace += -reinterpret_cast<uintptr_t>(workspace) % plan::kAlignment;
    double *partials =
        plan.gate_partials.bytes > 0 ? reinterpret_cast<double *>(workspace + plan.gate_partials.offset) : nullptr;
    const Call call{&p, &plan, direction, partials};
    if (direction == CAKE_GDN_FORWARD && p.h.data) {
        clear_unused_slots(p, p.h.dtype == CAKE_GDN_FP64 ? 8 : 4);
    }
    const DefaultFloatingPoint floating_point;
    std::atomic<int64_t> next{0};  // orders the work, decides no value
    on_threads(plan.threads, [&](int thread) {
        const DefaultFloatingPoint of_thread;
        char *scratch = workspace + plan.thread_offset + thread * plan.scratch.bytes;
        for (int64_t i; (i = next.fetch_add(1)) < plan.units;) unit.run(call, i, scratch);
    });
    // Also without sequences: the sums are zeros then.
    if (direction == CAKE_GDN_BACKWARD && (p.dA_log.data || p.ddt_bias.data)) store_gate_gradients(p, partials);
}

}  // namespace cake_gdn::cpu
