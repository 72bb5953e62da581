"""Tools of test_contracts.py: streams, graphs, poisoned memory, red zones, and calls too large to draw on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager

import chain_model
import torch
from reference.cases import GRADS, Case, cumulative, poisoned, run, storage_bytes

BF16, F32 = torch.bfloat16, torch.float32
SHRINK = 1  # divides the sizes of calls that are large for their own sake; 1 for a GPU


def device() -> str:
    return chain_model.DEVICE


def synchronize() -> None:
    torch.cuda.synchronize()


# ---- streams and graphs ---------------------------------------------------------------------------------------------


@contextmanager
def side_stream(priority: int = 0):
    """Makes a stream of its own current, after what the current one has queued, and waits for it there afterwards."""
    stream = torch.cuda.Stream(priority=priority)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)


def keep_busy(seconds: float = 0.3) -> torch.cuda.Event:
    """Occupies the current stream; returns an event behind that."""
    torch.cuda._sleep(int(seconds * 1.9e9))
    event = torch.cuda.Event()
    event.record()
    return event


class Captured:
    """What a function of no argument queues, as a CUDA graph. It returns tensors by name."""

    def __init__(self, function: Callable[[], dict[str, torch.Tensor]]):
        with side_stream():
            function()  # what happens once for a process is not part of a graph
        synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = function()

    def replay(self) -> dict[str, torch.Tensor]:
        for x in self.out.values():
            x.fill_(math.nan)
        self.graph.replay()
        return self.out


# ---- memory ---------------------------------------------------------------------------------------------------------


def poison_allocator(byte: int) -> None:
    """Fills all free memory of torch's allocator (for the current stream) with a byte, and some more: what is allocated
    next holds nothing else."""
    synchronize()
    torch.cuda.empty_cache()
    blocks = []
    for size in (1 << n for n in range(28, 8, -1)):
        reserved = torch.cuda.memory_reserved()
        while torch.cuda.memory_reserved() == reserved:  # until there was no free block of this size left
            blocks.append(torch.full((size,), byte, dtype=torch.uint8, device=device()))
    blocks.clear()
    for size in (512, 1 << 16, 1 << 22, 1 << 27):
        assert (torch.empty(size, dtype=torch.uint8, device=device()) == byte).all()


@contextmanager
def filled_allocations():
    """torch.empty hands out NaN, and 255 for bytes: what is left unwritten, or read before it is written, shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3, device=device()).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def between_nans(x: torch.Tensor, aligned: bool) -> torch.Tensor:
    """The same values as a view into a larger storage that holds NaN everywhere else, on every side. Aligned: each row
    starts at a multiple of 16 bytes, as rows of 16-bit elements have to that are read where they lie."""
    if not aligned:
        return poisoned(x)
    row = (x.shape[-1] + 7) // 8 * 8
    store = torch.full([*(n + 2 for n in x.shape[:-1]), row + 16], math.nan, dtype=x.dtype, device=x.device)
    view = store[(*(slice(1, 1 + n) for n in x.shape[:-1]), slice(8, 8 + x.shape[-1]))]
    view.copy_(x)
    assert view.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in view.stride()[:-1])
    return view


def embedded(cu: torch.Tensor) -> torch.Tensor:
    """Offsets inside a longer tensor whose other elements are no offsets."""
    return torch.cat([cu.new_tensor([-7, 2**30]), cu, cu.new_tensor([2**30, -1])])[2:-2]


def between_nans_everywhere(case: Case, aligned: bool) -> Case:
    """Every tensor of the case between NaNs (offsets between nonsense)."""
    inputs = {n: x if x is None else between_nans(x, aligned and n in "qkv") for n, x in case.inputs.items()}
    options = dict(case.options)
    if options.get("cu_seqlens") is not None:
        options["cu_seqlens"] = embedded(options["cu_seqlens"])
    return Case(inputs, options, between_nans(case.do, aligned), between_nans(case.dht, False))


class Watched:
    """The bytes of every tensor of a case and around it, to be compared with themselves later."""

    def __init__(self, case: Case):
        tensors = [case.inputs[n] for n in case.present] + [x for x in (case.do, case.dht) if x is not None]
        tensors += [x for x in case.options.values() if isinstance(x, torch.Tensor)]
        self.kept = [(x, x._version, storage_bytes(x)) for x in tensors]

    def assert_unchanged(self) -> None:
        for x, version, before in self.kept:
            assert x._version == version and torch.equal(storage_bytes(x), before), f"a tensor of {x.shape} was written"


