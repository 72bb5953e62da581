"""The benchmark: its statistics, floors and errors are right, and whatever happens to a rule becomes its row."""

from __future__ import annotations

import json
import math
import random
import re
import sys

import pytest
import torch
from click.testing import CliRunner
from reference.oracle import gated_delta_rule as oracle

from cake_gdn_det.__main__ import main
from cake_gdn_det.bench import cli, floors, measure, peers, plots, reference, report, shapes, stages, statistics
from cake_gdn_det.bench.measure import Options
from cake_gdn_det.bench.peers import Rule
from cake_gdn_det.bench.reference import Accuracy
from cake_gdn_det.bench.results import Case, Row, Run
from cake_gdn_det.bench.shapes import Shape, make_inputs
from cake_gdn_det.bench.timing import BOTH, PHASES, CpuDevice, interleave

CPU = torch.device("cpu")
TINY = Shape(1, 96, 1, 2)
QUICK = Options(rounds=3, seconds=60.0)


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def torch_rule(inputs: shapes.Inputs) -> torch.Tensor:
    """A peer that is always there: the reference in fp32."""
    leaves = [x.float() for x in inputs.leaves]
    return reference.gated_delta_rule(*leaves, inputs.shape.sequences).bfloat16()


def broken_rule(inputs: shapes.Inputs) -> torch.Tensor:
    raise RuntimeError("no such kernel\nand a second line")


def fake(name: str, call) -> Rule:
    return Rule(name, {"": call}, "1.0", tensors=10)


@pytest.fixture
def fake_peers(monkeypatch):
    """In the place of the peers, one that works, one that fails and one that is not installed."""
    makers = {
        "fla": ("Works", lambda name: fake(name, torch_rule)),
        "flashqla": ("Fails", lambda name: fake(name, broken_rule)),
        "pytorch": ("Absent", lambda name: __import__("no_such_package_here")),
    }
    monkeypatch.setattr(peers, "PEERS", makers)


class FakeGpu(CpuDevice):
    """Graphs that only remember what to run, and room for a few."""

    has_graphs = True

    def __init__(self, free: int = 1 << 40, capturable=lambda work: True) -> None:
        super().__init__()
        self.name, self.free, self.capturable = "NVIDIA H200", free, capturable

    def free_bytes(self) -> int:
        return self.free

    def graph_pool(self) -> object:
        return object()

    def capture(self, work, pool):
        if not self.capturable(work):
            raise RuntimeError("operation not permitted when stream is capturing")
        return work

    def replayed(self, graph) -> float:
        return self.called(graph)[0] + 1.0

    def peak_bytes(self, work) -> int:
        work()
        return 3 << 20


# ---- statistics ----


def test_speedup_of_known_data():
    ours = [1.0, 1.1, 0.9, 1.05, 0.95]
    assert statistics.speedup(ours, [2 * x for x in ours]) == pytest.approx([2, 2, 2])
    assert statistics.speedup([2.0], [3.0]) == [1.5, None, None]


def test_samples_are_resampled_as_pairs():
    """The machine's speed drifts over the run: what both rules share must not widen the interval."""
    rng = random.Random(1)
    drift = [1 + 0.5 * rng.random() for _ in range(25)]
    ours = [x * rng.gauss(1, 0.002) for x in drift]
    other = [3 * x * rng.gauss(1, 0.002) for x in drift]
    ratio, low, high = statistics.speedup(ours, other)
    assert low <= ratio <= high
    assert low == pytest.approx(3, rel=0.02) and high == pytest.approx(3, rel=0.02)
    assert statistics.speedup(ours, other) == [ratio, low, high], "the same numbers every time"
    _, low, high = statistics.speedup(ours, other[1:] + other[:1])
    assert high - low > 0.2, "pairs that do not belong together"


def test_interval_covers_the_truth():
    rng = random.Random(2)
    hits = 0
    for _ in range(40):
        ours = [rng.gauss(1, 0.05) for _ in range(20)]
        _, low, high = statistics.speedup(ours, [rng.gauss(2, 0.1) for _ in range(20)])
        hits += low <= 2 <= high
    assert hits >= 34


def test_geometric_mean():
    assert statistics.geometric_mean([1, 4]) == pytest.approx(2)
    assert statistics.geometric_mean([3.0]) == pytest.approx(3)


# ---- shapes and floors ----


