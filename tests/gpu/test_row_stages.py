"""pack and finalize alone: any layout, exact copies, normalisation and its pullback, sums over value heads in order."""

from __future__ import annotations

import math

import harness
import pytest
import torch
from harness import Buffer, padded_strides, place, run_finalize, run_pack, width
from reference import stages
from reference.cases import assert_same_bits

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
# [B, T, heads, columns]: rows of 1 to 16 pieces, heads that do not divide a block's rows, batches within a block.
SHAPES = [
    (1, 300, 3, 128),
    (2, 130, 4, 64),
    (70, 1, 1, 128),
    (9, 5, 7, 100),
    (1, 90, 5, 60),
    (3, 33, 2, 36),
    (1, 2000, 1, 8),
    (2, 3, 300, 16),
    (1, 77, 2, 7),
    (4, 10, 1, 1),
]


def cpu_rng(*key) -> torch.Generator:
    return torch.Generator().manual_seed(hash(key) % 2**31)


def layouts(x: torch.Tensor):
    """x [B, T, heads, columns] on the device, in every kind of layout."""
    yield "contiguous", place(x)
    yield "16-byte gaps", place(x, padded_strides(x.shape, 8))
    yield "8-byte gaps", place(x, padded_strides(x.shape, 4))
    yield "odd gaps", place(x, padded_strides(x.shape, 3))
    yield "heads first", place(x, padded_strides(x.shape, 8, (0, 2, 1, 3)))
    yield "columns outermost", place(x, padded_strides(x.shape, 0, (3, 0, 1, 2)))
    wide = place(torch.nn.functional.pad(x, (1, 0), value=math.nan))
    yield "unaligned start", wide[..., 1:]
    every_other = Buffer((*x.shape, 2), x.dtype).view[..., 0]
    every_other.copy_(x)
    yield "every other column", every_other


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_copies_exactly(shape, dtype):
    x = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=cpu_rng(shape)).view(dtype)
    want = x.flatten(0, 1)
    for layout, view in layouts(x):
        out, rstd = run_pack(view, False)
        assert rstd is None
        assert_same_bits({layout: out.cpu()}, {layout: want})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_normalises(shape, dtype):
    rng = cpu_rng(shape)
    x = torch.randn(shape, generator=rng, dtype=torch.float64)
    # Rows of all sizes: zero, so small that 1e-6 decides, and large.
    size = torch.tensor([0.0, 1e-3, 1e-2, 1.0, 50.0], dtype=torch.float64)
    x = (x * size[torch.randint(0, 5, shape[:3], generator=rng)][..., None]).to(dtype)
    exact = stages.l2norm_rstd(x.double()).flatten(0, 1)
    first = None
    for layout, view in layouts(x):
        out, rstd = (y.cpu() for y in run_pack(view, True))
        assert ((rstd.double() - exact).abs() <= 1e-6 * exact).all(), layout
        # One rounding of the fp32 product.
        assert_same_bits({layout: out}, {layout: (x.flatten(0, 1).float() * rstd[..., None]).to(dtype)})
        first = rstd if first is None else first
        assert_same_bits({layout: rstd}, {layout: first})
    out, rstd = run_pack(place(x), True, rstd=False)
    assert rstd is None and out.isfinite().all()


def test_pack_repeats_rows_of_stride_zero():
    x = torch.randn(1, 1, 3, 64, generator=cpu_rng(1)).to(torch.bfloat16)
    out, _ = run_pack(place(x).expand(4, 50, 3, 64), False)
    assert_same_bits({"out": out.cpu()}, {"out": x.expand(4, 50, 3, 64).flatten(0, 1)})


def test_pack_keeps_faults_in_their_row():
    x = torch.randn(1, 100, 3, 128, generator=cpu_rng(2)).to(torch.bfloat16)
    bad = x.clone()
    bad[0, 50, 1, 3], bad[0, 7, 0, 0] = math.nan, math.inf
    want, want_rstd = run_pack(place(x), True)
    out, rstd = run_pack(place(bad), True)
    differ = (rstd != want_rstd).nonzero().tolist()
    assert differ == [[7, 0], [50, 1]]
    assert out[50, 1].isnan().all()
    out[50, 1], out[7, 0] = want[50, 1], want[7, 0]
    assert torch.equal(out, want)


@pytest.mark.parametrize("shape", [(0, 5, 2, 64), (3, 0, 2, 64), (1, 0, 1, 7)], ids=str)
def test_pack_of_no_row(shape):
    out, rstd = run_pack(place(torch.zeros(shape, dtype=torch.float16)), True)
    assert out.numel() == 0 and rstd.numel() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": 2}, "dtype"),
        ({"columns": 129}, "columns"),
        ({"columns": 0}, "columns"),
        ({"heads": 0}, "heads"),
        ({"T": -1}, "B, T"),
        ({"x": 0}, "null"),
        ({"out": 8}, "16 bytes"),
        ({"device": -1}, "device: got -1"),
    ],
    ids=str,
)
def test_pack_of_bad_params(change, message, monkeypatch):
    original = harness.Launch.run
    monkeypatch.setattr(harness.Launch, "run", lambda self: (self.fields.update(change), original(self)))
    with pytest.raises(ValueError, match=message):
        run_pack(place(torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)), True)


def ordered_sum(parts: torch.Tensor, group: int) -> torch.Tensor:
    """[T, H * group, K] -> fp32 [T, H, K], in head order."""
    parts = parts.float().unflatten(1, (-1, group))
    total = torch.zeros_like(parts[:, :, 0])
    for i in range(group):
        total = total + parts[:, :, i]
    return total


