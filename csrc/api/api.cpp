// The C entry points: problem -> checks -> plan -> backend. Exceptions become a status and a message here; none leaves.
#include <cstdio>
#include <string>

#include "api/checks.hpp"
#include "api/guard.hpp"
#include "cpu/engine.hpp"
#include "plan/plan.hpp"
#if defined(CAKE_GDN_WITH_CUDA)
#include "api/device.hpp"
#include "cuda/backend.hpp"
#include "cuda/device.hpp"
#endif

namespace cake_gdn::api {
namespace {

thread_local char last_error[1024] = "";

}  // namespace

void set_last_error(const char *message) noexcept { std::snprintf(last_error, sizeof last_error, "%s", message); }

namespace {

const cake_gdn_problem &checked(const cake_gdn_problem *problem, cake_gdn_direction direction) {
    if (problem == nullptr) throw Failure(CAKE_GDN_INVALID_ARGUMENT, "problem is NULL");
    if (problem->struct_size != sizeof(cake_gdn_problem)) {
        throw Failure(CAKE_GDN_INVALID_ARGUMENT,
                      "struct_size is " + std::to_string(problem->struct_size) +
                          "; it must be sizeof(cake_gdn_problem), " + std::to_string(sizeof(cake_gdn_problem)) +
                          " in this library (ABI version " + std::to_string(CAKE_GDN_ABI_VERSION) + ")");
    }
#if !defined(CAKE_GDN_WITH_CUDA)
    if (problem->backend == CAKE_GDN_CUDA) {
        throw Failure(CAKE_GDN_UNSUPPORTED,
                      "backend is CAKE_GDN_CUDA; this build of the library has no CUDA programs (it was built with "
                      "CAKE_GDN_CUDA=OFF), so only CAKE_GDN_CPU is allowed");
    }
#endif
    check_problem(*problem, direction);
    return *problem;
}

// Rows that the GPU programs read in place: unit last stride, every row at a multiple of 16 bytes.
bool in_place(const cake_gdn_tensor &t, int64_t B, int64_t T, int64_t heads, int64_t columns) {
    const auto aligned = [&](int dimension, int64_t size) { return size <= 1 || t.stride[dimension] % 8 == 0; };
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && (t.stride[3] == 1 || columns == 1) && aligned(0, B) &&
           aligned(1, T) && aligned(2, heads);
}

// A gradient that lies as the GPU chain's own buffers do: contiguous rows of whole 16-byte pieces.
bool dense(const cake_gdn_tensor &t, int64_t T, int64_t heads, int64_t columns) {
    return t.data != nullptr && reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && columns % 8 == 0 && t.stride[3] == 1 &&
           t.stride[2] == columns && t.stride[1] == heads * columns && t.stride[0] == T * heads * columns;
}

plan::Shape shape_of(const cake_gdn_problem &p, cake_gdn_direction direction) {
    plan::Shape s{};
    s.B = p.B, s.T = p.T, s.H = p.H, s.HV = p.HV, s.K = p.K, s.V = p.V, s.N = p.N;
    s.state_bytes = dtype_bytes(cake_gdn_state_dtype(p.backend, p.q.dtype));
    s.backward = direction == CAKE_GDN_BACKWARD;
    s.saved_states = p.h.data != nullptr;
    s.gate_gradients = s.backward && (p.dA_log.data != nullptr || p.ddt_bias.data != nullptr);
    s.normalise = p.flags & CAKE_GDN_QK_L2NORM;
    s.pack_qk = !in_place(p.q, p.B, p.T, p.H, p.K) || !in_place(p.k, p.B, p.T, p.H, p.K);
    s.pack_v = !in_place(p.v, p.B, p.T, p.HV, p.V);
    s.pack_do = s.backward && (p.d_o.data == nullptr || !in_place(p.d_o, p.B, p.T, p.HV, p.V));
    if (s.backward) {
        s.dense_dq = dense(p.dq, p.T, p.H, p.K);
        s.dense_dk = dense(p.dk, p.T, p.H, p.K);
        s.dense_dv = dense(p.dv, p.T, p.HV, p.V);
    }
    s.batch_invariant = p.flags & CAKE_GDN_BATCH_INVARIANT;
    s.fp16 = p.q.dtype == CAKE_GDN_FP16;
    return s;
}

plan::CpuPlan cpu_plan(const cake_gdn_problem &p, cake_gdn_direction direction) {
    return plan::plan_cpu(shape_of(p, direction), plan::Traits{p.num_threads});
}

#if defined(CAKE_GDN_WITH_CUDA)
plan::GpuPlan gpu_plan(const cake_gdn_problem &p, cake_gdn_direction direction) {
    cuda::check_supported(p);
    const cuda::Traits &device = cuda::traits(p.device);
    plan::Traits traits;
    traits.capability = device.capability, traits.multiprocessors = device.multiprocessors;
    return plan::plan_gpu(shape_of(p, direction), traits, plan::parse_pins(p.plan));
}
#endif

void check_workspace(const void *workspace, size_t given, size_t needed) {
    if (given < needed) {
        throw Failure(CAKE_GDN_WORKSPACE_TOO_SMALL,
                      "workspace has " + std::to_string(given) + " bytes; " + std::to_string(needed) + " are needed");
    }
    if (workspace == nullptr && needed > 0) {
        throw Failure(CAKE_GDN_INVALID_ARGUMENT,
                      "workspace is NULL; it must have " + std::to_string(needed) + " bytes");
    }
}

cake_gdn_status run(const cake_gdn_problem *problem, cake_gdn_direction direction, void *workspace, size_t bytes,
                    void *stream) noexcept {
    return guarded([&] {
        const cake_gdn_problem &p = checked(problem, direction);
#if defined(CAKE_GDN_WITH_CUDA)
        if (p.backend == CAKE_GDN_CUDA) {
            on_device([&] {
                const plan::GpuPlan plan = gpu_plan(p, direction);
                check_workspace(workspace, bytes, size_t(plan.bytes));
                cuda::run(p, plan, direction, workspace, stream);
            });
            return;
        }
#endif
        (void)stream;
        const plan::CpuPlan plan = cpu_plan(p, direction);
        check_workspace(workspace, bytes, size_t(plan.bytes));
        cpu::run(cpu::selected_unit(), p, plan, direction, static_cast<char *>(workspace));
    });
}

}  // namespace
}  // namespace cake_gdn::api

