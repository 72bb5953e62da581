"""The operator on a GPU against the float64 oracle and the CPU engine: lengths, head sizes, groups, options, dtypes,
packings, strides, gates and keys. chain_model.py says how far an output may be off, and why."""

from __future__ import annotations

import math

import chain_model
import pytest
import torch
from chain_model import assert_chain, assert_errors, drawn, engine, realisations, rounded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference.cases import (
    ALL_OPTIONS,
    GRADS,
    assert_reset_starts_a_new_sequence,
    assert_same_bits,
    cumulative,
    run,
    storage_bytes,
)
from test_gates import PLACES, places
from test_layouts import LAYOUTS, LENGTHS, ONE_INPUT, assert_sequences_alone, given_strides

pytestmark = pytest.mark.gpu

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [BF16, F16]
FLOATS = [BF16, F16, F32, F64]
INF = math.inf


def dtype_of(index: int) -> torch.dtype:
    """Both dtypes in turn, over a list of cases that differ in something else."""
    return DTYPES[index % 2]


# ---- shapes and arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 193])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths(op, rng, T, dtype):
    assert_chain(op, drawn(rng, B=2, T=T, H=1, HV=2, K=16, V=24, dtype=dtype))


SIZES = [(16, 16), (60, 60), (64, 64), (96, 96), (100, 100), (128, 128), (128, 64), (64, 128), (96, 100), (100, 60)]
SIZES += [(16, 128), (128, 16), (60, 128), (36, 128), (1, 1), (5, 5), (5, 64), (127, 33)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K, V", SIZES)
def test_head_sizes(op, rng, K, V, dtype):
    # A vector of one element has no direction: its normalised form has no gradient to speak of.
    l2norm = K > 1 and (K + V) % 3 == 0
    case = drawn(rng, T=100, H=1, HV=2, K=K, V=V, dtype=dtype, use_qk_l2norm_in_kernel=l2norm)
    assert_chain(op, case, cap=chain_model.CAP if K > 1 else None)


GROUPS = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (2, 2), (2, 4), (2, 6), (3, 12), (4, 32), (1, 40)]


@pytest.mark.parametrize("index", range(len(GROUPS)), ids=map(str, GROUPS))
def test_value_head_groups(op, rng, index):
    H, HV = GROUPS[index]
    l2norm = index % 3 == 0
    assert_chain(op, drawn(rng, T=90, H=H, HV=HV, K=32, V=16, dtype=dtype_of(index), use_qk_l2norm_in_kernel=l2norm))


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("gate", ["raw", "gate", "gate without bias"])
@pytest.mark.parametrize("beta", ["raw", "sigmoid", "sigmoid times 2"])
@pytest.mark.parametrize("l2norm", [False, True])
def test_options(op, rng, l2norm, beta, gate, state_v_first):
    options = {
        "use_qk_l2norm_in_kernel": l2norm,
        "use_beta_sigmoid_in_kernel": beta != "raw",
        "allow_neg_eigval": beta == "sigmoid times 2",
        "use_gate_in_kernel": gate != "raw",
        "state_v_first": state_v_first,
    }
    case = drawn(rng, B=2, T=80, H=2, HV=4, K=24, V=40, dt_bias=gate == "gate", **options)
    assert_chain(op, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [None, [70, 0, 1, 130, 64, 0, 0]], ids=["dense", "packed"])
def test_everything_at_once(op, rng, lengths, dtype):
    assert_chain(op, drawn(rng, B=2, T=200, H=2, HV=4, K=128, V=128, lengths=lengths, dtype=dtype, **ALL_OPTIONS))


@pytest.mark.parametrize("scale", [1.0, -2.0, 0.0, 1e-3])
def test_scale(op, rng, scale):
    assert_chain(op, drawn(rng, T=70, HV=2, K=32, V=32, scale=scale))


