"""The training demo: it learns, documents do not leak, runs repeat to the bit, and bad input says what is wrong."""

from __future__ import annotations

import argparse
import io
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from cake_gdn_det import info
from cake_gdn_det.__main__ import main
from cake_gdn_det.train import LanguageModel, ModelConfig, TrainConfig, UserError, cli, data, loop, read_corpus, verify
from cake_gdn_det.train import train as run
from cake_gdn_det.train.progress import Progress

SMALL_MODEL = ModelConfig(width=32, layers=2, key_heads=1, value_heads=2, head_dim=16, mlp_width=64)
TEXT = str(Path(argparse.__file__))  # about 100 kB of real source
SMALL = TrainConfig(text=TEXT, device="cpu", steps=60, batch_bytes=512, piece_bytes=200, model=SMALL_MODEL)


def to_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["train", "--device", "cpu", *arguments])


def failure(*arguments: str) -> str:
    """The error text of a command that has to fail cleanly."""
    result = invoke(*arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), "an error text, no traceback"
    assert result.stderr.startswith("Error: ")
    return result.stderr


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, here and in new processes: the models are small, and on a busy machine threads wait for another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def result() -> loop.Result:
    return run(SMALL)


# ---- text ----


def test_default_text_is_the_standard_library():
    corpus = read_corpus()
    text = b"".join(map(to_bytes, corpus.documents))
    assert Path(TEXT).read_bytes() in text
    assert "standard library" in corpus.source
    assert len(text) > 2_000_000
    assert 0.02 < sum(map(len, corpus.held_out)) / len(text) < 0.04


def test_text_from_a_file():
    corpus = read_corpus(TEXT)
    content = Path(TEXT).read_bytes()
    assert [len(corpus.training), len(corpus.held_out)] == [1, 1]
    assert to_bytes(corpus.training[0]) + to_bytes(corpus.held_out[0]) == content


def test_text_from_a_directory(tmp_path):
    files = {f"{name}.txt": name.encode() * 3000 for name in ("c", "b", "dir/a", "dir/dir/z")}
    ignored = {".hidden": b"h" * 9000, ".git/x": b"g" * 9000, "image": b"i\0" * 9000, "empty": b""}
    for name, content in {**files, **ignored}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = read_corpus(tmp_path)
    assert sorted(b"".join(map(to_bytes, corpus.documents))) == sorted(b"".join(files.values()))
    again = read_corpus(tmp_path)
    assert list(map(to_bytes, corpus.documents)) == list(map(to_bytes, again.documents))
    assert set(map(len, corpus.training[:-1])) <= {3000, 15000, 21000, 27000}, "only the last document may be divided"


@pytest.mark.parametrize(
    ("content", "needles"),
    [
        (None, ["no such file or directory", "text.txt"]),
        (b"", ["too small", "0 bytes of text", "8192"]),
        (b"hello", ["too small", "5 bytes of text", "8192"]),
    ],
)
def test_unusable_text(tmp_path, content, needles):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    message = failure("--text", str(path))
    assert all(needle in message for needle in needles), message


def test_directory_without_text(tmp_path):
    (tmp_path / "binary").write_bytes(b"\0" * 100_000)
    assert "0 bytes of text in 0 files" in failure("--text", str(tmp_path))


def test_unreadable_text(monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "Permission denied" in failure("--text", TEXT)


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12), st.integers(1, 30), st.integers(1, 60))
@settings(deadline=None)
def test_packing_keeps_every_byte_and_crosses_no_document(texts, longest, batch_bytes):
    documents = [torch.tensor(list(text), dtype=torch.uint8) for text in texts]
    batches = list(data.packed(data.cut(documents, longest), batch_bytes))
    assert b"".join(to_bytes(batch.targets) for batch in batches) == b"".join(texts)
    assert all(len(batch.targets) == batch_bytes for batch in batches[:-1])
    boundaries = {0}
    for text in texts:
        boundaries.add(max(boundaries) + len(text))
    position = 0
    for batch in batches:
        offsets = batch.cu_seqlens.tolist()
        assert offsets[0] == 0
        assert offsets[-1] == len(batch.inputs)
        for first, end in pairwise(offsets):
            assert 0 < end - first <= longest
            assert batch.inputs[first] == data.START
            assert torch.equal(batch.inputs[first + 1 : end], batch.targets[first : end - 1])
            assert not boundaries & set(range(position + first + 1, position + end)), "a document in the middle"
        position += offsets[-1]


