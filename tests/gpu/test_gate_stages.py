"""prep, gate_backward and gate_reduce alone: sums, resets, the in-kernel gate and sigmoid and their pullbacks."""

from __future__ import annotations

import math

import harness
import pytest
import torch
from harness import Chain, Gates, padded_strides, place, run_gate_backward, run_gate_reduce, run_prep
from reference import stages
from reference.cases import assert_same_bits, one_thread
from reference.oracle import log_decay

pytestmark = pytest.mark.gpu

INF = math.inf
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
RESET = -104.0  # from here on exp is zero in fp32


def chain_of(HV: int, lengths=None, B=1, T=0, margin=0) -> Chain:
    cu = None
    if lengths is not None:
        cu = [margin]
        for n in lengths:
            cu.append(cu[-1] + n)
        T = cu[-1] + margin
    return Chain(B=B, T=T, H=1, HV=HV, K=16, V=16, dtype=torch.bfloat16, cu=None if cu is None else tuple(cu))


# Heads: fewer than a tile of 32, one tile, tiles with missing heads. Lengths around 64.
CHAINS = {
    "one": chain_of(1, T=1),
    "dense": chain_of(4, B=3, T=130),
    "packed": chain_of(3, (64, 0, 1, 63, 65, 0, 128, 127)),
    "margins": chain_of(6, (70, 0, 64), margin=9),
    "32 heads": chain_of(32, (100, 28)),
    "33 heads": chain_of(33, B=2, T=66),
    "70 heads": chain_of(70, T=64),
}

LAYOUTS = {
    "contiguous": lambda shape: padded_strides(shape),
    "tokens innermost": lambda shape: padded_strides(shape, 5, (0, 2, 1)),
    "batch innermost": lambda shape: padded_strides(shape, 1, (1, 2, 0)),
    "gaps": lambda shape: padded_strides((*shape, 3), 2)[:3],
}


class Drawn:
    """Inputs of a chain's gates as the device has them, and in float64 [T, HV] after rounding to fp32."""

    def __init__(self, chain: Chain, seed: int, dtype=torch.float32, layout="contiguous", resets=0.1, in_kernel=False):
        self.chain, self.in_kernel = chain, in_kernel
        rng = torch.Generator().manual_seed(seed)
        shape = (chain.B, chain.T, chain.HV)

        def draw(*size):
            return torch.randn(*size, generator=rng, dtype=torch.float64)

        g = 3 * draw(*shape) if in_kernel else -torch.nn.functional.softplus(3 * draw(*shape))
        if resets and not in_kernel:
            strong = torch.tensor([-INF, -104.0, -1e4, -3e38, -103.5], dtype=torch.float64)
            at = torch.rand(shape, generator=rng) < resets
            g[at] = strong[torch.randint(0, 5, shape, generator=rng)][at]
        beta = 2 * draw(*shape)
        # Values that the in-kernel functions meet at their ends.
        beta[torch.rand(shape, generator=rng) < 0.05] = 200.0
        beta[torch.rand(shape, generator=rng) < 0.05] = -INF
        dead = ~chain.split(chain.live.cpu())
        g[dead], beta[dead] = math.nan, math.nan
        A_log, dt_bias = 4 * torch.rand(chain.HV, generator=rng, dtype=torch.float64) - 3, draw(chain.HV)
        strides = LAYOUTS[layout](shape)
        self.device = {name: place(x.to(dtype), strides) for name, x in (("g", g), ("beta", beta))}
        self.device |= dict.fromkeys(("A_log", "dt_bias"))
        if in_kernel:
            step = 1 + (seed % 2)
            self.device |= {name: place(x.to(dtype), (step,)) for name, x in (("A_log", A_log), ("dt_bias", dt_bias))}
        self.finish()

    def finish(self):
        """The float64 values of what is on the device."""
        for name, x in self.device.items():
            x = None if x is None else x.cpu().float().double()
            setattr(self, name, x.flatten(0, 1) if name in ("g", "beta") else x)
        decay = log_decay(self.g, self.A_log, self.dt_bias) if self.in_kernel else self.g
        self.decay = torch.where(decay <= RESET, -INF, decay)

    def prepared(self, sigmoid=False, neg_eigval=False) -> Gates:
        """What prep should make, in float64: cum and last [T, HV] and the step size."""
        with one_thread():
            cum, last = stages.gate_cumsum(self.chain.chunks, self.decay)
        return Gates(cum, last, stages.beta_activation(self.beta, sigmoid, neg_eigval))

    def magnitude(self) -> torch.Tensor:
        """Sum of the absolute decays in the chunk up to each token [T, HV]: what the sum's rounding is relative to."""
        with one_thread():
            return stages.gate_cumsum(self.chain.chunks, torch.where(self.decay.isinf(), 0.0, self.decay.abs()))[0]


