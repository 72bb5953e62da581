"""What a build asks for and refuses: the architecture gate, the search for a compiler, build requirements, versions."""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile

import pytest
from support import ROOT, cmake, read_programs, run, toolkit

ARCHS, _ = read_programs()
NAMES = [arch.name for arch in ARCHS]


def version_key(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


# ---- the gate alone ----


def gate(version: str, wanted: str = "", *, check=True):
    script = ROOT / "cmake" / "CakeGdnArchs.cmake"
    result = run([cmake(), f"-DCUDA_VERSION={version}", f"-DARCHS={wanted}", "-P", script], check=check)
    # CMake wraps the text of an error.
    return result.returncode, re.sub(r"\s+", " ", result.stdout)


def test_the_table_is_the_documented_one():
    rows = [(arch.name, arch.capability, arch.cuda) for arch in ARCHS]
    assert rows == [("90a", 90, "12.0"), ("100a", 100, "12.8"), ("103a", 103, "12.9"), ("107a", 107, "13.4")]


@pytest.mark.parametrize("version", ["12.0", "12.8", "12.9", "13.0", "13.0.88", "13.3", "13.4", "13.5.37", "14.0"])
def test_default_list_drops_what_the_toolkit_cannot_build(version):
    code, output = gate(version)
    built = [a.name for a in ARCHS if version_key(version) >= version_key(a.cuda)]
    dropped = [a for a in ARCHS if a.name not in built]
    assert code == 0
    assert f"built: {' '.join(built)} -- dropped: {' '.join(a.name for a in dropped)}".strip() in output
    for arch in dropped:
        assert f"sm_{arch.name} is dropped: it needs CUDA {arch.cuda} or newer, this is {version}" in output


@pytest.mark.parametrize("arch", ARCHS, ids=lambda a: a.name)
def test_an_architecture_asked_for_by_name_is_built_or_is_an_error(arch):
    assert gate(arch.cuda, arch.name)[0] == 0
    code, output = gate("11.8", arch.name, check=False)
    assert code != 0
    assert f"CAKE_GDN_ARCHS: sm_{arch.name} needs CUDA {arch.cuda} or newer, and this toolkit is CUDA 11.8" in output


ASK_FOR_CODE = """
#include <cstdio>

#include "cuda/launch.hpp"

namespace cake_gdn::cuda {
// In the place of the driver's.
const Traits &traits(int) {
    static const Traits none{};
    return none;
}
}  // namespace cake_gdn::cuda

int main() {
    using namespace cake_gdn::cuda;
    for (int capability : {90, 100, 107, 89}) {
        try {
            require_code("wy", Traits{2, capability, 132, 0});
            std::puts("has code");
        } catch (const Error &error) {
            std::printf("%d %s\\n", error.status, error.what());
        }
    }
}
"""


def test_a_device_that_a_build_has_no_code_for_is_told_what_it_needs(tmp_path):
    """The backend's own answer, in a build for sm_90a, to devices that it is only told of."""
    include = toolkit("13.5").parents[1] / "include"
    (tmp_path / "cake_gdn_build_config.h").write_text('#define CAKE_GDN_ARCHS "90a"\n')
    (tmp_path / "main.cpp").write_text(ASK_FOR_CODE)
    sources = [tmp_path / "main.cpp", ROOT / "csrc" / "cuda" / "backend.cpp"]
    includes = [f"-I{folder}" for folder in (tmp_path, ROOT / "csrc", ROOT / "csrc" / "include", include)]
    run([os.environ.get("CXX", "c++"), "-std=c++17", *includes, *sources, "-o", tmp_path / "ask"])
    unsupported, other = 2, "wy: device 2 is sm_{}; this build has code for sm_90a; {}"
    assert run([tmp_path / "ask"]).stdout.splitlines() == [
        "has code",
        f"{unsupported} " + other.format(100, "a build for it needs CUDA 12.8 or newer"),
        f"{unsupported} " + other.format(107, "a build for it needs CUDA 13.4 or newer"),
        f"{unsupported} " + other.format(89, "no release of this package has code for it"),
    ]


def test_107a_by_name_with_cuda_13_0_says_13_4():
    code, output = gate("13.0", "90a 107a", check=False)
    assert code != 0
    assert "sm_107a needs CUDA 13.4 or newer" in output


@pytest.mark.parametrize("wanted", ["100a 90a", "90a;100a", "90a,100a", " 90a  100a "])
def test_list_separators_and_order(wanted):
    assert "built: 90a 100a -- dropped:" in gate("13.5", wanted)[1]


def test_unknown_architecture_and_hopeless_toolkit():
    code, output = gate("13.5", "90a 80", check=False)
    assert code != 0
    assert f"unknown architecture '80'; allowed: {' '.join(NAMES)}" in output
    code, output = gate("11.8", check=False)
    assert code != 0
    assert "builds none of the architectures" in output


# ---- configuring ----


@pytest.fixture
def bare_machine(tmp_path):
    """A Python without CUDA packages, and an nvcc that is only on PATH and tells when it is run."""
    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"])
    tools = tmp_path / "tools"
    tools.mkdir()
    marker = tmp_path / "nvcc-was-run"
    (tools / "nvcc").write_text(f"#!/bin/sh\ntouch '{marker}'\nexit 1\n")
    (tools / "nvcc").chmod(0o755)
    import os

    env = {"PATH": f"{tools}:{os.environ['PATH']}", "CUDACXX": "", "CUDA_PATH": "", "CUDA_HOME": "", "PYTHONPATH": ""}

    def configure(*arguments):
        return run(
            [
                *(cmake(), "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja"),
                *(f"-DPython_EXECUTABLE={tmp_path / 'venv' / 'bin' / 'python'}", *arguments),
            ],
            check=False,
            env=env,
        )

    configure.marker = marker
    configure.cache = tmp_path / "build" / "CMakeCache.txt"
    return configure


def test_no_compiler_is_an_error_with_the_ways_out(bare_machine):
    result = bare_machine()
    assert result.returncode != 0
    for text in ("no CUDA compiler", "CAKE_GDN_CUDA=OFF", "CUDACXX", "nvidia-cuda-nvcc"):
        assert text in result.stdout
    assert not bare_machine.marker.exists(), "the nvcc on PATH was taken"


def test_cpu_only_needs_no_cuda(bare_machine):
    result = bare_machine("-DCAKE_GDN_CUDA=OFF")
    assert result.returncode == 0, result.stdout
    assert "CMAKE_CUDA_COMPILER:" not in bare_machine.cache.read_text()
    assert not bare_machine.marker.exists()


def configure_with(nvcc, build, *arguments):
    command = [cmake(), "-S", ROOT, "-B", build, "-G", "Ninja", f"-DCMAKE_CUDA_COMPILER={nvcc}", *arguments]
    result = run(command, check=False)
    return result.returncode, re.sub(r"\s+", " ", result.stdout)


def built_config(build) -> dict[str, str]:
    text = (build / "generated" / "cake_gdn_build_config.h").read_text()
    return dict(re.findall(r'^#define (\w+) "(.*)"$', text, re.M))


def test_real_cuda_13_0(tmp_path):
    nvcc = toolkit("13.0")
    code, output = configure_with(nvcc, tmp_path / "a")
    assert code == 0, output
    assert "sm_107a is dropped: it needs CUDA 13.4 or newer" in output
    config = built_config(tmp_path / "a")
    assert (config["CAKE_GDN_ARCHS"], config["CAKE_GDN_DROPPED_ARCHS"]) == ("90a 100a 103a", "107a")
    assert config["CAKE_GDN_CUDA_VERSION"].startswith("13.0")
    assert "sm_107a" not in (tmp_path / "a" / "build.ninja").read_text()
    code, output = configure_with(nvcc, tmp_path / "b", "-DCAKE_GDN_ARCHS=107a")
    assert code != 0
    assert "13.4" in output


def test_real_cuda_13_5(tmp_path):
    nvcc = toolkit("13.5")
    code, output = configure_with(nvcc, tmp_path / "a")
    assert code == 0, output
    assert built_config(tmp_path / "a")["CAKE_GDN_ARCHS"] == " ".join(NAMES)
    rules = (tmp_path / "a" / "build.ninja").read_text()
    for name in NAMES:
        assert f"--generate-code=arch=compute_{name},code=[sm_{name}]" in rules
    assert "code=[compute_" not in rules, "PTX is built"


def test_cudacxx_wins(tmp_path):
    nvcc = toolkit("13.0")
    result = run([cmake(), "-S", ROOT, "-B", tmp_path / "a", "-G", "Ninja"], env={"CUDACXX": str(nvcc)})
    assert str(nvcc) in result.stdout


# ---- build requirements and version, as pip asks for them ----

HOOK = """
import json, sys
from scikit_build_core.build import get_requires_for_build_wheel as hook
settings = dict(a.split("=", 1) for a in sys.argv[1:])
print("RESULT", json.dumps(hook(settings or None)))
"""


def requirements(*settings, **env) -> list[str]:
    output = run([sys.executable, "-c", HOOK, *settings], cwd=ROOT, env={"CUDACXX": "", **env}).stdout
    return json.loads(output.split("RESULT ", 1)[1].splitlines()[0])


def cuda_requirements(*settings, **env) -> list[str]:
    return [item for item in requirements(*settings, **env) if item.startswith("nvidia-")]


def test_cuda_build_requires_the_compiler_packages(monkeypatch):
    monkeypatch.delenv("CAKE_GDN_CUDA", raising=False)
    monkeypatch.delenv("CUDACXX", raising=False)
    names = {re.split(r"[=<>]", item)[0] for item in cuda_requirements()}
    assert names == {
        *("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl"),
    }
    assert cuda_requirements(CAKE_GDN_CUDA="ON")


@pytest.mark.parametrize("value", ["OFF", "off", "0", "False", "NO"])
def test_cpu_only_requires_no_cuda_package(value, monkeypatch):
    monkeypatch.delenv("CAKE_GDN_CUDA", raising=False)
    assert cuda_requirements(CAKE_GDN_CUDA=value) == []
    assert cuda_requirements(f"cake-gdn.cuda={value}") == []


def test_a_named_compiler_requires_no_cuda_package(monkeypatch):
    monkeypatch.delenv("CAKE_GDN_CUDA", raising=False)
    assert cuda_requirements(CUDACXX="/opt/cuda/bin/nvcc") == []


METADATA = """
import sys
from scikit_build_core.build import prepare_metadata_for_build_wheel as hook
print("RESULT", hook(sys.argv[1]))
"""


def metadata(source, tmp_path) -> str:
    run([sys.executable, "-c", METADATA, tmp_path], cwd=source, env={"CAKE_GDN_CUDA": "OFF"})
    return next(tmp_path.glob("*.dist-info/METADATA")).read_text()


def test_version_of_a_source_without_git_is_the_fallback(tmp_path):
    archive = tmp_path / "source.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "python"):
            tar.add(ROOT / name, name)
    source = tmp_path / "source"
    source.mkdir()
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    text = metadata(source, tmp_path / "out")
    assert "\nVersion: 0.1.0\n" in text
    assert "\nRequires-Python: >=3.10\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text


def test_version_of_a_shallow_clone(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", tmp_path / "clone"])
    if not (tmp_path / "clone" / "pyproject.toml").exists():
        pytest.skip("pyproject.toml is not committed yet")
    version = re.search(r"^Version: (.+)$", metadata(tmp_path / "clone", tmp_path / "out"), re.M)[1]
    assert re.match(r"\d+\.\d+", version)
