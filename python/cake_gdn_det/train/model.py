"""A byte-level language model of Gated DeltaNet blocks, written for packed documents.

Everything that looks back in time, the short convolution and the operator, is told where documents start, so what is
computed for a document depends on that document alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cake_gdn_det import chunk_gated_delta_rule

from .data import START


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the defaults are the ones `python -m cake_gdn_det train` uses.

    Heads are `head_dim` wide for keys and values alike; `key_heads` divides `value_heads`.
    """

    width: int = 192
    layers: int = 3
    key_heads: int = 2
    value_heads: int = 4
    head_dim: int = 48
    conv_taps: int = 4
    mlp_width: int = 512


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over the last few tokens of the same document, followed by SiLU."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, channels).uniform_(-(taps**-0.5), taps**-0.5))

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        """`x` [T, channels]; `past` as `past_rows` gives it. Returns [T, channels]."""
        rows = nn.functional.pad(x, (0, 0, 0, 1))  # row T: the zeros before a document
        y = x * self.weight[0]
        for lag in range(1, len(self.weight)):
            y = torch.addcmul(y, rows.index_select(0, past[lag]), self.weight[lag])
        return nn.functional.silu(y)


def past_rows(cu_seqlens: Tensor, tokens: int, taps: int) -> Tensor:
    """Which row holds the token `lag` places back: [taps, tokens] int64; `tokens` where that is before the document."""
    row = torch.arange(tokens, device=cu_seqlens.device)
    start = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=tokens)
    past = row - torch.arange(taps, device=row.device)[:, None]
    return torch.where(past >= start, past, tokens)


class Mixer(nn.Module):
    """The token mixer: projections, short convolution, gated delta rule, gated norm, output projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.value_heads = config.head_dim, config.value_heads
        keys, values = config.key_heads * config.head_dim, config.value_heads * config.head_dim
        self.qkv_sizes = (keys, keys, values)
        self.sizes = (sum(self.qkv_sizes), values, config.value_heads, config.value_heads)
        self.in_proj = nn.Linear(config.width, sum(self.sizes), bias=False)
        self.conv = ShortConvolution(sum(self.qkv_sizes), config.conv_taps)
        # Decay rates spread from about one token to a thousand, as in Mamba-2 and the Gated DeltaNet paper.
        self.A_log = nn.Parameter(torch.empty(config.value_heads).uniform_(1, 16).log())
        step = torch.empty(config.value_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
        self.norm = nn.RMSNorm(config.head_dim, eps=1e-6)
        self.out_proj = nn.Linear(values, config.width, bias=False)

    def forward(self, x: Tensor, past: Tensor, cu_seqlens: Tensor) -> Tensor:
        """`x` [T, width], packed documents that start at `cu_seqlens`; `past` from it. Returns [T, width]."""
        qkv, gate, g, beta = self.in_proj(x).split(self.sizes, dim=-1)
        qkv = self.conv(qkv, past)
        if qkv.is_cuda:
            qkv = qkv.bfloat16()  # the GPU programs take 16-bit heads; gates and states stay fp32
        q, k, v = (part.unflatten(-1, (-1, self.head_dim))[None] for part in qkv.split(self.qkv_sizes, dim=-1))
        o, _ = chunk_gated_delta_rule(
            q,
            k,
            v,
            g[None],
            beta[None],
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            cu_seqlens=cu_seqlens,
        )
        o = self.norm(o[0].to(gate.dtype)).flatten(-2) * nn.functional.silu(gate)
        return self.out_proj(o)


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm residual block: mixer, then MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mixer = Mixer(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, past: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), past, cu_seqlens)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Predicts each byte of packed documents from the bytes before it in the same document."""

    def __init__(self, config: ModelConfig = ModelConfig()) -> None:
        super().__init__()
        self.taps = config.conv_taps
        self.embedding = nn.Embedding(START + 1, config.width)  # the 256 bytes, and START
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, 256, bias=False)
        residual = (2 * config.layers) ** -0.5  # so that the residual stream starts with a variance near one
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                gain = residual if name.endswith(("out_proj", "down")) else 1.0
                nn.init.normal_(module.weight, std=gain * module.in_features**-0.5)
        nn.init.normal_(self.head.weight, std=0.01)  # the first predictions are nearly uniform: 8 bits per byte

    def forward(self, inputs: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Next-byte logits.

        Args:
            inputs: [T] int64, the byte before each predicted byte, START at the start of each document.
            cu_seqlens: [N + 1] int64, where documents start, from 0 to T.

        Returns:
            [T, 256] logits.
        """
        past = past_rows(cu_seqlens, len(inputs), self.taps)
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, past, cu_seqlens)
        return self.head(self.norm(x))