def alive(chain: Chain, x: torch.Tensor) -> torch.Tensor:
    """The live tokens of [HV, T], token-major on the CPU."""
    return x.cpu().T[chain.live.cpu()]


def assert_within(name: str, x: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor) -> None:
    error = (x.double() - want).abs()
    bad = ~(error <= allowed)
    if bad.any():
        at = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()} wrong, first {at}: {x[at].item()!r}, right {want[at].item()!r}"
        )


# ---- prep ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_prep_of_given_gates(name, dtype, layout):
    """The sum is that of the reference in double, rounded once: its bits."""
    chain = CHAINS[name]
    drawn = Drawn(chain, len(name), dtype, layout)
    got = run_prep(chain, drawn.device["g"], drawn.device["beta"])
    want = drawn.prepared()
    live = chain.live.cpu()
    assert_same_bits(
        {"cum": alive(chain, got.cum), "reset": alive(chain, got.reset), "step": alive(chain, got.step)},
        {"cum": want.cum[live].float(), "reset": (want.reset[live] + 1).byte(), "step": want.step[live].float()},
    )


@pytest.mark.parametrize("neg_eigval", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_prep_in_kernel(name, dtype, neg_eigval):
    chain = CHAINS[name]
    drawn = Drawn(chain, len(name), dtype, in_kernel=True)
    for bias in (True, False):
        if not bias:
            drawn.device["dt_bias"] = None
            drawn.finish()
        got = run_prep(chain, **drawn.device, sigmoid=True, neg_eigval=neg_eigval)
        want, live = drawn.prepared(True, neg_eigval), chain.live.cpu()
        size = drawn.magnitude()[live]
        assert_within("cum", alive(chain, got.cum), want.cum[live], 2e-6 * size + 1e-37)
        assert torch.equal(alive(chain, got.reset).long(), want.reset[live] + 1)
        assert_within("step", alive(chain, got.step), want.step[live], 1e-6 * want.step[live] + 1e-37)


EXTREME_RATES = (INF, -INF, 100.0, -100.0, 88.8, -88.0, 60.0, 200.0, 0.3)
EXTREME_GATES = (INF, -INF, 100.0, -100.0, -110.0, -87.5, 60.0, -17.0, -16.9, 0.0, 3e38)


def extremes() -> Drawn:
    chain = chain_of(len(EXTREME_RATES), T=70)
    drawn = Drawn(chain, 3, in_kernel=True)
    drawn.device["A_log"].copy_(torch.tensor(EXTREME_RATES))
    drawn.device["dt_bias"].zero_()
    gates = torch.tensor(EXTREME_GATES)
    drawn.device["g"][0] = gates[torch.arange(70) % len(gates)][:, None].to(harness.DEVICE)
    drawn.finish()
    return drawn


def test_prep_of_extreme_gates():
    """Every limit of -exp(A_log) softplus(g): no NaN, resets where the product says so, values where it is moderate."""
    drawn = extremes()
    chain = drawn.chain
    got, want = run_prep(chain, **drawn.device, sigmoid=True), drawn.prepared(True)
    assert torch.equal(alive(chain, got.reset).long(), want.reset + 1)
    # exp of a sum of two numbers near 100, rounded at 4e-6 each.
    assert_within("cum", alive(chain, got.cum), want.cum, 3e-5 * drawn.magnitude() + 1e-37)


def test_prep_resolves_slow_decays_after_strong_ones():
    """A sum that reached -6000 keeps the differences of slow decays that follow: one rounding of the sum, not 64."""
    chain = chain_of(2, T=128)
    g = torch.full((1, 128, 2), -100.0)
    g[:, 60:64], g[:, 124:] = -0.013, -0.013
    got = run_prep(chain, place(g), place(torch.ones(1, 128, 2))).cum.cpu().double()
    exact = stages.gate_cumsum(chain.chunks, g[0].double())[0].T
    assert ((got - exact).abs() <= 2.0**-24 * exact.abs()).all()


def test_prep_of_expanded_gates():
    """Stride zero: one gate for all tokens, one for all heads."""
    chain = chain_of(5, B=2, T=70)
    g, beta = torch.full((1, 1, 5), -0.5), torch.rand(2, 70, 1)
    wide = run_prep(chain, place(g).expand(2, 70, 5), place(beta).expand(2, 70, 5))
    full = run_prep(chain, place(g.expand(2, 70, 5)), place(beta.expand(2, 70, 5)))
    assert_same_bits(vars(wide), vars(full))


@pytest.mark.parametrize("margin", [0, 4])
def test_prep_again_and_beside_others(margin):
    """The same bits once more, and for a sequence wherever it is packed."""
    chain = chain_of(3, (90, 70), margin=margin)
    drawn = Drawn(chain, 4)
    first = run_prep(chain, drawn.device["g"], drawn.device["beta"])
    assert_same_bits(vars(run_prep(chain, drawn.device["g"], drawn.device["beta"])), vars(first))
    rows = slice(chain.cu[1], chain.cu[2])
    single = run_prep(chain_of(3, T=70), drawn.device["g"][:, rows], drawn.device["beta"][:, rows])
    assert_same_bits(vars(single), {name: x[:, rows] for name, x in vars(first).items()})


# ---- gate_backward ----


def gradients(chain: Chain, seed: int):
    """dcum, dstep [HV, T] in fp32 with NaN outside of the sequences."""
    rng = torch.Generator().manual_seed(100 + seed)
    out = []
    for _ in range(2):
        x = torch.randn(chain.HV, chain.tokens, generator=rng)
        x[:, ~chain.live.cpu()] = math.nan
        out.append(x.to(harness.DEVICE))
    return out


def device_gates(drawn: Drawn) -> Gates:
    """cum and reset as prep makes them; reset 255 and cum NaN outside of the sequences."""
    want = drawn.prepared()
    dead = ~drawn.chain.live.cpu()
    want.cum[dead] = math.nan
    reset = (want.reset + 1).byte()
    reset[dead] = 255
    return Gates(want.cum.float().T.to(harness.DEVICE), reset.T.to(harness.DEVICE), None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_gate_backward_of_given_gates(name, dtype, layout):
    """dg is the reference's sum in double, rounded once to fp32 and to the output; dbeta is dstep. Bits."""
    chain = CHAINS[name]
    drawn = Drawn(chain, len(name), dtype, layout)
    dcum, dstep = gradients(chain, len(name))
    strides = LAYOUTS[layout]((chain.B, chain.T, chain.HV))
    dg, dbeta, partials = run_gate_backward(
        chain, drawn.device["g"], drawn.device["beta"], device_gates(drawn), dcum, dstep,
        dtypes=(dtype, torch.float32), strides=(strides, strides),
    )  # fmt: skip
    assert partials is None
    live = chain.live.cpu()
    with one_thread():
        want = stages.reverse_cumsum(chain.chunks, dcum.cpu().T.double(), drawn.prepared().reset)[live]
    dg = dg.cpu().flatten(0, 1)[live]
    assert_same_bits({"dg": dg}, {"dg": want.float().to(dtype)})
    assert (dg[(drawn.decay == -INF)[live]] == 0).all()
    assert_same_bits({"dbeta": dbeta.cpu().flatten(0, 1)[live]}, {"dbeta": dstep.cpu().T[live]})


def in_kernel_gradients(drawn: Drawn, dcum, dstep, neg_eigval):
    """dg, dbeta [T, HV], and [chunks, HV, 2] of the sums and of the sums of their terms' sizes."""
    chain = drawn.chain
    with one_thread():
        d = stages.reverse_cumsum(chain.chunks, dcum.cpu().T.double(), drawn.prepared().reset)
        dg, _, _ = stages.gate_backward(drawn.g, drawn.A_log, drawn.dt_bias, drawn.decay, d)
        terms = torch.where((drawn.decay == -INF) | drawn.A_log.isinf(), 0.0, d * drawn.decay)
        sums = torch.zeros(2, len(chain.chunks), chain.HV, 2, dtype=torch.float64)
        for i, c in enumerate(chain.chunks):
            for j, x in enumerate((terms, dg)):
                sums[0, i, :, j], sums[1, i, :, j] = x[c.tokens].sum(0), x[c.tokens].abs().sum(0)
        return d, dg, stages.beta_backward(drawn.beta, dstep.cpu().T.double(), True, neg_eigval), sums


@pytest.mark.parametrize("neg_eigval", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_gate_backward_in_kernel(name, dtype, neg_eigval):
    chain = CHAINS[name]
    drawn = Drawn(chain, len(name), dtype, in_kernel=True)
    dcum, dstep = gradients(chain, len(name))
    options = {"sigmoid": True, "neg_eigval": neg_eigval}
    gates = device_gates(drawn)
    dg, dbeta, partials = run_gate_backward(
        chain, **drawn.device, gates=gates, dcum=dcum, dstep=dstep, dtypes=(dtype, dtype), **options
    )
    _, want, want_beta, sums = in_kernel_gradients(drawn, dcum, dstep, neg_eigval)
    live, eps, tiny = chain.live.cpu(), torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    for output, x, y in (("dg", dg, want[live]), ("dbeta", dbeta, want_beta[live])):
        # Double has more digits than what is computed in fp32.
        allowed = max(eps / 2, 2e-6) * 1.01 * y.abs() + max(tiny * eps, 1e-37)
        assert_within(output, x.cpu().flatten(0, 1)[live], y, allowed + 2e-6 * y.abs())
    assert_within("partials", partials[: len(sums[0])].cpu(), sums[0], 3e-6 * sums[1] + 1e-37)
    # What is not wanted changes nothing of what is.
    for wanted in (("dg",), ("dbeta",), ("partials",), ("dg", "partials")):
        got = run_gate_backward(
            chain, **drawn.device, gates=gates, dcum=dcum, dstep=dstep, dtypes=(dtype, dtype), wanted=wanted, **options
        )
        for output, x, whole in zip(("dg", "dbeta", "partials"), got, (dg, dbeta, partials)):
            assert (x is None) == (output not in wanted)
            if x is not None:
                assert_same_bits({output: x.cpu()}, {output: whole.cpu()})


def test_gate_backward_of_extreme_gates():
    """Zero slopes clear infinite gradients; no NaN anywhere."""
    drawn = extremes()
    chain = drawn.chain
    dcum, dstep = gradients(chain, 1)
    dead = [i for i, rate in enumerate(EXTREME_RATES) if math.isinf(rate)]
    dcum[dead] = INF
    dg, dbeta, partials = run_gate_backward(
        chain, **drawn.device, gates=device_gates(drawn), dcum=dcum, dstep=dstep, sigmoid=True
    )
    dcum[dead] = 0.0
    _, want, _, sums = in_kernel_gradients(drawn, dcum, dstep, False)
    assert (dg[..., dead] == 0).all() and (partials[: len(sums[0]), dead] == 0).all()
    assert dbeta.isfinite().all()
    moderate = want.abs() < 1e37
    got = dg.cpu()[0]
    assert_within("dg", got[moderate], want[moderate], 3e-5 * want[moderate].abs() + 1e-37)
    assert not got.isnan().any() and not partials[: len(sums[0])].isnan().any()


def test_gate_backward_does_not_cross_a_reset_or_a_chunk():
    """A gradient of cum at one token reaches back to the latest reset, exclusively, or to the chunk's start."""
    chain = chain_of(1, T=100)
    g = torch.full((1, 100, 1), -0.1)
    g[0, [10, 63, 80]] = -INF
    drawn = Drawn(chain, 0)
    drawn.device["g"].copy_(g)
    drawn.finish()
    gates = device_gates(drawn)
    # The token of the gradient, and the first and last that it reaches.
    for t, first, last in ((5, 0, 5), (10, 1, 0), (40, 11, 40), (63, 1, 0), (70, 64, 70), (99, 81, 99)):
        dcum = torch.zeros(1, 100, device=harness.DEVICE)
        dcum[0, t] = 1.0
        dg, _, _ = run_gate_backward(chain, drawn.device["g"], drawn.device["beta"], gates, dcum, dcum, wanted=("dg",))
        want = torch.zeros(100)
        want[first : last + 1] = 1.0
        assert torch.equal(dg.cpu()[0, :, 0], want), t


# ---- gate_reduce ----


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float64), (torch.float16, None)], ids=str
)
@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 257, 5000, 70_000])
def test_gate_reduce(count, dtypes):
    """The sum over the chunks in double, rounded to the parameter's dtype; no share past the last chunk is read."""
    HV = 3
    chain = chain_of(HV, (1,) * count)
    rng = torch.Generator().manual_seed(count)
    shares = torch.full((chain.max_chunks, HV, 2), math.nan)
    shares[:count] = torch.randn(count, HV, 2, generator=rng)
    placed = place(shares)
    got = run_gate_reduce(chain, placed, dtypes, strides=(2, 1))
    again = run_gate_reduce(chain, placed, dtypes, strides=(1, 3))
    want, size = shares[:count].double().sum(0), shares[:count].double().abs().sum(0)
    for i, (x, y, dtype) in enumerate(zip(got, again, dtypes)):
        assert (x is None) == (dtype is None)
        if x is not None:
            rounding = max(torch.finfo(dtype).eps, 2.0**-23) / 2 * 1.01
            allowed = rounding * want[:, i].abs() + 1e-12 * size[:, i]
            assert_within(("dA_log", "ddt_bias")[i], x.cpu(), want[:, i], allowed)
            assert_same_bits({"again": x.cpu()}, {"again": y.cpu()})


