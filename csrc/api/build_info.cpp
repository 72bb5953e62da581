// How this library was built, as JSON. Everything in it is fixed at compile time but the CPU unit chosen on this machine.
#include <sstream>
#include <string>

#include "cake_gdn_build_config.h"
#include "cake_gdn_det/cake_gdn_det.h"
#include "cpu/engine.hpp"

namespace cake_gdn::api {
namespace {

std::string quoted(const std::string &value) {
    std::string out = "\"";
    for (char c : value) {
        if (c == '"' || c == '\\') out += '\\';
        out += c;
    }
    return out + "\"";
}

// ["90a", "100a"] from "90a 100a", without the words that `keep` refuses.
template <class Keep>
std::string list(const std::string &words, Keep &&keep) {
    std::istringstream stream(words);
    std::string out, word;
    while (stream >> word) {
        if (keep(word)) out += (out.empty() ? "" : ", ") + quoted(word);
    }
    return "[" + out + "]";
}
std::string list(const std::string &words) {
    return list(words, [](const std::string &) { return true; });
}

bool contains(const std::string &words, const std::string &word) {
    return (" " + words + " ").find(" " + word + " ") != std::string::npos;
}

std::string architectures() {
    std::string out;
    const auto add = [&](const char *name, int capability, const char *cuda) {
        if (!contains(CAKE_GDN_ARCHS, name)) return;
        out += (out.empty() ? "" : ", ") + std::string("{\"name\": ") + quoted(name) +
               ", \"capability\": " + std::to_string(capability) + ", \"min_cuda\": " + quoted(cuda) + "}";
    };
#define ARCH(name, capability, cuda) add(#name, capability, #cuda);
#include "programs.def"
    (void)add;
    return "[" + out + "]";
}

std::string programs() {
    std::string out;
#if defined(CAKE_GDN_WITH_CUDA)
    const auto built = [](const std::string &arch) { return contains(CAKE_GDN_ARCHS, arch); };
    const auto add = [&](const char *name, const char *arches) {
        out += (out.empty() ? "" : ", ") + std::string("{\"name\": ") + quoted(name) +
               ", \"archs\": " + list(arches, built) + "}";
    };
#define PROGRAM(name, arches) add(#name, arches);
#include "programs.def"
#endif
    return "[" + out + "]";
}

std::string build_info() {
    std::string out = "{";
    out += "\"version\": " + quoted(CAKE_GDN_VERSION);
    out += ", \"git_commit\": " + quoted(CAKE_GDN_GIT_COMMIT);
    out += ", \"abi_version\": " + std::to_string(CAKE_GDN_ABI_VERSION);
    out += ", \"compiler\": " + quoted(CAKE_GDN_CXX_COMPILER);
    out += ", \"cuda\": " + quoted(CAKE_GDN_CUDA_VERSION);
    out += ", \"archs\": " + architectures();
    out += ", \"dropped_archs\": " + list(CAKE_GDN_DROPPED_ARCHS);
    out += ", \"programs\": " + programs();
    out += ", \"cpu_units\": " + list(CAKE_GDN_UNITS);
    out += ", \"cpu_unit\": " + quoted(cpu::selected_unit().name);
    return out + "}";
}

}  // namespace
}  // namespace cake_gdn::api

extern "C" const char *cake_gdn_build_info(void) {
    try {
        static const std::string info = cake_gdn::api::build_info();
        return info.c_str();
    } catch (...) {
        return "{}";
    }
}
