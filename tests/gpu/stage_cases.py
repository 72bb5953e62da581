"""Cases for the GPU stages: drawn inputs, what flows between the stages, and what each stage must make of it.

A stage is given the float64 chain's values rounded to the types that it reads, and is compared with the reference
evaluated in float64 on exactly these rounded values: what remains is the rounding inside the stage and of its output.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from dataclasses import dataclass
from functools import cache, cached_property

import harness
import pytest
import torch
from harness import Chain, Gates, padded_strides, place, width
from reference import stages
from reference.cases import one_thread

INF = math.inf


@dataclass(frozen=True)
class Case:
    """Shapes of a case. `lengths` packs sequences; `margin` leaves that many tokens before and after them to nobody."""

    B: int = 1
    T: int = 0
    H: int = 1
    HV: int = 1
    K: int = 128
    V: int = 128
    lengths: tuple[int, ...] | None = None
    margin: int = 0
    resets: str = "none"  # none, borders, random, all
    initial_state: bool = True

    def chain(self, dtype: torch.dtype) -> Chain:
        T, cu = self.T, None
        if self.lengths is not None:
            cu = [self.margin]
            for n in self.lengths:
                cu.append(cu[-1] + n)
            T, cu = cu[-1] + self.margin, tuple(cu)
        return Chain(B=self.B, T=T, H=self.H, HV=self.HV, K=self.K, V=self.V, dtype=dtype, cu=cu)


CASES = {
    "one token": Case(T=1),
    "63": Case(T=63, HV=2, resets="borders"),
    "64": Case(T=64, HV=2, initial_state=False),
    "65": Case(T=65, HV=2),
    "three chunks": Case(T=192, H=2, HV=2),
    "batch": Case(B=3, T=150, H=1, HV=2, resets="borders"),
    "packed": Case(lengths=(64, 0, 1, 127, 0, 70, 0, 200), H=2, HV=4, resets="borders"),
    "packed, margins": Case(lengths=(0, 129, 0, 3, 65), H=1, HV=3, margin=5),
    "group of 3, 64": Case(T=130, H=2, HV=6, K=64, V=64),
    "group of 4, 60": Case(lengths=(100, 30), H=1, HV=4, K=60, V=60, margin=3),
    "group of 4, 128": Case(B=2, T=100, H=2, HV=8, resets="borders"),
    "group of 8, 40": Case(lengths=(70, 9), H=1, HV=8, K=40, V=24, resets="random"),
    "100": Case(B=2, T=80, H=1, HV=2, K=100, V=100),
    "16": Case(lengths=(64, 66, 0, 1), H=1, HV=2, K=16, V=16, resets="random"),
    "128 x 64": Case(T=100, H=1, HV=2, K=128, V=64),
    "36 x 128": Case(T=140, H=1, HV=2, K=36, V=128, resets="random"),
    "only resets": Case(T=70, H=1, HV=2, K=64, V=32, resets="all"),
    "no token": Case(lengths=(0, 0), HV=2, K=64, V=64),
    "no sequence": Case(lengths=(), HV=2, K=64, V=64),
}


CASES_ALONE: dict[str, Case] = {}  # what `alone` made


class Problem:
    """One case in one dtype. Everything is float64 on the CPU, rounded to what the device sees; `*4` and `gates` are
    the device's tensors."""

    def __init__(self, name: str, dtype: torch.dtype):
        self.name, self.case, self.dtype = name, (CASES | CASES_ALONE)[name], dtype
        self.chain = c = self.case.chain(dtype)
        rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))

        def randn(*shape):
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        normalize = torch.nn.functional.normalize
        q = self.round(2 * normalize(randn(c.B, c.T, c.H, c.K), dim=-1))
        k = self.round(normalize(randn(c.B, c.T, c.H, c.K), dim=-1))
        v, d_o = self.round(randn(c.B, c.T, c.HV, c.V)), self.round(randn(c.B, c.T, c.HV, c.V))
        g = (-torch.nn.functional.softplus(1.5 * randn(c.B, c.T, c.HV) - 4)).float().double()
        beta = randn(c.B, c.T, c.HV).sigmoid().float().double()
        g[self._resets(rng)] = -INF
        h0 = self.round(randn(c.N, c.HV, c.K, c.V))
        self.h0 = h0 if self.case.initial_state else None
        self.dht = self.round(randn(c.N, c.HV, c.K, c.V))
        self.scale = float(torch.tensor(c.K**-0.5, dtype=torch.float32))
        dead = ~c.split(c.live.cpu())
        for x in (q, k, v, d_o, g, beta):
            x[dead] = math.nan
        self.inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": self.h0}
        self.d_o = d_o
        if c.cu is not None:
            self.inputs["cu_seqlens"] = torch.tensor(c.cu)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).double()

    def _resets(self, rng) -> torch.Tensor:
        c, kind = self.chain, self.case.resets
        at = torch.zeros(c.tokens, c.HV, dtype=torch.bool)
        if kind == "random":
            at = torch.rand(c.tokens, c.HV, generator=rng) < 0.15
        elif kind == "all":
            at[:] = True
        elif kind == "borders":
            for i, chunk in enumerate(c.chunks):
                # First, last, or both tokens of a chunk, or two in its middle: another choice for each head.
                for hv in range(c.HV):
                    places = [(chunk.start,), (chunk.stop - 1,), (chunk.start, chunk.stop - 1)]
                    middle = (chunk.start + chunk.stop) // 2
                    places += [(middle, max(middle - 7, chunk.start)), ()]
                    at[list(places[(i + 2 * hv) % len(places)]), hv] = True
        return c.split(at)

    # ---- the float64 chain and its rounded values ----

    @cached_property
    @one_thread()
    def ideal(self) -> dict[str, torch.Tensor]:
        return stages.chain(self.inputs, self.d_o, self.dht, scale=self.scale)

    @cached_property
    def q(self):
        return self.ideal["q"]

    @cached_property
    def k(self):
        return self.ideal["k"]

    @property
    def v(self):
        return self.ideal["v"]

    @property
    def do(self):
        return self.ideal["do"]

    @property
    def chunks(self):
        return self.chain.chunks

    @cached_property
    def cum(self):
        """[T, HV], as prep stores it."""
        return self._alive(self.ideal["g"].float().double())

    @cached_property
    def last(self):
        return self.ideal["last"]

    @cached_property
    def step(self):
        return self._alive(self.ideal["beta"].float().double())

    @cached_property
    def rstd(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors [T, H] that the rows of q and k may have been normalised with; any will do."""
        c = self.chain
        rng = torch.Generator().manual_seed(zlib.crc32(self.name.encode()) + 1)
        return tuple(self._alive(0.5 + torch.rand(c.tokens, c.H, generator=rng).double()) for _ in range(2))

    @cached_property
    def state0(self):
        c = self.chain
        return torch.zeros(c.N, c.HV, c.K, c.V, dtype=torch.float64) if self.h0 is None else self.h0

    def rounded(self, name: str) -> torch.Tensor:
        """An intermediate of the chain in the 16-bit type; NaN where nobody may look."""
        x = self.round(self.ideal[name])
        return x if name in ("h", "dh") else self._alive(x)

    def _alive(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[~self.chain.live.cpu()] = math.nan
        return x

    # ---- on the device ----

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, heads, columns] with 16-byte-aligned rows and gaps of NaN between heads, tokens and batches."""
        x = x.to(self.dtype)
        _, T, heads, columns = x.shape
        row = width(columns) + (8 if columns % 16 else 0)
        return place(x, ((T * (heads * row + 8) + 16), heads * row + 8, row, 1))

    @cached_property
    def q4(self):
        return self.rows(self.inputs["q"])

    @cached_property
    def k4(self):
        return self.rows(self.inputs["k"])

    @cached_property
    def v4(self):
        return self.rows(self.inputs["v"])

    @cached_property
    def do4(self):
        return self.rows(self.d_o)

    @cached_property
    def gates(self) -> Gates:
        reset = (self.last + 1).to(torch.uint8)
        reset[~self.chain.live.cpu()] = 255
        return Gates(*(x.T.to(harness.DEVICE) for x in (self.cum.float(), reset, self.step.float())))

    def state(self, x: torch.Tensor | None, dtype=torch.float32, v_first=False) -> torch.Tensor | None:
        return None if x is None else place(x.to(dtype), padded_strides(x.shape, 3, (0, 1, 3, 2) if v_first else None))

    def at_slots(self, x: torch.Tensor, of_next: bool = False) -> torch.Tensor:
        """Values by chunk [chunks, HV, K, V] -> [slots, HV, K, V] on the device; NaN in slots of no chunk. `of_next`:
        the value belongs to the state after the chunk."""
        c = self.chain
        out = torch.full((c.slots, c.HV, c.K, c.V), math.nan, dtype=torch.float64)
        for i, chunk in enumerate(self.chunks):
            if of_next and not chunk.final:
                out[c.slot(self.chunks[i + 1])] = x[i]
            elif not of_next and not chunk.first:
                out[c.slot(chunk)] = x[i]
        return out.to(harness.DEVICE)

    def on_device(self, name: str) -> torch.Tensor:
        return self.rounded(name).to(harness.DEVICE)


@cache
def problem(name: str, dtype: torch.dtype) -> Problem:
    return Problem(name, dtype)


def alone(packed: Problem, n: int) -> Problem:
    """Sequence n of a packed problem as a dense batch of one row, with the packed problem's values between the stages,
    for comparisons of bits. It has a name of its own, by which `run` knows it."""
    name = f"{packed.name}, sequence {n}"
    start, stop = packed.chain.cu[n], packed.chain.cu[n + 1]
    shape = dataclasses.replace(packed.case, T=stop - start, lengths=None, margin=0)
    CASES_ALONE[name] = shape
    out = problem(name, packed.dtype)
    rows = slice(start, stop)
    out.inputs = {x: packed.inputs[x][:, rows] for x in ("q", "k", "v", "g", "beta")}
    out.d_o, out.dht = packed.d_o[:, rows], packed.dht[n : n + 1]
    out.h0 = None if packed.h0 is None else packed.h0[n : n + 1]
    ours = [i for i, c in enumerate(packed.chunks) if c.sequence == n]
    values = (*"qkvgAwuh", "last", "beta", "do", "v_new", "dv_local", "dh", "dv_new", "dw")
    out.rstd = tuple(x[rows] for x in packed.rstd)
    out.ideal = {x: packed.ideal[x][ours if x in ("h", "dh") else rows] for x in values}
    return out


# ---- what each stage must give --------------------------------------------------------------------------------------


@cache
def expected(stage: str, name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Outputs by name, float64, token-major over all heads."""
    with one_thread():
        return _EXPECTED[stage](problem(name, dtype))


def _wy(p: Problem):
    A, w, u = stages.wy(p.chunks, p.k, p.v, p.cum, p.last, p.step)
    return {"A": A, "w": w, "u": u}


def _wy_recompute(p: Problem):
    A, h = p.rounded("A"), p.rounded("h")
    w, v_new = torch.empty_like(p.k), torch.empty_like(p.v)
    for i, c in enumerate(p.chunks):
        n = c.stop - c.start
        Ac = A[c.tokens, :, :n].transpose(0, 1)
        b, e = p.step[c.tokens].T[..., None], torch.where(p.last[c.tokens] < 0, p.cum[c.tokens].exp(), 0.0).T[..., None]
        k, v = p.k[c.tokens].transpose(0, 1), p.v[c.tokens].transpose(0, 1)
        wc = Ac @ (b * e * k)
        w[c.tokens], v_new[c.tokens] = wc.transpose(0, 1), (Ac @ (b * v) - wc @ h[i]).transpose(0, 1)
    return {"w": w, "v_new": v_new}


def _fwd_scan(p: Problem):
    h, v_new, final = stages.fwd_scan(p.chunks, p.k, p.rounded("w"), p.rounded("u"), p.cum, p.last, p.state0)
    return {"v_new": v_new, "h": p.at_slots(h).cpu(), "final_state": final}


def _output(p: Problem):
    args = (p.rounded("v_new"), p.rounded("h"), p.cum, p.last, p.scale)
    return {"o": stages.output(p.chunks, p.q, p.k, *args)}


def _dv_local(p: Problem):
    return {"dv": stages.dv_local(p.chunks, p.q, p.k, p.do, p.cum, p.last, p.scale)}


def _adjoint_scan(p: Problem):
    args = (p.rounded("w"), p.do, p.rounded("dv_local"), p.cum, p.last, p.dht, p.scale)
    dh, du, dh0 = stages.adjoint_scan(p.chunks, p.q, p.k, *args)
    return {"du": du, "dh": p.at_slots(dh, of_next=True).cpu(), "dh0": dh0}


def _dqkwg(p: Problem):
    v_new, h, dh, du = (p.rounded(name) for name in ("v_new", "h", "dh", "dv_new"))
    dq, dk, dw, dcum = stages.dqkwg(p.chunks, p.q, p.k, v_new, h, p.do, dh, du, p.cum, p.last, p.scale)
    return {"dq": dq, "dk": dk, "dw": dw, "dcum": dcum.T}


def dk_dcum(name: str, dtype: torch.dtype):
    """What wy_backward finds of dqkwg's: dk in the 16-bit type [T, HV, K], dcum in fp32 [HV, T]."""
    p, before = problem(name, dtype), expected("dqkwg", name, dtype)
    return p._alive(p.round(before["dk"])), p._alive(before["dcum"].T.float().double()).T


def _wy_backward(p: Problem):
    dk, dcum = dk_dcum(p.name, p.dtype)
    A, v_new, dw, du = (p.rounded(x) for x in ("A", "v_new", "dw", "dv_new"))
    more, dv, dstep, part = stages.wy_backward(p.chunks, p.k, p.v, A, v_new, dw, du, p.cum, p.last, p.step)
    return {"dk": dk + more, "dv": dv, "dstep": dstep.T, "dcum": dcum + part.T}


def _tail(p: Problem, normalised: bool = False):
    """dqkwg, wy_backward and finalize with nothing rounded between them."""
    c = p.chain
    A, v_new, h, dh, du = (p.rounded(name) for name in ("A", "v_new", "h", "dh", "dv_new"))
    dq, dk, dw, dcum = stages.dqkwg(p.chunks, p.q, p.k, v_new, h, p.do, dh, du, p.cum, p.last, p.scale)
    more, dv, dstep, part = stages.wy_backward(p.chunks, p.k, p.v, A, v_new, dw, du, p.cum, p.last, p.step)
    out = {"dq": stages.group_sum(dq, c.H), "dk": stages.group_sum(dk + more, c.H)}
    if normalised:
        for name, y, rstd in zip(out, (p.inputs["q"], p.inputs["k"]), p.rstd):
            y, d = y.flatten(0, 1), out[name]
            out[name] = rstd[..., None] * (d - y * (y * d).sum(-1, keepdim=True))
    return out | {"dv": dv, "dstep": dstep.T, "dcum": (dcum + part).T}


_EXPECTED = {
    "wy": _wy,
    "wy_recompute": _wy_recompute,
    "fwd_scan": _fwd_scan,
    "output": _output,
    "dv_local": _dv_local,
    "adjoint_scan": _adjoint_scan,
    "dqkwg": _dqkwg,
    "wy_backward": _wy_backward,
    "tail": _tail,
    "tail of normalised rows": lambda p: _tail(p, normalised=True),
}


# ---- what each stage gives ------------------------------------------------------------------------------------------


def run(stage: str, name: str, dtype: torch.dtype, chain: Chain | None = None, **options) -> dict[str, torch.Tensor]:
    """The stage's outputs by the names of `expected`, for a slice of the heads or for all of them."""
    p = problem(name, dtype)
    return _RUN[stage](p, chain or p.chain, **options)


def _run_wy(p, c):
    return dict(zip(("A", "w", "u"), harness.run_wy(c, p.k4, p.v4, p.gates)))


def _run_wy_recompute(p, c):
    h, h0 = p.at_slots(p.rounded("h")), p.state(p.h0)
    out = harness.run_wy_recompute(c, p.k4, p.v4, p.gates, p.on_device("A"), h, h0)
    return dict(zip(("w", "v_new"), out))


def _run_fwd_scan(p, c, saved=False, v_first=False, state_dtype=torch.float32):
    h0 = p.state(p.h0, state_dtype, v_first)
    out = harness.run_fwd_scan(c, p.k4, p.gates, p.on_device("w"), p.on_device("u"), h0, True, saved, v_first)
    return dict(zip(("v_new", "h", "final_state"), out))


def _run_output(p, c, saved=False, strides=None):
    v_new, h, h0 = p.on_device("v_new"), p.at_slots(p.rounded("h")), p.state(p.h0)
    return {"o": harness.run_output(c, p.q4, p.k4, p.gates, v_new, h, p.scale, h0, saved, strides)}


def _run_dv_local(p, c):
    return {"dv": harness.run_dv_local(c, p.q4, p.k4, p.do4, p.gates, p.scale)}


def _run_adjoint_scan(p, c, v_first=False, state_dtype=torch.float32):
    w, dv, dht = p.on_device("w"), p.on_device("dv_local"), p.state(p.dht, state_dtype, v_first)
    out = harness.run_adjoint_scan(c, p.q4, p.k4, p.do4, p.gates, w, dv, p.scale, dht, True, v_first)
    return dict(zip(("du", "dh", "dh0"), out))


def _run_dqkwg(p, c, saved=False):
    h, dh = p.at_slots(p.rounded("h")), p.at_slots(p.rounded("dh"), of_next=True)
    v_new, du = p.on_device("v_new"), p.on_device("dv_new")
    states = (p.state(p.h0), p.state(p.dht))
    out = harness.run_dqkwg(c, p.q4, p.k4, p.do4, p.gates, v_new, du, h, dh, p.scale, *states, saved)
    return dict(zip(("dq", "dk", "dw", "dcum"), out))


def _run_wy_backward(p, c, strides=None):
    dk, dcum = (x.to(harness.DEVICE) for x in dk_dcum(p.name, p.dtype))
    A, v_new, dw, du = (p.on_device(x) for x in ("A", "v_new", "dw", "dv_new"))
    out = harness.run_wy_backward(c, p.k4, p.v4, p.gates, A, v_new, dw, du, dk, dcum.float(), strides)
    return dict(zip(("dk", "dv", "dstep", "dcum"), out))


def _run_tail(p, c, normalised=False, saved=False, **options):
    h, dh = p.at_slots(p.rounded("h")), p.at_slots(p.rounded("dh"), of_next=True)
    A, v_new, du = (p.on_device(x) for x in ("A", "v_new", "dv_new"))
    rstd = [x.float().to(harness.DEVICE) for x in p.rstd] if normalised else (None, None)
    rows, states = (p.q4, p.k4, p.v4, p.do4), (p.state(p.h0), p.state(p.dht))
    out = harness.run_tail(c, rows, p.gates, A, v_new, du, h, dh, p.scale, *states, rstd, saved, **options)
    return dict(zip(("dq", "dk", "dv", "dstep", "dcum"), out))


_RUN = {
    "wy": _run_wy,
    "wy_recompute": _run_wy_recompute,
    "fwd_scan": _run_fwd_scan,
    "output": _run_output,
    "dv_local": _run_dv_local,
    "adjoint_scan": _run_adjoint_scan,
    "dqkwg": _run_dqkwg,
    "wy_backward": _run_wy_backward,
    "tail": _run_tail,
    "tail of normalised rows": lambda p, c, **options: _run_tail(p, c, normalised=True, **options),
}

# Where the heads are in each output, and whether it holds the slice's heads only.
HEADS = {
    **dict.fromkeys(("w", "u", "v_new", "du", "dq", "dk", "dw"), (1, True)),
    **dict.fromkeys(("h", "dh"), (1, True)),
    **dict.fromkeys(("A", "final_state", "dh0"), (1, False)),
    **dict.fromkeys(("dcum", "dstep"), (0, False)),
    "o": (2, False),
}


def heads_of(stage: str, name: str) -> tuple[int, bool]:
    if stage.startswith("tail") and name in ("dq", "dk", "dv"):
        return 2, False  # of dq and dk the key heads
    if name == "dv":
        return (2, False) if stage == "wy_backward" else (1, True)
    return HEADS[name]


def assert_refused(stage: str, name: str, change: dict, message: str, monkeypatch) -> None:
    """With these fields of its params changed, a stage is refused before any launch, by name; nothing is written."""
    original = harness.Launch.run

    def changed(self):
        self.fields |= change
        written = [buffer.bytes.clone() for _, buffer, _ in self.outputs]
        try:
            original(self)
        finally:
            for (output, buffer, _), before in zip(self.outputs, written):
                assert torch.equal(buffer.bytes, before), output

    monkeypatch.setattr(harness.Launch, "run", changed)
    with pytest.raises(ValueError, match=message):
        run(stage, name, torch.bfloat16)
