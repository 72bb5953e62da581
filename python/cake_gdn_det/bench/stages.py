"""The stages of one training step on a GPU, each beside its own floor."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from .floors import milliseconds, rates, stage_work
from .peers import Rule
from .report import NOTHING, table
from .shapes import Shape, make_inputs
from .timing import BOTH, CudaDevice, Work, phases

REPEATS = 5
NAMESPACE = "cake_gdn::cuda"


def kernel_times(work: Work) -> dict[str, float]:
    """Milliseconds of every kernel of this package in one call, all its launches together."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as result:
        for _ in range(REPEATS):
            work()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in result.key_averages():
        if NAMESPACE in event.key:
            name = kernel_name(event.key)
            times[name] = times.get(name, 0.0) + event.self_device_time_total / 1e3 / REPEATS
    return times


def kernel_name(symbol: str) -> str:
    """cake_gdn::cuda::(anonymous namespace)::wy_kernel<...>(...) -> wy_kernel"""
    return symbol.split("namespace)::")[-1].split("<")[0].split("(")[0]


def by_stage(kernels: dict[str, float], stages: list[str]) -> dict[str, float]:
    """Times of the stages that ran, in their order, and of kernels that belong to none of them, under their names."""
    times: dict[str, float] = {}
    for kernel, ms in kernels.items():
        owners = [stage for stage in stages if kernel == stage or kernel.startswith(stage + "_")]
        name = max(owners, key=len, default=kernel)
        times[name] = times.get(name, 0.0) + ms
    return {name: times[name] for name in [*stages, *times] if name in times}


def stage_table(shape: Shape, kernels: dict[str, float], device_name: str) -> str:
    work, found = stage_work(shape), rates(device_name)
    times = by_stage(kernels, list(work))
    rows = []
    for name, ms in times.items():
        moved, operations = work.get(name, (0.0, 0.0))
        floor = milliseconds(moved, operations, found) if found and name in work else None
        share = f"{floor / ms:.0%}" if floor and ms else NOTHING
        rows.append([name, f"{ms:.3f}", NOTHING if floor is None else f"{floor:.3f}", share, f"{moved / 1e9:.2f}"])
    moved = sum(work[name][0] for name in times if name in work)
    rows.append(["sum", f"{sum(times.values()):.3f}", "", "", f"{moved / 1e9:.2f}"])
    return table(["stage", "ms", "floor ms", "of the floor", "GB"], rows)


def measure_stages(shape: Shape, gates: str, rule: Rule, device: CudaDevice) -> str:
    """The table of one shape, states saved."""
    work = phases(rule.forms[""], make_inputs(shape, gates, device.device))[BOTH]
    result = stage_table(shape, kernel_times(work), device.name)
    device.release()
    return result