@pytest.mark.parametrize("g_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("beta_dtype", FLOATS, ids=str)
def test_dtypes_of_gate_and_beta(op, rng, g_dtype, beta_dtype):
    out = assert_chain(op, drawn(rng, T=66, HV=2, g_dtype=g_dtype, beta_dtype=beta_dtype))
    assert (out["dg"].dtype, out["dbeta"].dtype) == (g_dtype, beta_dtype)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", FLOATS, ids=str)
def test_dtypes_of_state_and_gate_parameters(op, rng, state_dtype, v_first):
    gate_dtype = FLOATS[(FLOATS.index(state_dtype) + 1) % 4]
    kwargs = {"state_dtype": state_dtype, "gate_dtype": gate_dtype, "state_v_first": v_first}
    out = assert_chain(op, drawn(rng, T=66, HV=2, use_gate_in_kernel=True, **kwargs))
    assert out["final_state"].dtype == F32
    assert (out["dh0"].dtype, out["dA_log"].dtype, out["ddt_bias"].dtype) == (state_dtype, gate_dtype, gate_dtype)


@pytest.mark.parametrize("initial_state", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_states_are_optional(op, rng, initial_state, final):
    assert_chain(op, drawn(rng, B=2, T=100, HV=2, initial_state=initial_state), final=final)


@pytest.mark.parametrize("v_first", [False, True])
def test_only_the_final_state_has_a_gradient(op, rng, v_first):
    case = drawn(rng, T=100, HV=2, K=40, state_v_first=v_first)
    case.do = None
    assert (assert_chain(op, case)["dq"] == 0).all()


def test_only_the_output_has_a_gradient(op, rng):
    case = drawn(rng, T=100, HV=2)
    case.dht = None
    assert_chain(op, case)


def test_gradient_of_a_sum_is_expanded(op, rng):
    """o.sum().backward() hands in a gradient with zero strides."""
    case = drawn(rng, B=2, T=70, HV=2, K=64, V=64)
    one = torch.ones((), device=case.do.device)
    case.do, case.dht = one.to(BF16).expand_as(case.do), one.expand_as(case.dht)
    out = assert_chain(op, case)
    case.do, case.dht = case.do.contiguous(), case.dht.contiguous()
    assert_same_bits(out, run(op, case))


def test_state_handed_from_call_to_call(op, rng):
    """Two calls joined by the state are one call. The state is handed on in fp32, so that nothing more is rounded."""
    case = drawn(rng, B=2, T=150, HV=2, K=64, V=64)
    leaves = {n: case.inputs[n].clone().requires_grad_() for n in case.present}
    parts = [{n: leaves[n][:, s] for n in ("q", "k", "v", "g", "beta")} for s in (slice(0, 90), slice(90, 150))]
    o1, state = op(**parts[0], initial_state=leaves["initial_state"], output_final_state=True)
    o2, final = op(**parts[1], initial_state=state, output_final_state=True)
    grads = torch.autograd.grad([torch.cat([o1, o2], 1), final], list(leaves.values()), [case.do, case.dht])
    out = {"o": torch.cat([o1, o2], 1).detach(), "final_state": final.detach()}
    out |= {GRADS[n]: x for n, x in zip(leaves, grads)}
    assert_errors(case, out, chain_model.truth(case), rounded(case))


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])
@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0, "T": 9}, {"B": 0, "T": 0}, {"lengths": []}, {"lengths": [0, 0]}])
def test_empty(op, rng, sizes, options, final):
    case = drawn(rng, H=2, HV=4, K=24, V=16, **sizes, **options)
    out = run(op, case, final=final)
    assert out["o"].numel() == 0
    if final:
        assert torch.equal(out["final_state"], case.inputs["initial_state"])
        assert torch.equal(out["dh0"], case.dht)


# ---- larger shapes --------------------------------------------------------------------------------------------------

LARGE = {
    "one long sequence": {"T": 4100, "H": 4, "HV": 8, "K": 128, "V": 128, "use_qk_l2norm_in_kernel": True},
    "batch": {"B": 4, "T": 1000, "H": 2, "HV": 16, "K": 128, "V": 128} | ALL_OPTIONS,
    "packed": {"lengths": [513, 0, 64, 2000, 1, 1, 129, 0, 700, 63], "H": 2, "HV": 6, "K": 100, "V": 96} | ALL_OPTIONS,
    "many heads": {"B": 2, "T": 300, "H": 16, "HV": 64, "K": 64, "V": 128},
}