def test_shuffling_repeats_and_visits_all():
    documents = [torch.tensor([i], dtype=torch.uint8) for i in range(20)]

    def first(seed, count):
        return [int(document) for document in islice(data.shuffled(documents, seed), count)]

    assert first(1, 60) == first(1, 60) != first(2, 60)
    assert sorted(first(1, 20)) == sorted(first(1, 40)[20:]) == list(range(20))
    assert first(1, 20) != first(1, 40)[20:]


def test_bigram_entropy_against_counting():
    texts = [Path(TEXT).read_bytes()[:5000], b"x", b"abab"]
    pairs = Counter(pair for text in texts for pair in pairwise(text))
    firsts = Counter()
    for (first, _), count in pairs.items():
        firsts[first] += count
    expected = sum(n * math.log2(firsts[first] / n) for (first, _), n in pairs.items()) / sum(pairs.values())
    documents = [torch.tensor(list(text), dtype=torch.uint8) for text in texts]
    assert data.bigram_entropy(documents) == pytest.approx(expected, rel=1e-12)
    assert data.bigram_entropy([torch.tensor(list(b"abababab"), dtype=torch.uint8)]) == 0


# ---- model ----


def packed_documents(*lengths: int) -> data.Batch:
    generator = torch.Generator().manual_seed(0)
    return data.pack([torch.randint(256, (n,), generator=generator, dtype=torch.uint8) for n in lengths])


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return LanguageModel(SMALL_MODEL)


def test_first_predictions_are_uniform(model):
    batch = packed_documents(100)
    loss = torch.nn.functional.cross_entropy(model(batch.inputs, batch.cu_seqlens), batch.targets)
    assert loss.item() / math.log(2) == pytest.approx(8, abs=0.1)


@pytest.mark.parametrize("lengths", [(70, 90), (1, 2, 130), (2, 1, 1, 65)])
def test_a_document_does_not_see_the_others(model, lengths):
    batch = packed_documents(*lengths)
    last = int(batch.cu_seqlens[-2])
    others = batch.inputs.clone()
    others[:last] = (others[:last] + 1) % 256
    before, after = model(batch.inputs, batch.cu_seqlens), model(others, batch.cu_seqlens)
    assert torch.equal(before[last:], after[last:]), "the last document changed with the first ones"
    assert not torch.equal(before[:last], after[:last])
    alone = model(batch.inputs[last:], batch.cu_seqlens[-2:] - last)
    torch.testing.assert_close(before[last:], alone, rtol=1e-4, atol=1e-5)  # products of other sizes round otherwise


def test_no_gradient_crosses_documents(model):
    batch = packed_documents(70, 90)
    kept = []
    hook = model.embedding.register_forward_hook(lambda module, inputs, output: kept.append(output))
    logits = model(batch.inputs, batch.cu_seqlens)
    hook.remove()
    (gradient,) = torch.autograd.grad(logits[70:].square().sum(), kept)
    assert torch.count_nonzero(gradient[:70]) == 0
    assert torch.count_nonzero(gradient[70:].abs().sum(-1)) == 90


def test_not_a_number_stays_in_its_document(model):
    batch = packed_documents(70, 90)
    hook = model.embedding.register_forward_hook(
        lambda module, inputs, output: torch.where(torch.arange(160)[:, None] < 70, math.nan, output)
    )
    logits = model(batch.inputs, batch.cu_seqlens)
    hook.remove()
    assert logits[:70].isnan().all()
    assert logits[70:].isfinite().all()


def test_a_prediction_does_not_see_the_future(model):
    batch = packed_documents(150)
    changed = batch.inputs.clone()
    changed[100:] = (changed[100:] + 1) % 256
    before, after = model(batch.inputs, batch.cu_seqlens), model(changed, batch.cu_seqlens)
    assert torch.equal(before[:100], after[:100])
    assert (before[100:] != after[100:]).any(-1).all(), "every later prediction sees the change"