def test_sets_have_the_heads_and_lengths_of_their_models():
    def found(*sets):
        return {(s.H, s.HV) for s in shapes.select(sets)}

    assert found("qwen3-next") == {(16, 32)}
    assert found("qwen3.5") == {(16, 48), (16, 64), (8, 32), (2, 8)}
    assert found("symmetric") == {(32, 32)}
    lengths = {s.T for s in shapes.select(["qwen3-next"])}
    assert {2048, 131072} <= lengths and min(lengths) == 2048 and max(lengths) == 131072
    packed = shapes.select(["packed"])
    assert {s.kind for s in packed} == {"uneven", "short"}
    assert all(s.B == 1 and sum(s.documents) == s.T and min(s.documents) > 0 for s in packed)
    assert max(len(s.documents) for s in packed) > 500


def test_selection_by_heads_and_lengths():
    found = shapes.select(["qwen3-next", "qwen3.5"], heads=[(2, 8), (1, 1)], lengths=[(1, 64), (4, 128)])
    assert found == [Shape(4, 128, 2, 8), Shape(1, 64, 2, 8), Shape(4, 128, 1, 1), Shape(1, 64, 1, 1)]
    assert [str(s) for s in found[:2]] == ["4 x 128, 2/8", "1 x 64, 2/8"]


@pytest.mark.parametrize("kind", ["uneven", "short"])
@pytest.mark.parametrize("tokens", [1, 17, 96, 4096, 32768])
def test_documents_fill_a_row(kind, tokens):
    lengths = shapes.pack(kind, tokens)
    assert sum(lengths) == tokens and min(lengths) > 0


def test_shortened_shapes_keep_their_kind():
    long = Shape(1, 32768, 16, 32, shapes.pack("uneven", 32768), "uneven")
    assert long.shortened(4096) == Shape(1, 4096, 16, 32, shapes.pack("uneven", 4096), "uneven")
    assert Shape(8, 512, 2, 8).shortened(4096) == Shape(1, 512, 2, 8)


def test_gates():
    shape = Shape(2, 500, 2, 8)
    fast, slow = (make_inputs(shape, gates, CPU).leaves[3].detach() for gates in shapes.GATES)
    assert fast.dtype == torch.float32 and (fast < 0).all()
    assert fast.mean().item() == pytest.approx(-0.183, rel=0.1), "the mean of logsigmoid(randn + 2)"
    assert (slow[..., :2] == 0).all() and (slow[..., 2:] < 0).all()
    assert slow[..., 2:].mean().item() == pytest.approx(-0.806 / 16, rel=0.1), "the mean of logsigmoid(randn) / 16"
    again = make_inputs(shape, "slow", CPU)
    assert torch.equal(again.leaves[3], slow) and all(x.requires_grad and x.is_leaf for x in again.leaves)


def test_floors_of_the_design():
    """1 x 65536 tokens, 16/32, on an H200: figures worked out by hand."""
    found = floors.floors(Shape(1, 65536, 16, 32), "NVIDIA H200")
    assert found["training forward"] == pytest.approx(0.69, abs=0.005)
    assert found["backward"] == pytest.approx(1.09, abs=0.005)
    assert found[BOTH] == found["training forward"] + found["backward"]
    moved, _ = floors.work(Shape(1, 65536, 16, 32))["backward"]
    assert 1e3 * moved / 4.3e12 == pytest.approx(0.94, abs=0.005)
    assert set(found) == set(PHASES)
    assert floors.floors(Shape(1, 65536, 16, 32), "some other device") == {}


def test_packing_only_adds_partial_chunks():
    dense, packed = (shapes.select([name], lengths=[(1, 32768)]) for name in ("qwen3-next", "packed"))
    for shape in packed:
        assert shape.chunks >= dense[0].chunks and shape.later_chunks <= dense[0].later_chunks


# ---- reference ----


@pytest.mark.parametrize(
    "shape",
    [Shape(2, 150, 1, 2), Shape(1, 64, 2, 2), Shape(1, 1, 1, 1), Shape(1, 200, 1, 2, (3, 100, 64, 33), "short")],
    ids=str,
)
@pytest.mark.parametrize("gates", shapes.GATES)
def test_reference_against_the_oracle(shape, gates):
    inputs = make_inputs(shape, gates, CPU)
    leaves = [x.detach().double().requires_grad_() for x in inputs.leaves]
    o, _ = oracle(*leaves, use_qk_l2norm_in_kernel=True, cu_seqlens=inputs.cu_seqlens)
    right = [o, *torch.autograd.grad(o, leaves, inputs.do.double())]
    for name, x, y in zip(reference.OUTPUTS, reference.exact(inputs), right):
        assert reference.error(x, y.detach()) < 1e-11, name


