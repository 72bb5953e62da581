"""The same bits again: in another process, on other thread counts, from several threads, after any other work."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from reference.cases import ALL_OPTIONS, GRADS, assert_same_bits, digest, make_case, run
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

SHAPES = {
    "dense": {"B": 3, "T": 150, "H": 2, "HV": 4, "K": 32, "V": 40},
    "packed": {"lengths": [70, 0, 1, 130, 64], "H": 1, "HV": 3, "K": 16, "V": 24},
    "one head": {"B": 1, "T": 200, "H": 1, "HV": 1, "K": 64, "V": 64},
    "one gate": {"B": 2, "T": 100, "H": 2, "HV": 2, "K": 100, "V": 60, "use_gate_in_kernel": True},
}

SCRIPT = """
import json, sys
import torch
from reference.cases import digest, make_case, run
from cake_gdn_det import chunk_gated_delta_rule

torch.set_num_threads(int(sys.argv[1]))
device, cases = sys.argv[2], json.loads(sys.argv[3])
if len(sys.argv) > 4:  # other work first: another heap, other addresses
    rng = torch.Generator().manual_seed(1)
    run(chunk_gated_delta_rule, make_case(rng, B=2, T=333, HV=3, K=48, V=80, device=device))
out = []
for shape in cases:
    dtype = getattr(torch, shape.pop("dtype"))
    case = make_case(torch.Generator().manual_seed(0), dtype=dtype, device=device, **shape)
    out.append(digest(run(chunk_gated_delta_rule, case)))
print(json.dumps(out))
"""


def test_processes_and_their_history(op, device):
    """Fresh processes with other thread counts, hash seeds, allocators and histories print this process's SHA-256."""
    shapes = []
    for name, shape in SHAPES.items():
        for dtype in ("float32", "bfloat16", "float64"):
            shapes.append(shape | {"dtype": dtype} | (ALL_OPTIONS if name == "packed" else {}))
    here = []
    for shape in shapes:
        kwargs = {k: v for k, v in shape.items() if k != "dtype"}
        case = make_case(
            torch.Generator().manual_seed(0), dtype=getattr(torch, shape["dtype"]), device=device, **kwargs
        )
        here.append(digest(run(op, case)))
    assert len(set(here)) == len(here)
    variants = [
        (["1"], {"PYTHONHASHSEED": "1"}),
        (["7", "after other work"], {"PYTHONHASHSEED": "2", "MALLOC_PERTURB_": "165", "OMP_NUM_THREADS": "5"}),
    ]
    for (threads, *history), env in variants:
        command = [sys.executable, "-c", SCRIPT, threads, device, json.dumps(shapes), *history]
        path = os.pathsep.join([str(Path(__file__).parent), *(p for p in sys.path if p)])
        result = subprocess.run(
            command, env=os.environ | env | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout) == here


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_thread_counts(op, rng, device, threads, shape, dtype):
    case = make_case(rng, dtype=dtype, device=device, **SHAPES[shape])
    threads(1)
    one = run(op, case)
    for count in (2, 3, 7, 16):
        threads(count)
        assert_same_bits(one, run(op, case))


@pytest.mark.parametrize("shape", SHAPES)
def test_repeated(op, rng, device, threads, shape):
    threads(3)
    case = make_case(rng, dtype=BF16, device=device, **SHAPES[shape])
    first = run(op, case)
    for _ in range(10):
        assert_same_bits(first, run(op, case))


def test_addresses(op, rng, device):
    """The same values at other addresses, aligned otherwise."""
    case = make_case(rng, T=130, HV=2, K=24, V=20, device=device)
    first = run(op, case)
    for offset in (1, 2, 3, 5):
        moved = {}
        for name in case.present:
            x = case.inputs[name]
            moved[name] = torch.cat([x.new_zeros(offset), x.reshape(-1)])[offset:].view(x.shape)
        assert_same_bits(first, run(op, case.with_inputs(**moved)))


def test_several_threads_call_at_once(op, rng, device):
    """Calls that overlap, of different shapes, each have the bits that they have alone."""
    shapes = [dict(SHAPES[name]) for name in SHAPES]
    cases = [make_case(rng, dtype=d, device=device, **s) for s in shapes for d in (F32, BF16)]
    alone = [run(op, case) for case in cases]
    jobs = list(range(len(cases))) * 4
    random.Random(0).shuffle(jobs)
    with ThreadPoolExecutor(4) as pool:
        for i, out in zip(jobs, pool.map(lambda i: run(op, cases[i]), jobs)):
            assert_same_bits(alone[i], out)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_forwards_bits(op, rng, device, reentrant):
    """Activation checkpointing runs the forward again: its output, and with it the gradients, are the same."""
    case = make_case(rng, T=150, HV=2, dtype=BF16, device=device, **ALL_OPTIONS)
    plain = run(op, case)
    seen = []

    def recorded(*args, **kwargs):
        out = op(*args, **kwargs)
        seen.append(out[0].detach())
        return out

    def checkpointed(**kwargs):
        names = case.present

        def call(*xs):
            return recorded(**(kwargs | dict(zip(names, xs))))

        return checkpoint(call, *(kwargs[n] for n in names), use_reentrant=reentrant)

    # Without the early stop the recomputation ends as the forward does, and can be recorded.
    with set_checkpoint_early_stop(False):
        assert_same_bits(plain, _run_backward(checkpointed, case))
    assert len(seen) == 2 and torch.equal(seen[0], seen[1])


def _run_backward(op, case):
    """`run`, with gradients through .backward(), which a reentrant checkpoint needs."""
    leaves = {name: case.inputs[name].detach().clone().requires_grad_() for name in case.present}
    o, final = op(**leaves, **case.options, output_final_state=True)
    torch.autograd.backward([o, final], [case.do, case.dht])
    return {"o": o.detach(), "final_state": final.detach()} | {GRADS[n]: x.grad for n, x in leaves.items()}


def test_backward_twice_over_one_forward(op, rng, device):
    """retain_graph: the second backward reads the same saved tensors."""
    case = make_case(rng, T=150, HV=2, device=device)
    leaves = {name: case.inputs[name].detach().requires_grad_() for name in case.present}
    o, final = op(**leaves, output_final_state=True)
    pairs = [o, final], list(leaves.values()), [case.do, case.dht]
    first = torch.autograd.grad(*pairs, retain_graph=True)
    second = torch.autograd.grad(*pairs)
    assert_same_bits(dict(zip(leaves, first)), dict(zip(leaves, second)))


def test_slices_of_heads(op, rng, device):
    """A group of heads alone has the bits that it has among others."""
    case = make_case(rng, B=2, T=130, H=3, HV=6, K=16, V=16, device=device)
    out = run(op, case)
    part = case.with_inputs(**{n: case.inputs[n][:, :, 1:2] for n in "qk"})
    part = part.with_inputs(**{n: case.inputs[n][:, :, 2:4] for n in ("v", "g", "beta")})
    part = part.with_inputs(initial_state=case.inputs["initial_state"][:, 2:4])
    part.do, part.dht = case.do[:, :, 2:4], case.dht[:, 2:4]
    alone = run(op, part)
    cut = {n: out[n][:, :, 2:4] for n in ("o", "dv", "dg", "dbeta")} | {n: out[n][:, :, 1:2] for n in ("dq", "dk")}
    assert_same_bits(cut | {n: out[n][:, 2:4] for n in ("final_state", "dh0")}, alone)
