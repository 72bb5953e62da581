# ruff: noqa: N815, N999 (the names are those of the C header)
"""The compiled module: cake_gdn_det.h for Python. Pointers and streams are ints; a status other than OK is an exception
(ValueError, NotImplementedError, MemoryError, RuntimeError) with the library's message."""

from typing import TypeAlias

import torch

# Given as any of the three, read as the last or None: (data_ptr, dtype, at most four strides in elements).
Tensor: TypeAlias = torch.Tensor | tuple[int, int, tuple[int, ...]] | None

dtypes: dict[torch.dtype, int]  # torch's dtypes as constants; filled by whoever gives tensors to a Problem

BF16: int
FP16: int
FP32: int
FP64: int
INT32: int
INT64: int
CPU: int
CUDA: int
FORWARD: int
BACKWARD: int
QK_L2NORM: int
GATE: int
BETA_SIGMOID: int
NEG_EIGVAL: int
STATE_V_FIRST: int
BATCH_INVARIANT: int
CHUNK: int

class Problem:
    """One call, cake_gdn_problem of cake_gdn_det.h. Whoever fills a tensor field keeps the memory alive."""

    backend: int
    device: int
    num_threads: int
    flags: int
    scale: float
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    slots: int
    plan: str | None
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    initial_state: Tensor
    cu_seqlens: Tensor
    cu_seqlens_host: Tensor
    o: Tensor
    final_state: Tensor
    h: Tensor
    A: Tensor
    d_o: Tensor
    dht: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dA_log: Tensor
    ddt_bias: Tensor
    dh0: Tensor
    def __init__(
        self,
        *,
        backend: int = ...,
        device: int = ...,
        num_threads: int = ...,
        flags: int = ...,
        scale: float = ...,
        B: int = ...,
        T: int = ...,
        H: int = ...,
        HV: int = ...,
        K: int = ...,
        V: int = ...,
        N: int = ...,
        slots: int = ...,
        plan: str | None = ...,
        q: Tensor = ...,
        k: Tensor = ...,
        v: Tensor = ...,
        g: Tensor = ...,
        beta: Tensor = ...,
        A_log: Tensor = ...,
        dt_bias: Tensor = ...,
        initial_state: Tensor = ...,
        cu_seqlens: Tensor = ...,
        cu_seqlens_host: Tensor = ...,
        o: Tensor = ...,
        final_state: Tensor = ...,
        h: Tensor = ...,
        A: Tensor = ...,
        d_o: Tensor = ...,
        dht: Tensor = ...,
        dq: Tensor = ...,
        dk: Tensor = ...,
        dv: Tensor = ...,
        dg: Tensor = ...,
        dbeta: Tensor = ...,
        dA_log: Tensor = ...,
        ddt_bias: Tensor = ...,
        dh0: Tensor = ...,
    ) -> None: ...
    @staticmethod
    def of(*values: float | Tensor) -> Problem: ...  # all fields in the order above

def forward(problem: Problem, workspace_ptr: int, workspace_bytes: int, stream: int) -> None: ...
def backward(problem: Problem, workspace_ptr: int, workspace_bytes: int, stream: int) -> None: ...
def workspace_size(problem: Problem, direction: int) -> int: ...
def abi_version() -> int: ...
def build_info() -> str: ...
def state_slots(B: int, T: int) -> int: ...
def state_width(backend: int, V: int) -> int: ...
def state_dtype(backend: int, dtype: int) -> int: ...

# Only in a build with CAKE_GDN_CUDA=ON: the stages of csrc/cuda/stages.h, one class and one function each.

class _Params:
    """Params of a stage. Its fields, listed in csrc/cuda/params/, are keywords and attributes; pointers are ints."""

    def __init__(self, **fields: float) -> None: ...
    def __getattr__(self, name: str) -> float: ...
    def __setattr__(self, name: str, value: float) -> None: ...

class TablesParams(_Params): ...
class PackParams(_Params): ...
class PrepParams(_Params): ...
class WyParams(_Params): ...
class WyRecomputeParams(_Params): ...
class FwdPrescanParams(_Params): ...
class StitchParams(_Params): ...
class FwdScanParams(_Params): ...
class OutputParams(_Params): ...
class DvLocalParams(_Params): ...
class AdjointPrescanParams(_Params): ...
class AdjointScanParams(_Params): ...
class DqkwgParams(_Params): ...
class WyBackwardParams(_Params): ...
class FinalizeParams(_Params): ...
class TailParams(_Params): ...
class GateBackwardParams(_Params): ...
class GateReduceParams(_Params): ...

def tables(params: TablesParams, stream: int) -> None: ...
def pack(params: PackParams, stream: int) -> None: ...
def prep(params: PrepParams, stream: int) -> None: ...
def wy(params: WyParams, stream: int) -> None: ...
def wy_recompute(params: WyRecomputeParams, stream: int) -> None: ...
def fwd_prescan(params: FwdPrescanParams, stream: int) -> None: ...
def stitch(params: StitchParams, stream: int) -> None: ...
def fwd_scan(params: FwdScanParams, stream: int) -> None: ...
def output(params: OutputParams, stream: int) -> None: ...
def dv_local(params: DvLocalParams, stream: int) -> None: ...
def adjoint_prescan(params: AdjointPrescanParams, stream: int) -> None: ...
def adjoint_scan(params: AdjointScanParams, stream: int) -> None: ...
def dqkwg(params: DqkwgParams, stream: int) -> None: ...
def wy_backward(params: WyBackwardParams, stream: int) -> None: ...
def finalize(params: FinalizeParams, stream: int) -> None: ...
def tail(params: TailParams, stream: int) -> None: ...
def gate_backward(params: GateBackwardParams, stream: int) -> None: ...
def gate_reduce(params: GateReduceParams, stream: int) -> None: ...
