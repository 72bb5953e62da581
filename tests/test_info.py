"""`python -m cake_gdn_det info`: complete, stable as JSON, and there when something is broken."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from cake_gdn_det import info
from cake_gdn_det.__main__ import main

NOTHING = type(None)
BUILD = {
    "version": "1.2.3",
    "git_commit": "0123456789abcdef",
    "abi_version": 1,
    "compiler": "GNU 12.2.0",
    "cuda": "13.0",
    "archs": [
        {"name": "90a", "capability": 90, "min_cuda": "12.0"},
        {"name": "103a", "capability": 103, "min_cuda": "12.9"},
    ],
    "dropped_archs": ["107a"],
    "programs": [{"name": "tables", "archs": ["90a", "103a"]}],
    "cpu_units": ["baseline", "avx2"],
    "cpu_unit": "avx2",
}
LIBRARY = {"abi_version": 1, "build": BUILD}


def gpu(capability: str, index: int = 0) -> dict:
    return {"index": index, "name": "Test GPU", "capability": capability, "memory_mib": 81920}


@pytest.fixture(scope="module")
def collected() -> dict:
    return info.collect()


def run_broken(prelude: str, *arguments: str) -> subprocess.CompletedProcess:
    """The command in a process whose imports `prelude` has broken; `Block(name, text)` makes one import fail."""
    program = f"""
import importlib.abc, runpy, sys

class Block(importlib.abc.MetaPathFinder):
    def __init__(self, name, text):
        self.name, self.text = name, text

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise ImportError(self.text)

{prelude}
sys.argv[1:] = {list(arguments)!r}
runpy.run_module("cake_gdn_det", run_name="__main__")
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


def test_json_schema(collected):
    found = json.loads(json.dumps(collected))
    assert found == collected, "only JSON types"
    assert list(found) == ["schema", "package", "python", "torch", "library", "cpu", "gpus", "runs"]
    assert found["schema"] == info.SCHEMA
    expected = {
        "package": {"version": str, "path": str},
        "python": {"version": str, "implementation": str, "platform": str},
        "torch": {"version": str, "cuda": (str, NOTHING), "threads": int},
        "library": {"abi_version": int, "build": dict},
        "cpu": {"model": str, "machine": str, "cores": (int, NOTHING), "threads": int, "usable_threads": int},
        "gpus": {"driver": (str, NOTHING), "torch_cuda": (str, NOTHING), "devices": list},
    }
    for part, keys in expected.items():
        assert found[part].keys() == keys.keys(), part
        for key, kind in keys.items():
            assert isinstance(found[part][key], kind), (part, key)
    for run in found["runs"]:
        assert {key: type(value) for key, value in run.items()} == {
            "device": str,
            "name": str,
            "runs": bool,
            "detail": str,
        }


def test_build_is_reported_whole(collected):
    build = collected["library"]["build"]
    assert build.keys() >= BUILD.keys()
    assert build["abi_version"] == collected["library"]["abi_version"]
    assert build["cpu_unit"] in build["cpu_units"]
    for arch in build["archs"]:
        assert arch.keys() >= {"name", "capability", "min_cuda"}


def test_cpu_runs_the_operator(collected):
    cpu = collected["runs"][0]
    assert cpu["device"] == "cpu"
    assert cpu["runs"], cpu["detail"]
    assert collected["library"]["build"]["cpu_unit"] in cpu["detail"]


def test_command_prints_json_and_text(collected):
    as_json = CliRunner().invoke(main, ["info", "--json"])
    assert as_json.exit_code == 0
    assert json.loads(as_json.output)["library"] == collected["library"]
    text = CliRunner().invoke(main, ["info"])
    assert text.exit_code == 0
    assert text.output.rstrip("\n") == info.render(collected)
    assert "ERROR" not in text.output


def test_text_is_aligned_and_complete(collected):
    found = {**collected, "library": LIBRARY, "gpus": {"driver": "13.0", "torch_cuda": "13.0", "devices": [gpu("9.0")]}}
    found["runs"] = [*collected["runs"], {"device": "cuda:0", "name": "Test GPU", "runs": False, "detail": "because"}]
    lines = info.render(found).splitlines()
    rows = [line for line in lines if line.startswith("  ")]
    assert [line for line in lines if line and line not in rows] == [
        "Versions",
        "Build",
        "Devices",
        "The operator runs on",
    ]
    assert all(row[2] != " " and row[17] == " " and row[18] != " " for row in rows), "one column of values"
    text = "\n".join(lines)
    for fact in (
        collected["package"]["version"],
        "GNU 12.2.0",
        "C ABI 1",
        "commit 0123456789ab",
        "baseline avx2 (this machine: avx2)",
        "built, for compute capability 10.3",
        "sm_107a         not built: CUDA 13.0 is too old for it",
        "1: tables",
        "Test GPU (compute capability 9.0, 80 GiB)",
        "no   because",
    ):
        assert fact in text, fact


