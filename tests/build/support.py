"""What the packaging tests share: the source tree, the installed package, the tables of programs, and tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"


@dataclass(frozen=True)
class Arch:
    name: str
    capability: int
    cuda: str


@dataclass(frozen=True)
class Program:
    name: str
    archs: tuple[str, ...]

    @property
    def macro(self) -> str:
        return f"CAKE_GDN_{self.name.upper()}_PARAMS"


def read_programs() -> tuple[list[Arch], list[Program]]:
    text = (CSRC / "programs.def").read_text()
    archs = re.findall(r"^ARCH\((\w+), (\d+), ([\d.]+)\)$", text, re.M)
    programs = re.findall(r'^PROGRAM\((\w+), "([\w ]+)"\)$', text, re.M)
    rows = len(re.findall(r"^(?:ARCH|PROGRAM)\(", text, re.M))
    assert rows == len(archs) + len(programs), "programs.def has a row of another form"
    return [Arch(n, int(c), v) for n, c, v in archs], [Program(n, tuple(a.split())) for n, a in programs]


def run(command, *, check=True, cwd=None, env=None, timeout=900) -> subprocess.CompletedProcess:
    """Runs a command; a failure shows its whole output."""
    command = [str(part) for part in command]
    result = subprocess.run(
        command,
        cwd=cwd,
        env=None if env is None else {**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    if check and result.returncode != 0:
        pytest.fail(f"{' '.join(command)}\nexited with {result.returncode}:\n{result.stdout}", pytrace=False)
    return result


def cmake() -> str:
    """cmake beside this interpreter (the PyPI package), else the system's."""
    for candidate in (Path(sys.executable).parent / "cmake", shutil.which("cmake")):
        if candidate and Path(candidate).exists():
            return str(candidate)
    pytest.fail("no cmake: pip install cake-gdn-det[test]")


def package_root() -> Path:
    """Where the installed package has its library, headers and CMake files."""
    from cake_gdn_det import _C

    return Path(_C.__file__).resolve().parent


def toolkit(version: str) -> Path:
    """nvcc of a CUDA toolkit under $CAKE_GDN_TEST_TOOLKITS/cuda-<version>, made with `pip install --target`."""
    folder = os.environ.get("CAKE_GDN_TEST_TOOLKITS")
    nvcc = Path(folder or "/nonexistent") / f"cuda-{version}" / "nvidia" / "cu13" / "bin" / "nvcc"
    if not nvcc.exists():
        pytest.skip(f"CAKE_GDN_TEST_TOOLKITS names no folder with cuda-{version}")
    return nvcc


def cuda_tool(name: str) -> str:
    """cuobjdump or nvdisasm: of the PyPI package in this environment, of a toolkit of the tests, or on PATH."""
    candidates = []
    try:
        import nvidia.cu13 as packages

        candidates += [Path(p) / "bin" / name for p in packages.__path__]
    except ImportError:
        pass
    folder = os.environ.get("CAKE_GDN_TEST_TOOLKITS")
    if folder:
        candidates += sorted(Path(folder).glob(f"cuda-*/nvidia/cu13/bin/{name}"), reverse=True)
    candidates.append(Path(shutil.which(name) or "/nonexistent"))
    for candidate in candidates:
        if candidate.exists():
            return str(candidate)
    pytest.skip(f"no {name}: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def copy_source(target: Path) -> Path:
    """The source tree without what builds leave in it."""
    ignored = shutil.ignore_patterns(
        ".git", "build", "dist", ".venv*", "__pycache__", "*.so", ".ci-work", ".*_cache", ".hypothesis", "wheelhouse"
    )
    shutil.copytree(ROOT, target, ignore=ignored, symlinks=True)
    return target
