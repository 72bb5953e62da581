"""What chunk_gated_delta_rule accepts: one table of rules.

A rule looks at metadata only (kinds, shapes, dtypes, devices), never at a tensor's values, so that the same table works
in eager calls, on meta and fake tensors, and while torch.compile traces with sizes that are symbols. The values of
offsets are checked by the operator's implementation. Rules run in order, and a rule may rely on those before it.
"""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _C
from .call import Call

MAX_HEAD_SIZE = 512
CHUNK_SIZES = (16, 32, 64)
BACKENDS = ("auto", "cpu", "cuda")
DEVICES = ("cpu", "cuda", "meta")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OFFSETS = (torch.int32, torch.int64)

HAS_CUDA = hasattr(_C, "tables")
BUILD = f"cake_gdn_det {json.loads(_C.build_info())['version']}, built with CAKE_GDN_CUDA={'ON' if HAS_CUDA else 'OFF'}"


class Rule(NamedTuple):
    """`argument`, here x, is refused with `error` unless `holds(x, call)`; `says(x, call)` tells what came and what is
    allowed. An `optional` argument may also be None."""

    argument: str
    error: type[Exception]
    holds: Callable[[Any, Call], bool]
    says: Callable[[Any, Call], str]
    optional: bool = False


def broken_rule(call: Call) -> Rule | None:
    """The first rule that the call breaks, None for a good call."""
    # While torch.compile traces, a table of its own: it would guard on every function of a global one at every call.
    for place, optional, holds, rule in _rows() if torch.compiler.is_compiling() else _ROWS:
        x = call[place]
        if not ((optional and x is None) or holds(x, call)):
            return rule
    return None


def check(call: Call) -> None:
    """Raises the error of the first broken rule: it names the argument, what came and what is allowed."""
    rule = broken_rule(call)
    if rule is not None:
        x = getattr(call, rule.argument)
        raise rule.error(f"chunk_gated_delta_rule: {rule.argument} {rule.says(x, call)}")


# ---- kinds ----


def _describe(x: object) -> str:
    if isinstance(x, torch.Tensor):
        return "is a nested tensor" if x.is_nested else f"is a tensor with layout {x.layout}"
    text = repr(x)
    return f"is {text if len(text) <= 60 else text[:57] + '...'} ({type(x).__name__})"


def _dense(x: Any, _: Call) -> bool:
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested


def _flag(x: Any, _: Call) -> bool:
    return x is True or x is False


def _instance(kinds: Any) -> Callable[[Any, Call], bool]:
    # A bool is an int to Python, but no number to a reader.
    return lambda x, _: isinstance(x, kinds) and not isinstance(x, bool)


def _kind(argument: str, holds: Callable[[Any, Call], bool], allowed: str, optional: bool = False) -> Rule:
    text = f"must be {allowed}{' or None' if optional else ''}"
    return Rule(argument, TypeError, holds, lambda x, c: f"{_describe(x)}, {text}", optional)


def _kinds() -> tuple[Rule, ...]:
    return (
        _kind("q", _dense, "a dense tensor [B, T, H, K]"),
        _kind("k", _dense, "a dense tensor [B, T, H, K]"),
        _kind("v", _dense, "a dense tensor [B, T, HV, V]"),
        _kind("g", _dense, "a dense tensor [B, T, HV]"),
        _kind("beta", _dense, "a dense tensor [B, T, HV]"),
        _kind("scale", _instance((int, float)), "a Python number", optional=True),
        _kind("initial_state", _dense, "a dense tensor [N, HV, K, V]", optional=True),
        _kind("output_final_state", _flag, "True or False"),
        _kind("use_qk_l2norm_in_kernel", _flag, "True or False"),
        _kind("use_beta_sigmoid_in_kernel", _flag, "True or False"),
        _kind("allow_neg_eigval", _flag, "True or False"),
        _kind("state_v_first", _flag, "True or False"),
        _kind("cu_seqlens", _dense, "a dense integer tensor [N + 1]", optional=True),
        _kind("cu_seqlens_cpu", _dense, "a dense integer tensor [N + 1]", optional=True),
        _kind("chunk_indices", _dense, "a dense tensor", optional=True),
        _kind("use_gate_in_kernel", _flag, "True or False"),
        _kind("A_log", _dense, "a dense tensor [HV]", optional=True),
        _kind("dt_bias", _dense, "a dense tensor [HV]", optional=True),
        _kind("chunk_size", _instance(int), f"an int, one of {CHUNK_SIZES}"),
        _kind("backend", _instance(str), f"a string, one of {BACKENDS}"),
        _kind("batch_invariant", _flag, "True or False"),
        _kind("save_state", _flag, "True, False", optional=True),
        _kind("plan", _instance(str), "a string", optional=True),
    )


# ---- dtypes ----


def _dtype(argument: str, allowed: tuple[torch.dtype, ...], optional: bool = False) -> Rule:
    text = f"must be one of {', '.join(map(str, allowed))}"
    return Rule(
        argument, TypeError, lambda x, c: x.dtype in allowed, lambda x, c: f"has dtype {x.dtype}, {text}", optional
    )


