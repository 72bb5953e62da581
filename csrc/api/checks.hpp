// What a problem must satisfy before any work is planned; the message names the field, what came and what is allowed.
#pragma once

#include <stdexcept>
#include <string>

#include "cake_gdn_det/cake_gdn_det.h"
#include "plan/plan.hpp"

namespace cake_gdn::api {

// A failure on its way to a status; thrown and caught inside the library only.
struct Failure : std::runtime_error {
    cake_gdn_status status;
    Failure(cake_gdn_status status, const std::string &message) : std::runtime_error(message), status(status) {}
};

void check_problem(const cake_gdn_problem &problem, cake_gdn_direction direction);

// Bytes of one element of `dtype`.
int64_t dtype_bytes(int dtype);

}  // namespace cake_gdn::api
