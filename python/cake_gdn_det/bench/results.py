"""What a run leaves: its rows as JSON, written after every shape, so that a run that is stopped keeps what it has."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .shapes import Shape
from .statistics import median
from .timing import BOTH

SCHEMA = 1  # raised when a key changes its meaning or goes away


@dataclass
class Row:
    """One rule on one shape. Times are samples in milliseconds by phase; the i-th ones of all rules belong together.

    `problem` says why there are no times. Where only the CUDA graph failed, there are eager times, and `note` says so.
    `speedup` is what the first rule gains over this one: ratio of medians, and the bounds of its confidence interval.
    """

    rule: str
    version: str = ""
    form: str = ""
    problem: str = ""
    note: str = ""
    graph: dict[str, list[float]] = field(default_factory=dict)
    eager: dict[str, list[float]] = field(default_factory=dict)
    host: dict[str, list[float]] = field(default_factory=dict)
    speedup: dict[str, list[float | None]] = field(default_factory=dict)
    peak_bytes: int | None = None
    peak_bytes_recomputing: int | None = None
    errors: dict[str, float] = field(default_factory=dict)
    error_shape: str = ""
    repeatable: bool | None = None

    @property
    def samples(self) -> dict[str, list[float]]:
        """The times that rules are compared by: of graphs, where there are any."""
        return self.graph or self.eager

    def milliseconds(self, phase: str = BOTH) -> float | None:
        return median(self.samples[phase]) if phase in self.samples else None


@dataclass
class Case:
    """All rules on one shape, this package's operator first; `floor` is in milliseconds by phase, where it is known."""

    shape: Shape
    gates: str
    floor: dict[str, float]
    rows: list[Row]

    def __str__(self) -> str:
        return f"{self.shape}, {self.gates}"


@dataclass
class Run:
    command: str
    machine: dict[str, str]
    options: dict[str, Any]
    cases: list[Case] = field(default_factory=list)
    complete: bool = False

    def save(self, path: Path) -> None:
        """Replaces the file in one step."""
        text = json.dumps({"schema": SCHEMA, **asdict(self)}, separators=(",", ":"))
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        os.replace(partial, path)

    @staticmethod
    def load(path: Path) -> Run:
        """Raises ValueError when the file is none of `save`'s."""
        try:
            found = json.loads(path.read_text())
            schema = found.pop("schema")
            if schema != SCHEMA:
                raise ValueError(f"is of schema {schema}, this version reads {SCHEMA}")
            cases = [
                Case(
                    Shape(**case["shape"] | {"documents": tuple(case["shape"]["documents"])}),
                    case["gates"],
                    case["floor"],
                    [Row(**row) for row in case["rows"]],
                )
                for case in found.pop("cases")
            ]
            return Run(**found, cases=cases)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError("is no result of a bench run") from error
