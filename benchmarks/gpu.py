"""The GPU chain: against FLA in the same run, memory, host time, and every stage beside its own floor.

    python benchmarks/gpu.py --output benchmarks/results/gpu.md [--fla]

Latencies are medians of CUDA-graph replays with the L2 flushed before each, the rules taking turns; in-kernel L2 norm,
bf16, K = V = 128. Peak memory is what a training step adds to its inputs. Host time is that of eager calls, the device
idle at the start. A stage's floor is the larger of its bytes over the bandwidth and its multiply-adds over the rate.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from cake_gdn_det import _C, __version__, chunk_gated_delta_rule

D, CHUNK, ELEMENT = 128, 64, 2
BANDWIDTH, RATE = 4.3e12, 790e12  # measured ceilings of an H200: bytes a second of a copy, operations of a bf16 product
SHAPES = [(1, 8192, 16, 32), (1, 32768, 16, 32), (8, 4096, 16, 64), (1, 65536, 16, 32)]


def inputs(B: int, T: int, H: int, HV: int, gates: str = "fast") -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    g = F.logsigmoid(torch.randn(B, T, HV, device="cuda") + 2)
    if gates == "slow":
        g = F.logsigmoid(torch.randn(B, T, HV, device="cuda")) / 16
        g[..., : HV // 4] = 0
    beta = torch.rand(B, T, HV, device="cuda").bfloat16()
    leaves = [normal(B, T, H, D), normal(B, T, H, D), normal(B, T, HV, D), g, beta]
    return [x.requires_grad_() for x in leaves], normal(B, T, HV, D)


def ours(*leaves, **options):
    return chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, **options)[0]


def fla(*leaves):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule

    q, k, v, g, beta = leaves
    return rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def step(rule, leaves, do, **options):
    return torch.autograd.grad(rule(*leaves, **options), leaves, do)


def forward(rule, leaves, do):
    with torch.no_grad():
        return rule(*leaves)


def graph_of(work) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.result = work()
    return graph


def latencies(graphs: dict, rounds: int) -> dict[str, float]:
    """Median milliseconds of each graph, the graphs taking turns."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(x) for name, x in times.items()}


