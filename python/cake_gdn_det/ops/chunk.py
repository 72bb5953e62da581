"""chunk_gated_delta_rule: the public function, and its place in autograd."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import _C
from .call import Call, device_of, shape_of
from .checks import check
from .torch_ops import INPUTS, backward, forward, named


class _Once(torch.autograd.Function):
    """The backward while autograd records a graph of it (create_graph=True): that graph can only raise.

    torch's once_differentiable is not enough. It cuts the graph between the gradients and the inputs, so that
    torch.autograd.grad(loss + penalty(gradients), inputs) would find no path through the penalty and leave it out.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(backward(*arguments))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError("chunk_gated_delta_rule is differentiable once: double backward is not implemented")


class _ChunkGatedDeltaRule(torch.autograd.Function):
    """Autograd over the two operators.

    It has neither setup_context, vmap nor jvp: torch.func transforms and forward-mode differentiation raise.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        cu_seqlens_cpu: Tensor | None,
        scale: float,
        flags: int,
        output_final_state: bool,
        save: bool,
        plan: str | None,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
        results = forward(*inputs, scale, flags, output_final_state, save, plan)
        o, final_state, h, A = named(results, output_final_state, save)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, h, A)
        ctx.scale = scale
        ctx.flags = flags
        ctx.plan = plan
        return o, final_state

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[: len(INPUTS)]
        # A compiled graph needs no _Once: what runs it refuses double backward by itself.
        call = _Once.apply if torch.is_grad_enabled() and not torch.compiler.is_compiling() else backward
        gradients = call(d_o, dht, *ctx.saved_tensors, ctx.scale, ctx.flags, needs, ctx.plan)
        wanted = iter(gradients)
        return (*[next(wanted) if need else None for need in needs], *[None] * 7)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
    batch_invariant: bool = False,
    save_state: bool | None = None,
    plan: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet over whole sequences, in chunks, deterministic to the bit; differentiable once.

    For each sequence and value head hv, with key head h = hv // (HV // H), a state S [K, V] that starts at
    `initial_state` (or zero) is carried over the tokens t:

        S   <- exp(g_t) S                   decay
        r_t  = beta_t (v_t - S^T k_t)       what the state has still to learn about k_t
        S   <- S + k_t r_t^T                delta rule
        o_t  = scale * S^T q_t              output

    The recurrence is equation 10 of Gated Delta Networks (arXiv:2412.06464); it is evaluated in chunks of 64 tokens
    with the WY form of the products of Householder-like matrices (arXiv:2406.06484), in fp32 (fp64 for fp64 inputs).

    Args:
        q: Queries [B, T, H, K]; bf16 or fp16, on the CPU also fp32 or fp64. K is 1 to 128 on a GPU, 1 to 512 on the
            CPU. T = 0 is legal.
        k: Keys, shape, dtype and device of q.
        v: Values [B, T, HV, V], dtype of q; HV is a positive multiple of H, V is 1 to 128 or
            512 like K.
        g: Log decays [B, T, HV] (natural logarithm, no unit), usually <= 0, any real; -inf is a full reset, with zero
            gradient through the gate. With `use_gate_in_kernel` the gate's input. Any of the four dtypes.
        beta: Step sizes [B, T, HV]; with `use_beta_sigmoid_in_kernel` their logits. Any of the four dtypes.
        scale: Factor of the output, a finite number. Default: K**-0.5.
        initial_state: States before the first token, [N, HV, K, V] ([N, HV, V, K] with `state_v_first`), with N = B,
            or the number of packed sequences. Any of the four dtypes. Default: zeros.
        output_final_state: Return the states after the last token.
        use_qk_l2norm_in_kernel: Normalise every q and k vector: x * rsqrt(sum(x^2) + 1e-6).
        use_beta_sigmoid_in_kernel: Use sigmoid(beta) as step size.
        allow_neg_eigval: Use 2 * sigmoid(beta); needs `use_beta_sigmoid_in_kernel`.
        state_v_first: States given and returned are [N, HV, V, K].
        cu_seqlens: Offsets of packed sequences [N + 1], int32 or int64: sequence n is tokens cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive) of the one row, B = 1. They start at 0, never decrease, and end at T; empty
            sequences are legal: they return their initial state and pass its gradient through. On q's device or on
            the CPU. Offsets on the CPU are checked, offsets on a GPU are never copied back.
        cu_seqlens_cpu: The same offsets on the CPU, for checks that need no synchronisation. Needs `cu_seqlens`.
        chunk_indices: Accepted for compatibility with flash-linear-attention, not needed.
        cp_context: Must be None: context parallelism does not exist yet.
        use_gate_in_kernel: The log decay is -exp(A_log) * softplus(g + dt_bias).
        A_log: [HV], any of the four dtypes; required with `use_gate_in_kernel`, refused without. May be +-inf.
        dt_bias: [HV], any of the four dtypes; optional with `use_gate_in_kernel`, refused without.
        chunk_size: 16, 32 or 64, accepted for compatibility: the internal tile does not depend on it.
        backend: "auto" (where the tensors are), "cpu" or "cuda"; must agree with the tensors' device.
        batch_invariant: A sequence's bits depend on that sequence alone, however it is batched or packed. Always so on
            the CPU. On a GPU long sequences are otherwise cut into segments of a length that depends on the batch.
        save_state: Keep the chunk states, [B * ((T - 1) // 64), HV, K, V], for the backward (True), recompute them
            there (False), or let the backend decide (None: they are kept). In fp32 (fp64 for fp64 inputs) on the CPU,
            in q's dtype on a GPU. They are kept only while a gradient is needed. The bits are the same.
        plan: Pins choices of the GPU's planner, "key=value,key=value"; None: it chooses by shapes and device.
            "segment=32": long sequences are cut into segments of 32 chunks of 64 tokens, which are scanned at once;
            "segment=whole": they are not cut, as fp16 inputs are not by themselves (cut, they can overflow where gates
            grow or beta |k|^2 exceeds 2). "tail=fused": the backward ends with one program, for up to 8 value heads a
            key head; "tail=separate": with three. The CPU has no choices: must be None there.

    Returns:
        o: [B, T, HV, V], contiguous, dtype of q.
        final_state: None, or with `output_final_state` a new tensor [N, HV, K, V] ([N, HV, V, K] with
            `state_v_first`), fp32 (fp64 for fp64 inputs).

    Gradients reach q, k, v, g, beta, initial_state, A_log and dt_bias, each in its input's dtype. Inputs may have any
    strides and are never written.

    Determinism: the same inputs, options, machine type and version of the package give the same bits in every run,
    process and thread, with any number of threads, with `save_state` on or off and with or without gradients. Bits
    may differ between CPU instruction sets.

    Raises:
        TypeError: An argument of the wrong kind, or a tensor of the wrong dtype.
        ValueError: A wrong shape, value, device or combination of options; wrong offsets on the host.
        NotImplementedError: A valid call that this build or device cannot run; the message says which can.
        RuntimeError: Double backward, forward-mode differentiation, or a torch.func transform.

    Every check names the argument, what came and what is allowed, and precedes any work.
    """
    check(
        Call(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            state_v_first,
            cu_seqlens,
            cu_seqlens_cpu,
            chunk_indices,
            cp_context,
            use_gate_in_kernel,
            A_log,
            dt_bias,
            chunk_size,
            backend,
            batch_invariant,
            save_state,
            plan,
            shape_of(q),
            shape_of(v),
            *device_of(q),
        )
    )
    flags = (
        (_C.QK_L2NORM if use_qk_l2norm_in_kernel else 0)
        | (_C.GATE if use_gate_in_kernel else 0)
        | (_C.BETA_SIGMOID if use_beta_sigmoid_in_kernel else 0)
        | (_C.NEG_EIGVAL if allow_neg_eigval else 0)
        | (_C.STATE_V_FIRST if state_v_first else 0)
        | (_C.BATCH_INVARIANT if batch_invariant else 0)
    )
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    tracked = torch.is_grad_enabled() and True in [x is not None and x.requires_grad for x in inputs]
    result: tuple[Tensor, Tensor | None] = _ChunkGatedDeltaRule.apply(
        *inputs,
        cu_seqlens,
        cu_seqlens_cpu,
        float(q.shape[3] ** -0.5 if scale is None else scale),
        flags,
        output_final_state,
        tracked and save_state is not False,
        plan,
    )
    return result


chunk_gated_delta_rule_det = chunk_gated_delta_rule
"""The same function, under the name of this package."""
