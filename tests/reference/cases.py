"""What the numeric tests draw from: random calls of the operator, its float64 answer, and the error metric."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from . import oracle, stages

INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
GRADS = {name: "d" + name for name in INPUTS} | {"initial_state": "dh0"}
ALL_OPTIONS = {
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
    "use_gate_in_kernel": True,
    "state_v_first": True,
}

# Relative error of a chain of fp32 operations over a few hundred tokens: `stages.chain` in fp32 errs by 2e-7 to 1e-6
# there, here with a factor of about five. It is what 16-bit inputs compute in, too; their outputs add one rounding. For
# fp64 a wrong formula errs by far more than 1e-11, rounding of sums of decays by far less.
COMPUTE_TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-11}


@dataclass
class Case:
    """One call: `inputs` by argument name (None: not given), the other arguments, the gradients of the outputs."""

    inputs: dict[str, torch.Tensor | None]
    options: dict = field(default_factory=dict)
    do: torch.Tensor | None = None
    dht: torch.Tensor | None = None

    @property
    def present(self) -> list[str]:
        """The names of the floating inputs that are given."""
        return [name for name in INPUTS if self.inputs.get(name) is not None]

    def with_inputs(self, **changes) -> Case:
        return replace(self, inputs=self.inputs | changes)

    def with_options(self, **changes) -> Case:
        return replace(self, options=self.options | changes)


def cumulative(lengths: Iterable[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Lengths of sequences -> cu_seqlens."""
    return torch.tensor([0, *torch.tensor(list(lengths), dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def make_case(
    rng: torch.Generator,
    *,
    B: int = 1,
    T: int = 100,
    H: int = 1,
    HV: int | None = None,
    K: int = 16,
    V: int = 16,
    dtype: torch.dtype = torch.float32,
    g_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    gate_dtype: torch.dtype | None = None,
    lengths: list[int] | None = None,
    cu_dtype: torch.dtype = torch.int64,
    initial_state: bool = True,
    dt_bias: bool = True,
    device: str = "cpu",
    **options,
) -> Case:
    """Draws a call as in training: keys of norm 1, beta in 0 .. 1, and mostly slow decays, so that a state lives long.

    `lengths` packs sequences (and sets T and B). Dtypes default to fp32 for g, the state and the gate (fp64 when
    `dtype` is), to `dtype` for beta. `options` go to the operator as they are.
    """
    HV = H if HV is None else HV
    if lengths is not None:
        B, T = 1, sum(lengths)
        options["cu_seqlens"] = cumulative(lengths, cu_dtype).to(device)
    N = B if lengths is None else len(lengths)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def cast(x, to):
        return x.to(to).to(device)

    gate = options.get("use_gate_in_kernel", False)
    k = randn(B, T, H, K)
    q = randn(B, T, H, K)
    if not options.get("use_qk_l2norm_in_kernel"):
        k = F.normalize(k, dim=-1)
    g = randn(B, T, HV) if gate else -F.softplus(1.5 * randn(B, T, HV) - 4)
    beta = randn(B, T, HV)
    if not options.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid()
    state = (N, HV, V, K) if options.get("state_v_first") else (N, HV, K, V)
    A_log = torch.empty(HV, dtype=torch.float64).uniform_(-4, 1, generator=rng)
    inputs = {
        "q": cast(q, dtype),
        "k": cast(k, dtype),
        "v": cast(randn(B, T, HV, V), dtype),
        "g": cast(g, g_dtype or wide),
        "beta": cast(beta, beta_dtype or dtype),
        "initial_state": cast(randn(*state), state_dtype or wide) if initial_state else None,
        "A_log": cast(A_log, gate_dtype or wide) if gate else None,
        "dt_bias": cast(randn(HV) - 2, gate_dtype or wide) if gate and dt_bias else None,
    }
    return Case(inputs, options, cast(randn(B, T, HV, V), dtype), cast(randn(*state), wide))


def run(op: Callable, case: Case, wanted: Iterable[str] | None = None, final: bool = True, **options) -> dict:
    """Calls `op`; returns "o", "final_state" and the gradients of the `wanted` inputs (default: all given) by name.

    `final` False leaves out the final state and its gradient. The gradients of the outputs are the case's.
    """
    wanted = case.present if wanted is None else list(wanted)
    leaves = {name: x if x is None else x.detach() for name, x in case.inputs.items()}
    for name in wanted:
        leaves[name].requires_grad_()
    o, state = op(**leaves, **(case.options | options), output_final_state=final)
    out = {"o": o.detach()}
    pairs = [(o, case.do)]
    if final:
        out["final_state"] = state.detach()
        pairs.append((state, case.dht))
    else:
        assert state is None
    pairs = [(y, dy) for y, dy in pairs if dy is not None]
    if wanted:
        grads = torch.autograd.grad([y for y, _ in pairs], [leaves[n] for n in wanted], [dy for _, dy in pairs])
        for name, grad in zip(wanted, grads):
            assert grad.dtype == case.inputs[name].dtype and grad.shape == case.inputs[name].shape, name
            out[GRADS[name]] = grad
    return out


_ORACLE_SKIPS = ("cu_seqlens_cpu", "chunk_indices", "chunk_size", "backend", "batch_invariant", "save_state", "plan")


@contextmanager
def one_thread():
    """Runs thousands of small operations on one thread: handing each to several costs far more than the operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def reference(case: Case, final: bool = True) -> dict[str, tuple[torch.Tensor, float]]:
    """The float64 answer to `run`: name -> (value, magnitude that its error is measured against).

    The magnitude is the norm of the value, but for dA_log and ddt_bias that of the summands over tokens: a sum that
    happens to cancel is not a reason to ask for more digits than its terms have.
    """
    options = {name: x for name, x in case.options.items() if name not in _ORACLE_SKIPS}
    leaves = {name: None if x is None else x.detach().cpu().double() for name, x in case.inputs.items()}
    for name in ("A_log", "dt_bias"):
        if leaves.get(name) is not None:
            leaves[name] = leaves[name].expand(leaves["g"].shape).clone()
    for x in leaves.values():
        if x is not None:
            x.requires_grad_()
    o, state = oracle.gated_delta_rule(**leaves, **options)
    pairs = [(o, case.do), (state, case.dht if final else None)]
    # Without tokens an output may depend on no input at all: its gradients are zeros.
    pairs = [(y, dy.cpu().double()) for y, dy in pairs if dy is not None and y.requires_grad]
    grads = [None] * len(case.present)
    if pairs:
        ys, dys = zip(*pairs)
        grads = torch.autograd.grad(ys, [leaves[n] for n in case.present], dys, allow_unused=True)
    values = {"o": o.detach()} | ({"final_state": state.detach()} if final else {})
    out = {name: (x, x.norm().item()) for name, x in values.items()}
    for name, grad in zip(case.present, grads):
        grad = torch.zeros_like(leaves[name]) if grad is None else grad
        magnitude = grad.norm().item()
        if name in ("A_log", "dt_bias"):
            grad = grad.sum((0, 1))
        out[GRADS[name]] = (grad, magnitude)
    return out


@one_thread()
def stage_answer(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The answer of `stages.chain` to a case in `dtype`, in the operator's layout and by `run`'s names."""
    given = {name: None if x is None else x.detach().cpu().to(dtype) for name, x in case.inputs.items()}
    opt = case.options
    first = opt.get("state_v_first", False)
    dht = None if case.dht is None else case.dht.cpu().to(dtype)
    if first:
        given["initial_state"] = None if given["initial_state"] is None else given["initial_state"].mT
        dht = None if dht is None else dht.mT
    s = stages.chain(
        given | {"cu_seqlens": opt.get("cu_seqlens")},
        None if case.do is None else case.do.cpu().to(dtype),
        dht,
        scale=opt.get("scale"),
        l2norm=opt.get("use_qk_l2norm_in_kernel", False),
        gate=opt.get("use_gate_in_kernel", False),
        sigmoid=opt.get("use_beta_sigmoid_in_kernel", False),
        neg_eigval=opt.get("allow_neg_eigval", False),
    )
    if first:
        s["final_state"], s["dh0"] = s["final_state"].mT, s["dh0"].mT
    return {name: s[name] for name in ("o", "final_state", *(GRADS[n] for n in case.present))}


def error(x: torch.Tensor, ref: torch.Tensor, magnitude: float | None = None) -> float:
    """||x - ref|| / magnitude (default ||ref||) in float64; 0 when both are zero, inf for a non-finite x."""
    x = x.detach().cpu().double()
    if not x.isfinite().all():
        return math.inf
    difference = (x - ref).norm().item()
    magnitude = ref.norm().item() if magnitude is None else magnitude
    return 0.0 if difference == 0 else difference / magnitude if magnitude else math.inf


def tolerance(
    x: torch.Tensor, value: torch.Tensor, compute: torch.dtype, magnitude: float | None = None, factor: float = 1.0
) -> float:
    """The error allowed to an output `x` where `value` is right, relative to `magnitude` (default the norm of `value`):
    what computing in `compute` costs, and what storing the right value in the output's dtype costs, no more.

    Rounding y instead of the right value r errs by at most |round(r) - r| + 2 |y - r| (both are nearest), whatever the
    distribution of the elements. Below its normal numbers `compute` keeps an absolute error only.
    """
    magnitude = value.norm().item() if magnitude is None else magnitude
    if magnitude == 0:
        return 0.0
    rounding = (value.to(x.dtype).double() - value).norm().item()
    assert math.isfinite(rounding), f"the right value overflows {x.dtype}: the case is no test"
    floor = math.sqrt(x.numel()) * 16 * torch.finfo(compute).smallest_normal
    return COMPUTE_TOLERANCE[compute] * factor + (rounding + floor) / magnitude


def assert_matches(
    out: dict, ref: dict, factor: float = 1.0, yardstick: dict | None = None, only: Iterable[str] | None = None
) -> dict[str, float]:
    """Every output of `run` is within tolerance of `reference`; returns the errors.

    `yardstick` is the answer of the same algorithm in plain arithmetic of the computing dtype: where a case is so badly
    conditioned that it errs more than the tolerance, the operator may err four times as much.
    """
    compute = out["final_state"].dtype if "final_state" in out else torch.float32
    errors, faults = {}, []
    for name in out if only is None else only:
        x, (value, magnitude) = out[name], ref[name]
        assert x.shape == value.shape, f"{name}: {tuple(x.shape)} where {tuple(value.shape)} is right"
        errors[name] = error(x, value, magnitude)
        # A sum over all tokens adds the errors of its terms, which `magnitude` measures one by one.
        spread = 4.0 if name in ("dA_log", "ddt_bias") else 1.0
        allowed = tolerance(x, value, compute, magnitude, factor * spread)
        if yardstick is not None:
            allowed = max(allowed, 4 * error(yardstick[name], value, magnitude))
        floor_only = magnitude == 0 and x.cpu().double().norm() <= torch.finfo(compute).smallest_normal
        if not (errors[name] <= allowed or floor_only):
            faults.append(f"{name}: error {errors[name]:.3g}, allowed {allowed:.3g}")
    assert not faults, "; ".join(faults)
    return errors


def assert_same_bits(a: dict, b: dict, names: Iterable[str] | None = None) -> None:
    """Two answers of `run` are equal to the bit (NaN and signed zeros too) in `names` (default: what both have)."""
    for name in (n for n in a if n in b) if names is None else names:
        x, y = a[name].contiguous(), b[name].contiguous()
        assert x.dtype == y.dtype and x.shape == y.shape, f"{name}: {x.dtype} {x.shape}, {y.dtype} {y.shape}"
        if x.numel() == 0:
            continue
        differ = (x.view(-1).view(torch.uint8) != y.view(-1).view(torch.uint8)).view(x.numel(), -1).any(-1)
        if differ.any():
            i = int(differ.nonzero()[0])
            at = tuple(int(j) for j in torch.unravel_index(torch.tensor(i), x.shape))
            raise AssertionError(
                f"{name}: {int(differ.sum())} of {x.numel()} elements differ, first at {at}: "
                f"{x.view(-1)[i].item()!r} and {y.view(-1)[i].item()!r}"
            )


def assert_reset_starts_a_new_sequence(op: Callable, case: Case, other: Case, t: int) -> None:
    """With a reset at token t of `case`, what `other` has before it, the initial state included, changes no bit after
    it and gets no gradient from there. `case` is changed."""
    case.inputs["g"][:, t] = -math.inf
    case.do[:, :t] = 0
    out = run(op, case)
    mixed = case.with_inputs(initial_state=other.inputs["initial_state"])
    for name in ("q", "k", "v", "g", "beta"):
        mixed.inputs[name] = torch.cat([other.inputs[name][:, :t], case.inputs[name][:, t:]], 1)
    got = run(op, mixed)
    names = ("o", "dq", "dk", "dv", "dg", "dbeta")
    assert_same_bits({n: got[n][:, t:] for n in names}, {n: out[n][:, t:] for n in names})
    assert_same_bits(got, out, ["final_state"])
    assert (out["dh0"] == 0).all() and (out["dg"][:, t] == 0).all()
    for name in names[1:]:
        assert (out[name][:, :t] == 0).all(), name


def digest(out: dict) -> str:
    """SHA-256 over the bytes of an answer, by name in order."""
    sha = hashlib.sha256()
    for name in sorted(out):
        sha.update(name.encode())
        sha.update(out[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def poisoned(x: torch.Tensor, value: float = math.nan) -> torch.Tensor:
    """The same values as a strided view into a larger storage that holds `value` everywhere else, on every side."""
    low = [2 if d < x.dim() - 1 else 3 for d in range(x.dim())]
    store = torch.full([s + a + 1 for s, a in zip(x.shape, low)], value, dtype=x.dtype, device=x.device)
    view = store[tuple(slice(a, a + s) for s, a in zip(x.shape, low))]
    view.copy_(x)
    return view


def storage_bytes(x: torch.Tensor) -> torch.Tensor:
    """A copy of all bytes of the storage behind `x`, to see whether anything in or around it was written."""
    return torch.tensor([], dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).clone()


def sequence(case: Case, n: int) -> Case:
    """Packed sequence n of a case, as a dense batch of one row."""
    cu = case.options["cu_seqlens"].tolist()
    rows = slice(cu[n], cu[n + 1])
    per_token = ("q", "k", "v", "g", "beta")
    inputs = {name: x if x is None else x[:, rows] if name in per_token else x for name, x in case.inputs.items()}
    if inputs["initial_state"] is not None:
        inputs["initial_state"] = inputs["initial_state"][n : n + 1]
    options = {name: x for name, x in case.options.items() if name not in ("cu_seqlens", "cu_seqlens_cpu")}
    dht = None if case.dht is None else case.dht[n : n + 1]
    return Case(inputs, options, None if case.do is None else case.do[:, rows], dht)