@pytest.mark.parametrize("name", LARGE)
def test_larger_shapes_against_the_cpu_engine(op, rng, name):
    """Where the oracle would take minutes. The engine is held to the oracle by the CPU tests."""
    case = drawn(rng, dtype=dtype_of(list(LARGE).index(name)), **LARGE[name])
    out, host = run(op, case), engine(op, case)
    magnitudes = {n: x.double().norm().item() for n, x in host.items()}
    for n in chain_model.SUMS:  # terms of a sum over tokens are about as large as those of the gate's gradient
        magnitudes[n] = max(magnitudes.get(n, 0.0), host["dg"].double().norm().item())
    ref = {n: (x.double(), magnitudes[n]) for n, x in host.items()}
    assert_errors(case, out, ref, rounded(case), others=realisations(case))


def test_long_memory(op, rng):
    """Small steps and slow decays: what a token writes lasts for thousands, so that a state that lost digits from chunk
    to chunk would show."""
    case = drawn(rng, T=8000, H=1, HV=2, K=64, V=64)
    case.inputs["g"].mul_(1e-3)
    case.inputs["beta"].mul_(0.02)
    out, host = run(op, case), engine(op, case)
    ref = {n: (x.double(), x.double().norm().item()) for n, x in host.items()}
    assert_errors(case, out, ref, rounded(case))


def test_production_shape(op, rng):
    assert_chain(op, drawn(rng, T=700, H=2, HV=4, K=128, V=128, **ALL_OPTIONS))


# ---- packed sequences -----------------------------------------------------------------------------------------------


@settings(max_examples=14)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 2**31),
    options=st.sampled_from([{}, {"use_qk_l2norm_in_kernel": True}, ALL_OPTIONS]),
    dtype=st.sampled_from(DTYPES),
    group=st.integers(1, 4),
    sizes=st.sampled_from([(16, 16), (60, 100), (128, 64), (64, 128)]),
)
@example(lengths=[0], seed=0, options={}, dtype=BF16, group=2, sizes=(16, 16))
@example(lengths=[64, 64, 64, 0, 0, 0], seed=2, options={}, dtype=F16, group=1, sizes=(128, 128))
@example(lengths=[1] * 70, seed=3, options=ALL_OPTIONS, dtype=BF16, group=3, sizes=(64, 64))
def test_random_packed_layouts(op, lengths, seed, options, dtype, group, sizes):
    rng = torch.Generator().manual_seed(seed)
    cu_dtype = torch.int32 if seed % 2 else torch.int64
    shape = {"lengths": lengths, "cu_dtype": cu_dtype, "H": 1, "HV": group, "K": sizes[0], "V": sizes[1]}
    case = drawn(rng, dtype=dtype, batch_invariant=True, **shape, **options)
    assert_sequences_alone(op, case, assert_chain(op, case, cap=None))


@pytest.mark.parametrize("final", [False, True])
def test_empty_sequences_pass_the_state_through(op, rng, final):
    case = drawn(rng, lengths=[0, 5, 0, 0, 66, 0, 0], HV=2, K=40, V=24)
    out = run(op, case, final=final)
    for n in (0, 2, 3, 5, 6):
        if final:
            assert torch.equal(out["final_state"][n], case.inputs["initial_state"][n])
            assert torch.equal(out["dh0"][n], case.dht[n])
        else:
            assert (out["dh0"][n] == 0).all()


def test_padding_by_repeated_offsets_changes_nothing(op, rng):
    case = drawn(rng, lengths=[64, 0, 30, 0, 0, 0], HV=2, K=64, V=64)
    out = assert_chain(op, case)
    short = case.with_inputs(initial_state=case.inputs["initial_state"][:3])
    short = short.with_options(cu_seqlens=case.options["cu_seqlens"][:4])
    short.dht = case.dht[:3]
    bare = run(op, short)
    assert_same_bits({n: out[n][:3] if n in ("final_state", "dh0") else out[n] for n in out}, bare)


