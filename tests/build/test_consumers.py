"""Other projects build against the installed package, from a wheel and from an editable install, and get right numbers.

$CAKE_GDN_TEST_WHEEL names the wheel to install; without it a CPU-only one is built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support import ROOT, cmake, copy_source, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONSUMERS = ROOT / "tests" / "consumers"


class Environment:
    """A fresh virtual environment that sees this one's packages (torch and build tools) behind its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        run([sys.executable, "-m", "venv", folder])
        self.python = folder / "bin" / "python"
        self.site = Path(
            run([self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).stdout.strip()
        )
        parents = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        parents |= {p for p in sys.path if p.endswith("site-packages")}
        (self.site / "behind.pth").write_text("\n".join(sorted(parents)) + "\n")

    def pip(self, *arguments, **kwargs):
        return run(
            [
                self.python,
                "-m",
                "pip",
                "install",
                "--ignore-installed",
                "--no-deps",
                "--no-build-isolation",
                *arguments,
            ],
            **kwargs,
        )

    def output(self, code: str, **kwargs) -> str:
        return run([self.python, "-c", code], cwd=self.folder, **kwargs).stdout

    def package_root(self) -> Path:
        return Path(self.output("from cake_gdn_det import _C; print(_C.__file__)").strip().splitlines()[-1]).parent


def build_environment() -> dict[str, str]:
    """Without isolation a build finds cmake, ninja and pybind11 of this environment; its programs must be on PATH."""
    return {"CAKE_GDN_CUDA": "OFF", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request, tmp_path_factory) -> Environment:
    folder = tmp_path_factory.mktemp(request.param)
    environment = Environment(folder / "venv")
    if request.param == "wheel":
        wheel = os.environ.get("CAKE_GDN_TEST_WHEEL")
        if not wheel:
            source = copy_source(folder / "source")
            command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source]
            run(command, env=build_environment())
            (wheel,) = folder.glob("*.whl")
            # The wheel must stand alone.
            shutil.rmtree(source)
        environment.pip(wheel)
    else:
        environment.source = copy_source(folder / "source")
        environment.pip("-e", environment.source, env=build_environment())
    root = environment.package_root()
    assert root.is_relative_to(environment.folder), f"{root} is not the fresh install"
    environment.kind = request.param
    return environment


def test_plain_cmake_project_in_c(installed, tmp_path):
    build = tmp_path / "build"
    root = installed.package_root()
    run([cmake(), "-S", CONSUMERS / "c_cmake", "-B", build, f"-Dcake_gdn_det_ROOT={root}"])
    run([cmake(), "--build", build])
    assert run([build / "consumer"]).stdout.endswith("ok\n")


def test_scikit_build_project_in_cpp(installed, tmp_path):
    """find_package gets no hint but the entry point group cmake.root."""
    source = tmp_path / "cpp_scikit"
    shutil.copytree(CONSUMERS / "cpp_scikit", source)
    installed.pip(source, env=build_environment())
    code = "import gdn_consumer as c; print(*c.check(), c.bad_call())"
    error, slope, difference, status = (float(x) for x in installed.output(code).split())
    assert error < 1e-12
    assert abs(slope - difference) < 1e-6 * (1 + abs(slope))
    assert status == 1
    # It is the library of the package that runs, not a copy.
    module = next(installed.site.glob("gdn_consumer*.so"))
    linked = subprocess.run(["ldd", module], capture_output=True, text=True, check=True).stdout
    assert str(installed.package_root() / "lib" / "libcake_gdn_det.so") in linked.replace("gdn_consumer/../", "")


def test_libtorch_extension(installed, tmp_path):
    command = [installed.python, CONSUMERS / "libtorch" / "main.py", installed.package_root(), tmp_path / "build"]
    assert run(command, env=build_environment(), cwd=tmp_path).stdout.endswith("ok\n")


def test_python_operator_of_the_install(installed):
    code = (
        "import torch; from cake_gdn_det import chunk_gated_delta_rule as f;"
        "x = [torch.rand(1, 70, 2, 8, requires_grad=True) for _ in range(3)];"
        "g, b = -torch.rand(1, 70, 2), torch.rand(1, 70, 2);"
        "o, _ = f(*x, g, b); o.sum().backward(); print(all(t.grad.isfinite().all() for t in x))"
    )
    assert installed.output(code).strip().endswith("True")


def test_editable_rebuild(installed):
    """With editable.rebuild, an edited C++ source is compiled at the next import; Python files are used in place."""
    if installed.kind != "editable":
        pytest.skip("of the editable install")
    env = build_environment()
    installed.pip("-e", installed.source, "-C", "editable.rebuild=true", env=env)
    source = installed.source / "csrc" / "api" / "build_info.cpp"
    show = "from cake_gdn_det import _C; print('edited' in _C.build_info())"
    assert installed.output(show, env=env).split()[-1] == "False"
    text = source.read_text()
    assert text.count('std::string out = "{";') == 1
    source.write_text(text.replace('std::string out = "{";', 'std::string out = "{\\"edited\\": true, ";'))
    assert installed.output(show, env=env).split()[-1] == "True"
    source.write_text(text)
    assert installed.output(show, env=env).split()[-1] == "False"
    package = installed.source / "python" / "cake_gdn_det" / "__init__.py"
    package.write_text(package.read_text() + "\nEDITED = 5\n")
    assert installed.output("import cake_gdn_det; print(cake_gdn_det.EDITED)", env=env).split()[-1] == "5"