def _dtype_of_q(argument: str) -> Rule:
    return Rule(
        argument,
        TypeError,
        lambda x, c: x.dtype is c.q.dtype,
        lambda x, c: f"has dtype {x.dtype}, must be {c.q.dtype} like q",
    )


def _dtypes() -> tuple[Rule, ...]:
    return (
        _dtype("q", FLOATS),
        _dtype_of_q("k"),
        _dtype_of_q("v"),
        _dtype("g", FLOATS),
        _dtype("beta", FLOATS),
        _dtype("A_log", FLOATS, optional=True),
        _dtype("dt_bias", FLOATS, optional=True),
        _dtype("initial_state", FLOATS, optional=True),
        _dtype("cu_seqlens", OFFSETS, optional=True),
        _dtype("cu_seqlens_cpu", OFFSETS, optional=True),
    )


# ---- backend and devices ----


def _beside_q(argument: str, optional: bool = False) -> Rule:
    return Rule(
        argument,
        ValueError,
        lambda x, c: x.device == c.q_device,
        lambda x, c: f"is on {x.device}, must be on {c.q_device} like q",
        optional,
    )


def _places() -> tuple[Rule, ...]:
    return (
        Rule("backend", ValueError, lambda x, c: x in BACKENDS, lambda x, c: f"is {x!r}, must be one of {BACKENDS}"),
        Rule(
            "q",
            NotImplementedError,
            lambda x, c: c.q_place in DEVICES,
            lambda x, c: f"is on {c.q_device}, must be on one of {DEVICES} ({BUILD})",
        ),
        Rule(
            "backend",
            ValueError,
            lambda x, c: x == "auto" or c.q_place == x or c.q_place == "meta",
            lambda x, c: f"is {x!r}, but q is on {c.q_device}: move the tensors, or use 'auto'",
        ),
        Rule(
            "backend",
            NotImplementedError,
            lambda x, c: HAS_CUDA or (x != "cuda" and c.q_place != "cuda"),
            lambda x, c: (
                f"is {x!r} with q on {c.q_device}, but this is a CPU-only build ({BUILD}): it runs tensors on the "
                "CPU; for CUDA tensors build with CAKE_GDN_CUDA=ON"
            ),
        ),
        Rule(
            "q",
            NotImplementedError,
            lambda x, c: x.dtype is not torch.float64 or c.q_place != "cuda",
            lambda x, c: f"has dtype torch.float64 on {c.q_device}: float64 runs on the CPU only, in every build",
        ),
        _beside_q("k"),
        _beside_q("v"),
        _beside_q("g"),
        _beside_q("beta"),
        _beside_q("A_log", optional=True),
        _beside_q("dt_bias", optional=True),
        _beside_q("initial_state", optional=True),
        Rule(
            "cu_seqlens",
            ValueError,
            lambda x, c: x.device == c.q_device or x.device.type == "cpu",
            lambda x, c: f"is on {x.device}, must be on {c.q_device} like q, or on the CPU",
            optional=True,
        ),
        Rule(
            "cu_seqlens_cpu",
            ValueError,
            lambda x, c: x.device.type == "cpu" or c.q_place == "meta",
            lambda x, c: f"is on {x.device}, must be on the CPU",
            optional=True,
        ),
    )


# ---- shapes ----

_TRANSPOSE = "; tensors are [B, T, heads, size]: head-first ones need .transpose(1, 2)"


def _came(x: torch.Tensor) -> str:
    return f"has shape {list(x.shape)}"


def _per_token(argument: str) -> Rule:
    return Rule(
        argument,
        ValueError,
        lambda x, c: x.shape == c.v_shape[:3],
        lambda x, c: f"{_came(x)}, must be [B, T, HV] = {list(c.v_shape[:3])} like v{_TRANSPOSE}",
    )


def _per_head(argument: str) -> Rule:
    return Rule(
        argument,
        ValueError,
        lambda x, c: x.ndim == 1 and x.shape[0] == c.v_shape[2],
        lambda x, c: f"{_came(x)}, must be [HV] = [{c.v_shape[2]}]",
        optional=True,
    )


def _offsets(
    holds: Callable[[Any, Call], bool], says: Callable[[Any, Call], str], argument: str = "cu_seqlens"
) -> Rule:
    return Rule(argument, ValueError, holds, says, optional=True)


def _state_shape(c: Call) -> tuple[Any, ...]:
    rows = c.q_shape[0] if c.cu_seqlens is None else c.cu_seqlens.shape[0] - 1
    _, _, heads, value_size = c.v_shape
    key_size = c.q_shape[3]
    return (rows, heads, value_size, key_size) if c.state_v_first else (rows, heads, key_size, value_size)