# ---- strides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize(("name", "layout"), ONE_INPUT)
def test_strides_of_one_input(op, rng, name, layout, l2norm):
    """Contiguous rows of 32 elements are read in place (unless they are normalised on the way); in most of these
    layouts they have to be copied first."""
    options = {"use_gate_in_kernel": True, "state_v_first": True, "use_qk_l2norm_in_kernel": l2norm}
    case = drawn(rng, B=2, T=70, H=2, HV=4, K=32, V=16, **options)
    given_strides(op, case, [name], layout)


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=LAYOUTS)
def test_strides_of_all_inputs(op, rng, index):
    dtype = dtype_of(index)
    case = drawn(rng, B=2, T=70, H=2, HV=4, K=60, V=64, dtype=dtype, use_qk_l2norm_in_kernel=True)
    _, plain = given_strides(op, case, [*case.present, "do", "dht"], LAYOUTS[index])
    # The expanded and overlapping ones are other numbers, of which keys may be all alike.
    assert_chain(op, plain, cap=None)


@pytest.mark.parametrize("K", [24, 20], ids=["in place", "copied"])
def test_qkv_split_from_one_projection(op, rng, K):
    """As models do: one wide projection, split and viewed as heads. Heads of 24 elements all start at a multiple of 16
    bytes, heads of 20 do not."""
    case = drawn(rng, B=2, T=70, H=2, HV=4, K=K, V=24)
    wide = torch.cat([case.inputs[n].flatten(2) for n in "qkv"], -1)
    parts = torch.split(wide, [2 * K, 2 * K, 96], -1)
    views = {n: x.unflatten(-1, s) for n, x, s in zip("qkv", parts, ((2, K), (2, K), (4, 24)))}
    before = storage_bytes(wide)
    assert_same_bits(run(op, case.with_inputs(**views)), run(op, case))
    assert torch.equal(storage_bytes(wide), before)


# ---- gates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("value", [0.0, -20.0, -100.0, -1e4, -3e38, -INF], ids=str)
def test_extreme_decays(op, rng, value, where):
    case = drawn(rng, T=150, H=1, HV=3, K=16, V=16, dtype=dtype_of(PLACES.index(where)))
    at = places(where, rng).to(case.do.device)
    case.inputs["g"][at] = value
    out = assert_chain(op, case)
    if value < -1e3:
        assert (out["dg"][at] == 0).all()


@pytest.mark.parametrize("value", [-30.0, -90.0, -103.0, -104.0, -110.0])
def test_decays_around_underflow(op, rng, value):
    """exp leaves the normal numbers at -87 and is zero from -104 on: there is no step in the results."""
    case = drawn(rng, T=150, H=1, HV=2, K=32, V=32, dtype=F16)
    case.inputs["g"][:, ::7] = value
    assert_chain(op, case)


def test_slow_decays_after_strong_ones(op, rng):
    """A cumulative sum that reached -6000 still resolves the differences of slow decays that follow."""
    case = drawn(rng, T=128, H=1, HV=2, K=32, V=32, dtype=F16)
    case.inputs["g"][:, :60] = -100.0
    case.inputs["g"][:, 60:] = -0.01
    assert_chain(op, case)


@pytest.mark.parametrize("decay", [-1.0, -5.0, -20.0])
def test_gradient_of_strong_decays(op, rng, decay):
    """dg keeps its digits where it is small beside everything else."""
    case = drawn(rng, T=150, HV=2, K=64, V=64)
    case.inputs["g"] = case.inputs["g"] + decay
    assert_chain(op, case)


@pytest.mark.parametrize("growth", ["slow", "between resets"])
def test_growing_states(op, rng, growth):
    """Positive log decays are any real numbers."""
    case = drawn(rng, T=150, H=1, HV=2, K=32, V=32)
    if growth == "slow":
        case.inputs["g"] = case.inputs["g"].abs().clamp(max=1)
    else:
        case.inputs["g"].fill_(0.5)
        case.inputs["g"][:, ::16] = -INF
    assert_chain(op, case, cap=None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("t", [0, 1, 63, 64, 65, 149])
def test_a_reset_starts_a_new_sequence(op, rng, t, dtype):
    """What precedes the reset, the initial state included, changes no bit after it, and gets no gradient from there."""
    case, other = (drawn(rng, T=150, H=1, HV=2, K=64, V=48, dtype=dtype) for _ in range(2))
    assert_reset_starts_a_new_sequence(op, case, other, t)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [None, [70, 0, 30]], ids=["dense", "packed"])
