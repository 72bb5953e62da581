"""What is measured: shapes, the sets that a user selects them by, and random inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_SIZE, CHUNK = 128, 64
NAMES = ("q", "k", "v", "g", "beta")
GATES = ("fast", "slow")

SETS = {
    "qwen3-next": ((16, 32),),
    "qwen3.5": ((16, 48), (16, 64), (8, 32), (2, 8)),
    "symmetric": ((32, 32),),
    "packed": ((16, 32),),
}
LENGTHS = ((1, 2048), (1, 8192), (8, 4096), (1, 32768), (1, 65536), (1, 131072))
PACKED_LENGTHS = ((1, 32768), (1, 65536))
# Shares of a batch of uneven documents, the longest 26 times the shortest, and the lengths of short ones.
UNEVEN = (0.05, 0.31, 0.012, 0.14, 0.08, 0.2, 0.03, 0.11, 0.068)
SHORT = (17, 130, 64, 251, 96, 33, 180, 65)


@dataclass(frozen=True)
class Shape:
    """B sequences of T tokens, or, with `documents`, one row of packed sequences of these lengths; K = V = 128."""

    B: int
    T: int
    H: int
    HV: int
    documents: tuple[int, ...] = ()
    kind: str = ""  # how the documents were cut: "uneven" or "short"

    @property
    def rows(self) -> int:
        return self.B * self.T

    @property
    def sequences(self) -> tuple[int, ...]:
        return self.documents or (self.T,) * self.B

    @property
    def chunks(self) -> int:
        return sum(-(-n // CHUNK) for n in self.sequences)

    @property
    def later_chunks(self) -> int:
        """Chunks that start from the state of another one."""
        return sum((n - 1) // CHUNK for n in self.sequences if n)

    @property
    def heads(self) -> str:
        return f"{self.H}/{self.HV}"

    @property
    def size(self) -> str:
        return f"{self.T} in {len(self.documents)} documents" if self.documents else f"{self.B} x {self.T}"

    def __str__(self) -> str:
        return f"{self.size}, {self.heads}"

    def shortened(self, tokens: int) -> Shape:
        """One row of the same kind with at most that many tokens."""
        T = min(self.T, tokens)
        documents = pack(self.kind, T) if self.documents else ()
        return replace(self, B=1, T=T, documents=documents)


def pack(kind: str, tokens: int) -> tuple[int, ...]:
    """Lengths of documents that fill a row of `tokens`; none is empty, and few are multiples of a chunk."""
    if kind == "uneven":
        lengths = [max(1, int(share * tokens)) for share in UNEVEN]
        lengths[1] += tokens - sum(lengths)
        return tuple(lengths) if min(lengths) > 0 else (tokens,)
    lengths, sizes = [], cycle(SHORT)
    while tokens:
        lengths.append(min(next(sizes), tokens))
        tokens -= lengths[-1]
    return tuple(lengths)


def select(
    sets: Iterable[str], heads: Iterable[tuple[int, int]] = (), lengths: Iterable[tuple[int, int]] = ()
) -> list[Shape]:
    """The shapes of the sets, or those of other head counts and (B, T): one head configuration after the other, the
    longest first, so that rules which tune themselves on what they see first tune for much work."""
    found: dict[Shape, None] = {}
    for name in sets:
        packed = name == "packed"
        for H, HV in heads or SETS[name]:
            for B, T in sorted(lengths or (PACKED_LENGTHS if packed else LENGTHS), key=lambda x: -x[0] * x[1]):
                if packed:
                    for kind in ("uneven", "short"):
                        found[Shape(1, B * T, H, HV, pack(kind, B * T), kind)] = None
                else:
                    found[Shape(B, T, H, HV)] = None
    order = {pair: i for i, pair in enumerate(dict.fromkeys((s.H, s.HV) for s in found))}
    return sorted(found, key=lambda s: (order[s.H, s.HV], bool(s.documents), -s.rows))


@dataclass
class Inputs:
    """q, k, v, g, beta as leaves that require a gradient, the gradient of o, and the offsets of packed sequences."""

    shape: Shape
    leaves: list[Tensor]
    do: Tensor
    cu_seqlens: Tensor | None  # int64
    cu_seqlens_32: Tensor | None


def make_inputs(shape: Shape, gates: str, device: torch.device) -> Inputs:
    """bf16 q, k, v, beta and do, fp32 g, the same at every call.

    Fast gates, logsigmoid(randn + 2), forget within tens of tokens. Slow ones, logsigmoid(randn) / 16, remember for
    hundreds, and a quarter of the heads never forgets.
    """
    B, T, H, HV = shape.B, shape.T, shape.H, shape.HV
    rng = torch.Generator(device).manual_seed(0)

    def randn(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*size, generator=rng, device=device, dtype=dtype)

    logits = randn(B, T, HV, dtype=torch.float32)
    if gates == "fast":
        g = F.logsigmoid(logits + 2)
    else:
        g = F.logsigmoid(logits) / 16
        g[..., : HV // 4] = 0
    q, k, v, do = (randn(B, T, heads, HEAD_SIZE) for heads in (H, H, HV, HV))
    beta = torch.rand(B, T, HV, generator=rng, device=device).bfloat16()
    offsets = None
    if shape.documents:
        offsets = torch.tensor((0, *shape.documents)).cumsum(0).to(device)
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    return Inputs(shape, leaves, do, offsets, None if offsets is None else offsets.int())


def input_bytes(shape: Shape) -> int:
    """Of q, k, v, do, g and beta."""
    return shape.rows * (4 * HEAD_SIZE * (shape.H + shape.HV) + 6 * shape.HV)
