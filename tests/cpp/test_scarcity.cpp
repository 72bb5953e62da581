// A machine that runs out: no thread to start, no memory for the library's own few allocations. The library answers
// with a status, or does the work with what it has; it never ends the process.
#include <doctest/doctest.h>

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "support.hpp"

using namespace cake_gdn_test;

namespace {

// How many more allocations of this thread succeed; negative: all.
thread_local int64_t allocations_left = -1;
std::atomic<int> threads_left{1 << 30};
std::atomic<int> threads_refused{0};

bool allocation_fails() {
    if (allocations_left < 0) return false;
    if (allocations_left == 0) return true;
    --allocations_left;
    return false;
}

Spec busy_spec() {
    Spec s;
    s.T = 500, s.H = 4, s.HV = 4, s.K = 64, s.V = 64;
    s.threads = 4;
    return s;
}

}  // namespace

void *operator new(size_t bytes) {
    if (allocation_fails()) throw std::bad_alloc();
    if (void *memory = std::malloc(bytes ? bytes : 1)) return memory;
    throw std::bad_alloc();
}
void *operator new(size_t bytes, const std::nothrow_t &) noexcept {
    return allocation_fails() ? nullptr : std::malloc(bytes ? bytes : 1);
}
void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, size_t) noexcept { std::free(memory); }
void operator delete(void *memory, const std::nothrow_t &) noexcept { std::free(memory); }

extern "C" int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                              void *argument) {
    using Create = int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    static const Create real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
    if (threads_left.fetch_sub(1) <= 0) {
        ++threads_refused;
        return EAGAIN;
    }
    return real(thread, attributes, start, argument);
}

TEST_CASE("too few threads: those that there are do all of the work, to the same bits") {
    Spec s = busy_spec();
    Case reference(s);
    run_unit(cake_gdn::cpu::selected_unit(), reference, 1);
    for (int given : {0, 1, 2}) {
        Case call(s);
        const cake_gdn_problem p = call.problem(CAKE_GDN_FORWARD);
        size_t bytes = 0;
        REQUIRE(cake_gdn_workspace_size(&p, CAKE_GDN_FORWARD, &bytes) == CAKE_GDN_OK);
        std::vector<unsigned char> workspace(bytes);
        threads_refused = 0;
        threads_left = given;
        const cake_gdn_status status = cake_gdn_forward(&p, workspace.data(), bytes, nullptr);
        threads_left = 1 << 30;
        CAPTURE(given);
        CHECK(status == CAKE_GDN_OK);
        CHECK(threads_refused > 0);
        CHECK(call.o.storage() == reference.o.storage());
        CHECK(call.final_state.storage() == reference.final_state.storage());
    }
}

TEST_CASE("too little memory: any allocation of a call may fail") {
    Spec s = busy_spec();
    Case reference(s);
    run_unit(cake_gdn::cpu::selected_unit(), reference, 1);
    Case call(s);
    const cake_gdn_problem p = call.problem(CAKE_GDN_FORWARD);
    size_t bytes = 0;
    REQUIRE(cake_gdn_workspace_size(&p, CAKE_GDN_FORWARD, &bytes) == CAKE_GDN_OK);
    std::vector<unsigned char> workspace(bytes);
    int failures = 0;
    bool finished = false;
    for (int64_t allowed = 0; allowed < 200 && !finished; ++allowed) {
        allocations_left = allowed;
        const cake_gdn_status status = cake_gdn_forward(&p, workspace.data(), bytes, nullptr);
        finished = allocations_left != 0;  // none was refused
        allocations_left = -1;
        CAPTURE(allowed);
        CHECK((status == CAKE_GDN_OK || status == CAKE_GDN_OUT_OF_MEMORY));
        if (status == CAKE_GDN_OK) {
            CHECK(call.o.storage() == reference.o.storage());
        } else {
            ++failures;
            CHECK(std::string(cake_gdn_last_error()).find("memory") != std::string::npos);
        }
    }
    CHECK(finished);
    MESSAGE("allocations refused in " << failures << " calls");
}

TEST_CASE("too little memory: a refusal's message may be lost, its status not") {
    Case call(busy_spec());
    cake_gdn_problem p = call.problem(CAKE_GDN_FORWARD);
    p.num_threads = 0;
    for (int64_t allowed = 0; allowed < 40; ++allowed) {
        size_t bytes = 0;
        allocations_left = allowed;
        const cake_gdn_status status = cake_gdn_workspace_size(&p, CAKE_GDN_FORWARD, &bytes);
        allocations_left = -1;
        CAPTURE(allowed);
        CHECK((status == CAKE_GDN_INVALID_ARGUMENT || status == CAKE_GDN_OUT_OF_MEMORY));
        CHECK(cake_gdn_last_error() != nullptr);
    }
}
