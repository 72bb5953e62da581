#include "cuda/backend.hpp"

#include "cake_gdn_build_config.h"
#include "cuda/launch.hpp"

namespace cake_gdn::cuda {

namespace {

struct Program {
    const char *name;
    const char *archs;  // as in programs.def; the build may lack some
};

constexpr Program kPrograms[] = {
#define PROGRAM(name, archs) {#name, archs},
#include "programs.def"
};

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

// Architectures of a program that this build has, as "sm_90a, sm_100a". Code for them runs on these devices alone.
std::string built_archs(const Program &program) {
    std::string out;
    for (const Arch &arch : kArchs) {
        if (!has_word(program.archs, arch.name) || !has_word(CAKE_GDN_ARCHS, arch.name)) continue;
        out += (out.empty() ? "sm_" : ", sm_") + std::string(arch.name);
    }
    return out;
}

cake_gdn_status no_chain(cake_gdn_direction direction, std::string &message) {
    message = std::string("backend: CAKE_GDN_CUDA cannot run the ") +
              (direction == CAKE_GDN_FORWARD ? "forward" : "backward") +
              ": the operator's GPU chain is not part of this build, which has the programs ";
    const char *separator = "";
    for (const Program &program : kPrograms) {
        message += separator + std::string(program.name) + " (" + built_archs(program) + ")";
        separator = ", ";
    }
    message += ". Backend \"cpu\" with CPU tensors works";
    return CAKE_GDN_UNSUPPORTED;
}

}  // namespace

void require_code(const char *program, const Traits &traits) {
    for (const Program &row : kPrograms) {
        if (std::string(row.name) != program) continue;
        for (const Arch &arch : kArchs) {
            if (arch.capability == traits.capability && has_word(row.archs, arch.name) &&
                has_word(CAKE_GDN_ARCHS, arch.name)) {
                return;
            }
        }
        throw Error(CAKE_GDN_UNSUPPORTED, std::string(program) + ": device " + std::to_string(traits.device) +
                                              " is sm_" + std::to_string(traits.capability) +
                                              "; this build has code for " + built_archs(row));
    }
    throw Error(CAKE_GDN_INTERNAL_ERROR, std::string(program) + " is no row of programs.def");
}

bool built() { return false; }

cake_gdn_status run(const cake_gdn_problem &, cake_gdn_direction direction, void *, size_t, void *,
                    std::string &message) {
    return no_chain(direction, message);
}

cake_gdn_status workspace_size(const cake_gdn_problem &, cake_gdn_direction direction, size_t &, std::string &message) {
    return no_chain(direction, message);
}

}  // namespace cake_gdn::cuda