def test_error_metric():
    right = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert reference.error(torch.tensor([3.0, 4.5]), right) == pytest.approx(0.1)
    assert reference.error(right.float(), right) == 0
    assert reference.error(torch.tensor([3.0, math.nan]), right) == math.inf
    assert reference.error(torch.zeros(2), torch.zeros(2)) == 0


def test_same_bits():
    x = torch.tensor([1.0, math.nan, 0.0])
    assert reference.same_bits(x, x.clone())
    assert not reference.same_bits(x, torch.tensor([1.0, math.nan, -0.0]))
    assert not reference.same_bits(x, x.bfloat16())


# ---- measuring ----


def test_rules_take_turns_and_one_that_fails_leaves():
    order, turns = [], []

    def works(name, fails_at=None):
        def work():
            order.append(name)
            if fails_at is not None and order.count(name) > fails_at:
                raise RuntimeError("out of luck")
            return 1.0

        return work

    named = {("a", "x"): works("a"), ("b", "x"): works("b", fails_at=2), ("b", "y"): works("b2")}
    samples, failures = interleave(named, lambda work: turns.append(1) or work(), 4, 60)
    assert order == ["a", "b", "b2"] * 2 + ["a", "b"] + ["a"]
    assert samples == {("a", "x"): [1.0] * 4}
    assert failures == {"b": "RuntimeError: out of luck"}


def test_time_ends_a_measurement_but_not_before_five_turns():
    samples, _ = interleave({("a", "x"): lambda: 1}, lambda work: work(), 100, 0.0)
    assert len(samples["a", "x"]) == 5


def case_of(*rules: Rule, shape: Shape = TINY, device=None, tokens: int = 64) -> Case:
    found = [*peers.load(()), *rules]
    return measure.measure(shape, "fast", found, device or CpuDevice(), Accuracy(CPU, tokens), QUICK)


def test_a_case_on_the_cpu():
    ours, other = case_of(fake("other", torch_rule)).rows
    for row in (ours, other):
        assert not row.problem and not row.graph and not row.host
        assert set(row.eager) == set(PHASES) and all(len(x) == 3 for x in row.eager.values())
        assert row.repeatable and row.peak_bytes is None
        assert row.error_shape == "1 x 64, 1/2"
        assert set(row.errors) == set(reference.OUTPUTS) and max(row.errors.values()) < 1e-2
    assert set(other.speedup) == set(PHASES) and not ours.speedup
    ratio, low, high = other.speedup[BOTH]
    assert ratio == pytest.approx(other.milliseconds() / ours.milliseconds()) and low <= ratio <= high


def test_a_case_on_a_gpu():
    """Everything but the GPU itself: graphs are compared, host time and memory stand apart."""
    case = case_of(fake("other", torch_rule), device=FakeGpu())
    assert case.floor
    for row in case.rows:
        assert set(row.graph) == set(row.eager) == set(row.host) == set(PHASES)
        assert all(len(x) == 3 for x in (*row.graph.values(), *row.eager.values()))
        assert row.peak_bytes == 3 << 20
        assert min(row.samples[BOTH]) > 1, "graphs are what is compared"
    assert case.rows[0].peak_bytes_recomputing and not case.rows[1].peak_bytes_recomputing


def test_a_graph_that_fails_leaves_eager_times():
    """Nothing of it is in a comparison with graphs of others."""
    other = fake("other", torch_rule)
    calls = []

    def capturable(work):
        calls.append(work)
        return len(calls) <= len(PHASES)  # those of the operator

    ours, row = case_of(other, device=FakeGpu(capturable=capturable)).rows
    assert ours.graph and not row.graph and row.eager
    assert row.note == "no CUDA graph: RuntimeError: operation not permitted when stream is capturing"
    assert row.speedup[BOTH][0] == pytest.approx(
        statistics.median(row.eager[BOTH]) / statistics.median(ours.eager[BOTH])
    )


