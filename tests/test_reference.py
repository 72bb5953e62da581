"""The references agree with each other: the definition, the oracle, and the closed forms of the stages."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from reference import oracle, stages
from reference.cases import (
    ALL_OPTIONS,
    assert_same_bits,
    error,
    make_case,
    poisoned,
    reference,
    sequence,
    stage_answer,
    tolerance,
)

F64 = torch.float64


def assert_chain_equals_oracle(case, allowed=1e-12):
    ref, got = reference(case), stage_answer(case)
    assert set(got) == set(ref)
    for name, (value, magnitude) in ref.items():
        assert error(got[name], value, magnitude) < allowed, name


def test_oracle_is_the_delta_rule(rng):
    """S_t = e^g (I - beta k k^T) S + beta k v^T, one matrix product after another, for every option."""
    case = make_case(rng, T=9, H=2, HV=4, K=3, V=5, dtype=F64, **ALL_OPTIONS)
    x = case.inputs
    o, final = oracle.gated_delta_rule(**x, **case.options, scale=0.7)
    for hv in range(4):
        A, bias = x["A_log"][hv].item(), x["dt_bias"][hv].item()
        S = x["initial_state"][0, hv].mT.clone()
        for t in range(9):
            q, k = (x[n][0, t, hv // 2] for n in "qk")
            q, k = (y / math.sqrt(float(y @ y) + 1e-6) for y in (q, k))
            decay = math.exp(-math.exp(A) * math.log1p(math.exp(x["g"][0, t, hv].item() + bias)))
            beta = 2 / (1 + math.exp(-x["beta"][0, t, hv].item()))
            S = decay * (torch.eye(3, dtype=F64) - beta * torch.outer(k, k)) @ S
            S = S + beta * torch.outer(k, x["v"][0, t, hv])
            assert torch.allclose(o[0, t, hv], 0.7 * S.mT @ q, rtol=1e-13, atol=1e-14)
        assert torch.allclose(final[0, hv], S.mT, rtol=1e-13, atol=1e-14)


def test_oracle_reset_is_a_new_sequence(rng):
    case = make_case(rng, T=11, HV=2, dtype=F64, initial_state=False)
    case.inputs["g"][:, 6] = -math.inf
    ref = reference(case)
    split = case.with_options(cu_seqlens=torch.tensor([0, 6, 11]))
    split.dht = torch.cat([torch.zeros_like(case.dht), case.dht])
    parts = reference(split)
    assert (ref["dg"][0][:, 6] == 0).all()
    for name in ("o", "dq", "dk", "dv", "dbeta"):
        assert torch.equal(ref[name][0], parts[name][0]), name
    assert torch.equal(ref["final_state"][0][0], parts["final_state"][0][1])


def test_oracle_packed_is_each_sequence_alone(rng):
    case = make_case(rng, lengths=[3, 0, 1, 5, 0], H=1, HV=2, dtype=F64)
    packed = reference(case)
    for n, (start, stop) in enumerate([(0, 3), (3, 3), (3, 4), (4, 9), (9, 9)]):
        alone = reference(sequence(case, n))
        for name in ("o", "dq", "dv", "dg"):
            assert torch.equal(packed[name][0][:, start:stop], alone[name][0])
        for name in ("final_state", "dh0"):
            assert torch.equal(packed[name][0][n], alone[name][0][0])
        if start == stop:
            assert torch.equal(packed["final_state"][0][n], case.inputs["initial_state"][n])
            assert torch.equal(packed["dh0"][0][n], case.dht[n])


@pytest.mark.parametrize(
    "A_log, g, right",
    [
        (-math.inf, 1.0, 0.0),
        (-math.inf, math.inf, 0.0),
        (math.inf, 1.0, -math.inf),
        (math.inf, -math.inf, 0.0),
        (0.5, -math.inf, 0.0),
        (0.5, math.inf, -math.inf),
        (800.0, 1.0, -math.inf),
    ],
)
def test_oracle_gate_limits(A_log, g, right):
    A_log, g, bias = (torch.full((1, 1, 1), x, dtype=F64, requires_grad=True) for x in (A_log, g, 0.25))
    decay = oracle.log_decay(g, A_log, bias)
    assert decay.item() == right
    assert all(grad.item() == 0 for grad in torch.autograd.grad(decay.sum(), (A_log, g, bias)))


@pytest.mark.parametrize("T", [0, 1, 2, 63, 64, 65, 128, 150])
def test_chain_equals_oracle(rng, T):
    assert_chain_equals_oracle(make_case(rng, B=2, T=T, H=2, HV=4, K=6, V=7, dtype=F64))


def test_chain_equals_oracle_with_every_option(rng):
    assert_chain_equals_oracle(make_case(rng, T=140, H=2, HV=6, K=8, V=5, dtype=F64, scale=0.3, **ALL_OPTIONS))


def test_chain_equals_oracle_packed(rng):
    lengths = [0, 64, 1, 0, 65, 70, 0, 0]
    assert_chain_equals_oracle(make_case(rng, lengths=lengths, HV=2, K=8, V=8, dtype=F64, **ALL_OPTIONS))


@pytest.mark.parametrize("where", ["random", "borders", "first", "last", "all"])
def test_chain_equals_oracle_with_resets(rng, where):
    case = make_case(rng, T=150, H=1, HV=3, K=8, V=8, dtype=F64)
    reset = torch.zeros(1, 150, 3, dtype=torch.bool)
    if where == "random":
        reset = torch.rand(1, 150, 3, generator=rng) < 0.05
    else:
        reset[:, {"borders": [63, 64, 65, 127, 128], "first": [0], "last": [149], "all": slice(None)}[where]] = True
    case.inputs["g"][reset] = -math.inf
    assert_chain_equals_oracle(case)
    assert (stage_answer(case)["dg"][reset] == 0).all()


def test_chain_equals_oracle_with_infinite_gates(rng):
    case = make_case(rng, T=100, HV=4, K=8, V=8, dtype=F64, use_gate_in_kernel=True)
    case.inputs["A_log"][:2] = torch.tensor([math.inf, -math.inf])
    case.inputs["g"][:, 30] = math.inf
    case.inputs["g"][:, 60] = -math.inf
    assert_chain_equals_oracle(case)


@pytest.fixture
def chain(rng):
    """A chain with both gradients, two resets and a partial last chunk."""
    case = make_case(rng, T=150, H=2, HV=4, K=12, V=10, dtype=F64)
    case.inputs["g"][:, 20, :2] = -math.inf
    case.inputs["g"][:, 128, 1] = -math.inf
    return case, stages.chain(case.inputs, case.do, case.dht)


def test_tables():
    chunks = stages.tables([0, 0, 64, 65, 200, 200])
    assert [(c.sequence, c.start, c.stop) for c in chunks] == [
        (1, 0, 64),
        (2, 64, 65),
        (3, 65, 129),
        (3, 129, 193),
        (3, 193, 200),
    ]
    assert [c.first for c in chunks] == [True, True, True, False, False]
    assert [c.final for c in chunks] == [True, True, False, False, True]


def test_states_are_the_oracles(chain):
    """h is the state after the chunks before, dh the gradient of the state that the chunks after start from."""
    case, s = chain
    for i, c in enumerate(s["chunks"]):
        cut = {n: x if x is None or n == "initial_state" else x[:, : c.start] for n, x in case.inputs.items()}
        assert error(s["h"][i], oracle.gated_delta_rule(**cut)[1][0]) < 1e-13
        rest = {n: x if x is None or n == "initial_state" else x[:, c.stop :] for n, x in case.inputs.items()}
        if c.final:
            assert error(s["dh"][i], case.dht[0]) == 0
            continue
        rest["initial_state"] = s["h"][i + 1][None].clone().requires_grad_()
        o, final = oracle.gated_delta_rule(**rest)
        pairs = [o, final], [rest["initial_state"]], [case.do[:, c.stop :], case.dht]
        assert error(s["dh"][i], torch.autograd.grad(*pairs)[0][0]) < 1e-13


def test_wy_inverts_the_gated_matrix(chain):
    _, s = chain
    for c in s["chunks"]:
        n = c.stop - c.start
        G, E, R, D = stages._gates(c, s["g"], s["last"])
        k, b = s["k"][c.tokens].transpose(0, 1), s["beta"][c.tokens].T[..., None]
        L = (b * (k @ k.mT) * G).tril(-1)
        A = s["A"][c.tokens].transpose(0, 1)
        eye = torch.eye(n, dtype=F64)
        assert torch.allclose(A[..., :n] @ (eye + L), eye.expand_as(L), atol=1e-13)
        assert (A[..., n:] == 0).all()
        assert (G.triu(1) == 0).all() and (torch.diagonal(G, dim1=-2, dim2=-1) == 1).all()
        assert torch.equal(R, G[:, -1]) and torch.equal(D, E[:, -1])


def test_gradient_of_the_inverse_needs_one_product(chain):
    _, s = chain
    for c in s["chunks"]:
        n = c.stop - c.start
        A, w, u, dw, du, new = (s[name][c.tokens].transpose(0, 1) for name in ("A", "w", "u", "dw", "dv_new", "v_new"))
        full = stages.wy_backward_full(A[..., :n], w, u, dw, du)
        assert error(-(A[..., :n].mT @ du @ new.mT).tril(-1), full) < 1e-12


def test_parts_left_out_of_dg_cancel(chain):
    _, s = chain
    args = [s[name] for name in ("chunks", "q", "k", "v_new", "h", "do", "dh", "dv_new", "g", "last", "scale")]
    without, with_them = stages.dqkwg(*args), stages.dqkwg(*args, cancelled=True)
    assert error(without[3], with_them[3]) < 1e-13


def test_dv_local_and_output_are_adjoint(chain):
    """<do, tril(q k^T o G) v> = <dv_local, v>: the same matrix, once transposed."""
    s = chain[1]
    new = s["v_new"]
    zero = torch.zeros_like(s["h"])
    local = stages.output(s["chunks"], s["q"], s["k"], new, zero, s["g"], s["last"], s["scale"])
    assert math.isclose((s["do"] * local).sum(), (s["dv_local"] * new).sum(), rel_tol=1e-11)


def test_l2norm_and_beta_pullbacks(rng):
    x = torch.randn(5, 2, 7, dtype=F64, generator=rng).requires_grad_()
    d = torch.randn(5, 2, 7, dtype=F64, generator=rng)
    (right,) = torch.autograd.grad(oracle.l2norm(x), x, d)
    x = x.detach()
    assert torch.allclose(stages.l2norm_backward(x, stages.l2norm_rstd(x), d), right, rtol=1e-12)
    b = torch.randn(6, dtype=F64, generator=rng).requires_grad_()
    (right,) = torch.autograd.grad(2 * F.sigmoid(b), b, torch.ones_like(b))
    assert torch.allclose(stages.beta_backward(b.detach(), torch.ones(6, dtype=F64), True, True), right, rtol=1e-12)


def test_metric_sees_what_is_wrong(rng):
    """The error metric fails on one wrong element, a NaN, a non-zero where zero is right, and a wrong dtype's noise."""
    ref = torch.randn(50, 40, dtype=F64, generator=rng)
    wrong = ref.float()
    assert error(wrong, ref) < 1e-7
    wrong[7, 7] += 0.01
    assert error(wrong, ref) > tolerance(wrong, ref, torch.float32)
    wrong[7, 7] = math.nan
    assert error(wrong, ref) == math.inf
    assert error(torch.ones(3), torch.zeros(3, dtype=F64)) == math.inf
    assert error(ref.bfloat16(), ref) < tolerance(ref.bfloat16(), ref, torch.float32) < 0.003
    assert error(ref.half(), ref) < tolerance(ref.half(), ref, torch.float32) < 0.0004
    other = ref.clone()
    other[3, 4] += 1e-15
    with pytest.raises(AssertionError, match=r"1 of 2000 elements differ, first at \(3, 4\)"):
        assert_same_bits({"o": ref}, {"o": other})


def test_poison_surrounds_the_values(rng):
    x = torch.randn(2, 3, 4, generator=rng)
    view = poisoned(x)
    assert torch.equal(view, x) and not view.is_contiguous()
    store = torch.tensor([]).set_(view.untyped_storage())
    assert store[0].isnan() and store[-1].isnan() and store.isnan().sum() == store.numel() - x.numel()
