"""The training loop: AdamW with warm-up and cosine decay, evaluation on held-out documents, fixed order of everything.

The same configuration on the same machine gives the same weights to the bit, with the same torch build and number of
threads: torch's matrix products may round differently when either changes (the operator's own bits depend on neither).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .data import Corpus, UserError, bigram_entropy, cut, packed, read_corpus, shuffled
from .model import LanguageModel, ModelConfig


@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, for how long. The defaults are those of `python -m cake_gdn_det train`."""

    text: str | None = None  # file or directory; None: the Python standard library's source
    device: str = "auto"  # "auto", "cpu" or "cuda"
    steps: int = 250
    seed: int = 0  # of the initial weights and of the order of the training documents
    batch_bytes: int = 2048
    piece_bytes: int = 1024  # longer documents are cut
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    clip: float = 1.0  # of the gradient's norm
    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass
class Result:
    """What a run gave. All losses are in bits per byte."""

    config: TrainConfig
    corpus: Corpus
    model: LanguageModel
    history: list[float]  # loss of each step, before its update
    training_bits: float  # mean of the last tenth of `history`
    held_out_bits: float
    bigram_bits: float  # conditional bigram entropy of the whole text
    seconds: float


class Observer:
    """Is told how a run goes; this one does nothing."""

    def start(self, model: LanguageModel, corpus: Corpus, device: torch.device, why: str) -> None:
        """Everything is ready; `why` says why the run is on this device."""

    def step(self, step: int, bits: float) -> None:
        """Step number `step`, from 1, is done; its loss was `bits` per byte."""


def select_device(name: str) -> tuple[torch.device, str]:
    """Turns "auto", "cpu" or "cuda" into a device that runs the operator, and says why that one.

    "auto" takes the first GPU when this build's operator runs on it, otherwise the CPU.

    Raises:
        UserError: "cuda" was asked for and cannot be had; the message says whether torch, the machine or this build
            is the reason.
    """
    if name == "cpu":
        return torch.device("cpu"), "as asked for"
    from ..info import gpu_support  # late: it looks at the devices

    runs, why = gpu_support(0)
    if runs:
        return torch.device("cuda", 0), why
    if name == "cuda":
        raise UserError(f"--device cuda: {why}")
    return torch.device("cpu"), why


def train(config: TrainConfig, observer: Observer | None = None) -> Result:
    """Trains a model from scratch and evaluates it.

    Args:
        config: everything that decides the result.
        observer: is told of the start and of each step.

    Raises:
        UserError: a text or device that cannot be used.
        FloatingPointError: the loss is no longer finite.
    """
    observer = observer or Observer()
    device, why = select_device(config.device)
    corpus = read_corpus(config.text)
    start = time.perf_counter()
    with _deterministic():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = LanguageModel(config.model)
        model.to(device)
        observer.start(model, corpus, device, why)
        optimizer = _optimizer(model, config)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config.steps))
        batches = packed(shuffled(cut(corpus.training, config.piece_bytes), config.seed), config.batch_bytes)
        history = []
        for step in range(1, config.steps + 1):
            batch = next(batches).to(device)
            loss = nn.functional.cross_entropy(model(batch.inputs, batch.cu_seqlens), batch.targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            history.append(loss.item() / math.log(2))
            if not math.isfinite(history[-1]):
                raise FloatingPointError(f"the loss of step {step} is {history[-1]}")
            observer.step(step, history[-1])
        held_out_bits = evaluate(model, corpus.held_out, config)
    tail = history[-max(1, len(history) // 10) :]
    return Result(
        config=config,
        corpus=corpus,
        model=model,
        history=history,
        training_bits=sum(tail) / len(tail),
        held_out_bits=held_out_bits,
        bigram_bits=bigram_entropy(corpus.documents),
        seconds=time.perf_counter() - start,
    )


@torch.no_grad()
def evaluate(model: LanguageModel, documents: list[Tensor], config: TrainConfig) -> float:
    """Bits per byte of `documents`, cut and packed as in training."""
    device = next(model.parameters()).device
    total = 0.0
    for batch in packed(cut(documents, config.piece_bytes), 4 * config.batch_bytes):
        batch = batch.to(device)
        total += nn.functional.cross_entropy(
            model(batch.inputs, batch.cu_seqlens), batch.targets, reduction="sum"
        ).item()
    return total / sum(map(len, documents)) / math.log(2)


def _optimizer(model: LanguageModel, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; only matrices decay, not gains, gates and biases."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def _rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: a linear warm-up over a twentieth of the steps, then a cosine to a twentieth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Makes torch refuse operations whose bits vary; the caller's setting comes back at the end."""
    # cuBLAS reads it when a process first uses it; torch refuses cuBLAS calls without it in this mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    previous = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # guards against reading what nobody wrote; slow
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(previous, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
