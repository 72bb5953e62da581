"""The table stage (csrc/cuda/fwd/tables.cu) against its numpy twin; the twin itself is checked without a GPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tables_twin as twins
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

GUARD = 32  # int64 words of red zone on each side of an output
GUARD_WORD = 0x5A5A5A5A5A5A5A5A
POISON = -0x0123456789ABCDEF
FIELDS = ("offsets", "sequence_chunk", "sequence_segment", "chunks", "segments")


# ---- the twin, on any machine ----


@settings(max_examples=200, deadline=None)
@given(data=st.data(), tokens=st.integers(0, 400), segment_chunks=st.integers(1, 5))
def test_twin_equals_the_naive_loop(data, tokens, segment_chunks):
    offsets = data.draw(st.lists(st.integers(-20, tokens + 20), min_size=1, max_size=12))
    if data.draw(st.booleans()):  # a right layout
        offsets = sorted(min(max(x, 0), tokens) for x in offsets)
    got = twins.twin(np.array(offsets), 1, tokens, segment_chunks)
    want = twins.naive(offsets, 1, tokens, segment_chunks)
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field), err_msg=field)


@pytest.mark.parametrize(("batch", "length"), [(0, 0), (0, 5), (3, 0), (1, 1), (4, 64), (3, 65), (2, 200)])
@pytest.mark.parametrize("segment_chunks", [1, 2, 7])
def test_dense_twin_equals_the_naive_loop(batch, length, segment_chunks):
    got = twins.twin(None, batch, length, segment_chunks)
    want = twins.naive(None, batch, length, segment_chunks)
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field), err_msg=field)


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=20), segment_chunks=st.integers(1, 4))
def test_capacities_suffice_and_are_reached(lengths, segment_chunks):
    tokens, n = sum(lengths), len(lengths)
    chunks = [-(-x // 64) for x in lengths]
    assert sum(chunks) <= twins.max_chunks(tokens, n)
    assert sum(max(1, -(-c // segment_chunks)) for c in chunks) <= twins.max_segments(tokens, n, segment_chunks)
    # One token each, and the rest in one sequence: no bound from shapes alone can be smaller.
    filled = min(n, tokens)
    packed = [1] * (filled - 1) + [tokens - filled + 1] if filled else []
    assert sum(-(-x // 64) for x in packed) == twins.max_chunks(tokens, n)
    if tokens:
        chunks = -(-tokens // 64)
        assert -(-chunks // segment_chunks) + n - 1 == twins.max_segments(tokens, n, segment_chunks)


# ---- the kernels ----


@pytest.fixture(scope="module")
def native():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from cake_gdn_det import _C

    assert hasattr(_C, "tables"), "this machine has a GPU, but the package was built with CAKE_GDN_CUDA=OFF"
    return _C


class Run:
    """Buffers of one call, all in one poisoned allocation with red zones between them, and its parameters."""

    def __init__(self, native, cu_seqlens, batch, length, segment_chunks, slack=0):
        self.native = native
        self.cu_seqlens = cu_seqlens
        n = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        tokens = batch * length
        self.max_chunks = twins.max_chunks(tokens, n) + slack
        self.max_segments = twins.max_segments(tokens, n, segment_chunks) + slack
        words = dict.fromkeys(FIELDS[:3], n + 1) | {"chunks": 2 * self.max_chunks, "segments": 2 * self.max_segments}
        self.arena = torch.empty(
            sum(words.values()) + GUARD * (len(words) + 1) + len(words), dtype=torch.int64, device="cuda"
        )
        self.views, self.guards, at = {}, [], 0
        for field, count in words.items():
            self.guards.append(self.arena[at : at + GUARD])
            self.views[field] = self.arena[at + GUARD : at + GUARD + count]
            at += GUARD + count + count % 2  # entries are aligned to 16 bytes
        self.guards.append(self.arena[at:])
        self.poison()
        pointers = {f: v.data_ptr() if v.numel() else 0 for f, v in self.views.items()}
        self.params = native.TablesParams(
            cu_seqlens=0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            cu_seqlens_dtype=native.INT32
            if cu_seqlens is not None and cu_seqlens.dtype == torch.int32
            else native.INT64,
            device=torch.cuda.current_device(),
            B=batch,
            T=length,
            N=n,
            segment_chunks=segment_chunks,
            max_chunks=self.max_chunks,
            max_segments=self.max_segments,
            **pointers,
        )

    def poison(self):
        self.arena.fill_(POISON)
        for guard in self.guards:
            guard.fill_(GUARD_WORD)

    def launch(self):
        self.native.tables(self.params, torch.cuda.current_stream().cuda_stream)

    def result(self):
        host = {field: view.cpu().numpy() for field, view in self.views.items()}
        for i, guard in enumerate(self.guards):
            assert bool((guard == GUARD_WORD).all()), f"red zone {i} was written"
        host["chunks"] = host["chunks"].view(twins.CHUNK_ENTRY)
        host["segments"] = host["segments"].view(twins.SEGMENT_ENTRY)
        return twins.Tables(**host)


def assert_tables(got: twins.Tables, want: twins.Tables):
    for field in FIELDS:
        a, b = getattr(got, field), getattr(want, field)
        np.testing.assert_array_equal(a[: len(b)], b, err_msg=field)
        rest = a[len(b) :]
        if field == "chunks":
            assert (rest == np.array((0, -1, 0), twins.CHUNK_ENTRY)).all(), "chunks past the end are not marked"
        elif field == "segments":
            assert (rest == np.array((0, -1, 0), twins.SEGMENT_ENTRY)).all(), "segments past the end are not marked"
        else:
            assert len(rest) == 0


def check(native, offsets, batch, length, segment_chunks, dtype=torch.int64, slack=0):
    device = None if offsets is None else torch.as_tensor(np.array(offsets, np.int64)).to(dtype).cuda()
    run = Run(native, device, batch, length, segment_chunks, slack)
    run.launch()
    want = twins.twin(None if device is None else device.cpu().numpy(), batch, length, segment_chunks)
    assert_tables(run.result(), want)


def starts(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))])


def random_lengths(rng, n, longest):
    lengths = rng.integers(0, longest + 1, n)
    lengths[rng.random(n) < 0.3] = 0
    near = rng.random(n) < 0.3
    lengths[near] = 64 * rng.integers(0, 4, near.sum()) + rng.integers(-1, 2, near.sum()).clip(min=0)
    return lengths


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(20))
def test_random_layouts(native, seed, dtype):
    rng = np.random.default_rng(seed)
    lengths = random_lengths(rng, int(rng.integers(1, 3000)), int(rng.integers(1, 700)))
    cu = starts(lengths)
    check(native, cu, 1, int(cu[-1]), int(rng.integers(1, 40)), dtype, slack=int(rng.integers(0, 3)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths",
    [[], [0], [1], [63], [64], [65], [0, 0, 0], [0, 5, 0], [5] + [0] * 40, [0] * 40 + [5], [128, 64, 1] + [0] * 5],
    ids=str,
)
@pytest.mark.parametrize("segment_chunks", [1, 2, 1 << 30])
def test_small_layouts(native, lengths, segment_chunks):
    cu = starts(lengths)
    for dtype in (torch.int32, torch.int64):
        check(native, cu, 1, int(cu[-1]), segment_chunks, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 7, 8, 9, 8191, 8192, 8193, 16384, 70_000])
def test_many_sequences(native, n):
    rng = np.random.default_rng(n)
    cu = starts(rng.integers(0, 4, n))
    check(native, cu, 1, int(cu[-1]), 3)
    check(native, np.arange(n + 1) * 65, 1, n * 65, 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "length"), [(0, 0), (0, 9), (5, 0), (1, 1), (1, 8192), (7, 65), (1024, 129), (70_000, 3)]
)
@pytest.mark.parametrize("segment_chunks", [1, 4, 64])
def test_dense(native, batch, length, segment_chunks):
    check(native, None, batch, length, segment_chunks)


@pytest.mark.gpu
def test_tokens_beyond_32_bits(native):
    total = 2**31 + 77
    check(native, None, 1, total, 1000)
    check(native, [0, 5, 2**31 + 3, 2**31 + 3, total], 1, total, 4096)
    # 32-bit offsets cannot name the end: the tail belongs to no sequence.
    check(native, [0, 2**31 - 1], 1, total, 4096, torch.int32)
    check(native, None, 3, 2**30, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(20))
def test_wrong_offsets_stay_inside(native, seed, dtype):
    """Decreasing, negative, too large, not from 0, not up to T: the twin's clamping, and no byte outside."""
    rng = np.random.default_rng(1000 + seed)
    n, length = int(rng.integers(1, 12_000)), int(rng.integers(0, 5000))
    info = np.iinfo(np.int32 if dtype == torch.int32 else np.int64)
    kinds = [
        rng.integers(info.min, info.max, n + 1, endpoint=True),
        rng.integers(-length - 5, 2 * length + 5, n + 1),
        np.sort(rng.integers(0, length + 1, n + 1))[::-1].copy(),
        rng.choice([info.min, info.max, 0, length, length + 1, -1], n + 1),
        np.sort(rng.integers(0, length + 1, n + 1)),
    ]
    for cu in kinds:
        check(native, cu, 1, length, int(rng.integers(1, 9)), dtype)


