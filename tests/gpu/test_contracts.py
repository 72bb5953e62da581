"""What the operator promises on a GPU besides its numbers.

The same bits in other processes, streams, threads and graphs, after other work, in poisoned memory, for any way of
saying the same call; no byte read or written outside of its tensors, whatever lies there; no limit of 32 bits; no
synchronisation; errors before any launch. Tests that could take the device down with them come last.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chain_model
import contract_tools as tools
import pytest
import test_validation
import torch
from chain_model import assert_errors, drawn, rounded, truth
from contract_tools import Captured, Watched, cut_heads, forward, heads_of, large_case, sequences_of, side_stream
from reference.cases import ALL_OPTIONS, GRADS, assert_same_bits, cumulative, digest, run
from test_layouts import assert_sequences_alone
from test_operator import subsets
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LENGTHS = [70, 0, 1, 130, 64, 0]
SHAPES = {
    "dense": {"B": 3, "T": 150, "H": 2, "HV": 4, "K": 64, "V": 96},
    "packed": {"lengths": LENGTHS, "H": 1, "HV": 3, "K": 128, "V": 128} | ALL_OPTIONS,
    "copied rows": {"B": 2, "T": 200, "H": 2, "HV": 2, "K": 60, "V": 100, "use_gate_in_kernel": True},
    "many heads": {"T": 400, "H": 8, "HV": 64, "K": 128, "V": 128, "use_qk_l2norm_in_kernel": True},
}
KINDS = [(shape, dtype) for shape in SHAPES for dtype in (BF16, F16)]
LAYOUTS = pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
OPTIONS = pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])


# ---- the same bits: other processes, streams, threads, graphs -------------------------------------------------------

SCRIPT = """
import json, sys
import torch
import chain_model
from chain_model import drawn
from reference.cases import digest, run
from cake_gdn_det import chunk_gated_delta_rule

chain_model.DEVICE, shapes, history = sys.argv[1], json.loads(sys.argv[2]), len(sys.argv) > 3
if history:  # other work first: another allocator's state, other addresses
    keep = [torch.full((n,), 255, dtype=torch.uint8, device=chain_model.DEVICE) for n in (1000, 3 << 20, 77 << 20)]
    rng = torch.Generator().manual_seed(1)
    run(chunk_gated_delta_rule, drawn(rng, B=2, T=333, HV=3, K=48, V=80))
out = []
for shape in shapes:
    dtype = getattr(torch, shape.pop("dtype"))
    case = drawn(torch.Generator().manual_seed(0), dtype=dtype, **shape)
    out.append(digest(run(chunk_gated_delta_rule, case)))
print(json.dumps(out))
"""


def test_processes_and_their_history(op):
    """Fresh processes print this process's SHA-256: one after other work, and one whose every allocation is the
    driver's and whose every launch is waited for."""
    shapes = [SHAPES[shape] | {"dtype": str(dtype).removeprefix("torch.")} for shape, dtype in KINDS]
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent), *(p for p in sys.path if p)])
    variants = [
        (["after other work"], {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "3"}),
        ([], {"PYTHONHASHSEED": "2", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_LAUNCH_BLOCKING": "1"}),
    ]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, chain_model.DEVICE, json.dumps(shapes), *history],
            env=os.environ | env | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for history, env in variants
    ]
    rng = [torch.Generator().manual_seed(0) for _ in KINDS]
    here = [digest(run(op, drawn(r, dtype=dtype, **SHAPES[shape]))) for r, (shape, dtype) in zip(rng, KINDS)]
    assert len(set(here)) == len(here)
    for child in children:
        out, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors
        assert json.loads(out) == here


@pytest.mark.parametrize(("shape", "dtype"), KINDS)
def test_streams_and_repetitions(op, rng, shape, dtype):
    case = drawn(rng, dtype=dtype, **SHAPES[shape])
    first = run(op, case)
    for priority in (0, -1, 0):
        with side_stream(priority):
            for _ in range(3):
                assert_same_bits(first, run(op, case))
    assert_same_bits(first, run(op, case))


