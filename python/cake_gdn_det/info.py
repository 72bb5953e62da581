"""What is installed, how it was built, what devices there are and what will run where.

`collect` never raises: each part is looked at by itself, and what fails becomes that part's "error". Nothing is
imported at the top but the standard library, so that the report comes out when torch or the compiled core is broken.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCHEMA = 1  # of the JSON form; raised when a key changes its meaning or goes away


def collect() -> dict[str, Any]:
    """Looks at everything. The result holds only JSON types:

    - schema: int
    - package: version, path
    - python: version, implementation, platform
    - torch: version, cuda (version or null), threads
    - library: abi_version, build (as cake_gdn_build_info of the C library gives it)
    - cpu: model, machine, cores, threads, usable_threads (cores: null where the system does not tell)
    - gpus: driver (newest CUDA version the driver supports, or null), torch_cuda (version that torch is built with, or
      null), devices (a list of index, name, capability, memory_mib)
    - runs: a list of device, name, runs (bool), detail (how, or why not); the CPU first, then every GPU

    A part that fails is {"error": text} instead; `runs` is always whole.
    """
    info: dict[str, Any] = {"schema": SCHEMA}
    for name, part in (
        ("package", _package),
        ("python", _python),
        ("torch", _torch),
        ("library", _library),
        ("cpu", _cpu),
        ("gpus", _gpus),
    ):
        info[name] = _guarded(part)
    info["runs"] = _runs(info)
    return info


def gpu_support(index: int = 0) -> tuple[bool, str]:
    """Whether the operator of this build runs on the GPU `index` of torch, and how or why not."""
    gpus = _guarded(_gpus)
    if "error" in gpus:
        return False, gpus["error"]
    if index >= len(gpus["devices"]):
        return False, _no_gpu(gpus)
    return _gpu_runs(gpus["devices"][index], _guarded(_library))


def _guarded(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except Exception as error:  # whatever it is, the report shows it
        return {"error": _text(error)}


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _package() -> dict[str, Any]:
    path = str(Path(__file__).parent)
    try:
        return {"version": importlib.metadata.version("cake-gdn-det"), "path": path}
    except importlib.metadata.PackageNotFoundError:
        return {"error": f"cake-gdn-det is not installed (imported from {path})"}


def _python() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
    }


def _torch() -> dict[str, Any]:
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}


def _library() -> dict[str, Any]:
    core = importlib.import_module("cake_gdn_det._C")
    return {"abi_version": core.abi_version(), "build": json.loads(core.build_info())}


def _cpu() -> dict[str, Any]:
    fields = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    model = re.search(r"^model name\s*:\s*(.+)$", fields, re.MULTILINE)
    cores = set(re.findall(r"^physical id\s*:\s*(\d+)$.*?^core id\s*:\s*(\d+)$", fields, re.MULTILINE | re.DOTALL))
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {
        "model": model[1] if model else platform.processor() or platform.machine(),
        "machine": platform.machine(),
        "cores": len(cores) or None,
        "threads": os.cpu_count(),
        "usable_threads": len(usable),
    }


def _gpus() -> dict[str, Any]:
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_mib": properties.total_memory >> 20,
            }
        )
    return {"driver": _driver(), "torch_cuda": torch.version.cuda, "devices": devices}


def _driver() -> str | None:
    """Newest CUDA version that the installed driver supports; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _no_gpu(gpus: dict[str, Any]) -> str:
    if gpus["driver"] is None:
        return "no NVIDIA driver (libcuda.so.1 is missing)"
    if gpus["torch_cuda"] is None:
        return "there is an NVIDIA driver, but this torch is built without CUDA"
    return "torch sees no such GPU"


def _runs(info: dict[str, Any]) -> list[dict[str, Any]]:
    library, cpu, gpus = info["library"], info["cpu"], info["gpus"]
    runs, detail = _probe("cpu")
    if runs:
        detail = f"C++ engine, {library['build'].get('cpu_unit')} unit" if "build" in library else "C++ engine"
    entries = [{"device": "cpu", "name": cpu.get("model", platform.machine()), "runs": runs, "detail": detail}]
    for gpu in gpus.get("devices", []):
        runs, detail = _gpu_runs(gpu, library)
        entries.append({"device": f"cuda:{gpu['index']}", "name": gpu["name"], "runs": runs, "detail": detail})
    return entries


