#include "cuda/backend.hpp"

#include <cstring>
#include <string>
#include <vector>

#include "cake_gdn_build_config.h"
#include "cuda/chain.hpp"
#include "plan/plan.hpp"

namespace cake_gdn::cuda {

namespace {

struct Arch {
    const char *name;
    int capability;
};

constexpr Arch kArchs[] = {
#define ARCH(name, capability, cuda) {#name, capability},
#include "programs.def"
};

bool has_word(const std::string &words, const std::string &word) {
    return (" " + words + " ").find(" " + word + " ") != std::string::npos;
}

// A program and the architectures for which this build has its code, which runs on these devices alone.
struct Program {
    const char *name;
    std::vector<Arch> archs;

    Program(const char *name, const char *claimed) : name(name) {
        for (const Arch &arch : kArchs) {
            if (has_word(claimed, arch.name) && has_word(CAKE_GDN_ARCHS, arch.name)) archs.push_back(arch);
        }
    }
};

const std::vector<Program> &programs() {
    static const std::vector<Program> table = {
#define PROGRAM(name, archs) Program(#name, archs),
#include "programs.def"
    };
    return table;
}

// What a build needs to have code for a device.
std::string needed_cuda(int capability) {
#define ARCH(name, number, cuda) \
    if (capability == number) return "; a build for it needs CUDA " #cuda " or newer";
#include "programs.def"
    (void)capability;
    return "; no release of this package has code for it";
}

}  // namespace

void require_code(const char *program, const Traits &traits) {
    for (const Program &row : programs()) {
        if (std::strcmp(row.name, program) != 0) continue;
        std::string built;
        for (const Arch &arch : row.archs) {
            if (arch.capability == traits.capability) return;
            built += (built.empty() ? "sm_" : ", sm_") + std::string(arch.name);
        }
        throw Error(CAKE_GDN_UNSUPPORTED, std::string(program) + ": device " + std::to_string(traits.device) +
                                              " is sm_" + std::to_string(traits.capability) +
                                              "; this build has code for " + built + needed_cuda(traits.capability));
    }
    throw Error(CAKE_GDN_INTERNAL_ERROR, std::string(program) + " is no row of programs.def");
}

namespace {

// Rows that the programs read in place: unit last stride, every row at a multiple of 16 bytes.
bool in_place(const cake_gdn_tensor &t, int64_t B, int64_t T, int64_t heads, int64_t columns) {
    const auto aligned = [&](int dimension, int64_t size) { return size <= 1 || t.stride[dimension] % 8 == 0; };
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && (t.stride[3] == 1 || columns == 1) && aligned(0, B) &&
           aligned(1, T) && aligned(2, heads);
}

plan::Shape shape_of(const cake_gdn_problem &p, cake_gdn_direction direction) {
    plan::Shape s{};
    s.B = p.B, s.T = p.T, s.H = p.H, s.HV = p.HV, s.K = p.K, s.V = p.V, s.N = p.N;
    s.packed = p.cu_seqlens.data != nullptr;
    s.state_bytes = 2;
    s.backward = direction == CAKE_GDN_BACKWARD;
    s.saved_states = p.h.data != nullptr;
    s.gate_gradients = s.backward && (p.dA_log.data != nullptr || p.ddt_bias.data != nullptr);
    s.normalise = p.flags & CAKE_GDN_QK_L2NORM;
    s.pack_qk = !in_place(p.q, p.B, p.T, p.H, p.K) || !in_place(p.k, p.B, p.T, p.H, p.K);
    s.pack_v = !in_place(p.v, p.B, p.T, p.HV, p.V);
    s.pack_do = s.backward && (p.d_o.data == nullptr || !in_place(p.d_o, p.B, p.T, p.HV, p.V));
    return s;
}

// What the chain cannot run, by name.
void check_supported(const cake_gdn_problem &p) {
    const auto unsupported = [](const std::string &what) { throw Error(CAKE_GDN_UNSUPPORTED, what); };
    if (p.q.dtype != CAKE_GDN_BF16 && p.q.dtype != CAKE_GDN_FP16) {
        unsupported(
            "q, k, v: fp32 and fp64 inputs have no GPU program in this build; bf16 and fp16 have. Backend \"cpu\" "
            "with CPU tensors takes all four");
    }
    if (p.K > kChainHead || p.V > kChainHead) {
        unsupported("K is " + std::to_string(p.K) + " and V is " + std::to_string(p.V) +
                    "; the GPU programs of this build take heads of up to " + std::to_string(kChainHead) +
                    ". Backend \"cpu\" with CPU tensors takes up to 512");
    }
    const Traits &device = traits(p.device);
    for (const Program &program : programs()) require_code(program.name, device);
}

}  // namespace

int64_t workspace_size(const cake_gdn_problem &p, cake_gdn_direction direction) {
    check_supported(p);
    return plan::plan_gpu(shape_of(p, direction)).bytes;
}

void run(const cake_gdn_problem &p, cake_gdn_direction direction, void *workspace, void *stream) {
    const plan::GpuPlan plan = plan::plan_gpu(shape_of(p, direction));
    if (reinterpret_cast<uintptr_t>(workspace) % plan::kGpuAlignment != 0) {
        throw Error(CAKE_GDN_INVALID_ARGUMENT, "workspace must start at a multiple of 256 bytes");
    }
    run_chain(p, plan, direction, workspace, stream);
}

}  // namespace cake_gdn::cuda
