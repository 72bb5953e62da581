/* Runs a forward and a backward through the C interface and checks both against the token recurrence below: the output
 * directly, the gradients by a central difference of a loss along a fixed direction. Prints "ok" and returns 0. */
#include <cake_gdn_det/cake_gdn_det.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { T = 70, H = 1, HV = 2, K = 5, V = 3 };
enum { Q_SIZE = T * H * K, V_SIZE = T * HV * V, G_SIZE = T * HV, S_SIZE = HV * K * V };

typedef struct inputs {
    double q[Q_SIZE], k[Q_SIZE], v[V_SIZE], g[G_SIZE], beta[G_SIZE], h0[S_SIZE];
} inputs;
typedef struct outputs {
    double o[V_SIZE], final_state[S_SIZE];
} outputs;

static const double scale = 0.4;

static double uniform(void) {
    static unsigned long long state = 88172645463325252ULL;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (double)(state >> 11) / 9007199254740992.0;
}

static void recurrence(const inputs *in, outputs *out) {
    for (int hv = 0; hv < HV; ++hv) {
        double *S = out->final_state + hv * K * V;
        for (int i = 0; i < K * V; ++i) S[i] = in->h0[hv * K * V + i];
        for (int t = 0; t < T; ++t) {
            const double *q = in->q + t * K, *k = in->k + t * K; /* one key head */
            const double *v = in->v + (t * HV + hv) * V;
            const double decay = exp(in->g[t * HV + hv]), beta = in->beta[t * HV + hv];
            for (int i = 0; i < K * V; ++i) S[i] *= decay;
            for (int j = 0; j < V; ++j) {
                double r = v[j], o = 0;
                for (int i = 0; i < K; ++i) r -= S[i * V + j] * k[i];
                for (int i = 0; i < K; ++i) S[i * V + j] += k[i] * beta * r;
                for (int i = 0; i < K; ++i) o += S[i * V + j] * q[i];
                out->o[(t * HV + hv) * V + j] = scale * o;
            }
        }
    }
}

static double loss(const inputs *in, const outputs *weight) {
    static outputs out;
    double sum = 0;
    recurrence(in, &out);
    for (int i = 0; i < V_SIZE; ++i) sum += out.o[i] * weight->o[i];
    for (int i = 0; i < S_SIZE; ++i) sum += out.final_state[i] * weight->final_state[i];
    return sum;
}

static cake_gdn_tensor view(void *data, int heads, int width) { /* [1, T, heads, width] */
    cake_gdn_tensor tensor = {data, CAKE_GDN_FP64, 0, {(int64_t)T * heads * width, heads * width, width, 1}};
    return tensor;
}
static cake_gdn_tensor gate(void *data) { /* [1, T, HV] */
    cake_gdn_tensor tensor = {data, CAKE_GDN_FP64, 0, {T * HV, HV, 1, 0}};
    return tensor;
}
static cake_gdn_tensor state(void *data) { /* [1, HV, K, V] */
    cake_gdn_tensor tensor = {data, CAKE_GDN_FP64, 0, {HV * K * V, K * V, V, 1}};
    return tensor;
}

static void require(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "%s: %s\n", what, cake_gdn_last_error());
    exit(1);
}

static void *scratch(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    require(memory != NULL, "scratch");
    return memory;
}

int main(void) {
    static inputs in, grad, shifted;
    static outputs out, want, weight;
    for (int i = 0; i < Q_SIZE; ++i) in.q[i] = uniform() - 0.5, in.k[i] = uniform() - 0.5;
    for (int i = 0; i < V_SIZE; ++i) in.v[i] = uniform() - 0.5, weight.o[i] = uniform() - 0.5;
    for (int i = 0; i < G_SIZE; ++i) in.g[i] = -0.2 * uniform(), in.beta[i] = uniform();
    for (int i = 0; i < S_SIZE; ++i) in.h0[i] = uniform() - 0.5, weight.final_state[i] = uniform() - 0.5;

    require(cake_gdn_abi_version() == CAKE_GDN_ABI_VERSION, "the library is of another version than the header");
    cake_gdn_problem p = {.struct_size = sizeof p, .num_threads = 2, .scale = scale};
    p.B = 1, p.T = T, p.H = H, p.HV = HV, p.K = K, p.V = V, p.N = 1;
    p.q = view(in.q, H, K), p.k = view(in.k, H, K), p.v = view(in.v, HV, V);
    p.g = gate(in.g), p.beta = gate(in.beta), p.initial_state = state(in.h0);
    p.o = view(out.o, HV, V), p.final_state = state(out.final_state);

    size_t bytes = 0;
    require(cake_gdn_workspace_size(&p, CAKE_GDN_FORWARD, &bytes) == CAKE_GDN_OK, "workspace_size");
    void *memory = scratch(bytes);
    require(cake_gdn_forward(&p, memory, bytes, NULL) == CAKE_GDN_OK, "forward");
    free(memory);

    recurrence(&in, &want);
    double error = 0;
    for (int i = 0; i < V_SIZE; ++i) error = fmax(error, fabs(out.o[i] - want.o[i]));
    for (int i = 0; i < S_SIZE; ++i) error = fmax(error, fabs(out.final_state[i] - want.final_state[i]));
    printf("forward: largest error %.2e\n", error);
    if (!(error < 1e-12)) return 1;

    p.d_o = view(weight.o, HV, V), p.dht = state(weight.final_state);
    p.dq = view(grad.q, H, K), p.dk = view(grad.k, H, K), p.dv = view(grad.v, HV, V);
    p.dg = gate(grad.g), p.dbeta = gate(grad.beta), p.dh0 = state(grad.h0);
    require(cake_gdn_workspace_size(&p, CAKE_GDN_BACKWARD, &bytes) == CAKE_GDN_OK, "workspace_size");
    memory = scratch(bytes);
    require(cake_gdn_backward(&p, memory, bytes, NULL) == CAKE_GDN_OK, "backward");
    free(memory);

    const double step = 1e-6;
    const size_t count = sizeof(inputs) / sizeof(double);
    static double direction[sizeof(inputs) / sizeof(double)];
    const double *x = (const double *)&in, *dx = (const double *)&grad;
    double *y = (double *)&shifted, slope = 0;
    for (size_t i = 0; i < count; ++i) direction[i] = uniform() - 0.5, slope += dx[i] * direction[i];
    for (size_t i = 0; i < count; ++i) y[i] = x[i] + step * direction[i];
    double difference = loss(&shifted, &weight);
    for (size_t i = 0; i < count; ++i) y[i] = x[i] - step * direction[i];
    difference = (difference - loss(&shifted, &weight)) / (2 * step);
    printf("backward: slope %.9f, difference quotient %.9f\n", slope, difference);
    if (!(fabs(slope - difference) < 1e-7 * (1 + fabs(slope)))) return 1;

    p.struct_size = 1; /* a caller's mistake comes back as a status and a message */
    if (cake_gdn_workspace_size(&p, CAKE_GDN_FORWARD, &bytes) != CAKE_GDN_INVALID_ARGUMENT) return 1;
    if (cake_gdn_last_error()[0] == '\0') return 1;
    puts("ok");
    return 0;
}
