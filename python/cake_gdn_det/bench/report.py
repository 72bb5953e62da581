"""A run as Markdown: what was gained over whom, then every shape with all that was measured of it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator

from .reference import OUTPUTS
from .results import Case, Row, Run
from .statistics import CONFIDENCE, geometric_mean, median
from .timing import BOTH, FLUSH_BYTES, PHASES

NOTHING = "–"
WIDEST = 36  # cell that the others of its column are padded to


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table whose source reads well too: text to the left, figures to the right."""
    lines = [header, *rows]
    widths = [max(3, *(min(len(line[i]), WIDEST) for line in lines)) for i in range(len(header))]
    right = [all(_is_figure(line[i]) for line in lines[1:]) and len(lines) > 1 for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = (x.rjust(w) if r else x.ljust(w) for x, w, r in zip(cells, widths, right))
        return f"| {' | '.join(padded)} |"

    rule = "|".join(f" {'-' * (w - 1)}: " if r else f" {'-' * w} " for w, r in zip(widths, right))
    return "\n".join([line(header), f"|{rule}|", *map(line, lines[1:])])


def _is_figure(cell: str) -> bool:
    return cell in ("", NOTHING) or bool(re.fullmatch(r"[\d.e+-]+%?( \[[\d., ]+\])?", cell))


def milliseconds(x: float | None) -> str:
    return NOTHING if x is None else f"{x:.3f}" if x < 100 else f"{x:.1f}"


def mebibytes(x: int | None) -> str:
    return NOTHING if x is None else f"{x / 2**20:.0f}"


def short(problem: str, most: int = 60) -> str:
    """As much of it as a table has room for; it is whole in a note."""
    return problem if len(problem) <= most else problem[: most - 1].rstrip() + "…"


def interval(speedup: list[float | None] | None) -> str:
    """ratio [bounds of its confidence interval]."""
    if not speedup:
        return NOTHING
    ratio, low, high = speedup
    return f"{ratio:.2f}" if low is None else f"{ratio:.2f} [{low:.2f}, {high:.2f}]"


def _name(row: Row) -> str:
    return f"{row.rule} ({row.form})" if row.form else row.rule


def one_line(case: Case, absent: Container[str] = ()) -> str:
    """A case as it passes by on a terminal: forward / forward + backward of every rule but the absent ones."""
    parts = []
    for row in case.rows:
        if row.rule in absent:
            continue
        if row.problem:
            parts.append(f"{row.rule}: {short(row.problem)}")
        else:
            times = " / ".join(milliseconds(row.milliseconds(phase)) for phase in (PHASES[0], BOTH))
            gain = f" ({row.speedup[BOTH][0]:.2f}x)" if BOTH in row.speedup else ""
            parts.append(f"{row.rule} {times} ms{gain}")
    return f"{case!s:<32}  {'   '.join(parts)}"


def summary(run: Run) -> str:
    """One row for every rule that the operator was compared with: how often it is as fast, over all shapes."""
    names = list(dict.fromkeys(row.rule for case in run.cases for row in case.rows[1:]))
    rows = []
    for name in names:
        found = [(case, row) for case in run.cases for row in case.rows if row.rule == name]
        gains = [(row.speedup[BOTH][0], case) for case, row in found if BOTH in row.speedup]
        if not gains:
            reasons = list(dict.fromkeys(row.problem for _, row in found if row.problem))
            rows.append([name, f"0 of {len(found)}", NOTHING, NOTHING, short("; ".join(reasons)) or NOTHING, NOTHING])
            continue
        versions = dict.fromkeys(row.version for _, row in found if row.version)
        forward = [row.speedup[PHASES[0]][0] for _, row in found if PHASES[0] in row.speedup]
        (least, where), (most, there) = min(gains, key=lambda x: x[0]), max(gains, key=lambda x: x[0])
        rows.append(
            [
                " ".join([name, *versions]),
                f"{len(gains)} of {len(found)}",
                f"{geometric_mean(forward):.2f}" if forward else NOTHING,
                f"{geometric_mean(x for x, _ in gains):.2f}",
                f"{least:.2f} at {where}",
                f"{most:.2f} at {there}",
            ]
        )
    if not rows:
        return "Nothing was measured beside the operator."
    header = ["against", "shapes", "forward, geometric mean", f"{BOTH}, geometric mean", "smallest", "largest"]
    return table(header, rows)


def _groups(cases: list[Case]) -> Iterator[tuple[str, Case, Row]]:
    """Every row, with the name of its case where a case begins."""
    for case in cases:
        for i, row in enumerate(case.rows):
            yield ("" if i else str(case)), case, row


def times(cases: list[Case]) -> str:
    header = ["shape, gates", "rule", *(f"{phase} ms" for phase in PHASES), "of the floor"]
    header += ["speedup forward", f"speedup {BOTH}", "error o", "largest error", "same bits"]
    rows = []
    for name, case, row in _groups(cases):
        if name and case.floor:
            rows.append([name, "*floor*", *(milliseconds(case.floor[phase]) for phase in PHASES), *[""] * 6])
            name = ""
        if row.problem:
            rows.append([name, f"{row.rule}: {short(row.problem)}", *[NOTHING] * 10])
            continue
        floor, worst = case.floor.get(BOTH), max(row.errors, key=lambda output: row.errors[output])
        rows.append(
            [
                name,
                _name(row),
                *(milliseconds(row.milliseconds(phase)) for phase in PHASES),
                f"{floor / row.milliseconds():.0%}" if floor else NOTHING,
                interval(row.speedup.get(PHASES[0])),
                interval(row.speedup.get(BOTH)),
                f"{row.errors['o']:.2e}",
                f"{row.errors[worst]:.2e} {worst}",
                "yes" if row.repeatable else "NO",
            ]
        )
    return table(header, rows)


def eager(cases: list[Case]) -> str:
    header = ["shape, gates", "rule", *(f"{phase} ms" for phase in PHASES), *(f"host, {x} ms" for x in PHASES)]
    header += ["peak MiB", "peak MiB, states recomputed"]
    rows = []
    for name, _, row in _groups(cases):
        if row.problem:
            rows.append([name, f"{row.rule}: {short(row.problem)}", *[NOTHING] * 10])
            continue
        device = [milliseconds(median(row.eager[x])) for x in PHASES]
        host = [milliseconds(median(row.host[x])) if row.host else NOTHING for x in PHASES]
        memory = [mebibytes(row.peak_bytes), mebibytes(row.peak_bytes_recomputing)]
        rows.append([name, _name(row), *device, *host, *memory])
    return table(header, rows)


def errors(cases: list[Case]) -> str:
    """Every error once: shapes share the shortened one that errors are measured on."""
    found = {}
    for case in cases:
        for row in case.rows:
            if row.errors:
                found[f"{row.error_shape}, {case.gates}", _name(row)] = row.errors
    rows = [[*key, *(f"{x[name]:.2e}" for name in OUTPUTS)] for key, x in found.items()]
    return table(["shape, gates", "rule", *OUTPUTS], rows)


def notes(run: Run) -> list[str]:
    """One list of what could not be measured, each reason once, with the shapes it holds for; nothing for none."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in run.cases:
        for row in case.rows:
            for text in filter(None, (row.note, row.problem)):
                found.setdefault((row.rule, text), []).append(case)
    lines = []
    for (rule, text), cases in found.items():
        where = "everywhere" if len(cases) == len(run.cases) else "at " + "; ".join(map(str, cases[:3]))
        more = len(cases) - 3 if where != "everywhere" else 0
        lines.append(f"- {rule}, {where}{f' and {more} more' if more > 0 else ''}: {text}")
    return ["Not measured:\n\n" + "\n".join(lines)] if lines else []


def markdown(run: Run, pictures: Iterable[str] = ()) -> str:
    """The whole report."""
    gpu = any(row.host for case in run.cases for row in case.rows)
    method = (
        f"Medians in milliseconds of CUDA events around replays of CUDA graphs, {FLUSH_BYTES >> 20} MiB written before "
        "each to flush the L2, all rules taking turns on the same GPU; where a note says that a graph failed, of eager "
        "calls."
        if gpu
        else "Medians of the wall-clock time of calls in milliseconds, all rules taking turns."
    )
    parts = [
        "# Benchmark" + ("" if run.complete else " (not complete: the run is not at its end, or was stopped)"),
        f"`{run.command}`",
        "; ".join(f"{key} {value}" for key, value in run.machine.items()),
        f"{method} bf16, K = V = 128, in-kernel L2 norm, no initial and no final state; a training forward saves for "
        "its backward. Fast gates are logsigmoid(randn + 2), slow ones logsigmoid(randn) / 16 with a quarter of the "
        "heads at 0. A speedup is the rule's median over the operator's, with its paired bootstrap interval "
        f"({CONFIDENCE:.0%}).",
        "## Speedup of the operator",
        summary(run),
        *(f"![{name}]({name})" for name in pictures),
        "## Times",
        "The floor is what moving every tensor once and the operator's products take on this device at least. Errors "
        "are ||x - ref|| / ||ref|| against float64, on the shortened shapes of the last section; the same bits means "
        "those of o and all gradients, in two runs of the shape itself.",
        times(run.cases),
        *notes(run),
        *(
            [
                "## Eager calls and memory",
                "A call finds an idle GPU; host is the time until it returns. The peak is what a forward + backward "
                "holds at most, beside its inputs.",
                eager(run.cases),
            ]
            if gpu
            else []
        ),
        "## Errors against float64",
        errors(run.cases),
    ]
    return "\n\n".join(parts) + "\n"
