"""The operator with its sequences cut into segments: right, as precise as without, and the same bits in every way of
saying the same call. `plan` pins the length of the segments; what the planner chooses is tested in tests/cpp."""

from __future__ import annotations

import chain_model
import contract_tools as tools
import pytest
import torch
from chain_model import assert_chain, assert_errors, drawn, rounded, truth
from contract_tools import cut_heads, forward, heads_of, sequences_of
from reference.cases import ALL_OPTIONS, assert_same_bits, cumulative, error, run, stage_answer
from test_layouts import assert_sequences_alone
from test_seams import lengthening_case, rms, slow_case

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
# Empty sequences before, between and after others; lengths at and beside the borders of segments of 1, 2, 3 chunks.
LENGTHS = [0, 200, 0, 1, 64, 65, 128, 129, 0, 383, 384, 385, 70, 0, 0]


def pinned(length) -> dict:
    return {"plan": f"segment={length}"}


# ---- right ----------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("length", [1, 2, 3, "whole"])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
def test_against_the_oracle(op, rng, lengths, options, length, dtype):
    case = drawn(rng, B=2, T=450, H=2, HV=4, K=64, V=48, lengths=lengths, dtype=dtype, **options, **pinned(length))
    assert_chain(op, case)


@pytest.mark.parametrize(("K", "V"), [(128, 128), (60, 100), (100, 60), (16, 128), (128, 16), (5, 5), (36, 65)])
def test_head_sizes(op, rng, K, V):
    assert_chain(op, drawn(rng, T=330, H=1, HV=2, K=K, V=V, **pinned(1)))


