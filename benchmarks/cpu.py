"""The CPU engine against the pure-PyTorch rule of transformers: time, peak memory, dtypes, growth with T.

    python benchmarks/cpu.py --output benchmarks/results/cpu.md

Times are medians of interleaved rounds in one process; peak memory is the growth of the resident set over one forward
and backward in a process of its own. Ratios are the result: the times are this machine's at this moment.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from tqdm import tqdm

from cake_gdn_det import _C, __version__, chunk_gated_delta_rule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def inputs(T: int, H: int, HV: int, D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k [1, T, H, D], v [1, T, HV, D], g, beta [1, T, HV], all leaves that require a gradient, and do."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, T, H, D).to(dtype)
    v, do = torch.randn(2, 1, T, HV, D).to(dtype)
    g = F.logsigmoid(torch.randn(1, T, HV) + 2)
    beta = torch.rand(1, T, HV)
    return [x.requires_grad_() for x in (q, k, v, g, beta)] + [do]


def ours(q, k, v, g, beta):
    return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def pytorch(q, k, v, g, beta):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


RULES = {"cake_gdn_det": ours, "pytorch": pytorch}


def step(rule, tensors) -> tuple[float, float]:
    """Seconds of one forward and of one backward."""
    *leaves, do = tensors
    for leaf in leaves:
        leaf.grad = None
    start = time.perf_counter()
    o = rule(*leaves)
    middle = time.perf_counter()
    o.backward(do)
    return middle - start, time.perf_counter() - middle


def interleaved(cases: dict, rounds: int) -> dict:
    """Median (forward, backward) seconds of each case, one step of each in turn, after one untimed round."""
    times = {name: [] for name in cases}
    for i in tqdm(range(rounds + 1), desc=" / ".join(cases), leave=False):
        for name, (rule, tensors) in cases.items():
            seconds = step(rule, tensors)
            if i:
                times[name].append(seconds)
    return {name: tuple(statistics.median(x) for x in zip(*rows)) for name, rows in times.items()}


def peak_bytes(rule: str, shape: dict, save_state: bool | None = None) -> int:
    """Growth of the peak resident set over one step, in a fresh process, over what imports and inputs take."""
    job = json.dumps({"rule": rule, "save_state": save_state, **shape})
    out = subprocess.run([sys.executable, __file__, "--peak", job], check=True, capture_output=True, text=True)
    return int(out.stdout.split()[-1])


def measure_peak(job: dict) -> int:
    rule = RULES[job.pop("rule")]
    save_state = job.pop("save_state")
    if save_state is not None:

        def rule(q, k, v, g, beta):
            return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, save_state=save_state)[0]

    dtype = DTYPES[job.pop("dtype")]
    small, tensors = inputs(**{**job, "T": 64}, dtype=dtype), inputs(**job, dtype=dtype)
    step(rule, small)  # lazy imports and the thread pool are not the operator's memory
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to the present resident set
    before = resident("VmRSS")
    step(rule, tensors)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of a memory field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    unit = json.loads(_C.build_info())["cpu_unit"]
    return (
        f"{cpu or platform.processor()}, {torch.get_num_threads()} threads, unit {unit}; Python "
        f"{platform.python_version()}, torch {torch.__version__}, cake_gdn_det {__version__}; {date.today()}"
    )


def table(header: list[str], rows: list[list]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(x) for x in line) + " |" for line in lines)


def report(shape: dict, rounds: int, lengths: list[int]) -> str:
    import transformers

    size = f"B = 1, T = {shape['T']}, H = {shape['H']}, HV = {shape['HV']}, K = V = {shape['D']}"
    fp32 = inputs(**shape, dtype=torch.float32)
    times = interleaved({name: (rule, fp32) for name, rule in RULES.items()}, rounds)
    peaks = {name: peak_bytes(name, {**shape, "dtype": "fp32"}) for name in RULES}
    peak_recomputed = peak_bytes("cake_gdn_det", {**shape, "dtype": "fp32"}, save_state=False)
    total = {name: sum(x) for name, x in times.items()}
    rows = [
        [name, *(f"{1e3 * x:.1f}" for x in (*times[name], total[name])), f"{peaks[name] / 2**20:.0f}"] for name in RULES
    ]
    side_by_side = table(["rule", "forward ms", "backward ms", "sum ms", "peak MiB"], rows)

    by_dtype = interleaved({n: (ours, inputs(**shape, dtype=dtype)) for n, dtype in DTYPES.items()}, rounds)
    dtype_rows = [[n, f"{1e3 * sum(t):.1f}", f"{sum(t) / sum(by_dtype['fp32']):.2f}"] for n, t in by_dtype.items()]
    growth = []
    for T in lengths:
        case = {f"T = {T}": (ours, inputs(**{**shape, "T": T}, dtype=torch.float32))}
        seconds = sum(interleaved(case, 3)[f"T = {T}"])
        growth.append([T, f"{1e3 * seconds:.1f}", f"{1e6 * seconds / T:.2f}"])
    return "\n".join(
        [
            "# CPU engine\n",
            f"`{' '.join(['python', *sys.argv])}`\n",
            f"{machine()}; transformers {transformers.__version__}. {size}, fp32, in-kernel L2 norm; medians of",
            f"{rounds} interleaved rounds.\n",
            "## Against `torch_chunk_gated_delta_rule` of transformers\n",
            side_by_side,
            f"\nForward + backward: **{total['pytorch'] / total['cake_gdn_det']:.1f}x** faster, peak memory "
            f"**1/{peaks['pytorch'] / peaks['cake_gdn_det']:.1f}**; with `save_state=False` the peak is "
            f"{peak_recomputed / 2**20:.0f} MiB.\n",
            "## Dtypes, forward + backward\n",
            table(["dtype", "ms", "over fp32"], dtype_rows),
            "\n## Growth with T, fp32, forward + backward\n",
            table(["T", "ms", "us a token"], growth),
            "",
        ]
    )


@click.command(help=__doc__)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Markdown file to write.")
@click.option("--threads", default=2, show_default=True, help="Threads of torch and of the engine.")
@click.option("--rounds", default=7, show_default=True, help="Timed rounds of each comparison.")
@click.option("--peak", hidden=True, help="Run one step of this JSON job and print its peak in bytes.")
def main(output: Path | None, threads: int, rounds: int, peak: str | None) -> None:
    torch.set_num_threads(threads)
    if peak:
        click.echo(measure_peak(json.loads(peak)))
        return
    shape = {"T": 2048, "H": 4, "HV": 8, "D": 128}
    text = report(shape, rounds, [1024, 4096, 16384, 65536])
    click.echo(text)
    if output:
        output.write_text(text)


if __name__ == "__main__":
    main()
