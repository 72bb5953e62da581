// The GPU backend: runs a checked problem as a chain of programs. Free of toolkit headers.
#pragma once

#include <cstddef>
#include <string>

#include "cake_gdn_det/cake_gdn_det.h"

namespace cake_gdn::cuda {

// Whether this build has the chain of programs that the operator needs; single programs run without it (stages.h).
bool built();

// Queues `direction` on `stream`. A failure comes back as a status and a message, never as another backend's work.
cake_gdn_status run(const cake_gdn_problem &problem, cake_gdn_direction direction, void *workspace,
                    size_t workspace_bytes, void *stream, std::string &message);

cake_gdn_status workspace_size(const cake_gdn_problem &problem, cake_gdn_direction direction, size_t &bytes,
                               std::string &message);

}  // namespace cake_gdn::cuda