def draw_parts(shape, group, dtype):
    B, T, H, K = shape
    return torch.randn(B * T, H * group, K, generator=cpu_rng(shape, group), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_finalize_sums_in_head_order(shape, group, dtype):
    B, T = shape[:2]
    parts = draw_parts(shape, group, dtype)
    want = ordered_sum(parts, group).to(dtype).unflatten(0, (B, T))
    for layout, view in layouts(torch.zeros(shape, dtype=dtype)):
        dx = run_finalize(B, T, parts.to(harness.DEVICE), group, strides=view.stride())
        assert_same_bits({layout: dx.cpu()}, {layout: want})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_finalize_through_the_normalisation(shape, group, dtype):
    B, T, H, K = shape
    parts = draw_parts(shape, group, dtype)
    x = 3 * torch.randn(B * T, H, K, generator=cpu_rng(K), dtype=torch.float64)
    rstd = stages.l2norm_rstd(x).float()
    xn = (x * rstd[..., None].double()).to(dtype)
    d, y = ordered_sum(parts, group).double(), xn.double()
    want = rstd[..., None].double() * (d - y * (y * d).sum(-1, keepdim=True))
    spread = rstd[..., None].double() * (d.norm(dim=-1, keepdim=True) + d.abs())
    allowed = torch.finfo(dtype).eps / 2 * want.abs() + 1e-6 * spread + torch.finfo(dtype).smallest_normal
    on_device = [t.to(harness.DEVICE) for t in (parts, xn, rstd)]
    first = None
    for layout, view in layouts(torch.zeros(shape, dtype=dtype)):
        dx = run_finalize(B, T, on_device[0], group, *on_device[1:], strides=view.stride()).cpu()
        error = (dx.flatten(0, 1).double() - want).abs()
        assert (error <= allowed).all(), f"{layout}: {(error - allowed).max()}"
        first = dx if first is None else first
        assert_same_bits({layout: dx}, {layout: first})


@pytest.mark.parametrize("normalised", [False, True])
def test_finalize_of_a_slice_gives_the_same_bits(normalised):
    """One key head after another, or two and then one: the whole's bits, and no other head is touched."""
    B, T, H, K, group = 2, 70, 3, 100, 2
    parts = draw_parts((B, T, H, K), group, torch.bfloat16).to(harness.DEVICE)
    x = torch.randn(B * T, H, K, generator=cpu_rng(5)).to(torch.bfloat16).to(harness.DEVICE)
    more = (x, torch.rand(B * T, H, generator=cpu_rng(6)).to(harness.DEVICE)) if normalised else ()
    whole = run_finalize(B, T, parts, group, *more)
    for first, count in ((0, 1), (1, 1), (2, 1), (0, 2), (1, 2)):
        dx = run_finalize(B, T, parts, group, *more, heads=(first, count))
        heads = slice(first, first + count)
        assert_same_bits({"dx": dx[:, :, heads].cpu()}, {"dx": whole[:, :, heads].cpu()})


@pytest.mark.parametrize("shape", [(0, 5, 2, 64), (3, 0, 2, 64)], ids=str)
def test_finalize_of_no_row(shape):
    B, T, H, K = shape
    assert run_finalize(B, T, torch.zeros(0, 2 * H, K, dtype=torch.float16, device=harness.DEVICE), 2).numel() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": 3}, "dtype"),
        ({"K": 129}, "columns"),
        ({"H": 0}, "heads"),
        ({"group": 0}, "group"),
        ({"parts": 0}, "null"),
        ({"parts": 8}, "16 bytes"),
        ({"x": 16, "rstd": 0}, "rstd"),
        ({"device": 4096}, "device: got 4096"),
    ],
    ids=str,
)
def test_finalize_of_bad_params(change, message, monkeypatch):
    original = harness.Launch.run
    monkeypatch.setattr(harness.Launch, "run", lambda self: (self.fields.update(change), original(self)))
    with pytest.raises(ValueError, match=message):
        run_finalize(1, 4, torch.zeros(4, 4, 64, dtype=torch.bfloat16, device=harness.DEVICE), 2)


# ---- beyond 2^31 elements ----


@pytest.fixture
def large_memory():
    """Needs 50 GB of the device; gives them back."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 50 * 2**30:
        pytest.skip("needs 50 GB of free device memory")
    yield
    torch.cuda.empty_cache()


def test_pack_beyond_32_bits(large_memory):
    shape = (3, 2**31 // 6144 + 11, 16, 128)
    x = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=harness.DEVICE).view(torch.bfloat16)
    assert x.numel() > 2**31
    out, _ = run_pack(x, False)
    assert torch.equal(out.view(torch.int16), x.view(torch.int16).flatten(0, 1))


def test_finalize_beyond_32_bits(large_memory):
    B, T, H, K, group = 1, 2**31 // 4096 + 11, 16, 128, 2
    parts = torch.randn(B * T, H * group, K, dtype=torch.bfloat16, device=harness.DEVICE)
    assert parts.numel() > 2**31 and width(K) == K
    dx = run_finalize(B, T, parts, group)[0]
    for rows in (slice(0, 1000), slice(2**30 // (H * K) - 500, 2**30 // (H * K) + 500), slice(T - 1000, T)):
        assert torch.equal(dx[rows], ordered_sum(parts[rows], group).to(torch.bfloat16))
