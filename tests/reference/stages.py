"""Closed forms of every stage of the chunked algorithm, which chain to the whole forward and backward.

A program is tested against the stage that it implements, on inputs of the test's choice, and in the chain. All
tensors are token-major without a batch dimension: dense rows are laid end to end and described by `tables`, as a packed
batch is. Per chunk and value head, with g the in-chunk cumulative log decay and

    G_ij = exp(g_i - g_j)     for j <= i, 0 if a reset lies in (j, i]
    E_i  = exp(g_i)           0 if a reset lies at or before i
    R_j  = exp(g_last - g_j)  0 if a reset lies after j
    D    = exp(g_last)        0 if the chunk has a reset

A reset is a log decay whose exponential is zero in the computing dtype, -inf or finite: it restarts the cumulative sum
(it counts as 0 itself) and `last` keeps each token's latest reset, -1 for none. Two tokens decay into each other iff
their `last` is the same. Everything runs in the dtype of what comes in: float64 is the
reference, float32 the yardstick of what this algorithm can lose to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .oracle import L2NORM_EPS, log_decay

CHUNK = 64


@dataclass(frozen=True)
class Chunk:
    """One chunk: its sequence, the range of its tokens, and whether it is the first and the last of its sequence."""

    sequence: int
    start: int
    stop: int
    first: bool
    final: bool

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.stop)


def tables(cu_seqlens: list[int], chunk: int = CHUNK) -> list[Chunk]:
    """cu_seqlens [N + 1] -> the chunks of all sequences, in order; an empty sequence has none."""
    out = []
    for n, (start, stop) in enumerate(zip(cu_seqlens, cu_seqlens[1:])):
        for t in range(start, stop, chunk):
            out.append(Chunk(n, t, min(t + chunk, stop), t == start, t + chunk >= stop))
    return out


# --- prep ------------------------------------------------------------------------------------------------------------


def l2norm_rstd(x: torch.Tensor) -> torch.Tensor:
    """[T, H, K] -> [T, H]: rsqrt(sum(x^2) + 1e-6)."""
    return torch.rsqrt((x * x).sum(-1) + L2NORM_EPS)


def gate_cumsum(chunks: list[Chunk], decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay [T, HV] -> in-chunk cumulative sum g [T, HV], in-chunk index of the latest reset `last` [T, HV]."""
    g, last = torch.empty_like(decay), torch.full(decay.shape, -1, dtype=torch.int64)
    for c in chunks:
        running, latest = decay.new_zeros(decay.shape[1]), torch.full((decay.shape[1],), -1)
        for i, t in enumerate(range(c.start, c.stop)):
            reset = decay[t].exp() == 0
            running = torch.where(reset, 0.0, running + torch.where(reset, 0.0, decay[t]))
            latest = torch.where(reset, i, latest)
            g[t], last[t] = running, latest
    return g, last


def beta_activation(beta: torch.Tensor, sigmoid: bool, neg_eigval: bool) -> torch.Tensor:
    """[T, HV] -> the step sizes."""
    return beta.sigmoid() * (2.0 if neg_eigval else 1.0) if sigmoid else beta


def _gates(c: Chunk, g: torch.Tensor, last: torch.Tensor):
    """The chunk's decays, heads first: G [HV, n, n] (lower triangle), E [HV, n], R [HV, n], D [HV]."""
    g, last = g[c.tokens].T, last[c.tokens].T
    n = g.shape[1]
    seen = (last[:, :, None] == last[:, None, :]) & torch.ones(n, n, dtype=torch.bool).tril()
    G = torch.where(seen, torch.where(seen, g[:, :, None] - g[:, None, :], 0.0).exp(), 0.0)
    E = torch.where(last < 0, torch.where(last < 0, g, 0.0).exp(), 0.0)
    return G, E, G[:, -1], E[:, -1]


def _heads(c: Chunk, *xs: torch.Tensor):
    """The chunk's rows of token-major [T, HV, D] tensors, heads first: [HV, n, D]."""
    return [x[c.tokens].transpose(0, 1) for x in xs]


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


# --- forward ---------------------------------------------------------------------------------------------------------


