"""A real client: a tiny Qwen3-Next of transformers computes the same with this operator as with its own fallback.

The model's file reaches its operators through module globals, and its wrapper around the torch fallback refuses packed
sequences. The tests therefore put an adapter in the place of `torch_chunk_gated_delta_rule`, which passes on the
keywords that the operator has, and, for packed batches, a causal convolution that stops at the sequences' boundaries in
the place of `causal_conv1d_fn` (the fallback convolves across them). Everything else is the model's own code.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from reference.cases import cumulative

pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM  # noqa: E402

RTOL = 2e-5
LENGTHS = [70, 1, 64, 3, 62]


@pytest.fixture
def model(rng):
    """Four layers, two value heads a key head, experts; every parameter drawn from the test's generator."""
    config = Qwen3NextConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        use_cache=False,
        attn_implementation="eager",
    )
    assert config.layer_types.count("linear_attention") == 3
    model = Qwen3NextForCausalLM(config).train()
    with torch.no_grad():
        for name, x in model.named_parameters():
            drawn = torch.randn(x.shape, generator=rng)
            if "A_log" in name:
                x.copy_(drawn - 1)
            elif "dt_bias" in name:
                x.copy_(drawn - 2)
            elif "conv1d" in name:
                x.copy_(drawn * 0.4)
            else:
                x.copy_(drawn * 0.15)
    return model


@pytest.fixture
def calls(op, monkeypatch):
    """The model with the operator; the keyword arguments of every call."""
    names = inspect.signature(op).parameters
    seen = []

    def adapter(*args, **kwargs):
        seen.append(kwargs)
        return op(*args, **{name: x for name, x in kwargs.items() if name in names})

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", adapter)
    return seen


def packed_causal_conv1d(hidden_states, weight, bias=None, activation=None, **kwargs):
    """The depthwise convolution of every packed sequence alone; [1, channels, T]."""
    cu = kwargs["cu_seq_lens_q"].tolist()
    outs = []
    for start, stop in zip(cu, cu[1:]):
        x = F.pad(hidden_states[:, :, start:stop], (weight.shape[-1] - 1, 0))
        outs.append(F.conv1d(x, weight.unsqueeze(1), bias, groups=weight.shape[0]))
    out = torch.cat(outs, -1)
    return out if activation is None else modeling.ACT2FN[activation](out)


