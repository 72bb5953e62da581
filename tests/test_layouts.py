"""Packed sequences, strides and memory around the tensors: what the layout may change is nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from reference.cases import (
    ALL_OPTIONS,
    GRADS,
    assert_matches,
    assert_same_bits,
    cumulative,
    make_case,
    poisoned,
    reference,
    run,
    sequence,
    storage_bytes,
)

PER_TOKEN = ("q", "k", "v", "g", "beta")
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

# Lengths cluster where chunks begin and end; repeated offsets come as zeros, at the tail too.
LENGTH = st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129]), st.integers(0, 150))
LENGTHS = st.builds(lambda body, tail: body + [0] * tail, st.lists(LENGTH, min_size=1, max_size=6), st.integers(0, 4))


def assert_sequences_alone(op, case, out):
    """Each packed sequence has, to the bit, what it has alone as a dense row."""
    cu = case.options["cu_seqlens"].tolist()
    for n, (start, stop) in enumerate(zip(cu, cu[1:])):
        alone = run(op, sequence(case, n))
        part = {}
        for name in ("o", *(GRADS[n] for n in PER_TOKEN)):
            part[name] = out[name][:, start:stop]
        for name in ("final_state", "dh0"):
            if name in out:
                part[name] = out[name][n : n + 1]
        assert_same_bits(part, alone)


@given(lengths=LENGTHS, seed=st.integers(0, 2**31), every_option=st.booleans(), dtype=st.sampled_from([F32, BF16, F64]))
@example(lengths=[0], seed=0, every_option=False, dtype=F32)
@example(lengths=[0, 0, 0], seed=1, every_option=True, dtype=F32)
@example(lengths=[64, 64, 64, 0, 0, 0], seed=2, every_option=False, dtype=F32)
@example(lengths=[1] * 70, seed=3, every_option=False, dtype=F32)
def test_random_packed_layouts(op, device, lengths, seed, every_option, dtype):
    rng = torch.Generator().manual_seed(seed)
    options = ALL_OPTIONS if every_option else {}
    cu_dtype = torch.int32 if seed % 2 else torch.int64
    shape = {"lengths": lengths, "cu_dtype": cu_dtype, "H": 1, "HV": 2, "K": 8, "V": 6, "dtype": dtype}
    case = make_case(rng, device=device, **shape, **options)
    out = run(op, case)
    ref = reference(case)
    assert_matches(out, ref)
    if device == "cpu" or case.options.get("batch_invariant"):
        assert_sequences_alone(op, case, out)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_packed_is_each_sequence_alone(op, rng, device, dtype):
    options = ALL_OPTIONS | {"batch_invariant": True}
    lengths = [3, 0, 200, 64, 1, 129, 0, 0]
    case = make_case(rng, lengths=lengths, H=2, HV=4, K=32, V=48, dtype=dtype, device=device, **options)
    assert_sequences_alone(op, case, run(op, case))


@pytest.mark.parametrize("B, T", [(1, 150), (3, 64), (3, 65)])
def test_dense_is_packed(op, rng, device, B, T):
    case = make_case(rng, B=B, T=T, HV=2, device=device, batch_invariant=True)
    dense = run(op, case)
    inputs = {
        n: x.reshape(1, B * T, *x.shape[2:]) if n in PER_TOKEN else x for n, x in case.inputs.items() if x is not None
    }
    packed = case.with_inputs(**inputs).with_options(cu_seqlens=cumulative([T] * B).to(device))
    packed.do = case.do.reshape(1, B * T, *case.do.shape[2:])
    out = run(op, packed)
    assert_same_bits({n: x.reshape(dense[n].shape) for n, x in out.items()}, dense)


def test_order_of_the_batch(op, rng, device):
    case = make_case(rng, B=5, T=130, H=1, HV=2, device=device, batch_invariant=True)
    out = run(op, case)
    order = torch.randperm(5, generator=rng)
    moved = case.with_inputs(**{n: case.inputs[n][order] for n in case.present})
    moved.do, moved.dht = case.do[order], case.dht[order]
    assert_same_bits({n: x[order] for n, x in out.items()}, run(op, moved))


def test_a_sequence_does_not_see_its_neighbours(op, rng, device):
    """Not even NaN in the one before and the one after reaches a packed sequence."""
    case = make_case(rng, lengths=[70, 100, 30], HV=2, device=device)
    out = run(op, case)
    bad = case.with_inputs(**{n: case.inputs[n].clone() for n in case.present})
    bad.do, bad.dht = case.do.clone(), case.dht.clone()
    for x in (*(bad.inputs[n] for n in PER_TOKEN), bad.do):
        x[:, :70] = math.nan
        x[:, 170:] = math.nan
    for x in (bad.inputs["initial_state"], bad.dht):
        x[0], x[2] = math.nan, math.nan
    got = run(op, bad)
    middle = slice(70, 170)
    names = ("o", *(GRADS[n] for n in PER_TOKEN))
    assert_same_bits({n: got[n][:, middle] for n in names}, {n: out[n][:, middle] for n in names})
    assert_same_bits({n: got[n][1] for n in ("final_state", "dh0")}, {n: out[n][1] for n in ("final_state", "dh0")})


@pytest.mark.parametrize("final", [False, True])
def test_empty_sequences_pass_the_state_through(op, rng, device, final):
    case = make_case(rng, lengths=[0, 5, 0, 0, 66, 0, 0], HV=2, device=device)
    out = run(op, case, final=final)
    for n in (0, 2, 3, 5, 6):
        if final:
            assert torch.equal(out["final_state"][n], case.inputs["initial_state"][n])
            assert torch.equal(out["dh0"][n], case.dht[n])
        else:
            assert (out["dh0"][n] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_no_tokens_at_all(op, rng, device, dtype):
    for kwargs in ({"T": 0, "B": 3}, {"lengths": [0, 0]}, {"lengths": [0]}):
        case = make_case(rng, HV=2, dtype=dtype, state_dtype=dtype, device=device, **kwargs)
        out = run(op, case)
        assert torch.equal(out["final_state"], case.inputs["initial_state"].to(out["final_state"].dtype))
        assert torch.equal(out["dh0"], case.dht.to(out["dh0"].dtype))


def test_many_short_sequences(op, rng, device):
    """5000 sequences of one token: the oracle sees them as rows of a dense batch."""
    N = 5000
    dense = make_case(rng, B=N, T=1, HV=2, K=4, V=3)
    packed = dense.with_inputs(**{n: dense.inputs[n].transpose(0, 1) for n in PER_TOKEN})
    packed = packed.with_options(cu_seqlens=torch.arange(N + 1, dtype=torch.int32))
    packed.do = dense.do.transpose(0, 1)
    ref = {
        n: (x.transpose(0, 1) if n in ("o", *(GRADS[m] for m in PER_TOKEN)) else x, y)
        for n, (x, y) in reference(dense).items()
    }
    assert_matches(run(op, packed), ref)


# --- strides ---------------------------------------------------------------------------------------------------------


def permuted(x, order):
    """The same values, laid out in memory in another order of dimensions."""
    return x.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist())


def restride(x: torch.Tensor, layout: str) -> torch.Tensor | None:
    """The same values in another memory layout (for the expanded ones: their first values, everywhere), or None."""
    dims = x.dim()
    if layout == "heads before tokens":
        return permuted(x, [0, 2, 1, *range(3, dims)]) if dims > 2 else None
    if layout == "last dimension outermost":
        return permuted(x, [dims - 1, *range(dims - 1)])
    if layout == "every second element":
        return torch.stack([x, torch.full_like(x, math.nan)], -1).flatten(-2)[..., ::2]
    if layout == "slice of a wider row":
        return torch.cat([torch.full_like(x, math.nan), x, torch.full_like(x, math.nan)], -1)[..., x.shape[-1] :][
            ..., : x.shape[-1]
        ]
    if layout == "odd offset":
        return torch.cat([x.new_full((1,), math.nan), x.reshape(-1)])[1:].view(x.shape)
    if layout == "poisoned on all sides":
        return poisoned(x)
    which = {"expanded batch": 0, "expanded tokens": 1, "expanded heads": 2, "expanded last": dims - 1}
    if layout in which:
        d = which[layout]
        return x.narrow(d, 0, 1).expand_as(x) if d < dims else None
    if layout == "overlapping":
        # Hankel: every index moves by one element, so that elements of one row are elements of the next.
        return torch.as_strided(x.flatten(), x.shape, [1] * dims)
    raise ValueError(layout)


LAYOUTS = ["heads before tokens", "last dimension outermost", "every second element", "slice of a wider row"]
LAYOUTS += ["odd offset", "poisoned on all sides", "expanded batch", "expanded tokens", "expanded heads"]
LAYOUTS += ["expanded last", "overlapping"]


def given_strides(op, case, which, layout):
    """Runs the case with `which` tensors in `layout` and with contiguous copies of the same; checks bits and memory."""
    changed = {}
    for name in which:
        x = getattr(case, name) if name in ("do", "dht") else case.inputs[name]
        view = restride(x, layout)
        if view is not None:
            changed[name] = view

    def with_tensors(tensors):
        new = case.with_inputs(**{n: x for n, x in tensors.items() if n in case.inputs})
        new.do, new.dht = tensors.get("do", case.do), tensors.get("dht", case.dht)
        return new

    before = {n: storage_bytes(x) for n, x in changed.items()}
    out = run(op, with_tensors(changed))
    for n, x in changed.items():
        assert torch.equal(storage_bytes(x), before[n]), f"{n} or the memory around it was written"
    plain = with_tensors({n: x.contiguous() for n, x in changed.items()})
    assert_same_bits(out, run(op, plain))
    return out, plain


VECTORS = ("A_log", "dt_bias")  # [HV]: they have neither tokens nor heads apart
NAMES = ("q", "k", "v", "g", "beta", "initial_state", "do", "dht", *VECTORS)
ONE_INPUT = [(n, x) for n in NAMES for x in LAYOUTS if n not in VECTORS or ("heads" not in x and "tokens" not in x)]


@pytest.mark.parametrize(("name", "layout"), ONE_INPUT)
def test_strides_of_one_input(op, rng, device, name, layout):
    case = make_case(rng, B=2, T=70, H=2, HV=4, K=8, V=6, dtype=BF16, device=device, **ALL_OPTIONS)
    given_strides(op, case, [name], layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_strides_of_all_inputs(op, rng, device, dtype, layout):
    case = make_case(rng, B=2, T=70, H=2, HV=4, K=16, V=16, dtype=dtype, device=device, use_qk_l2norm_in_kernel=True)
    out, plain = given_strides(op, case, [*case.present, "do", "dht"], layout)
    assert_matches(out, reference(plain))


def test_qkv_split_from_one_projection(op, rng, device):
    """As models do: one wide projection, split and viewed as heads, with value-head groups."""
    case = make_case(rng, B=2, T=70, H=2, HV=4, K=8, V=6, device=device)
    q, k, v = (case.inputs[n].flatten(2) for n in "qkv")
    wide = torch.cat([q, k, v], -1).transpose(1, 2).contiguous().transpose(1, 2)
    parts = torch.split(wide, [16, 16, 24], -1)
    views = {n: x.unflatten(-1, s) for n, x, s in zip("qkv", parts, ((2, 8), (2, 8), (4, 6)))}
    assert not any(x.is_contiguous() for x in views.values())
    assert_same_bits(run(op, case.with_inputs(**views)), run(op, case))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_in_any_memory(op, rng, device, dtype):
    """cu_seqlens as a slice of a longer tensor, whose other elements are no offsets, and with a stride."""
    case = make_case(rng, lengths=[5, 0, 70], HV=2, cu_dtype=dtype, device=device)
    out = run(op, case)
    cu = case.options["cu_seqlens"]
    sliced = torch.cat([cu.new_tensor([-7]), cu, cu.new_tensor([10**6])])[1:-1]
    assert_same_bits(out, run(op, case.with_options(cu_seqlens=sliced)))
    strided = torch.stack([cu, torch.full_like(cu, 10**6)], 1)[:, 0]
    assert_same_bits(out, run(op, case.with_options(cu_seqlens=strided)))


def test_gradients_of_views_reach_their_base(op, rng, device):
    """Expanded heads: the gradient that autograd adds up is the sum over the heads that share an element."""
    case = make_case(rng, T=70, H=4, HV=4, K=8, V=8, device=device, initial_state=False)
    base = case.inputs["k"][:, :, :1].clone().requires_grad_()
    o, _ = op(**case.inputs | {"k": base.expand(-1, -1, 4, -1)})
    (got,) = torch.autograd.grad(o, base, case.do)
    full = run(op, case.with_inputs(k=base.detach().expand(-1, -1, 4, -1)), final=False)
    torch.testing.assert_close(got, full["dk"].sum(2, keepdim=True))


@pytest.mark.slow
def test_seventy_thousand_sequences(op, rng, device):
    N = 70_000
    case = make_case(rng, lengths=[1, 0] * (N // 2), HV=1, K=4, V=4, device=device)
    out = run(op, case)
    assert torch.equal(out["final_state"][1::2], case.inputs["initial_state"][1::2])
    head = _head(case, 50)
    assert_sequences_alone(op, head, {n: _cut(n, x, head) for n, x in out.items()})


def _head(case, n):
    """The first n sequences of a packed case."""
    cu = case.options["cu_seqlens"][: n + 1]
    T = int(cu[-1])
    inputs = {m: x if x is None else x[:, :T] if m in PER_TOKEN else x[:n] for m, x in case.inputs.items()}
    new = case.with_inputs(**inputs).with_options(cu_seqlens=cu)
    new.do, new.dht = case.do[:, :T], case.dht[:n]
    return new


def _cut(name, x, case):
    states = name in ("final_state", "dh0")
    return x[: case.dht.shape[0]] if states else x[:, : case.do.shape[1]]
