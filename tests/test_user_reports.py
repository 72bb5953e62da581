"""Faults that users of this operator met elsewhere, each as a test named after the report."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from reference import oracle
from reference.cases import (
    ALL_OPTIONS,
    GRADS,
    assert_matches,
    assert_same_bits,
    cumulative,
    error,
    make_case,
    reference,
    run,
    sequence,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("D", [60, 100])
def test_fla_640_fp16_heads_that_are_no_power_of_two(op, rng, device, D):
    """Wrong dbeta and dg at D = 100 in fp16."""
    case = make_case(rng, B=2, T=200, H=2, HV=2, K=D, V=D, dtype=F16, device=device)
    assert_matches(run(op, case), reference(case))


def test_fla_889_dg_repeats_without_decay(op, rng, device, threads):
    """dg of g = 0 differed from run to run."""
    case = make_case(rng, T=300, H=2, HV=4, K=32, V=32, dtype=BF16, device=device)
    case.inputs["g"].zero_()
    outs = []
    for count in (1, 2, 5, 2, 1):
        threads(count)
        outs.append(run(op, case))
    for out in outs[1:]:
        assert_same_bits(out, outs[0])


def test_fla_945_states_repeat(op, rng, device):
    """Chunk states differed at every call: kept or recomputed, they give the same gradients and final state."""
    case = make_case(rng, T=300, H=2, HV=4, K=64, V=64, dtype=BF16, device=device)
    first = run(op, case)
    for save_state in (True, False, None, True):
        assert_same_bits(run(op, case, save_state=save_state), first)


def test_fla_1228_recomputation_has_the_rollouts_bits(op, rng, device):
    """A forward without gradients (rollout), one with, and one in a larger batch agree to the bit."""
    case = make_case(rng, B=3, T=130, H=2, HV=4, dtype=BF16, device=device, batch_invariant=True)
    train = run(op, case)
    with torch.no_grad():
        o, final = op(**case.inputs, **case.options, output_final_state=True)
        row = {n: x if x is None else x[1:2] for n, x in case.inputs.items()}
        o1, final1 = op(**row, **case.options, output_final_state=True)
    assert_same_bits({"o": o, "final_state": final}, train)
    assert_same_bits({"o": o1, "final_state": final1}, {"o": o[1:2], "final_state": final[1:2]})


@pytest.mark.parametrize("heads", [32, 70])
def test_fla_913_finite_beyond_1024_blocks(op, rng, device, heads):
    """Silent NaN where chunks times heads pass 1024."""
    case = make_case(rng, T=64 * 32 + 7, H=heads // 2, HV=heads, K=8, V=8, dtype=BF16, device=device)
    out = run(op, case)
    assert all(x.isfinite().all() for x in out.values())
    few = case.with_inputs(**{n: case.inputs[n][:, :, -1:] for n in ("q", "k", "v", "g", "beta")})
    few = few.with_inputs(initial_state=case.inputs["initial_state"][:, -1:])
    few.do, few.dht = case.do[:, :, -1:], case.dht[:, -1:]
    alone = run(op, few)
    assert_same_bits({n: out[n][:, :, -1:] for n in ("o", "dv", "dg", "dbeta")}, alone)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_fla_607_length_128(op, rng, device, dtype):
    """The compiler crashed in the backward of T = 128."""
    case = make_case(rng, T=128, H=2, HV=4, K=64, V=64, dtype=dtype, device=device, use_qk_l2norm_in_kernel=True)
    assert_matches(run(op, case), reference(case))


@pytest.mark.parametrize("T", [1, 5, 63, 65, 100])
@pytest.mark.parametrize("g", [-200.0, -1e4, -math.inf])
def test_fla_792_partial_last_chunk(op, rng, device, T, g):
    """0 * inf on the rows past the end, under decays that underflow."""
    case = make_case(rng, T=T, HV=2, device=device)
    case.inputs["g"].fill_(g)
    assert_matches(run(op, case), reference(case))


def test_fla_99_finite_for_finite_tensors(op, rng, device):
    """NaN in u for keys that are not normalised, under a decay that keeps the recurrence itself bounded."""
    case = make_case(rng, T=200, H=2, HV=2, K=64, V=64, dtype=BF16, device=device)
    case.inputs["k"] = torch.randn(case.inputs["k"].shape, generator=rng).to(BF16).to(device)
    case.inputs["beta"].fill_(1.0)
    case.inputs["g"].fill_(-6.0)
    out = run(op, case)
    assert all(x.isfinite().all() for x in out.values())
    assert_matches(out, reference(case), factor=4)


def test_fla_104_no_decay_is_the_plain_delta_rule(op, rng, device):
    """g = 0 everywhere equals the delta rule without a gate, here as products of (I - beta k k^T)."""
    case = make_case(rng, T=150, H=1, HV=1, K=16, V=16, device=device, initial_state=False)
    case.inputs["g"].zero_()
    q, k, v, beta = (case.inputs[n][0, :, 0].cpu().double() for n in ("q", "k", "v", "beta"))
    S, right = torch.zeros(16, 16, dtype=F64), []
    for t in range(150):
        S = S - beta[t] * torch.outer(k[t], k[t] @ S) + beta[t] * torch.outer(k[t], v[t])
        right.append(S.T @ q[t] / 4)
    out = run(op, case)
    assert error(out["o"][0, :, 0], torch.stack(right)) < 2e-6
    assert_matches(out, reference(case))


@pytest.mark.parametrize("tail", [1, 5])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_fla_103_veomni_845_repeated_offsets_at_the_tail(op, rng, device, tail, dtype):
    """Padded cu_seqlens: states and their gradients pass through, and the other sequences do not notice."""
    case = make_case(rng, lengths=[64, 0, 30, *[0] * tail], HV=2, dtype=dtype, device=device)
    out = run(op, case)
    assert_matches(out, reference(case))
    assert torch.equal(out["final_state"][3:], case.inputs["initial_state"][3:])
    assert torch.equal(out["dh0"][3:], case.dht[3:])
    short = case.with_inputs(initial_state=case.inputs["initial_state"][:3])
    short = short.with_options(cu_seqlens=case.options["cu_seqlens"][:4])
    short.dht = case.dht[:3]
    bare = run(op, short)
    assert_same_bits({n: out[n][:3] if n in ("final_state", "dh0") else out[n] for n in out}, bare)


def test_transformers_46093_samples_do_not_leak(op, rng, device):
    """cu_seqlens is never ignored: what the first sample holds does not reach the second, forward or backward."""
    case = make_case(rng, lengths=[100, 60], HV=2, dtype=BF16, device=device)
    other = make_case(rng, lengths=[100, 60], HV=2, dtype=BF16, device=device)
    mixed = case.with_inputs(
        **{n: torch.cat([other.inputs[n][:, :100], case.inputs[n][:, 100:]], 1) for n in ("q", "k", "v", "g", "beta")}
    )
    mixed.do = torch.cat([other.do[:, :100], case.do[:, 100:]], 1)
    a, b = run(op, case), run(op, mixed)
    names = ("o", *(GRADS[n] for n in ("q", "k", "v", "g", "beta")))
    assert_same_bits({n: a[n][:, 100:] for n in names}, {n: b[n][:, 100:] for n in names})
    without = run(op, make_dense(case))
    assert not torch.equal(without["o"][:, 100:], a["o"][:, 100:])


def make_dense(case):
    """The same tokens as one sequence: what a caller gets who drops cu_seqlens."""
    dense = case.with_inputs(initial_state=case.inputs["initial_state"][:1])
    dense.options = {n: x for n, x in case.options.items() if n != "cu_seqlens"}
    dense.dht = case.dht[:1]
    return dense


def test_flashqla_28_gradient_of_strong_decays(op, rng, device):
    """dg keeps its digits where decays are strong: to fp32 accuracy for 16-bit q, k, v, at each decay's own size."""
    for decay in (-1.0, -5.0, -10.0, -20.0):
        case = make_case(rng, T=150, HV=2, dtype=BF16, device=device)
        case.inputs["g"] = case.inputs["g"] + decay
        out, ref = run(op, case), reference(case)
        assert_matches(out, ref, only=["dg"])
        assert error(out["dg"], ref["dg"][0]) < 5e-6


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_transformers_47831_dead_heads(op, rng, device, dtype):
    """A_log = -inf (or a fp16 overflow of it to -inf) is a head without decay, with finite gradients."""
    case = make_case(rng, T=130, HV=4, dtype=dtype, gate_dtype=dtype, device=device, **ALL_OPTIONS)
    case.inputs["A_log"][1] = -math.inf
    out = run(op, case)
    assert_matches(out, reference(case))
    assert out["dA_log"][1] == 0


