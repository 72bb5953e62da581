"""Rules of the source tree and of the built library: who may include, import, export and link what."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support import CSRC, ROOT, package_root, read_programs, run

ARCHS, PROGRAMS = read_programs()
SOURCES = sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".hpp", ".cuh", ".cpp", ".cu", ".def"})

# What the run function of a program may use.
HOST_PARTS = ["cuda/chain.hpp", "cuda/launch.hpp", "cuda/programs.hpp", "cuda/stages.h", "plan/plan.hpp"]
# Layer of a path under csrc -> path prefixes that it may include with quotes. First match wins.
ALLOWED = {
    "include/": ["cake_gdn_det/"],
    "plan/": ["cake_gdn_det/", "plan/"],
    "cpu/": ["cake_gdn_det/", "cpu/", "plan/"],
    "cuda/ptx/": ["cuda/ptx/"],
    "cuda/params/": ["cake_gdn_det/", "cuda/params/"],
    "cuda/tile/": ["cake_gdn_det/", "cuda/stages.h", "cuda/tile/", "cuda/ptx/"],
    "cuda/fwd/": [*HOST_PARTS, "cuda/fwd/", "cuda/tile/", "cuda/ptx/"],
    "cuda/bwd/": [*HOST_PARTS, "cuda/bwd/", "cuda/tile/", "cuda/ptx/"],
    "cuda/": ["cake_gdn_det/", "plan/", "cuda/", "programs.def", "cake_gdn_build_config.h"],
    "api/": ["cake_gdn_det/", "api/", "plan/", "cpu/engine.hpp", "cuda/", "programs.def", "cake_gdn_build_config.h"],
    "bindings/": ["cake_gdn_det/cake_gdn_det.h", "cuda/stages.h"],
    "programs.def": [],
}
# What the backend's own files may not reach down into: they know the programs by programs.hpp alone.
BACKEND_FORBIDDEN = ("cuda/fwd/", "cuda/bwd/", "cuda/tile/", "cuda/ptx/")
SYSTEM_LIBRARIES = {
    "libstdc++.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libc.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}


def relative(path: Path) -> str:
    return path.relative_to(CSRC).as_posix()


def without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def includes(path: Path) -> list[tuple[str, str]]:
    """('"' or '<', name) of every include."""
    return re.findall(r'^\s*#\s*include\s+(["<])([^">]+)[">]', path.read_text(), re.M)


def layer(path: Path) -> str:
    name = relative(path)
    return next(prefix for prefix in ALLOWED if name.startswith(prefix))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_include_directions(path):
    where = layer(path)
    for kind, name in includes(path):
        if kind == '"' or (CSRC / name).exists() or name.startswith("cake_gdn"):
            assert name.startswith(tuple(ALLOWED[where])), f"{relative(path)} may not include {name}"
            if where == "cuda/":
                assert not name.startswith(BACKEND_FORBIDDEN), f"{relative(path)} may not include {name}"
        else:
            if name.startswith(("cuda", "cooperative_groups", "nv/", "cub/", "cute/", "thrust/")):
                assert where.startswith("cuda/"), f"{relative(path)} knows CUDA: <{name}>"
            if name.startswith(("pybind11/", "Python")):
                assert where == "bindings/", f"{relative(path)} knows Python: <{name}>"


def test_layers_exist():
    """A renamed folder must not turn the rule above into one about nothing."""
    for prefix in ("include/", "plan/", "cpu/", "cuda/", "cuda/fwd/", "cuda/bwd/", "cuda/tile/", "cuda/ptx/", "api/", "bindings/"):
        assert any(layer(p) == prefix for p in SOURCES), prefix


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_core_knows_no_torch_and_no_environment(path):
    text = without_comments(path.read_text())
    assert not re.search(r"\b(torch|ATen|c10)\b", text), "only Python knows torch"
    assert not re.search(r"\b(getenv|secure_getenv|environ|setenv|putenv)\b", text), "the environment decides nothing"
    if not relative(path).startswith("bindings/"):
        assert not re.search(r"\b(exit|abort|_exit|quick_exit)\s*\(", text), "a library returns a status"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_inline_assembly_lives_in_ptx(path):
    if not relative(path).startswith("cuda/ptx/"):
        assert not re.search(r"\basm\b", without_comments(path.read_text())), relative(path)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_atomic_touches_a_value(path):
    """A counter may order work: its line says `// counter`. Floating-point atomics have no such excuse."""
    text = path.read_text()
    assert not re.search(r"std::atomic(_ref)?<\s*(float|double|T|auto)", text)
    if relative(path).startswith("cuda/"):
        for line in text.splitlines():
            if re.search(r"\batomic[A-Z]\w+\s*\(|\b(red|atom)\.(global|shared)|cuda::atomic", line):
                assert "// counter" in line, line
                assert not re.search(r"float|double|half|bf16|\.f16|\.f32|\.f64", line), line


def budget(path: Path) -> int | None:
    name = path.relative_to(ROOT).as_posix()
    if name == "CMakeLists.txt":
        return 150
    if path.suffix not in {".py", ".pyi", ".h", ".hpp", ".cuh", ".cpp", ".cu", ".c", ".cmake"}:
        return None
    if name.startswith("csrc/cuda/ptx/"):
        return 250
    if name.startswith(("csrc/cpu/", "csrc/cuda/fwd/", "csrc/cuda/bwd/")):
        return 600
    return 800 if name.startswith("tests/") else 400


FOLDERS = ("csrc", "python", "tests", "cmake", "benchmarks", "examples")


def test_line_budgets():
    files = [ROOT / "CMakeLists.txt"]
    for folder in FOLDERS:
        files += [p for p in (ROOT / folder).rglob("*") if p.is_file() and "build" not in p.relative_to(ROOT).parts[:1]]
    over = []
    for path in files:
        limit = budget(path)
        if limit is not None:
            lines = len(path.read_text().splitlines())
            if lines > limit:
                over.append(f"{path.relative_to(ROOT)}: {lines} lines, {limit} allowed")
    assert not over, "\n".join(over)


def test_top_level_holds_what_it_should():
    """Only files that git would keep count: build folders and environments are ignored."""
    allowed = {
        *("pyproject.toml", "CMakeLists.txt", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"),
        *("cmake", "csrc", "python", "tests", ".github", "docs", "benchmarks", "examples"),
        *(".ci", ".clang-format", ".gersemirc", ".gitignore", ".gitattributes", ".pre-commit-config.yaml", ".git"),
    }
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT).stdout.split("\n")
    assert {name.split("/")[0] for name in listed if name} <= allowed


def test_every_program_has_its_parts():
    stages = (CSRC / "cuda" / "stages.h").read_text()
    params = "".join(p.read_text() for p in (CSRC / "cuda" / "params").glob("*.h"))
    bindings = "".join(p.read_text() for p in (CSRC / "bindings").glob("*.cpp"))
    names = {arch.name for arch in ARCHS}
    assert len({p.name for p in PROGRAMS}) == len(PROGRAMS)
    for program in PROGRAMS:
        sources = [p for d in ("fwd", "bwd") if (p := CSRC / "cuda" / d / f"{program.name}.cu").exists()]
        assert len(sources) == 1, f"{program.name}: fwd/{program.name}.cu or bwd/{program.name}.cu"
        assert f"void run_{program.name}(" in sources[0].read_text()
        assert f"#define {program.macro}(X)" in params
        assert re.search(rf"^    F\({program.name}, {program.name.upper()}, ", stages, re.M), "no row of CAKE_GDN_STAGES"
        assert set(program.archs) <= names, f"{program.name} claims an architecture that has no row"
    # Declarations and bindings are made from that one list.
    assert "CAKE_GDN_API cake_gdn_status cake_gdn_run_##name(" in stages
    assert "CAKE_GDN_STAGES(BIND_STAGE)" in bindings
    kernels = {p.stem for d in ("fwd", "bwd") for p in (CSRC / "cuda" / d).glob("*.cu")}
    assert kernels == {p.name for p in PROGRAMS}, "a kernel file without a row is never built"


def test_python_package_imports_only_what_it_declares():
    """torch is imported by Python alone, and nothing undeclared is imported at a module's top level."""
    declared = {"torch", "click", "tqdm", "cake_gdn_det", "__future__"}
    for path in sorted((ROOT / "python").rglob("*.py")):
        for line in path.read_text().splitlines():
            match = re.match(r"(?:from|import)\s+([A-Za-z_]\w*)", line)
            if match and match[1] not in declared:
                import sys

                assert match[1] in sys.stdlib_module_names, f"{path.relative_to(ROOT)}: {line}"


