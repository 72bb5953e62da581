"""Options, markers and fixtures of the whole test suite.

pytest tests                 the default run: no GPU needed
pytest tests --slow          with the tests marked slow
pytest tests --seed 7        the same tests on other random inputs
pytest tests --device cuda   the numeric tests on a GPU
"""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import HealthCheck, settings

_CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "default", max_examples=20, deadline=None, derandomize=True, print_blob=True, suppress_health_check=_CHECKS
)
settings.register_profile("explore", max_examples=300, deadline=None, print_blob=True, suppress_health_check=_CHECKS)
settings.load_profile("default")

_CAPABILITY = {"sm90": (9, 0), "sm100": (10, 0)}


def pytest_addoption(parser):
    group = parser.getgroup("cake_gdn_det")
    group.addoption("--slow", action="store_true", help="run the tests marked slow too")
    group.addoption("--seed", type=int, default=0, help="draw other random inputs (default 0)")
    group.addoption(
        "--device", default="cpu", choices=["cpu", "cuda"], help="where the numeric tests run (default cpu)"
    )


def pytest_runtest_setup(item):
    slow_wanted = item.config.getoption("--slow") or "slow" in (item.config.getoption("-m") or "")
    if item.get_closest_marker("slow") and not slow_wanted:
        pytest.skip("slow: run with --slow")
    needs_gpu = any(item.get_closest_marker(name) for name in ("gpu", *_CAPABILITY))
    if needs_gpu or ("device" in item.fixturenames and item.config.getoption("--device") == "cuda"):
        if not torch.cuda.is_available():
            pytest.skip(f"needs a CUDA GPU; this torch ({torch.__version__}) sees none")
        for name, capability in _CAPABILITY.items():
            if item.get_closest_marker(name) and torch.cuda.get_device_capability() != capability:
                pytest.skip(f"needs compute capability {capability}, this is {torch.cuda.get_device_capability()}")


def _seed(item) -> int:
    return zlib.crc32(item.nodeid.encode()) + item.config.getoption("--seed")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.failed and "rng" in item.fixturenames:
        report.sections.append(("random inputs", f"seed {_seed(item)} (from the test's name and --seed)"))


@pytest.fixture
def rng(request) -> torch.Generator:
    """A CPU generator whose seed follows from the test's name, so that every test has inputs of its own."""
    return torch.Generator().manual_seed(_seed(request.node))


@pytest.fixture
def device(request) -> str:
    """The device of the numeric tests, from --device."""
    return request.config.getoption("--device")


@pytest.fixture
def op():
    """The operator."""
    from cake_gdn_det import chunk_gated_delta_rule

    return chunk_gated_delta_rule


@pytest.fixture
def threads():
    """Sets torch's thread count and puts it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