def test_the_faster_form_stands_for_a_rule():
    def slow(inputs):
        for _ in range(20):
            torch_rule(inputs)
        return torch_rule(inputs)

    rule = Rule("two forms", {"slow": slow, "quick": torch_rule}, tensors=1)
    assert case_of(rule).rows[1].form == "quick"
    assert list(rule.forms_for(Shape(1, 64, 2, 2))) == ["slow"], "the first, where they do not differ"


def test_a_form_that_fails_leaves_the_other():
    rule = Rule("two forms", {"broken": broken_rule, "works": torch_rule}, tensors=1)
    row = case_of(rule).rows[1]
    assert row.form == "works" and not row.problem
    broken = Rule("no form", {"a": broken_rule, "b": broken_rule}, tensors=1)
    assert case_of(broken).rows[1].problem == "RuntimeError: no such kernel"


def test_a_rule_that_does_not_repeat_is_found():
    def varying(inputs):
        return torch_rule(inputs) * (1 + 0.1 * torch.rand(()))

    row = case_of(fake("varying", varying)).rows[1]
    assert row.repeatable is False and row.errors["o"] > 1e-3


def test_wrong_results_show():
    row = case_of(fake("wrong", lambda inputs: 2 * torch_rule(inputs))).rows[1]
    assert row.errors["o"] == pytest.approx(1, rel=0.01)


def test_failing_and_absent_rules_are_rows(fake_peers):
    rows = case_of(*peers.load(["fla", "flashqla", "pytorch"])[1:]).rows
    assert [row.rule for row in rows] == ["cake_gdn_det", "Works", "Fails", "Absent"]
    assert not rows[0].problem and not rows[1].problem
    assert rows[2].problem == "RuntimeError: no such kernel"
    assert rows[3].problem == "not usable: No module named 'no_such_package_here'"


def test_real_peers_that_are_not_installed(monkeypatch):
    for name in ("fla", "flash_qla", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    rules = peers.load(["fla", "flashqla", "pytorch"])
    assert [rule.name for rule in rules] == ["cake_gdn_det", "FLA", "FlashQLA", "PyTorch"]
    assert all(rule.absence.startswith("not usable: ") for rule in rules[1:])


def test_the_pytorch_rule_is_the_same_operator():
    pytest.importorskip("transformers")
    rule = peers.load(["pytorch"])[1]
    for shape in (TINY, Shape(1, 90, 1, 2, (20, 70), "uneven")):
        errors = [reference.error(x, y) for x, y in zip(*answers(rule.forms[""], shape))]
        assert max(errors) < 1e-2, errors
    assert "left out: 512 chunks" in rule.refuses(Shape(1, 32768, 1, 2))
    assert not rule.refuses(Shape(1, 8192, 1, 2))


def answers(call, shape):
    inputs = make_inputs(shape, "fast", CPU)
    return reference.outputs(call, inputs), reference.exact(inputs)


def test_repeated_heads_are_the_same_operator():
    inputs = make_inputs(Shape(1, 64, 2, 6), "fast", CPU)
    q, k = peers._repeated(*inputs.leaves[:2], inputs.shape)
    assert q.shape == k.shape == (1, 64, 6, 128)
    assert torch.equal(q[:, :, 4], inputs.leaves[0][:, :, 1])


def test_plans_and_batch_invariance_are_rules_of_their_own():
    rules = peers.load((), plans=["no such plan"], batch_invariant=True)
    names = ["cake_gdn_det", "plan=no such plan", "batch_invariant"]
    assert [rule.name for rule in rules] == names
    rows = case_of(*rules[1:]).rows
    assert not rows[2].problem and rows[2].speedup
    assert rows[1].problem.startswith("ValueError: ") and "plan" in rows[1].problem


def test_a_shape_outside_memory_says_what_it_needs():
    shape = Shape(1, 131072, 16, 64)
    row = case_of(shape=shape, device=FakeGpu(free=10 * 10**9)).rows[0]
    found = re.fullmatch(r"skipped: needs about ([\d.]+) GB, 10\.0 GB are free", row.problem)
    assert found and float(found[1]) == pytest.approx(measure.needed_bytes(shape, peers.load(())) / 1e9, abs=0.06)
    assert not row.samples


def test_a_rule_too_large_beside_the_others_is_left_out():
    large = Rule("large", {"": torch_rule}, tensors=1e6)
    small = Rule("small", {"": torch_rule}, tensors=1)
    rows = case_of(large, small, device=FakeGpu(free=3 << 30)).rows
    assert [bool(row.problem) for row in rows] == [False, True, False]


# ---- command ----


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["bench", "--device", "cpu", *map(str, arguments)])