# ---- sizes ----


@pytest.mark.parametrize(
    ("B", "T", "cu", "slack"),
    [(1, 0, (0,), 0), (1, 0, (0,), 3), (1, 0, (0, 0, 0), 0), (1, 0, (0, 0, 0), 3), (0, 7, None, 0), (3, 0, None, 0)],
    ids=str,
)
def test_no_token(B, T, cu, slack):
    """No sequence, or empty ones only; also with a table that has entries for chunks."""
    chain = Chain(B=B, T=T, H=1, HV=3, K=16, V=16, dtype=torch.float16, cu=cu, slack=slack)
    g, none = torch.zeros(B, T, 3, device=harness.DEVICE), torch.zeros(3, 0, device=harness.DEVICE)
    A_log = place(torch.zeros(3))
    gates = run_prep(chain, g, g, A_log)
    assert gates.cum.numel() == 0
    run_gate_backward(chain, g, g, gates, none, none, A_log)
    partials = place(torch.full((chain.max_chunks, 3, 2), math.nan))
    assert all((x == 0).all() for x in run_gate_reduce(chain, partials))


def test_70_000_sequences():
    """Of no, one and two tokens."""
    HV, rng = 2, torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 3, (70_000,), generator=rng)
    chain = chain_of(HV, lengths.tolist())
    T = chain.T
    g, beta = -torch.rand(1, T, HV, generator=rng), torch.rand(1, T, HV, generator=rng)
    second = torch.zeros(T, dtype=torch.bool)
    second[(lengths.cumsum(0) - 1)[lengths == 2]] = True
    A_log = torch.zeros(HV)
    prepared = run_prep(chain, place(g), place(beta))
    before = torch.cat([torch.zeros(1, HV), g[0, :-1]]).double()
    want = (g[0].double() + torch.where(second[:, None], before, 0.0)).float()
    assert_same_bits({"cum": prepared.cum.cpu()}, {"cum": want.T})
    assert (prepared.reset == 0).all()

    dcum, dstep = gradients(chain, 7)
    gate = run_prep(chain, place(g), place(beta), place(A_log))
    dg, _, partials = run_gate_backward(chain, place(g), place(beta), gate, dcum, dstep, place(A_log))
    after = torch.cat([dcum.cpu()[:, 1:], torch.zeros(HV, 1)], 1).double()
    first_of_two = torch.cat([second[1:], torch.zeros(1, dtype=torch.bool)])
    d = (dcum.cpu().double() + torch.where(first_of_two, after, 0.0)).T
    exact = -d * g[0].double().sigmoid()
    assert_within("dg", dg.cpu()[0], exact, 2e-6 * exact.abs() + 1e-37)
    dA, dbias = run_gate_reduce(chain, partials)
    terms = -d * torch.nn.functional.softplus(g[0].double())
    assert_within("dA_log", dA.cpu(), terms.sum(0), 1e-6 * terms.abs().sum(0))
    assert_within("ddt_bias", dbias.cpu(), exact.sum(0), 1e-6 * exact.abs().sum(0))