@pytest.mark.parametrize("lengths", [None, [100, 0, 33]], ids=["dense", "packed"])
def test_fla_1003_vllm_45819_one_arithmetic_path(op, rng, device, lengths):
    """An initial state of zeros against none, and packed against dense, with and without it: the same bits."""
    case = make_case(rng, T=133, HV=2, dtype=BF16, lengths=lengths, device=device, batch_invariant=True)
    none = case.with_inputs(initial_state=None)
    zeros = case.with_inputs(initial_state=torch.zeros_like(case.inputs["initial_state"]))
    assert_same_bits(run(op, zeros), run(op, none))
    for each in (none, case):
        out = run(op, each)
        if lengths is None:
            packed = each.with_options(cu_seqlens=cumulative([133], torch.int32).to(device))
            assert_same_bits(run(op, packed), out)
        else:
            alone = run(op, sequence(each, 0))
            assert_same_bits({n: out[n][:, :100] for n in ("o", "dq", "dk", "dv", "dg", "dbeta")}, alone)


@pytest.mark.parametrize("beta_dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("g_dtype", [F32, BF16], ids=str)
def test_fla_693_beta_of_another_dtype(op, rng, device, g_dtype, beta_dtype):
    """fp32 beta beside 16-bit q was refused; each gradient has its own input's dtype."""
    case = make_case(rng, T=70, HV=2, dtype=BF16, g_dtype=g_dtype, beta_dtype=beta_dtype, device=device)
    out = run(op, case)
    assert_matches(out, reference(case))
    assert out["dbeta"].dtype == beta_dtype and out["dg"].dtype == g_dtype


def test_megatron_deterministic_mode_call(op, rng, device):
    """Megatron's call: heads repeated beforehand, fp32 g, keywords only, and packed sequences, which it must refuse."""
    case = make_case(rng, lengths=[70, 30], H=2, HV=4, K=16, V=16, dtype=BF16, device=device, initial_state=False)
    x = case.inputs
    kwargs = dict(initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False)
    cu = case.options["cu_seqlens"]
    repeated = {n: x[n].repeat_interleave(2, 2) for n in "qk"}
    o, state = op(**repeated, v=x["v"], g=x["g"], beta=x["beta"], cu_seqlens=cu, **kwargs)
    assert state is None
    right, _ = oracle.gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"], cu_seqlens=cu.cpu())
    assert error(o, right) < 0.0025
    assert_same_bits({"o": o}, {"o": op(x["q"], x["k"], x["v"], x["g"], x["beta"], cu_seqlens=cu)[0]})


def test_fla_layer_call(op, rng, device):
    """FLA's own layer: everything in kernel, states value-first, a call with its keywords in its order."""
    options = dict.fromkeys(ALL_OPTIONS, True)
    case = make_case(rng, B=2, T=70, H=2, HV=4, dtype=BF16, device=device, **options)
    assert_matches(run(op, case), reference(case))
    names = list(inspect.signature(op).parameters)
    assert names[:8] == ["q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"]
    x = case.inputs
    positional = op(
        x["q"],
        x["k"],
        x["v"],
        x["g"],
        x["beta"],
        16**-0.5,
        x["initial_state"],
        True,
        True,
        True,
        True,
        True,
        use_gate_in_kernel=True,
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
    )
    assert_same_bits(dict(zip(("o", "final_state"), positional)), run(op, case, wanted=[]))
