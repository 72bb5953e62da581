// The C boundary: exceptions become a status and the calling thread's message.
#pragma once

#include <exception>
#include <new>

#include "api/checks.hpp"

namespace cake_gdn::api {

// Sets the calling thread's message, as cake_gdn_last_error() returns it. Cut to a fixed size, so that it allocates
// nothing: it runs where memory may be out and no exception can leave.
void set_last_error(const char *message) noexcept;

template <class F>
cake_gdn_status guarded(F &&f) noexcept {
    try {
        set_last_error("");
        f();
        return CAKE_GDN_OK;
    } catch (const Failure &failure) {
        set_last_error(failure.what());
        return failure.status;
    } catch (const plan::TooLarge &failure) {
        set_last_error(failure.what());
        return CAKE_GDN_INVALID_ARGUMENT;
    } catch (const plan::InvalidPlan &failure) {
        set_last_error(failure.what());
        return CAKE_GDN_INVALID_ARGUMENT;
    } catch (const std::bad_alloc &) {
        set_last_error("out of host memory");
        return CAKE_GDN_OUT_OF_MEMORY;
    } catch (const std::exception &error) {
        set_last_error(error.what());
        return CAKE_GDN_INTERNAL_ERROR;
    } catch (...) {
        set_last_error("unknown exception");
        return CAKE_GDN_INTERNAL_ERROR;
    }
}

}  // namespace cake_gdn::api
