#include "cuda/backend.hpp"

#include <cstring>
#include <string>
#include <vector>

#include "cake_gdn_build_config.h"
#include "cuda/chain.hpp"

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

void require_code(const Program &program, const Traits &traits) {
    std::string built;
    for (const Arch &arch : program.archs) {
        if (arch.capability == traits.capability) return;
        built += (built.empty() ? "sm_" : ", sm_") + std::string(arch.name);
    }
    throw Error(CAKE_GDN_UNSUPPORTED, std::string(program.name) + ": device " + std::to_string(traits.device) +
                                          " is sm_" + std::to_string(traits.capability) + "; this build has code for " +
                                          built + needed_cuda(traits.capability));
}

}  // namespace

void require_code(const char *program, const Traits &traits) {
    for (const Program &row : programs()) {
        if (std::strcmp(row.name, program) == 0) return require_code(row, traits);
    }
    throw Error(CAKE_GDN_INTERNAL_ERROR, std::string(program) + " is no row of programs.def");
}

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
    for (const Program &program : programs()) require_code(program, device);
}

}  // namespace cake_gdn::cuda
