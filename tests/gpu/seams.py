"""The states at the seams between segments as the pre-scans and the stitch make them, with their roundings in float64.

    X' = S + M X    S: the segment from a zero state, M: from the identity without its own values

in the order of the chunks with chain_model.advance, and against it for gradients with chain_model.retreat. Where the
segment forgets X, only those of its chunks are walked over that remember one another, and M is left out.
"""

from __future__ import annotations

import torch

FORGOTTEN = -25.0  # log of what is left of a state that is forgotten


def bound(k: torch.Tensor, step: torch.Tensor, cum_last: torch.Tensor, reset: torch.Tensor) -> torch.Tensor:
    """Log of the most that a chunk can keep of a state's norm, [HV]: k [HV, n, K], step and reset [HV, n]."""
    growth = (1 - step * k.square().sum(-1)).abs().clamp(min=1.0).log().sum(-1)
    return torch.where(reset.any(-1), -torch.inf, cum_last + growth)


def reach(bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[chunks, HV], the chunk nearest to the seam first -> how many chunks are walked over, and who forgets; [HV]."""
    total, count = torch.zeros_like(bounds[0]), torch.full(bounds[0].shape, len(bounds))
    forgets = torch.zeros_like(bounds[0], dtype=torch.bool)
    for i, b in enumerate(bounds):
        total = total + b
        now = (total < FORGOTTEN) & ~forgets
        count[now.cpu()] = i + 1
        forgets = forgets | now
    return count.to(bounds.device), forgets


def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = x.to(torch.bfloat16).double()
    return high, (x - high).to(torch.bfloat16).double()


def stitched(S: torch.Tensor, M: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
    (m_high, m_low), (high, low) = parts(M), parts(X)
    return (S + m_low @ high + m_high @ low + m_high @ high).float().double()


def prescan(kept: list[dict], step, E16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """S, M and who forgets, of a segment's chunks in the order in which `step` takes them."""
    bounds = []
    for x in kept:
        cum_last = x["D"].clamp(min=1e-300).log()
        bounds.append(bound(x["k"], x["step"], cum_last, x["reset"]))
    count, forgets = reach(torch.stack(bounds).flip(0))
    k, v = kept[0]["k"], kept[0]["v"]
    S = torch.zeros(k.shape[0], k.shape[2], v.shape[2], dtype=k.dtype, device=k.device)
    M = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(k.shape[0], -1, -1)
    for i, x in enumerate(kept):
        walked = (i >= len(kept) - count)[:, None, None]
        S = torch.where(walked, step(x, S, E16)[2], 0.0)
        M = step(x, M, E16, transition=True)[2]
    return S.float().double(), M.float().double(), forgets


def starts(chunks, kept, outer: torch.Tensor, segment: int, step, E16) -> dict[int, torch.Tensor]:
    """The state that each segment's scan starts from, by the index of the chunk that it starts with; those that start
    from `outer` [N, HV, K, V], the initial states or the gradients of the final ones, are left out."""
    backward = step.__name__ == "retreat"
    out = {}
    for n in range(len(outer)):
        mine = [i for i, c in enumerate(chunks) if c.sequence == n]
        cut = [mine[at : at + segment] for at in range(0, len(mine), segment)]
        if backward:
            cut = [part[::-1] for part in cut[::-1]]
        X = outer[n]
        for part, following in zip(cut, cut[1:]):
            S, M, forgets = prescan([kept[i] for i in part], step, E16)
            X = torch.where(forgets[:, None, None], S, stitched(S, M, X))
            out[following[0]] = X
    return out
