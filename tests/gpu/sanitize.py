"""Every program of the chain over small shapes, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python3 gpu/sanitize.py

Without the caching allocator each tensor is an allocation of its own, so that an overrun leaves it.
"""

from __future__ import annotations

import torch

from cake_gdn_det import chunk_gated_delta_rule


def step(B, T, H, HV, K, V, dtype, offsets=None, save_state=None, with_state=True, plan=None):
    """One forward and backward with every in-kernel option; all gradients must be finite."""

    def leaf(*shape, dtype=torch.float32):
        return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()

    q, k, v = leaf(B, T, H, K, dtype=dtype), leaf(B, T, H, K, dtype=dtype), leaf(B, T, HV, V, dtype=dtype)
    g, beta, A_log, dt_bias = leaf(B, T, HV), leaf(B, T, HV), leaf(HV), leaf(HV)
    N = B if offsets is None else len(offsets) - 1
    state = leaf(N, HV, K, V) if with_state else None
    o, final_state = chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=None if offsets is None else torch.tensor(offsets, device="cuda"),
        save_state=save_state,
        plan=plan,
    )
    leaves = [x for x in (q, k, v, g, beta, A_log, dt_bias, state) if x is not None]
    grads = torch.autograd.grad([o, final_state], leaves, [torch.randn_like(o), torch.randn_like(final_state)])
    assert all(x.isfinite().all() for x in grads)


if __name__ == "__main__":
    torch.manual_seed(0)
    step(1, 130, 1, 2, 128, 128, torch.bfloat16)
    step(1, 200, 1, 2, 60, 100, torch.float16, offsets=[0, 1, 1, 70, 200], save_state=False)
    step(1, 150, 1, 2, 128, 40, torch.bfloat16, offsets=[0, 64, 150, 150], with_state=False)
    step(1, 330, 1, 2, 128, 128, torch.bfloat16, plan="segment=2")
    step(1, 400, 1, 2, 60, 100, torch.float16, offsets=[0, 1, 1, 200, 400], save_state=False, plan="segment=1")
    step(1, 70, 2, 6, 128, 128, torch.bfloat16, offsets=[0, 65, 70])
    step(2, 66, 1, 9, 60, 72, torch.bfloat16)  # a group too large for the fused tail
    print("done")