def wy(chunks, k, v, g, last, beta):
    """WY representation: A [T, HV, 64] (rows of (I + tril(beta_i G_ij k_i.k_j, -1))^-1, zero past the chunk's length),
    w = A (beta E k) [T, HV, K], u = A (beta v) [T, HV, V]; k [T, HV, K] and v [T, HV, V]."""
    A_all = k.new_zeros(*k.shape[:2], CHUNK)
    w_all, u_all = torch.empty_like(k), torch.empty_like(v)
    for c in chunks:
        kc, vc = _heads(c, k, v)
        b = beta[c.tokens].T[..., None]
        G, E, _, _ = _gates(c, g, last)
        n = c.stop - c.start
        L = (b * (kc @ kc.mT) * G).tril(-1)
        eye = torch.eye(n, dtype=k.dtype).expand_as(L)
        A = torch.linalg.solve_triangular(L + eye, eye, upper=False, unitriangular=True)
        A_all[c.tokens, :, :n] = _rows(A)
        w_all[c.tokens] = _rows(A @ (b * E[..., None] * kc))
        u_all[c.tokens] = _rows(A @ (b * vc))
    return A_all, w_all, u_all


def fwd_scan(chunks, k, w, u, g, last, h0):
    """States at chunk starts h [chunks, HV, K, V], v_new = u - w h [T, HV, V], final states [N, HV, K, V]."""
    state = h0.clone()
    h = h0.new_empty(len(chunks), *h0.shape[1:])
    v_new = torch.empty_like(u)
    for i, c in enumerate(chunks):
        kc, wc, uc = _heads(c, k, w, u)
        _, _, R, D = _gates(c, g, last)
        h[i] = state[c.sequence]
        new = uc - wc @ h[i]
        v_new[c.tokens] = _rows(new)
        state[c.sequence] = D[:, None, None] * h[i] + (R[..., None] * kc).mT @ new
    return h, v_new, state


def output(chunks, q, k, v_new, h, g, last, scale):
    """o = scale (E q h + tril(q k^T o G) v_new) [T, HV, V]."""
    o = torch.empty_like(v_new)
    for i, c in enumerate(chunks):
        qc, kc, new = _heads(c, q, k, v_new)
        G, E, _, _ = _gates(c, g, last)
        o[c.tokens] = _rows(scale * ((E[..., None] * qc) @ h[i] + ((qc @ kc.mT) * G) @ new))
    return o


# --- backward --------------------------------------------------------------------------------------------------------


def dv_local(chunks, q, k, do, g, last, scale):
    """scale tril(q k^T o G)^T do [T, HV, V]: the part of v_new's gradient that stays in its chunk."""
    dv = torch.empty_like(do)
    for c in chunks:
        qc, kc, doc = _heads(c, q, k, do)
        G = _gates(c, g, last)[0]
        dv[c.tokens] = _rows(scale * ((qc @ kc.mT) * G).mT @ doc)
    return dv


def adjoint_scan(chunks, q, k, w, do, dv, g, last, dht, scale):
    """Gradients of the states at chunk ends dh [chunks, HV, K, V], dv_new = dv_local + R k dh [T, HV, V] and dh0
    [N, HV, K, V]; `dv` is dv_local."""
    state = dht.clone()
    dh = dht.new_empty(len(chunks), *dht.shape[1:])
    dv_new = torch.empty_like(dv)
    for i in reversed(range(len(chunks))):
        c = chunks[i]
        qc, kc, wc, doc, dvc = _heads(c, q, k, w, do, dv)
        _, E, R, D = _gates(c, g, last)
        dh[i] = state[c.sequence]
        new = dvc + (R[..., None] * kc) @ dh[i]
        dv_new[c.tokens] = _rows(new)
        state[c.sequence] = D[:, None, None] * dh[i] + scale * (E[..., None] * qc).mT @ doc - wc.mT @ new
    return dh, dv_new, state


