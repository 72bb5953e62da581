// The operator by its definition, token by token in double precision, with its gradients. Written from the equations of
// the public header, and shares no code with the library.
#pragma once

#include <cstdint>
#include <vector>

namespace cake_gdn_test {

// Row-major values; states are [N, HV, K, V]. Empty vectors are absent: zeros.
struct Inputs {
    int64_t B, T, H, HV, K, V, N;
    std::vector<int64_t> offsets;  // [N + 1] when packed
    uint32_t flags;
    double scale;
    std::vector<double> q, k, v, g, beta, A_log, dt_bias, initial_state, d_o, dht;
};

struct Results {
    std::vector<double> o, final_state, dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0;
};

Results recurrence(const Inputs &in);

}  // namespace cake_gdn_test
