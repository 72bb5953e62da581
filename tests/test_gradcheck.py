"""Finite differences in float64: the gradients are those of the operator's own forward."""

from __future__ import annotations

import pytest
import torch
from reference.cases import ALL_OPTIONS, make_case

SHAPES = {
    "one token": {"T": 1},
    "short": {"B": 2, "T": 5},
    "past a chunk": {"T": 66, "K": 2, "V": 2, "HV": 1, "H": 1},
    "packed": {"lengths": [2, 0, 3, 1, 0]},
}
OPTIONS = {
    "plain": {},
    "all": ALL_OPTIONS,
    "l2norm": {"use_qk_l2norm_in_kernel": True},
    "gate": {"use_gate_in_kernel": True},
    "gate without bias": {"use_gate_in_kernel": True, "dt_bias": False},
    "sigmoid": {"use_beta_sigmoid_in_kernel": True},
    "no state": {"initial_state": False},
    "scale": {"scale": 1.5},
}


# The longer shape takes seconds: it is checked with no and with all options.
PAIRS = [(s, o) for s in SHAPES for o in OPTIONS if s != "past a chunk" or o in ("plain", "all")]


@pytest.mark.parametrize(("shape", "options"), PAIRS)
@pytest.mark.parametrize("save_state", [True, False])
def test_gradcheck(op, rng, shape, options, save_state):
    kwargs = {"H": 1, "HV": 2, "K": 3, "V": 2} | SHAPES[shape] | OPTIONS[options]
    case = make_case(rng, dtype=torch.float64, **kwargs)
    names = case.present
    fixed = case.options | {n: None for n in case.inputs if n not in names} | {"save_state": save_state}

    def outputs(*xs):
        return op(**dict(zip(names, xs)), **fixed, output_final_state=True)

    leaves = [case.inputs[n].clone().requires_grad_() for n in names]
    assert torch.autograd.gradcheck(outputs, leaves, eps=1e-6, atol=1e-7, rtol=1e-6)


def test_gradcheck_with_resets(op, rng):
    """A reset's own decay is not differentiable (it is -inf): every other input is checked around it."""
    case = make_case(rng, T=7, HV=2, K=3, V=2, dtype=torch.float64)
    case.inputs["g"][:, 3] = -torch.inf
    g = case.inputs.pop("g")
    names = case.present

    def outputs(*xs):
        return op(**dict(zip(names, xs)), g=g, output_final_state=True)

    leaves = [case.inputs[n].clone().requires_grad_() for n in names]
    assert torch.autograd.gradcheck(outputs, leaves, eps=1e-6, atol=1e-7, rtol=1e-6)
