"""Runs every program of csrc/cuda/stages.h alone, on torch tensors: one function a stage.

    chain = Chain(B=1, T=200, H=2, HV=4, K=128, V=128, dtype=torch.bfloat16, cu=(0, 70, 70, 200))
    gates = run_prep(chain, g, beta)
    A, w, u = run_wy(chain, k, v, gates)

Tensors are token-major, [B * T, heads, columns], as in tests/reference/stages.py, so that what a function takes and
returns can be compared as it is; user tensors that keep their strides are [B, T, heads, columns]. A function pads,
slices and lays out what the stage wants of it, and checks of every launch that

- each output lies in memory filled with 0xff (a NaN in every floating type) between red zones, and nothing but the
  elements that the stage owns was written: no gap of a strided tensor, no token of no sequence, no other slice's head;
- each input, which lies between NaNs, is unchanged;
- the padding columns of an intermediate are zero.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import tables_twin as twins
import torch
from reference import stages

DEVICE = "cuda"
GUARD = 256  # bytes of red zone on each side: keeps the alignment of what lies between
CHUNK = 64
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def native():
    """The compiled module; its absence is an error, not a reason to skip."""
    from cake_gdn_det import _C

    return _C


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else 0


def dtype_code(dtype: torch.dtype) -> int:
    return native().dtypes[dtype]


def pointer(x: torch.Tensor | None) -> int:
    return 0 if x is None or x.numel() == 0 else x.data_ptr()


def width(columns: int) -> int:
    """Elements of an intermediate's row."""
    return (columns + 7) // 8 * 8


def padded_strides(shape, pad: int = 0, order=None) -> tuple[int, ...]:
    """Strides of a tensor whose dimensions lie in `order`, outermost first, with `pad` spare elements after each."""
    strides, step = [0] * len(shape), 1
    for d in reversed(range(len(shape)) if order is None else order):
        strides[d] = step
        step = step * shape[d] + (pad if d != len(shape) - 1 else 0)
    return tuple(strides)


