"""Every matrix stage of csrc/cuda/stages.h alone: against its float64 reference, and bit for bit in slices of heads,
again, in other layouts and beside other sequences. pack and finalize are in test_row_stages.py, the gates in
test_gate_stages.py."""

from __future__ import annotations

import pytest
import stage_cases
import torch
from harness import padded_strides
from reference.cases import assert_same_bits
from stage_cases import CASES, assert_refused, expected, heads_of, problem, run

pytestmark = pytest.mark.gpu

STAGES = ("wy", "wy_recompute", "fwd_scan", "output", "dv_local", "adjoint_scan", "dqkwg", "wy_backward")
DTYPES = (torch.bfloat16, torch.float16)

# Errors of a row in units of the 16-bit type's eps, relative to the row's norm or to the rows' root mean square in its
# chunk and head, whichever is larger. One rounding of each element costs 0.21 of it, the roundings of a stage's scores
# and states as much again; the largest that an exact model of the stages showed is 0.6. A missing token of 64 costs 16
# (bf16) and more. A is one rounding of mostly small numbers beside a one.
ROW_ERROR = {"A": 0.4, "final_state": 0.7, "dh0": 0.6}
ROW_ERROR_DEFAULT = 1.0
# dqkwg's share of the gradient of cum is an fp32 sum of fp32 products; this is no multiple of eps.
DQKWG_DCUM_ERROR = 5e-5


def token_rows(stage: str, output: str, x: torch.Tensor) -> torch.Tensor:
    """[B * T, heads, columns] of any per-token output."""
    x = x.detach().cpu().double()
    if heads_of(stage, output)[0] == 2:
        return x.flatten(0, 1)
    return x.T[..., None] if output in ("dcum", "dstep") else x


def assert_stage(stage: str, name: str, dtype: torch.dtype, got: dict[str, torch.Tensor]) -> None:
    """All outputs are the reference's to within rounding."""
    case, info = problem(name, dtype), torch.finfo(dtype)
    live = case.chain.live.cpu()
    faults = []
    for output, want in expected(stage, name, dtype).items():
        x = got[output]
        if output in ("h", "dh"):
            owned = ~want.flatten(1).isnan().any(1)
            x, want = x.detach().cpu().double().flatten(2), want.flatten(2)
            # Nobody reads the others; a stage may clear them.
            assert bool((x[~owned].isnan() | (x[~owned] == 0)).all()), f"{output}: a slot of no chunk was written"
            x, want = x[owned], want[owned]
            scale = want.norm(dim=-1)
        elif output in ("final_state", "dh0"):
            x, want = x.detach().cpu().double().flatten(2), want.flatten(2)
            scale = want.norm(dim=-1)
        else:
            x = token_rows(stage, output, x)
            want = token_rows(stage, output, want) if output in ("dcum", "dstep") else want
            norm = want.norm(dim=-1)
            scale = norm.clone()
            for c in case.chunks:
                scale[c.tokens] = torch.maximum(norm[c.tokens], norm[c.tokens].square().mean(0).sqrt())
            x, want, scale = x[live], want[live], scale[live]
        if not x.numel():
            continue
        assert x.shape == want.shape, f"{output}: {tuple(x.shape)}, {tuple(want.shape)} is right"
        relative = ROW_ERROR.get(output, ROW_ERROR_DEFAULT) * info.eps
        allowed = scale * (DQKWG_DCUM_ERROR if (stage, output) == ("dqkwg", "dcum") else relative)
        # What underflows in the 16-bit type keeps an absolute error.
        allowed = allowed + 8 * x.shape[-1] ** 0.5 * info.smallest_normal * info.eps
        error = (x - want).norm(dim=-1)
        bad = ~(error <= allowed)  # NaN is bad
        if bad.any():
            at = tuple(int(i) for i in bad.nonzero()[0])
            faults.append(
                f"{output}: {int(bad.sum())} of {bad.numel()} rows, first {at} with error {float(error[at]):.3g} where "
                f"{float(allowed[at]):.3g} is allowed; got {x[at][:4].tolist()}..., right {want[at][:4].tolist()}..."
            )
    assert not faults, "\n".join(faults)


def assert_bits(stage: str, got: dict, want: dict, span: slice) -> None:
    """What a slice `got` of the heads gave is what all heads together gave."""
    a, b = {}, {}
    for output, x in got.items():
        dim, local = heads_of(stage, output)
        heads = slice(None) if local else span
        pick = lambda y, s: y[(slice(None),) * dim + (s,)]  # noqa: E731, B023
        a[output], b[output] = pick(x, heads).cpu(), pick(want[output], span).cpu()
    assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", STAGES)
def test_against_reference(stage, name, dtype):
    assert_stage(stage, name, dtype, run(stage, name, dtype))


