"""The operator inside torch: compile, checkpointing, autocast, opcheck, transforms, subsets of gradients, no tokens.

Values belong to other tests; here every answer is compared, to the bit, with the plain eager call.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from reference.cases import ALL_OPTIONS, GRADS, INPUTS, assert_same_bits, cumulative, make_case, run
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import cake_gdn_det
from cake_gdn_det import _C, chunk_gated_delta_rule, chunk_gated_delta_rule_det
from cake_gdn_det.ops import torch_ops

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LENGTHS = [0, 70, 1, 64, 0, 65]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(counter):
    return torch.compile(chunk_gated_delta_rule, fullgraph=True, dynamic=True, backend=counter)


# ---- the function ----


def test_signature():
    text = (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, "
        "cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, *, use_gate_in_kernel=False, A_log=None, "
        "dt_bias=None, chunk_size=64, backend='auto', batch_invariant=False, save_state=None, plan=None"
    )
    parameters = inspect.signature(chunk_gated_delta_rule).parameters.values()
    bare = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters])
    assert str(bare) == f"({text})"
    assert all(p.annotation is not inspect.Parameter.empty for p in parameters)
    assert chunk_gated_delta_rule_det is chunk_gated_delta_rule
    for name in inspect.signature(chunk_gated_delta_rule).parameters:
        assert f"\n        {name}: " in chunk_gated_delta_rule.__doc__, f"{name} is not documented"


def test_import_needs_neither_torch_nor_the_compiled_module():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['cake_gdn_det._C'] = None\n"
        "import cake_gdn_det\n"
        "assert 'chunk_gated_delta_rule' in dir(cake_gdn_det) and cake_gdn_det.__version__\n"
        "try: from cake_gdn_det import chunk_gated_delta_rule\n"
        "except ImportError as error: print('ImportError', error)\n"
        "try: cake_gdn_det.nonsense\n"
        "except AttributeError as error: print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "ImportError" in out
    assert "has no attribute 'nonsense'" in out


def test_stub_lists_what_the_module_has():
    stub = ast.parse((Path(cake_gdn_det.__file__).parent / "_C.pyi").read_text())
    cuda_only, names = set(), set()
    for node in stub.body:
        if isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
            assert isinstance(getattr(_C, node.target.id, 0), (int, dict))
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
            if ast.unparse(node.args).endswith("Params, stream: int"):
                cuda_only.add(node.name)
            if hasattr(_C, node.name):
                arguments = ", ".join(a.arg for a in node.args.args)
                given = getattr(_C, node.name).__doc__.splitlines()[0]
                assert arguments == ", ".join(
                    x.split(":")[0] for x in given.split("(")[1].split(")")[0].split(", ") if x
                )
        elif isinstance(node, ast.ClassDef) and node.name.endswith("Params"):
            cuda_only.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            fields = [x.target.id for x in node.body if isinstance(x, ast.AnnAssign)]
            init = next(x for x in node.body if isinstance(x, ast.FunctionDef))
            assert [a.arg for a in init.args.kwonlyargs] == fields
            if hasattr(_C, node.name):
                properties = {n for n, x in vars(getattr(_C, node.name)).items() if isinstance(x, property)}
                assert properties == set(fields), node.name
    names = (names | cuda_only) - {"Tensor", "_Params"}
    cuda_only.discard("_Params")
    has = {name for name in dir(_C) if not name.startswith("_")}
    assert names - has in (set(), cuda_only)
    assert has <= names


def test_h_has_the_closed_form_shape():
    for B, T in itertools.product([0, 1, 3], [0, 1, 63, 64, 65, 128, 129, 1000]):
        assert torch_ops.saved_shapes(B, T, 4, 5, 6)[0] == (_C.state_slots(B, T), 4, 5, 6)


# ---- what is saved and what is computed ----


def saved_bytes(case, **options) -> dict[torch.Size, torch.dtype]:
    saved = {}

    def pack(x):
        saved[x.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        leaves = {name: x if x is None else x.detach().requires_grad_() for name, x in case.inputs.items()}
        chunk_gated_delta_rule(**leaves, **(case.options | options))
    return [
        x for x in saved.values() if not any(y is not None and x.data_ptr() == y.data_ptr() for y in leaves.values())
    ]


@pytest.mark.parametrize(("save_state", "kept"), [(None, True), (True, True), (False, False)])
@pytest.mark.parametrize("dtype", [BF16, F64], ids=str)
def test_chunk_states_are_kept_as_asked(rng, save_state, kept, dtype):
    case = make_case(rng, B=2, T=200, H=1, HV=2, K=8, V=6, dtype=dtype)
    extra = saved_bytes(case, save_state=save_state)
    wide = F64 if dtype is F64 else F32
    assert [(x.shape, x.dtype) for x in extra] == ([((2 * 3, 2, 8, 6), wide)] if kept else [])


def spy(monkeypatch):
    """Records every _C.Problem that the operators make."""
    seen = []
    workspace_size = _C.workspace_size

    def record(problem, direction):
        seen.append(problem)
        return workspace_size(problem, direction)

    monkeypatch.setattr(torch_ops._C, "workspace_size", record)
    return seen


def test_no_gradient_no_saved_state(rng, monkeypatch):
    case = make_case(rng, T=200)
    seen = spy(monkeypatch)
    leaves = {name: x if x is None else x.detach().requires_grad_() for name, x in case.inputs.items()}
    with torch.no_grad():
        chunk_gated_delta_rule(**leaves, save_state=True)
    with torch.inference_mode():
        chunk_gated_delta_rule(**leaves, save_state=True)
    chunk_gated_delta_rule(**case.inputs, save_state=True)
    assert [(problem.slots, problem.h) for problem in seen] == [(0, None)] * 3
    chunk_gated_delta_rule(**leaves)
    assert (seen[-1].slots, seen[-1].h is None) == (3, False)


@pytest.mark.parametrize("wanted", [(name,) for name in INPUTS] + [("q", "g", "dt_bias"), ("v", "initial_state")])
def test_only_wanted_gradients_are_computed(rng, monkeypatch, wanted):
    case = make_case(rng, T=100, HV=2, **ALL_OPTIONS)
    full = run(chunk_gated_delta_rule, case)
    seen = spy(monkeypatch)
    some = run(chunk_gated_delta_rule, case, wanted)
    assert set(some) == {"o", "final_state", *(GRADS[name] for name in wanted)}
    assert_same_bits(some, full)
    assert [name for name in INPUTS if getattr(seen[-1], GRADS[name]) is not None] == [n for n in INPUTS if n in wanted]


@pytest.mark.parametrize("threads_used", [1, 3])
def test_threads_of_torch_are_used(rng, monkeypatch, threads, threads_used):
    seen = spy(monkeypatch)
    threads(threads_used)
    run(chunk_gated_delta_rule, make_case(rng, T=5))
    assert [problem.num_threads for problem in seen] == [threads_used] * 2


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
def test_outputs_and_gradients_are_contiguous_and_new(rng, dtype):
    case = make_case(rng, B=2, T=70, H=2, HV=4, K=8, V=6, dtype=dtype, state_dtype=dtype)
    case = case.with_inputs(q=case.inputs["q"].transpose(1, 2).contiguous().transpose(1, 2))
    out = run(chunk_gated_delta_rule, case)
    assert all(x.is_contiguous() for x in out.values())
    assert out["dh0"].dtype is dtype
    places = [x.untyped_storage().data_ptr() for x in [*out.values(), *case.inputs.values()] if x is not None]
    assert len(set(places)) == len(places)


def test_outputs_without_gradient(rng):
    case = make_case(rng, T=5)
    case.inputs["q"].requires_grad_()
    o, state = chunk_gated_delta_rule(**case.inputs)
    assert o.requires_grad
    assert state is None
    assert torch.autograd.grad(o.sum(), case.inputs["q"])[0].shape == case.inputs["q"].shape


def test_inplace_change_of_a_saved_tensor_is_noticed(rng):
    case = make_case(rng, lengths=[3, 4])
    v = case.inputs["v"].clone().requires_grad_()
    o, _ = chunk_gated_delta_rule(**case.inputs | {"v": v}, **case.options)
    case.options["cu_seqlens"][1] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_uninitialised_memory_is_not_read(rng):
    case = make_case(rng, lengths=LENGTHS, HV=2, dtype=BF16, **ALL_OPTIONS)
    plain = run(chunk_gated_delta_rule, case)
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        assert_same_bits(run(chunk_gated_delta_rule, case), plain)
    finally:
        torch.use_deterministic_algorithms(False)


def test_several_threads_at_once(rng):
    cases = [make_case(rng, T=T, HV=2) for T in (65, 130, 200, 90)]
    alone = [run(chunk_gated_delta_rule, case) for case in cases]
    together = [None] * len(cases)

    def work(i):
        for _ in range(5):
            together[i] = run(chunk_gated_delta_rule, cases[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for a, b in zip(alone, together, strict=True):
        assert_same_bits(a, b)


# ---- empty tensors ----


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])
@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}, {"B": 0, "T": 0}, {"lengths": []}, {"lengths": [0, 0]}], ids=str)
def test_empty(rng, sizes, options, final):
    case = make_case(rng, H=2, HV=4, K=8, V=6, **sizes, **options)
    out = run(chunk_gated_delta_rule, case, final=final)
    assert out["o"].numel() == 0
    if final:
        assert torch.equal(out["final_state"], case.inputs["initial_state"])
        assert torch.equal(out["dh0"], case.dht)


# ---- torch.compile ----


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])
def test_compiles_once_for_all_lengths(rng, fresh_dynamo, backend, options):
    counter = CompileCounterWithBackend(backend)
    step = compiled(counter)
    for T in (130, 200, 1000, 333):
        case = make_case(rng, B=2, T=T, H=2, HV=4, K=8, V=6, **options)
        assert_same_bits(run(step, case), run(chunk_gated_delta_rule, case))
    assert counter.frame_count == 1


@pytest.mark.parametrize("save_state", [None, False])
def test_compiles_once_for_all_packings(rng, fresh_dynamo, save_state):
    counter = CompileCounterWithBackend("aot_eager")
    step = compiled(counter)
    for lengths in (LENGTHS, [5, 100, 30], [200, 9], [64] * 9):
        case = make_case(rng, lengths=lengths, HV=2, dtype=BF16, **ALL_OPTIONS)
        case = case.with_options(cu_seqlens_cpu=case.options["cu_seqlens"].clone(), save_state=save_state)
        assert_same_bits(run(step, case), run(chunk_gated_delta_rule, case))
    assert counter.frame_count == 1


def test_compiles_for_no_slot_one_slot_and_more(rng, fresh_dynamo):
    counter = CompileCounterWithBackend("aot_eager")
    step = compiled(counter)
    for T in (130, 65, 7, 200, 64, 128, 2, 129):
        case = make_case(rng, T=T)
        assert_same_bits(run(step, case), run(chunk_gated_delta_rule, case))
    assert counter.frame_count == 3


def test_compiled_without_gradients(rng, fresh_dynamo):
    counter = CompileCounterWithBackend("inductor")
    step = compiled(counter)
    with torch.no_grad():
        for T in (130, 7, 65, 200):
            case = make_case(rng, T=T)
            assert_same_bits(run(step, case, wanted=()), run(chunk_gated_delta_rule, case, wanted=()))
    assert counter.frame_count == 1


def test_compiled_scale_may_change(rng, fresh_dynamo):
    step = compiled("eager")
    for scale in (0.5, 0.25, 2, None, 0.125):
        case = make_case(rng, T=20, scale=scale)
        assert_same_bits(run(step, case), run(chunk_gated_delta_rule, case))


def test_compiled_inside_a_model(rng, fresh_dynamo):
    """Static shapes first, then dynamic ones, as torch.compile does by itself, around the call."""
    weight = torch.randn(16, 48, generator=rng)

    def block(x, weight):
        q, k, v = (x @ weight).unflatten(-1, (3, 1, 16)).unbind(-3)
        g, beta = -x[..., :1].abs(), x[..., 1:2].sigmoid()
        o, state = cake_gdn_det.chunk_gated_delta_rule(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True
        )
        return torch.nn.functional.silu(o).flatten(-2) + x, state

    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(block, fullgraph=True, backend=counter)
    for T in (170, 130, 200, 1000):
        answers = []
        x = torch.randn(2, T, 16, generator=rng)
        for f in (block, step):
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            y, state = f(*leaves)
            grads = torch.autograd.grad(y.sum() + state.square().sum(), leaves)
            answers.append(dict(enumerate([y.detach(), state.detach(), *grads])))
        assert_same_bits(*answers)
    assert counter.frame_count == 2


def test_compiled_call_is_checked(rng, fresh_dynamo):
    case = make_case(rng, T=10, HV=2)
    bad = case.inputs | {"g": case.inputs["g"][:, :, :1]}
    step = torch.compile(chunk_gated_delta_rule, backend="eager")
    with pytest.raises(ValueError, match="g has shape"):
        step(**bad)
    torch._dynamo.reset()
    with pytest.raises((ValueError, torch._dynamo.exc.TorchDynamoException), match=r"ValueError|g has shape"):
        compiled("eager")(**bad)
    torch._dynamo.reset()
    packed = make_case(rng, lengths=[4, 6])
    with pytest.raises(ValueError, match=r"cu_seqlens.* T = 10"):
        compiled("eager")(**packed.inputs, cu_seqlens=cumulative([4, 5]))


def test_exports(rng):
    class Model(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return chunk_gated_delta_rule(q, k, v, g, beta)[0]

    first, second = (
        tuple(make_case(rng, T=T).inputs[name] for name in ("q", "k", "v", "g", "beta")) for T in (100, 170)
    )
    T = torch.export.Dim("T", min=2, max=4096)
    program = torch.export.export(
        Model(), first, dynamic_shapes={name: {1: T} for name in ("q", "k", "v", "g", "beta")}
    )
    assert torch.equal(program.module()(*second), Model()(*second))


# ---- checkpointing, autocast, modes ----


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("save_state", [None, False])
def test_activation_checkpointing(rng, use_reentrant, save_state):
    case = make_case(rng, lengths=LENGTHS, HV=2, dtype=BF16, **ALL_OPTIONS)
    calls = []

    def op(q, k, v, g, beta, **rest):
        def body(q, k, v, g, beta):
            calls.append(torch.is_grad_enabled())
            return chunk_gated_delta_rule(q, k, v, g, beta, **rest)

        return checkpoint(body, q, k, v, g, beta, use_reentrant=use_reentrant)

    wanted = ("q", "k", "v", "g", "beta")  # a reentrant checkpoint sees the gradients of its arguments only

    def backward(op):
        leaves = {name: x if x is None else x.detach() for name, x in case.inputs.items()}
        for name in wanted:
            leaves[name].requires_grad_()
        o, state = op(**leaves, **case.options, output_final_state=True, save_state=save_state)
        torch.autograd.backward([o, state], [case.do, case.dht])
        return {"o": o.detach(), "final_state": state.detach()} | {GRADS[n]: leaves[n].grad for n in wanted}

    assert_same_bits(backward(op), backward(chunk_gated_delta_rule))
    assert calls == [not use_reentrant, True]


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("autocast_dtype", [BF16, F16], ids=str)
def test_autocast_changes_nothing(rng, dtype, autocast_dtype):
    case = make_case(rng, T=100, HV=2, dtype=dtype, **ALL_OPTIONS)
    plain = run(chunk_gated_delta_rule, case)
    with torch.autocast("cpu", dtype=autocast_dtype):
        assert_same_bits(run(chunk_gated_delta_rule, case), plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes_change_no_bit(rng, mode):
    case = make_case(rng, T=130, HV=2)
    leaves = {name: x if x is None else x.detach().requires_grad_() for name, x in case.inputs.items()}
    plain = run(chunk_gated_delta_rule, case)
    with mode():
        o, state = chunk_gated_delta_rule(**leaves, output_final_state=True)
    assert_same_bits({"o": o.detach(), "final_state": state.detach()}, plain)
    assert o.requires_grad == (mode is torch.enable_grad)


# ---- the torch.library operators ----


def forward_arguments(case, final=True, save_h=True):
    flags = {
        "use_qk_l2norm_in_kernel": _C.QK_L2NORM,
        "use_gate_in_kernel": _C.GATE,
        "use_beta_sigmoid_in_kernel": _C.BETA_SIGMOID,
        "allow_neg_eigval": _C.NEG_EIGVAL,
        "state_v_first": _C.STATE_V_FIRST,
    }
    bits = sum(flag for name, flag in flags.items() if case.options.get(name))
    offsets = case.options.get("cu_seqlens")
    inputs = [case.inputs[name] for name in torch_ops.INPUTS]
    return (*inputs, offsets, None if offsets is None else offsets.clone(), 0.5, bits, final, save_h, None)


SAMPLES = {
    "dense": {"B": 2, "T": 130, "H": 2, "HV": 4, "K": 8, "V": 6},
    "one token": {"T": 1},
    "no token": {"T": 0, "HV": 2},
    "packed": {"lengths": LENGTHS, "HV": 2, "dtype": BF16, **ALL_OPTIONS},
    "no state": {"T": 70, "initial_state": False, "use_gate_in_kernel": True, "dt_bias": False, "dtype": F16},
    "other dtypes": {"T": 70, "g_dtype": BF16, "beta_dtype": F64, "state_dtype": BF16, "dtype": F64},
}


@pytest.mark.parametrize("save_h", [False, True])
@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck(rng, sample, save_h):
    case = make_case(rng, **SAMPLES[sample])
    arguments = forward_arguments(case, final=save_h, save_h=save_h)
    torch.library.opcheck(torch_ops.forward, arguments)
    h = torch_ops.forward(*arguments)[2] if save_h else None  # o, final_state, h
    present = [x is not None for x in arguments[:8]]
    for needs in (present, [x and i % 3 == 1 for i, x in enumerate(present)]):
        backward = (case.do, case.dht if save_h else None, *arguments[:10], h, None, *arguments[10:12], needs, None)
        torch.library.opcheck(torch_ops.backward, backward)


def test_lazily_negated_tensors(rng):
    """The imaginary part of a conjugate is a view with a sign to be taken, which only the dispatcher knows to do."""
    case = make_case(rng, T=70, HV=2)
    lazy = {name: torch.complex(0 * case.inputs[name], -case.inputs[name]).conj().imag for name in ("q", "k", "v")}
    assert all(x.is_neg() for x in lazy.values())
    assert_same_bits(run(chunk_gated_delta_rule, case.with_inputs(**lazy)), run(chunk_gated_delta_rule, case))
    leaves = [x.requires_grad_() for x in five(case)]
    o = one_output(*leaves)
    do = torch.complex(torch.zeros_like(case.do), -case.do).conj().imag
    assert_same_bits(*({"dq": torch.autograd.grad(o, leaves, x, retain_graph=True)[0]} for x in (do, case.do)))


def test_schemas():
    assert str(torch_ops.forward._schema) == (
        "cake_gdn_det::forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
        "Tensor? initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, float scale, int flags, "
        "bool output_final_state, bool save, str? plan) -> Tensor[]"
    )
    assert str(torch_ops.backward._schema) == (
        "cake_gdn_det::backward(Tensor? d_o, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
        "Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, Tensor? h, "
        "Tensor? A, float scale, int flags, bool[] needs, str? plan) -> Tensor[]"
    )


def test_the_operators_alone_refuse_gradients(rng):
    case = make_case(rng, T=10)
    arguments = forward_arguments(case)
    arguments[0].requires_grad_()
    with pytest.raises(RuntimeError, match="has no derivative of its own"):
        torch_ops.forward(*arguments)
    with torch.no_grad():
        h = torch_ops.forward(*arguments)[2]
    backward = (case.do, case.dht, *arguments[:10], h, None, *arguments[10:12], [True] * 5 + [False] * 3, None)
    with pytest.raises(RuntimeError, match="has no derivative of its own"):
        torch_ops.backward(*backward)


# ---- what raises ----


def five(case) -> tuple[torch.Tensor, ...]:
    return tuple(case.inputs[name] for name in ("q", "k", "v", "g", "beta"))


def test_a_penalty_on_the_gradient_is_never_left_out(rng):
    leaves = [x.requires_grad_() for x in five(make_case(rng, T=70))]
    o = chunk_gated_delta_rule(*leaves)[0]
    grads = torch.autograd.grad(o.sum(), leaves, create_graph=True)
    penalty = sum(grad.square().sum() for grad in grads)
    for inputs in (leaves, leaves[:1]):
        with pytest.raises(RuntimeError, match="double backward is not implemented"):
            torch.autograd.grad(o.sum() + penalty, inputs, retain_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        (o.sum() + penalty).backward()


@pytest.mark.parametrize("donated", [False, True])
def test_double_backward_of_a_compiled_call_raises(rng, fresh_dynamo, donated):
    leaves = [x.requires_grad_() for x in five(make_case(rng, T=70))]

    def twice():
        o = compiled("aot_eager")(*leaves)[0]
        grads = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(o.sum() + grads[0].square().sum(), leaves)

    refusal = pytest.raises(RuntimeError, match=r"double backward|create_graph=False")
    with torch._functorch.config.patch(donated_buffer=donated), refusal:
        twice()


@pytest.mark.parametrize("use_reentrant", [None, False])
def test_double_backward_raises(rng, use_reentrant):
    leaves = [x.requires_grad_() for x in five(make_case(rng, T=70))]
    o = (
        chunk_gated_delta_rule(*leaves)[0]
        if use_reentrant is None
        else checkpoint(lambda *x: chunk_gated_delta_rule(*x)[0], *leaves, use_reentrant=use_reentrant)
    )
    grads = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match="double backward is not implemented"):
            torch.autograd.grad(grad.sum(), leaves, allow_unused=True, retain_graph=True)


def one_output(*inputs):
    return chunk_gated_delta_rule(*inputs)[0]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "transform",
    [
        lambda x: torch.func.grad(lambda *x: one_output(*x).sum())(*x),
        lambda x: torch.func.vjp(one_output, *x),
        lambda x: torch.func.jvp(one_output, x, x),
        lambda x: torch.func.jacrev(one_output)(*x),
        lambda x: torch.func.jacfwd(one_output)(*x),
        lambda x: torch.func.hessian(lambda *x: one_output(*x).sum())(*x),
        lambda x: torch.func.linearize(one_output, *x),
        lambda x: torch.vmap(one_output)(*(torch.stack([y, y]) for y in x)),
        lambda x: torch.vmap(one_output, in_dims=(0, None, None, None, None))(torch.stack([x[0]] * 2), *x[1:]),
        lambda x: torch.func.functionalize(torch.vmap(one_output))(*(torch.stack([y, y]) for y in x)),
    ],
    ids=[
        "grad",
        "vjp",
        "jvp",
        "jacrev",
        "jacfwd",
        "hessian",
        "linearize",
        "vmap",
        "vmap of one",
        "functionalized vmap",
    ],
)
def test_transforms_raise(rng, transform, requires_grad):
    inputs = tuple(x.requires_grad_(requires_grad) for x in five(make_case(rng, T=10)))
    with pytest.raises((RuntimeError, NotImplementedError), match=r"_ChunkGatedDeltaRule|setup_context|jvp"):
        transform(inputs)


def test_vmap_of_the_operators_raises(rng):
    case = make_case(rng, T=10)
    arguments = forward_arguments(case)
    twice = torch.stack([arguments[0]] * 2)
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda q: torch_ops.forward(q, *arguments[1:])[0])(twice)
    leaves = [x.requires_grad_() for x in five(case)]
    o = one_output(*leaves)
    # A batch of gradients is a vmap over the backward.
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.autograd.grad(o, leaves, torch.stack([case.do] * 2), is_grads_batched=True)


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("argument", range(5))
def test_forward_mode_raises(rng, grad_mode, argument):
    inputs = list(five(make_case(rng, T=10)))
    with torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        inputs[argument] = forward_ad.make_dual(inputs[argument], torch.ones_like(inputs[argument]))
        with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|[Ff]orward"):
            chunk_gated_delta_rule(*inputs)