def _shapes() -> tuple[Rule, ...]:
    return (
        Rule(
            "q",
            ValueError,
            lambda x, c: len(c.q_shape) == 4 and c.q_shape[2] >= 1,
            lambda x, c: f"{_came(x)}, must be [B, T, H, K] with H at least 1",
        ),
        Rule(
            "k",
            ValueError,
            lambda x, c: x.shape == c.q_shape,
            lambda x, c: f"{_came(x)}, must be [B, T, H, K] = {list(c.q_shape)} like q",
        ),
        Rule(
            "v",
            ValueError,
            lambda x, c: len(c.v_shape) == 4 and c.v_shape[:2] == c.q_shape[:2],
            lambda x, c: f"{_came(x)}, must be [B, T, HV, V] with [B, T] = {list(c.q_shape[:2])} like q{_TRANSPOSE}",
        ),
        Rule(
            "q",
            ValueError,
            lambda x, c: 1 <= c.q_shape[3] <= MAX_HEAD_SIZE,
            lambda x, c: f"{_came(x)}: K = {c.q_shape[3]}, must be 1 to {MAX_HEAD_SIZE}",
        ),
        Rule(
            "v",
            ValueError,
            lambda x, c: c.v_shape[2] >= 1 and c.v_shape[2] % c.q_shape[2] == 0,
            lambda x, c: (
                f"{_came(x)}: HV = {c.v_shape[2]}, must be a positive multiple of H = {c.q_shape[2]}{_TRANSPOSE}"
            ),
        ),
        Rule(
            "v",
            ValueError,
            lambda x, c: 1 <= c.v_shape[3] <= MAX_HEAD_SIZE,
            lambda x, c: f"{_came(x)}: V = {c.v_shape[3]}, must be 1 to {MAX_HEAD_SIZE}",
        ),
        _per_token("g"),
        _per_token("beta"),
        _per_head("A_log"),
        _per_head("dt_bias"),
        _offsets(
            lambda x, c: x.ndim == 1 and x.shape[0] >= 1, lambda x, c: f"{_came(x)}, must be [N + 1], N at least 0"
        ),
        _offsets(
            lambda x, c: c.q_shape[0] == 1,
            lambda x, c: (
                f"is given with B = {c.q_shape[0]} (q {_came(c.q)}), but packed sequences lie along T with B = 1"
            ),
        ),
        _offsets(
            lambda x, c: c.cu_seqlens is not None,
            lambda x, c: f"{_came(x)}, but cu_seqlens is None: it is the host's copy of cu_seqlens, give both",
            "cu_seqlens_cpu",
        ),
        _offsets(
            lambda x, c: x.shape == c.cu_seqlens.shape,
            lambda x, c: f"{_came(x)}, must be {list(c.cu_seqlens.shape)} like cu_seqlens",
            "cu_seqlens_cpu",
        ),
        Rule(
            "initial_state",
            ValueError,
            lambda x, c: tuple(x.shape) == _state_shape(c),
            lambda x, c: (
                f"{_came(x)}, must be {'[N, HV, V, K]' if c.state_v_first else '[N, HV, K, V]'} = "
                f"{list(_state_shape(c))} with state_v_first={c.state_v_first}"
            ),
            optional=True,
        ),
    )


# ---- options ----


def _only_with_gate(argument: str) -> Rule:
    return Rule(
        argument,
        ValueError,
        lambda x, c: c.use_gate_in_kernel,
        lambda x, c: f"{_came(x)}, but must be None unless use_gate_in_kernel=True",
        optional=True,
    )


def _options() -> tuple[Rule, ...]:
    return (
        # By comparison: torch.compile traces no math.isfinite of a number that it holds as a symbol.
        Rule("scale", ValueError, lambda x, c: -math.inf < x < math.inf, lambda x, c: f"is {x}, must be finite", True),
        Rule(
            "chunk_size",
            ValueError,
            lambda x, c: x in CHUNK_SIZES,
            lambda x, c: f"is {x}, must be one of {CHUNK_SIZES}",
        ),
        Rule(
            "cp_context",
            NotImplementedError,
            lambda x, c: x is None,
            lambda x, c: f"{_describe(x)}, must be None: no build has context parallelism ({BUILD})",
        ),
        Rule(
            "allow_neg_eigval",
            ValueError,
            lambda x, c: not x or c.use_beta_sigmoid_in_kernel,
            lambda x, c: f"is {x}, but it doubles the in-kernel sigmoid and needs use_beta_sigmoid_in_kernel=True",
        ),
        _only_with_gate("A_log"),
        _only_with_gate("dt_bias"),
        Rule(
            "A_log",
            ValueError,
            lambda x, c: x is not None or not c.use_gate_in_kernel,
            lambda x, c: f"is {x}, must be a tensor [HV] with use_gate_in_kernel=True",
        ),
        Rule(
            "plan",
            ValueError,
            lambda x, c: x is None or c.q_place == "cuda",
            lambda x, c: f"is {x!r}, must be None: with q on {c.q_device} there are no choices to pin, only on a GPU",
        ),
    )


def _rows() -> tuple[tuple[int, bool, Callable[[Any, Call], bool], Rule], ...]:
    rules = (*_kinds(), *_dtypes(), *_places(), *_shapes(), *_options())
    return tuple([(Call._fields.index(rule.argument), rule.optional, rule.holds, rule) for rule in rules])


_ROWS = _rows()
RULES = tuple(row[3] for row in _ROWS)
