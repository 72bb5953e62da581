"""What the GPU chain must answer, and how far it may be off: the float64 oracle, the CPU engine, and a model of the
chain's own roundings.

The chain computes in fp32 and rounds to 16 bits at known places: the operands of its tensor-core products and what it
stores between its programs. `rounded` makes these roundings in float64, so its error against the oracle is what the
design costs on a given call, well conditioned or not (in bf16 some 4e-3 of o and 3e-3 to 6e-3 of a gradient; in fp16 an
eighth of that). A right chain errs as much as the model does, since nearly all of its roundings fall alike; a dropped
term, a wrong mask or a state kept in 16 bits shows as more. Hence

    error <= RATIO * (the model's error) + FLOOR * eps

relative to the norm of an output, with eps of the 16-bit type, and the same with ROW_RATIO and ROW_FLOOR for the worst
row of an output (a token's vector of one head), relative to the rows' root mean square: one wrong token disappears in
the norm of thousands. The floors cover outputs of few elements, on which the model may be off by less than its due.

The gradients of A_log and dt_bias are sums over all tokens of one head, and `magnitude` is the norm of their terms.
Their error is a single number that few terms decide, those where a long-lived state meets its gradient; rounding these
otherwise, as fp32 arithmetic in another order does, changes it by half to twice and more. So it is held to SUM_RATIO
times the root mean square over several realisations of the model, each off by NOISE before every rounding.

A case that says nothing else is well conditioned: there no output may be allowed more than CAP * eps, which holds the
model itself to the few roundings that lie between an input and an output (SUM_CAP: and a sum over all tokens).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import seams
import torch
from reference import oracle, stages
from reference.cases import GRADS, Case, error, make_case, one_thread, run

DEVICE = "cuda"
RATIO, FLOOR = 1.5, 0.25
ROW_RATIO, ROW_FLOOR = 2.0, 1.0
CAP = 3.0
SUMS = ("dA_log", "ddt_bias")
SUM_CAP, SUM_RATIO = 25.0, 3.0
REALISATIONS, NOISE = 4, 1e-6  # NOISE: what fp32 arithmetic in another order changes
RESET_BELOW = -104.0  # a log decay whose exponential is zero in fp32, subnormals included


def moved(case: Case, device: str, dtype: torch.dtype | None = None) -> Case:
    """The case on another device, with q, k, v and the gradient of o in another dtype when one is given."""

    def move(x, cast=False):
        if not isinstance(x, torch.Tensor):
            return x
        return x.detach().to(device, dtype) if cast and dtype is not None else x.detach().to(device)

    inputs = {name: move(x, name in ("q", "k", "v")) for name, x in case.inputs.items()}
    options = {name: move(x) for name, x in case.options.items()}
    return replace(case, inputs=inputs, options=options, do=move(case.do, True), dht=move(case.dht))


# ---- references -----------------------------------------------------------------------------------------------------

_NO_OPTION_OF_THE_ORACLE = (
    *("cu_seqlens_cpu", "chunk_indices", "chunk_size", "backend", "batch_invariant", "save_state", "plan"),
)


@one_thread()
def truth(case: Case, final: bool = True) -> dict[str, tuple[torch.Tensor, float]]:
    """reference.cases.reference on the device of the case: name -> (value, the magnitude that errors are relative to).

    The oracle takes some thirty small operations a token; for heads of 128 they are far quicker on a GPU.
    """
    options = {name: x for name, x in case.options.items() if name not in _NO_OPTION_OF_THE_ORACLE}
    if options.get("cu_seqlens") is not None:
        options["cu_seqlens"] = options["cu_seqlens"].tolist()
    leaves = {name: None if x is None else x.detach().double() for name, x in case.inputs.items()}
    for name in ("A_log", "dt_bias"):  # one for each token, so that the sizes of a sum's terms are known
        if leaves.get(name) is not None:
            leaves[name] = leaves[name].expand(leaves["g"].shape).clone()
    for x in leaves.values():
        if x is not None:
            x.requires_grad_()
    o, state = oracle.gated_delta_rule(**leaves, **options)
    pairs = [(o, case.do), (state, case.dht if final else None)]
    pairs = [(y, dy.double()) for y, dy in pairs if dy is not None and y.requires_grad]
    grads = [None] * len(case.present)
    if pairs:
        ys, dys = zip(*pairs)
        grads = torch.autograd.grad(ys, [leaves[n] for n in case.present], dys, allow_unused=True)
    values = {"o": o.detach()} | ({"final_state": state.detach()} if final else {})
    out = {name: (x.cpu(), x.norm().item()) for name, x in values.items()}
    for name, grad in zip(case.present, grads):
        grad = torch.zeros_like(leaves[name]) if grad is None else grad
        magnitude = grad.norm().item()
        out[GRADS[name]] = ((grad.sum((0, 1)) if GRADS[name] in SUMS else grad).cpu(), magnitude)
    return out


def engine(op: Callable, case: Case, final: bool = True) -> dict[str, torch.Tensor]:
    """The CPU engine's answer to the same numbers: q, k, v and do in fp32, which it computes in."""
    options = {name: x for name, x in (("backend", "cpu"), ("plan", None)) if name in case.options}
    return run(op, moved(case, "cpu", torch.float32).with_options(**options), final=final)


