"""Builds and runs the C++ tests of tests/cpp: plain, and with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NO_DOCTEST = "doctest headers not found: apt-get install doctest-dev"
SANITIZED = "address,undefined"


def _environment() -> dict[str, str]:
    """The tools of this Python's environment first; a sanitizer's finding ends the program with a stack."""
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env.setdefault("UBSAN_OPTIONS", "print_stacktrace=1")
    return env


def _run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _build_and_run(sanitize: str) -> None:
    env = _environment()
    # Kept between runs: only what changed is compiled again.
    build = ROOT / "build" / ("cpp-sanitized" if sanitize else "cpp")
    configure = ["cmake", "-S", str(ROOT / "tests" / "cpp"), "-B", str(build), f"-DCAKE_GDN_TEST_SANITIZE={sanitize}"]
    if not (build / "CMakeCache.txt").exists() and shutil.which("ninja", path=env["PATH"]):
        configure += ["-G", "Ninja"]
    jobs = str(len(os.sched_getaffinity(0)))
    for command in (
        configure,
        ["cmake", "--build", str(build), "--parallel", jobs],
        ["ctest", "--test-dir", str(build), "--output-on-failure", "--no-tests=error", "--timeout", "600", "-j", jobs],
    ):
        done = _run(command, env)
        if done.returncode != 0 and NO_DOCTEST in done.stdout:
            pytest.skip(NO_DOCTEST)
        if done.returncode != 0:
            pytest.fail(f"{' '.join(command)}\n{done.stdout}", pytrace=False)


@pytest.mark.timeout(1200)
def test_cpp():
    _build_and_run("")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cpp_sanitized():
    _build_and_run(SANITIZED)