class Arena:
    """Tensors in one piece of memory, filled with 0xff, with red zones between them and wide ones at its ends."""

    ZONE, MARGIN = 1 << 16, 1 << 24

    def __init__(self, capacity: int):
        self.bytes = torch.full((capacity + 2 * self.MARGIN,), 0xFF, dtype=torch.uint8, device=device())
        self.end = self.MARGIN

    def reserve(self, shape, dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        start = (self.end + self.ZONE + 255) // 256 * 256
        self.end = start + size
        assert self.end + self.ZONE + self.MARGIN <= self.bytes.numel(), "the arena is too small"
        return self.bytes[start : self.end].view(dtype).view(shape)

    def place(self, x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else self.reserve(x.shape, x.dtype).copy_(x)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        return self.reserve(x.shape, x.dtype) if x.numel() else x

    def call(self, function: Callable[[], None], outputs: list[torch.Tensor]) -> None:
        """Calls; nothing but the outputs may have changed afterwards."""
        before = self.bytes.clone()
        function()
        synchronize()
        base = self.bytes.data_ptr()
        spans = sorted((x.data_ptr() - base, x.nbytes) for x in outputs if x.numel())
        at = 0
        for start, size in [*spans, (self.bytes.numel(), 0)]:
            assert torch.equal(self.bytes[at:start], before[at:start]), f"written between bytes {at} and {start}"
            at = start + size


def run_in_red_zones(case: Case, save: bool) -> dict[str, torch.Tensor]:
    """`run`, through the C interface, with every tensor, the workspace included, between red zones."""
    from cake_gdn_det import _C
    from cake_gdn_det.ops import torch_ops

    flag_of = {
        "use_qk_l2norm_in_kernel": _C.QK_L2NORM,
        "use_gate_in_kernel": _C.GATE,
        "use_beta_sigmoid_in_kernel": _C.BETA_SIGMOID,
        "allow_neg_eigval": _C.NEG_EIGVAL,
        "state_v_first": _C.STATE_V_FIRST,
    }
    flags = sum(flag for name, flag in flag_of.items() if case.options.get(name))
    arena = Arena(96 << 20)
    inputs = [arena.place(case.inputs[name]) for name in torch_ops.INPUTS]
    cu, d_o, dht = (arena.place(x) for x in (case.options.get("cu_seqlens"), case.do, case.dht))
    scale = case.inputs["q"].shape[-1] ** -0.5
    stream = torch.cuda.current_stream().cuda_stream if device() == "cuda" else 0

    def call(direction: int, run: Callable, fields: dict, outputs: list[torch.Tensor]) -> None:
        q, v = inputs[0], inputs[2]
        problem = _C.Problem(
            backend=_C.CUDA if q.is_cuda else _C.CPU,
            num_threads=1,
            flags=flags,
            scale=scale,
            B=q.shape[0],
            T=q.shape[1],
            H=q.shape[2],
            HV=v.shape[2],
            K=q.shape[3],
            V=v.shape[3],
            N=q.shape[0] if cu is None else cu.shape[0] - 1,
            slots=h.shape[0] if save else 0,
            plan=case.options.get("plan"),
            cu_seqlens=cu,
            h=h,
            A=A,
            **dict(zip(torch_ops.INPUTS, inputs)),
            **fields,
        )
        size = _C.workspace_size(problem, direction)
        workspace = arena.reserve((size,), torch.uint8)
        arena.call(lambda: run(problem, workspace.data_ptr(), size, stream), [*outputs, workspace])

    results = [arena.like(x) for x in torch_ops._forward_outputs(*inputs, cu, None, scale, flags, True, save, None)]
    o, final_state, h, A = torch_ops.named(results, True, save)
    call(_C.FORWARD, _C.forward, {"o": o, "final_state": final_state}, results)
    present = [x is not None for x in inputs]
    shapes = torch_ops._backward_outputs(d_o, dht, *inputs, cu, None, h, A, scale, flags, present, None)
    grads = [arena.like(x) for x in shapes]
    names = [GRADS[name] for name, there in zip(torch_ops.INPUTS, present) if there]
    call(_C.BACKWARD, _C.backward, {"d_o": d_o, "dht": dht} | dict(zip(names, grads)), grads)
    return {"o": o, "final_state": final_state} | dict(zip(names, grads))


# ---- calls ----------------------------------------------------------------------------------------------------------


def large_case(
    *, T: int, H: int, HV: int, K: int, V: int, lengths: list[int] | None = None, seed: int = 0, **options
) -> Case:
    """A bf16 call drawn on the device, one row, with L2 norm in the kernel."""
    rng = torch.Generator(device=device()).manual_seed(seed)

    def randn(*shape, dtype=BF16):
        return torch.randn(*shape, generator=rng, dtype=dtype, device=device())

    N = 1
    if lengths is not None:
        T, N = sum(lengths), len(lengths)
        options["cu_seqlens"] = cumulative(lengths).to(device())
    inputs = {"q": randn(1, T, H, K), "k": randn(1, T, H, K), "v": randn(1, T, HV, V)}
    inputs |= {"g": -0.1 * randn(1, T, HV, dtype=F32).square(), "beta": randn(1, T, HV).sigmoid()}
    inputs |= {"initial_state": randn(N, HV, K, V, dtype=F32), "A_log": None, "dt_bias": None}
    options["use_qk_l2norm_in_kernel"] = True
    return Case(inputs, options, randn(1, T, HV, V), randn(N, HV, K, V, dtype=F32))


def heads_of(case: Case, keys: slice, values: slice) -> Case:
    """Some heads of a case, as views."""
    part = case.with_inputs(
        **{n: case.inputs[n][:, :, keys] for n in "qk"},
        **{n: case.inputs[n][:, :, values] for n in ("v", "g", "beta")},
        initial_state=case.inputs["initial_state"][:, values],
    )
    part.do, part.dht = case.do[:, :, values], case.dht[:, values]
    return part


def cut_heads(out: dict, keys: slice, values: slice) -> dict:
    """The same heads of an answer."""
    cut = {n: out[n][:, :, values] for n in ("o", "dv", "dg", "dbeta")} | {n: out[n][:, :, keys] for n in ("dq", "dk")}
    return cut | {n: out[n][:, values] for n in ("final_state", "dh0")}


PER_TOKEN = ("q", "k", "v", "g", "beta")


def sequences_of(case: Case, chosen: list[int]) -> tuple[Case, Callable[[dict], dict]]:
    """Some packed sequences of a case, packed by themselves, and what cuts them out of an answer to the whole."""
    cu = case.options["cu_seqlens"].tolist()
    rows = torch.tensor(chosen, device=case.do.device)

    def tokens(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, cu[n] : cu[n + 1]] for n in chosen], 1)

    inputs = {n: x if x is None else tokens(x) if n in PER_TOKEN else x for n, x in case.inputs.items()}
    inputs["initial_state"] = case.inputs["initial_state"][rows]
    offsets = cumulative([cu[n + 1] - cu[n] for n in chosen]).to(case.do.device)
    part = Case(inputs, case.options | {"cu_seqlens": offsets}, tokens(case.do), case.dht[rows])

    def cut(out: dict) -> dict:
        per_token = ("o", *(GRADS[n] for n in PER_TOKEN))
        return {n: tokens(out[n]) for n in per_token} | {n: out[n][rows] for n in ("final_state", "dh0")}

    return part, cut


def backward(op: Callable, case: Case, names=None) -> dict[str, torch.Tensor]:
    """`run` with gradients through .backward(), which a reentrant checkpoint needs."""
    names = case.present if names is None else names
    leaves = {n: x if x is None else x.detach().clone() for n, x in case.inputs.items()}
    for n in names:
        leaves[n].requires_grad_()
    o, final = op(**leaves, **case.options, output_final_state=True)
    torch.autograd.backward([o, final], [case.do, case.dht])
    return {"o": o.detach(), "final_state": final.detach()} | {GRADS[n]: leaves[n].grad for n in names}


def forward(op: Callable, case: Case, **options) -> dict[str, torch.Tensor]:
    return run(op, case, wanted=[], **options)