class Buffer:
    """A strided tensor in memory of 0xff bytes with red zones around it."""

    def __init__(self, shape, dtype: torch.dtype, strides=None):
        shape = tuple(shape)
        self.strides = padded_strides(shape) if strides is None else tuple(strides)
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, self.strides)) if all(shape) else 0
        size = torch.empty((), dtype=dtype).element_size()
        self.shape, self.dtype, self.integer = shape, dtype, _INTEGER[size]
        self.bytes = torch.full((2 * GUARD + extent * size,), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.view = self.inside(self.bytes).view(dtype).as_strided(shape, self.strides)
        self.address = self.bytes.data_ptr() + GUARD  # also of no element, where torch says null

    def inside(self, storage: torch.Tensor) -> torch.Tensor:
        return storage[GUARD : storage.numel() - GUARD]

    def bits(self, storage: torch.Tensor) -> torch.Tensor:
        """The tensor's elements as integers, in a copy of its bytes."""
        # The offset of a view must be a multiple of its element, which GUARD is.
        return self.inside(storage).view(self.integer).as_strided(self.shape, self.strides)


def place(x: torch.Tensor, strides=None) -> torch.Tensor:
    """A copy of x on the device, between NaNs, with the given strides in elements (default contiguous)."""
    buffer = Buffer(x.shape, x.dtype, strides)
    buffer.view.copy_(x)
    return buffer.view


@dataclasses.dataclass(frozen=True)
class Chain:
    """The call that a stage is part of: sizes, sequences, and the slice of the value heads."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    dtype: torch.dtype
    cu: tuple[int, ...] | None = None  # offsets of packed sequences, B = 1; they need not cover all tokens
    head_begin: int = 0
    heads: int = -1  # -1: all
    stored: tuple[int, int] | None = None  # first head and heads of what the scans left; default: the slice
    slack: int = 3  # entries of the tables past the last chunk and segment
    segment: int = 1 << 30  # chunks of a full segment

    def sliced(self, begin: int, heads: int, stored: tuple[int, int] | None = None) -> Chain:
        return dataclasses.replace(self, head_begin=begin, heads=heads, stored=stored)

    @property
    def N(self) -> int:
        return self.B if self.cu is None else len(self.cu) - 1

    @property
    def tokens(self) -> int:
        return self.B * self.T

    @property
    def slots(self) -> int:
        return self.B * (max(self.T - 1, 0) // CHUNK)

    @property
    def span(self) -> slice:
        """The slice's heads."""
        return slice(self.head_begin, self.HV if self.heads < 0 else self.head_begin + self.heads)

    @property
    def stored_span(self) -> slice:
        return self.span if self.stored is None else slice(self.stored[0], sum(self.stored))

    @cached_property
    def chunks(self) -> list[stages.Chunk]:
        """The chunks as the references know them."""
        return stages.tables([b * self.T for b in range(self.B + 1)] if self.cu is None else list(self.cu))

    @cached_property
    def _tables(self):
        import numpy as np

        cu = None if self.cu is None else np.asarray(self.cu, np.int64)
        tables = twins.twin(cu, self.B, self.T, self.segment)

        def entries(table, kind):
            padded = np.zeros(len(table) + self.slack, kind)
            padded["sequence"] = -1
            padded[: len(table)] = table
            return torch.from_numpy(padded.view(np.int64).copy()).to(DEVICE)

        starts = (torch.from_numpy(x).to(DEVICE) for x in (tables.sequence_chunk, tables.sequence_segment))
        return (
            entries(tables.chunks, twins.CHUNK_ENTRY),
            entries(tables.segments, twins.SEGMENT_ENTRY),
            *starts,
            [(int(s["sequence"]), int(s["chunk"]), int(s["chunks"])) for s in tables.segments if s["sequence"] >= 0],
        )

    @property
    def max_chunks(self) -> int:
        return len(self._tables[0]) // 2

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """(sequence, first chunk, chunks) of every segment."""
        return self._tables[4]

    @property
    def max_seams(self) -> int:
        """Seams that there may be; `seams` are there."""
        return len(self._tables[1]) // 2 - self.N

    @cached_property
    def seams(self) -> list[tuple[int, int]]:
        """The segments before and after each seam, in the order of the seams."""
        of = [s[0] for s in self.segments]
        return [(i, i + 1) for i in range(len(of) - 1) if of[i] == of[i + 1]]

    @cached_property
    def live(self) -> torch.Tensor:
        """[B * T]: tokens that belong to a sequence."""
        if self.cu is None:
            return torch.ones(self.tokens, dtype=torch.bool, device=DEVICE)
        live = torch.zeros(self.tokens, dtype=torch.bool)
        live[self.cu[0] : self.cu[-1]] = True
        return live.to(DEVICE)

    def slot(self, c: stages.Chunk) -> int:
        """Where the state before a chunk that is not its sequence's first is kept."""
        b, t = divmod(c.start, self.T)
        return b * ((self.T - 1) // CHUNK) + t // CHUNK - 1

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[B * T, ...] -> [B, T, ...]."""
        return x.unflatten(0, (self.B, self.T))

    def fields(self) -> dict:
        chunks, _, sequence_chunk, _, _ = self._tables
        span, stored = self.span, self.stored_span
        return {
            "device": torch.cuda.current_device() if DEVICE == "cuda" else 0,
            "dtype": dtype_code(self.dtype),
            **{name: getattr(self, name) for name in ("B", "T", "N", "H", "HV", "K", "V")},
            "head_begin": span.start,
            "heads": span.stop - span.start,
            "stored_begin": stored.start,
            "stored_heads": stored.stop - stored.start,
            "max_chunks": self.max_chunks,
            "chunks": pointer(chunks),
            "sequence_chunk": pointer(sequence_chunk),
        }


@dataclasses.dataclass
class Gates:
    """What prep makes: cum and step fp32, reset uint8, all [HV, B * T]."""

    cum: torch.Tensor
    reset: torch.Tensor
    step: torch.Tensor


class Launch:
    """One call of a stage: its params by field, the inputs that must not change and the outputs that are checked."""

    def __init__(self, stage: str, chain: Chain | None = None, **fields):
        self.stage, self.chain = stage, chain
        self.fields = (chain.fields() if chain else {}) | fields
        self.kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.outputs: list[tuple[str, Buffer, torch.Tensor | None]] = []

    # ---- inputs ----

    def input(self, name: str, x: torch.Tensor | None) -> None:
        self.fields[name] = pointer(x)
        if x is not None and x.numel():
            x = x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())]  # an expanded tensor's memory
            self.kept.append((name, x, x.clone()))

    def rows(self, name: str, x: torch.Tensor) -> None:
        """CAKE_GDN_ROWS: x [B, T, heads, columns]."""
        assert x.dim() == 4 and x.dtype == self.chain.dtype, name
        assert x.shape[3] <= 1 or x.stride(3) == 1, f"{name}: unit last stride"
        aligned = all(n <= 1 or s % 8 == 0 for n, s in zip(x.shape[:3], x.stride()[:3]))
        assert x.numel() == 0 or (aligned and x.data_ptr() % 16 == 0), f"{name}: rows aligned to 16 bytes"
        self.input(name, x)
        for dim, of in enumerate(("batch", "token", "head")):
            self.fields[f"{name}_{of}"] = x.stride(dim)

    def state(self, name: str, x: torch.Tensor | None) -> None:
        """CAKE_GDN_STATE: x [N, HV, K, V] with any strides."""
        self.input(name, x)
        self._state_layout(name, x)

    def _state_layout(self, name: str, x: torch.Tensor | None) -> None:
        for dim, of in enumerate(("sequence", "head", "k", "v")):
            self.fields[f"{name}_{of}"] = 0 if x is None else x.stride(dim)
        self.fields[f"{name}_dtype"] = 0 if x is None else dtype_code(x.dtype)

    def gates(self, gates: Gates, step: bool = False) -> None:
        self.input("cum", place(gates.cum))
        self.input("reset", place(gates.reset))
        if step:
            self.input("step", place(gates.step))

    def gate_inputs(self, g, beta, A_log, dt_bias, sigmoid: bool, neg_eigval: bool) -> None:
        """CAKE_GDN_GATE_INPUTS: g, beta [B, T, HV], A_log, dt_bias [HV] of any floating dtype and strides."""
        C = native()
        flags = (C.GATE if A_log is not None else 0) | (C.BETA_SIGMOID if sigmoid else 0)
        self.fields["flags"] = flags | (C.NEG_EIGVAL if neg_eigval else 0)
        for name, x in (("g", g), ("beta", beta)):
            self.input(name, x)
            self._scalar_layout(name, x)
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            self.input(name, x)
            self._parameter_layout(name, x)

    def _scalar_layout(self, name: str, x: torch.Tensor | None) -> None:
        for dim, of in enumerate(("batch", "token", "head")):
            self.fields[f"{name}_{of}"] = 0 if x is None else x.stride(dim)
        self.fields[f"{name}_dtype"] = 0 if x is None else dtype_code(x.dtype)

    def _parameter_layout(self, name: str, x: torch.Tensor | None) -> None:
        self.fields[f"{name}_dtype"] = 0 if x is None else dtype_code(x.dtype)
        self.fields[f"{name}_stride"] = 0 if x is None else x.stride(0)

    def slice(self, name: str, x: torch.Tensor, stored: bool = False) -> None:
        """An intermediate of the slice, from all heads' x [B * T, HV, columns]."""
        self.input(name, place(self._padded(x[:, self.chain.stored_span if stored else self.chain.span])))

    def states(self, name: str, x: torch.Tensor | None, span: slice) -> None:
        """Chunk states of some heads, from all heads' x [slots, HV, K, V]."""
        self.input(name, None if x is None else place(self._padded(x[:, span])))
        if x is not None and not x.numel():
            self.fields[name] = GUARD  # states of no slot are not absent states, and are not read

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.chain.dtype)
        return torch.nn.functional.pad(x, (0, width(x.shape[-1]) - x.shape[-1]))

    def segments(self) -> None:
        """CAKE_GDN_SEGMENTS past the chain's fields."""
        _, segments, _, sequence_segment, _ = self.chain._tables
        self.fields |= {
            "max_segments": len(segments) // 2,
            "segments": pointer(segments),
            "sequence_segment": pointer(sequence_segment),
        }

    def of_seams(self, x: torch.Tensor) -> torch.Tensor:
        """Values of the seams that are there [seams, HV, ...] -> of the slice's heads, NaN (or 255) for the others."""
        shape = (self.chain.max_seams, *x[:, self.chain.span].shape[1:])
        buffer = Buffer(shape, x.dtype)
        buffer.view[: len(x)] = x[:, self.chain.span]
        return buffer.view

    def output_seams(self, name: str, shape, dtype, written=None, initial=None) -> torch.Tensor:
        """Of the slice's heads at the seams that are there; `written` narrows it further."""
        chain = self.chain
        there = torch.arange(chain.max_seams, device=DEVICE) < len(chain.seams)
        there = there.view(-1, *[1] * (1 + len(shape)))
        if written is not None:
            there = there & written
        heads = chain.span.stop - chain.span.start
        out = self.output(name, (chain.max_seams, heads, *shape), dtype, there, initial=initial)
        return out[: len(chain.seams)]

    def output_bound(self, wanted: bool) -> torch.Tensor | None:
        self.fields["bound"] = 0
        if not wanted:
            return None
        chain = self.chain
        there = torch.arange(chain.max_chunks, device=DEVICE) < len(chain.chunks)
        shape = (chain.span.stop - chain.span.start, chain.max_chunks)
        return self.output("bound", shape, torch.float32, there)[:, : len(chain.chunks)]

    # ---- outputs ----

    def output(self, name, shape, dtype, written=None, strides=None, initial=None) -> torch.Tensor:
        """`written`: mask of the elements that the stage writes, broadcast to the shape (default: all of them)."""
        buffer = Buffer(shape, dtype, strides)
        if initial is not None:
            buffer.view.copy_(initial)
        self.fields[name] = buffer.address
        self.outputs.append((name, buffer, written))
        return buffer.view

    def output_slice(self, name: str, columns: int, initial: torch.Tensor | None = None) -> torch.Tensor:
        """An intermediate of the slice: [B * T, heads, columns], from all heads' values when it is an input too."""
        chain, span = self.chain, self.chain.span
        shape = (chain.tokens, span.stop - span.start, width(columns))
        initial = None if initial is None else self._padded(initial[:, span])
        out = self.output(name, shape, chain.dtype, chain.live[:, None, None], initial=initial)
        return out[..., :columns]

    def output_scalars(self, name: str, initial: torch.Tensor | None = None) -> torch.Tensor:
        """Per-token fp32 of the slice's heads in [HV, B * T]."""
        chain = self.chain
        written = torch.zeros(chain.HV, chain.tokens, dtype=torch.bool, device=DEVICE)
        written[chain.span] = chain.live
        return self.output(name, (chain.HV, chain.tokens), torch.float32, written, initial=initial)

    def output_rows(self, name: str, heads: int, columns: int, strides, span: slice) -> torch.Tensor:
        """A user's [B, T, heads, columns] tensor, of which the heads of `span` are written."""
        chain = self.chain
        written = torch.zeros(chain.B, chain.T, heads, 1, dtype=torch.bool, device=DEVICE)
        written[:, :, span] = chain.split(chain.live)[..., None, None]
        out = self.output(name, (chain.B, chain.T, heads, columns), chain.dtype, written, strides)
        for dim, of in enumerate(("batch", "token", "head", "column")):
            self.fields[f"{name}_{of}"] = out.stride(dim)
        return out

    def output_state(self, name: str, wanted: bool, v_first: bool) -> torch.Tensor | None:
        """A user's fp32 state [N, HV, K, V], in memory [N, HV, V, K] when `v_first`, of which the slice is written."""
        chain, out = self.chain, None
        if wanted:
            shape = (chain.N, chain.HV, chain.K, chain.V)
            written = torch.zeros(1, chain.HV, 1, 1, dtype=torch.bool, device=DEVICE)
            written[:, chain.span] = True
            strides = padded_strides(shape, order=(0, 1, 3, 2)) if v_first else None
            out = self.output(name, shape, torch.float32, written, strides)
        else:
            self.fields[name] = 0
        self._state_layout(name, out)
        return out

    def output_states(self, name: str, span: slice) -> torch.Tensor:
        """Chunk states [slots, heads, K, V] of the heads of `span`, of which the slice's are written."""
        chain = self.chain
        heads = span.stop - span.start
        written = torch.zeros(1, heads, 1, 1, dtype=torch.bool, device=DEVICE)
        written[:, chain.span.start - span.start : chain.span.stop - span.start] = True
        return self.output(name, (chain.slots, heads, chain.K, width(chain.V)), chain.dtype, written)[..., : chain.V]

    # ---- the call ----

    def run(self) -> None:
        C = native()
        before = [buffer.bytes.clone() for _, buffer, _ in self.outputs]
        params = getattr(C, "".join(word.capitalize() for word in self.stage.split("_")) + "Params")(**self.fields)
        getattr(C, self.stage)(params, _stream())
        for name, x, copy in self.kept:
            same = torch.equal(x.view(_INTEGER[x.element_size()]), copy.view(_INTEGER[x.element_size()]))
            assert same, f"{self.stage}: the input {name} was written"
        for (name, buffer, written), old in zip(self.outputs, before):
            new = buffer.bytes.clone()
            if written is None:
                buffer.bits(new).copy_(buffer.bits(old))
            elif buffer.view.numel():
                bits = buffer.bits(new)
                bits.copy_(torch.where(written.expand(bits.shape), buffer.bits(old), bits))
            if not torch.equal(new, old):
                where = (new != old).nonzero()
                raise AssertionError(
                    f"{self.stage}: {name} {tuple(buffer.shape)}: {len(where)} bytes that are not the stage's were "
                    f"written, first at byte {int(where[0]) - GUARD}"
                )
        for name, buffer, written in self.outputs:
            self._check_padding(name, buffer, written)

    def _check_padding(self, name: str, buffer: Buffer, written: torch.Tensor | None) -> None:
        """Columns from K or V to the row's width are zero in whole rows of an intermediate."""
        if self.chain is None or name not in ("w", "u", "v_new", "dv", "dq", "dk", "dw") or len(buffer.shape) != 3:
            return
        columns = self.chain.V if name in ("u", "v_new", "dv") else self.chain.K
        tail = buffer.view[self.chain.live][..., columns:]
        assert bool((tail == 0).all()), f"{self.stage}: {name} is not zero past column {columns}"


# ---- the stages -----------------------------------------------------------------------------------------------------


def run_pack(x: torch.Tensor, normalise: bool, rstd: bool = True):
    """x [B, T, heads, columns], any strides -> (out [B * T, heads, columns], rstd [B * T, heads] or None)."""
    B, T, heads, columns = x.shape
    call = Launch("pack", device=torch.cuda.current_device() if DEVICE == "cuda" else 0)
    call.fields |= {"dtype": dtype_code(x.dtype), "normalise": int(normalise)}
    call.fields |= {"B": B, "T": T, "heads": heads, "columns": columns}
    call.input("x", x)
    for dim, of in enumerate(("batch", "token", "head", "column")):
        call.fields[f"x_{of}"] = x.stride(dim)
    out = call.output("out", (B * T, heads, width(columns)), x.dtype)
    call.fields["rstd"] = 0
    scale = call.output("rstd", (B * T, heads), torch.float32) if normalise and rstd else None
    call.run()
    assert bool((out[..., columns:] == 0).all()), "pack: columns past the tensor's are not zero"
    return out[..., :columns], scale


def run_prep(chain: Chain, g, beta, A_log=None, dt_bias=None, sigmoid=False, neg_eigval=False) -> Gates:
    """g, beta [B, T, HV] of any dtype and strides; the in-kernel gate with A_log."""
    call = Launch("prep", chain)
    call.gate_inputs(g, beta, A_log, dt_bias, sigmoid, neg_eigval)
    shape, live = (chain.HV, chain.tokens), chain.live
    gates = Gates(
        cum=call.output("cum", shape, torch.float32, live),
        reset=call.output("reset", shape, torch.uint8, live),
        step=call.output("step", shape, torch.float32, live),
    )
    call.run()
    return gates


def run_wy(chain: Chain, k, v, gates: Gates, bound=False):
    """k [B, T, H, K], v [B, T, HV, V] -> A [B * T, HV, 64], w [B * T, heads, K], u [B * T, heads, V], and when it is
    wanted the chunks' bound [heads, chunks]."""
    call = Launch("wy", chain)
    call.rows("k", k)
    call.rows("v", v)
    call.gates(gates, step=True)
    written = torch.zeros(chain.tokens, chain.HV, 1, dtype=torch.bool, device=DEVICE)
    written[:, chain.span] = chain.live[:, None, None]
    A = call.output("A", (chain.tokens, chain.HV, CHUNK), chain.dtype, written)
    w, u = call.output_slice("w", chain.K), call.output_slice("u", chain.V)
    bounds = call.output_bound(bound)
    call.run()
    return (A, w, u, bounds) if bound else (A, w, u)


def run_wy_recompute(chain: Chain, k, v, gates: Gates, A, h, initial_state=None, bound=False):
    """A [B * T, HV, 64], h [slots, HV, K, V] or None -> w [B * T, heads, K], v_new [B * T, heads, V], and when it is
    wanted the chunks' bound [heads, chunks]."""
    call = Launch("wy_recompute", chain)
    call.rows("k", k)
    call.rows("v", v)
    call.gates(gates, step=True)
    call.state("initial_state", initial_state)
    call.input("A", place(A.to(chain.dtype)))
    call.states("h", h, slice(0, chain.HV))
    w, v_new = call.output_slice("w", chain.K), call.output_slice("v_new", chain.V)
    bounds = call.output_bound(bound)
    call.run()
    return (w, v_new, bounds) if bound else (w, v_new)


def _turned(states: torch.Tensor) -> torch.Tensor:
    """[seams, HV, K, V] -> as the programs keep them, [seams, HV, V, W of K]."""
    K = states.shape[2]
    return torch.nn.functional.pad(states.mT, (0, width(K) - K))


def _states(chain: Chain, seams: torch.Tensor) -> torch.Tensor:
    """The other way round."""
    assert bool((seams[..., chain.K :] == 0).all()), "rows of a state at a seam past K are not zero"
    return seams[..., : chain.K].mT


def _prescan(call: Launch, bound: torch.Tensor):
    """CAKE_GDN_PRESCAN, and the call: bound [HV, chunks] -> states [seams, heads, K, V], transitions
    [seams, heads, 2, K, W of K] and forgotten [seams, heads]."""
    chain = call.chain
    call.segments()
    padded = Buffer((chain.span.stop - chain.span.start, chain.max_chunks), torch.float32)
    padded.view[:, : len(chain.chunks)] = bound[chain.span]
    call.input("bound", padded.view)
    states = call.output_seams("seams", (chain.V, width(chain.K)), torch.float32)
    transitions = call.output_seams("transitions", (2, chain.K, width(chain.K)), torch.bfloat16)
    forgotten = call.output_seams("forgotten", (), torch.uint8)
    call.run()
    return _states(chain, states), transitions, forgotten


def transposed(transitions: torch.Tensor, K: int) -> torch.Tensor:
    """The transitions of a pre-scan [seams, heads, 2, K, W] -> [seams, heads, K, K] in float64."""
    return transitions.double().sum(2)[..., :K].mT


def run_fwd_prescan(chain: Chain, k, gates: Gates, w, u, bound):
    """w [B * T, HV, K], u [B * T, HV, V], bound [HV, chunks] -> as _prescan says."""
    call = Launch("fwd_prescan", chain)
    call.rows("k", k)
    call.gates(gates)
    call.slice("w", w)
    call.slice("u", u)
    return _prescan(call, bound)


def run_adjoint_prescan(chain: Chain, q, k, d_o, gates: Gates, w, dv, bound, scale):
    """w [B * T, HV, K], dv (dv_local) [B * T, HV, V], bound [HV, chunks] -> as _prescan says."""
    call = Launch("adjoint_prescan", chain, scale=scale)
    call.rows("q", q)
    call.rows("k", k)
    call.rows("d_o", d_o)
    call.gates(gates)
    call.slice("w", w)
    call.slice("dv", dv)
    return _prescan(call, bound)


def run_stitch(chain: Chain, states, transitions, forgotten, start, backward: bool):
    """States [seams, HV, K, V], transitions [seams, HV, 2, K, W of K], forgotten [seams, HV], start [N, HV, K, V] ->
    the states at the seams [seams, heads, K, V]."""
    call = Launch("stitch", chain, backward=int(backward))
    call.segments()
    call.state("start", start)
    call.input("transitions", call.of_seams(transitions))
    call.input("forgotten", call.of_seams(forgotten))
    written, initial = call.of_seams(forgotten)[..., None, None] == 0, call.of_seams(_turned(states))
    out = call.output_seams("seams", (chain.V, width(chain.K)), torch.float32, written, initial)
    call.run()
    return _states(chain, out)


def run_fwd_scan(
    chain: Chain, k, gates: Gates, w, u, initial_state=None, final_state=True, saved=False, v_first=False, seams=None
):
    """w [B * T, HV, K], u [B * T, HV, V] -> v_new [B * T, heads, V], h [slots, heads, K, V] (`saved`: all HV heads'
    tensor, of which the slice is written), final_state [N, HV, K, V] or None. `seams`: the states at the seams
    [seams, HV, K, V], where there are any."""
    call = Launch("fwd_scan", chain)
    call.segments()
    call.input("seams", None if seams is None else call.of_seams(_turned(seams)))
    call.rows("k", k)
    call.gates(gates)
    call.state("initial_state", initial_state)
    final = call.output_state("final_state", final_state, v_first)
    call.slice("w", w)
    v_new = call.output_slice("u", chain.V, initial=u)
    span = slice(0, chain.HV) if saved else chain.span
    h = call.output_states("h", span)
    call.fields |= {"h_heads": span.stop - span.start, "h_begin": span.start}
    call.run()
    return v_new, h, final


def _h(call: Launch, h: torch.Tensor, saved: bool) -> None:
    span = slice(0, call.chain.HV) if saved else call.chain.stored_span
    call.states("h", h, span)
    call.fields |= {"h_heads": span.stop - span.start, "h_begin": span.start}


def run_output(chain: Chain, q, k, gates: Gates, v_new, h, scale, initial_state=None, saved=False, strides=None):
    """v_new [B * T, HV, V], h [slots, HV, K, V] -> o [B, T, HV, V] with these strides."""
    call = Launch("output", chain, scale=scale)
    call.rows("q", q)
    call.rows("k", k)
    call.gates(gates)
    call.state("initial_state", initial_state)
    call.slice("v_new", v_new)
    _h(call, h, saved)
    o = call.output_rows("o", chain.HV, chain.V, strides, chain.span)
    call.run()
    return o


def run_dv_local(chain: Chain, q, k, d_o, gates: Gates, scale):
    """d_o [B, T, HV, V] -> dv [B * T, heads, V]."""
    call = Launch("dv_local", chain, scale=scale)
    call.rows("q", q)
    call.rows("k", k)
    call.rows("d_o", d_o)
    call.gates(gates)
    dv = call.output_slice("dv", chain.V)
    call.run()
    return dv


def run_adjoint_scan(
    chain: Chain, q, k, d_o, gates: Gates, w, dv, scale, dht=None, dh0=True, v_first=False, seams=None
):
    """dv (dv_local) [B * T, HV, V] -> du [B * T, heads, V], dh [slots, heads, K, V], dh0 [N, HV, K, V] or None.
    `seams`: the gradients at the seams [seams, HV, K, V], where there are any."""
    call = Launch("adjoint_scan", chain, scale=scale)
    call.segments()
    call.input("seams", None if seams is None else call.of_seams(_turned(seams)))
    call.rows("q", q)
    call.rows("k", k)
    call.rows("d_o", d_o)
    call.gates(gates)
    call.state("dht", dht)
    first = call.output_state("dh0", dh0, v_first)
    call.slice("w", w)
    du = call.output_slice("dv", chain.V, initial=dv)
    dh = call.output_states("dh", chain.span)
    call.run()
    return du, dh, first


def run_dqkwg(
    chain: Chain, q, k, d_o, gates: Gates, v_new, du, h, dh, scale, initial_state=None, dht=None, saved=False
):
    """v_new, du [B * T, HV, V], h, dh [slots, HV, K, V] -> dq, dk, dw [B * T, heads, K], dcum [HV, B * T]."""
    call = Launch("dqkwg", chain, scale=scale)
    call.rows("q", q)
    call.rows("k", k)
    call.rows("d_o", d_o)
    call.gates(gates)
    call.state("initial_state", initial_state)
    call.state("dht", dht)
    call.slice("v_new", v_new, stored=True)
    call.slice("du", du, stored=True)
    _h(call, h, saved)
    call.states("dh", dh, chain.stored_span)
    dq, dk, dw = (call.output_slice(name, chain.K) for name in ("dq", "dk", "dw"))
    dcum = call.output_scalars("dcum")
    call.run()
    return dq, dk, dw, dcum


def run_wy_backward(chain: Chain, k, v, gates: Gates, A, v_new, dw, du, dk, dcum, strides=None, dv=True):
    """dk, dcum: dqkwg's shares -> dk [B * T, heads, K], dv [B, T, HV, V] or None, dstep, dcum [HV, B * T]."""
    call = Launch("wy_backward", chain)
    call.rows("k", k)
    call.rows("v", v)
    call.gates(gates, step=True)
    call.input("A", place(A.to(chain.dtype)))
    call.slice("v_new", v_new, stored=True)
    call.slice("dw", dw)
    call.slice("du", du, stored=True)
    dk = call.output_slice("dk", chain.K, initial=dk)
    out = None
    if dv:
        out = call.output_rows("dv", chain.HV, chain.V, strides, chain.span)
    else:
        call.fields |= dict.fromkeys(("dv", "dv_batch", "dv_token", "dv_head", "dv_column"), 0)
    dstep = call.output_scalars("dstep")
    dcum = call.output_scalars("dcum", initial=dcum)
    call.run()
    return dk, out, dstep, dcum


def run_finalize(B, T, parts, group, x=None, rstd=None, heads=None, strides=None):
    """parts [B * T, H * group, K]; x [B * T, H, K] (normalised) and rstd [B * T, H] or None -> dx [B, T, H, K] with
    these strides. `heads`: (first, count), the slice of the key heads that is written."""
    H, K = parts.shape[1] // group, parts.shape[2]
    first, count = (0, H) if heads is None else heads
    call = Launch("finalize", device=torch.cuda.current_device() if DEVICE == "cuda" else 0)
    call.fields |= {"dtype": dtype_code(parts.dtype), "B": B, "T": T, "H": count, "group": group, "K": K, "x_heads": H}
    pad = (0, width(K) - K)
    mine = parts[:, first * group : (first + count) * group]
    call.input("parts", place(torch.nn.functional.pad(mine, pad)))
    whole = None if x is None else place(torch.nn.functional.pad(x, pad))
    call.input("x", None if x is None else whole[:, first:])
    call.input("rstd", None if x is None else place(rstd)[:, first:])
    written = torch.zeros(H, 1, dtype=torch.bool, device=DEVICE)
    written[first : first + count] = True
    dx = call.output("dx", (B, T, H, K), parts.dtype, written, strides)
    for dim, of in enumerate(("batch", "token", "head", "column")):
        call.fields[f"dx_{of}"] = dx.stride(dim)
    call.fields["dx"] = dx[:, :, first:].data_ptr()
    call.run()
    return dx


def run_tail(
    chain: Chain,
    rows,
    gates: Gates,
    A,
    v_new,
    du,
    h,
    dh,
    scale,
    initial_state=None,
    dht=None,
    rstd=(None, None),
    saved=False,
    strides=(None, None, None),
    wanted=("dq", "dk", "dv"),
):
    """rows q, k, v, d_o; A [B * T, HV, 64], v_new, du [B * T, HV, V], h, dh [slots, HV, K, V], rstd of q and k [B * T,
    H] when these are normalised -> dq, dk [B, T, H, K], dv [B, T, HV, V] with these strides, None for what is not
    wanted, and dstep, dcum [HV, B * T]."""
    call = Launch("tail", chain, scale=scale)
    for name, x in zip(("q", "k", "v", "d_o"), rows):
        call.rows(name, x)
    call.gates(gates, step=True)
    call.state("initial_state", initial_state)
    call.state("dht", dht)
    call.input("A", place(A.to(chain.dtype)))
    call.slice("v_new", v_new, stored=True)
    call.slice("du", du, stored=True)
    _h(call, h, saved)
    call.states("dh", dh, chain.stored_span)
    for name, x in zip(("q_rstd", "k_rstd"), rstd):
        call.input(name, None if x is None else place(x))
    group, span = chain.HV // chain.H, chain.span
    keys = slice(span.start // group, span.stop // group)
    out = {}
    layouts = (("dq", chain.H, chain.K, keys), ("dk", chain.H, chain.K, keys), ("dv", chain.HV, chain.V, span))
    for (name, heads, columns, mine), layout in zip(layouts, strides):
        call.fields |= dict.fromkeys((name, *(f"{name}_{of}" for of in ("batch", "token", "head", "column"))), 0)
        out[name] = call.output_rows(name, heads, columns, layout, mine) if name in wanted else None
    dstep, dcum = call.output_scalars("dstep"), call.output_scalars("dcum")
    call.run()
    return out["dq"], out["dk"], out["dv"], dstep, dcum


def run_gate_backward(
    chain: Chain,
    g,
    beta,
    gates: Gates,
    dcum,
    dstep,
    A_log=None,
    dt_bias=None,
    sigmoid=False,
    neg_eigval=False,
    wanted=("dg", "dbeta", "partials"),
    dtypes=(torch.float32, torch.float32),
    strides=(None, None),
):
    """dcum, dstep [HV, B * T] -> dg, dbeta [B, T, HV] of these dtypes and strides, partials [max_chunks, HV, 2]; None
    for what is not wanted."""
    call = Launch("gate_backward", chain)
    call.gate_inputs(g, beta, A_log, dt_bias, sigmoid, neg_eigval)
    call.gates(gates)
    call.input("dcum", place(dcum))
    call.input("dstep", place(dstep))
    live = chain.split(chain.live)[..., None]
    out = {}
    for name, dtype, layout in zip(("dg", "dbeta"), dtypes, strides):
        call.fields[name], shape = 0, (chain.B, chain.T, chain.HV)
        out[name] = call.output(name, shape, dtype, live, layout) if name in wanted else None
        call._scalar_layout(name, out[name])
    call.fields["partials"], partials = 0, None
    if "partials" in wanted and A_log is not None:
        filled = torch.arange(chain.max_chunks, device=DEVICE) < len(chain.chunks)
        partials = call.output("partials", (chain.max_chunks, chain.HV, 2), torch.float32, filled[:, None, None])
    call.run()
    return out["dg"], out["dbeta"], partials


def run_gate_reduce(chain: Chain, partials, dtypes=(torch.float32, torch.float32), strides=(1, 1)):
    """partials [max_chunks, HV, 2] -> dA_log, ddt_bias [HV] of these dtypes and strides; None for a dtype of None."""
    call = Launch("gate_reduce", chain)
    call.input("partials", partials)
    out = []
    for name, dtype, stride in zip(("dA_log", "ddt_bias"), dtypes, strides):
        call.fields[name] = 0
        x = None if dtype is None else call.output(name, (chain.HV,), dtype, strides=(stride,))
        call._parameter_layout(name, x)
        out.append(x)
    call.run()
    return tuple(out)
