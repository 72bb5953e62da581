"""What `python -m cake_gdn_det train` does and prints."""

from __future__ import annotations

from . import plot as plots
from . import verify as verification
from .loop import Result, TrainConfig
from .loop import train as run
from .progress import Report

VERIFY_STEPS = 30  # enough that a bit lost early reaches every weight


def train(text: str | None, device: str, steps: int | None, seed: int, plot: str | None) -> None:
    """Trains, prints the result, and draws it when `plot` names a file."""
    if plot:
        plots.check(plot)
    config = TrainConfig(text=text, device=device, steps=steps or TrainConfig.steps, seed=seed)
    with Report(config) as report:
        result = run(config, report)
    print(summary(result))
    if plot:
        plots.plot(result, plot)
        print(f"wrote {plot}")


def summary(result: Result) -> str:
    """The outcome in bits per byte, against what the previous byte alone allows."""
    steps, averaged = result.config.steps, max(1, result.config.steps // 10)
    margin = result.bigram_bits - result.held_out_bits
    verdict = (
        f"The model beats the bigram entropy by {margin:.3f} bits per byte on held-out text."
        if margin > 0
        else f"The model does not beat the bigram entropy: it is {-margin:.3f} bits per byte above it on held-out text."
    )
    rows = (
        (f"training text, last {averaged} steps", result.training_bits),
        ("held-out documents", result.held_out_bits),
        ("bigram entropy of the text", result.bigram_bits),
    )
    lines = [f"{steps} steps of {result.config.batch_bytes} bytes in {result.seconds:.1f} s", "", "bits per byte"]
    lines += [f"  {name:<32} {bits:.3f}" for name, bits in rows]
    return "\n".join([*lines, "", verdict])


def verify(text: str | None, device: str, steps: int | None, seed: int) -> bool:
    """Trains twice in two processes, prints both hashes and whether they agree; returns that."""
    config = TrainConfig(text=text, device=device, steps=steps or VERIFY_STEPS, seed=seed)
    prints = [verification.in_new_process(config, f"run {i} of 2") for i in (1, 2)]
    for i, found in enumerate(prints, 1):
        print(f"run {i}  SHA-256 of all weights  {found.total}")
    different = verification.first_difference(*prints)
    if different:
        print(f"DIFFERENT: the first parameter that differs is {different}")
        return False
    print(f"identical: {len(prints[0].parameters)} parameters after {config.steps} steps, to the bit")
    return True
