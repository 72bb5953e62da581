"""Keys that make the chunk's triangular system badly conditioned.

Where the problem itself loses digits, the yardstick is the same algorithm in plain torch arithmetic of the computing
dtype: the operator may err four times as much as that, and no more than the tolerance where the problem is harmless.
"""

from __future__ import annotations

import math

import pytest
import torch
from reference.cases import assert_matches, make_case, reference, run, stage_answer

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def check(op, case):
    out = run(op, case)
    assert all(x.isfinite().all() for x in out.values())
    assert_matches(out, reference(case), yardstick=stage_answer(case, out["final_state"].dtype))


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9, 1.999, 2.0])
@pytest.mark.parametrize("g", [0.0, -0.05, None], ids=["no decay", "slow decay", "random decay"])
def test_identical_keys(op, rng, device, beta, dtype, g):
    """One key for all tokens: the system is dense, and at beta = 2 every token reflects the state."""
    case = make_case(rng, T=200, H=1, HV=2, dtype=dtype, device=device)
    case.inputs["k"] = case.inputs["k"][:, :1].expand_as(case.inputs["k"]).contiguous()
    case.inputs["beta"].fill_(beta)
    if g is not None:
        case.inputs["g"].fill_(g)
    check(op, case)


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("norm", [0.0, 0.5, 1.5, 3.0])
def test_keys_of_other_norms(op, rng, device, norm, dtype):
    """Without L2 norm beta |k|^2 may pass 2, where a token enlarges the state."""
    case = make_case(rng, T=100, H=1, HV=2, K=32, V=16, dtype=dtype, device=device)
    case.inputs["k"] *= norm
    check(op, case)


@pytest.mark.parametrize("norm, decay", [(3.0, -3.0), (8.0, -5.0), (30.0, -8.0), (1e3, -16.0)])
def test_large_keys_under_strong_decay(op, rng, device, norm, decay):
    """The decays hold what the keys enlarge: the gated matrix is harmless, the gate-free one overflows fp32."""
    case = make_case(rng, T=150, H=1, HV=2, K=32, V=16, device=device)
    case.inputs["k"] *= norm
    case.inputs["g"].fill_(decay)
    check(op, case)


def test_nearly_identical_keys(op, rng, device):
    case = make_case(rng, T=150, H=1, HV=2, K=32, V=32, device=device)
    k = case.inputs["k"]
    case.inputs["k"] = torch.nn.functional.normalize(k[:, :1] + 1e-3 * k, dim=-1)
    case.inputs["beta"].fill_(1.0)
    case.inputs["g"].fill_(-1e-3)
    check(op, case)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_alternating_keys(op, rng, device, dtype):
    case = make_case(rng, T=150, H=1, HV=2, dtype=dtype, device=device)
    case.inputs["k"][:, ::2] = case.inputs["k"][:, :1]
    case.inputs["k"][:, 1::2] = -case.inputs["k"][:, :1]
    case.inputs["beta"].fill_(1.0)
    check(op, case)


@pytest.mark.parametrize("magnitude", [0.0, 1e-20, 1e-6, 1e3, 1e10])
def test_l2norm_of_tiny_and_large_vectors(op, rng, device, magnitude):
    """The 1e-6 under the root keeps zero vectors finite; squares of large ones stay within fp32."""
    case = make_case(rng, T=80, H=2, HV=2, device=device, use_qk_l2norm_in_kernel=True)
    case.inputs["q"] *= magnitude
    case.inputs["k"] *= magnitude
    check(op, case)


@pytest.mark.parametrize("name", ["q", "k", "v", "initial_state", "do"])
@pytest.mark.parametrize("magnitude", [0.0, 1e-12, 1e12])
def test_magnitudes_scale_through(op, rng, device, name, magnitude):
    case = make_case(rng, T=80, HV=2, device=device, use_qk_l2norm_in_kernel=name == "k")
    if name == "do":
        case.do = case.do * magnitude
        case.dht = case.dht * magnitude
    else:
        case.inputs[name] = case.inputs[name] * magnitude
    check(op, case)


def test_large_finite_inputs_in_fp16(op, rng, device):
    """Operands near fp16's largest number: what is stored in 16 bits are the outputs only."""
    case = make_case(rng, T=80, HV=2, dtype=torch.float16, device=device, scale=1e-4)
    case.inputs["q"] *= 2e4 / case.inputs["q"].abs().max()
    case.inputs["v"] *= 30
    case.do *= 1e-3
    check(op, case)


def test_orthogonal_keys_overwrite_exactly(op, device):
    """beta = 1 and unit keys: reading with the key just written returns its value, whatever stood there before."""
    T, K = 128, 16
    k = torch.eye(K, device=device)[torch.arange(T) % K][None, :, None]
    v = torch.arange(T * 3, dtype=F32, device=device).view(1, T, 1, 3)
    ones = torch.ones(1, T, 1, device=device)
    o, _ = op(k, k, v, ones * 0, ones, scale=1.0)
    assert torch.equal(o, v)
    assert math.isfinite(o.sum().item())
