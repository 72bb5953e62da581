"""Bitwise repeatability of a whole training run: train twice, in two processes, and compare every weight."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from torch import nn

from .loop import TrainConfig, train
from .progress import Progress


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 of a model: of all its parameters together, and of each by name, in the model's order."""

    total: str
    parameters: dict[str, str]


def fingerprint(model: nn.Module) -> Fingerprint:
    """Hashes names, shapes, dtypes and bytes of all parameters."""
    total, parameters = hashlib.sha256(), {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().cpu().contiguous()
        content = ctypes.string_at(values.data_ptr(), values.nbytes)
        header = f"{name} {tuple(values.shape)} {values.dtype}\n".encode()
        parameters[name] = hashlib.sha256(header + content).hexdigest()
        total.update(header + content)
    return Fingerprint(total.hexdigest(), parameters)


def train_and_fingerprint(config: TrainConfig, label: str) -> Fingerprint:
    """One run, in this process."""
    with Progress(config, label) as progress:
        return fingerprint(train(config, progress).model)


def in_new_process(config: TrainConfig, label: str) -> Fingerprint:
    """One run, in a process that shares nothing with this one and ends after it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(train_and_fingerprint, config, label).result()


def first_difference(a: Fingerprint, b: Fingerprint) -> str | None:
    """Name of the first parameter that is not the same to the bit; None when all are."""
    names = list(a.parameters) + [name for name in b.parameters if name not in a.parameters]
    return next((name for name in names if a.parameters.get(name) != b.parameters.get(name)), None)