def dqkwg(chunks, q, k, v_new, h, do, dh, dv_new, g, last, scale, cancelled: bool = False):
    """dq, dk [T, HV, K] per value head (without the WY part), dw = -dv_new h^T [T, HV, K] and the part dg [T, HV] of
    the gradient of g that comes from the output and from the state.

    In dg the diagonal of the score product and the last token's k.dk against the state cancel exactly and are left out;
    `cancelled` keeps them in, so that a test can show that they do.
    """
    dq, dk, dw, dg = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k), torch.empty_like(g)
    for i, c in enumerate(chunks):
        qc, kc, new, doc, dnew = _heads(c, q, k, v_new, do, dv_new)
        G, E, R, D = _gates(c, g, last)
        dS = scale * (doc @ new.mT) * G
        inter = scale * E[..., None] * (doc @ h[i].mT)
        carry = R[..., None] * (new @ dh[i].mT)
        dq[c.tokens] = _rows(inter + dS @ kc)
        dk[c.tokens] = _rows(carry + dS.mT @ qc)
        dw[c.tokens] = _rows(-dnew @ h[i].mT)
        P = dS * (qc @ kc.mT)
        kdk = (kc * carry).sum(-1)
        if not cancelled:
            P = P.tril(-1)
            kdk = torch.cat([kdk[:, :-1], kdk.new_zeros(kdk.shape[0], 1)], 1)
        part = (qc * inter).sum(-1) + P.sum(-1) - P.sum(-2) - kdk
        part[:, -1] += D * (h[i] * dh[i]).sum((-1, -2)) + kdk.sum(-1)
        dg[c.tokens] = part.T
    return dq, dk, dw, dg


def wy_backward(chunks, k, v, A, v_new, dw, du, g, last, beta):
    """Pullback of `wy`: dk part [T, HV, K], dv [T, HV, V], dbeta [T, HV], dg part [T, HV]; du is dv_new.

    The gradient of the strict triangle is dL = -tril(A^T du v_new^T, -1): with dw = -du h^T the two products of the
    inverse's pullback, (A^T dw) w^T + (A^T du) u^T, meet in A^T du (u - w h)^T.
    """
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dbeta, dg = torch.empty_like(beta), torch.empty_like(g)
    for c in chunks:
        kc, vc, new, dwc, duc = _heads(c, k, v, v_new, dw, du)
        b = beta[c.tokens].T[..., None]
        G, E, _, _ = _gates(c, g, last)
        E = E[..., None]
        Ac = _rows(A[c.tokens, :, : c.stop - c.start])
        X, Y = Ac.mT @ dwc, Ac.mT @ duc
        dL = -(Y @ new.mT).tril(-1)
        KK = kc @ kc.mT
        dbeta[c.tokens] = ((E * kc * X).sum(-1) + (vc * Y).sum(-1) + (dL * G * KK).sum(-1)).T
        M = b * dL * G
        dk[c.tokens] = _rows(b * E * X + M @ kc + M.mT @ kc)
        dv[c.tokens] = _rows(b * Y)
        P = M * KK
        dg[c.tokens] = ((b * E * kc * X).sum(-1) + P.sum(-1) - P.sum(-2)).T
    return dk, dv, dbeta, dg


def wy_backward_full(A, w, u, dw, du):
    """dL of one chunk by the textbook pullback of an inverse, for the proof of the shorter form: all [HV, n, .]."""
    return -((A.mT @ dw) @ w.mT + (A.mT @ du) @ u.mT).tril(-1)


# --- finalize --------------------------------------------------------------------------------------------------------


def group_sum(x: torch.Tensor, H: int) -> torch.Tensor:
    """[T, HV, K] -> [T, H, K]: sums over a key head's value heads, in head order."""
    x = x.unflatten(1, (H, -1))
    out = x[:, :, 0]
    for i in range(1, x.shape[2]):
        out = out + x[:, :, i]
    return out


