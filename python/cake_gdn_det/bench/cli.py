"""What `python -m cake_gdn_det bench` does and prints."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .. import info
from . import plots, report, stages
from .measure import Options, measure
from .peers import load
from .reference import Accuracy
from .results import Run
from .shapes import GATES, Shape, select
from .timing import CpuDevice, CudaDevice, Device

RESULTS, REPORT, STAGES = "bench.json", "bench.md", "stages.md"
ERROR_TOKENS = {"cuda": 4096, "cpu": 512}


class UserError(ValueError):
    """Something the caller gave cannot be used; the message says what came and what is needed."""


def check_extras() -> None:
    """Raises UserError when a report could not be made, so that no run is lost over it."""
    try:
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        raise UserError("bench needs scipy and matplotlib: pip install 'cake-gdn-det[bench]'") from error


def bench(
    sets: Iterable[str],
    heads: Iterable[tuple[int, int]],
    lengths: Iterable[tuple[int, int]],
    gates: str,
    peers: Iterable[str],
    plans: Iterable[str],
    batch_invariant: bool,
    rounds: int,
    seconds: float,
    error_tokens: int | None,
    device: str,
    output: Path,
) -> Run:
    """Measures, writing the results after every shape, and draws them. An interrupt keeps what is measured."""
    check_extras()
    shapes, chosen = selected(sets, heads, lengths), GATES if gates == "both" else (gates,)
    place = open_device(device)
    rules = load(peers, plans, batch_invariant)
    accuracy = Accuracy(place.device, error_tokens or ERROR_TOKENS[place.device.type])
    options = Options(rounds, seconds)
    run = Run(command(), machine(place), {"rounds": rounds, "seconds": seconds, "error_tokens": accuracy.tokens})
    absent = [rule.name for rule in rules if rule.absence]
    output.mkdir(parents=True, exist_ok=True)
    for rule in rules:
        if rule.absence:
            print(f"{rule.name} {rule.absence}", flush=True)
    try:
        for shape, gate in progress([(shape, gate) for shape in shapes for gate in chosen]):
            run.cases.append(measure(shape, gate, rules, place, accuracy, options))
            run.save(output / RESULTS)
            tqdm.write(report.one_line(run.cases[-1], absent))
            sys.stdout.flush()
        run.complete = True
        run.save(output / RESULTS)
    except KeyboardInterrupt:
        print(f"interrupted: {output / RESULTS} keeps what was measured", file=sys.stderr)
    write_report(run, output)
    return run


def write_report(run: Run, output: Path) -> None:
    """The Markdown and the pictures of a run; prints what was gained over whom."""
    if not run.cases:
        return
    output.mkdir(parents=True, exist_ok=True)
    pictures = plots.draw(run, output)
    (output / REPORT).write_text(report.markdown(run, pictures))
    print(f"\n{report.summary(run)}\n\nwrote {', '.join(str(output / name) for name in (REPORT, *pictures))}")


def redraw(results: Path, output: Path) -> None:
    """The report of an earlier run, measuring nothing."""
    check_extras()
    try:
        run = Run.load(results)
    except (OSError, ValueError) as error:
        raise UserError(f"--from {results}: {error}") from error
    write_report(run, output)


def measure_stages(
    sets: Iterable[str],
    heads: Iterable[tuple[int, int]],
    lengths: Iterable[tuple[int, int]],
    gates: str,
    device: str,
    output: Path,
) -> None:
    """The operator's own stages, a table for every shape."""
    place = open_device(device)
    if not isinstance(place, CudaDevice):
        raise UserError("--stages needs a GPU: the CPU engine is one program")
    gate = "fast" if gates == "both" else gates
    (rule,) = load(())
    parts = ["# Stages of a forward + backward", f"`{command()}`", "; ".join(map(" ".join, machine(place).items()))]
    output.mkdir(parents=True, exist_ok=True)
    for shape in progress(selected(sets, heads, lengths)):
        parts += [f"## {shape}, {gate} gates", stages.measure_stages(shape, gate, rule, place)]
        tqdm.write(f"\n{parts[-2]}\n\n{parts[-1]}")
        (output / STAGES).write_text("\n\n".join(parts) + "\n")
    print(f"\nwrote {output / STAGES}")


def selected(sets: Iterable[str], heads: Iterable[tuple[int, int]], lengths: Iterable[tuple[int, int]]) -> list[Shape]:
    for H, HV in heads:
        if HV % H:
            raise UserError(f"--heads {H}/{HV}: HV must be a multiple of H")
    return select(sets, heads, lengths)


def open_device(name: str) -> Device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError(f"--device cuda: torch {torch.__version__} sees no GPU")
    return CudaDevice() if name == "cuda" or (name == "auto" and available) else CpuDevice()


def progress(items: list[Any]) -> tqdm:
    """A bar on a terminal, nothing elsewhere: every item prints its line."""
    form = "{percentage:3.0f}%|{bar:30}| {n}/{total} shapes [{elapsed}<{remaining}]"
    return tqdm(items, bar_format=form, dynamic_ncols=True, disable=not sys.stderr.isatty())


def command() -> str:
    return shlex.join(["python", "-m", "cake_gdn_det", *sys.argv[1:]])


def machine(place: Device) -> dict[str, str]:
    """Where a run was made, and with what."""
    build = info.collect()["library"].get("build", {})
    commit = f" ({build['git_commit'][:12]})" if build.get("git_commit") else ""
    names = {"device": place.name, **place.versions}
    names["cake_gdn_det"] = f"{build.get('version', 'unknown')}{commit}"
    names["built with CUDA"] = build.get("cuda") or "none"
    names["torch"] = torch.__version__
    names["Python"] = platform.python_version()
    names["on"] = str(date.today())
    return names