def test_infinite_A_log(op, rng, dtype, lengths):
    """exp(-inf) = 0: no decay. exp(inf): every token is a reset. Neither has a gradient through the gate."""
    case = drawn(rng, T=100, lengths=lengths, HV=4, dtype=dtype, gate_dtype=dtype, use_gate_in_kernel=True)
    case.inputs["A_log"][:3] = torch.tensor([INF, -INF, 100.0])
    out = assert_chain(op, case)
    assert (out["dA_log"][:3] == 0).all() and (out["ddt_bias"][:3] == 0).all() and (out["dg"][..., :3] == 0).all()
    assert (out["dA_log"][3:] != 0).all()


@pytest.mark.parametrize("A_log", [INF, -INF, 60.0, 200.0, 0.3])
@pytest.mark.parametrize("g", [INF, -INF, 100.0, -100.0])
def test_extreme_gates_in_kernel(op, rng, A_log, g):
    """Every limit of -exp(A_log) * softplus(g + dt_bias), with finite numbers in both directions."""
    case = drawn(rng, T=100, HV=2, use_gate_in_kernel=True)
    case.inputs["A_log"][0] = A_log
    case.inputs["g"][:, ::9] = g
    if A_log == 60.0 and g == -100.0:  # exp(60) softplus(-100) = exp(-40): what two roundings leave of a product
        assert all(x.isfinite().all() for x in run(op, case).values())
    else:
        assert_chain(op, case, cap=None)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_beta_in_kernel(op, rng, sign):
    """sigmoid of large and infinite numbers is 0 or 1, with zero gradient."""
    case = drawn(rng, T=100, HV=2, K=32, use_beta_sigmoid_in_kernel=True)
    case.inputs["beta"][:, ::3] = 200.0 * sign
    case.inputs["beta"][:, 1::7] = INF * sign
    assert (assert_chain(op, case)["dbeta"][:, 1::7] == 0).all()


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0, -0.5])
def test_special_step_sizes(op, rng, beta):
    case = drawn(rng, T=150, HV=2, K=64, V=32)
    case.inputs["beta"].fill_(beta)
    assert_chain(op, case, cap=None)


# ---- keys and magnitudes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9, 1.999, 2.0])
@pytest.mark.parametrize("g", [0.0, -0.05, None], ids=["no decay", "slow decay", "random decay"])
def test_identical_keys(op, rng, beta, dtype, g):
    """One key for all tokens: the triangular system is dense, and at beta = 2 every token reflects the state."""
    case = drawn(rng, T=200, H=1, HV=2, K=32, V=32, dtype=dtype, beta_dtype=F32)
    case.inputs["k"] = case.inputs["k"][:, :1].expand_as(case.inputs["k"]).contiguous()
    case.inputs["beta"].fill_(beta)
    if g is not None:
        case.inputs["g"].fill_(g)
    # The entries of A alternate and their sums cancel, so that which way each is rounded decides the error.
    assert_chain(op, case, cap=None, ratio=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["nearly identical", "alternating"])
