"""A small Llama in plain PyTorch, with dropout.

Its parameters have the names of ``LlamaForCausalLM``: its state dict is the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .common import CONTEXT, VOCAB_SIZE


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of the network; multiples of 64 suit every common matrix kernel."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_hidden_layers: int = 7
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = CONTEXT
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class TrainedNorm(nn.RMSNorm):
    """RMSNorm, computed in float32 whatever the activations' type."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * scaled).to(x.dtype)


def rope_tables(shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines per position, each half repeated as "rotate half" wants them."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    positions = torch.arange(shape.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, shape.rope_theta**-exponents).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to ``[batch, heads, time, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class SelfAttention(nn.Module):
    """Causal self-attention with fewer key/value heads than query heads."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim, self.group = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
        queries, keys = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (each.repeat_interleave(self.group, dim=1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """The feed-forward part."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: LlamaShape, dropout: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(shape), SwiGLU(shape)
        self.input_layernorm = TrainedNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = TrainedNorm(shape.hidden_size, shape.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Transformer(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, shape: LlamaShape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = TrainedNorm(shape.hidden_size, shape.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)
        for name, table in zip(("cos", "sin"), rope_tables(shape), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.dropout(self.embed_tokens(tokens))
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.norm(x)


class CausalLM(nn.Module):
    """The language model; its output head is the transposed embedding."""

    def __init__(self, shape: LlamaShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = Transformer(shape, dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:  # residual outputs start smaller, so that depth does not grow the variance
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.num_hidden_layers) ** 0.5 if is_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.model(tokens), self.model.embed_tokens.weight)

    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every target, in nats, flattened."""
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten(), reduction="none")
