// The C entry points of the single GPU programs (cuda/stages.h), one a row of programs.def.
#include "api/device.hpp"
#include "api/guard.hpp"
#include "cuda/programs.hpp"

namespace cake_gdn::api {
namespace {

template <class Params>
cake_gdn_status run_stage(const char *name, void (*run)(const Params &, void *), const Params *params,
                          void *stream) noexcept {
    return guarded([&] {
        if (params == nullptr) throw Failure(CAKE_GDN_INVALID_ARGUMENT, std::string(name) + ": params is NULL");
        on_device([&] { run(*params, stream); });
    });
}

}  // namespace
}  // namespace cake_gdn::api

extern "C" {

#define PROGRAM(name, arches)                                                                   \
    cake_gdn_status cake_gdn_run_##name(const cake_gdn_##name##_params *params, void *stream) { \
        return cake_gdn::api::run_stage(#name, cake_gdn::cuda::run_##name, params, stream);     \
    }
#include "programs.def"

}  // extern "C"
