"""Bad input: every rule of the operator's table of checks, wrong offsets on the host, and the layers below.

Every case breaks one rule. The error must have the right type, and its text must name the argument, what came and what
is allowed.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cake_gdn_det import _C, chunk_gated_delta_rule
from cake_gdn_det.ops import call, checks

B, T, H, HV, K, V = 2, 6, 2, 4, 8, 5
NAMES = list(inspect.signature(chunk_gated_delta_rule).parameters)


def good(**changes) -> dict:
    """Arguments of a call that is right, but for `changes`."""
    call = {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, HV, V),
        "g": -torch.rand(B, T, HV),
        "beta": torch.rand(B, T, HV),
    }
    return call | changes


def packed(**changes) -> dict:
    call = {
        "q": torch.randn(1, T, H, K),
        "k": torch.randn(1, T, H, K),
        "v": torch.randn(1, T, HV, V),
        "g": -torch.rand(1, T, HV),
        "beta": torch.rand(1, T, HV),
        "cu_seqlens": torch.tensor([0, 2, 2, T]),
    }
    return call | changes


def gated(**changes) -> dict:
    return good(use_gate_in_kernel=True, A_log=torch.zeros(HV), dt_bias=torch.zeros(HV)) | changes


def fake(arguments: dict, device: str, *others: str) -> dict:
    """The arguments with all tensors (but the `others`) moved to a device that this machine need not have."""
    with FakeTensorMode():
        return {
            name: torch.empty(x.shape, dtype=x.dtype, device="cpu" if name in others else device)
            if isinstance(x, torch.Tensor)
            else x
            for name, x in arguments.items()
        }


def sparse(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape).to_sparse()


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(2, 2)])


def meta(arguments: dict, name: str) -> dict:
    return arguments | {name: torch.empty_like(arguments[name], device="meta")}


def with_dtype(arguments: dict, name: str, dtype: torch.dtype) -> dict:
    return arguments | {name: arguments[name].to(dtype)}


FLAGS = [name for name in NAMES if isinstance(inspect.signature(chunk_gated_delta_rule).parameters[name].default, bool)]
STATE = torch.zeros(B, HV, K, V)

# (argument, exception, what the text says after the argument's name, the call)
CASES = [
    # kinds
    ("q", TypeError, r"is \[1\.0\] \(list\), must be a dense tensor \[B, T, H, K\]", good(q=[1.0])),
    ("q", TypeError, r"is a tensor with layout torch.sparse_coo", good(q=sparse(B, T, H, K))),
    ("q", TypeError, r"is a nested tensor", good(q=nested())),
    ("q", TypeError, r"is None \(NoneType\)", good(q=None)),
    ("k", TypeError, r"is 3 \(int\), must be a dense tensor", good(k=3)),
    ("v", TypeError, r"is 'v' \(str\), must be a dense tensor", good(v="v")),
    ("g", TypeError, r"is None \(NoneType\), must be a dense tensor", good(g=None)),
    ("beta", TypeError, r"is 0.5 \(float\), must be a dense tensor", good(beta=0.5)),
    ("beta", TypeError, r"is array\(.*\.\.\. \(ndarray\)", good(beta=torch.zeros(B, T, HV).numpy())),
    ("scale", TypeError, r"is 'a' \(str\), must be a Python number or None", good(scale="a")),
    ("scale", TypeError, r"is True \(bool\), must be a Python number", good(scale=True)),
    ("scale", TypeError, r"is a tensor .*, must be a Python number", good(scale=torch.tensor(1.0))),
    ("initial_state", TypeError, r"is 0 \(int\), must be a dense tensor .* or None", good(initial_state=0)),
    *[(name, TypeError, r"is 1 \(int\), must be True or False", good(**{name: 1})) for name in FLAGS],
    ("cu_seqlens", TypeError, r"is \[0, 6\] \(list\), must be a dense integer tensor", packed(cu_seqlens=[0, 6])),
    ("cu_seqlens_cpu", TypeError, r"is \(0, 6\) \(tuple\), must be a dense", packed(cu_seqlens_cpu=(0, 6))),
    ("chunk_indices", TypeError, r"is \[0\] \(list\), must be a dense tensor or None", packed(chunk_indices=[0])),
    ("A_log", TypeError, r"is 0.0 \(float\), must be a dense tensor \[HV\]", gated(A_log=0.0)),
    ("dt_bias", TypeError, r"is 0.0 \(float\), must be a dense tensor \[HV\]", gated(dt_bias=0.0)),
    ("chunk_size", TypeError, r"is 64.0 \(float\), must be an int, one of \(16, 32, 64\)", good(chunk_size=64.0)),
    ("chunk_size", TypeError, r"is None \(NoneType\)", good(chunk_size=None)),
    ("backend", TypeError, r"is None \(NoneType\), must be a string, one of \('auto'", good(backend=None)),
    ("save_state", TypeError, r"is 1 \(int\), must be True, False or None", good(save_state=1)),
    ("save_state", TypeError, r"is 'auto' \(str\)", good(save_state="auto")),
    ("plan", TypeError, r"is 7 \(int\), must be a string or None", good(plan=7)),
    # dtypes
    ("q", TypeError, r"has dtype torch.int32, must be one of torch.bfloat16, .*", with_dtype(good(), "q", torch.int32)),
    ("q", TypeError, r"has dtype torch.complex64", with_dtype(good(), "q", torch.complex64)),
    ("q", TypeError, r"has dtype torch.float8_e4m3fn", with_dtype(good(), "q", torch.float8_e4m3fn)),
    ("k", TypeError, r"has dtype torch.float16, must be torch.float32 like q", with_dtype(good(), "k", torch.float16)),
    ("v", TypeError, r"has dtype torch.float64, must be torch.float32 like q", with_dtype(good(), "v", torch.float64)),
    ("g", TypeError, r"has dtype torch.int64, must be one of", with_dtype(good(), "g", torch.int64)),
    ("beta", TypeError, r"has dtype torch.bool, must be one of", with_dtype(good(), "beta", torch.bool)),
    ("A_log", TypeError, r"has dtype torch.int32, must be one of", with_dtype(gated(), "A_log", torch.int32)),
    ("dt_bias", TypeError, r"has dtype torch.int32, must be one of", with_dtype(gated(), "dt_bias", torch.int32)),
    ("initial_state", TypeError, r"has dtype torch.int8, must be one of", good(initial_state=STATE.to(torch.int8))),
    (
        "cu_seqlens",
        TypeError,
        r"has dtype torch.float32, must be one of torch.int32, torch.int64",
        with_dtype(packed(), "cu_seqlens", torch.float32),
    ),
    ("cu_seqlens", TypeError, r"has dtype torch.int16", with_dtype(packed(), "cu_seqlens", torch.int16)),
    (
        "cu_seqlens_cpu",
        TypeError,
        r"has dtype torch.uint8, must be one of torch.int32, torch.int64",
        packed(cu_seqlens_cpu=torch.tensor([0, 2, 2, T], dtype=torch.uint8)),
    ),
    # backend and devices
    ("backend", ValueError, r"is 'triton', must be one of \('auto', 'cpu', 'cuda'\)", good(backend="triton")),
    ("backend", ValueError, r"is 'cuda', but q is on cpu", good(backend="cuda")),
    ("backend", ValueError, r"is 'cpu', but q is on cuda:0", fake(good(backend="cpu"), "cuda")),
    (
        "q",
        NotImplementedError,
        r"is on mps:0, must be on one of \('cpu', 'cuda', 'meta'\) \(cake_gdn_det .*built",
        fake(good(), "mps"),
    ),
    ("k", ValueError, r"is on meta, must be on cpu like q", meta(good(), "k")),
    ("v", ValueError, r"is on meta, must be on cpu like q", meta(good(), "v")),
    ("g", ValueError, r"is on meta, must be on cpu like q", meta(good(), "g")),
    ("beta", ValueError, r"is on meta, must be on cpu like q", meta(good(), "beta")),
    ("A_log", ValueError, r"is on meta, must be on cpu like q", meta(gated(), "A_log")),
    ("dt_bias", ValueError, r"is on meta, must be on cpu like q", meta(gated(), "dt_bias")),
    (
        "initial_state",
        ValueError,
        r"is on meta, must be on cpu like q",
        meta(good(initial_state=STATE), "initial_state"),
    ),
    ("cu_seqlens", ValueError, r"is on meta, must be on cpu like q, or on the CPU", meta(packed(), "cu_seqlens")),
    (
        "cu_seqlens_cpu",
        ValueError,
        r"is on meta, must be on the CPU",
        packed(cu_seqlens_cpu=torch.empty(4, dtype=torch.int64, device="meta")),
    ),
    # shapes
    ("q", ValueError, r"has shape \[6, 2, 8\], must be \[B, T, H, K\]", good(q=torch.zeros(T, H, K))),
    (
        "k",
        ValueError,
        r"has shape \[2, 6, 4, 8\], must be .* = \[2, 6, 2, 8\] like q",
        good(k=torch.zeros(B, T, HV, K)),
    ),
    ("k", ValueError, r"has shape \[2, 6, 2\], must be", good(k=torch.zeros(B, T, H))),
    ("v", ValueError, r"has shape \[2, 6, 5\], must be \[B, T, HV, V\]", good(v=torch.zeros(B, T, V))),
    (
        "v",
        ValueError,
        r"has shape \[2, 7, 4, 5\], must be .* with \[B, T\] = \[2, 6\] like q",
        good(v=torch.zeros(B, T + 1, HV, V)),
    ),
    ("v", ValueError, r"has shape \[1, 6, 4, 5\], must be", good(v=torch.zeros(1, T, HV, V))),
    (
        "q",
        ValueError,
        r"has shape \[2, 6, 0, 8\], must be .* with H at least 1",
        good(q=torch.zeros(B, T, 0, K), k=torch.zeros(B, T, 0, K)),
    ),
    (
        "q",
        ValueError,
        r"has shape \[2, 6, 2, 513\]: K = 513, must be 1 to 512",
        good(q=torch.zeros(B, T, H, 513), k=torch.zeros(B, T, H, 513)),
    ),
    ("q", ValueError, r".*: K = 0, must be 1 to 512", good(q=torch.zeros(B, T, H, 0), k=torch.zeros(B, T, H, 0))),
    ("v", ValueError, r".*: HV = 3, must be a positive multiple of H = 2", good(v=torch.zeros(B, T, 3, V))),
    ("v", ValueError, r".*: HV = 1, must be a positive multiple of H = 2", good(v=torch.zeros(B, T, 1, V))),
    ("v", ValueError, r".*: HV = 0, must be a positive multiple of H = 2", good(v=torch.zeros(B, T, 0, V))),
    ("v", ValueError, r".*: V = 513, must be 1 to 512", good(v=torch.zeros(B, T, HV, 513))),
    ("v", ValueError, r".*: V = 0, must be 1 to 512", good(v=torch.zeros(B, T, HV, 0))),
    (
        "g",
        ValueError,
        r"has shape \[2, 4, 6\], must be \[B, T, HV\] = \[2, 6, 4\] like v; .*transpose\(1, 2\)",
        good(g=torch.zeros(B, HV, T)),
    ),
    ("g", ValueError, r"has shape \[2, 6, 4, 1\]", good(g=torch.zeros(B, T, HV, 1))),
    ("beta", ValueError, r"has shape \[2, 6, 2\], must be \[B, T, HV\] = \[2, 6, 4\]", good(beta=torch.zeros(B, T, H))),
    ("A_log", ValueError, r"has shape \[2\], must be \[HV\] = \[4\]", gated(A_log=torch.zeros(H))),
    ("A_log", ValueError, r"has shape \[1, 4\], must be \[HV\] = \[4\]", gated(A_log=torch.zeros(1, HV))),
    ("dt_bias", ValueError, r"has shape \[\], must be \[HV\] = \[4\]", gated(dt_bias=torch.zeros(()))),
    (
        "cu_seqlens",
        ValueError,
        r"has shape \[2, 2\], must be \[N \+ 1\]",
        packed(cu_seqlens=torch.tensor([[0, 2], [2, T]])),
    ),
    (
        "cu_seqlens",
        ValueError,
        r"has shape \[0\], must be \[N \+ 1\], N at least 0",
        packed(cu_seqlens=torch.zeros(0, dtype=torch.int64)),
    ),
    (
        "cu_seqlens",
        ValueError,
        r"is given with B = 2 \(q has shape \[2, 6, 2, 8\]\), but packed .* B = 1",
        good(cu_seqlens=torch.tensor([0, T])),
    ),
    (
        "cu_seqlens_cpu",
        ValueError,
        r"has shape \[2\], but cu_seqlens is None",
        good(cu_seqlens_cpu=torch.tensor([0, T])),
    ),
    (
        "cu_seqlens_cpu",
        ValueError,
        r"has shape \[3\], must be \[4\] like cu_seqlens",
        packed(cu_seqlens_cpu=torch.tensor([0, 2, T])),
    ),
    (
        "initial_state",
        ValueError,
        r"has shape \[3, 4, 8, 5\], must be \[N, HV, K, V\] = \[2, 4, 8, 5\]",
        good(initial_state=torch.zeros(3, HV, K, V)),
    ),
    (
        "initial_state",
        ValueError,
        r"has shape \[1, 4, 8, 5\], must be .* = \[3, 4, 8, 5\]",
        packed(initial_state=torch.zeros(1, HV, K, V)),
    ),
    (
        "initial_state",
        ValueError,
        r"has shape \[2, 4, 8, 5\], must be \[N, HV, V, K\] = \[2, 4, 5, 8\] with state_v_first",
        good(initial_state=STATE, state_v_first=True),
    ),
    ("initial_state", ValueError, r"has shape \[4, 8, 5\]", good(initial_state=STATE[0])),
    # options
    ("scale", ValueError, r"is nan, must be finite", good(scale=math.nan)),
    ("scale", ValueError, r"is -inf, must be finite", good(scale=-math.inf)),
    ("chunk_size", ValueError, r"is 128, must be one of \(16, 32, 64\)", good(chunk_size=128)),
    ("chunk_size", ValueError, r"is 0, must be one of", good(chunk_size=0)),
    (
        "cp_context",
        NotImplementedError,
        r"is 'ring' \(str\), must be None: .*cake_gdn_det .*built",
        good(cp_context="ring"),
    ),
    ("allow_neg_eigval", ValueError, r"is True, .*use_beta_sigmoid_in_kernel=True", good(allow_neg_eigval=True)),
    ("A_log", ValueError, r"has shape \[4\], but must be None unless use_gate_in_kernel", good(A_log=torch.zeros(HV))),
    (
        "dt_bias",
        ValueError,
        r"has shape \[4\], but must be None unless use_gate_in_kernel",
        good(dt_bias=torch.zeros(HV)),
    ),
    ("A_log", ValueError, r"is None, must be a tensor \[HV\] with use_gate_in_kernel", gated(A_log=None)),
    ("plan", ValueError, r"is 'fast', must be None: with q on cpu there are no choices to pin", good(plan="fast")),
]
CUDA_CASES = [
    ("q", NotImplementedError, r"has dtype torch.float64 on cuda:0: float64 runs on the CPU only",
     {name: x.double() if name in "qkv" else x for name, x in good().items()}),
    ("backend", NotImplementedError, r"is 'auto' with q on cuda:0, but this is a CPU-only build \(cake_gdn_det .*"
     r"CAKE_GDN_CUDA=OFF.*CAKE_GDN_CUDA=ON", good()),
    ("backend", NotImplementedError, r"is 'cuda' with q on cuda:0, but this is a CPU-only", good(backend="cuda")),
]  # fmt: skip


def call_of(arguments: dict) -> call.Call:
    defaults = {name: p.default for name, p in inspect.signature(chunk_gated_delta_rule).parameters.items()}
    values = defaults | arguments
    q, v = values["q"], values["v"]
    return call.Call(*(values[name] for name in NAMES), call.shape_of(q), call.shape_of(v), *call.device_of(q))


def check_error(argument: str, error: type[Exception], says: str, arguments: dict) -> None:
    with pytest.raises(error) as caught:
        chunk_gated_delta_rule(**arguments)
    assert type(caught.value) is error
    assert re.match(rf"chunk_gated_delta_rule: {argument} {says}", str(caught.value), re.DOTALL), str(caught.value)


def case_id(case) -> str:
    return re.sub(r"[^A-Za-z0-9_= ]+", "", f"{case[0]} {case[2]}")[:60]


@pytest.mark.parametrize("case", CASES, ids=map(case_id, CASES))
def test_rule(case):
    check_error(*case)


@pytest.mark.parametrize("case", CUDA_CASES, ids=map(case_id, CUDA_CASES))
def test_rule_about_cuda(case, monkeypatch):
    argument, error, says, arguments = case
    monkeypatch.setattr(checks, "HAS_CUDA", argument == "q")
    monkeypatch.setattr(checks, "BUILD", checks.BUILD.replace("=ON", "=OFF"))
    check_error(argument, error, says, fake(arguments, "cuda"))


def test_every_rule_has_a_case(monkeypatch):
    broken = [checks.broken_rule(call_of(arguments)) for *_, arguments in CASES]
    for has_cuda in (False, True):
        monkeypatch.setattr(checks, "HAS_CUDA", has_cuda)
        broken += [checks.broken_rule(call_of(fake(arguments, "cuda"))) for *_, arguments in CUDA_CASES]
    missing = [rule for rule in checks.RULES if not any(rule is other for other in broken)]
    assert not missing, [(checks.RULES.index(rule), rule.argument) for rule in missing]


def test_every_argument_has_a_rule():
    assert {rule.argument for rule in checks.RULES} == set(NAMES)
    assert call.Call._fields[: len(NAMES)] == tuple(NAMES)


@pytest.mark.parametrize("arguments", [good(), packed(), gated(), good(initial_state=STATE), gated(dt_bias=None)])
def test_good_calls_break_no_rule(arguments):
    assert checks.broken_rule(call_of(arguments)) is None
    o, state = chunk_gated_delta_rule(**arguments)
    assert o.shape == arguments["v"].shape
    assert state is None


def test_metadata_is_checked_on_meta_tensors():
    arguments = fake(packed(initial_state=torch.zeros(3, HV, K, V)), "meta")
    o, state = chunk_gated_delta_rule(**arguments, output_final_state=True)
    assert (o.device.type, o.shape, state.shape) == ("meta", (1, T, HV, V), (3, HV, K, V))
    with pytest.raises(ValueError, match="beta has shape"):
        chunk_gated_delta_rule(**arguments | {"beta": arguments["beta"][:, 1:]})


def test_offsets_on_the_host_are_welcome_with_cuda_tensors(monkeypatch):
    monkeypatch.setattr(checks, "HAS_CUDA", True)
    offsets = torch.tensor([0, 2, 2, T])
    arguments = fake(packed(cu_seqlens_cpu=offsets), "cuda", "cu_seqlens", "cu_seqlens_cpu")
    assert checks.broken_rule(call_of(arguments)) is None
    arguments = fake(packed(cu_seqlens_cpu=offsets), "cuda")
    assert checks.broken_rule(call_of(arguments)).argument == "cu_seqlens_cpu"


# ---- keywords and layouts ----


@pytest.mark.parametrize("keyword", ["head_first", "use_initial_state", "transpose_state_layout", "mask"])
def test_unknown_keyword(keyword):
    with pytest.raises(TypeError, match=keyword):
        chunk_gated_delta_rule(**good(), **{keyword: True})


def test_missing_argument():
    arguments = good()
    del arguments["beta"]
    with pytest.raises(TypeError, match="beta"):
        chunk_gated_delta_rule(**arguments)


def test_the_new_options_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        chunk_gated_delta_rule(*good().values(), *[None] * 12)


def test_head_first_tensors():
    first = {name: x.transpose(1, 2) for name, x in good().items()}
    with pytest.raises(ValueError, match=r"v has shape \[2, 4, 6, 5\].*head-first ones need .transpose\(1, 2\)"):
        chunk_gated_delta_rule(**first)
    with pytest.raises(ValueError, match=r"g has shape \[2, 4, 6\].*head-first ones need .transpose\(1, 2\)"):
        chunk_gated_delta_rule(**good() | {name: first[name] for name in ("g", "beta")})


# ---- values of offsets: checked by the implementation, before any work ----

BAD_OFFSETS = [
    ([1, 2, 2, 6], r"cu_seqlens\[0\] is 1"),
    ([-1, 2, 2, 6], r"cu_seqlens\[0\] is -1"),
    ([0, 4, 2, 6], r"cu_seqlens\[2\] is 2, below cu_seqlens\[1\] = 4"),
    ([0, 2, 7, 6], r"cu_seqlens\[3\] is 6, below cu_seqlens\[2\] = 7"),
    ([0, 2, 2, 5], r"cu_seqlens\[3\] is 5; .* T = 6"),
    ([0, 2, 2, 7], r"cu_seqlens\[3\] is 7; .* T = 6"),
    ([0], r"cu_seqlens\[0\] is 0; .* T = 6"),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("offsets", "says"), BAD_OFFSETS, ids=str)
def test_wrong_offsets(offsets, says, dtype):
    arguments = packed(cu_seqlens=torch.tensor(offsets, dtype=dtype))
    with pytest.raises(ValueError, match=says):
        chunk_gated_delta_rule(**arguments)
    arguments["q"].requires_grad_()
    with pytest.raises(ValueError, match=says):
        chunk_gated_delta_rule(**arguments)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_that_differ(dtype):
    arguments = packed(cu_seqlens_cpu=torch.tensor([0, 2, 3, T], dtype=dtype))
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu is \[0, 2, 3, 6\], must equal cu_seqlens, .* \[0, 2, 2, 6\]"):
        chunk_gated_delta_rule(**arguments)


def test_offsets_of_another_dtype_or_layout_are_the_same_offsets():
    arguments = packed()
    o, _ = chunk_gated_delta_rule(**arguments)
    spaced = torch.stack([arguments["cu_seqlens"], torch.zeros(4, dtype=torch.int64)], dim=1)[:, 0]
    assert not spaced.is_contiguous()
    for offsets in (spaced, arguments["cu_seqlens"].int()):
        for copy in (None, spaced, offsets.int()):
            assert torch.equal(
                chunk_gated_delta_rule(**arguments | {"cu_seqlens": offsets, "cu_seqlens_cpu": copy})[0], o
            )


# ---- the compiled module ----


def test_problem_refuses_what_the_header_has_not():
    with pytest.raises(TypeError, match="Problem has no field tau"):
        _C.Problem(tau=1)
    with pytest.raises(TypeError, match="B must be an int, not float"):
        _C.Problem(B=1.0)
    with pytest.raises(OverflowError, match="device does not fit"):
        _C.Problem(device=2**31)
    with pytest.raises(OverflowError, match="T does not fit"):
        _C.Problem(T=2**63)
    with pytest.raises(TypeError, match="plan must be a str or None, not int"):
        _C.Problem(plan=8)
    with pytest.raises(ValueError, match="plan has a NUL character"):
        _C.Problem(plan="segment=32\0,tail=fused")
    for bad in (0, "q", (1, 2), (0, 0, [1]), (0, 0, (1,) * 5), (0.5, 0, (1,)), (0, 0, ("1",))):
        with pytest.raises(TypeError, match=r"q must (be|have)"):
            _C.Problem(q=bad)


def test_problem_keeps_what_it_is_given():
    problem = _C.Problem(T=2**40, scale=0.1, q=(256, _C.FP16, (4, -3, 2, 1)), h=(8, _C.FP32, ()))
    assert (problem.T, problem.scale, problem.B) == (2**40, 0.1, 0)
    assert problem.q == (256, _C.FP16, (4, -3, 2, 1))
    assert problem.h == (8, _C.FP32, (0, 0, 0, 0))
    assert problem.k is None and problem.plan is None
    plan = "segment=" + "8" * 3  # a string of its own, which must outlive its use
    problem.plan = plan
    assert problem.plan == plan == "segment=888"
    problem.plan = None
    assert problem.plan is None
    problem.q = None
    problem.dh0 = (16, _C.FP64, (1,))
    assert (problem.q, problem.dh0) == (None, (16, _C.FP64, (1, 0, 0, 0)))


def test_problem_of_all_fields():
    values = [*range(4), 0.5, *range(5, 13), "plan", *[(64 * i, _C.FP32, (i, 0, 0, 0)) for i in range(1, 25)]]
    problem = _C.Problem.of(*values)
    assert (problem.backend, problem.flags, problem.scale, problem.slots) == (0, 3, 0.5, 12)
    assert (problem.plan, problem.q, problem.dh0) == ("plan", values[14], values[-1])
    with pytest.raises(TypeError, match="takes 38 values, not 37"):
        _C.Problem.of(*values[1:])


def test_problem_reads_tensors():
    x = torch.zeros(2, 3, 4, 5, dtype=torch.float16).transpose(1, 2)
    assert _C.Problem(q=x).q == (x.data_ptr(), _C.FP16, (60, 5, 20, 1))
    assert _C.Problem(A_log=x[0, 0, 0]).A_log == (x.data_ptr(), _C.FP16, (1, 0, 0, 0))
    with pytest.raises(TypeError, match=r"q has an unknown dtype, torch\.bool"):
        _C.Problem(q=x.bool())
    with pytest.raises(TypeError, match="q must have at most four strides"):
        _C.Problem(q=x[None])


def test_statuses_become_exceptions():
    with pytest.raises(ValueError, match="num_threads"):
        _C.workspace_size(_C.Problem(), _C.FORWARD)
    sizes = {"num_threads": 1, "B": 1, "T": 64, "H": 1, "HV": 1, "K": 8, "V": 8, "N": 1, "scale": 1.0}
    x = torch.zeros(64 * 8)
    view = (x.data_ptr(), _C.FP32, (64 * 8, 8, 8, 1))
    problem = _C.Problem(**sizes, **dict.fromkeys(("q", "k", "v", "g", "beta", "o"), view))
    assert _C.workspace_size(problem, _C.FORWARD) > 0
    with pytest.raises(ValueError, match="bytes"):
        _C.forward(problem, 0, 0, 0)
    if not hasattr(_C, "tables"):
        problem.backend = _C.CUDA
        with pytest.raises(NotImplementedError, match="CAKE_GDN_CUDA"):
            _C.forward(problem, 0, 0, 0)
