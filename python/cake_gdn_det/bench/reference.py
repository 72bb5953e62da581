"""How right a rule is: its error against float64, and whether it repeats itself to the bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .peers import Call
from .shapes import CHUNK, NAMES, Inputs, Shape, make_inputs

OUTPUTS = ("o", *("d" + name for name in NAMES))


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequences: Sequence[int]) -> Tensor:
    """o of the rule in the dtype of its inputs, by chunks, with normalised q and k; differentiable by autograd.

    q, k [B, T, H, K]; v [B, T, HV, V]; g, beta [B, T, HV], with finite g. `sequences` are the lengths of packed
    sequences with B = 1, else (T,) * B.
    """
    group = v.shape[2] // q.shape[2]
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = ((x if group == 1 else x.repeat_interleave(group, 2)) for x in (q * q.shape[-1] ** -0.5, k))
    if q.shape[0] > 1 or len(sequences) == 1:
        return _sequence(q, k, v, g, beta)
    parts = zip(*(x.split(list(sequences), 1) for x in (q, k, v, g, beta)))
    return torch.cat([_sequence(*part) for part in parts], 1)


def _chunked(x: Tensor) -> Tensor:
    """[B, T, HV, ...] -> [chunks, B, HV, 64, ...], zeros past the end: no decay, nothing learnt."""
    B, T, HV, *rest = x.shape
    x = torch.cat([x, x.new_zeros(B, -T % CHUNK, HV, *rest)], 1)
    return x.unflatten(1, (-1, CHUNK)).movedim(1, 0).movedim(3, 2)


def _sequence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The WY form (arXiv:2412.06464): u = A (beta v) and w = A (beta e^g k) with A the inverse of a unit triangle."""
    T = q.shape[1]
    q, k, v, g, beta = map(_chunked, (q, k, v, g.unsqueeze(-1), beta.unsqueeze(-1)))
    g = g.cumsum(-2)
    mask = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (g - g.mT).masked_fill(mask, -math.inf).exp()
    right = torch.cat([beta * v, beta * g.exp() * k], -1)
    solved = torch.linalg.solve_triangular(beta * decay * (k @ k.mT), right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores, q, last = decay * (q @ k.mT), g.exp() * q, g[..., -1:, :]
    k = (last - g).exp() * k
    state, out = q.new_zeros(*q.shape[1:3], q.shape[-1], v.shape[-1]), []
    for i in range(len(q)):
        v_new = u[i] - w[i] @ state
        out.append(q[i] @ state + scores[i] @ v_new)
        state = last[i].exp() * state + k[i].mT @ v_new
    return torch.cat(out, 2).transpose(1, 2)[:, :T] if out else v.new_zeros(0)


def outputs(call: Call, inputs: Inputs) -> list[Tensor]:
    """o and the gradients of the five inputs: one training step."""
    o = call(inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs.leaves, inputs.do)]


def exact(inputs: Inputs) -> list[Tensor]:
    """`outputs` in float64."""
    leaves = [x.detach().double().requires_grad_() for x in inputs.leaves]
    o = gated_delta_rule(*leaves, inputs.shape.sequences)
    return [o.detach(), *torch.autograd.grad(o, leaves, inputs.do.double())]


def error(x: Tensor, right: Tensor) -> float:
    """||x - right|| / ||right||; inf for what is not finite."""
    difference = (x.double() - right).norm().item()
    magnitude = right.norm().item()
    if not math.isfinite(difference):
        return math.inf
    return 0.0 if difference == 0 else difference / magnitude if magnitude else math.inf


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal to the bit, NaNs and the signs of zeros included."""
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(_bits(x), _bits(y))


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


class Accuracy:
    """Errors of rules on shapes shortened to `tokens`, each measured once in a run."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        self.device, self.tokens = device, tokens
        self._key: tuple[Shape, str] | None = None
        self._exact: tuple[Inputs, list[Tensor]] | None = None
        self._known: dict[tuple[Shape, str, str], dict[str, float]] = {}

    def errors(self, name: str, call: Call, shape: Shape, gates: str) -> tuple[Shape, dict[str, float]]:
        """The shape that was used, and the error of o and of every gradient; `name` tells a rule from the others."""
        small = shape.shortened(self.tokens)
        key = (small, gates, name)
        if key not in self._known:
            inputs, right = self._reference(small, gates)
            self._known[key] = dict(zip(OUTPUTS, map(error, outputs(call, inputs), right)))
        return small, self._known[key]

    def _reference(self, shape: Shape, gates: str) -> tuple[Inputs, list[Tensor]]:
        # Only the last one is kept: rules are measured together.
        if self._exact is None or self._key != (shape, gates):
            self._exact = None
            inputs = make_inputs(shape, gates, self.device)
            self._key, self._exact = (shape, gates), (inputs, exact(inputs))
        return self._exact
