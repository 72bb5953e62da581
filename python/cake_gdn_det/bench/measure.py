"""One shape: every rule prepared, checked, and then all of them timed in turns."""

from __future__ import annotations

from dataclasses import dataclass

from .floors import floors
from .peers import Call, Rule, describe
from .reference import Accuracy, outputs, same_bits
from .results import Case, Row
from .shapes import HEAD_SIZE, Inputs, Shape, input_bytes, make_inputs
from .statistics import median, speedup
from .timing import BOTH, Device, Work, interleave, phases

EAGER_SHARE = 4  # of the rounds under graphs, one in four for eager calls
HEADROOM = 2 << 30  # for the reference, the flush and what libraries take for themselves


@dataclass(frozen=True)
class Options:
    rounds: int
    seconds: float  # of graph replays, and again of eager calls, for each rule on a shape


def needed_bytes(shape: Shape, admitted: list[Rule]) -> int:
    """What measuring these rules together takes: the largest training step, and half of each one's, which the forward
    behind its backward holds."""
    unit = 2 * shape.rows * shape.HV * HEAD_SIZE
    tensors = [rule.tensors for rule in admitted]
    return input_bytes(shape) + HEADROOM + int(unit * (max(tensors) + sum(tensors) / 2))


def measure(shape: Shape, gates: str, rules: list[Rule], device: Device, accuracy: Accuracy, options: Options) -> Case:
    """The case, with a row for every rule whatever happens to it."""
    rows = [Row(rule.name, rule.version, problem=rule.refuses(shape)) for rule in rules]
    admitted: list[tuple[Rule, Row]] = []
    free = device.free_bytes()
    for rule, row in zip(rules, rows):
        if row.problem:
            continue
        need = needed_bytes(shape, [*(x for x, _ in admitted), rule])
        if need > free:
            row.problem = f"skipped: needs about {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        else:
            admitted.append((rule, row))
    case = Case(shape, gates, floors(shape, device.name), rows)
    if admitted:
        inputs = make_inputs(shape, gates, device.device)
        ready = [
            (row, call) for rule, row in admitted if (call := _prepare(rule, row, inputs, gates, device, accuracy))
        ]
        _time_eager(ready, inputs, device, options)
        if device.has_graphs:
            device.release()
            _time_graphs([(row, call) for row, call in ready if not row.problem], inputs, device, options)
    _compare(rows)
    return case


def _prepare(rule: Rule, row: Row, inputs: Inputs, gates: str, device: Device, accuracy: Accuracy) -> Call | None:
    """Compiles and tunes, picks the form, and takes all that is no time; None when the rule fails."""
    try:
        row.form, call = _fastest_form(rule, inputs, device)
        works = phases(call, inputs)
        works["forward"]()
        first, second = outputs(call, inputs), outputs(call, inputs)
        row.repeatable = all(map(same_bits, first, second))
        del first, second
        row.peak_bytes = device.peak_bytes(works[BOTH])
        if rule.recomputing:
            row.peak_bytes_recomputing = device.peak_bytes(phases(rule.recomputing, inputs)[BOTH])
        small, row.errors = accuracy.errors(f"{rule.name} {row.form}", call, inputs.shape, gates)
        row.error_shape = str(small)
        return call
    except Exception as error:  # of whatever kind a rule fails with: it becomes its row
        row.problem = describe(error)
    device.release()
    return None


def _fastest_form(rule: Rule, inputs: Inputs, device: Device) -> tuple[str, Call]:
    """By the time of a forward + backward; a form that fails is none, unless all do."""
    forms = rule.forms_for(inputs.shape)
    if len(forms) == 1:
        return next(iter(forms.items()))
    found: dict[str, float] = {}
    failure: Exception | None = None
    for form, call in forms.items():
        try:
            found[form] = _quick_time(phases(call, inputs)[BOTH], device)
        except Exception as error:
            failure = error
    if failure and not found:
        raise failure
    best = min(found, key=lambda form: found[form])
    return best, forms[best]


def _quick_time(work: Work, device: Device) -> float:
    work()
    if device.has_graphs:
        graph = device.capture(work, device.graph_pool())
        return median([device.replayed(graph) for _ in range(5)])
    return median([device.called(work)[0] for _ in range(3)])


def _time_eager(ready: list[tuple[Row, Call]], inputs: Inputs, device: Device, options: Options) -> None:
    rounds = max(3, options.rounds // EAGER_SHARE) if device.has_graphs else options.rounds
    works = _works(ready, inputs)
    _, failures = interleave(works, device.called, 1, options.seconds)  # warms up
    works = {key: work for key, work in works.items() if key[0] not in failures}
    samples, more = interleave(works, device.called, rounds, options.seconds * len(ready))
    failures |= more
    rows = [row for row, _ in ready]
    for i, reason in failures.items():
        rows[i].problem = reason
    for (i, phase), times in samples.items():
        rows[i].eager[phase] = [round(ms, 5) for ms, _ in times]
        if device.has_graphs:
            rows[i].host[phase] = [round(host, 5) for _, host in times]


def _time_graphs(ready: list[tuple[Row, Call]], inputs: Inputs, device: Device, options: Options) -> None:
    pool, graphs = device.graph_pool(), {}
    rows = [row for row, _ in ready]
    for (i, phase), work in _works(ready, inputs).items():
        if not rows[i].note:
            try:
                graphs[i, phase] = device.capture(work, pool)
            except Exception as error:  # eager times remain
                rows[i].note = f"no CUDA graph: {describe(error)}"
    graphs = {(i, phase): graph for (i, phase), graph in graphs.items() if not rows[i].note}
    samples, failures = interleave(graphs, device.replayed, options.rounds, options.seconds * len(ready))
    for i, reason in failures.items():
        rows[i].note = f"no CUDA graph: {reason}"
    for (i, phase), times in samples.items():
        rows[i].graph[phase] = [round(ms, 5) for ms in times]


def _works(ready: list[tuple[Row, Call]], inputs: Inputs) -> dict[tuple[int, str], Work]:
    return {(i, phase): work for i, (_, call) in enumerate(ready) for phase, work in phases(call, inputs).items()}


def _compare(rows: list[Row]) -> None:
    """Every rule against the first one: times of the same kind only."""
    ours = rows[0]
    for row in rows[1:]:
        kind = "graph" if ours.graph and row.graph else "eager"
        mine, other = getattr(ours, kind), getattr(row, kind)
        row.speedup = {phase: speedup(mine[phase], other[phase]) for phase in mine if phase in other}
