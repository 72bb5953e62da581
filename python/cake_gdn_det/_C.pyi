# ruff: noqa: N815, N999 (the names are those of the C header)
"""The compiled module: cake_gdn_det.h for Python. Pointers and streams are ints; a status other than OK is an exception
(ValueError, NotImplementedError, MemoryError, RuntimeError) with the library's message."""

from typing import TypeAlias

Tensor: TypeAlias = tuple[int, int, tuple[int, ...]] | None  # (data_ptr, dtype, at most four strides in elements)

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

def forward(problem: Problem, workspace_ptr: int, workspace_bytes: int, stream: int) -> None: ...
def backward(problem: Problem, workspace_ptr: int, workspace_bytes: int, stream: int) -> None: ...
def workspace_size(problem: Problem, direction: int) -> int: ...
def abi_version() -> int: ...
def build_info() -> str: ...
def state_slots(B: int, T: int) -> int: ...
def state_dtype(backend: int, dtype: int) -> int: ...

# Only in a build with CAKE_GDN_CUDA=ON.

class TablesParams:
    """cake_gdn_tables_params of csrc/cuda/stages.h; every pointer is an int."""

    cu_seqlens: int
    cu_seqlens_dtype: int
    device: int
    B: int
    T: int
    N: int
    segment_chunks: int
    max_chunks: int
    max_segments: int
    offsets: int
    sequence_chunk: int
    sequence_segment: int
    chunks: int
    segments: int
    def __init__(
        self,
        *,
        cu_seqlens: int = ...,
        cu_seqlens_dtype: int = ...,
        device: int = ...,
        B: int = ...,
        T: int = ...,
        N: int = ...,
        segment_chunks: int = ...,
        max_chunks: int = ...,
        max_segments: int = ...,
        offsets: int = ...,
        sequence_chunk: int = ...,
        sequence_segment: int = ...,
        chunks: int = ...,
        segments: int = ...,
    ) -> None: ...

def tables(params: TablesParams, stream: int) -> None: ...