# ---- the built library ----


def needed(path: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", run(["readelf", "-d", path]).stdout))


def exported(path: Path) -> set[str]:
    return {line.split()[-1].split("@")[0] for line in run(["nm", "-D", "--defined-only", path]).stdout.splitlines()}


def test_library_exports_only_its_interface():
    script = (ROOT / "cmake" / "cake_gdn_det.map").read_text()
    assert re.sub(r"\s+", " ", script).strip() == "{ global: cake_gdn_*; local: *; };"
    names = exported(package_root() / "lib" / "libcake_gdn_det.so")
    assert names and all(name.startswith("cake_gdn_") for name in names), sorted(names)
    header = (CSRC / "include" / "cake_gdn_det" / "cake_gdn_det.h").read_text()
    declared = set(re.findall(r"\b(cake_gdn_\w+)\(", without_comments(header)))
    stages = {f"cake_gdn_run_{p.name}" for p in PROGRAMS}
    assert declared <= names
    assert names <= declared | stages


def test_library_needs_no_torch_and_no_cuda():
    root = package_root()
    assert needed(root / "lib" / "libcake_gdn_det.so") <= SYSTEM_LIBRARIES
    modules = list(root.glob("_C*.so"))
    assert len(modules) == 1
    libraries = needed(modules[0])
    assert "libcake_gdn_det.so" in libraries
    assert libraries - {"libcake_gdn_det.so"} <= SYSTEM_LIBRARIES
    assert "$ORIGIN/lib" in run(["readelf", "-d", modules[0]]).stdout


@pytest.mark.slow
def test_instruction_set_units_carry_no_weak_symbols(tmp_path):
    """An inline function compiled with AVX-512 must not become the one copy that every machine then runs."""
    from support import cmake

    build = tmp_path / "build"
    run([cmake(), "-S", ROOT, "-B", build, "-G", "Ninja", "-DCAKE_GDN_CUDA=OFF"])
    units = sorted(set(re.findall(r"CMakeFiles/(cake_gdn_unit_\w+)\.dir/", (build / "build.ninja").read_text())))
    assert "cake_gdn_unit_baseline" in units
    run([cmake(), "--build", build, "--target", *units])
    for unit in units:
        objects = list((build / "CMakeFiles" / f"{unit}.dir").rglob("*.o"))
        assert objects
        for item in objects:
            symbols = subprocess.run(["nm", "-C", item], capture_output=True, text=True, check=True).stdout
            weak = [line for line in symbols.splitlines() if re.match(r"^[0-9a-f]* +[WVu] ", line)]
            assert not weak, f"{unit}:\n" + "\n".join(weak)
