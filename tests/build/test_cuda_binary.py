"""Inspection of a CUDA build without a GPU: code for every claimed architecture, no spills, budgets, no PTX.

The library is the one in the wheel that $CAKE_GDN_TEST_WHEEL names, else the installed one; a CPU-only build skips.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import cuda_tool, package_root, read_programs, run

ARCHS, PROGRAMS = read_programs()


@dataclass(frozen=True)
class Budget:
    registers: int  # of a thread
    shared: int  # static shared memory of a block, bytes; without the 1 KiB that sm_90 and newer reserve


# Chosen with the kernel: what its occupancy needs. A change that exceeds it must change the number here, knowingly.
BUDGETS = {
    "tables": Budget(registers=64, shared=1024),  # 1024 threads a block
    "pack": Budget(registers=80, shared=1024),
    "prep": Budget(registers=64, shared=20480),
    "wy": Budget(registers=102, shared=0),  # 128 threads, 5 blocks an SM
    "fwd_prescan": Budget(registers=224, shared=0),  # one block an SM
    "stitch": Budget(registers=255, shared=0),  # one block an SM
    "fwd_scan": Budget(registers=224, shared=0),  # one block an SM
    "output": Budget(registers=168, shared=0),  # 128 threads, 3 blocks an SM
    "wy_recompute": Budget(registers=168, shared=0),  # 128 threads, 3 blocks an SM
    "dv_local": Budget(registers=128, shared=0),  # 128 threads, 4 blocks an SM
    "adjoint_prescan": Budget(registers=255, shared=0),  # one block an SM
    "adjoint_scan": Budget(registers=255, shared=0),  # one block an SM
    "dqkwg": Budget(registers=128, shared=0),  # 256 threads, 2 blocks an SM
    "wy_backward": Budget(registers=168, shared=0),  # 128 threads, 3 blocks an SM
    "finalize": Budget(registers=64, shared=1024),
    "tail": Budget(registers=128, shared=0),  # 256 threads, 2 blocks an SM
    "gate_backward": Budget(registers=64, shared=40960),
    "gate_reduce": Budget(registers=64, shared=8192),
}
# Programs whose products run on the tensor cores.
TENSOR_CORE = {"wy", "fwd_scan", "output", "wy_recompute", "dv_local", "adjoint_scan", "dqkwg", "wy_backward", "tail"}
TENSOR_CORE |= {"fwd_prescan", "stitch", "adjoint_prescan"}
RESERVED_SHARED = 1024
MAX_WHEEL_BYTES = 25 * 2**20


@dataclass
class Kernel:
    program: str
    arch: str
    name: str
    registers: int
    stack: int
    local: int
    shared: int


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    wheel = os.environ.get("CAKE_GDN_TEST_WHEEL")
    if wheel:
        folder = tmp_path_factory.mktemp("wheel")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        path = folder / "cake_gdn_det" / "lib" / "libcake_gdn_det.so"
    else:
        path = package_root() / "lib" / "libcake_gdn_det.so"
    assert path.exists()
    return path


@pytest.fixture(scope="module")
def info(library) -> dict:
    """What the library says of itself; loading it needs no driver."""
    function = ctypes.CDLL(str(library)).cake_gdn_build_info
    function.restype = ctypes.c_char_p
    info = json.loads(function())
    if not info["programs"]:
        assert not os.environ.get("CAKE_GDN_TEST_WHEEL"), "the wheel to inspect has no GPU programs"
        pytest.skip("this build has no GPU programs (CAKE_GDN_CUDA=OFF)")
    return info


@pytest.fixture(scope="module")
def kernels(library, info) -> list[Kernel]:
    text = run([cuda_tool("cuobjdump"), "--dump-resource-usage", library]).stdout
    out, arch = [], None
    mangled = re.findall(r"^ Function (\S+):$", text, re.M)
    plain = subprocess.run(["c++filt", *mangled], capture_output=True, text=True, check=True).stdout.splitlines()
    demangled = dict(zip(mangled, plain, strict=True))
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if match := re.match(r"^arch = sm_(\w+)$", line):
            arch = match[1]
        elif match := re.match(r"^ Function (\S+):$", line):
            usage = dict(re.findall(r"(\w+):(\d+)", lines[i + 1]))
            name = re.sub(r"\(anonymous namespace\)::", "", demangled[match[1]])
            short = re.search(r"cake_gdn::cuda::(\w+)", name)
            assert short, f"a kernel outside cake_gdn::cuda: {name}"
            named = [p.name for p in PROGRAMS if short[1] == p.name or short[1].startswith(p.name + "_")]
            program = max(named, key=len, default=None)  # wy_backward is not a kernel of wy
            assert program, f"kernel {short[1]} is not named after its program"
            numbers = (int(usage[key]) for key in ("REG", "STACK", "LOCAL", "SHARED"))
            out.append(Kernel(program, arch, name, *numbers))
    assert out
    return out


def test_every_program_has_code_for_every_architecture_it_claims(kernels, info):
    built = [arch["name"] for arch in info["archs"]]
    names = defaultdict(set)
    for kernel in kernels:
        names[kernel.program, kernel.arch].add(re.sub(r"\(.*", "", kernel.name))
    for program in PROGRAMS:
        claimed = [arch for arch in program.archs if arch in built]
        for arch in claimed:
            assert names[program.name, arch], f"{program.name} has no code for sm_{arch}"
            assert names[program.name, arch] == names[program.name, claimed[0]], f"{program.name}: kernels differ"
        assert {a for p, a in names if p == program.name} == set(claimed)


def test_toolkit_and_gate_agree(info):
    version = tuple(int(part) for part in info["cuda"].split(".")[:2])
    able = [a.name for a in ARCHS if version >= tuple(int(part) for part in a.cuda.split("."))]
    built = [arch["name"] for arch in info["archs"]]
    assert set(built) <= set(able)
    assert set(info["dropped_archs"]) == {a.name for a in ARCHS} - set(able) or not info["dropped_archs"]
    expected = os.environ.get("CAKE_GDN_TEST_ARCHS")
    if expected:
        assert built == expected.split()


def test_budgets(kernels):
    assert set(BUDGETS) == {p.name for p in PROGRAMS}, "a program without a budget, or a budget without a program"
    for kernel in kernels:
        budget = BUDGETS[kernel.program]
        assert kernel.registers <= budget.registers, kernel
        assert kernel.shared - RESERVED_SHARED <= budget.shared, kernel


def test_nothing_spills(kernels):
    for kernel in kernels:
        assert (kernel.stack, kernel.local) == (0, 0), kernel


def test_no_ptx(library, info):
    """PTX would be compiled by the driver for a device that nobody tested, and might give other bits."""
    output = run([cuda_tool("cuobjdump"), "--list-ptx", library], check=False).stdout
    assert "No PTX file found" in output or not re.search(r"\.ptx\b", output), output


@pytest.fixture(scope="module")
def sass(library, info) -> str:
    path = f"{Path(cuda_tool('nvdisasm')).parent}:{os.environ['PATH']}"
    return run([cuda_tool("cuobjdump"), "--dump-sass", library], env={"PATH": path}).stdout


def test_instructions(sass):
    """No local memory and no floating-point atomic in any kernel."""
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", sass)
    assert len(instructions) > 100
    for instruction in set(instructions):
        assert not re.match(r"(LDL|STL)\b", instruction), f"spill: {instruction}"
        if re.match(r"(RED|REDG|REDS|ATOM|ATOMG|ATOMS|UBLKRED|UTMAREDG)\b", instruction):
            assert not re.search(r"\.(F16|F32|F64|BF16|F16x2|BF16x2|FTZ)", instruction), instruction


def test_tensor_cores(sass):
    """The matrix programs use mma (HMMA in SASS) on every architecture, and asynchronous copies to feed it."""
    found = defaultdict(set)
    for body in re.split(r"\n\s*Function : ", sass)[1:]:
        name = subprocess.run(["c++filt", body.split("\n", 1)[0].strip()], capture_output=True, text=True, check=True)
        short = re.search(r"cake_gdn::cuda::\(anonymous namespace\)::(\w+)", name.stdout)
        if short and short[1] in TENSOR_CORE:
            found[short[1]].add(("HMMA.16816.F32" in body, "LDGSTS" in body, "LDSM" in body))
    assert set(found) == TENSOR_CORE
    for program, uses in found.items():
        assert uses == {(True, True, True)}, f"{program}: (HMMA, LDGSTS, LDSM) = {uses}"


def test_wheel_size():
    wheel = os.environ.get("CAKE_GDN_TEST_WHEEL")
    if not wheel:
        pytest.skip("CAKE_GDN_TEST_WHEEL names no wheel")
    assert Path(wheel).stat().st_size < MAX_WHEEL_BYTES