def test_beyond_32_bits():
    """[HV, B * T] of more than 2^31 elements: all of them, from expanded gates."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 90 * 2**30:
        pytest.skip("needs 90 GB of free device memory")
    HV, T = 64, 2**25 + 64
    chain = chain_of(HV, T=T)
    g = -torch.arange(1, HV + 1, device=harness.DEVICE, dtype=torch.float32) / 64
    gates = run_prep(chain, g.expand(1, T, HV), g.expand(1, T, HV))
    assert gates.cum.numel() > 2**31
    steps = torch.arange(1, 65, device=harness.DEVICE)
    assert bool((gates.cum.view(HV, -1, 64) == (g[:, None] * steps)[:, None]).all())
    assert bool((gates.reset == 0).all()) and bool((gates.step == g[:, None]).all())
    del gates
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        ("prep", {"heads": 2}, "all heads"),
        ("prep", {"head_begin": 1, "heads": 2}, "all heads"),
        ("prep", {"g_dtype": 4}, "floating"),
        ("prep", {"A_log": 0}, "A_log"),
        ("prep", {"flags": 8}, "NEG_EIGVAL"),
        ("prep", {"cum": 0}, "null"),
        ("prep", {"dtype": 2}, "dtype"),
        ("gate_backward", {"heads": 1}, "all heads"),
        ("gate_backward", {"flags": 4}, "partials"),
        ("gate_backward", {"dg_dtype": 5}, "dg_dtype"),
        ("gate_backward", {"dcum": 0}, "null"),
        ("gate_backward", {"dstep": 0}, "null"),
        ("gate_reduce", {"heads": 1}, "all heads"),
        ("gate_reduce", {"partials": 0}, "null"),
        ("gate_reduce", {"dA_log_dtype": 4}, "floating"),
        ("gate_reduce", {"sequence_chunk": 0}, "tables"),
    ],
)
def test_bad_params(stage, change, message, monkeypatch):
    chain = chain_of(3, T=70)
    drawn = Drawn(chain, 0, in_kernel=True)
    gates, (dcum, dstep) = device_gates(drawn), gradients(chain, 0)
    original = harness.Launch.run

    def run(self):
        self.fields |= change if self.stage == stage else {}
        original(self)

    monkeypatch.setattr(harness.Launch, "run", run)
    calls = {
        "prep": lambda: run_prep(chain, **drawn.device, sigmoid=True),
        "gate_backward": lambda: run_gate_backward(
            chain, **drawn.device, gates=gates, dcum=dcum, dstep=dstep, sigmoid=True
        ),
        "gate_reduce": lambda: run_gate_reduce(chain, place(torch.zeros(chain.max_chunks, 3, 2))),
    }
    with pytest.raises(ValueError, match=message):
        calls[stage]()
