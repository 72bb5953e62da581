// The test programs' main: doctest's, with --unit=NAME to choose the instruction-set unit under test.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <string>

#include "support.hpp"

int main(int argc, char **argv) {
    constexpr int kSkipped = 77;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument.rfind("--unit=", 0) != 0) continue;
        const cake_gdn::cpu::Unit *unit = cake_gdn_test::find_unit(argument.substr(7));
        if (unit == nullptr) {
            std::fprintf(stderr, "this build has no unit '%s'\n", argument.c_str() + 7);
            return 2;
        }
        if (!unit->supported()) {
            std::fprintf(stderr, "skipped: this machine cannot run the unit '%s'\n", unit->name);
            return kSkipped;
        }
        cake_gdn_test::set_unit(*unit);
    }
    doctest::Context context(argc, argv);
    return context.run();
}
