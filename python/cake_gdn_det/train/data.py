"""Text for the training demo: files read as bytes, split into training and held-out documents, packed into batches."""

from __future__ import annotations

import math
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

START = 256  # the token before the first byte of a document
HELD_OUT = 0.03  # share of the text's bytes kept for evaluation
MINIMUM_BYTES = 8192  # of a text: enough for a few batches and a held-out part


class UserError(ValueError):
    """Something the caller gave cannot be used; the message says what came and what is needed."""


@dataclass(frozen=True)
class Batch:
    """Packed documents: `inputs` and `targets` [T] int64, `cu_seqlens` [N + 1] int64.

    `inputs[t]` is the byte before `targets[t]`, or START where a document starts: every byte is predicted once, and
    none from another document.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.inputs.to(device), self.targets.to(device), self.cu_seqlens.to(device))


@dataclass(frozen=True)
class Corpus:
    """A text as documents, each a uint8 tensor [bytes]; none is empty."""

    source: str
    training: list[Tensor]
    held_out: list[Tensor]

    @property
    def documents(self) -> list[Tensor]:
        return self.training + self.held_out


def read_corpus(path: str | Path | None = None) -> Corpus:
    """Reads a text and holds a part of it out.

    Args:
        path: a file (one document) or a directory (each file a document; hidden and binary files are left out). None
            takes the modules of the running Python's standard library.

    Returns:
        The corpus. Order and split depend on the text alone. About 3 % of the bytes are held out: the last documents
        of a fixed shuffle, the one at the cut divided (so a single file holds out its tail).

    Raises:
        UserError: nothing there, or fewer than MINIMUM_BYTES.
    """
    if path is None:
        source, files = f"standard library of Python {platform.python_version()}", _standard_library()
    else:
        source, files = str(path), _files(Path(path))
    try:
        contents = [file.read_bytes() for file in files]
    except OSError as error:
        raise UserError(f"cannot read the text: {error}") from error
    if Path(source).is_dir():  # a null byte marks a binary file; a file named by itself is taken as it is
        contents = [content for content in contents if b"\0" not in content]
    documents = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents if content]
    size = sum(map(len, documents))
    if size < MINIMUM_BYTES:
        count = f"{len(documents)} file{'' if len(documents) == 1 else 's'}"
        raise UserError(
            f"the text is too small: {source} has {size} bytes of text in {count}, at least {MINIMUM_BYTES} bytes are "
            "needed (--text names a file or directory)"
        )
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0)).tolist()
    training, held_out, room = [], [], size - int(size * HELD_OUT)
    for document in (documents[i] for i in order):
        head, tail = document[:room], document[room:]
        training += [head] if len(head) else []
        held_out += [tail] if len(tail) else []
        room -= len(head)
    return Corpus(source, training, held_out)


def _standard_library() -> list[Path]:
    """The top-level modules of the standard library, by name: what every installation has, without its tests."""
    directory = Path(sysconfig.get_path("stdlib"))
    return sorted(file for file in directory.glob("*.py") if file.stem in sys.stdlib_module_names)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        visible = (file for file in path.rglob("*") if not any(p.startswith(".") for p in file.relative_to(path).parts))
        return sorted(file for file in visible if file.is_file())
    if not path.exists():
        raise UserError(f"no such file or directory: {path}; a text file, or a directory of them, is needed")
    return [path]


def cut(documents: Iterable[Tensor], longest: int) -> list[Tensor]:
    """Cuts documents into pieces of at most `longest` bytes, which are documents of their own from then on."""
    return [piece for document in documents for piece in document.split(longest)]


def shuffled(documents: list[Tensor], seed: int) -> Iterator[Tensor]:
    """All documents in a new order each time around, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for i in torch.randperm(len(documents), generator=generator).tolist():
            yield documents[i]


def packed(documents: Iterable[Tensor], batch_bytes: int) -> Iterator[Batch]:
    """Packs documents in order into batches of `batch_bytes`; the last batch has what is left.

    A document that does not fit is cut, and its rest starts the next batch as a document of its own.
    """
    parts, room = [], batch_bytes
    for document in documents:
        while len(document):
            part, document = document[:room], document[room:]
            parts.append(part)
            room -= len(part)
            if not room:
                yield pack(parts)
                parts, room = [], batch_bytes
    if parts:
        yield pack(parts)


def pack(documents: list[Tensor]) -> Batch:
    """One batch of all `documents`, none of them empty."""
    cu_seqlens = torch.tensor([0, *map(len, documents)]).cumsum(0)
    targets = torch.cat(documents).long()
    inputs = targets.roll(1)
    inputs[cu_seqlens[:-1]] = START
    return Batch(inputs, targets, cu_seqlens)


def bigram_entropy(documents: Iterable[Tensor]) -> float:
    """H(next byte | byte) in bits, from the counts of all neighbouring bytes in the same document.

    No model that sees only the previous byte codes these documents in fewer bits per byte.
    """
    pairs = torch.zeros(256 * 256, dtype=torch.int64)
    for document in documents:
        codes = document.long()
        pairs += torch.bincount(codes[:-1] * 256 + codes[1:], minlength=256 * 256)
    joint = pairs.view(256, 256).double() / pairs.sum()
    conditional = joint / joint.sum(1, keepdim=True)
    return -torch.special.xlogy(joint, conditional.nan_to_num()).sum().item() / math.log(2)
