"""What the Python layer costs: one forward + backward where the operator has next to nothing to compute.

    python benchmarks/overhead.py --output benchmarks/results/overhead.md

B = T = H = HV = 1, K = V = 16, all five inputs require a gradient. The parts are timed alone, in blocks that take turns
with the whole, so that whatever else the machine does falls on all of them alike; they overlap and leave gaps, so they
need not sum up.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import click
import torch
from tqdm import tqdm

from cake_gdn_det import _C, __version__, chunk_gated_delta_rule
from cake_gdn_det.ops import checks, torch_ops
from cake_gdn_det.ops.call import Call, device_of, shape_of

BUDGET = 150.0
BLOCK = 100
NEEDS = [True] * 5 + [False] * 3
REST = (
    None,
    False,
    False,
    False,
    False,
    False,
    None,
    None,
    None,
    None,
    False,
    None,
    None,
    64,
    "auto",
    False,
    None,
    None,
)


class Empty(torch.autograd.Function):
    """What torch takes for an autograd.Function with as many arguments and gradients that does nothing."""

    @staticmethod
    def forward(ctx, *arguments):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arguments[:10])
        return arguments[2].detach(), None

    @staticmethod
    def backward(ctx, d_o, _):
        return (*ctx.saved_tensors[:5], *[None] * 9)


def problems(forward: tuple, backward: tuple) -> dict[str, tuple]:
    """The values of which the two operators make their _C.Problem (tensors: they keep the memory alive)."""
    seen = []

    class Recorder:
        @staticmethod
        def of(*values):
            seen.append(values)
            return original.of(*values)

    original, _C.Problem = _C.Problem, Recorder
    try:
        torch_ops._forward(*forward)
        torch_ops._backward(*backward)
    finally:
        _C.Problem = original
    return dict(zip(("forward", "backward"), seen))


def parts() -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 1, 16, requires_grad=True) for _ in range(3))
    g, beta = (torch.rand(1, 1, 1).neg().requires_grad_(), torch.rand(1, 1, 1).requires_grad_())
    leaves, d_o = (q, k, v, g, beta), torch.randn(1, 1, 1, 16)
    inputs = (*leaves, None, None, None, None, None)

    def whole():
        o, _ = chunk_gated_delta_rule(*leaves)
        torch.autograd.grad(o, leaves, d_o)

    def empty():
        o, _ = Empty.apply(*inputs, 0.25, 0, False, True)
        torch.autograd.grad(o, leaves, d_o)

    def record():
        return Call(*leaves, None, *REST, shape_of(q), shape_of(v), *device_of(q))

    def untracked(run, *arguments):
        # Grad mode is off inside an autograd.Function; switching it here would be timed too.
        detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
        return lambda: run(*detached)

    def engine(run, direction, values):
        problem = _C.Problem.of(*values)
        size = _C.workspace_size(problem, direction)
        scratch = torch.empty(size, dtype=torch.uint8)
        return lambda: run(problem, scratch.data_ptr(), size, 0)

    call = record()
    forward = (*inputs, 0.25, 0, False, True, None)
    backward = (d_o, None, *inputs, None, None, 0.25, 0, NEEDS, None)
    with torch.no_grad():
        seen = problems(forward, backward)
    runs = {
        "whole": whole,
        "torch: an empty autograd.Function": empty,
        "record of the call": record,
        f"checks ({len(checks.RULES)} rules)": lambda: checks.check(call),
        "cake_gdn_det::forward": untracked(torch_ops.forward, *forward),
        "cake_gdn_det::backward": untracked(torch_ops.backward, *backward),
        "of these two, _C.Problem": lambda: [_C.Problem.of(*values) for values in seen.values()],
        "of these two, the engine's forward": engine(_C.forward, _C.FORWARD, seen["forward"]),
        "of these two, the engine's backward": engine(_C.backward, _C.BACKWARD, seen["backward"]),
    }
    return runs


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--blocks", default=40, show_default=True, help=f"Blocks of {BLOCK} calls of every part.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the table to this file too.")
def main(blocks: int, output: Path | None) -> None:
    """Times the Python layer (microseconds a call)."""
    runs = parts()
    times: dict[str, list[int]] = {name: [] for name in runs}
    for block in tqdm(range(blocks + 1), desc="overhead", leave=False):
        for name, run in runs.items():
            for _ in range(BLOCK):
                start = time.perf_counter_ns()
                run()
                stop = time.perf_counter_ns()
                if block:  # the first one warms up
                    times[name].append(stop - start)
    rows = {name: (statistics.median(x) / 1e3, sorted(x)[len(x) // 20] / 1e3) for name, x in times.items()}
    lines = [
        "# Overhead of the Python layer: forward + backward, one token, one head, K = V = 16",
        "",
        f"{date.today()}, cake_gdn_det {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; budget {BUDGET:.0f} us.",
        "",
        "| part | median, us | 5th percentile, us |",
        "|---|---|---|",
        *[f"| {name} | {median:.1f} | {low:.1f} |" for name, (median, low) in rows.items()],
    ]
    text = "\n".join(lines) + "\n"
    click.echo(text)
    if output:
        output.write_text(text)
    if rows["whole"][0] > BUDGET:
        raise SystemExit(f"the median of the whole, {rows['whole'][0]:.1f} us, is over the budget of {BUDGET:.0f} us")


if __name__ == "__main__":
    main()