# ---- the model ------------------------------------------------------------------------------------------------------


def _gates(raw: torch.Tensor):
    """A chunk's decays from its log decays [HV, n]: G [HV, n, n], E and R [HV, n], D [HV], the resets, each token's
    latest reset."""
    n = raw.shape[1]
    reset = raw <= RESET_BELOW
    index = torch.arange(n, device=raw.device)
    last = torch.where(reset, index, -1).cummax(1).values
    total = torch.where(reset, 0.0, raw.double()).cumsum(1)
    total = total - torch.where(last < 0, 0.0, total.gather(1, last.clamp(min=0)))
    cum = total.float().double()
    seen = (index[:, None] >= index) & (last[:, :, None] <= index)
    G = torch.where(seen, torch.where(seen, cum[:, :, None] - cum[:, None, :], 0.0).exp(), 0.0)
    E = torch.where(last < 0, cum.exp(), 0.0)
    return G, E, G[:, -1], E[:, -1], reset, last


def _chunk(x, E16):
    """One chunk of all value heads without the state; x holds its rows, heads first."""
    G, E, R, D, reset, last = _gates(x["raw"])
    q, k, v, step = x["q"], x["k"], x["v"], x["step"]
    kk, qk = k @ k.mT, q @ k.mT
    eye = torch.eye(k.shape[1], dtype=k.dtype, device=k.device).expand_as(kk)
    L = (step[..., None] * kk * G).tril(-1)
    A = E16(torch.linalg.solve_triangular(L + eye, eye, upper=False, unitriangular=True))
    w = E16(A @ E16((step * E)[..., None] * k))
    u = E16(A @ E16(step[..., None] * v))
    return x | dict(G=G, E=E, R=R, D=D, reset=reset, last=last, kk=kk, qk=qk, A=A, w=w, u=u, scores=E16(qk * G))


def advance(x, S, E16, transition: bool = False):
    """The state through one chunk: E16 of it, the corrected values, and the state after it. `transition`: without the
    chunk's own values."""
    h = E16(S)
    v_new = E16((0.0 if transition else x["u"]) - x["w"] @ h)
    return h, v_new, x["D"][:, None, None] * S + x["k"].mT @ E16(x["R"][..., None] * v_new)


def retreat(x, dS, E16, transition: bool = False):
    """The state's gradient against one chunk: E16 of it, the gradient of the corrected values, and that before it."""
    dh, do, scale = E16(dS), x["do"], x["scale"]
    local = 0.0 if transition else E16(scale * x["scores"].mT @ do)
    du = E16(local + x["R"][..., None] * (x["k"] @ dh))
    own = 0.0 if transition else x["q"].mT @ E16((scale * x["E"])[..., None] * do)
    return dh, du, x["D"][:, None, None] * dS + own - x["w"].mT @ du


def _chunk_backward(x, dS, E16):
    """The gradients of one chunk, and of the state before it, from that of the state after it."""
    G, E, R, D, h, v_new, A = (x[name] for name in ("G", "E", "R", "D", "h", "v_new", "A"))
    q, k, v, do, step, scale = (x[name] for name in ("q", "k", "v", "do", "step", "scale"))
    dh, du, before = retreat(x, dS, E16)

    inter, carry = scale * E[..., None] * (do @ h.mT), R[..., None] * (v_new @ dh.mT)
    Z = scale * (do @ v_new.mT) * G
    dq, dk = inter + E16(Z) @ k, carry + E16(Z).mT @ q
    P = (Z * x["qk"]).tril(-1)
    leaves = (carry * k).sum(-1)
    leaves[:, -1] = 0.0
    dcum = (inter * q).sum(-1) - leaves + P.sum(-1) - P.sum(-2)
    dcum[:, -1] += leaves.sum(-1) + D * (h * dh).sum((-1, -2))

    dr = A.mT @ du
    dkw = -E16(dr) @ h.mT
    X = -(E16(dr) @ v_new.mT).tril(-1) * G
    P, W = X * x["kk"], E16(step[..., None] * X)
    share = E * (dkw * k).sum(-1) + P.sum(-1)
    dk += (step * E)[..., None] * dkw + W @ k + W.mT @ k
    dcum += step * share - (step[..., None] * P).sum(-2)
    dstep = (dr * v).sum(-1) + share

    # From the cumulative sum to the log decays: over the tokens from t on up to the next reset, zero at a reset.
    total = dcum.flip(1).cumsum(1).flip(1)
    after = torch.where(x["reset"], total, 0.0)  # what lies at and behind a reset
    index = torch.arange(dcum.shape[1], device=dcum.device)
    following = torch.where(x["reset"], index, index.numel()).flip(1).cummin(1).values.flip(1)
    following = torch.cat([following[:, 1:], torch.full_like(following[:, :1], index.numel())], 1)
    beyond = torch.nn.functional.pad(after, (0, 1)).gather(1, following)
    draw = torch.where(x["reset"], 0.0, total - beyond)
    return dict(q=dq, k=dk, v=E16(step[..., None] * dr), draw=draw, step=dstep), before


