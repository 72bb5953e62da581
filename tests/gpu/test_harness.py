"""The harness without a GPU: it sets exactly the fields that csrc/cuda/stages.h lists, with the values that the stages
take, and its checks see what a stage must not do."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import harness
import pytest
import torch
from harness import Chain, Gates, padded_strides, place

CUDA = Path(__file__).parents[2] / "csrc" / "cuda"
STAGES_H = "".join(p.read_text() for p in (CUDA / "stages.h", *sorted((CUDA / "params").glob("*.h"))))
CONSTANTS = {"GATE": 2, "BETA_SIGMOID": 4, "NEG_EIGVAL": 8}
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float64: 3}


def macros() -> dict[str, str]:
    """Name -> body of the function-like macros of stages.h and params/, without comments."""
    text = re.sub(r"/\*.*?\*/", "", STAGES_H, flags=re.S).replace("\\\n", " ")
    return dict(re.findall(r"#define (CAKE_GDN_\w+)\(X\w*(?:, name)?\) *(.*)", text))


def fields(macro: str, name: str = "") -> list[str]:
    """The fields that an X-macro lists, those of the macros it contains in their place."""
    out = []
    for used, arguments in re.findall(r"\b(X|CAKE_GDN_\w+)\(([^()]*)\)", macros()[macro]):
        last = arguments.split(",")[-1].strip()
        if used == "X":
            out.append(last.replace("name##", name) if "##" in last else name if last == "name" else last)
        else:
            out += fields(used, last)
    return out


# Stage -> its Python class; the tables have tests of their own.
STAGES = dict(re.findall(r'\bF\((\w+), \w+, "(\w+)"\)', STAGES_H))
STAGES.pop("tables")


class Recorder(SimpleNamespace):
    """Stands for the compiled module: keeps the params of each call and lets `effect` act on them."""

    def __init__(self, effect=lambda params: None):
        super().__init__(**CONSTANTS, dtypes=DTYPES, calls={})
        for stage, params_class in STAGES.items():
            setattr(self, params_class, SimpleNamespace)
            setattr(self, stage, self.recording(stage, effect))

    def recording(self, stage, effect):
        def run(params, stream):
            self.calls[stage] = params
            effect(params)

        return run


@pytest.fixture
def module(monkeypatch):
    """Installs a recorder with an effect; tensors are on the CPU."""
    monkeypatch.setattr(harness, "DEVICE", "cpu")

    def install(**effect):
        recorder = Recorder(**effect)
        monkeypatch.setattr(harness, "native", lambda: recorder)
        return recorder

    return install


CHAIN = Chain(B=1, T=150, H=2, HV=4, K=16, V=32, dtype=torch.float16, cu=(5, 70, 70, 140), segment=1)


def tensors():
    c = CHAIN
    x = SimpleNamespace(
        q=place(torch.zeros(c.B, c.T, c.H, c.K, dtype=c.dtype)),
        v=place(torch.zeros(c.B, c.T, c.HV, c.V, dtype=c.dtype)),
        tk=torch.zeros(c.tokens, c.HV, c.K),
        tv=torch.zeros(c.tokens, c.HV, c.V),
        h=torch.zeros(c.slots, c.HV, c.K, c.V),
        state=torch.zeros(c.N, c.HV, c.K, c.V),
        A=torch.zeros(c.tokens, c.HV, 64),
        scalars=torch.zeros(c.HV, c.tokens),
        g=torch.zeros(c.B, c.T, c.HV),
        parameter=torch.zeros(c.HV),
    )
    return x, Gates(x.scalars, x.scalars.byte(), x.scalars)


def run_all(chain: Chain) -> None:
    x, gates = tensors()
    one = torch.ones(chain.tokens, chain.H)
    harness.run_pack(x.q, True)
    harness.run_prep(chain, x.g, x.g, x.parameter, x.parameter, True, True)
    harness.run_wy(chain, x.q, x.v, gates)
    harness.run_wy_recompute(chain, x.q, x.v, gates, x.A, x.h, x.state)
    harness.run_fwd_scan(chain, x.q, gates, x.tk, x.tv, x.state, v_first=True)
    bound, seams = torch.zeros(chain.HV, len(chain.chunks)), len(chain.seams)
    harness.run_fwd_prescan(chain, x.q, gates, x.tk, x.tv, bound)
    harness.run_adjoint_prescan(chain, x.q, x.q, x.v, gates, x.tk, x.tv, bound, 0.5)
    states, parts = torch.zeros(seams, chain.HV, chain.K, chain.V), torch.zeros(seams, chain.HV, 2, chain.K, chain.K)
    harness.run_stitch(chain, states, parts.bfloat16(), torch.zeros(seams, chain.HV).byte(), x.state, True)
    harness.run_output(chain, x.q, x.q, gates, x.tv, x.h, 0.5, x.state)
    harness.run_dv_local(chain, x.q, x.q, x.v, gates, 0.5)
    harness.run_adjoint_scan(chain, x.q, x.q, x.v, gates, x.tk, x.tv, 0.5, x.state)
    harness.run_dqkwg(chain, x.q, x.q, x.v, gates, x.tv, x.tv, x.h, x.h, 0.5, x.state, x.state, saved=True)
    harness.run_wy_backward(chain, x.q, x.v, gates, x.A, x.tv, x.tk, x.tv, x.tk, x.scalars)
    harness.run_finalize(chain.B, chain.T, x.tk.half(), 2, x.tk[:, : chain.H].half(), one, heads=(1, 1))
    harness.run_tail(chain, (x.q, x.q, x.v, x.v), gates, x.A, x.tv, x.tv, x.h, x.h, 0.5, x.state, x.state, (one, one))
    more = (x.scalars, x.scalars, x.parameter, x.parameter, True, True)
    harness.run_gate_backward(chain, x.g, x.g, gates, *more)
    harness.run_gate_reduce(chain, torch.zeros(chain.max_chunks, chain.HV, 2))


def test_every_field_of_every_stage_is_set(module):
    recorder = module()
    run_all(CHAIN)
    assert set(recorder.calls) == set(STAGES)
    for stage, params in recorder.calls.items():
        listed = fields(f"CAKE_GDN_{stage.upper()}_PARAMS")
        assert len(listed) == len(set(listed)) > 5
        assert sorted(vars(params)) == sorted(listed), stage


def test_values_of_a_slice(module):
    recorder = module()
    chain = CHAIN.sliced(1, 2, stored=(0, 4))
    run_all(chain)
    p = recorder.calls["dqkwg"]
    assert (p.head_begin, p.heads, p.stored_begin, p.stored_heads, p.h_begin, p.h_heads) == (1, 2, 0, 4, 0, 4)
    assert (p.B, p.T, p.N, p.H, p.HV, p.K, p.V, p.dtype, p.scale) == (1, 150, 3, 2, 4, 16, 32, 1, 0.5)
    assert (p.q_batch, p.q_token, p.q_head) == (150 * 32, 32, 16)
    assert (p.dht_sequence, p.dht_head, p.dht_k, p.dht_v, p.dht_dtype) == (4 * 16 * 32, 16 * 32, 32, 1, 2)
    chunks = (ctypes.c_int64 * (2 * p.max_chunks)).from_address(p.chunks)
    assert p.max_chunks == 4 + 1 + 3 and list(chunks[:8:2]) == [5, 69, 70, 134]
    assert [n & 0xFFFFFFFF for n in chunks[1::2]] == [0, 0, 2, 2] + [0xFFFFFFFF] * 4
    assert [n >> 32 for n in chunks[1:8:2]] == [64, 1, 64, 6]
    p = recorder.calls["stitch"]
    segments = (ctypes.c_int64 * (2 * p.max_segments)).from_address(p.segments)
    assert p.max_segments == 3 + 149 // 64 + 3 and list(segments[:10:2]) == [0, 1, 2, 2, 3]
    assert [n & 0xFFFFFFFF for n in segments[1::2]] == [0, 0, 1, 2, 2] + [0xFFFFFFFF] * 3
    assert [n >> 32 for n in segments[1:10:2]] == [1, 1, 0, 1, 1]
    assert chain.seams == [(0, 1), (3, 4)] and chain.max_seams == 5
    first = recorder.calls["fwd_scan"]
    assert (first.final_state_k, first.final_state_v, first.initial_state_k, first.initial_state_v) == (1, 16, 32, 1)
    last = recorder.calls["finalize"]
    assert (last.H, last.group, last.x_heads, last.dx_token, last.dx_head) == (1, 2, 2, 32, 16)
    assert recorder.calls["prep"].flags == 2 | 4 | 8


def write(address: int) -> None:
    ctypes.memset(address, 1, 1)


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("before the output", lambda p: p.out - 1),
        ("past the output", lambda p: p.out + 4 * 2 * 8 * 2),
        ("the input", lambda p: p.x),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_stray_write_is_seen(module, what, where):
    module(effect=lambda p: write(where(p)))
    with pytest.raises(AssertionError, match="written"):
        harness.run_pack(place(torch.zeros(1, 4, 2, 8, dtype=torch.float16)), False)


def test_a_write_outside_of_the_slice_or_of_the_sequences_is_seen(module):
    x, gates = tensors()
    row = CHAIN.tokens * 4  # bytes of one head of dcum

    def call(effect):
        module(effect=effect)
        chain = CHAIN.sliced(1, 2)
        harness.run_dqkwg(chain, x.q, x.q, x.v, gates, x.tv, x.tv, x.h, x.h, 0.5, x.state, x.state)

    call(lambda p: write(p.dcum + row + 4 * 5))  # head 1, token 5: the stage's own
    for offset in (4 * 5, row + 4 * 4, 2 * row + 4 * 140, 3 * row + 4 * 20):
        with pytest.raises(AssertionError, match="dcum"):
            call(lambda p, offset=offset: write(p.dcum + offset))


def test_padding_that_is_not_zero_is_seen(module):
    module()
    chain = Chain(B=1, T=3, H=1, HV=1, K=12, V=16, dtype=torch.float16)
    q, v = place(torch.zeros(1, 3, 1, 16, dtype=torch.float16)), place(torch.zeros(1, 3, 1, 16, dtype=torch.float16))
    gates = Gates(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.uint8), torch.zeros(1, 3))
    with pytest.raises(AssertionError, match="w is not zero past column 12"):
        harness.run_wy(chain, q[..., :12], v, gates)


def test_layouts_of_outputs():
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3)):
        strides = padded_strides((2, 3, 4, 5), 3, order)
        shape = torch.Size((2, 3, 4, 5))
        offsets = sum(torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) * s
                      for d, (n, s) in enumerate(zip(shape, strides)))  # fmt: skip
        assert offsets.unique().numel() == shape.numel()
