// What the tests share: random numbers that are the same everywhere, tensors with guard bytes, whole problems.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cake_gdn_det/cake_gdn_det.h"
#include "cpu/engine.hpp"
#include "recurrence.hpp"

namespace cake_gdn_test {

// ---- units ----------------------------------------------------------------------------------------------------------

// The engine's unit of that name, or null when this build has none.
const cake_gdn::cpu::Unit *find_unit(const std::string &name);
// The unit under test: --unit=NAME of the command line, else the one that the library selects.
const cake_gdn::cpu::Unit &unit_under_test();
void set_unit(const cake_gdn::cpu::Unit &unit);

// ---- random numbers -------------------------------------------------------------------------------------------------

// splitmix64: the standard library's distributions differ between implementations.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t bits();
    int64_t integer(int64_t low, int64_t high);  // both ends included
    double uniform(double low, double high);

private:
    uint64_t state_;
};

// ---- 16-bit floats, by the definition -------------------------------------------------------------------------------

// x rounded to nearest, ties to even, with that many exponent and mantissa bits: (8, 7) is bf16, (5, 10) is fp16.
uint16_t encode16(double x, int exponent_bits, int mantissa_bits);
double decode16(uint16_t code, int exponent_bits, int mantissa_bits);

int64_t element_bytes(int dtype);

// ---- tensors --------------------------------------------------------------------------------------------------------

enum class Layout {
    contiguous,
    spread,    // every stride doubled, rows apart
    permuted,  // first dimension fastest
    reversed   // negative strides
};

// A tensor in a storage of its own. Bytes before, between and after its elements hold 0xff: NaN in every float type.
class Tensor {
public:
    Tensor() = default;
    Tensor(int dtype, std::vector<int64_t> sizes, Layout layout = Layout::contiguous);

    int64_t count() const { return count_; }
    const std::vector<int64_t> &sizes() const { return sizes_; }
    // Elements by their row-major number.
    double get(int64_t index) const;
    void set(int64_t index, double value);
    std::vector<double> values() const;
    void set_values(const std::vector<double> &values);
    void fill(Random &random, double low, double high);

    // Its view for the C interface; absent when default-constructed.
    cake_gdn_tensor view();
    // Whether every byte that belongs to no element is as it was.
    bool guards_intact() const;
    // The whole storage, for bitwise comparison.
    const std::vector<unsigned char> &storage() const { return storage_; }

private:
    int64_t byte_of(int64_t index) const;

    int dtype_ = CAKE_GDN_FP32;
    std::vector<int64_t> sizes_, strides_;
    int64_t count_ = 0, origin_ = 0;  // byte of element 0
    std::vector<unsigned char> storage_;
};

// ---- problems -------------------------------------------------------------------------------------------------------

struct Spec {
    int64_t B = 1, T = 70, H = 1, HV = 2, K = 16, V = 16;
    std::vector<int64_t> offsets;  // packed when not empty
    uint32_t flags = 0;
    int dtype = CAKE_GDN_FP32, gate_dtype = CAKE_GDN_FP32, offset_dtype = CAKE_GDN_INT64;
    Layout layout = Layout::contiguous;
    bool initial_state = true, save_state = true, dt_bias = true, unit_keys = true;
    double gate_low = -0.3, gate_high = 0.0, beta_low = 0.1, beta_high = 0.95;
    double reset_share = 0;  // of gates that are -inf
    int threads = 2;
    uint64_t seed = 1;
};

// A problem with all of its tensors; inputs drawn from the seed.
class Case {
public:
    explicit Case(const Spec &spec);

    // The fields of one direction; outputs of the other direction are left out.
    cake_gdn_problem problem(cake_gdn_direction direction);
    // Fills every output with NaN.
    void forget_outputs();
    // The inputs as the recurrence wants them, and the results that it should give.
    Inputs inputs() const;
    Results results() const;
    // Bytes of all outputs of both directions (and of h), for bitwise comparison.
    std::vector<std::vector<unsigned char>> output_bytes() const;
    std::vector<std::vector<unsigned char>> input_bytes() const;
    bool guards_intact() const;

    Spec spec;
    int64_t N;
    Tensor q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, d_o, dht;
    Tensor o, final_state, h, dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0;

private:
    std::vector<Tensor *> outputs();
    std::vector<const Tensor *> outputs() const;
    std::vector<double> state_values(const Tensor &state) const;
};

// Runs one direction on one unit, with scratch that holds `fill` in every byte before. What the library does around its
// units is done here in plain: the sums over sequences of dA_log and ddt_bias (fp32 or fp64), and h cleared.
void run_unit(const cake_gdn::cpu::Unit &unit, const cake_gdn_problem &problem, cake_gdn_direction direction,
              int threads, unsigned char fill = 0xff);
void run_unit(const cake_gdn::cpu::Unit &unit, Case &call, int threads, unsigned char fill = 0xff);

// The largest |got - wanted| over the largest |wanted| (or 1e-30), NaN when any element is; -1 when sizes differ.
double error(const std::vector<double> &got, const std::vector<double> &wanted);

}  // namespace cake_gdn_test