@one_thread()
def rounded(
    case: Case, final: bool = True, noise: int | None = None, segment: int | None = None
) -> dict[str, torch.Tensor]:
    """The answer of the chain with its roundings made in float64, by `run`'s names, in the dtypes of the outputs.

    `noise`: a seed; then everything is off by NOISE before it is rounded, so that some roundings fall otherwise.
    `segment`: the sequences are cut into segments of so many chunks; None: they are not.
    """
    given, opt = case.inputs, case.options
    B, T, H, K = given["q"].shape
    HV, V = given["v"].shape[2:]
    dtype, device, group = given["q"].dtype, given["q"].device, HV // H
    first = opt.get("state_v_first", False)

    rng = None if noise is None else torch.Generator(device=device).manual_seed(noise)

    def E16(x):
        if rng is not None:
            x = x * (1 + NOISE * torch.randn(x.shape, generator=rng, dtype=x.dtype, device=device))
        return x.to(dtype).double()

    def rows(x):
        return torch.zeros(B * T, HV, V, dtype=torch.float64, device=device) if x is None else x.flatten(0, 1).double()

    def state(x):
        if x is None:
            return torch.zeros(N, HV, K, V, dtype=torch.float64, device=device)
        return (x.mT if first else x).float().double()

    cu = opt.get("cu_seqlens")
    bounds = [b * T for b in range(B + 1)] if cu is None else cu.tolist()
    N, chunks = len(bounds) - 1, stages.tables(bounds)
    scale = K**-0.5 if opt.get("scale") is None else opt["scale"]
    q0, k0, v, g0, beta0 = (rows(given[name]) for name in ("q", "k", "v", "g", "beta"))
    do = rows(case.do)
    normalise = opt.get("use_qk_l2norm_in_kernel", False)
    rstd = [stages.l2norm_rstd(x) for x in (q0, k0)]
    q, k = (E16(x * r[..., None]) if normalise else x for x, r in zip((q0, k0), rstd))
    gate = opt.get("use_gate_in_kernel", False)
    parameters = [None if given.get(n) is None else given[n].double() for n in ("A_log", "dt_bias")]
    raw = (oracle.log_decay(g0, *parameters) if gate else g0).float()
    sigmoid, doubled = opt.get("use_beta_sigmoid_in_kernel", False), opt.get("allow_neg_eigval", False)
    step = stages.beta_activation(beta0, sigmoid, doubled)

    token = dict(q=q.repeat_interleave(group, 1), k=k.repeat_interleave(group, 1), v=v, do=do, raw=raw, step=step)
    S, dS = state(given.get("initial_state")), state(case.dht if final else None)
    o = torch.empty_like(v)
    kept = [_chunk({n: y[c.tokens].transpose(0, 1) for n, y in token.items()} | {"scale": scale}, E16) for c in chunks]
    starts = seams.starts(chunks, kept, S, segment, advance, E16) if segment else {}
    for i, (c, x) in enumerate(zip(chunks, kept)):
        h, v_new, S[c.sequence] = advance(x, starts.get(i, S[c.sequence]), E16)
        o[c.tokens] = E16(scale * (x["E"][..., None] * (x["q"] @ h) + x["scores"] @ v_new)).transpose(0, 1)
        x.update(h=h, v_new=v_new)
    shapes = dict(q=(HV, K), k=(HV, K), v=(HV, V), draw=(HV,), step=(HV,))
    d = {name: torch.zeros(B * T, *s, dtype=torch.float64, device=device) for name, s in shapes.items()}
    starts = seams.starts(chunks, kept, dS, segment, retreat, E16) if segment else {}
    for i, (c, x) in reversed(list(enumerate(zip(chunks, kept)))):
        grads, dS[c.sequence] = _chunk_backward(x, starts.get(i, dS[c.sequence]), E16)
        for name, y in grads.items():
            d[name][c.tokens] = y.transpose(0, 1)

    d["q"], d["k"] = stages.group_sum(d["q"], H), stages.group_sum(d["k"], H)
    if normalise:
        for name, y, r in zip("qk", (q, k), rstd):
            d[name] = r[..., None] * (d[name] - y * (y * d[name]).sum(-1, keepdim=True))
    d["g"] = d.pop("draw")
    if gate:
        d["g"], d["A_log"], d["dt_bias"] = stages.gate_backward(g0, *parameters, raw.double(), d["g"])
    d["beta"] = stages.beta_backward(beta0, d.pop("step"), sigmoid, doubled)
    d["initial_state"] = dS.mT if first else dS

    out = {"o": o.to(dtype).view(B, T, HV, V)}
    if final:
        out["final_state"] = (S.mT if first else S).float()
    for name in case.present:
        out[GRADS[name]] = d[name].to(given[name].dtype).view(given[name].shape)
    return out


