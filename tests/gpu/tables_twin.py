"""The table stage in numpy, and once more as a loop that follows the words of csrc/cuda/stages.h."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CHUNK = 64
CHUNK_ENTRY = np.dtype([("token", "<i8"), ("sequence", "<i4"), ("length", "<i4")])
SEGMENT_ENTRY = np.dtype([("chunk", "<i8"), ("sequence", "<i4"), ("chunks", "<i4")])


@dataclass
class Tables:
    """Outputs of the stage: the starts of every sequence, then the two tables up to their capacity."""

    offsets: np.ndarray
    sequence_chunk: np.ndarray
    sequence_segment: np.ndarray
    chunks: np.ndarray
    segments: np.ndarray


def max_chunks(tokens: int, n: int) -> int:
    filled = min(n, tokens)
    return filled + (tokens - filled) // CHUNK


def max_segments(tokens: int, n: int, segment_chunks: int) -> int:
    return n + (max(tokens - 1, 0) // CHUNK // segment_chunks)


def sanitised(cu_seqlens: np.ndarray | None, batch: int, length: int) -> np.ndarray:
    """Offsets that the stage works with: [N + 1] int64."""
    if cu_seqlens is None:
        return np.arange(batch + 1, dtype=np.int64) * length
    return np.maximum.accumulate(np.clip(cu_seqlens.astype(np.int64), 0, batch * length))


def twin(cu_seqlens: np.ndarray | None, batch: int, length: int, segment_chunks: int) -> Tables:
    """Vectorised. `cu_seqlens` [N + 1] of any integers, or None: `batch` rows of `length` tokens."""
    offsets = sanitised(cu_seqlens, batch, length)
    n = len(offsets) - 1
    lengths = np.diff(offsets)
    chunks = (lengths + CHUNK - 1) // CHUNK
    segments = np.maximum(1, -(-chunks // segment_chunks))
    sequence_chunk = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int64)
    sequence_segment = np.concatenate([[0], np.cumsum(segments)]).astype(np.int64)

    tokens = batch * length
    chunk_table = np.zeros(max_chunks(tokens, n), CHUNK_ENTRY)
    chunk_table["sequence"] = -1
    owner = np.repeat(np.arange(n), chunks)
    filled = chunk_table[: len(owner)]
    filled["sequence"] = owner
    filled["token"] = offsets[owner] + (np.arange(len(owner)) - sequence_chunk[owner]) * CHUNK
    filled["length"] = np.minimum(CHUNK, offsets[owner + 1] - filled["token"])

    segment_table = np.zeros(max_segments(tokens, n, segment_chunks), SEGMENT_ENTRY)
    segment_table["sequence"] = -1
    owner = np.repeat(np.arange(n), segments)
    filled = segment_table[: len(owner)]
    filled["sequence"] = owner
    filled["chunk"] = sequence_chunk[owner] + (np.arange(len(owner)) - sequence_segment[owner]) * segment_chunks
    filled["chunks"] = np.minimum(segment_chunks, sequence_chunk[owner + 1] - filled["chunk"])
    return Tables(offsets, sequence_chunk, sequence_segment, chunk_table, segment_table)


def naive(cu_seqlens: list[int] | None, batch: int, length: int, segment_chunks: int) -> Tables:
    """The same, one token tile after another."""
    tokens = batch * length
    raw = [b * length for b in range(batch + 1)] if cu_seqlens is None else cu_seqlens
    bounds: list[int] = []
    for value in raw:
        value = min(max(value, 0), tokens)
        bounds.append(max(value, bounds[-1]) if bounds else value)
    chunks, segments, sequence_chunk, sequence_segment = [], [], [0], [0]
    for n in range(len(bounds) - 1):
        first = len(chunks)
        for token in range(bounds[n], bounds[n + 1], CHUNK):
            chunks.append((token, n, min(CHUNK, bounds[n + 1] - token)))
        count = len(chunks) - first
        if count == 0:
            segments.append((first, n, 0))
        for start in range(0, count, segment_chunks):
            segments.append((first + start, n, min(segment_chunks, count - start)))
        sequence_chunk.append(len(chunks))
        sequence_segment.append(len(segments))
    chunks += [(0, -1, 0)] * (max_chunks(tokens, len(bounds) - 1) - len(chunks))
    segments += [(0, -1, 0)] * (max_segments(tokens, len(bounds) - 1, segment_chunks) - len(segments))
    return Tables(
        np.array(bounds, np.int64),
        np.array(sequence_chunk, np.int64),
        np.array(sequence_segment, np.int64),
        np.array(chunks, CHUNK_ENTRY),
        np.array(segments, SEGMENT_ENTRY),
    )
