"""Command line: `python -m cake_gdn_det info`, `train` and `bench`.

Commands import what they need when they run: `info` has to work where torch or the compiled core does not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

SETS = ("qwen3-next", "qwen3.5", "symmetric", "packed")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Deterministic chunked Gated DeltaNet training."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(as_json: bool) -> None:
    """Show versions, the build, the devices and what runs where.

    Exits with 1 when the operator runs nowhere.
    """
    from .info import collect, render

    found = collect()
    click.echo(json.dumps(found, indent=2) if as_json else render(found))
    if not any(run["runs"] for run in found["runs"]):
        raise SystemExit(1)


@main.command(context_settings={"show_default": True})
@click.option("--text", metavar="PATH", help="File or directory to train on.  [default: Python's standard library]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to train.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    show_default=False,
    help="Steps of 2048 bytes.  [default: 250; 30 with --verify]",
)
@click.option("--seed", type=int, default=0, help="Of the initial weights and the order of the documents.")
@click.option("--plot", metavar="PNG", help="Draw the loss curve into this file.")
@click.option("--verify", is_flag=True, help="Train twice, in two processes, and compare all weights bit for bit.")
def train(text: str | None, device: str, steps: int | None, seed: int, plot: str | None, verify: bool) -> None:
    """Train a byte-level Gated DeltaNet language model on real text.

    Documents are packed and never see each other. At the end the loss on the training text and on held-out documents
    is compared with the conditional bigram entropy of the text, the best that the previous byte alone allows.

    With --verify the exit status is 1 when the two runs differ in any bit.
    """
    if verify and plot:
        raise click.UsageError("--plot and --verify do not go together: --verify draws nothing")
    # Read when torch loads. Threads that spin while they wait for each other make a run several times slower on a
    # machine that has other work to do, and gain little on an idle one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from .train import UserError, cli
    except ImportError as error:
        raise click.ClickException(f"{error} (`python -m cake_gdn_det info` shows what is broken)") from error

    try:
        if verify:
            raise SystemExit(0 if cli.verify(text, device, steps, seed) else 1)
        cli.train(text, device, steps, seed, plot)
    except (UserError, FloatingPointError) as error:
        raise click.ClickException(str(error)) from error


class Pairs(click.ParamType):
    """Pairs of positive numbers, `sign` between the two and commas between pairs; a number alone is (`first`, it)."""

    def __init__(self, name: str, sign: str, first: int | None = None) -> None:
        self.name, self.sign, self.first = name, sign, first

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[tuple[int, int]]:
        if not isinstance(value, str):
            return value  # a default
        pairs = []
        for text in value.split(","):
            numbers = text.strip().split(self.sign)
            if self.first is not None and len(numbers) == 1:
                numbers = [str(self.first), *numbers]
            if len(numbers) != 2 or not all(n.isascii() and n.isdigit() and int(n) for n in numbers):
                self.fail(f"{text.strip()!r} is not {self.name}; commas stand between several", param, ctx)
            pairs.append((int(numbers[0]), int(numbers[1])))
        return pairs


@main.command(context_settings={"show_default": True})
@click.option(
    "--set",
    "sets",
    type=click.Choice([*SETS, "all"]),
    multiple=True,
    default=["qwen3-next"],
    help="Shapes to measure; may be given several times. Heads are 16/32; 16/48, 16/64, 8/32 and 2/8; 32/32; and "
    "16/32 with packed documents.",
)
@click.option(
    "--heads",
    metavar="H/HV,...",
    type=Pairs("H/HV", "/"),
    default=(),
    show_default=False,
    help="Other heads than the set's.",
)
@click.option(
    "--lengths",
    metavar="[Bx]T,...",
    type=Pairs("[Bx]T", "x", first=1),
    default=(),
    show_default=False,
    help="Other lengths: 8192,8x4096 is one sequence of 8192 tokens and eight of 4096.  [default: 2048, 8192, 8x4096, "
    "32768, 65536, 131072; packed: 32768, 65536]",
)
@click.option("--gates", type=click.Choice(["fast", "slow", "both"]), default="both", help="How fast states decay.")
@click.option(
    "--peer",
    "peers",
    type=click.Choice(["fla", "flashqla", "pytorch", "none"]),
    multiple=True,
    default=["fla", "flashqla", "pytorch"],
    help="What to measure beside the operator; may be given several times. One that is not installed is a row that "
    "says so.",
)
@click.option(
    "--plan",
    "plans",
    metavar="PLAN",
    multiple=True,
    help="A plan to pin, measured beside the operator's own; may be given several times.",
)
@click.option("--batch-invariant", is_flag=True, help="Measure the operator with batch_invariant=True too.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, help="Samples of every time, at most.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=1.0,
    help="Limit on the sampling of a rule on a shape, once it has five of every time.",
)
@click.option(
    "--error-tokens",
    type=click.IntRange(min=1),
    show_default=False,
    help="Length of the float64 reference.  [default: 4096; 512 on a CPU]",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to measure.")
@click.option("--stages", is_flag=True, help="Measure the operator's own GPU stages beside their floors instead.")
@click.option("--from", "results", type=click.Path(path_type=Path), help="Only draw the report of this bench.json.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default="bench-results",
    metavar="DIR",
    help="Where bench.json, bench.md and the plots go.",
)
def bench(
    sets: tuple[str, ...],
    peers: tuple[str, ...],
    stages: bool,
    results: Path | None,
    output: Path,
    plans: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure speed, memory and error of the operator, and of others beside it.

    All rules take turns on the same device in one run: forward, training forward, backward and both, under CUDA graphs
    with the L2 flushed, and eager with the host's time apart. Beside each time stand the speedup with a 95 % paired
    bootstrap interval, the error against float64, and whether the bits repeat. bench.json is written after every
    shape: a run that is stopped keeps what it has, and --from draws it.

    Needs scipy and matplotlib: pip install 'cake-gdn-det[bench]'.
    """
    if "none" in peers and len(peers) > 1:
        raise click.UsageError("--peer none goes with no other --peer")
    try:
        from .bench import cli
    except ImportError as error:
        raise click.ClickException(f"{error} (`python -m cake_gdn_det info` shows what is broken)") from error

    try:
        if results:
            cli.redraw(results, output)
        elif stages:
            shown = {key: options[key] for key in ("heads", "lengths", "gates", "device")}
            cli.measure_stages(sets=SETS if "all" in sets else sets, output=output, **shown)
        else:
            peers = tuple(peer for peer in peers if peer != "none")
            cli.bench(sets=SETS if "all" in sets else sets, peers=peers, plans=plans, output=output, **options)
    except cli.UserError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main(prog_name="python -m cake_gdn_det")