@pytest.mark.gpu
def test_same_bits_every_time(native):
    rng = np.random.default_rng(5)
    cu = starts(random_lengths(rng, 20_000, 300))
    run = Run(native, torch.as_tensor(cu).cuda(), 1, int(cu[-1]), 5)
    run.launch()
    first = run.arena.clone()
    for _ in range(10):
        run.poison()
        run.launch()
        assert torch.equal(run.arena, first)


@pytest.mark.gpu
def test_two_streams_and_threads(native):
    """Two threads, each with its own stream and layout, at once; nothing is shared between the calls."""
    failures = []

    def work(seed):
        try:
            rng = np.random.default_rng(seed)
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(30):
                    cu = starts(random_lengths(rng, int(rng.integers(1, 9000)), 200))
                    check(native, cu, 1, int(cu[-1]), int(rng.integers(1, 9)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.gpu
def test_graph_replay_with_new_offsets(native):
    """The graph holds shapes only: new offsets in the same tensor, wrong ones too, give the eager call's bits."""
    rng = np.random.default_rng(9)
    n, length = 300, 30_000
    cu = torch.zeros(n + 1, dtype=torch.int64, device="cuda")
    run = Run(native, cu, 1, length, 3)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run.launch()
    layouts = [np.sort(rng.integers(0, length + 1, n + 1)) for _ in range(5)]
    layouts.append(rng.integers(-length, 2 * length, n + 1))
    layouts.append(np.minimum(starts(np.full(n, 500)), length))  # padded with repeated T
    for layout in layouts:
        cu.copy_(torch.as_tensor(layout))
        run.poison()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert_tables(run.result(), twins.twin(layout, 1, length, 3))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_chunks", 9, "max_chunks: got 9, needs 10"),
        ("max_segments", 5, "max_segments: got 5, needs 6"),
        ("segment_chunks", 0, "segment_chunks"),
        ("cu_seqlens_dtype", 2, "cu_seqlens_dtype"),
        ("N", -1, "negative"),
        ("T", -1, "negative"),
        ("N", 2**31, "N: got"),
        ("B", 2, "B: got 2, must be 1"),
        ("offsets", 0, "null"),
        ("chunks", 0, "null"),
        ("segments", 8, "aligned to 16 bytes"),
        ("device", 4096, "device: got 4096"),
        ("device", -1, "device: got -1"),
    ],
)
def test_bad_params(native, field, value, message):
    cu = torch.tensor([0, 100, 512], dtype=torch.int64, device="cuda")
    run = Run(native, cu, 1, 512, 2)
    assert (run.max_chunks, run.max_segments) == (9, 5)
    if field == "max_chunks":
        run.params.T, value, message = 576, 9, "max_chunks: got 9, needs 10"
    elif field == "max_segments":
        run.params.T, run.params.max_chunks, value, message = 900, 1000, 5, "max_segments: got 5, needs 9"
    setattr(run.params, field, value)
    before = run.arena.clone()
    with pytest.raises(ValueError, match=message):
        run.launch()
    torch.cuda.synchronize()
    assert torch.equal(run.arena, before)


@pytest.mark.gpu
def test_current_device_is_kept(native):
    """On a machine of several devices also: a call for device 1 leaves device 0 current."""
    for device in range(torch.cuda.device_count()):
        with torch.cuda.device(device):
            run = Run(native, torch.tensor([0, 70], device="cuda"), 1, 70, 1)
            stream = torch.cuda.current_stream().cuda_stream
        current = torch.cuda.current_device()
        native.tables(run.params, stream)
        assert torch.cuda.current_device() == current
        torch.cuda.synchronize(device)
        assert_tables(run.result(), twins.twin(np.array([0, 70]), 1, 70, 1))
