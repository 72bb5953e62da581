// The C boundary: exceptions become a status and the calling thread's message.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "api/checks.hpp"

namespace cake_gdn::api {

// The calling thread's message, as cake_gdn_last_error() returns it.
std::string &last_error();

template <class F>
cake_gdn_status guarded(F &&f) noexcept {
    try {
        last_error().clear();
        f();
        return CAKE_GDN_OK;
    } catch (const Failure &failure) {
        last_error() = failure.what();
        return failure.status;
    } catch (const std::bad_alloc &) {
        last_error() = "out of host memory";
        return CAKE_GDN_OUT_OF_MEMORY;
    } catch (const std::exception &error) {
        last_error() = error.what();
        return CAKE_GDN_INTERNAL_ERROR;
    } catch (...) {
        last_error() = "unknown exception";
        return CAKE_GDN_INTERNAL_ERROR;
    }
}

}  // namespace cake_gdn::api
