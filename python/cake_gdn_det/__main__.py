"""Command line: `python -m cake_gdn_det info` and `python -m cake_gdn_det train`.

Commands import what they need when they run: `info` has to work where torch or the compiled core does not.
"""

from __future__ import annotations

import json
import os

import click


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


if __name__ == "__main__":
    main(prog_name="python -m cake_gdn_det")
