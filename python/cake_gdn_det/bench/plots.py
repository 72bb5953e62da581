"""A run as two pictures, through matplotlib (an optional dependency)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .results import Case, Run
from .statistics import geometric_mean
from .timing import BOTH, PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0b6e4f", "#d1495b", "#2e5eaa", "#edae49", "#7b4b94", "#66717e")  # ours, then the others in their order
GATE_STYLES = {"fast": {"marker": "o", "linestyle": "-"}, "slow": {"marker": "D", "linestyle": (0, (4, 2))}}
SHOWN = (PHASES[0], BOTH)


def draw(run: Run, folder: Path) -> list[str]:
    """Writes the pictures that the run has data for; returns their file names."""
    names = []
    for name, figure in (("times.png", _times(run)), ("speedups.png", _speedups(run))):
        if figure is not None:
            figure.savefig(folder / name)
            names.append(name)
    return names


def _colors(run: Run) -> dict[str, str]:
    rules = dict.fromkeys(row.rule for case in run.cases for row in case.rows)
    return {rule: COLORS[i % len(COLORS)] for i, rule in enumerate(rules)}


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def _plain_axis(axes: Axes, which: str) -> None:
    """A logarithmic axis with plain numbers at 1, 2, 5, and no smaller ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axis.set_minor_locator(NullLocator())


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def _times(run: Run) -> Figure | None:
    """Nanoseconds a token over the length of one sequence: a panel for each head count, its phases below each other."""
    cases = [c for c in run.cases if c.shape.B == 1 and not c.shape.documents and any(r.samples for r in c.rows)]
    heads = list(dict.fromkeys(case.shape.heads for case in cases))
    if not heads:
        return None
    colors = _colors(run)
    columns = min(3, len(heads))
    bands = -(-len(heads) // columns)
    figure = _figure(max(7.0, 1.2 + 3.4 * columns), 0.6 + 5.6 * bands)
    grid = figure.subplots(len(SHOWN) * bands, columns, sharey="row", squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    for i, pair in enumerate(heads):
        band, column = divmod(i, columns)
        for j, phase in enumerate(SHOWN):
            axes = grid[len(SHOWN) * band + j, column]
            axes.set_visible(True)
            _times_panel(axes, [case for case in cases if case.shape.heads == pair], phase, colors)
            if j == 0:
                axes.set_title(f"heads {pair}", fontsize=10)
            if j == len(SHOWN) - 1:
                axes.set_xlabel("tokens in one sequence")
            if column == 0:
                axes.set_ylabel(f"{phase}\nns a token")
    lines = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside lower center",
        ncols=min(columns + 1, len(colors) + 1),
        frameon=False,
        fontsize=9,
    )
    what = "Time against the floor" if "floor" in lines else "Time"
    figure.suptitle(f"{what}, {run.machine['device']}", fontsize=11)
    return figure


def _times_panel(axes: Axes, cases: list[Case], phase: str, colors: dict[str, str]) -> None:
    gates = list(dict.fromkeys(case.gates for case in cases))
    lengths = sorted({case.shape.T for case in cases})
    for rule, color in colors.items():
        for gate in gates:
            points = sorted(
                (case.shape.T, 1e6 * ms / case.shape.T)
                for case in cases
                if case.gates == gate
                for row in case.rows
                if row.rule == rule and (ms := row.milliseconds(phase)) is not None
            )
            if points:
                label = rule if len(gates) == 1 else f"{rule}, {gate} gates"
                face = color if gate == gates[0] else "white"
                axes.plot(
                    *zip(*points),
                    color=color,
                    markerfacecolor=face,
                    markersize=4.5,
                    linewidth=1.5,
                    label=label,
                    **GATE_STYLES[gate],
                )
    floor = {case.shape.T: 1e6 * case.floor[phase] / case.shape.T for case in cases if phase in case.floor}
    if floor:
        axes.plot(lengths, [floor[T] for T in lengths], color="black", linewidth=1.2, linestyle=":", label="floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{T // 1024}K" if T % 1024 == 0 else str(T) for T in lengths])
    axes.minorticks_off()
    _plain_axis(axes, "y")
    _clean(axes)


def _speedups(run: Run) -> Figure | None:
    """What the operator gains over every other rule, a line for each shape, with its confidence intervals."""
    from matplotlib.lines import Line2D

    colors = _colors(run)
    cases = [case for case in run.cases if any(row.speedup for row in case.rows)]
    rules = list(dict.fromkeys(row.rule for case in cases for row in case.rows if row.speedup))
    if not rules:
        return None
    lines = {name: i for i, name in enumerate(dict.fromkeys(str(case.shape) for case in cases))}
    figure = _figure(3.0 + 3.6 * len(rules), 1.7 + 0.25 * max(4, len(lines)))
    panels = figure.subplots(1, len(rules), sharey=True, squeeze=False)[0]
    for axes, rule in zip(panels, rules):
        _speedups_panel(axes, cases, lines, rule, colors[rule])
    panels[0].set_yticks(range(len(lines)), list(lines), fontsize=8)
    panels[0].set_ylim(len(lines) - 0.4, -0.6)
    markers = [
        Line2D([], [], color="black", marker=GATE_STYLES[gate]["marker"], linestyle="", markerfacecolor=face)
        for gate in dict.fromkeys(case.gates for case in cases)
        for face in ("white", "black")
    ]
    labels = [f"{phase}, {gate} gates" for gate in dict.fromkeys(case.gates for case in cases) for phase in SHOWN]
    figure.legend(markers, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    figure.suptitle(f"Speedup of {run.cases[0].rows[0].rule}, {run.machine['device']}", fontsize=11)
    return figure


def _speedups_panel(axes: Axes, cases: list[Case], lines: dict[str, int], rule: str, color: str) -> None:
    means = []
    for phase, face, lift in ((PHASES[0], "white", -0.14), (BOTH, color, 0.14)):
        points = [
            (case.gates, lines[str(case.shape)] + lift, *row.speedup[phase])
            for case in cases
            for row in case.rows
            if row.rule == rule and phase in row.speedup
        ]
        for gates, y, ratio, low, high in points:
            axes.errorbar(
                ratio,
                y,
                xerr=None if low is None else [[max(0.0, ratio - low)], [max(0.0, high - ratio)]],
                marker=GATE_STYLES[gates]["marker"],
                color=color,
                markerfacecolor=face,
                markersize=4.5,
                elinewidth=1,
            )
        means.append(geometric_mean(ratio for _, _, ratio, _, _ in points))
        axes.axvline(means[-1], color=color, linewidth=0.9, linestyle="-" if face == color else (0, (4, 3)), alpha=0.6)
    axes.axvline(1, color="black", linewidth=1)
    low, high = axes.get_xlim()
    if high > 12:
        axes.set_xscale("log")
        _plain_axis(axes, "x")
    else:
        axes.set_xlim(min(low, 0.9), high)
    axes.set_title(f"over {rule}\ngeometric means {means[0]:.2f} and {means[1]:.2f}", fontsize=9.5)
    axes.set_xlabel("times as fast")
    _clean(axes)