def test_dependent_keys(op, rng, kind, dtype):
    case = drawn(rng, T=150, H=1, HV=2, K=32, V=32, dtype=dtype)
    k = case.inputs["k"]
    if kind == "alternating":
        k[:, ::2], k[:, 1::2] = k[:, :1].clone(), -k[:, :1].clone()
    else:
        case.inputs["k"] = torch.nn.functional.normalize((k[:, :1] + 1e-2 * k).float(), dim=-1).to(dtype)
    case.inputs["beta"].fill_(1.0)
    case.inputs["g"].fill_(-1e-3)
    assert_chain(op, case, cap=None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm, decay", [(0.0, 0.0), (0.5, 0.0), (1.5, 0.0), (3.0, -3.0), (8.0, -5.0), (10.0, -6.0)])
def test_keys_of_other_norms(op, rng, norm, decay, dtype):
    """Without L2 norm beta |k|^2 may pass 2, where a token enlarges the state; from norm 3 on decays hold it."""
    case = drawn(rng, T=100, H=1, HV=2, K=64, V=32, dtype=dtype)
    case.inputs["k"] *= norm
    case.inputs["g"] += decay
    assert_chain(op, case, cap=None)


def test_finite_for_finite_inputs(op, rng):
    """Keys that are not normalised, of norm 11 on the average, under a decay that keeps the recurrence bounded."""
    case = drawn(rng, T=200, H=2, HV=2, K=128, V=64)
    case.inputs["k"] = torch.randn(case.inputs["k"].shape, generator=rng).to(case.inputs["k"])
    case.inputs["beta"].fill_(1.0)
    case.inputs["g"].fill_(-6.0)
    assert_chain(op, case, cap=None)


@pytest.mark.parametrize("magnitude", [0.0, 1e-20, 1e-6, 1e3, 1e10])
def test_l2norm_of_tiny_and_large_vectors(op, rng, magnitude):
    """The 1e-6 under the root keeps zero vectors finite; squares of large ones stay within fp32."""
    case = drawn(rng, T=80, H=2, HV=2, K=32, V=32, use_qk_l2norm_in_kernel=True)
    case.inputs["q"] *= magnitude
    case.inputs["k"] *= magnitude
    assert_chain(op, case, cap=None)


@pytest.mark.parametrize("name", ["q", "v", "initial_state", "do"])
@pytest.mark.parametrize("magnitude", [0.0, 1e-12, 1e12])
def test_magnitudes_scale_through(op, rng, name, magnitude):
    """bf16 has the range of fp32 throughout."""
    case = drawn(rng, T=80, HV=2, K=32, V=32)
    if name == "do":
        case.do, case.dht = case.do * magnitude, case.dht * magnitude
    else:
        case.inputs[name] = case.inputs[name] * magnitude
    assert_chain(op, case, cap=None)


def test_orthogonal_keys_overwrite_exactly(op):
    """beta = 1 and unit keys: reading with the key just written returns its value, whatever stood there before."""
    T, K = 128, 16
    device = chain_model.DEVICE
    k = torch.eye(K, device=device, dtype=BF16)[torch.arange(T) % K][None, :, None]
    v = torch.arange(T, dtype=BF16, device=device).view(1, T, 1, 1).expand(1, T, 1, 8)
    ones = torch.ones(1, T, 1, device=device)
    o, _ = op(k, k, v, ones * 0, ones, scale=1.0)
    assert torch.equal(o, v)


def test_no_decay_is_the_plain_delta_rule(op, rng):
    """g = 0 everywhere: products of (I - beta k k^T), here multiplied out."""
    case = drawn(rng, T=150, K=16, V=16, initial_state=False)
    case.inputs["g"].zero_()
    q, k, v, beta = (case.inputs[n][0, :, 0].cpu().double() for n in ("q", "k", "v", "beta"))
    S, right = torch.zeros(16, 16, dtype=F64), []
    for t in range(150):
        S = S - beta[t] * torch.outer(k[t], k[t] @ S) + beta[t] * torch.outer(k[t], v[t])
        right.append(S.T @ q[t] / 4)
    right = torch.stack(right)
    out = assert_chain(op, case)
    assert (out["o"][0, :, 0].cpu().double() - right).norm() <= chain_model.CAP * torch.finfo(BF16).eps * right.norm()


def test_samples_do_not_leak(op, rng):
    """What the first packed sequence holds does not reach the second, forward or backward."""
    case, other = (drawn(rng, lengths=[100, 60], HV=2, K=64, V=64) for _ in range(2))
    mixed = case.with_inputs(
        **{n: torch.cat([other.inputs[n][:, :100], case.inputs[n][:, 100:]], 1) for n in ("q", "k", "v", "g", "beta")}
    )
    mixed.do = torch.cat([other.do[:, :100], case.do[:, 100:]], 1)
    a, b = run(op, case), run(op, mixed)
    names = ("o", *(GRADS[n] for n in ("q", "k", "v", "g", "beta")))
    assert_same_bits({n: a[n][:, 100:] for n in names}, {n: b[n][:, 100:] for n in names})
    dense = case.with_inputs(initial_state=case.inputs["initial_state"][:1])
    dense.options, dense.dht = {}, case.dht[:1]
    assert not torch.equal(run(op, dense)["o"][:, 100:], a["o"][:, 100:])
    single = case.with_options(cu_seqlens=cumulative([160]).to(case.do.device))
    single = single.with_inputs(initial_state=case.inputs["initial_state"][:1])
    single.dht = case.dht[:1]
    assert_same_bits(run(op, single), run(op, dense))
