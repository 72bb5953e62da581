"""The programs of segment-parallel scans alone: chunk bounds, pre-scans, the stitch, and scans that start at seams."""

from __future__ import annotations

import dataclasses
from functools import cache

import harness
import pytest
import seams
import stage_cases
import torch
from harness import Chain, place, transposed, width
from reference import stages
from reference.cases import assert_same_bits, one_thread
from stage_cases import Case, Problem, problem

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
LONG = "75 chunks"  # longer than the 32 chunks whose bounds are added up at a time
stage_cases.CASES_ALONE[LONG] = Case(T=64 * 75 - 3, H=1, HV=3, K=32, V=24, resets="none")
CUTS = [("packed", 1), ("packed", 2), ("packed, margins", 1), ("three chunks", 2), ("batch", 1), ("batch", 2)]
CUTS += [("group of 4, 60", 1), ("100", 1), ("36 x 128", 1), ("16", 1), ("128 x 64", 1), ("no token", 1)]
CUTS += [("no sequence", 1), (LONG, 1), (LONG, 34), (LONG, 40)]


def cut(name: str, dtype: torch.dtype, length: int) -> tuple[Problem, Chain]:
    p = problem(name, dtype)
    return p, dataclasses.replace(p.chain, segment=length)


# ---- the bounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["packed", "batch", "only resets", "group of 3, 64", "100", "36 x 128", "no token"])
def test_bounds(name, dtype):
    """wy's is right, and wy_recompute's is the same to the bit; with keys that lengthen a state, too."""
    p = problem(name, dtype)
    for factor in (1.0, 3.0):
        k4 = p.rows(p.inputs["k"] * factor)
        k = p.round(p.k * factor)
        bound = harness.run_wy(p.chain, k4, p.v4, p.gates, bound=True)[3]
        A, h = torch.zeros(p.chain.tokens, p.chain.HV, 64), torch.zeros(p.at_slots(p.rounded("h")).shape)
        more = (A.to(harness.DEVICE), h.to(harness.DEVICE), p.state(p.h0))
        again = harness.run_wy_recompute(p.chain, k4, p.v4, p.gates, *more, bound=True)[2]
        without = harness.run_wy_recompute(p.chain, k4, p.v4, p.gates, more[0], None, bound=True)[2]
        assert_same_bits({"saved": again, "not": without}, {"saved": bound, "not": bound})
        for i, c in enumerate(p.chunks):
            kc, step, last = k[c.tokens].transpose(0, 1), p.step[c.tokens].T, p.last[c.tokens].T
            reset = (last >= 0).any(-1, keepdim=True)
            want = seams.bound(kc, step, p.cum[c.stop - 1], reset)
            torch.testing.assert_close(bound[:, i].cpu().double(), want, rtol=2e-5, atol=2e-5)


# ---- the pre-scans --------------------------------------------------------------------------------------------------


def fwd_step(x: dict, S: torch.Tensor, E16, own: bool) -> torch.Tensor:
    v_new = E16((x["u"] if own else 0.0) - x["w"] @ E16(S))
    return x["D"] * S + x["k"].mT @ E16(x["R"] * v_new)


def adjoint_step(x: dict, dS: torch.Tensor, E16, own: bool) -> torch.Tensor:
    du = E16((x["dv"] if own else 0.0) + x["R"] * (x["k"] @ E16(dS)))
    return x["D"] * dS + (x["q"].mT @ E16(x["sE"] * x["do"]) if own else 0.0) - x["w"].mT @ du


