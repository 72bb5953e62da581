// The length of the segments into which long sequences are cut, so that they fill the GPU: from shapes and the device.
//
// Both directions of a call, and a backward with saved states and one without, have to cut alike: nothing that differs
// between them may be looked at here.
#include "plan/plan.hpp"

namespace cake_gdn::plan {

namespace {

constexpr int64_t kColumns = 64;  // of a scan's block
constexpr int64_t kSeamBytes = int64_t(1) << 30;
constexpr int64_t kShortest = 8, kLongest = 256;  // chunks; lengths are powers of two

// Microseconds: of a scan's block for one chunk, one block an SM; of the stitch for one seam; of a launch.
struct Costs {
    int capability;
    double fwd_step, adjoint_step, stitch_step, launch;
};
constexpr Costs kCosts[] = {
    {90, 1.1, 1.4, 3.0, 4.0},      // steps measured on an H200; the others are estimates, like all of them below
    {100, 1.726, 2.37, 3.0, 4.0},  // steps published for a B200
    {103, 1.726, 2.37, 3.0, 4.0},  // as a B200
    {107, 1.329, 1.708, 3.0, 4.0}  // steps published for an R200
};

const Costs &costs_of(int capability) {
    for (const Costs &costs : kCosts) {
        if (costs.capability == capability) return costs;
    }
    return kCosts[0];
}

// With batch_invariant neither the batch nor the number of SMs may matter: short segments where few heads leave a GPU
// idle, none where the heads of one sequence fill it.
int64_t invariant_length(int64_t HV) {
    if (HV <= 8) return 32;
    if (HV <= 16) return 64;
    return HV <= 32 ? 256 : kWholeSequences;
}

int64_t rows_of(const Shape &s) { return std::max<int64_t>(s.B, 1); }

// Of forward and backward, in microseconds: both scans, both pre-scans to their ends (no gate is known to forget), both
// stitches. Packed offsets are not known either: one sequence has all tokens.
double predicted(const Shape &s, const Costs &costs, int multiprocessors, int64_t length) {
    const int64_t segments = ceil_div(s.sequence_chunks(), length), seams = rows_of(s) * (segments - 1);
    const int64_t values = s.HV * ceil_div(s.V, kColumns), keys = s.HV * ceil_div(s.K, kColumns);
    const auto waves = [&](int64_t blocks) { return double(ceil_div(blocks, std::max(multiprocessors, 1))); };
    const double steps = double(std::min(length, s.sequence_chunks())) *
                         (waves(rows_of(s) * segments * values) + waves(seams * (values + keys)));
    const double stitches = double(segments - 1) * waves(rows_of(s) * values);
    return steps * (costs.fwd_step + costs.adjoint_step) + 2 * stitches * costs.stitch_step +
           (seams > 0 ? 4 * costs.launch : 0);
}

}  // namespace

int64_t segment_length(const Shape &s, const Traits &traits, const Pins &pins) {
    if (pins.segment_chunks > 0) return pins.segment_chunks;
    // A transition is formed from the identity in 16 bits: with gates above zero, or keys for which beta |k|^2 exceeds 2,
    // it can leave fp16's range in directions in which no state lies, where the scan of a whole sequence would be finite.
    if (s.fp16) return kWholeSequences;
    if (s.batch_invariant) return invariant_length(s.HV);
    const Costs &costs = costs_of(traits.capability);
    const int64_t chunks = s.sequence_chunks();
    int64_t best = kWholeSequences;
    if (chunks <= kShortest) return best;
    double time = predicted(s, costs, traits.multiprocessors, chunks);
    for (int64_t length = kLongest; length >= kShortest; length /= 2) {
        if (length >= chunks) continue;
        const int64_t seams = product(rows_of(s), ceil_div(chunks, length) - 1);
        if (product(seams, s.HV, s.K, 4 * (s.V + s.K)) > kSeamBytes) break;
        const double other = predicted(s, costs, traits.multiprocessors, length);
        if (other < time) time = other, best = length;
    }
    return best;
}

}  // namespace cake_gdn::plan