def test_several_threads_call_at_once(op, rng):
    """Calls of different shapes that overlap, each thread on a stream of its own: each has the bits it has alone."""
    cases = [drawn(rng, dtype=dtype, **SHAPES[shape]) for shape, dtype in KINDS]
    alone = [run(op, case) for case in cases]
    tools.synchronize()
    jobs = list(range(len(cases))) * 8
    random.Random(0).shuffle(jobs)

    def work(part: list[int]):
        with side_stream() as stream:
            outs = [run(op, cases[i]) for i in part]
            stream.synchronize()
        return part, outs

    with ThreadPoolExecutor(8) as pool:
        for part, outs in pool.map(work, [jobs[i::8] for i in range(8)]):
            for i, out in zip(part, outs):
                assert_same_bits(alone[i], out)


# As many sequences of the same 320 tokens each time: the graph's grids cannot depend on them.
REPLAYED = [[320, 0, 0, 0, 0], [0, 0, 0, 0, 320], [64, 64, 64, 64, 64], [1, 65, 0, 127, 127], [63, 1, 1, 192, 63]]


@pytest.mark.parametrize("save_state", [None, False])
@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64], ids=str)
def test_graph_replay_with_new_offsets_is_the_eager_call(op, rng, save_state, cu_dtype):
    """Forward and backward in one graph; between replays the offsets change in place, and the other inputs too."""
    kwargs = {"H": 1, "HV": 2, "K": 64, "V": 128, "cu_dtype": cu_dtype} | ALL_OPTIONS
    case = drawn(rng, lengths=[100, 20, 0, 130, 70], **kwargs)
    graph = Captured(lambda: run(op, case, save_state=save_state))
    assert_same_bits(graph.replay(), run(op, case))
    for lengths in REPLAYED:
        other = drawn(rng, lengths=lengths, **kwargs)
        for name in case.present:
            case.inputs[name].copy_(other.inputs[name])
        case.do.copy_(other.do)
        case.dht.copy_(other.dht)
        case.options["cu_seqlens"].copy_(other.options["cu_seqlens"])
        assert_same_bits(graph.replay(), run(op, other, save_state=save_state))
        assert_same_bits(graph.replay(), run(op, case))


@pytest.mark.parametrize(("shape", "dtype"), KINDS[::2] + KINDS[3:4])
def test_graph_of_a_call(op, rng, shape, dtype):
    case = drawn(rng, dtype=dtype, **SHAPES[shape])
    graph = Captured(lambda: run(op, case))
    eager = run(op, case)
    for _ in range(3):
        assert_same_bits(graph.replay(), eager)


# ---- the same bits: memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_state", [True, False])
@LAYOUTS
def test_poisoned_memory(op, rng, lengths, save_state):
    """Free memory full of NaN, zeros, large or tiny numbers: nothing is read that was not written before."""
    case = drawn(rng, B=2, T=200, H=2, HV=4, K=100, V=72, lengths=lengths, **ALL_OPTIONS)
    first = run(op, case, save_state=save_state)
    for byte in (0xFF, 0x00, 0x7F, 0x01):
        gc.collect()
        tools.poison_allocator(byte)
        assert_same_bits(first, run(op, case, save_state=save_state))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("save_state", [True, False])
@LAYOUTS
def test_every_element_is_written(op, rng, lengths, save_state, dtype):
    case = drawn(rng, B=2, T=130, HV=2, K=40, V=24, dtype=dtype, lengths=lengths, **ALL_OPTIONS)
    before = run(op, case, save_state=save_state)
    with tools.filled_allocations():
        assert_same_bits(before, run(op, case, save_state=save_state))


def test_addresses(op, rng):
    """The same values at other addresses, aligned otherwise: read in place or copied first."""
    case = drawn(rng, T=130, HV=2, K=64, V=64)
    first = run(op, case)
    for offset in (1, 2, 4, 8, 12):
        moved = {}
        for name in case.present:
            x = case.inputs[name]
            moved[name] = torch.cat([x.new_zeros(offset), x.reshape(-1)])[offset:].view(x.shape)
        assert_same_bits(first, run(op, case.with_inputs(**moved)))