@cache
def rows_of(name: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """What the steps read of each chunk, heads first."""
    p = problem(name, dtype)
    tensors = {"q": p.q, "k": p.k, "do": p.do, "w": p.rounded("w"), "u": p.rounded("u"), "dv": p.rounded("dv_local")}
    out = []
    for c in p.chunks:
        _, E, R, D = stages._gates(c, p.cum, p.last)
        x = {n: y[c.tokens].transpose(0, 1) for n, y in tensors.items()}
        out.append(x | {"sE": p.scale * E[..., None], "R": R[..., None], "D": D[:, None, None]})
    return out


@one_thread()
def right_prescan(p: Problem, chain: Chain, bound: torch.Tensor, backward: bool, E16=lambda x: x):
    """States [seams, HV, K, V], transitions [seams, HV, K, K] and forgotten [seams, HV]."""
    rows, step = rows_of(p.name, p.dtype), adjoint_step if backward else fwd_step
    states, transitions, forgotten = [], [], []
    for before, after in chain.seams:
        _, first, count = chain.segments[after if backward else before]
        order = list(range(first, first + count))
        if not backward:
            order.reverse()  # the chunk next to the seam first
        walked, forgets = seams.reach(torch.stack([bound[:, i] for i in order]))
        S = torch.zeros(chain.HV, chain.K, chain.V, dtype=torch.float64)
        M = torch.eye(chain.K, dtype=torch.float64).expand(chain.HV, -1, -1)
        for distance, i in reversed(list(enumerate(order))):
            S = torch.where((distance < walked)[:, None, None], step(rows[i], S, E16, True), 0.0)
            M = step(rows[i], M, E16, False)
        states.append(S)
        transitions.append(M)
        forgotten.append(forgets)
    empty = torch.zeros(0, chain.HV, chain.K, chain.V, dtype=torch.float64)
    if not states:
        return empty, empty[..., :1].expand(-1, -1, -1, chain.K), torch.zeros(0, chain.HV, dtype=torch.bool)
    return torch.stack(states), torch.stack(transitions), torch.stack(forgotten)


def bounds_of(chain: Chain) -> torch.Tensor:
    """[HV, chunks]: a head that never forgets, one that does within two chunks, one within 32 to 38, in turn; with the
    reset of a chunk every fifth chunk of the second. They are given, so they need not be those of the problem."""
    per_head = torch.tensor([0.3, -13.0, -0.75])[torch.arange(chain.HV) % 3]
    bound = per_head[:, None].expand(-1, len(chain.chunks)).clone()
    bound[1::3, ::5] = -torch.inf
    return bound


def run_prescan(p: Problem, chain: Chain, bound: torch.Tensor, backward: bool):
    bound = bound.to(harness.DEVICE)
    w = p.on_device("w")
    if backward:
        dv = p.on_device("dv_local")
        return harness.run_adjoint_prescan(chain, p.q4, p.k4, p.do4, p.gates, w, dv, bound, p.scale)
    return harness.run_fwd_prescan(chain, p.k4, p.gates, w, p.on_device("u"), bound)


def assert_close(name: str, got: torch.Tensor, right: torch.Tensor, model: torch.Tensor, dtype: torch.dtype) -> None:
    """Of every seam and head: as close as the model of its roundings."""
    info = torch.finfo(dtype)
    norm, error = right.flatten(2).norm(dim=2), (got.cpu().double() - right).flatten(2).norm(dim=2)
    under = 64 * right[0, 0].numel() ** 0.5 * info.smallest_normal * info.eps
    allowed = 1.5 * (model - right).flatten(2).norm(dim=2) + 0.25 * info.eps * norm + under
    bad = ~(error <= allowed)
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()}, first seam and head {at}: error {float(error[at]):.3g} where "
            f"{float(allowed[at]):.3g} is allowed, norm {float(norm[at]):.3g}; got "
            f"{got[at].flatten()[:4].tolist()}..., right {right[at].flatten()[:4].tolist()}..."
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "length"), CUTS)
@pytest.mark.parametrize("backward", [False, True])
def test_prescan(name, length, backward, dtype):
    p, chain = cut(name, dtype, length)
    bound = bounds_of(chain)
    states, parts, forgotten = run_prescan(p, chain, bound, backward)
    right_states, right_transitions, forgets = right_prescan(p, chain, bound, backward)
    model_states, model_transitions, _ = right_prescan(p, chain, bound, backward, p.round)
    assert torch.equal(forgotten.cpu().bool(), forgets) and bool((forgotten <= 1).all())
    if not chain.seams:
        return
    assert_close("states", states, right_states, model_states, dtype)
    kept = ~forgets[..., None, None]
    got = torch.where(kept, transposed(parts, chain.K).cpu(), 0.0)
    right, model = (torch.where(kept, x, 0.0) for x in (right_transitions, model_transitions))
    assert_close("transitions", got, right, model, dtype)
    padding = parts[..., chain.K :][(~forgets).to(parts.device)]
    assert bool((padding == 0).all()), "columns past K are not zero"


