"""What cutting sequences into segments costs in precision, on the model of the chain's roundings: nothing. No GPU."""

from __future__ import annotations

import math

import chain_model
import pytest
import seams
import torch
from reference.cases import error, make_case, stage_answer


def rms(values: list[float]) -> float:
    return (sum(x * x for x in values) / len(values)) ** 0.5


def slow_case(rng: torch.Generator, T: int, HV: int, D: int, dtype: torch.dtype):
    """Slow gates, a quarter of the heads without any: a state lives through many segments."""
    case = make_case(rng, T=T, HV=HV, K=D, V=D, dtype=dtype)
    g = torch.nn.functional.logsigmoid(torch.randn(1, T, HV, generator=rng)) / 16
    g[..., : HV // 4] = 0.0
    return case.with_inputs(g=g)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_segments_err_as_whole_sequences_do(rng, monkeypatch, dtype):
    """At most 5 % more, root mean square over several draws: of a gradient of few elements a single one says little."""
    monkeypatch.setattr(chain_model, "DEVICE", "cpu")
    errors: dict = {}
    for _ in range(3):
        case = slow_case(rng, 768, 4, 32, dtype)
        right = stage_answer(case)
        for segment in (None, 1, 4):
            for name, x in chain_model.rounded(case, segment=segment).items():
                errors.setdefault((name, segment), []).append(error(x, right[name]))
    for (name, segment), values in errors.items():
        slack = 1.5 if name in ("dg", "dbeta") else 1.05  # vectors of one element a token
        assert rms(values) <= slack * rms(errors[name, None]), (name, segment)


def lengthening_case():
    """Keys of norm 2 along one axis, with step 1, lengthen a state threefold each token, and gates of log(1/3) undo it:
    along the axis the initial state lives for ever, while the gates alone say that 70 nats a chunk are lost."""
    rng = torch.Generator().manual_seed(0)
    case = make_case(rng, T=256, HV=1, K=8, V=8, dtype=torch.bfloat16)
    k = torch.zeros(1, 256, 1, 8, dtype=torch.bfloat16)
    k[..., 0] = 2.0
    gates = torch.full((1, 256, 1), -math.log(3.0))
    return case.with_inputs(k=k, v=torch.zeros_like(case.inputs["v"]), beta=torch.ones(1, 256, 1), g=gates)


def test_forgetting_counts_what_keys_lengthen(monkeypatch):
    monkeypatch.setattr(chain_model, "DEVICE", "cpu")
    case = lengthening_case()
    right = stage_answer(case)["final_state"]
    assert error(chain_model.rounded(case, segment=1)["final_state"], right) < 0.1
    bound = seams.bound
    monkeypatch.setattr(seams, "bound", lambda k, *rest: bound(0 * k, *rest))
    assert error(chain_model.rounded(case, segment=1)["final_state"], right) > 0.9