@pytest.mark.parametrize("aligned", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("K, V", [(128, 128), (60, 100), (36, 5), (16, 8)])
@OPTIONS
@LAYOUTS
def test_nan_around_every_input(op, rng, lengths, options, K, V, aligned):
    """In every byte before, after and between the rows of every tensor; and no byte of it is written."""
    case = drawn(rng, B=2, T=100, H=2, HV=4, K=K, V=V, lengths=lengths, **options)
    around = tools.between_nans_everywhere(case, aligned)
    watched = Watched(around)
    assert_same_bits(run(op, around), run(op, case))
    watched.assert_unchanged()


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(("shape", "dtype"), KINDS[:6])
def test_red_zones(op, rng, shape, dtype, save):
    """Through the C interface, in memory of 0xff bytes: the outputs and the workspace are written, all of what the
    outputs hold, and nothing around them."""
    case = drawn(rng, dtype=dtype, **SHAPES[shape])
    assert_same_bits(tools.run_in_red_zones(case, save), run(op, case))


def test_a_sequence_does_not_see_its_neighbours(op, rng):
    """Not even NaN in the one before and the one after reaches a packed sequence."""
    case = drawn(rng, lengths=[70, 100, 30], HV=2, K=64, V=64)
    bad = case.with_inputs(**{n: case.inputs[n].clone() for n in case.present})
    bad.do, bad.dht = case.do.clone(), case.dht.clone()
    for x in (*(bad.inputs[n] for n in tools.PER_TOKEN), bad.do):
        x[:, :70] = torch.nan
        x[:, 170:] = torch.nan
    for x in (bad.inputs["initial_state"], bad.dht):
        x[0], x[2] = torch.nan, torch.nan
    _, cut = sequences_of(case, [1])
    assert_same_bits(cut(run(op, bad)), cut(run(op, case)))


@OPTIONS
@pytest.mark.parametrize("T", [0, 1, 100])
def test_outputs_share_no_memory(op, rng, T, options):
    """Writing into an output changes neither an input nor another output."""
    case = drawn(rng, T=T, HV=2, **options)
    tensors = [case.inputs[n] for n in case.present] + [case.do, case.dht]
    out = run(op, case)
    places = [x.untyped_storage().data_ptr() for x in (*tensors, *out.values()) if x.untyped_storage().nbytes()]
    assert len(set(places)) == len(places)


# ---- the same bits: ways of saying the same call --------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "dtype"), KINDS)
def test_saved_states_and_gradients_change_no_bit(op, rng, shape, dtype):
    case = drawn(rng, dtype=dtype, **SHAPES[shape])
    first = run(op, case)
    for save_state in (True, False, None):
        assert_same_bits(first, run(op, case, save_state=save_state))
        assert_same_bits(first, forward(op, case, save_state=save_state))
    with torch.no_grad():
        o, final = op(**case.inputs, **case.options, output_final_state=True)
    with torch.inference_mode():
        o2, final2 = op(**case.inputs, **case.options, output_final_state=True)
    assert not o.requires_grad and not final.requires_grad
    for answer in ({"o": o, "final_state": final}, {"o": o2, "final_state": final2}):
        assert_same_bits(first, answer)
    assert_same_bits({"o": o}, run(op, case, wanted=[], final=False))


@pytest.mark.parametrize("save_state", [True, False])
def test_subsets_of_gradients(op, rng, save_state):
    """Which inputs need a gradient changes no bit of any output or gradient."""
    case = drawn(rng, T=70, H=2, HV=4, K=32, V=16, **ALL_OPTIONS)
    full = run(op, case)
    assert len(case.present) == 8
    for wanted in subsets(case.present, 24):
        part = run(op, case, wanted=wanted, save_state=save_state)
        assert set(part) == {"o", "final_state", *(GRADS[name] for name in wanted)}
        assert_same_bits(part, full)


@LAYOUTS
@OPTIONS
def test_no_initial_state_is_zeros(op, rng, lengths, options):
    case = drawn(rng, B=2, T=130, HV=2, K=64, V=64, lengths=lengths, **options)
    zeros = case.with_inputs(initial_state=torch.zeros_like(case.inputs["initial_state"]))
    assert_same_bits(run(op, zeros), run(op, case.with_inputs(initial_state=None)))


def test_no_final_state_is_a_zero_gradient(op, rng):
    case = drawn(rng, T=130, HV=2, K=64, V=64)
    case.dht = torch.zeros_like(case.dht)
    assert_same_bits(run(op, case), run(op, case, final=False))


def test_ways_to_give_offsets(op, rng):
    """int32 or int64; on the device with and without a copy on the host, or on the host alone; any strides."""
    case = drawn(rng, lengths=LENGTHS, HV=2, K=64, V=64)
    first = run(op, case)
    for dtype in (torch.int32, torch.int64):
        host = cumulative(LENGTHS, dtype)
        cu = host.to(case.do.device)
        strided = torch.stack([cu, torch.full_like(cu, 10**6)], 1)[:, 0]
        for offsets in (cu, host, strided, tools.embedded(cu)):
            for copy in (None, host, host.long(), host.int()):
                given = {"cu_seqlens": offsets, "cu_seqlens_cpu": copy}
                assert_same_bits(first, run(op, case.with_options(**given)))
    indices = torch.tensor([[0, 0], [0, 1], [2, 0]], device=case.do.device)
    assert_same_bits(first, run(op, case, chunk_indices=indices))


@pytest.mark.parametrize("options", [{"chunk_size": 16}, {"chunk_size": 32}, {"backend": "cuda"}, {"plan": None}])
def test_arguments_that_change_nothing(op, rng, options):
    case = drawn(rng, T=150, HV=2, K=64, V=64)
    if "backend" in options:
        options = {"backend": chain_model.DEVICE}
    assert_same_bits(run(op, case), run(op, case, **options))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("B, T", [(1, 150), (3, 64), (3, 65)])
def test_dense_is_packed(op, rng, B, T, dtype):
    case = drawn(rng, B=B, T=T, HV=2, K=64, V=64, dtype=dtype, batch_invariant=True)
    dense = run(op, case)
    flat = {n: case.inputs[n].reshape(1, B * T, *case.inputs[n].shape[2:]) for n in tools.PER_TOKEN}
    packed = case.with_inputs(**flat).with_options(cu_seqlens=cumulative([T] * B).to(case.do.device))
    packed.do = case.do.reshape(1, B * T, *case.do.shape[2:])
    out = run(op, packed)
    assert_same_bits({n: x.reshape(dense[n].shape) for n, x in out.items()}, dense)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_packed_sequence_is_itself_alone(op, rng, dtype):
    """In a batch that fills the device many times over, and alone."""
    lengths = [3, 0, 200, 64, 1, 129, 0, 0] + [70] * 40
    case = drawn(rng, lengths=lengths, H=4, HV=16, K=128, V=128, dtype=dtype, batch_invariant=True, **ALL_OPTIONS)
    out = run(op, case)
    few, cut = sequences_of(case, list(range(9)))
    assert_same_bits(cut(out), run(op, few))
    assert_sequences_alone(op, few, cut(out))


def test_order_of_the_batch(op, rng):
    case = drawn(rng, B=5, T=130, H=1, HV=2, K=64, V=64, batch_invariant=True)
    out = run(op, case)
    order = torch.randperm(5, generator=rng)
    moved = case.with_inputs(**{n: case.inputs[n][order] for n in case.present})
    moved.do, moved.dht = case.do[order], case.dht[order]
    assert_same_bits({n: x[order] for n, x in out.items()}, run(op, moved))


@pytest.mark.parametrize("heads", [6, 70])
def test_heads_alone(op, rng, heads):
    """A group of heads alone has the bits that it has among others; 70 heads are more than 1024 blocks a launch."""
    case = drawn(rng, T=1000, H=heads // 2, HV=heads, K=32, V=64)
    out = run(op, case)
    assert all(x.isfinite().all() for x in out.values())
    for key in (0, heads // 2 - 1):
        part = slice(key, key + 1), slice(2 * key, 2 * key + 2)
        assert_same_bits(cut_heads(out, *part), run(op, heads_of(case, *part)))


def test_planned_slices_of_heads(op):
    """A call of whose heads only some are worked on at a time, if states are not saved, or in the tail of the backward:
    the bits of the call with saved states, and of a group of heads alone."""
    T, H, HV, D = 65536 // tools.SHRINK, 16, 64, 128
    # A group of heads alone would be planned otherwise.
    case = large_case(T=T, H=H, HV=HV, K=D, V=D, plan="segment=whole")
    watch = chain_model.DEVICE == "cuda"
    if watch:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    sliced = run(op, case, save_state=False)
    if watch:
        # w, u, dv of all heads, and their states at chunk starts and ends: were they all there, there were no slices.
        extra = torch.cuda.max_memory_allocated() - base - sum(x.nbytes for x in sliced.values())
        assert extra < HV * 2 * (3 * T * D + 2 * (T // 64 - 1) * D * D)
    whole = run(op, case, save_state=True)
    assert_same_bits(sliced, whole)
    assert_same_bits(whole, forward(op, case))
    del whole
    for key in (0, 7, H - 1):
        part = slice(key, key + 1), slice(4 * key, 4 * key + 4)
        assert_same_bits(cut_heads(sliced, *part), run(op, heads_of(case, *part)))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("save_state", [None, False])
def test_activation_checkpointing(op, rng, use_reentrant, save_state):
    case = drawn(rng, lengths=LENGTHS, HV=2, K=64, V=64, **ALL_OPTIONS)
    calls = []

    def checkpointed(q, k, v, g, beta, **rest):
        def body(q, k, v, g, beta):
            calls.append(torch.is_grad_enabled())
            return op(q, k, v, g, beta, save_state=save_state, **rest)

        return checkpoint(body, q, k, v, g, beta, use_reentrant=use_reentrant)

    plain = run(op, case)
    assert_same_bits(tools.backward(checkpointed, case, tools.PER_TOKEN), plain)
    assert calls == [not use_reentrant, True]


def test_backward_twice_over_one_forward(op, rng):
    """retain_graph: the second backward reads the same saved tensors."""
    case = drawn(rng, T=150, HV=2, K=64, V=64)
    leaves = {n: case.inputs[n].detach().requires_grad_() for n in case.present}
    o, final = op(**leaves, output_final_state=True)
    pairs = [o, final], list(leaves.values()), [case.do, case.dht]
    first = torch.autograd.grad(*pairs, retain_graph=True)
    assert_same_bits(dict(zip(leaves, first)), dict(zip(leaves, torch.autograd.grad(*pairs))))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_autocast_changes_nothing(op, rng, dtype):
    case = drawn(rng, T=100, HV=2, dtype=BF16, **ALL_OPTIONS)
    plain = run(op, case)
    with torch.autocast(chain_model.DEVICE, dtype=dtype):
        assert_same_bits(run(op, case), plain)


@pytest.mark.parametrize(("backend", "lengths"), [("aot_eager", LENGTHS), ("inductor", None)])
def test_compiles_once_for_all_lengths(op, rng, lengths, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(op, fullgraph=True, dynamic=True, backend=counter)
    with inductor_config.patch(compile_threads=1):
        for scale in (1, 2, 3):
            packed = None if lengths is None else [scale * n for n in lengths]
            case = drawn(rng, B=2, T=130 * scale, H=1, HV=2, K=64, V=64, lengths=packed, **ALL_OPTIONS)
            assert_same_bits(run(step, case), run(op, case))
    assert counter.frame_count == 1
    torch._dynamo.reset()


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_seventy_thousand_sequences(op):
    lengths = [(1, 0, 3, 66, 0, 2, 64)[n % 7] for n in range(70_000 // tools.SHRINK)]
    case = large_case(T=0, H=1, HV=2, K=16, V=16, lengths=lengths, batch_invariant=True)
    out = run(op, case)
    empty = torch.tensor([n for n, length in enumerate(lengths) if length == 0], device=case.do.device)
    assert torch.equal(out["final_state"][empty], case.inputs["initial_state"][empty])
    assert torch.equal(out["dh0"][empty], case.dht[empty])
    assert all(x.isfinite().all() for x in out.values())
    last = len(lengths) - 1
    part, cut = sequences_of(case, [*range(5), last // 3, *range(last // 2, last // 2 + 7), *range(last - 6, last + 1)])
    assert_same_bits(cut(out), run(op, part))
    assert_errors(part, cut(out), truth(part), rounded(part), cap=None)


@pytest.mark.parametrize("save_state", [False, True])
def test_tensors_beyond_two_to_the_31_elements(op, save_state):
    """v, o and their gradients hold more than 2^31 elements, so do q and k in one call and the saved states in the
    other. The last sequence is compared with the oracle, a few heads with themselves alone."""
    HV, D = 128, 128
    H = 16 if save_state else HV
    lengths = [65536 // tools.SHRINK, 64000 // tools.SHRINK, 1, 1500, 130]
    if chain_model.DEVICE == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] >> 30
        if free < 64:
            pytest.skip(f"needs 64 GiB of free GPU memory, there are {free}")
    case = large_case(T=0, H=H, HV=HV, K=D, V=D, lengths=lengths, plan="segment=whole")
    assert case.do.numel() > 2**31 or tools.SHRINK > 1
    out = run(op, case, save_state=save_state)
    group = HV // H
    tail, cut = sequences_of(case, [len(lengths) - 1])
    last = slice(H - 1, H), slice(HV - group, HV)
    few = heads_of(tail, *last)
    assert_errors(few, cut_heads(cut(out), *last), truth(few), rounded(few), cap=None)
    for key in (0, H // 2, H - 1):
        part = slice(key, key + 1), slice(key * group, (key + 1) * group)
        assert_same_bits(cut_heads(out, *part), run(op, heads_of(case, *part)))
    del case, out, tail
    if chain_model.DEVICE == "cuda":
        torch.cuda.empty_cache()


def test_no_buffer_grows_with_the_number_of_sequences(op, rng):
    """70,000 offsets, nearly all of them padding: their states, had anybody asked for them, would take 18 GB."""
    N, T = 70_000, 1000
    case = drawn(rng, lengths=[400, 600], H=2, HV=4, K=128, V=128, initial_state=False)
    padding = torch.full((N - 2,), T, device=case.do.device)
    padded = case.with_options(cu_seqlens=torch.cat([case.options["cu_seqlens"], padding]))
    plain = run(op, case, final=False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    assert_same_bits(run(op, padded, final=False), plain)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


# ---- streams, synchronisation, devices ------------------------------------------------------------------------------

WAYS = {
    "dense": {"B": 2, "T": 150},
    "packed": {"lengths": LENGTHS},
    "packed, int32": {"lengths": LENGTHS, "cu_dtype": torch.int32},
    "offsets on both sides": {"lengths": LENGTHS, "cu_seqlens_cpu": cumulative(LENGTHS)},
    "offsets on the host": {"lengths": LENGTHS},
    "everything": {"lengths": LENGTHS} | ALL_OPTIONS,
    "rows that are copied": {"B": 2, "T": 150, "K": 20, "V": 12},
}


def case_of(rng, way: str):
    case = drawn(rng, HV=2, **({"K": 64, "V": 64} | WAYS[way]))
    if way == "offsets on the host":
        case.options["cu_seqlens"] = cumulative(LENGTHS)
    return case


@pytest.mark.parametrize("save_state", [None, False])
@pytest.mark.parametrize("way", WAYS)
def test_torch_sees_no_synchronisation(op, rng, way, save_state):
    case = case_of(rng, way)
    first = run(op, case)
    tools.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            case.do.sum().item()
        out = run(op, case, save_state=save_state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(first, out)


# How a copy from the host's pageable memory is queued is the driver's business.
@pytest.mark.parametrize("way", [way for way in WAYS if way != "offsets on the host"])
def test_the_host_waits_for_nothing(op, rng, way):
    """Forward and backward are queued while the stream still works on something else, and so is what they read: the
    inputs get their values behind that, on the same stream."""
    case = case_of(rng, way)
    first = run(op, case)
    with side_stream() as stream:
        run(op, case)  # so that the stream's memory is there
        values = {n: case.inputs[n].clone() for n in case.present}
        for x in (case.inputs[n] for n in case.present):
            x.fill_(torch.nan)
        stream.synchronize()
        busy = tools.keep_busy()
        for n, x in values.items():
            case.inputs[n].copy_(x)
        out = run(op, case)
        assert not busy.query(), "the host waited for the stream"
    assert_same_bits(first, out)


def test_other_streams_are_left_alone(op, rng):
    """A call finishes on its own stream while the default stream is busy."""
    case = drawn(rng, **SHAPES["packed"])
    first = run(op, case)
    with side_stream() as stream:
        run(op, case)
    tools.synchronize()
    busy = tools.keep_busy()
    with torch.cuda.stream(stream):
        out = run(op, case)
        stream.synchronize()
    assert not busy.query(), "the call waited for another stream"
    tools.synchronize()
    assert_same_bits(first, out)


def test_any_device_and_the_current_one_is_kept(op, rng):
    """With several devices: a call on each while the first is current. With one: by its index and without."""
    if chain_model.DEVICE == "cuda":
        names = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    else:
        names = ["cpu"]
    case = drawn(rng, **SHAPES["packed"])
    first = run(op, case)
    current = torch.cuda.current_device()
    for name in names:
        there = chain_model.moved(case, name)
        out = run(op, there)
        assert all(x.device == there.inputs["q"].device for x in out.values())
        assert torch.cuda.current_device() == current
        model = torch.cuda.get_device_properties
        if name in ("cpu", "cuda") or model(name).name == model(current).name:
            assert_same_bits({n: x.to(case.do.device) for n, x in out.items()}, first)


# ---- bad input ------------------------------------------------------------------------------------------------------


def good(rng, **changes) -> dict:
    """Arguments of a packed call that is right."""
    case = drawn(rng, lengths=[4, 2], H=2, HV=4, K=8, V=16, use_gate_in_kernel=True)
    return {**case.inputs, **case.options, **changes}


def unsupported(rng) -> list[tuple[dict, str]]:
    """Calls that only other builds or devices could run, and what the error says."""
    out = []
    for dtype, says in ((F32, r"\bq, k, v\b.*fp32.*bf16 and fp16"), (F64, r"\bq has dtype torch.float64 on cuda:0")):
        case = drawn(rng, T=9, HV=2, dtype=dtype)
        out.append((case.inputs, says))
    for K, V in ((129, 16), (16, 129), (256, 256), (512, 64)):
        case = drawn(rng, T=9, HV=2, K=K, V=V)
        out.append((case.inputs, rf"K is {K} and V is {V}.*up to 128"))
    return out


def wrong(rng) -> list[tuple[dict, type[Exception], str]]:
    """Calls that are wrong on a GPU in particular."""
    call = good(rng)
    out = []
    for name in ("k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"):
        out.append((call | {name: call[name].cpu()}, ValueError, rf"{name} is on cpu, must be on cuda:0 like q"))
    out.append((call | {"q": call["q"].cpu()}, ValueError, r"k is on cuda:0, must be on cpu like q"))
    out.append((call | {"backend": "cpu"}, ValueError, r"backend is 'cpu', but q is on cuda:0"))
    host = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    out.append((host | {"backend": "cuda"}, ValueError, r"backend is 'cuda', but q is on cpu"))
    out.append((call | {"cu_seqlens_cpu": call["cu_seqlens"]}, ValueError, r"cu_seqlens_cpu is on cuda:0, must be on"))
    out.append((call | {"plan": "fast"}, ValueError, r'plan has "fast"; it must be KEY=VALUE'))
    for offsets, says in (
        ([1, 4, 6], r"\[0\] is 1; the first offset must be 0"),
        ([0, 7, 6], r"\[2\] is 6, below .*\[1\] = 7"),
        ([0, 4, 5], r"\[2\] is 5; the last offset must be T = 6"),
        ([0, 4, 7], r"\[2\] is 7; the last offset must be T = 6"),
        ([-1, 4, 6], r"\[0\] is -1"),
    ):
        for dtype in (torch.int32, torch.int64):
            cu = torch.tensor(offsets, dtype=dtype)
            out.append((call | {"cu_seqlens_cpu": cu}, ValueError, rf"cu_seqlens_host{says}"))
            out.append((call | {"cu_seqlens": cu}, ValueError, rf"cu_seqlens_host{says}"))
    differ = {"cu_seqlens": torch.tensor([0, 4, 6]), "cu_seqlens_cpu": torch.tensor([0, 3, 6])}
    out.append((call | differ, ValueError, r"cu_seqlens_cpu is \[0, 3, 6\], must equal cu_seqlens"))
    return out


def test_what_this_build_cannot_run(op, rng):
    for arguments, says in unsupported(rng):
        for tracked in (False, True):
            leaves = {n: x if x is None else x.detach().requires_grad_(tracked) for n, x in arguments.items()}
            with pytest.raises(NotImplementedError, match=says):
                op(**leaves)


def test_what_is_wrong_on_a_gpu(op, rng):
    for arguments, error, says in wrong(rng):
        with pytest.raises(error) as caught:
            op(**arguments)
        assert re.search(says, str(caught.value)), f"{caught.value} where {says} is right"


def test_every_rule_holds_for_cuda_tensors(op):
    """The CPU's table of broken rules, with its tensors moved to the GPU: the same errors."""
    checked = 0
    for argument, error, says, arguments in test_validation.CASES:
        tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
        plain = all(x.device.type == "cpu" and x.layout is torch.strided and not x.is_nested for x in tensors)
        if not plain or argument == "backend" or (argument, error) == ("plan", ValueError):
            continue  # another device, or a device that has no plans
        there = {
            n: x.to(chain_model.DEVICE) if isinstance(x, torch.Tensor) and n != "cu_seqlens_cpu" else x
            for n, x in arguments.items()
        }
        with pytest.raises(error) as caught:
            op(**there)
        assert type(caught.value) is error
        assert re.match(rf"chunk_gated_delta_rule: {argument} {says}", str(caught.value), re.DOTALL), caught.value
        checked += 1
    assert checked > 60


def test_double_backward_raises(op, rng):
    case = drawn(rng, T=70, HV=2)
    leaves = [case.inputs[n].requires_grad_() for n in ("q", "k", "v", "g", "beta")]
    o = op(*leaves)[0]
    grads = torch.autograd.grad(o.float().square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        torch.autograd.grad(o.float().sum() + grads[0].float().square().sum(), leaves)


def queued(function) -> list[str]:
    """Names of what a function has the GPU do."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        tools.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def test_saved_states_without_inverses_are_refused():
    """The C interface, before it looks at a device: the backward would read the missing tensor."""
    from cake_gdn_det import _C

    wide, narrow = (1 << 20, _C.BF16, (128 * 16, 16, 16, 1)), (1 << 20, _C.FP32, (128, 1, 1))
    fields = dict.fromkeys("qkv", wide) | dict.fromkeys(("g", "beta"), narrow)
    problem = _C.Problem(backend=_C.CUDA, scale=1.0, B=1, T=128, H=1, HV=1, K=16, V=16, N=1, slots=1, **fields)
    problem.h = (1 << 20, _C.BF16, (256, 256, 16, 1))
    with pytest.raises(ValueError, match="A is NULL"):
        _C.workspace_size(problem, _C.BACKWARD)


def test_errors_come_before_any_launch(op, rng):
    """And a good call with offsets on the device copies nothing to the host."""
    calls = [(arguments, ValueError) for arguments, *_ in wrong(rng)]
    calls += [(arguments, NotImplementedError) for arguments, _ in unsupported(rng)]
    case = case_of(rng, "packed")
    run(op, case)

    def refuse():
        for arguments, error in calls:
            with pytest.raises(error):
                op(**arguments)

    copies = re.compile(r"mem(cpy|set)", re.IGNORECASE)
    kernels = [name for name in queued(refuse) if not copies.match(name)]
    assert not kernels
    done = queued(lambda: run(op, case))
    assert len([name for name in done if not copies.match(name)]) > 10
    assert not [name for name in done if re.search(r"DtoH|Device -> (Host|Pageable|Pinned)", name)]


# ---- wrong offsets, which only the device knows ---------------------------------------------------------------------


def wrong_offsets(T: int, N: int, dtype: torch.dtype) -> dict[str, list[int]]:
    info = torch.iinfo(dtype)
    rng = random.Random(0)
    return {
        "right": [T * n // N for n in range(N + 1)],
        "decreasing": [T - T * n // N for n in range(N + 1)],
        "negative": [-1000 + 100 * n for n in range(N)] + [T],
        "beyond T": [T * n // 3 for n in range(N + 1)],
        "far away": [rng.choice([info.min, info.max, -1, 0, T, T + 1]) for _ in range(N + 1)],
        "a part of T": [7 + (T - 20) * n // N for n in range(N + 1)],
        "all at T": [T] * (N + 1),
        "random": [rng.randrange(-T, 2 * T) for _ in range(N + 1)],
        "anything": [rng.randrange(info.min, info.max) for _ in range(N + 1)],
    }


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("kind", wrong_offsets(1, 1, torch.int32))
def test_wrong_offsets_touch_nothing_else(op, rng, kind, dtype):
    """With every tensor between red zones: no fault, no byte outside of the outputs and the workspace written, and the
    answer of the offsets that the device takes instead: the running maximum, held within 0 to T."""
    T, N = 1500, 9
    cu = torch.tensor(wrong_offsets(T, N, dtype)[kind], dtype=dtype)
    options = ALL_OPTIONS if dtype == torch.int32 else {}
    case = drawn(rng, lengths=[T // N] * (N - 1) + [T - T // N * (N - 1)], H=2, HV=4, K=64, V=48, **options)
    case.options["cu_seqlens"] = cu.to(case.do.device)
    taken = cu.clamp(0, T).cummax(0).values
    right = run(op, case.with_options(cu_seqlens=taken.to(case.do.device)))
    for save in (True, False):
        out = tools.run_in_red_zones(case, save)
        if kind == "right":  # on memory of 0xff: every element has been written
            assert_same_bits(out, right)
            continue
        owned = slice(int(taken[0]), int(taken[-1]))
        for name, x in right.items():
            per_token = name == "o" or (name[1:] in tools.PER_TOKEN)
            pick = (lambda y: y[:, owned]) if per_token else (lambda y: y)  # noqa: B023
            assert_same_bits({name: pick(out[name])}, {name: pick(x)})