@pytest.mark.parametrize("backward", [False, True])
def test_prescan_in_slices_and_alone(backward):
    """The same bits in slices of heads, again, and for a sequence among others and alone."""
    p, chain = cut("packed", torch.bfloat16, 1)
    bound = bounds_of(chain)
    names = ("states", "forgotten")
    states, parts, forgotten = run_prescan(p, chain, bound, backward)
    kept = forgotten == 0
    for begin, heads in ((0, 4), (0, 1), (1, 3)):
        span = slice(begin, begin + heads)
        got = run_prescan(p, chain.sliced(begin, heads), bound, backward)
        assert_same_bits(dict(zip(names, got[::2])), dict(zip(names, (states[:, span], forgotten[:, span]))))
        here = kept[:, span]
        assert_same_bits({"transitions": got[1][here]}, {"transitions": parts[:, span][here]})
    n = 7  # 200 tokens
    alone = stage_cases.alone(p, n)
    ours = [i for i, (a, _) in enumerate(chain.seams) if chain.segments[a][0] == n]
    chunks = [i for i, c in enumerate(p.chunks) if c.sequence == n]
    single = dataclasses.replace(alone.chain, segment=1)
    got = run_prescan(alone, single, bound[:, chunks], backward)
    assert_same_bits(dict(zip(names, got[::2])), dict(zip(names, (states[ours], forgotten[ours]))))
    assert len(ours) == 3


# ---- the stitch -----------------------------------------------------------------------------------------------------


def drawn_seams(chain: Chain, dtype=torch.float32):
    """States, transitions in two parts as the stitch reads them, their sum as a matrix, forgotten, and a start."""
    rng = torch.Generator().manual_seed(len(chain.seams))
    K, V, count = chain.K, chain.V, len(chain.seams)

    def randn(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    states = randn(count, chain.HV, K, V).float()
    high, low = seams.parts(randn(count, chain.HV, K, K) / K**0.5)
    stored = torch.nn.functional.pad(torch.stack([high.mT, low.mT], 2), (0, width(K) - K)).bfloat16()
    forgotten = (torch.rand(count, chain.HV, generator=rng) < 0.3).byte()
    stored[forgotten.bool()] = torch.nan
    return states, stored, high + low, forgotten, randn(chain.N, chain.HV, K, V).to(dtype)


def right_stitch(chain: Chain, states, matrices, forgotten, start, backward: bool) -> torch.Tensor:
    out, order = states.double().clone(), list(enumerate(chain.seams))
    for i, (before, after) in reversed(order) if backward else order:
        n = chain.segments[before][0]
        begins = after + 1 == len(chain.segments) or chain.segments[after + 1][0] != n
        if not backward:
            begins = before == 0 or chain.segments[before - 1][0] != n
        X = start[n].double() if begins else out[i + (1 if backward else -1)]
        out[i] += torch.where(forgotten[i].bool()[:, None, None], 0.0, matrices[i] @ X)
    return out


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("name", "length"), CUTS)
def test_stitch(name, length, backward):
    _, chain = cut(name, torch.bfloat16, length)
    states, stored, matrices, forgotten, start = drawn_seams(chain)
    on = [x.to(harness.DEVICE) for x in (states, stored, forgotten)]
    got = harness.run_stitch(chain, *on, place(start), backward)
    want = right_stitch(chain, states, matrices, forgotten, start, backward)
    scale = want.flatten(2).norm(dim=2)
    error = (got.cpu().double() - want).flatten(2).norm(dim=2)
    assert bool((error <= 5e-5 * scale).all()), f"{(error / scale).max()}, first {(error > 5e-5 * scale).nonzero()[:1]}"
    # In slices of the heads, with a start in another layout and dtype that holds it, the same bits.
    rounded = start.bfloat16()
    whole = harness.run_stitch(chain, *on, place(rounded.float()), backward)
    turned = place(rounded.double(), harness.padded_strides(start.shape, 3, (0, 1, 3, 2)))
    for begin in range(chain.HV):
        part = harness.run_stitch(chain.sliced(begin, 1), *on, turned, backward)
        assert_same_bits({"states": part}, {"states": whole[:, begin : begin + 1]})