def test_every_parameter_gets_a_gradient(model):
    batch = packed_documents(40, 60)
    loss = torch.nn.functional.cross_entropy(model(batch.inputs, batch.cu_seqlens), batch.targets)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    assert [name for name, gradient in zip(names, gradients, strict=True) if not gradient.count_nonzero()] == []


# ---- training ----


def test_a_short_run_learns(result):
    counts = Counter(Path(TEXT).read_bytes())
    total = sum(counts.values())
    unigram = sum(n * math.log2(total / n) for n in counts.values()) / total
    assert len(result.history) == SMALL.steps
    assert result.history[0] == pytest.approx(8, abs=0.1)
    assert result.training_bits < unigram
    assert result.held_out_bits < unigram
    assert result.bigram_bits == pytest.approx(data.bigram_entropy(result.corpus.documents))


def test_a_run_repeats_to_the_bit_and_leaves_torch_as_it_was(result):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    flags = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    again = run(SMALL)
    assert again.history == result.history
    assert again.held_out_bits == result.held_out_bits
    assert verify.fingerprint(again.model) == verify.fingerprint(result.model)
    assert torch.equal(torch.get_rng_state(), before)
    assert flags == (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)


def test_the_seed_decides(result):
    other = run(replace(SMALL, seed=1, steps=2))
    assert other.history != result.history[:2]
    assert verify.first_difference(verify.fingerprint(other.model), verify.fingerprint(result.model)) is not None


def test_divergence_is_an_error():
    with pytest.raises(FloatingPointError, match="the loss of step 2 is nan"):
        run(replace(SMALL, steps=3, learning_rate=math.inf))


def test_summary_tells_both_outcomes(result):
    better = cli.summary(replace(result, held_out_bits=2.0, bigram_bits=3.25))
    assert "beats the bigram entropy by 1.250 bits per byte" in better
    worse = cli.summary(replace(result, held_out_bits=4.0, bigram_bits=3.25))
    assert "does not beat the bigram entropy: it is 0.750 bits per byte above it" in worse


# ---- device ----


def test_device_choice(monkeypatch):
    monkeypatch.setattr(info, "gpu_support", lambda index: (False, "the reason"))
    assert loop.select_device("cpu") == (torch.device("cpu"), "as asked for")
    assert loop.select_device("auto") == (torch.device("cpu"), "the reason")
    with pytest.raises(UserError, match="--device cuda: the reason"):
        loop.select_device("cuda")
    monkeypatch.setattr(info, "gpu_support", lambda index: (True, "sm_90a code"))
    assert loop.select_device("cuda") == loop.select_device("auto") == (torch.device("cuda", 0), "sm_90a code")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why there is no GPU")
def test_cuda_without_a_gpu():
    result = CliRunner().invoke(main, ["train", "--device", "cuda", "--steps", "1"])
    assert result.exit_code == 1
    assert re.search("--device cuda: .*(no NVIDIA driver|built without CUDA|no such GPU)", result.stderr)


# ---- command ----