@pytest.mark.parametrize("initial_state", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_states_are_optional(op, rng, initial_state, final):
    assert_chain(op, drawn(rng, T=330, HV=2, initial_state=initial_state, **pinned(2)), final=final)


@DTYPES
@pytest.mark.parametrize("length", [1, 3])
def test_gates_that_forget(op, rng, length, dtype):
    """Heads that forget within a few tokens, within a chunk or two, within many, and never; and resets at any place."""
    case = drawn(rng, T=900, HV=8, K=64, V=64, dtype=dtype, **pinned(length))
    g = case.inputs["g"]
    g[..., 1], g[..., 2] = -5.0, -0.3
    g[..., 3] *= 0.0
    at = torch.rand(g.shape, generator=rng).to(g.device)
    g[..., 4:6][at[..., 4:6] < 0.01] = -torch.inf
    g[..., 6][at[..., 6] < 0.002] = -200.0
    g[:, [63, 64, 127, 128, 256], 7] = -torch.inf
    assert_chain(op, case)


def test_keys_that_lengthen_a_state(op):
    """What the gates alone would call forgotten lives on where keys undo them."""
    case = chain_model.moved(lengthening_case(), chain_model.DEVICE)
    right = stage_answer(case)
    for length in (1, 2):
        out = run(op, case, **pinned(length))
        for name in ("final_state", "dh0"):
            assert error(out[name], right[name]) < 0.1, name


@DTYPES
def test_unnormalised_keys(op, rng, dtype):
    """beta |k|^2 from 0 to 6 and gates that make up for it."""
    case = drawn(rng, T=400, HV=4, K=32, V=32, dtype=dtype, **pinned(1))
    k = (case.inputs["k"].float() * (0.5 + 2 * torch.rand(1, 400, 1, 1, generator=rng).to(case.do.device))).to(dtype)
    case = case.with_inputs(k=k, g=case.inputs["g"] - 0.6)
    assert_errors(case, run(op, case), truth(case), rounded(case, segment=1), cap=None)


@pytest.mark.parametrize("decay", [0.2, 0.4, 0.6])
def test_a_state_ten_thousand_times_larger_before_the_segment(op, rng, decay):
    """It must be out of sight of what follows only where nothing of it is left: relative to what follows."""
    T, border = 1024, 512
    case = drawn(rng, T=T, HV=2, K=64, V=64, **pinned(4))
    case.inputs["v"][:, :border] *= 1e4
    case.inputs["g"].fill_(-decay)
    ref, model = truth(case), rounded(case)
    out = run(op, case)
    pairs = {"o": slice(border + 128, None), "final_state": slice(None)}
    for name, part in pairs.items():
        right = ref[name][0][:, part]
        allowed = 1.5 * error(model[name][:, part], right) + 0.25 * torch.finfo(BF16).eps
        assert error(out[name][:, part], right) <= allowed, name


# ---- as precise as whole sequences ----------------------------------------------------------------------------------


@DTYPES
def test_error_is_at_most_five_percent_more(op, rng, dtype):
    """Root mean square over draws with slow gates; dg and dbeta, of one element a token, with the model's slack."""
    errors: dict = {}
    for _ in range(3):
        case = chain_model.moved(slow_case(rng, 8192, 8, 128, dtype), chain_model.DEVICE)
        right = stage_answer(case)
        for length in ("whole", 8, 16, 32):
            for name, x in run(op, case, **pinned(length)).items():
                errors.setdefault((name, length), []).append(error(x, right[name]))
    faults = []
    for (name, length), values in errors.items():
        ratio = rms(values) / rms(errors[name, "whole"])
        if not ratio <= (1.5 if name in ("dg", "dbeta") else 1.05):
            faults.append(f"{name}, {length}: {ratio:.3f} of the error of whole sequences")
    assert not faults, "; ".join(faults)


# ---- the same bits --------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("length", [1, 2, "whole"])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
def test_saved_states_and_repetitions(op, rng, lengths, length, dtype):
    case = drawn(rng, B=2, T=450, H=2, HV=6, K=96, V=40, lengths=lengths, dtype=dtype, **ALL_OPTIONS, **pinned(length))
    first = run(op, case)
    for save_state in (True, False, None):
        assert_same_bits(first, run(op, case, save_state=save_state))
        assert_same_bits(first, forward(op, case, save_state=save_state))


def test_pins_of_the_same_cut(op, rng):
    """A length beyond the sequences is "whole", and as many chunks as there are; no pin is one of the pinned plans."""
    case = drawn(rng, T=500, HV=2, K=64, V=64)
    whole = run(op, case, **pinned("whole"))
    for length in (8, 9, 2**31 - 1):
        assert_same_bits(whole, run(op, case, **pinned(length)))
    assert_same_bits(whole, run(op, case))
    assert not torch.equal(whole["o"], run(op, case, **pinned(1))["o"])


@DTYPES
@pytest.mark.parametrize("options", [pinned(2), {"batch_invariant": True}], ids=["pinned", "batch_invariant"])
def test_packed_is_dense_is_alone(op, rng, options, dtype):
    B, T = 3, 400
    case = drawn(rng, B=B, T=T, HV=2, K=64, V=64, dtype=dtype, **options)
    dense = run(op, case)
    flat = {n: case.inputs[n].reshape(1, B * T, *case.inputs[n].shape[2:]) for n in tools.PER_TOKEN}
    packed = case.with_inputs(**flat).with_options(cu_seqlens=cumulative([T] * B).to(case.do.device))
    packed.do = case.do.reshape(1, B * T, *case.do.shape[2:])
    out = run(op, packed)
    assert_same_bits({n: x.reshape(dense[n].shape) for n, x in out.items()}, dense)
    assert_sequences_alone(op, packed, out)


@pytest.mark.parametrize("length", [32, 64])
def test_batch_invariant_sequences_are_cut(op, length):
    """Long sequences of few heads: among others, in other orders and alone the same bits."""
    lengths = [64 * length + 5, 0, 130, 3 * 64 * length, 1, 64 * length]
    case = tools.large_case(T=0, H=2, HV=length // 4, K=128, V=128, lengths=lengths, batch_invariant=True)
    out = run(op, case)
    assert_same_bits(out, run(op, case, **pinned(length)))
    for chosen in ([3], [0], [5, 3, 0], [4, 1, 2]):
        part, cut = sequences_of(case, chosen)
        assert_same_bits(cut(out), run(op, part))


def test_heads_alone_and_in_slices(op):
    """A group of heads alone, and in a call of whose heads only some are worked on at a time."""
    T, H, HV, D = 65536 // tools.SHRINK, 16, 64, 128
    case = tools.large_case(T=T, H=H, HV=HV, K=D, V=D, **pinned(128))
    whole = run(op, case)
    assert_same_bits(whole, run(op, case, save_state=False))
    for key in (0, H - 1):
        part = slice(key, key + 1), slice(4 * key, 4 * key + 4)
        assert_same_bits(cut_heads(whole, *part), run(op, heads_of(case, *part)))


@pytest.mark.parametrize("save_state", [True, False])
def test_graph_replay_with_new_offsets(op, rng, save_state):
    kwargs = {"H": 1, "HV": 2, "K": 64, "V": 64, **ALL_OPTIONS, **pinned(1)}
    case = drawn(rng, lengths=[100, 20, 0, 130, 70], **kwargs)
    graph = tools.Captured(lambda: run(op, case, save_state=save_state))
    for lengths in ([320, 0, 0, 0, 0], [0, 0, 0, 0, 320], [64, 64, 64, 64, 64], [1, 65, 0, 127, 127]):
        case.options["cu_seqlens"].copy_(cumulative(lengths).to(case.do.device))
        assert_same_bits(graph.replay(), run(op, case, save_state=save_state))


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
def test_memory(op, rng, lengths, save):
    """Red zones; scratch full of NaN, zeros and other bytes; every element of the outputs is written."""
    case = drawn(rng, B=2, T=450, H=1, HV=3, K=60, V=72, lengths=lengths, **pinned(2))
    first = run(op, case, save_state=save)
    assert_same_bits(tools.run_in_red_zones(case, save), first)
    for byte in (0xFF, 0x00, 0x7F):
        tools.poison_allocator(byte)
        assert_same_bits(first, run(op, case, save_state=save))
    with tools.filled_allocations():
        assert_same_bits(first, run(op, case, save_state=save))


def test_a_sequence_does_not_see_its_neighbours(op, rng):
    """NaN in the sequences before and after, which are cut like it, does not reach it."""
    case = drawn(rng, lengths=[300, 400, 300], HV=2, K=64, V=64, **pinned(1))
    bad = case.with_inputs(**{n: case.inputs[n].clone() for n in case.present})
    bad.do, bad.dht = case.do.clone(), case.dht.clone()
    for x in (*(bad.inputs[n] for n in tools.PER_TOKEN), bad.do):
        x[:, :300], x[:, 700:] = torch.nan, torch.nan
    for x in (bad.inputs["initial_state"], bad.dht):
        x[0], x[2] = torch.nan, torch.nan
    _, cut = sequences_of(case, [1])
    assert_same_bits(cut(run(op, bad)), cut(run(op, case)))


# ---- bad pins -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("", 'plan has ""'),
        ("fast", 'plan has "fast"'),
        ("segment=0", "segment=CHUNKS with 1 to 2147483647"),
        ("segment=2147483648", "segment=CHUNKS with 1 to 2147483647"),
        ("segment=half", "segment=whole"),
        ("segment=8,segment=8", "given once"),
    ],
)
def test_bad_pins(op, rng, plan, message):
    case = drawn(rng, T=70)
    with pytest.raises(ValueError, match=message):
        run(op, case, plan=plan)