def l2norm_backward(x: torch.Tensor, rstd: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Gradient of x from that of y = x * rstd: rstd (d - y (y.d)), all [T, H, K]."""
    y = x * rstd[..., None]
    return rstd[..., None] * (d - y * (y * d).sum(-1, keepdim=True))


def reverse_cumsum(chunks: list[Chunk], dg: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Gradient [T, HV] of the log decay from that of its in-chunk cumulative sum: the sum of dg over the chunk's tokens
    from t on that share t's latest reset; exactly zero at a reset."""
    out = torch.empty_like(dg)
    for c in chunks:
        running = dg.new_zeros(dg.shape[1])
        for i, t in reversed(list(enumerate(range(c.start, c.stop)))):
            running = running + dg[t]
            reset = last[t] == i
            out[t] = torch.where(reset, 0.0, running)
            running = torch.where(reset, 0.0, running)
    return out


def gate_backward(g, A_log, dt_bias, decay, d):
    """Gradients of the in-kernel gate: dg [T, HV], dA_log [HV], ddt_bias [HV] from d [T, HV] of the log decay."""
    x = g if dt_bias is None else g + dt_bias
    live = decay.isfinite() & ~A_log.expand_as(x).isinf() & ~x.isinf()
    rate = torch.where(A_log.isinf(), 0.0, A_log).exp()
    dx = torch.where(live, d * -torch.where(live, rate.expand_as(x), 0.0) * torch.where(live, x, 0.0).sigmoid(), 0.0)
    dA = torch.where(live, d * torch.where(live, decay, 0.0), 0.0)
    return dx, dA.sum(0), dx.sum(0)


def beta_backward(beta: torch.Tensor, d: torch.Tensor, sigmoid: bool, neg_eigval: bool) -> torch.Tensor:
    """Gradient [T, HV] of the raw step size."""
    if not sigmoid:
        return d
    s = beta.sigmoid()
    return d * s * (1 - s) * (2.0 if neg_eigval else 1.0)


# --- the chain -------------------------------------------------------------------------------------------------------


def chain(inputs: dict, do=None, dht=None, *, scale=None, l2norm=False, gate=False, sigmoid=False, neg_eigval=False):
    """The whole operator as a chain of the stages above.

    `inputs`: q, k [B, T, H, K], v [B, T, HV, V], g, beta [B, T, HV], and optionally initial_state [N, HV, K, V], A_log
    and dt_bias [HV], cu_seqlens [N + 1]. Returns every intermediate by its name, "o" [B, T, HV, V] and "final_state",
    and with `do` or `dht` the gradients "dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias" too.
    """
    B, T, H, K = inputs["q"].shape
    HV, V = inputs["v"].shape[2:]
    rep = HV // H
    cu = inputs.get("cu_seqlens")
    bounds = [b * T for b in range(B + 1)] if cu is None else [int(x) for x in cu]
    chunks = tables(bounds)
    scale = K**-0.5 if scale is None else scale
    q0, k0, v, g0, beta0 = (inputs[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
    h0 = inputs.get("initial_state")
    h0 = v.new_zeros(len(bounds) - 1, HV, K, V) if h0 is None else h0
    s = {"chunks": chunks}

    rstd = [l2norm_rstd(x) if l2norm else None for x in (q0, k0)]
    q, k = (x * r[..., None] if l2norm else x for x, r in zip((q0, k0), rstd))
    q, k = (x.repeat_interleave(rep, 1) for x in (q, k))
    A_log, dt_bias = inputs.get("A_log"), inputs.get("dt_bias")
    decay = log_decay(g0, A_log, dt_bias) if gate else g0
    g, last = gate_cumsum(chunks, decay)
    beta = beta_activation(beta0, sigmoid, neg_eigval)
    A, w, u = wy(chunks, k, v, g, last, beta)
    h, v_new, final_state = fwd_scan(chunks, k, w, u, g, last, h0)
    o = output(chunks, q, k, v_new, h, g, last, scale)
    s |= dict(q=q, k=k, v=v, decay=decay, g=g, last=last, beta=beta, A=A, w=w, u=u, h=h, v_new=v_new, scale=scale)
    s |= dict(o=o.unflatten(0, (B, T)), final_state=final_state)
    if do is None and dht is None:
        return s

    do = torch.zeros_like(v) if do is None else do.flatten(0, 1)
    dht = torch.zeros_like(h0) if dht is None else dht
    local = dv_local(chunks, q, k, do, g, last, scale)
    dh, dv_new, dh0 = adjoint_scan(chunks, q, k, w, do, local, g, last, dht, scale)
    dq, dk, dw, dg = dqkwg(chunks, q, k, v_new, h, do, dh, dv_new, g, last, scale)
    dk_wy, dv, dbeta, dg_wy = wy_backward(chunks, k, v, A, v_new, dw, dv_new, g, last, beta)
    s |= dict(dv_local=local, dh=dh, dv_new=dv_new, dw=dw, do=do, dht=dht)

    dq, dk = group_sum(dq, H), group_sum(dk + dk_wy, H)
    if l2norm:
        dq, dk = l2norm_backward(q0, rstd[0], dq), l2norm_backward(k0, rstd[1], dk)
    ddecay = reverse_cumsum(chunks, dg + dg_wy, last)
    dg0 = ddecay
    if gate:
        dg0, s["dA_log"], s["ddt_bias"] = gate_backward(g0, A_log, dt_bias, decay, ddecay)
    dbeta0 = beta_backward(beta0, dbeta, sigmoid, neg_eigval)
    for name, x in dict(dq=dq, dk=dk, dv=dv, dg=dg0, dbeta=dbeta0).items():
        s[name] = x.unflatten(0, (B, T))
    s["dh0"] = dh0
    return s
