"""Where a checkpoint keeps each tensor, and which of them are joined into one matrix when they are loaded.

Only sizes and names: no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from preheat.model.specs import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head"


@dataclass(frozen=True)
class Matrix:
    """One linear map of the model: the checkpoint's ``parts`` (module name, output rows) stacked from top to bottom."""

    parts: tuple[tuple[str, int], ...]
    columns: int
    bias: bool

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.parts)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that it is loaded from."""
        found: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, self.columns) for name, rows in self.parts}
        if self.bias:
            found |= {f"{name}.bias": (rows,) for name, rows in self.parts}
        return found


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its linear maps and the names of its norm vectors (``q_norm``, ``k_norm``: None without)."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    input_norm: str
    post_norm: str
    q_norm: str | None
    k_norm: str | None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.o, self.gate_up, self.down


def layer_layout(spec: ModelSpec, index: int) -> Layer:
    """The names and shapes of layer ``index``."""
    at = f"model.layers.{index}"
    attn, mlp = f"{at}.self_attn", f"{at}.mlp"
    q, kv, hidden, inner = spec.q_size, spec.kv_size, spec.hidden_size, spec.intermediate_size
    return Layer(
        qkv=Matrix(((f"{attn}.q_proj", q), (f"{attn}.k_proj", kv), (f"{attn}.v_proj", kv)), hidden, spec.qkv_bias),
        o=Matrix(((f"{attn}.o_proj", hidden),), q, spec.o_bias),
        gate_up=Matrix(((f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)), hidden, spec.mlp_bias),
        down=Matrix(((f"{mlp}.down_proj", hidden),), inner, spec.mlp_bias),
        input_norm=f"{at}.input_layernorm.weight",
        post_norm=f"{at}.post_attention_layernorm.weight",
        q_norm=f"{attn}.q_norm.weight" if spec.qk_norm else None,
        k_norm=f"{attn}.k_norm.weight" if spec.qk_norm else None,
    )


def head_layout(spec: ModelSpec) -> Matrix:
    """The output head of a model whose embeddings are not tied."""
    return Matrix(((HEAD, spec.vocab_size),), spec.hidden_size, False)


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this model must have."""
    found: dict[str, tuple[int, ...]] = {
        EMBEDDING: (spec.vocab_size, spec.hidden_size),
        FINAL_NORM: (spec.hidden_size,),
    }
    if not spec.tie_word_embeddings:
        found |= head_layout(spec).tensors()
    for index in range(spec.num_layers):
        layer = layer_layout(spec, index)
        for matrix in layer.matrices:
            found |= matrix.tensors()
        found |= {layer.input_norm: (spec.hidden_size,), layer.post_norm: (spec.hidden_size,)}
        found |= {name: (spec.head_dim,) for name in (layer.q_norm, layer.k_norm) if name}
    return found


def num_parameters(spec: ModelSpec) -> int:
    """How many numbers the model has."""
    return sum(math.prod(shape) for shape in expected_tensors(spec).values())