using namespace cake_gdn;

extern "C" {

int cake_gdn_abi_version(void) { return CAKE_GDN_ABI_VERSION; }

const char *cake_gdn_last_error(void) { return api::last_error; }

int64_t cake_gdn_state_slots(int64_t B, int64_t T) { return plan::state_slots(B, T); }

int cake_gdn_state_dtype(int backend, int dtype) {
    if (backend == CAKE_GDN_CUDA) return dtype;
    return dtype == CAKE_GDN_FP64 ? CAKE_GDN_FP64 : CAKE_GDN_FP32;
}

int64_t cake_gdn_state_width(int backend, int64_t V) { return backend == CAKE_GDN_CUDA ? plan::row_width(V) : V; }

cake_gdn_status cake_gdn_workspace_size(const cake_gdn_problem *problem, cake_gdn_direction direction, size_t *bytes) {
    return api::guarded([&] {
        if (bytes == nullptr) throw api::Failure(CAKE_GDN_INVALID_ARGUMENT, "bytes is NULL");
        const cake_gdn_problem &p = api::checked(problem, direction);
#if defined(CAKE_GDN_WITH_CUDA)
        if (p.backend == CAKE_GDN_CUDA) {
            api::on_device([&] { *bytes = size_t(api::gpu_plan(p, direction).bytes); });
            return;
        }
#endif
        *bytes = size_t(api::cpu_plan(p, direction).bytes);
    });
}

cake_gdn_status cake_gdn_forward(const cake_gdn_problem *problem, void *workspace, size_t workspace_bytes,
                                 void *stream) {
    return api::run(problem, CAKE_GDN_FORWARD, workspace, workspace_bytes, stream);
}

cake_gdn_status cake_gdn_backward(const cake_gdn_problem *problem, void *workspace, size_t workspace_bytes,
                                  void *stream) {
    return api::run(problem, CAKE_GDN_BACKWARD, workspace, workspace_bytes, stream);
}

}  // extern "C"
