"""The gated delta rule as its definition reads: one token after another, in float64, differentiated by autograd.

Per value head hv, with key head hv // (HV // H) and a state S [K, V]:

    S <- exp(g_t) S;   r_t = beta_t (v_t - S^T k_t);   S <- S + k_t r_t^T;   o_t = scale * S^T q_t

Nothing here is chunked, fused or rewritten, so that it can be checked by reading. Every special value is masked by
selection on a safe operand: autograd then returns exact zeros where a product with zero would return NaN.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

L2NORM_EPS = 1e-6


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """x * rsqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)


def log_decay(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    """-exp(A_log) * softplus(g + dt_bias), [B, T, HV], with the limits of infinite operands and zero gradient there.

    A_log = -inf or g = -inf give 0 (no decay); an infinite product of what remains gives -inf (a full reset).
    """
    x = g if dt_bias is None else g + dt_bias
    A_log = A_log.expand_as(x)
    # softplus is linear to the last bit of a float64 from 40 on (log1p(exp(-40)) = 4e-18).
    softplus = F.softplus(torch.where(x.isinf(), 0.0, x), threshold=40.0)
    # exp overflows to inf above log(max): a reset, like A_log = inf.
    overflow = A_log > math.log(torch.finfo(x.dtype).max)
    rate = torch.where(A_log.isinf() | overflow, 0.0, A_log).exp()
    none = (A_log == -math.inf) | (x == -math.inf)
    reset = (overflow | (x == math.inf)) & ~none
    return torch.where(none, 0.0, torch.where(reset, -math.inf, -rate * softplus))


def _sequence(q, k, v, g, beta, state):
    """One dense batch: q, k [B, T, HV, K], v [B, T, HV, V], g, beta [B, T, HV], state [B, HV, K, V]."""
    reset = g == -math.inf
    has_reset = bool(reset.any())
    decay = torch.where(reset, 0.0, g).exp()
    out = []
    for t in range(q.shape[1]):
        decayed = state * decay[:, t, :, None, None]
        if has_reset:
            decayed = torch.where(reset[:, t, :, None, None], 0.0, decayed)
        read = (k[:, t, :, None, :] @ decayed).squeeze(-2)
        r = beta[:, t, :, None] * (v[:, t] - read)
        state = decayed + k[:, t, :, :, None] * r[:, :, None, :]
        out.append((q[:, t, :, None, :] @ state).squeeze(-2))
    o = torch.stack(out, 1) if out else v.new_zeros(v.shape)
    return o, state


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator's function of its arguments, with the operator's names; returns (o, final_state) in `dtype`.

    q, k [B, T, H, K]; v [B, T, HV, V]; g, beta [B, T, HV]; initial_state [N, HV, K, V], or [N, HV, V, K] with
    `state_v_first`; cu_seqlens [N + 1] with B = 1. Differentiable with respect to every floating argument.
    """
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    B, _, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if use_gate_in_kernel:
        g = log_decay(g, A_log.to(dtype), None if dt_bias is None else dt_bias.to(dtype))
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    q = q * (K**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    if initial_state is None:
        state = q.new_zeros(N, HV, K, V)
    else:
        state = initial_state.to(dtype)
        if state_v_first:
            state = state.transpose(-1, -2)

    if cu_seqlens is None:
        o, state = _sequence(q, k, v, g, beta, state)
    else:
        outs, states = [], []
        bounds = [int(x) for x in cu_seqlens]
        for n, (start, stop) in enumerate(zip(bounds, bounds[1:])):
            part, last = _sequence(*(x[:, start:stop] for x in (q, k, v, g, beta)), state[n : n + 1])
            outs.append(part)
            states.append(last)
        o, state = torch.cat(outs, 1), torch.cat(states, 0)
    return o, state.transpose(-1, -2) if state_v_first else state
