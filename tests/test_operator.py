"""Every argument, dtype, length and head size of the operator against the float64 oracle, forward and gradients."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from reference.cases import (
    ALL_OPTIONS,
    GRADS,
    assert_matches,
    assert_same_bits,
    cumulative,
    make_case,
    reference,
    run,
    storage_bytes,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [F64, F32, BF16, F16]


# A state of one row or column leaves a gradient of few numbers, each a sum over time that may cancel.
SINGLE = 10


def check(op, case, factor=1.0, **kwargs):
    out = run(op, case, **kwargs)
    assert_matches(out, reference(case, kwargs.get("final", True)), factor)
    return out


@pytest.mark.parametrize("T", [0, 1, 2, 3, 15, 16, 17, 31, 33, 62, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, 200])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_lengths(op, rng, device, T, dtype):
    check(op, make_case(rng, B=2, T=T, H=1, HV=2, K=16, V=24, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])
@pytest.mark.parametrize("T", [1, 64, 150])
def test_dtypes(op, rng, device, dtype, options, T):
    check(op, make_case(rng, B=2, T=T, H=2, HV=4, K=32, V=32, dtype=dtype, device=device, **options))


@pytest.mark.parametrize(
    "K, V",
    [
        *[(1, 1), (1, 16), (16, 1), (5, 5), (5, 64), (16, 5), (60, 60), (64, 64), (96, 100), (100, 60), (100, 100)],
        *[(128, 128), (128, 16), (16, 128), (128, 192), (192, 64), (256, 256), (64, 512), (512, 64), (512, 512)],
    ],
)
def test_head_sizes(op, rng, device, K, V):
    T = 70 if K * V > 2**14 else 130
    case = make_case(rng, T=T, H=1, HV=2, K=K, V=V, dtype=F32, device=device)
    check(op, case, factor=SINGLE if 1 in (K, V) else 1)


@pytest.mark.parametrize("K, V", [(1, 1), (5, 16), (60, 60), (100, 100), (128, 128), (256, 256), (128, 512)])
@pytest.mark.parametrize("dtype", [F64, BF16, F16], ids=str)
def test_head_sizes_of_other_dtypes(op, rng, device, K, V, dtype):
    # A vector of one element has no direction: its normalised form has no gradient to speak of.
    case = make_case(rng, T=70, K=K, V=V, dtype=dtype, use_qk_l2norm_in_kernel=K > 1, device=device)
    check(op, case, factor=SINGLE if 1 in (K, V) else 1)


@pytest.mark.parametrize("H, HV", [(1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (2, 2), (2, 4), (2, 6), (3, 12), (4, 32)])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_value_head_groups(op, rng, device, H, HV, dtype):
    options = {"use_qk_l2norm_in_kernel": True} if HV % 2 else {}
    check(op, make_case(rng, T=90, H=H, HV=HV, K=16, V=16, dtype=dtype, device=device, **options))


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("gate", ["raw", "gate", "gate without bias"])
@pytest.mark.parametrize("beta", ["raw", "sigmoid", "sigmoid times 2"])
@pytest.mark.parametrize("l2norm", [False, True])
def test_options(op, rng, device, l2norm, beta, gate, state_v_first):
    options = {
        "use_qk_l2norm_in_kernel": l2norm,
        "use_beta_sigmoid_in_kernel": beta != "raw",
        "allow_neg_eigval": beta == "sigmoid times 2",
        "use_gate_in_kernel": gate != "raw",
        "state_v_first": state_v_first,
    }
    case = make_case(rng, B=2, T=80, H=2, HV=4, K=12, V=20, dt_bias=gate == "gate", device=device, **options)
    check(op, case)


@pytest.mark.parametrize("scale", [None, 1.0, 0.25, -2.0, 0.0, 1e-3])
def test_scale(op, rng, device, scale):
    check(op, make_case(rng, T=70, HV=2, scale=scale, device=device))


def test_scale_defaults_to_K_to_the_minus_half(op, rng, device):
    case = make_case(rng, T=70, K=16, device=device)
    assert_same_bits(run(op, case), run(op, case, scale=0.25))


@pytest.mark.parametrize("g_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_dtypes_of_gate_and_beta(op, rng, device, dtype, g_dtype, beta_dtype):
    kwargs = {"dtype": dtype, "g_dtype": g_dtype, "beta_dtype": beta_dtype}
    check(op, make_case(rng, T=66, HV=2, device=device, **kwargs))


@pytest.mark.parametrize("gate_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
def test_dtypes_of_state_and_gate_parameters(op, rng, device, gate_dtype, state_dtype):
    kwargs = {"gate_dtype": gate_dtype, "state_dtype": state_dtype, "use_gate_in_kernel": True, "dtype": BF16}
    out = check(op, make_case(rng, T=66, HV=2, device=device, **kwargs))
    assert out["final_state"].dtype == F32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_dtypes(op, rng, device, dtype):
    out = run(op, make_case(rng, T=3, dtype=dtype, device=device))
    assert out["o"].dtype == dtype
    assert out["final_state"].dtype == (F64 if dtype == F64 else F32)


@pytest.mark.parametrize("initial_state", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_states_are_optional(op, rng, device, initial_state, final):
    check(op, make_case(rng, B=2, T=100, HV=2, initial_state=initial_state, device=device), final=final)


@pytest.mark.parametrize("v_first", [False, True])
def test_only_the_final_state_has_a_gradient(op, rng, device, v_first):
    case = make_case(rng, T=100, HV=2, state_v_first=v_first, device=device)
    case.do = None
    out = run(op, case)
    assert_matches(out, reference(case))
    assert (out["dq"] == 0).all()


def test_final_state_gradient_is_used(op, rng, device):
    case = make_case(rng, T=20, HV=2, device=device)
    with_it = run(op, case)
    case.dht = torch.zeros_like(case.dht)
    without = run(op, case)
    assert not torch.equal(with_it["dv"], without["dv"]) and not torch.equal(with_it["dh0"], without["dh0"])
    assert_same_bits(without, run(op, case, final=False))


def test_only_the_output_has_a_gradient(op, rng, device):
    case = make_case(rng, T=100, HV=2, device=device)
    case.dht = None
    assert_matches(run(op, case), reference(case))


def test_gradient_of_a_sum_is_expanded(op, rng, device):
    """o.sum().backward() hands in a gradient with zero strides."""
    case = make_case(rng, B=2, T=70, HV=2, device=device)
    case.do = torch.ones((), device=device).expand_as(case.do)
    case.dht = torch.ones((), device=device).expand_as(case.dht)
    out = check(op, case)
    case.do, case.dht = case.do.contiguous(), case.dht.contiguous()
    assert_same_bits(out, run(op, case))


def test_no_grad_gives_the_same_bits(op, rng, device):
    case = make_case(rng, T=150, HV=2, device=device, **ALL_OPTIONS)
    with torch.no_grad():
        o, final = op(**case.inputs, **case.options, output_final_state=True)
    assert not o.requires_grad and not final.requires_grad
    assert_same_bits({"o": o, "final_state": final}, run(op, case))


def test_inputs_without_grad_give_outputs_without_grad(op, rng, device):
    case = make_case(rng, T=70, device=device)
    o, final = op(**case.inputs, output_final_state=True)
    assert not o.requires_grad and not final.requires_grad


def subsets(names, count):
    """All single inputs, all but one, and `count` more, the same in every run."""
    every = [s for n in range(1, len(names)) for s in itertools.combinations(names, n)]
    edge = [s for s in every if len(s) in (1, len(names) - 1)]
    return edge + random.Random(0).sample([s for s in every if s not in edge], count)


@pytest.mark.parametrize("save_state", [True, False])
def test_subsets_of_gradients(op, rng, device, save_state):
    """Which inputs need a gradient changes no bit of any output or gradient."""
    case = make_case(rng, T=70, H=2, HV=4, K=8, V=8, dtype=BF16, device=device, **ALL_OPTIONS)
    full = run(op, case)
    assert len(case.present) == 8
    for wanted in subsets(case.present, 24):
        part = run(op, case, wanted=wanted, save_state=save_state)
        assert set(part) == {"o", "final_state", *(GRADS[name] for name in wanted)}
        assert_same_bits(part, full)


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])
@pytest.mark.parametrize("lengths", [None, [0, 64, 1, 130, 0]], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_save_state_changes_no_bit(op, rng, device, options, lengths, dtype):
    case = make_case(rng, T=195, H=1, HV=2, dtype=dtype, lengths=lengths, device=device, **options)
    out = run(op, case)
    for save_state in (True, False):
        assert_same_bits(out, run(op, case, save_state=save_state))


@pytest.mark.parametrize("argument", ["chunk_size=16", "chunk_size=32", "batch_invariant", "backend", "plan=None"])
def test_arguments_that_change_nothing_here(op, rng, device, argument):
    case = make_case(rng, T=150, HV=2, device=device)
    more = {
        "chunk_size=16": {"chunk_size": 16},
        "chunk_size=32": {"chunk_size": 32},
        "batch_invariant": {"batch_invariant": True},
        "backend": {"backend": device},
        "plan=None": {"plan": None},
    }[argument]
    if argument == "batch_invariant" and device != "cpu":
        check(op, case.with_options(batch_invariant=True))
    else:
        assert_same_bits(run(op, case), run(op, case, **more))


def test_host_offsets_and_chunk_indices_change_nothing(op, rng, device):
    case = make_case(rng, lengths=[70, 0, 3], HV=2, device=device)
    out = run(op, case)
    assert_same_bits(out, run(op, case, cu_seqlens_cpu=cumulative([70, 0, 3])))
    indices = torch.tensor([[0, 0], [0, 1], [2, 0]], device=device)
    assert_same_bits(out, run(op, case, chunk_indices=indices))


def test_alias(rng, device):
    import cake_gdn_det

    case = make_case(rng, T=70, device=device)
    assert_same_bits(run(cake_gdn_det.chunk_gated_delta_rule, case), run(cake_gdn_det.chunk_gated_delta_rule_det, case))


@pytest.mark.parametrize("lengths", [None, [0, 64, 1, 0]], ids=["dense", "packed"])
def test_no_initial_state_is_zeros(op, rng, device, lengths):
    case = make_case(rng, T=130, HV=2, lengths=lengths, device=device)
    zeros = case.with_inputs(initial_state=torch.zeros_like(case.inputs["initial_state"]))
    assert_same_bits(run(op, zeros), run(op, case.with_inputs(initial_state=None)))


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])
def test_inputs_are_never_written(op, rng, device, options):
    case = make_case(rng, lengths=[65, 0, 70], H=1, HV=2, dtype=BF16, device=device, **options)
    tensors = [case.inputs[n] for n in case.present] + [case.options["cu_seqlens"], case.do, case.dht]
    before = [storage_bytes(x) for x in tensors]
    versions = [x._version for x in tensors]
    run(op, case)
    assert all(torch.equal(storage_bytes(x), y) for x, y in zip(tensors, before))
    assert [x._version for x in tensors] == versions


@pytest.mark.parametrize("T", [0, 1, 100])
@pytest.mark.parametrize("v_first", [False, True])
def test_outputs_share_no_memory(op, rng, device, T, v_first):
    """Writing into an output changes neither an input nor another output."""
    case = make_case(rng, T=T, HV=2, state_v_first=v_first, device=device)
    tensors = [case.inputs[n] for n in case.present] + [case.do, case.dht]
    out = run(op, case)
    places = [x.untyped_storage().data_ptr() for x in (*tensors, *out.values()) if x.untyped_storage().nbytes()]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [None, [0, 64, 1, 0, 70]], ids=["dense", "packed"])
@pytest.mark.parametrize("save_state", [True, False])
def test_every_element_is_written(op, rng, device, dtype, lengths, save_state):
    """torch.empty hands out NaN here: whatever is left unwritten, or read before it is written, shows."""
    case = make_case(rng, B=2, T=130, H=1, HV=2, K=8, V=8, dtype=dtype, lengths=lengths, device=device, **ALL_OPTIONS)
    before = run(op, case, save_state=save_state)
    deterministic, fill = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        assert_same_bits(before, run(op, case, save_state=save_state))
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def test_state_handed_from_call_to_call(op, rng, device):
    """Two calls joined by the state are one call, forward and backward."""
    case = make_case(rng, B=2, T=150, HV=2, dtype=F32, device=device)
    leaves = {n: case.inputs[n].clone().requires_grad_() for n in case.present}
    parts = [{n: leaves[n][:, s] for n in ("q", "k", "v", "g", "beta")} for s in (slice(0, 90), slice(90, 150))]
    o1, state = op(**parts[0], initial_state=leaves["initial_state"], output_final_state=True)
    o2, final = op(**parts[1], initial_state=state, output_final_state=True)
    o = torch.cat([o1, o2], 1)
    grads = torch.autograd.grad([o, final], list(leaves.values()), [case.do, case.dht])
    out = {"o": o.detach(), "final_state": final.detach()} | {GRADS[n]: x for n, x in zip(leaves, grads)}
    assert_matches(out, reference(case))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_long_sequence(op, rng, device, dtype):
    check(op, make_case(rng, T=4100, H=1, HV=2, K=32, V=32, dtype=dtype, device=device))


@pytest.mark.slow
def test_production_shape(op, rng, device):
    check(op, make_case(rng, T=1000, H=2, HV=4, K=128, V=128, dtype=BF16, device=device, **ALL_OPTIONS))
