"""One call of chunk_gated_delta_rule, as the table of checks reads it."""

from typing import Any, NamedTuple

import torch


class Call(NamedTuple):
    """The arguments of one call, and what several rules read of q and v (None where they are no tensors)."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    scale: Any
    initial_state: Any
    output_final_state: Any
    use_qk_l2norm_in_kernel: Any
    use_beta_sigmoid_in_kernel: Any
    allow_neg_eigval: Any
    state_v_first: Any
    cu_seqlens: Any
    cu_seqlens_cpu: Any
    chunk_indices: Any
    cp_context: Any
    use_gate_in_kernel: Any
    A_log: Any
    dt_bias: Any
    chunk_size: Any
    backend: Any
    batch_invariant: Any
    save_state: Any
    plan: Any
    q_shape: Any
    v_shape: Any
    q_device: Any
    q_place: Any  # the type of q_device


def shape_of(x: Any) -> Any:
    """The shape of a dense tensor as a tuple (quicker to slice); None for anything else: nested tensors have none."""
    return tuple(x.shape) if isinstance(x, torch.Tensor) and not x.is_nested else None


def device_of(x: Any) -> tuple[Any, Any]:
    """A tensor's device and the device's type, which is a new string at every access; None, None for anything else."""
    return (x.device, x.device.type) if isinstance(x, torch.Tensor) else (None, None)
