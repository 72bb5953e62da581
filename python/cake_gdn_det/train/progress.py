"""Progress of a run on stderr: a bar on a terminal, about ten plain lines elsewhere."""

from __future__ import annotations

import sys
import time

import torch
from tqdm import tqdm

from .data import Corpus
from .loop import Observer, TrainConfig
from .model import LanguageModel


class Progress(Observer):
    """Context manager that shows the loss (an average over about ten steps) and the speed of a run."""

    def __init__(self, config: TrainConfig, label: str = "training") -> None:
        self.config, self.label = config, label
        self.bits = 0.0
        self.bar: tqdm | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def start(self, model: LanguageModel, corpus: Corpus, device: torch.device, why: str) -> None:
        self.begin = time.perf_counter()
        if sys.stderr.isatty():
            form = "{desc} {percentage:3.0f}%|{bar:30}| {n}/{total} [{elapsed}<{remaining}{postfix}]"
            self.bar = tqdm(total=self.config.steps, desc=self.label, bar_format=form, dynamic_ncols=True)

    def step(self, step: int, bits: float) -> None:
        self.bits += (bits - self.bits) / min(step, 10)
        speed = step * self.config.batch_bytes / (time.perf_counter() - self.begin)
        text = f"{self.bits:.2f} bits/byte, {speed:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
        elif step * 10 // self.config.steps > (step - 1) * 10 // self.config.steps:
            print(f"{self.label}: step {step}/{self.config.steps}, {text}", file=sys.stderr, flush=True)


class Report(Progress):
    """Also says, on stdout, what is about to be trained on what."""

    def start(self, model: LanguageModel, corpus: Corpus, device: torch.device, why: str) -> None:
        config, size = self.config.model, sum(map(len, corpus.documents))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        held_out = sum(map(len, corpus.held_out))
        print(f"text    {corpus.source}: {size / 1e6:.2f} MB, of which {held_out / 1e3:.0f} kB are held out")
        print(f"model   {parameters / 1e6:.2f} M parameters: {config.layers} layers of width {config.width},", end=" ")
        print(f"{config.value_heads} value heads of {config.head_dim}")
        threads = f"{torch.get_num_threads()} CPU thread{'s' if torch.get_num_threads() > 1 else ''}"
        print(f"device  {device} ({threads}, torch {torch.__version__}): {why}", flush=True)
        super().start(model, corpus, device, why)