def realisations(case: Case, final: bool = True) -> list[dict[str, torch.Tensor]]:
    """Other answers that the chain may give as well, for the tolerance of SUMS; none without an in-kernel gate."""
    return [rounded(case, final, seed) for seed in range(REALISATIONS)] if "A_log" in case.present else []


# ---- the comparison -------------------------------------------------------------------------------------------------


def worst_row(x: torch.Tensor, value: torch.Tensor) -> float:
    """The largest error of a row, relative to the rows' root mean square; rows are vectors of one token and head."""
    if value.dim() == 3:  # g, beta: a row is an element
        x, value = x[..., None], value[..., None]
    scale = value.norm(dim=-1).square().mean().sqrt().item()
    off = (x.detach().cpu().double() - value).norm(dim=-1)
    return off.max().item() / scale if scale else 0.0


def assert_errors(
    case: Case,
    out: dict[str, torch.Tensor],
    ref: dict[str, tuple[torch.Tensor, float]],
    model: dict[str, torch.Tensor],
    cap: float | None = CAP,
    ratio: float = RATIO,
    others: Sequence[dict[str, torch.Tensor]] = (),
) -> None:
    """Every output is within the tolerance above of its value in `ref`, which also has its magnitude; `others` are
    `realisations`."""
    info = torch.finfo(case.inputs["q"].dtype)
    faults = []
    for name, x in out.items():
        value, magnitude = ref[name]
        assert x.shape == value.shape, f"{name}: {tuple(x.shape)} where {tuple(value.shape)} is right"
        if magnitude == 0:
            if x.count_nonzero():
                faults.append(f"{name}: must be zero, has norm {x.double().norm().item():.3g}")
            continue
        most = ratio * error(model[name], value, magnitude) + FLOOR * info.eps
        if name in SUMS:
            squares = [error(m[name], value, magnitude) ** 2 for m in (model, *others)]
            most = SUM_RATIO * math.sqrt(sum(squares) / len(squares)) + FLOOR * info.eps
        assert math.isfinite(most), f"{name}: the model itself is not finite"
        # What underflows in 16 bits keeps an absolute error, in every term of the products that lead to it.
        under = 64 * math.sqrt(value.numel()) * info.smallest_normal * info.eps / magnitude
        if cap is not None:
            limit = SUM_CAP if name in SUMS else cap
            assert most <= limit * info.eps + under, f"{name}: the model itself errs by {most / info.eps:.3g} eps"
        got = error(x, value, magnitude)
        if not got <= most + under:
            faults.append(f"{name}: error {got:.3g}, allowed {most + under:.3g}")
        if x.dim() in (3, 4) and name not in ("final_state", "dh0"):
            most = (
                ROW_RATIO * (ratio / RATIO) * worst_row(model[name], value)
                + ROW_FLOOR * info.eps
                + under * math.sqrt(value.numel())
            )
            got = worst_row(x, value)
            if not got <= most:
                faults.append(f"{name}: error of the worst row {got:.3g}, allowed {most:.3g}")
    assert not faults, "; ".join(faults)


def assert_chain(
    op: Callable,
    case: Case,
    *,
    final: bool = True,
    cap: float | None = CAP,
    ratio: float = RATIO,
    only: Iterable[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Runs the case; compares every output (of `only`) with the oracle and with the CPU engine, whose own error, some
    1e-6, is nothing beside the tolerance. Returns the outputs."""
    out = run(op, case, final=final)
    chosen = out if only is None else {name: out[name] for name in only}
    model, ref, host = rounded(case, final), truth(case, final), engine(op, case, final)
    others = realisations(case, final)
    assert_errors(case, chosen, ref, model, cap, ratio, others)
    ref = {n: (host[n].double(), magnitude) for n, (_, magnitude) in ref.items()}
    assert_errors(case, chosen, ref, model, None, ratio, others)
    return out


def drawn(rng: torch.Generator, **arguments) -> Case:
    """`make_case` on the device, bf16 unless told otherwise."""
    return make_case(rng, device=DEVICE, **({"dtype": torch.bfloat16} | arguments))