SMALL = ("--heads", "1/2", "--lengths", "64", "--rounds", "2", "--error-tokens", "64")


def test_command_end_to_end(tmp_path, fake_peers):
    result = invoke(*SMALL, "--set", "qwen3-next", "--set", "packed", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "bench.md", "times.png", "speedups.png"}
    run = Run.load(tmp_path / "bench.json")
    assert run.complete and len(run.cases) == 6, "dense, uneven and short, under two gates"
    assert [row.rule for row in run.cases[0].rows] == ["cake_gdn_det", "Works", "Fails", "Absent"]
    text = (tmp_path / "bench.md").read_text()
    for needle in (
        "1 x 64, 1/2, fast",
        "64 in 9 documents, 1/2, slow",
        "Fails: RuntimeError: no such kernel",
        "![times.png]",
    ):
        assert needle in text, needle
    assert "not complete" not in text
    for name in ("times.png", "speedups.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "Works 1.0" in result.stdout and "6 of 6" in result.stdout


def test_an_earlier_run_is_drawn_again(tmp_path, fake_peers):
    invoke(*SMALL, "--gates", "fast", "--output", tmp_path)
    result = invoke("--from", tmp_path / "bench.json", "--output", tmp_path / "again")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "again" / "bench.md").read_text() == (tmp_path / "bench.md").read_text()
    assert (tmp_path / "again" / "times.png").exists()


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"schema": 99}', '{"schema": 1, "cases": [{}]}'])
def test_unusable_results(tmp_path, content):
    path = tmp_path / "bench.json"
    if content is not None:
        path.write_text(content)
    result = invoke("--from", path, "--output", tmp_path)
    assert result.exit_code == 1 and result.stderr.startswith("Error: --from"), result.output


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_stopped_run_keeps_its_rows(tmp_path, monkeypatch, fake_peers, stop):
    seen = []

    def stopping(*arguments):
        if seen:
            raise stop
        seen.append(1)
        return measure.measure(*arguments)

    monkeypatch.setattr(cli, "measure", stopping)
    invoke(*SMALL, "--output", tmp_path)
    run = Run.load(tmp_path / "bench.json")
    assert len(run.cases) == 1 and not run.complete
    assert "not complete" in report.markdown(run)
    if stop is KeyboardInterrupt:
        assert "not complete" in (tmp_path / "bench.md").read_text()


@pytest.mark.parametrize("missing", ["scipy", "matplotlib"])
def test_missing_extras(monkeypatch, tmp_path, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    result = invoke(*SMALL, "--output", tmp_path)
    assert result.exit_code == 1
    assert result.stderr == "Error: bench needs scipy and matplotlib: pip install 'cake-gdn-det[bench]'\n"


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["--set", "gpt"], "qwen3-next"),
        (["--heads", "16"], "'16' is not H/HV"),
        (["--heads", "3/0"], "'3/0' is not H/HV"),
        (["--lengths", "8192,long"], "'long' is not [Bx]T"),
        (["--gates", "none"], "fast"),
        (["--peer", "none", "--peer", "fla"], "--peer none"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_wrong_options(arguments, needle):
    result = invoke(*arguments)
    assert result.exit_code == 2 and needle in result.stderr, result.output


def test_heads_that_do_not_divide(tmp_path):
    result = invoke("--heads", "2/3", "--lengths", "64", "--output", tmp_path)
    assert result.exit_code == 1
    assert result.stderr == "Error: --heads 2/3: HV must be a multiple of H\n"


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["bench", "--device", "cuda"])
    assert result.exit_code == 1 and "sees no GPU" in result.stderr
    assert "--stages needs a GPU" in invoke("--stages").stderr


def test_help_tells_the_choices_and_the_defaults():
    text = " ".join(CliRunner().invoke(main, ["bench", "--help"]).output.split())
    needles = [
        "qwen3-next",
        "fast|slow|both",
        "fla|flashqla|pytorch|none",
        "[default: both]",
        "8x4096",
        "bench-results",
    ]
    for needle in needles:
        assert needle in text, needle


