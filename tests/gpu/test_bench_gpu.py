"""The benchmark on a GPU: every column is there, and what is timed under a graph is the operator."""

from __future__ import annotations

import math

import pytest
import torch

from cake_gdn_det.bench import measure, peers, reference, stages
from cake_gdn_det.bench.floors import stage_work
from cake_gdn_det.bench.measure import Options
from cake_gdn_det.bench.reference import Accuracy
from cake_gdn_det.bench.shapes import Shape, make_inputs, pack
from cake_gdn_det.bench.timing import BOTH, PHASES, CudaDevice, phases

pytestmark = pytest.mark.gpu

DENSE = Shape(2, 500, 2, 4)
PACKED = Shape(1, 1000, 2, 4, pack("uneven", 1000), "uneven")


@pytest.fixture(scope="module")
def gpu() -> CudaDevice:
    return CudaDevice()


@pytest.mark.parametrize("shape", [DENSE, PACKED], ids=str)
@pytest.mark.parametrize("gates", ["fast", "slow"])
def test_every_column_is_there(gpu, shape, gates):
    rules = [*peers.load(()), peers.Rule("reference", {"": in_fp32}, tensors=100)]
    case = measure.measure(shape, gates, rules, gpu, Accuracy(gpu.device, 256), Options(rounds=5, seconds=10.0))
    for row in case.rows:
        assert not row.problem and not row.note, (row.rule, row.problem, row.note)
        for times in (row.graph, row.eager, row.host):
            assert set(times) == set(PHASES)
            assert all(0 < ms < 1000 for samples in times.values() for ms in samples)
        assert all(len(samples) == 5 for samples in row.graph.values())
        assert row.peak_bytes > 0 and row.repeatable
        assert max(row.errors.values()) < 2e-2, row.errors
    assert case.rows[0].peak_bytes_recomputing > 0
    assert all(math.isfinite(x) for gain in case.rows[1].speedup.values() for x in gain)


def in_fp32(inputs):
    leaves = [x.float() for x in inputs.leaves]
    return reference.gated_delta_rule(*leaves, inputs.shape.sequences).bfloat16()


@pytest.mark.parametrize("shape", [DENSE, PACKED], ids=str)
def test_a_graph_replays_the_operator(gpu, shape):
    """Its results, overwritten before the replay, are those of a call, to the bit."""
    inputs = make_inputs(shape, "slow", gpu.device)
    call = peers.load(())[0].forms[""]
    for phase in PHASES:
        right = listed(phases(call, inputs)[phase]())
        kept = []
        work = phases(call, inputs)[phase]
        graph = gpu.capture(lambda: kept.append(listed(work())), gpu.graph_pool())  # noqa: B023
        for x in kept[-1]:
            x.fill_(math.nan)
        assert gpu.replayed(graph) > 0
        assert all(map(reference.same_bits, kept[-1], right)), phase


def listed(results: object) -> list[torch.Tensor]:
    """Detached: an autograd graph kept from one stream would tie the backward of the next to that stream."""
    return [x.detach() for x in ([results] if isinstance(results, torch.Tensor) else results)]


def test_peak_memory_is_that_of_the_call(gpu):
    assert gpu.peak_bytes(lambda: torch.empty(5 << 20, dtype=torch.uint8, device=gpu.device)) == 5 << 20
    assert gpu.peak_bytes(lambda: None) == 0


def test_an_idle_gpu_is_timed_from_the_call_on(gpu):
    cycles = 20_000_000  # about ten milliseconds
    torch.cuda._sleep(1)  # the kernel is loaded by its first call
    ms, host = gpu.called(lambda: torch.cuda._sleep(cycles))
    assert ms > 2 > host


def test_kernels_of_a_step_belong_to_stages(gpu):
    inputs = make_inputs(Shape(1, 512, 2, 4), "fast", gpu.device)
    kernels = stages.kernel_times(phases(peers.load(())[0].forms[""], inputs)[BOTH])
    times = stages.by_stage(kernels, list(stage_work(inputs.shape)))
    assert len(times) > 3 and "tail" in times and all(ms > 0 for ms in times.values()), kernels