@pytest.mark.parametrize(
    ("capability", "cuda", "reason"),
    [
        ("8.0", "13.0", "compute capability 8.0: this build has code for sm_90a, sm_103a only"),
        ("10.7", "13.0", "CUDA 13.0, which this build was made with, is too old for this GPU's sm_107"),
        ("9.0", "", "no CUDA part"),
    ],
)
def test_why_a_gpu_does_not_run(capability, cuda, reason):
    library = {"abi_version": 1, "build": {**BUILD, "cuda": cuda, "archs": BUILD["archs"] if cuda else []}}
    runs, why = info._gpu_runs(gpu(capability), library)
    assert not runs
    assert reason in why


def test_a_gpu_with_code_is_asked_itself(monkeypatch):
    asked = []

    def probe(device):
        asked.append(device)
        return answer

    monkeypatch.setattr(info, "_probe", probe)
    answer = (True, "runs")
    assert info._gpu_runs(gpu("10.3", 2), LIBRARY) == (True, "sm_103a code")
    answer = (False, "NotImplementedError: no GPU chain in this build")
    assert info._gpu_runs(gpu("9.0", 0), LIBRARY) == answer
    assert asked == ["cuda:2", "cuda:0"]


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "reason"),
    [
        (None, None, "no NVIDIA driver"),
        (None, "13.0", "no NVIDIA driver"),
        ("13.0", None, "this torch is built without CUDA"),
        ("13.0", "13.0", "torch sees no such GPU"),
    ],
)
def test_machine_without_gpu(monkeypatch, driver, torch_cuda, reason):
    monkeypatch.setattr(info, "_gpus", lambda: {"driver": driver, "torch_cuda": torch_cuda, "devices": []})
    runs, why = info.gpu_support(0)
    assert not runs
    assert reason in why
    found = info.collect()
    assert [run["device"] for run in found["runs"]] == ["cpu"]
    assert reason in info.render(found)


def test_broken_gpu_query_is_reported(monkeypatch):
    def fail():
        raise RuntimeError("driver\nmismatch")

    monkeypatch.setattr(info, "_gpus", fail)
    assert info.gpu_support(0) == (False, "RuntimeError: driver\nmismatch")
    found = info.collect()
    assert found["gpus"] == {"error": "RuntimeError: driver\nmismatch"}
    assert "ERROR  RuntimeError: driver\n                  mismatch" in info.render(found)


def test_core_that_does_not_load():
    text = "libcake_gdn_det.so: cannot open shared object file"
    prelude = f"sys.meta_path.insert(0, Block('cake_gdn_det._C', {text!r}))"
    human = run_broken(prelude, "info")
    assert human.returncode == 1, human.stderr
    assert f"ERROR  ImportError: {text}" in human.stdout
    assert "torch" in human.stdout
    assert "cpu             no " in human.stdout
    found = json.loads(run_broken(prelude, "info", "--json").stdout)
    assert found["library"] == {"error": f"ImportError: {text}"}
    assert "version" in found["torch"]
    assert "version" in found["package"]
    assert found["runs"][0]["device"] == "cpu"
    assert not found["runs"][0]["runs"]


@pytest.mark.parametrize("module", ["torch", "cake_gdn_det._C"])
def test_other_commands_point_here(module):
    result = run_broken(f"sys.meta_path.insert(0, Block({module!r}, 'cannot be had'))", "train", "--steps", "1")
    assert result.returncode == 1
    assert result.stderr == "Error: cannot be had (`python -m cake_gdn_det info` shows what is broken)\n"


def test_core_that_fails_when_asked():
    prelude = """
import types
core = types.ModuleType("cake_gdn_det._C")
def abi_version():
    raise RuntimeError("library has C ABI 2, this module was built for 1")
core.abi_version = abi_version
sys.modules["cake_gdn_det._C"] = core
"""
    found = json.loads(run_broken(prelude, "info", "--json").stdout)
    assert found["library"] == {"error": "RuntimeError: library has C ABI 2, this module was built for 1"}


def test_torch_that_is_missing():
    result = run_broken("sys.meta_path.insert(0, Block('torch', 'No module named torch'))", "info", "--json")
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    assert found["torch"] == found["gpus"] == {"error": "ImportError: No module named torch"}
    assert "cpu_unit" in found["library"]["build"], "the compiled core needs no torch"
    assert not found["runs"][0]["runs"]
    assert "torch" in found["runs"][0]["detail"]
