"""The loss curve as a picture, through matplotlib (an optional dependency)."""

from __future__ import annotations

from pathlib import Path

from .data import UserError
from .loop import Result


def check(path: str | Path) -> None:
    """Raises UserError when `plot` could not write to `path`, so that no run is lost over it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install 'cake-gdn-det[plot]'") from error
    if not Path(path).resolve().parent.is_dir():
        raise UserError(f"--plot {path}: there is no directory {Path(path).resolve().parent}")
    if Path(path).suffix.lower() != ".png":
        raise UserError(f"--plot {path}: the name of a .png file is needed")


def plot(result: Result, path: str | Path) -> None:
    """Draws the loss of each step, its running mean, the held-out loss and the bigram entropy; writes a PNG."""
    from matplotlib.figure import Figure

    config, history = result.config, result.history
    thousands = [step * config.batch_bytes / 1000 for step in range(1, len(history) + 1)]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(thousands, history, color="tab:blue", alpha=0.3, linewidth=0.8, label="each step")
    axes.plot(thousands, _running_mean(history), color="tab:blue", linewidth=2, label="running mean")
    axes.plot(
        thousands[-1:],
        [result.held_out_bits],
        color="tab:orange",
        marker="D",
        linestyle="none",
        clip_on=False,
        zorder=3,
        label=f"held-out documents: {result.held_out_bits:.2f}",
    )
    axes.axhline(
        result.bigram_bits, color="black", linestyle="--", label=f"bigram entropy of the text: {result.bigram_bits:.2f}"
    )
    axes.set_xlim(0, thousands[-1])
    axes.set_ylim(0, max(8.5, max(history[len(history) // 20 :])))
    axes.set_xlabel("text read in training (kB)")
    axes.set_ylabel("loss (bits per byte)")
    axes.set_title(f"Gated DeltaNet language model: {result.corpus.source}", fontsize=11, wrap=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _running_mean(values: list[float]) -> list[float]:
    """Mean over the last twentieth of the run before each step."""
    window = max(1, len(values) // 20)
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]