@pytest.mark.parametrize("name", ["packed", "group of 3, 64", "batch"])
@pytest.mark.parametrize("stage", STAGES)
def test_slices_and_repetitions_give_the_same_bits(stage, name):
    """In slices that may cut a group, with the scans' slice wider than the stage's, and once more as before."""
    chain = problem(name, torch.bfloat16).chain
    whole = run(stage, name, torch.bfloat16)
    assert_bits(stage, run(stage, name, torch.bfloat16), whole, slice(0, chain.HV))
    first = chain.HV // 2 - (0 if chain.HV % 4 else 1) or 1
    for begin, heads in ((0, first), (first, chain.HV - first)):
        part = run(stage, name, torch.bfloat16, chain.sliced(begin, heads))
        assert_bits(stage, part, whole, slice(begin, begin + heads))
    if stage in ("dqkwg", "wy_backward"):
        part = run(stage, name, torch.bfloat16, chain.sliced(1, 1, stored=(0, chain.HV)))
        assert_bits(stage, part, whole, slice(1, 2))


@pytest.mark.parametrize("stage", ["fwd_scan", "output", "dqkwg"])
def test_saved_states_give_the_same_bits(stage):
    """The states in a tensor of all heads, as they are saved, or of the slice's heads."""
    name = "packed"
    chain = problem(name, torch.bfloat16).chain.sliced(1, 2)
    whole = run(stage, name, torch.bfloat16)
    got = run(stage, name, torch.bfloat16, chain, saved=True)
    if stage == "fwd_scan":
        got["h"] = got["h"][:, 1:3]
    assert_bits(stage, got, whole, slice(1, 3))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stage", ["fwd_scan", "adjoint_scan"])
def test_state_layouts_give_the_same_bits(stage, state_dtype, v_first):
    """States given and returned as [K, V] or [V, K], in any dtype that holds them."""
    name = "packed, margins"
    whole = run(stage, name, torch.bfloat16)
    got = run(stage, name, torch.bfloat16, v_first=v_first, state_dtype=state_dtype)
    assert_bits(stage, got, whole, slice(None))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2), (2, 3, 1, 0)], ids=str)
@pytest.mark.parametrize("pad", [0, 8, 3])
@pytest.mark.parametrize("stage", ["output", "wy_backward"])
def test_output_strides_give_the_same_bits(stage, order, pad):
    """o and dv in any dimension order, with gaps of a whole number of 16 bytes and of others."""
    name = "group of 4, 60"
    case = problem(name, torch.bfloat16)
    shape = (case.chain.B, case.chain.T, case.chain.HV, case.chain.V)
    whole = run(stage, name, torch.bfloat16)
    got = run(stage, name, torch.bfloat16, strides=padded_strides(shape, pad, order))
    assert_bits(stage, got, whole, slice(None))


@pytest.mark.parametrize("stage", STAGES)
def test_a_sequence_does_not_see_its_neighbours(stage):
    """A packed sequence's rows have the bits that they have alone, at another place and beside other chunks."""
    name, n = "packed", 3  # 127 tokens
    dtype = torch.bfloat16
    packed = problem(name, dtype)
    start, stop = packed.chain.cu[n], packed.chain.cu[n + 1]
    rows = slice(start, stop)
    alone = stage_cases.alone(packed, n)
    whole = run(stage, name, dtype)
    got = run(stage, alone.name, dtype)
    compared = 0
    for output, x in got.items():
        dim, _ = heads_of(stage, output)
        if output in ("h", "dh"):
            ours = [packed.chain.slot(c) for c in packed.chunks if c.sequence == n and not c.first]
            theirs = [alone.chain.slot(c) for c in alone.chunks if not c.first]
            pair = x[theirs], whole[output][ours]
        elif output in ("final_state", "dh0"):
            pair = x[0], whole[output][n]
        elif output in ("dcum", "dstep"):
            pair = x, whole[output][:, rows]
        else:
            pair = (x[0], whole[output][0, rows]) if dim == 2 else (x, whole[output][rows])
        assert_same_bits({output: pair[0].cpu()}, {output: pair[1].cpu()})
        compared += pair[0].numel()
    assert compared


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": 2}, "dtype"),
        ({"K": 129}, "128"),
        ({"V": 0}, "128"),
        ({"H": 3}, "sizes"),
        ({"heads": 3}, "slice of heads"),
        ({"head_begin": -1}, "slice of heads"),
        ({"chunks": 0}, "tables"),
        ({"device": 4096}, "device: got 4096"),
    ],
    ids=str,
)
def test_bad_params(stage, change, message, monkeypatch):
    """Refused before any launch, by name; nothing is written."""
    assert_refused(stage, "65", change, message, monkeypatch)