def test_stitch_without_a_start():
    """Absent states are zeros."""
    _, chain = cut("packed", torch.float16, 1)
    states, stored, _, forgotten, start = drawn_seams(chain)
    on = [x.to(harness.DEVICE) for x in (states, stored, forgotten)]
    for backward in (False, True):
        zeros = harness.run_stitch(chain, *on, place(torch.zeros_like(start)), backward)
        assert_same_bits({"states": harness.run_stitch(chain, *on, None, backward)}, {"states": zeros})


# ---- scans that start at seams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "length"), [("packed", 1), ("packed", 2), ("group of 4, 60", 1), ("packed, margins", 1)]
)
@pytest.mark.parametrize("backward", [False, True])
def test_a_segment_is_a_sequence_that_starts_at_its_seam(name, length, backward, dtype):
    """To the bit, with the state at the seam as initial state; and the scan stores it as any other chunk's."""
    p, chain = cut(name, dtype, length)
    starts = [chain.chunks[first].start if count else chain.cu[n] for n, first, count in chain.segments]
    apart = dataclasses.replace(chain, cu=(*starts, chain.cu[-1]), segment=1 << 30)
    rng = torch.Generator().manual_seed(0)
    at_seams = torch.randn(len(chain.seams), chain.HV, chain.K, chain.V, generator=rng)
    outer = (p.dht if backward else p.state0).float()
    mine = torch.stack([outer[n] for n, _, _ in chain.segments])
    for seam, (before, after) in enumerate(chain.seams):
        mine[before if backward else after] = at_seams[seam]
    inner = [after if backward else before for before, after in chain.seams]
    ends = [i for i in range(len(chain.segments)) if i not in inner]  # where a sequence's scan ends

    def scan(chain, start, seam_states):
        w, start = p.on_device("w"), place(start)
        if backward:
            args = (p.q4, p.k4, p.do4, p.gates, w, p.on_device("dv_local"), p.scale, start)
            return harness.run_adjoint_scan(chain, *args, seams=seam_states)
        return harness.run_fwd_scan(chain, p.k4, p.gates, w, p.on_device("u"), start, seams=seam_states)

    values, states, final = scan(chain, outer, at_seams.to(harness.DEVICE))
    values_apart, states_apart, final_apart = scan(apart, mine, None)
    alive = chain.live
    assert_same_bits(
        {"values": values[alive], "final": final}, {"values": values_apart[alive], "final": final_apart[ends]}
    )
    inside = [apart.slot(c) for c in apart.chunks if not c.first]
    assert_same_bits({"states": states[inside]}, {"states": states_apart[inside]})
    slots = [chain.slot(chain.chunks[chain.segments[after][1]]) for _, after in chain.seams]
    want = at_seams.to(harness.DEVICE).to(dtype)
    assert_same_bits({"states at seams": states[slots]}, {"states at seams": want})
    assert slots


def run_stage(stage: str) -> None:
    p, chain = cut("packed", torch.bfloat16, 1)
    if stage.endswith("prescan"):
        run_prescan(p, chain, bounds_of(chain), stage.startswith("adjoint"))
    elif stage == "stitch":
        states, stored, _, forgotten, start = drawn_seams(chain)
        on = [x.to(harness.DEVICE) for x in (states, stored, forgotten)]
        harness.run_stitch(chain, *on, place(start), False)
    else:
        stage_cases.run(stage, "packed", torch.bfloat16)


@pytest.mark.parametrize("stage", ["fwd_prescan", "adjoint_prescan", "stitch", "fwd_scan", "adjoint_scan"])
def test_missing_tables_of_segments(stage, monkeypatch):
    monkeypatch.setattr(harness.Launch, "segments", lambda self: self.fields.update(max_segments=5))
    with pytest.raises(ValueError, match="tables of segments missing"):
        run_stage(stage)