# ---- report ----


def faked_run() -> Run:
    shape = Shape(1, 65536, 16, 32)
    floor = floors.floors(shape, "NVIDIA H200")
    errors = dict.fromkeys(reference.OUTPUTS, 2e-3)
    rows = []
    for name, factor in (("cake_gdn_det", 2.0), ("FLA", 5.0)):
        graph = {phase: [factor * ms, factor * ms] for phase, ms in floor.items()}
        row = Row(name, "1.0", graph=graph, eager=graph, host=graph, peak_bytes=5 << 30, errors=errors, repeatable=True)
        rows.append(row)
    rows.append(Row("FlashQLA", problem="not usable: No module named 'flash_qla'"))
    measure._compare(rows)
    cases = [Case(shape, gates, floor, [*rows]) for gates in shapes.GATES]
    return Run("command", {"device": "NVIDIA H200"}, {}, cases, True)


def test_report_says_what_was_measured():
    text = report.markdown(faked_run(), ["times.png"])
    lines = [tuple(x.strip() for x in line.split("|"))[1:-1] for line in text.splitlines() if line.startswith("|")]
    row = next(line for line in lines if line[:2] == ("", "FLA"))
    assert row[6:9] == ("20%", "2.50 [2.50, 2.50]", "2.50 [2.50, 2.50]") and row[-1] == "yes"
    assert ("1 x 65536, 16/32, fast", "*floor*", "0.478", "0.689", "1.087", "1.777", *[""] * 6) in lines
    assert any(line[1] == "FlashQLA: not usable: No module named 'flash_qla'" for line in lines)
    assert any(line[0] == "FLA 1.0" and line[1] == "2 of 2" and line[3] == "2.50" for line in lines)
    assert "5120" in text and "![times.png](times.png)" in text


def test_long_reasons_are_whole_in_a_note():
    run = faked_run()
    reason = "RuntimeError: " + "x" * 150
    run.cases[1].rows[1] = Row("FLA", problem=reason)
    text = report.markdown(run)
    assert f"- FLA, at 1 x 65536, 16/32, slow: {reason}" in text
    assert "- FlashQLA, everywhere: not usable: No module named 'flash_qla'" in text
    assert all("xxx…" in line for line in text.splitlines() if line.startswith("|") and "xxx" in line)


def test_tables_are_whole():
    for block in report.markdown(faked_run()).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_results_survive_a_file(tmp_path):
    run = faked_run()
    run.cases.append(Case(Shape(1, 64, 1, 1, (20, 44), "uneven"), "slow", {}, [Row("cake_gdn_det")]))
    run.save(tmp_path / "x.json")
    assert Run.load(tmp_path / "x.json") == run
    assert json.loads((tmp_path / "x.json").read_text())["schema"] == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]


def test_pictures_need_something_to_show(tmp_path):
    assert plots.draw(faked_run(), tmp_path) == ["times.png", "speedups.png"]
    alone = faked_run()
    for case in alone.cases:
        case.rows = case.rows[:1]
    assert plots.draw(alone, tmp_path) == ["times.png"]
    for case in alone.cases:
        case.rows = [Row("cake_gdn_det", problem="skipped")]
    assert plots.draw(alone, tmp_path) == []
    assert "Nothing was measured beside" in report.markdown(alone)


# ---- stages ----


def test_kernels_find_their_stages():
    symbol = "void cake_gdn::cuda::(anonymous namespace)::wy_backward_kernel<__nv_bfloat16>(cake_gdn_wy_params)"
    assert stages.kernel_name(symbol) == "wy_backward_kernel"
    times = stages.by_stage({"wy_backward_kernel": 2.0, "wy_kernel": 1.0, "new": 3.0, "wy": 0.5}, ["wy", "wy_backward"])
    assert times == {"wy": 1.5, "wy_backward": 2.0, "new": 3.0}


def test_stage_table():
    text = stages.stage_table(Shape(1, 32768, 16, 32), {"wy": 0.5, "something_new": 0.25}, "NVIDIA H200")
    lines = [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines()]
    assert lines[2] == ["wy", "0.500", "0.250", "50%", "1.07"]
    assert lines[3] == ["something_new", "0.250", "–", "–", "0.00"]
    assert lines[4][:2] == ["sum", "0.750"]
