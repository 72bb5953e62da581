"""The rules that are measured: this package's operator under its plans, and others where they are installed.

All of them normalise q and k themselves, start from a zero state and return no final state.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .shapes import Inputs, Shape

Call = Callable[[Inputs], Tensor]  # -> o
OURS = "cake_gdn_det"


@dataclass
class Rule:
    """A rule as it is measured.

    Of several `forms` the fastest stands for the rule. `tensors` is the most that a training step holds beside its
    inputs, in bf16 tensors of the shape of v, to tell what fits a device; `longest` the most chunks in sequence that a
    rule is asked for; `recomputing` the same rule saving no states. `absence` says why there is nothing to measure.
    """

    name: str
    forms: dict[str, Call] = field(default_factory=dict)
    version: str = ""
    tensors: float = 0
    longest: int | None = None
    recomputing: Call | None = None
    absence: str = ""

    def forms_for(self, shape: Shape) -> dict[str, Call]:
        """With as many key heads as value heads there is nothing to group or repeat."""
        return dict([next(iter(self.forms.items()))]) if shape.H == shape.HV else self.forms

    def refuses(self, shape: Shape) -> str:
        """Why the rule is not asked for this shape."""
        if self.absence or self.longest is None:
            return self.absence
        steps = sum(-(-n // 64) for n in (shape.documents or (shape.T,)))
        return f"left out: {steps} chunks one after the other, above {self.longest}" if steps > self.longest else ""


def load(peers: Iterable[str], plans: Iterable[str] = (), batch_invariant: bool = False) -> list[Rule]:
    """The operator, which everything is compared with, its variants, and the named peers, installed or not."""
    rules = [_ours(OURS)]
    rules += [_ours(f"plan={plan}", plan=plan) for plan in plans]
    if batch_invariant:
        rules.append(_ours("batch_invariant", batch_invariant=True))
    for peer in peers:
        name, make = PEERS[peer]
        try:
            rules.append(make(name))
        except Exception as error:  # a broken installation is as good as none, and fails in any way
            rules.append(Rule(name, absence=f"not usable: {describe(error)}"))
    return rules


def describe(error: BaseException) -> str:
    """An error in one short line."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: {lines[0]}"
    return text if len(text) <= 200 else text[:199] + "…"


def _version(module: ModuleType) -> str:
    return str(getattr(module, "__version__", ""))


def _first(rule: Callable[..., tuple[Tensor, Any]], inputs: Inputs, **options: Any) -> Tensor:
    return rule(*inputs.leaves, use_qk_l2norm_in_kernel=True, **options)[0]


def _repeated(q: Tensor, k: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """q and k with as many heads as v: what rules without value-head groups are given."""
    group = shape.HV // shape.H
    return (q, k) if group == 1 else (q.repeat_interleave(group, 2), k.repeat_interleave(group, 2))


def _ours(name: str, **options: Any) -> Rule:
    import cake_gdn_det

    def call(inputs: Inputs, **more: Any) -> Tensor:
        return _first(cake_gdn_det.chunk_gated_delta_rule, inputs, cu_seqlens=inputs.cu_seqlens, **options, **more)

    version = "" if options else cake_gdn_det.__version__
    return Rule(name, {"": call}, version, tensors=13, recomputing=partial(call, save_state=False))


def _fla(name: str) -> Rule:
    os.environ["FLA_FLASH_QLA"] = "0"  # FLA hands the call to FlashQLA where both are installed: that is another peer
    fla = importlib.import_module("fla")
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def groups(inputs: Inputs) -> Tensor:
        return _first(rule, inputs, cu_seqlens=inputs.cu_seqlens)

    def repeated(inputs: Inputs) -> Tensor:
        q, k, v, g, beta = inputs.leaves
        q, k = _repeated(q, k, inputs.shape)
        return rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=inputs.cu_seqlens)[0]

    return Rule(name, {"groups": groups, "q, k repeated": repeated}, _version(fla), tensors=17)


def _flash_qla(name: str) -> Rule:
    module = importlib.import_module("flash_qla")

    def call(inputs: Inputs) -> Tensor:
        return _first(module.chunk_gated_delta_rule, inputs, cu_seqlens=inputs.cu_seqlens_32)

    return Rule(name, {"": call}, _version(module), tensors=9)


def _pytorch(name: str) -> Rule:
    transformers = importlib.import_module("transformers")
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    # Newer versions wrap it, to run a compiled kernel instead where they find one.
    rule = inspect.unwrap(module.torch_chunk_gated_delta_rule)

    def dense(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    def call(inputs: Inputs) -> Tensor:
        q, k, v, g, beta = inputs.leaves
        tensors = (*_repeated(q, k, inputs.shape), v, g, beta)
        documents = inputs.shape.documents
        if not documents:
            return dense(*tensors)
        # It knows no packed sequences: one call for each.
        return torch.cat([dense(*parts) for parts in zip(*(x.split(documents, 1) for x in tensors))], 1)

    return Rule(name, {"": call}, f"transformers {_version(transformers)}", tensors=100, longest=256)


PEERS: dict[str, tuple[str, Callable[[str], Rule]]] = {
    "fla": ("FLA", _fla),
    "flashqla": ("FlashQLA", _flash_qla),
    "pytorch": ("PyTorch", _pytorch),
}