def peak(work) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def host_ms(work, calls: int = 10) -> float:
    """Median time of a call until it returns, each with an empty queue."""
    times = []
    for _ in range(calls + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e3 * statistics.median(times[2:])


def work_of_stages(B: int, T: int, H: int, HV: int) -> dict[str, tuple[int, int]]:
    """(bytes, multiply-adds) of each stage of one forward and backward with saved states."""
    rows, chunks = B * T, B * -(-T // CHUNK)
    x = rows * HV * D * ELEMENT  # one [B, T, HV, D] tensor
    q = rows * H * D * ELEMENT
    h = B * (T - 1) // CHUNK * HV * D * D * ELEMENT
    A = rows * HV * CHUNK * ELEMENT
    state, score = CHUNK * D * D, CHUNK * CHUNK * D  # multiply-adds of a product with the state, with 64 x 64 scores
    macs = lambda states, scores: chunks * HV * (states * state + scores * score)  # noqa: E731
    return {
        "pack": (2 * 2 * 2 * q, 0),
        "prep": (2 * rows * HV * 17, 0),
        "wy": (q + x + A + 2 * x, macs(0, 2)),
        "fwd_scan": (q + 2 * x + x + h, macs(2, 0)),
        "output": (2 * q + x + h + x, macs(1, 1.5)),
        "wy_recompute": (q + x + A + h + 2 * x, macs(1, 1)),
        "dv_local": (2 * q + x + x, macs(0, 1.5)),
        "adjoint_scan": (2 * q + 3 * x + x + h, macs(3, 0)),
        "dqkwg": (2 * q + 3 * x + 2 * h + 3 * x, macs(3, 3)),
        "wy_backward": (q + 5 * x + A + 2 * x, macs(0, 3.5)),
        "finalize": (2 * x + 2 * q + 2 * q, 0),
        "tail": (2 * q + 4 * x + A + 2 * h + 2 * q + x, macs(4, 5)),
        "gate_backward": (rows * HV * 33, 0),
    }


def stage_times(work, names) -> dict[str, float]:
    """Milliseconds of each stage in one step, all its launches together."""
    work()
    torch.cuda.synchronize()
    repeats = 5
    with profile(activities=[ProfilerActivity.CUDA]) as result:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    times = dict.fromkeys(names, 0.0)
    for event in result.key_averages():
        if "cake_gdn::cuda" not in event.key:
            continue
        kernel = event.key.split("namespace)::")[-1].split("<")[0].split("(")[0]
        name = max((n for n in names if kernel == n or kernel.startswith(n + "_")), key=len, default=None)
        if name:
            times[name] += event.self_device_time_total / 1e3 / repeats
    return times


def table(header: list[str], rows: list[list]) -> str:
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [header, ["---"] * len(header), *rows])


def measure(shape: tuple[int, ...], gates: str, with_fla: bool, rounds: int) -> list:
    leaves, do = inputs(*shape, gates)
    rules = {"cake_gdn_det": ours} | ({"FLA": fla} if with_fla else {})
    graphs = {}
    for name, rule in rules.items():
        graphs[name, "forward"] = graph_of(lambda rule=rule: forward(rule, leaves, do))
        graphs[name, "both"] = graph_of(lambda rule=rule: step(rule, leaves, do))
    ms = latencies(graphs, rounds)
    del graphs
    names = f"{shape[0]} x {shape[1]}, {shape[2]}/{shape[3]}, {gates}"
    row = [names]
    for name, rule in rules.items():
        mib = peak(lambda rule=rule: step(rule, leaves, do)) / 2**20
        host = host_ms(lambda rule=rule: step(rule, leaves, do))
        row += [f"{ms[name, 'forward']:.3f} / {ms[name, 'both']:.3f}", f"{mib:.0f}", f"{host:.2f}"]
        if name == "cake_gdn_det":
            row.append(f"{peak(lambda: step(ours, leaves, do, save_state=False)) / 2**20:.0f}")
    if with_fla:
        row.append(f"{ms['FLA', 'both'] / ms['cake_gdn_det', 'both']:.2f}")
    return row


def stages(shape: tuple[int, ...]) -> str:
    leaves, do = inputs(*shape)
    work = work_of_stages(*shape)
    times = stage_times(lambda: step(ours, leaves, do), list(work))
    rows = []
    work = {name: x for name, x in work.items() if times[name]}  # the plan's programs
    for name, (moved, macs) in work.items():
        floor = 1e3 * max(moved / BANDWIDTH, 2 * macs / RATE)
        rows.append([name, f"{times[name]:.3f}", f"{floor:.3f}", f"{floor / times[name]:.0%}", f"{moved / 1e9:.2f}"])
    rows.append(["sum", f"{sum(times.values()):.3f}", "", "", f"{sum(b for b, _ in work.values()) / 1e9:.2f}"])
    return table(["stage", "ms", "floor ms", "of the floor", "GB"], rows)


def machine() -> str:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    build = json.loads(_C.build_info())
    return (
        f"{torch.cuda.get_device_name()}, driver {driver}; cake_gdn_det {__version__} ({build['git_commit'][:12]}), "
        f"built with CUDA {build['cuda']}; torch {torch.__version__}; {date.today()}"
    )


@click.command(help=__doc__)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Markdown file to write.")
@click.option("--fla", "with_fla", is_flag=True, help="Measure flash-linear-attention in the same run.")
@click.option("--rounds", default=20, show_default=True)
@click.option("--shape", "chosen", type=int, multiple=True, help="Index into the shapes; default: all.")
def main(output: Path | None, with_fla: bool, rounds: int, chosen: tuple[int, ...]) -> None:
    shapes = [SHAPES[i] for i in chosen] or SHAPES
    cases = [(shape, gates) for shape in shapes for gates in ("fast", "slow")]
    rows = [measure(shape, gates, with_fla, rounds) for shape, gates in tqdm(cases, desc="shapes")]
    header = ["B x T, H/HV, gates", "forward / both ms", "peak MiB", "host ms", "peak MiB, states recomputed"]
    parts = ["# GPU chain\n", f"`{' '.join(['python', *sys.argv])}`\n", machine() + "\n"]
    if with_fla:
        import fla as package

        header += [f"FLA {package.__version__} forward / both ms", "FLA peak MiB", "FLA host ms", "speedup"]
    parts += [table(header, rows), "\n## Stages, 1 x 32768, 16/32, fast gates, saved states\n", stages(SHAPES[1]), ""]
    text = "\n".join(parts)
    click.echo(text)
    if output:
        output.write_text(text)


if __name__ == "__main__":
    main()
