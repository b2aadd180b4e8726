"""EAGLE-3 in plain torch, float32, and heads to load.

The source is the paper, and the layout of its authors' checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.tokenizers import byte_level

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS = 320, 128, 32, 6
HEADS, KV_HEADS, DIM, INNER, EPS, THETA = 2, 1, 16, 48, 1e-5, 10000.0
AUX = 2, LAYERS // 2, LAYERS - 3
"""Layers before which the residual stream is read, unless a config gives other layers."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "rms_norm_eps": EPS,
    "rope_theta": THETA, "max_position_embeddings": 256, "dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip


def save_target(folder: Path, seed: int = 0) -> LlamaForCausalLM:
    """Write a random model of six layers with a tokenizer."""
    from transformers import (  # here: it takes seconds, and most processes of a run need it never
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=DIM, max_position_embeddings=256,
        attn_implementation="eager",
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    target.save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    return target


def random_tensors(seed: int = 1, aux: int = len(AUX)) -> dict[str, Tensor]:
    """Return a head's tensors, under their names in a checkpoint."""
    chance = torch.Generator().manual_seed(seed)
    linears = {
        "fc": (HIDDEN, aux * HIDDEN), "lm_head": (DRAFT_VOCAB, HIDDEN),
        "midlayer.self_attn.q_proj": (HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "midlayer.mlp.gate_proj": (INNER, HIDDEN), "midlayer.mlp.up_proj": (INNER, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    norms = "norm", *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"))
    found = {
        f"{name}.weight": torch.randn(shape, generator=chance) * shape[1] ** -0.5 for name, shape in linears.items()
    }
    found |= {f"{name}.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=chance) for name in norms}
    ids = torch.randperm(VOCAB, generator=chance)[:DRAFT_VOCAB].sort().values
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    return found | {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": known}


def save_head(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> str:
    """Write a checkpoint and return its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


class Reference:
    """The head of ``tensors`` for ``target``."""

    def __init__(
        self, target: LlamaForCausalLM, tensors: dict[str, Tensor], aux=AUX, *, norm_before_residual: bool = False
    ) -> None:
        self.target, self.tensors, self.aux = target, tensors, aux
        self._norm_before_residual = norm_before_residual
        self._states: dict[tuple[int, ...], tuple[Tensor, ...]] = {}  # of the target, by text

    @property
    def ids(self) -> Tensor:
        """Return the target's ids of the draft vocabulary."""
        return torch.arange(DRAFT_VOCAB) + self.tensors["d2t"]

    def features(self, tokens: Tensor) -> Tensor:
        """Return the features [tokens, hidden]."""
        states = self._states.get(text := tuple(tokens.tolist()))
        if states is None:
            with torch.no_grad():
                states = self._states[text] = self.target(tokens[None], output_hidden_states=True).hidden_states
        return self._linear("fc", torch.cat([states[layer][0] for layer in self.aux], dim=-1))

    def forward(self, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [n, draft vocabulary], and states before the last norm [n, hidden].

        The inputs are the features of n positions, and the next token of each position.
        """
        embedded = self._norm("midlayer.input_layernorm", F.embedding(tokens, self.target.model.embed_tokens.weight))
        normed = self._norm("midlayer.hidden_norm", features)
        state = (normed if self._norm_before_residual else features) + self._attention(
            torch.cat((embedded, normed), -1)
        )
        x = self._norm("midlayer.post_attention_layernorm", state)
        gated = F.silu(self._linear("midlayer.mlp.gate_proj", x)) * self._linear("midlayer.mlp.up_proj", x)
        state = state + self._linear("midlayer.mlp.down_proj", gated)
        return self._linear("lm_head", self._norm("norm", state)), state

    def next_logits(self, tokens: Tensor, known: int) -> Tensor:
        """Return the head's logits behind ``tokens``.

        The target knows ``known`` of them, the rest are drafts.
        """
        features = self.features(tokens[:known])[: known - 1]
        while True:
            logits, states = self.forward(features, tokens[1 : len(features) + 1])
            if len(features) + 1 == len(tokens):
                return logits[-1]
            features = torch.cat((features, states[-1:]))

    def _attention(self, x: Tensor) -> Tensor:
        count = len(x)
        q, k, v = (
            self._linear(f"midlayer.self_attn.{name}_proj", x).view(count, -1, DIM).transpose(0, 1) for name in "qkv"
        )
        angles = torch.arange(count)[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
        q, k = (each * cos + torch.cat((-each[..., DIM // 2 :], each[..., : DIM // 2]), -1) * sin for each in (q, k))
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
        scores = q @ k.transpose(1, 2) * DIM**-0.5
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
        return self._linear("midlayer.self_attn.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.tensors[f"{name}.weight"]