def _gpu_runs(gpu: dict[str, Any], library: dict[str, Any]) -> tuple[bool, str]:
    """What the build says about the GPU; when it has code for it, the operator itself has the last word."""
    if "error" in library:
        return False, f"the compiled core does not load: {library['error']}"
    build = library["build"]
    if not build["cuda"]:
        return False, "this build has no CUDA part (it was built with CAKE_GDN_CUDA=OFF)"
    capability = int(gpu["capability"].replace(".", ""))
    arch = next((arch for arch in build["archs"] if int(arch["capability"]) == capability), None)
    if arch:
        runs, detail = _probe(f"cuda:{gpu['index']}")
        return runs, f"sm_{arch['name']} code" if runs else detail
    built = ", ".join(f"sm_{arch['name']}" for arch in build["archs"]) or "none"
    if any(int(re.match(r"\d+", name)[0]) == capability for name in build["dropped_archs"]):
        return False, f"CUDA {build['cuda']}, which this build was made with, is too old for this GPU's sm_{capability}"
    return False, f"compute capability {gpu['capability']}: this build has code for {built} only"


def _probe(device: str) -> tuple[bool, str]:
    """Runs the operator, forward and backward, on one token."""
    try:
        import torch

        from cake_gdn_det import chunk_gated_delta_rule

        q = torch.ones(1, 1, 1, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        g = torch.zeros(1, 1, 1, device=device)
        o, _ = chunk_gated_delta_rule(q, q, q, g, g + 0.5)
        o.sum().backward()
        return True, "runs"
    except Exception as error:
        return False, _text(error)


def render(info: dict[str, Any]) -> str:
    """The report of `collect` for people."""
    torch, library, cpu, gpus = info["torch"], info["library"], info["cpu"], info["gpus"]
    rows: list[tuple[str, str] | str] = ["Versions"]
    rows += _rows(info["package"], "cake_gdn_det", lambda p: [("cake_gdn_det", p["version"]), ("in", p["path"])])
    rows += _rows(
        info["python"], "python", lambda p: [("python", f"{p['version']} ({p['implementation']}, {p['platform']})")]
    )
    rows += _rows(
        torch,
        "torch",
        lambda t: [("torch", f"{t['version']} (CUDA {t['cuda'] or 'none'}, {_count(t['threads'], 'thread')})")],
    )
    rows += ["", "Build", *_rows(library, "compiled core", _build_rows)]
    rows += ["", "Devices", *_rows(cpu, "cpu", _cpu_rows), *_rows(gpus, "gpus", _gpu_rows)]
    rows += ["", "The operator runs on"]
    rows += [(run["device"], f"{'yes' if run['runs'] else 'no '}  {run['detail']}") for run in info["runs"]]
    return "\n".join(row if isinstance(row, str) else f"  {row[0]:<15} {row[1]}".rstrip() for row in rows)


def _rows(part: dict[str, Any], label: str, rows: Callable[[Any], list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """The rows of one part, or its error, whose further lines are indented like the first."""
    if "error" in part:
        return [(label, ("ERROR  " + part["error"]).replace("\n", "\n" + " " * 18))]
    return rows(part)


def _count(number: int | None, noun: str) -> str:
    return f"{'?' if number is None else number} {noun}{'' if number == 1 else 's'}"


def _build_rows(library: dict[str, Any]) -> list[tuple[str, str]]:
    build = library["build"]
    commit = f", commit {build['git_commit'][:12]}" if build["git_commit"] else ""
    rows = [
        ("library", f"{build['version']}{commit}, C ABI {library['abi_version']}"),
        ("compiler", build["compiler"]),
        ("cpu units", f"{' '.join(build['cpu_units'])} (this machine: {build['cpu_unit']})"),
        ("cuda", build["cuda"] or "none (built for the CPU only)"),
    ]
    if not build["cuda"]:
        return rows
    for arch in build["archs"]:
        capability = int(arch["capability"])
        rows.append((f"sm_{arch['name']}", f"built, for compute capability {capability // 10}.{capability % 10}"))
    rows += [(f"sm_{name}", f"not built: CUDA {build['cuda']} is too old for it") for name in build["dropped_archs"]]
    programs = build["programs"]
    rows.append(("gpu programs", f"{len(programs)}: " + ", ".join(program["name"] for program in programs)))
    return rows


def _cpu_rows(cpu: dict[str, Any]) -> list[tuple[str, str]]:
    counts = [_count(cpu["threads"], "thread"), f"{cpu['usable_threads']} usable"]
    if cpu["cores"]:
        counts.insert(0, _count(cpu["cores"], "core"))
    return [("cpu", f"{cpu['model']} ({cpu['machine']}; {', '.join(counts)})")]


def _gpu_rows(gpus: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("nvidia driver", f"supports CUDA {gpus['driver']}" if gpus["driver"] else "none")]
    for gpu in gpus["devices"]:
        memory = f"{gpu['memory_mib'] / 1024:.0f} GiB"
        rows.append((f"cuda:{gpu['index']}", f"{gpu['name']} (compute capability {gpu['capability']}, {memory})"))
    if not gpus["devices"]:
        rows.append(("gpus", f"none: {_no_gpu(gpus)}"))
    return rows
