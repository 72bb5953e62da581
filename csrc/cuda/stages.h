/* The run functions of the GPU programs: one flat params struct and one function a stage. Internal (the public
 * interface is cake_gdn_det.h), plain C and free of the CUDA toolkit, so that the bindings and the tests can reach
 * every program alone.
 *
 * A struct's fields are listed once (params/), in an X-macro X(type, name), from which the C struct and its Python class
 * are made. Pointers are device pointers unless a comment says otherwise; streams are cudaStream_t. Every run function is
 * asynchronous on the stream, allocates nothing, may be captured in a CUDA graph, leaves the current device as it was,
 * and on failure returns a status with the reason in cake_gdn_last_error(). */
#ifndef CAKE_GDN_STAGES_H
#define CAKE_GDN_STAGES_H

#include "cake_gdn_det/cake_gdn_det.h"
#include "cuda/params/bwd.h"
#include "cuda/params/common.h"
#include "cuda/params/fwd.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CAKE_GDN_PARAMS_FIELD(type, name) type name;

/* Every stage: F(name, NAME, name of its Python class). */
#define CAKE_GDN_STAGES(F)                                      \
    F(tables, TABLES, "TablesParams")                           \
    F(pack, PACK, "PackParams")                                 \
    F(prep, PREP, "PrepParams")                                 \
    F(wy, WY, "WyParams")                                       \
    F(wy_recompute, WY_RECOMPUTE, "WyRecomputeParams")          \
    F(fwd_prescan, FWD_PRESCAN, "FwdPrescanParams")             \
    F(stitch, STITCH, "StitchParams")                           \
    F(fwd_scan, FWD_SCAN, "FwdScanParams")                      \
    F(output, OUTPUT, "OutputParams")                           \
    F(dv_local, DV_LOCAL, "DvLocalParams")                      \
    F(adjoint_prescan, ADJOINT_PRESCAN, "AdjointPrescanParams") \
    F(adjoint_scan, ADJOINT_SCAN, "AdjointScanParams")          \
    F(dqkwg, DQKWG, "DqkwgParams")                              \
    F(wy_backward, WY_BACKWARD, "WyBackwardParams")             \
    F(finalize, FINALIZE, "FinalizeParams")                     \
    F(tail, TAIL, "TailParams")                                 \
    F(gate_backward, GATE_BACKWARD, "GateBackwardParams")       \
    F(gate_reduce, GATE_REDUCE, "GateReduceParams")

#define CAKE_GDN_DECLARE_STAGE(name, NAME, Class)       \
    typedef struct cake_gdn_##name##_params {           \
        CAKE_GDN_##NAME##_PARAMS(CAKE_GDN_PARAMS_FIELD) \
    } cake_gdn_##name##_params;                         \
    CAKE_GDN_API cake_gdn_status cake_gdn_run_##name(const cake_gdn_##name##_params *params, void *stream);
CAKE_GDN_STAGES(CAKE_GDN_DECLARE_STAGE)

#ifdef __cplusplus
}
#endif
#endif /* CAKE_GDN_STAGES_H */
