"""Clocks, CUDA graphs and memory of the device that a run measures on."""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .peers import Call, describe
from .shapes import Inputs

PHASES = ("forward", "training forward", "backward", "forward + backward")
BOTH = PHASES[-1]
FLUSH_BYTES = 256 << 20  # several times the largest L2

Work = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)
Sample = TypeVar("Sample")


def phases(call: Call, inputs: Inputs) -> dict[str, Work]:
    """What is timed of a rule. The backward goes through one forward again and again, which stays alive with it."""
    held: list[Tensor] = []

    def forward() -> object:
        with torch.no_grad():
            return call(inputs)

    def backward() -> object:
        if not held:
            held.append(call(inputs))
        return torch.autograd.grad(held[0], inputs.leaves, inputs.do, retain_graph=True)

    def both() -> object:
        return torch.autograd.grad(call(inputs), inputs.leaves, inputs.do)

    return dict(zip(PHASES, (forward, lambda: call(inputs), backward, both)))


class CudaDevice:
    """A GPU: CUDA events, the L2 flushed before every sample, CUDA graphs."""

    has_graphs = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name, self.versions = torch.cuda.get_device_name(), {"driver": _driver()}
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        self._stream = torch.cuda.Stream()

    def replayed(self, graph: torch.cuda.CUDAGraph) -> float:
        """Milliseconds of a replay. The flush hides the launch: the GPU is at it while the host gets ahead."""
        self._flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def called(self, work: Work) -> tuple[float, float]:
        """Milliseconds of a call that finds an idle GPU, until it is done; and until it returns to the host."""
        self._flush.zero_()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        begin = time.perf_counter()
        kept = work()
        host = time.perf_counter() - begin
        end.record()
        end.synchronize()
        del kept
        return start.elapsed_time(end), 1e3 * host

    def graph_pool(self) -> object:
        """Memory for graphs that are replayed one after the other: each may use what the others have freed."""
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Work, pool: object) -> torch.cuda.CUDAGraph:
        """A graph of `work`. A backward runs on the streams of its forward and of the first use of its leaves, which
        may not be the default one here: both are on a stream of their own, and no older autograd graph may be alive.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream):
            work()
        graph.replay()  # the first one uploads it
        torch.cuda.synchronize()
        return graph

    def peak_bytes(self, work: Work) -> int | None:
        """The most that `work` holds at a time, its results included, above what is held already."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = work()
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before

    def free_bytes(self) -> int:
        self.release()
        return torch.cuda.mem_get_info()[0]

    def release(self) -> None:
        """Gives back what nobody uses any more."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class CpuDevice:
    """The CPU: one clock, no graphs, no peak memory (a process's size says little about one call)."""

    has_graphs = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        names = [x for x in _lines("/proc/cpuinfo") if x.startswith("model name")]
        self.name = names[0].split(":")[1].strip() if names else "CPU"
        self.versions = {"threads": str(torch.get_num_threads())}

    def called(self, work: Work) -> tuple[float, float]:
        begin = time.perf_counter()
        work()
        milliseconds = 1e3 * (time.perf_counter() - begin)
        return milliseconds, milliseconds

    def peak_bytes(self, work: Work) -> int | None:
        return None

    def free_bytes(self) -> int:
        found = [x for x in _lines("/proc/meminfo") if x.startswith("MemAvailable")]
        return 1024 * int(found[0].split()[1]) if found else 1 << 62

    def release(self) -> None:
        gc.collect()


Device = CudaDevice | CpuDevice


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def interleave(
    works: dict[tuple[Key, str], Work],
    sample: Callable[[Work], Sample],
    rounds: int,
    seconds: float,
    at_least: int = 5,
) -> tuple[dict[tuple[Key, str], list[Sample]], dict[Key, str]]:
    """Samples of every work, the works taking turns: the i-th ones of all belong together.

    Ends after `rounds` turns, or after `seconds` if that is sooner and `at_least` turns are done. Works are named
    (owner, what): all of an owner end where one fails, and its reason is returned.
    """
    works = dict(works)
    samples: dict[tuple[Key, str], list[Sample]] = {key: [] for key in works}
    failures: dict[Key, str] = {}
    begin = time.perf_counter()
    for turn in range(rounds):
        if turn >= at_least and time.perf_counter() - begin > seconds:
            break
        for key, work in list(works.items()):
            if key[0] in failures:
                continue
            try:
                samples[key].append(sample(work))
            except Exception as error:  # of whatever kind a rule fails with; the others go on
                failures[key[0]] = describe(error)
    return {key: x for key, x in samples.items() if key[0] not in failures}, failures