def logits_and_gradients(model, batches, dlogits):
    """Logits of each batch, and the parameters' gradients of sum(logits * dlogits) over all of them."""
    model.zero_grad()
    out = []
    for batch, d in zip(batches, dlogits):
        logits = model(**batch).logits
        (logits * d).sum().backward()
        out.append(logits.detach())
    return out, {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def assert_close(got, right, what):
    error = ((got.double() - right.double()).norm() / right.double().norm()).item()
    assert error < RTOL, f"{what}: {error:.3g}"


def assert_same_gradients(got, right):
    assert (
        got.keys() == right.keys() and any("A_log" in name for name in got) and any("dt_bias" in name for name in got)
    )
    for name in right:
        assert_close(got[name], right[name], name)


@pytest.mark.parametrize("B, T", [(2, 100), (1, 64), (3, 5)])
def test_dense(model, rng, request, B, T):
    batch = {"input_ids": torch.randint(97, (B, T), generator=rng)}
    d = torch.randn(B, T, 97, generator=rng)
    (right,), right_grads = logits_and_gradients(model, [batch], [d])
    seen = request.getfixturevalue("calls")
    (got,), grads = logits_and_gradients(model, [batch], [d])
    assert len(seen) == 3 and all(call["use_qk_l2norm_in_kernel"] for call in seen)
    assert_close(got, right, "logits")
    assert_same_gradients(grads, right_grads)


def test_padded_batch(model, rng, request):
    """Left padding, masked as the model does it: the operator sees zero rows with no decay of their own."""
    ids = torch.randint(97, (2, 80), generator=rng)
    mask = torch.ones(2, 80, dtype=torch.int64)
    mask[0, :30] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    d = torch.randn(2, 80, 97, generator=rng) * mask[..., None]
    (right,), right_grads = logits_and_gradients(model, [batch], [d])
    request.getfixturevalue("calls")
    (got,), grads = logits_and_gradients(model, [batch], [d])
    assert_close(got * mask[..., None], right * mask[..., None], "logits")
    assert_same_gradients(grads, right_grads)


def test_packed(model, rng, monkeypatch, request):
    """One packed row gives what the fallback gives for each document alone, and cu_seqlens reaches the operator."""
    docs = [torch.randint(97, (1, n), generator=rng) for n in LENGTHS]
    ds = [torch.randn(1, n, 97, generator=rng) for n in LENGTHS]
    right, right_grads = logits_and_gradients(model, [{"input_ids": x} for x in docs], ds)

    calls = request.getfixturevalue("calls")
    monkeypatch.setattr(modeling, "causal_conv1d_fn", packed_causal_conv1d)
    cu = cumulative(LENGTHS, torch.int32)
    batch = {
        "input_ids": torch.cat(docs, 1),
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }
    (got,), grads = logits_and_gradients(model, [batch], [torch.cat(ds, 1)])
    assert len(calls) == 3 and all(call["cu_seqlens"] is cu for call in calls)
    for got_doc, right_doc in zip(got.split(LENGTHS, 1), right):
        assert_close(got_doc, right_doc, "logits")
    assert_same_gradients(grads, right_grads)


def test_the_fallback_refuses_packed_sequences(model, rng):
    """Why the tests substitute: the model's own operators cannot keep sequences apart."""
    with pytest.raises(ValueError, match="packed sequences"):
        model(
            input_ids=torch.randint(97, (1, 10), generator=rng),
            position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]),
            cu_seq_lens_q=torch.tensor([0, 5, 10], dtype=torch.int32),
        )


def test_documents_do_not_leak(model, rng, monkeypatch, calls):
    """Other tokens in the first document leave the logits of the second as they are."""
    monkeypatch.setattr(modeling, "causal_conv1d_fn", packed_causal_conv1d)
    lengths = [70, 50]
    cu = cumulative(lengths, torch.int32)
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.randint(97, (1, 120), generator=rng)
    other = ids.clone()
    other[:, :70] = (other[:, :70] + 1) % 97
    kwargs = {"position_ids": position_ids, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    with torch.no_grad():
        a, b = (model(input_ids=x, **kwargs).logits[:, 70:] for x in (ids, other))
    assert_close(a, b, "logits")


def test_prefill_hands_its_state_to_decoding(model, calls, rng):
    """With a cache the model asks for the final state: decoding from it continues the full forward."""
    model.eval()
    ids = torch.randint(97, (1, 75), generator=rng)
    with torch.no_grad():
        full = model(input_ids=ids).logits
        out = model(input_ids=ids[:, :70], use_cache=True)
        assert all(call["output_final_state"] for call in calls[-3:])
        cache = out.cache
        for t in range(70, 75):
            out = model(input_ids=ids[:, t : t + 1], cache=cache, use_cache=True)
            assert_close(out.logits[:, -1], full[:, t], f"logits of token {t}")


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_bf16(model, calls, rng, dtype):
    """A 16-bit model calls with its own dtype for beta and fp32 decays; two trainings of a step have the same bits."""
    model = model.to(dtype)
    batch = {"input_ids": torch.randint(97, (2, 90), generator=rng)}
    d = torch.randn(2, 90, 97, generator=rng)
    (a,), grads_a = logits_and_gradients(model, [batch], [d])
    (b,), grads_b = logits_and_gradients(model, [batch], [d])
    assert calls[0]["beta"].dtype == dtype and calls[0]["g"].dtype == torch.float32
    assert torch.equal(a, b) and a.isfinite().all()
    for name in grads_a:
        assert torch.equal(grads_a[name], grads_b[name]), name
