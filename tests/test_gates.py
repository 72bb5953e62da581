"""Extreme decays: strong, growing, and full resets, as values and inside the in-kernel gate."""

from __future__ import annotations

import math

import pytest
import torch
from reference.cases import (
    assert_matches,
    assert_reset_starts_a_new_sequence,
    make_case,
    reference,
    run,
    stage_answer,
)

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
INF = math.inf
T = 150
PLACES = ["random", "borders", "first", "last", "all", "one chunk", "whole chunks", "all but one"]


def matches(out, case, factor=1.0):
    """The CPU engine adds decays in double and is held to the plain tolerance; a GPU may add them in fp32."""
    yardstick = None if out["o"].is_cpu else stage_answer(case, F32)
    assert_matches(out, reference(case), factor, yardstick)


def places(where, rng, HV=3):
    at = torch.zeros(1, T, HV, dtype=torch.bool)
    if where == "random":
        return torch.rand(1, T, HV, generator=rng) < 0.2
    index = {
        "borders": [63, 64, 127, 128],
        "first": [0],
        "last": [T - 1],
        "all": slice(None),
        "one chunk": slice(70, 80),
        "whole chunks": slice(64, 128),
    }
    if where == "all but one":
        at[:] = True
        at[:, 40] = False
    else:
        at[:, index[where]] = True
    return at


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("value", [0.0, -1e-6, -20.0, -100.0, -1e4, -3e38, -INF], ids=str)
def test_extreme_decays(op, rng, device, value, where, dtype):
    case = make_case(rng, T=T, H=1, HV=3, K=16, V=12, dtype=dtype, device=device)
    at = places(where, rng).to(device)
    case.inputs["g"][at] = value
    out = run(op, case)
    matches(out, case)
    if value < -1e3:
        assert (out["dg"][at] == 0).all()


@pytest.mark.parametrize("value", [-30.0, -90.0, -103.0, -104.0, -110.0, -745.0])
def test_decays_around_underflow(op, rng, device, value):
    """exp leaves the normal numbers at -87 and is zero from -104 on (fp32): there is no step in the results."""
    case = make_case(rng, T=T, H=1, HV=2, device=device)
    case.inputs["g"][:, ::7] = value
    matches(run(op, case), case)


def test_slow_decays_after_strong_ones(op, rng, device):
    """A cumulative sum that reached -6000 still resolves the differences of slow decays that follow."""
    case = make_case(rng, T=128, H=1, HV=2, device=device)
    case.inputs["g"][:, :60] = -100.0
    case.inputs["g"][:, 60:] = -0.01
    matches(run(op, case), case)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("growth", [0.01, 0.3, 1.0])
def test_growing_states(op, rng, device, dtype, growth):
    """Positive log decays are any real numbers: the state grows, within the range of fp32."""
    case = make_case(rng, T=70, H=1, HV=2, dtype=dtype, device=device)
    case.inputs["g"] = case.inputs["g"].abs().clamp(max=1) * growth
    matches(run(op, case), case, factor=2)


def test_growth_between_resets(op, rng, device):
    case = make_case(rng, T=T, H=1, HV=2, device=device)
    case.inputs["g"].fill_(0.5)
    case.inputs["g"][:, ::16] = -INF
    matches(run(op, case), case, factor=2)


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("t", [0, 1, 63, 64, 65, 149])
def test_a_reset_starts_a_new_sequence(op, rng, device, t, dtype):
    """What precedes the reset, the initial state included, changes no bit after it, and gets no gradient from there."""
    case, other = (make_case(rng, T=T, H=1, HV=2, dtype=dtype, device=device) for _ in range(2))
    assert_reset_starts_a_new_sequence(op, case, other, t)


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_infinite_A_log(op, rng, device, dtype, packed):
    """exp(-inf) = 0: no decay. exp(inf): every token is a reset. Neither has a gradient through the gate."""
    kwargs = {"lengths": [70, 0, 30]} if packed else {"T": 100}
    case = make_case(rng, HV=4, dtype=dtype, device=device, use_gate_in_kernel=True, **kwargs)
    case.inputs["A_log"][:2] = torch.tensor([INF, -INF])
    out = run(op, case)
    matches(out, case)
    assert (out["dA_log"][:2] == 0).all() and (out["ddt_bias"][:2] == 0).all() and (out["dg"][..., :2] == 0).all()
    assert (out["dA_log"][2:] != 0).all()


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("A_log", [INF, -INF, 60.0, 200.0, 0.3])
@pytest.mark.parametrize("g", [INF, -INF, 100.0, -100.0])
def test_extreme_gates_in_kernel(op, rng, device, dtype, A_log, g):
    """Every limit of -exp(A_log) * softplus(g + dt_bias), with finite numbers in both directions."""
    case = make_case(rng, T=100, HV=2, dtype=dtype, device=device, use_gate_in_kernel=True)
    case.inputs["A_log"][0] = A_log
    case.inputs["g"][:, ::9] = g
    out = run(op, case)
    assert all(x.isfinite().all() for x in out.values())
    if not (A_log == 60.0 and g == -100.0):  # exp(60) softplus(-100) = exp(-40): the product of two roundings
        matches(out, case)


def test_infinite_A_log_in_16_bits(op, rng, device):
    """A_log = 100 in fp16 is 100; its exponential is inf in fp32, a reset."""
    for gate_dtype in (torch.float16, BF16):
        case = make_case(rng, T=80, HV=3, dtype=BF16, gate_dtype=gate_dtype, device=device, use_gate_in_kernel=True)
        case.inputs["A_log"][:] = torch.tensor([100.0, -100.0, -INF])
        matches(run(op, case), case)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_beta_in_kernel(op, rng, device, sign):
    """sigmoid of large and infinite numbers is 0 or 1, with zero gradient."""
    case = make_case(rng, T=100, HV=2, device=device, use_beta_sigmoid_in_kernel=True)
    case.inputs["beta"][:, ::3] = 200.0 * sign
    case.inputs["beta"][:, 1::7] = INF * sign
    out = run(op, case)
    matches(out, case)
    assert (out["dbeta"][:, 1::7] == 0).all()


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0, -0.5])
def test_special_step_sizes(op, rng, device, beta):
    case = make_case(rng, T=T, HV=2, device=device)
    case.inputs["beta"].fill_(beta)
    matches(run(op, case), case, factor=2)


def test_no_decay_at_all(op, rng, device):
    case = make_case(rng, T=T, H=1, HV=2, dtype=F32, device=device)
    case.inputs["g"].zero_()
    matches(run(op, case), case, factor=2)