def test_command_end_to_end(tmp_path):
    command = [sys.executable, "-m", "cake_gdn_det", "train", "--device", "cpu", "--text", TEXT, "--steps", "12"]
    done = subprocess.run([*command, "--plot", str(tmp_path / "loss.png")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 10, "no terminal: a few plain lines"
    assert re.fullmatch(r"training: step 12/12, \d+\.\d\d bits/byte, [\d,]+ tokens/s", lines[-1])
    for row in ("text    ", "model   ", "device  cpu", "12 steps of 2048 bytes"):
        assert row in done.stdout
    for row in ("training text, last 1 steps", "held-out documents", "bigram entropy of the text"):
        assert re.search(rf"^  {row} +\d\.\d\d\d$", done.stdout, re.MULTILINE), row
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_plot_shows_the_curves(tmp_path, result):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    from cake_gdn_det.train.plot import plot

    plot(result, tmp_path / "loss.png")
    picture = imread(tmp_path / "loss.png")[..., :3]
    assert picture.shape == (675, 1200, 3)

    def pixels(*rgb):
        return int((abs(picture - [value / 255 for value in rgb]).max(-1) < 0.03).sum())

    assert pixels(31, 119, 180) > 1500, "the running mean"
    assert pixels(255, 127, 14) > 100, "the held-out marker"
    assert pixels(0, 0, 0) > 2000, "the bigram line, axes and labels"


def test_plot_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'cake-gdn-det[plot]'" in failure("--plot", str(tmp_path / "loss.png"))


@pytest.mark.parametrize(("name", "needle"), [("missing/loss.png", "no directory"), ("loss.pdf", ".png")])
def test_unusable_plot_path(tmp_path, name, needle):
    pytest.importorskip("matplotlib")
    assert needle in failure("--plot", str(tmp_path / name))


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--device", "tpu"], ["--seed", "x"], ["--verify", "--plot", "loss.png"]]
)
def test_wrong_options(arguments):
    result = CliRunner().invoke(main, ["train", *arguments])
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


def test_help_tells_the_defaults():
    text = " ".join(CliRunner().invoke(main, ["train", "--help"]).output.split())
    assert f"Steps of {TrainConfig.batch_bytes} bytes. [default: {TrainConfig.steps}; {cli.VERIFY_STEPS} with" in text


def test_progress_on_a_terminal(monkeypatch, result):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(SMALL, "here") as progress:
        progress.start(result.model, result.corpus, torch.device("cpu"), "")
        for step in range(1, SMALL.steps + 1):
            progress.step(step, 2.5)
        progress.bar.refresh()
    last = sys.stderr.getvalue().split("\r")[-1]
    assert "here 100%" in last
    assert re.search(r"2\.50 bits/byte, [\d,]+ tokens/s", last)


# ---- verify ----


def test_fingerprint_sees_one_bit(model):
    before = verify.fingerprint(model)
    assert before == verify.fingerprint(model)
    weight = model.blocks[1].mixer.A_log
    with torch.no_grad():
        saved = weight.clone()
        weight[1] = torch.nextafter(weight[1], torch.tensor(9.0))
        after = verify.fingerprint(model)
        weight.copy_(saved)
    assert after.total != before.total
    assert verify.first_difference(before, after) == "blocks.1.mixer.A_log"
    assert verify.first_difference(before, verify.fingerprint(model)) is None


def test_verify_sees_runs_that_differ():
    config = replace(SMALL, steps=2)
    first, second = (verify.in_new_process(replace(config, seed=seed), f"seed {seed}") for seed in (0, 1))
    assert first.total != second.total
    assert verify.first_difference(first, second) == "embedding.weight"


def test_verify_command_passes():
    command = [sys.executable, "-m", "cake_gdn_det", "train", "--verify", "--device", "cpu", "--steps", "2"]
    done = subprocess.run([*command, "--text", TEXT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    hashes = re.findall(r"^run \d  SHA-256 of all weights  ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert "identical: " in done.stdout
    assert "run 2 of 2: step 2/2" in done.stderr


def test_verify_command_finds_a_difference(monkeypatch):
    def planted(config, label):
        found = verify.fingerprint(run(replace(config, steps=1, model=SMALL_MODEL)).model)
        if label.startswith("run 2"):
            found.parameters["blocks.0.mixer.dt_bias"] = "0" * 64
            found = replace(found, total="0" * 64)
        return found

    monkeypatch.setattr(verify, "in_new_process", planted)
    result = invoke("--verify", "--text", TEXT)
    assert result.exit_code == 1
    assert "DIFFERENT: the first parameter that differs is blocks.0.mixer.dt_bias" in result.stdout
    assert len(set(re.findall(r"[0-9a-f]{64}", result.stdout))) == 2


def test_verify_reports_errors_of_the_runs(tmp_path):
    assert "no such file" in failure("--verify", "--text", str(tmp_path / "missing"))


@pytest.mark.slow
def test_default_run_beats_the_bigram_entropy_by_half_a_bit(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    done = subprocess.run([sys.executable, "-m", "cake_gdn_det", "train"], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    bits = {
        row: float(re.search(rf"^  {row}.* (\d\.\d\d\d)$", done.stdout, re.MULTILINE)[1])
        for row in ("training text", "held-out documents", "bigram entropy")
    }
    assert max(bits["training text"], bits["held-out documents"]) < bits["bigram entropy"] - 0.5
