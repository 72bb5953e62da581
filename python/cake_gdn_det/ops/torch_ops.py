"""The two torch.library operators over the C API, cake_gdn_det::forward and cake_gdn_det::backward.

They are the graph nodes that torch.compile sees; user code calls chunk_gated_delta_rule (chunk.py), which checks its
arguments and gives these operators their derivative. Each operator allocates its outputs with the very function that is
its fake kernel, then lets the library fill them: the shapes are written once, and hold no Python branch on a size, so
that a traced length stays a symbol. They return lists of what is wanted: the forward of [o, final_state, h, A], the
backward of the gradients. Scratch lives and dies inside an implementation.
"""

from itertools import compress
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import _C

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
"""The differentiable inputs, in the order of `needs` and of the gradients."""

_INPUT_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu"
)
_LIBRARY = torch.library.Library("cake_gdn_det", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_LIBRARY.define(
    f"forward({_INPUT_SCHEMA}, float scale, int flags, bool output_final_state, bool save, str? plan) -> Tensor[]",
    tags=_TAGS,
)
_LIBRARY.define(
    f"backward(Tensor? d_o, Tensor? dht, {_INPUT_SCHEMA}, Tensor? h, Tensor? A, float scale, int flags, bool[] needs, "
    "str? plan) -> Tensor[]",
    tags=_TAGS,
)
forward = torch.ops.cake_gdn_det.forward.default
backward = torch.ops.cake_gdn_det.backward.default

_DTYPES = {
    torch.bfloat16: _C.BF16,
    torch.float16: _C.FP16,
    torch.float32: _C.FP32,
    torch.float64: _C.FP64,
    torch.int32: _C.INT32,
    torch.int64: _C.INT64,
}
_BACKENDS = {"cpu": _C.CPU, "cuda": _C.CUDA, "meta": _C.CPU}
_C.dtypes.update(_DTYPES)
_FLOATS = {code: dtype for dtype, code in _DTYPES.items()}
_STATE_DTYPES = {
    (device, dtype): _FLOATS[_C.state_dtype(backend, _DTYPES[dtype])]
    for device, backend in _BACKENDS.items()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if (device, dtype) != ("cuda", torch.float64)
}

# ---- shapes: fake kernels, and allocation for the real ones ----


def saved_shapes(
    B: int, T: int, HV: int, K: int, V: int, backend: int = _C.CPU
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shapes of what the forward keeps for the backward: h [slots, HV, K, W], the chunk-start states, and, on a GPU
    only, A [B, T, HV, 64], the chunks' inverses.

    The closed forms of cake_gdn_state_slots and cake_gdn_state_width, which the library checks; they work for symbolic
    B and T. (Torch guards on sizes 0 and 1: a compiled model has one graph for no slot, one for one slot and one for
    all longer inputs.)
    """
    last = max(T - 1, 0) if type(T) is int else torch.sym_max(T - 1, 0)
    h = (B * (last // _C.CHUNK), HV, K, _C.state_width(backend, V))
    return h, (B, T, HV, _C.CHUNK) if backend == _C.CUDA else None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _forward_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float,
    flags: int,
    output_final_state: bool,
    save: bool,
    plan: str | None,
) -> list[Tensor]:
    B, T, HV, V = v.shape
    K = q.shape[3]
    results = [torch.empty_like(v, memory_format=torch.contiguous_format)]  # v has the shape of o and the dtype of q
    if output_final_state:
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = (N, HV, V, K) if flags & _C.STATE_V_FIRST else (N, HV, K, V)
        results.append(q.new_empty(state, dtype=_wide(q.dtype)))
    if save:
        h_shape, A_shape = saved_shapes(B, T, HV, K, V, _BACKENDS[q.device.type])
        results.append(q.new_empty(h_shape, dtype=_STATE_DTYPES[q.device.type, q.dtype]))
        if A_shape is not None:
            results.append(q.new_empty(A_shape))
    return results


def named(
    results: list[Tensor], output_final_state: bool, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """o, final_state, h and A of the forward's list."""
    rest = iter(results)
    return next(rest), next(rest) if output_final_state else None, next(rest) if save else None, next(rest, None)


def _backward_outputs(
    d_o: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    h: Tensor | None,
    A: Tensor | None,
    scale: float,
    flags: int,
    needs: list[bool],
    plan: str | None,
) -> list[Tensor]:
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in compress(inputs, needs)]


# ---- implementations ----


def _run(direction: int, scale: float, flags: int, plan: str | None, tensors: tuple[Tensor | None, ...]) -> None:
    """One call of the library, with its scratch; `tensors` are the tensor fields of _C.Problem, in order."""
    q, _, v, *_, cu_seqlens, _, _, _, h = tensors[:13]
    B, T, H, K = q.shape
    _, _, HV, V = v.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slots = 0 if h is None else h.shape[0]
    on_gpu = q.is_cuda
    backend, device = (_C.CUDA, q.get_device()) if on_gpu else (_C.CPU, 0)
    problem = _C.Problem.of(
        backend, device, torch.get_num_threads(), flags, scale, B, T, H, HV, K, V, N, slots, plan, *tensors
    )
    size = _C.workspace_size(problem, direction)
    scratch = q.new_empty(size, dtype=torch.uint8)
    stream = torch._C._cuda_getCurrentRawStream(device) if on_gpu else 0  # a Stream object costs 7 us
    call = _C.forward if direction == _C.FORWARD else _C.backward
    call(problem, scratch.data_ptr(), size, stream)


def _offsets(
    cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, q: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The offsets where q lives, and for a GPU those on the host if there are any; contiguous, as the library reads.

    The library checks all that lie on the host; what is on a device only is never copied back.
    """
    if cu_seqlens is None:
        return None, None
    on_host = not cu_seqlens.is_cuda
    if on_host and cu_seqlens_cpu is not None and bool((cu_seqlens != cu_seqlens_cpu).any()):
        raise ValueError(
            f"chunk_gated_delta_rule: cu_seqlens_cpu is {cu_seqlens_cpu.tolist()}, must equal cu_seqlens, which is "
            f"{cu_seqlens.tolist()}"
        )
    if not q.is_cuda:
        return cu_seqlens.contiguous(), None
    host = cu_seqlens if on_host else cu_seqlens_cpu
    return cu_seqlens.to(q.device, non_blocking=True).contiguous(), None if host is None else host.contiguous()


def _refuse_tracked(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            "torch.ops.cake_gdn_det.* has no derivative of its own: call cake_gdn_det.chunk_gated_delta_rule, or use "
            "torch.no_grad()"
        )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float,
    flags: int,
    output_final_state: bool,
    save: bool,
    plan: str | None,
) -> list[Tensor]:
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    _refuse_tracked(*inputs)
    outputs = _forward_outputs(*inputs, cu_seqlens, cu_seqlens_cpu, scale, flags, output_final_state, save, plan)
    o, final_state, h, A = named(outputs, output_final_state, save)
    cu_seqlens, cu_seqlens_host = _offsets(cu_seqlens, cu_seqlens_cpu, q)
    _run(
        _C.FORWARD,
        scale,
        flags,
        plan,
        (*inputs, cu_seqlens, cu_seqlens_host, o, final_state, h, A, None, None, *[None] * 8),
    )
    return outputs


def _backward(
    d_o: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    h: Tensor | None,
    A: Tensor | None,
    scale: float,
    flags: int,
    needs: list[bool],
    plan: str | None,
) -> list[Tensor]:
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    _refuse_tracked(*inputs, d_o, dht)
    gradients = _backward_outputs(d_o, dht, *inputs, cu_seqlens, cu_seqlens_cpu, h, A, scale, flags, needs, plan)
    wanted = iter(gradients)
    results = [next(wanted) if need else None for need in needs]
    # The library writes dh0 in the dtype of its states; the caller's initial_state may have another one.
    dh0, wide = results[-1], _wide(q.dtype)
    if dh0 is not None and dh0.dtype is not wide:
        results[-1] = torch.empty_like(dh0, dtype=wide)
    cu_seqlens, cu_seqlens_host = _offsets(cu_seqlens, cu_seqlens_cpu, q)
    _run(_C.BACKWARD, scale, flags, plan, (*inputs, cu_seqlens, cu_seqlens_host, None, None, h, A, d_o, dht, *results))
    if dh0 is not None and results[-1] is not dh0:
        dh0.copy_(results[-1])
    return gradients


def _no_vmap(*_: Any) -> NoReturn:
    raise NotImplementedError("chunk_gated_delta_rule has no torch.func.vmap rule: call it with a larger B instead")


for _name, _implementation, _fake in (
    ("forward", _forward, _forward_outputs),
    ("backward", _backward, _backward_outputs),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _implementation, _key)
    torch.library.register_fake(f"cake_gdn_det::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_vmap(f"cake_gdn_det::{_name}", _no_vmap, lib=_LIBRARY)
