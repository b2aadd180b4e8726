"""A head of EAGLE-3 for the bundled model, trained on Python's standard library to repeat the model's answers.

It needs no other step and no GPU. Two passes are trained, as in the paper's training-time test. In the first pass the
head reads the model's features. In the second pass it reads its own result at the position before, as when it drafts.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .common import WorkFolder
from .draft import BUNDLED, encode
from .export import CONFIG
from .model import CausalLM, LlamaShape, SelfAttention, SwiGLU, TrainedNorm, rope_tables
from .train import TrainOptions, learning_rate, load_tokens, random_batches

TARGET = LlamaShape()
SHAPE = LlamaShape(num_hidden_layers=1)
LAYERS = 2, TARGET.num_hidden_layers // 2, TARGET.num_hidden_layers - 3


class WideAttention(SelfAttention):
    """Attention with queries, keys and values computed from twice the hidden size."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape)
        for project in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self, project).out_features
            setattr(self, project, nn.Linear(2 * shape.hidden_size, outputs, bias=False))


class MidLayer(nn.Module):
    """The layer, from embeddings and features to the state before the last norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = WideAttention(shape), SwiGLU(shape)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            TrainedNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(3)
        )

    def forward(self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        joined = torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), dim=-1)
        x = features + self.self_attn(joined, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """A head over the model's whole vocabulary.

    Its state dict is the checkpoint.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.fc = nn.Linear(len(LAYERS) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = TrainedNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for name, table in zip(("cos", "sin"), rope_tables(shape), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and states, each [batch, time, ...]."""
        time = embedded.shape[1]
        state = self.midlayer(embedded, features, self.cos[:time], self.sin[:time])
        return self.lm_head(self.norm(state)), state


@torch.no_grad()
def read(model: CausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the model's probabilities for ``tokens`` [batch, time], and its residual stream before `LAYERS`."""
    body, time = model.model, tokens.shape[1]
    x, kept = body.embed_tokens(tokens), dict[int, Tensor]()
    for number, layer in enumerate(body.layers):
        kept[number] = x
        x = layer(x, body.cos[:time], body.sin[:time])
    logits = F.linear(body.norm(x), body.embed_tokens.weight)
    return logits.softmax(-1), torch.cat([kept[layer] for layer in LAYERS], dim=-1)


def loss_of(head: EagleHead, model: CausalLM, tokens: Tensor) -> Tensor:
    """Return the cross entropy with the model's probabilities, over both passes."""
    probabilities, states = read(model, tokens)
    embedded, wanted = model.model.embed_tokens(tokens[:, 1:]), probabilities[:, 1:]
    logits, own = head(embedded, head.fc(states[:, :-1]))
    again, _ = head(embedded[:, 1:], own[:, :-1])
    first, second = (
        -(what * said.log_softmax(-1)).sum(-1).mean() for what, said in ((wanted, logits), (wanted[:, 1:], again))
    )
    return first + second


def make(work: WorkFolder, stdlib: Path, out: Path, steps: int) -> None:
    """Train a head, and write its checkpoint folder to ``out``."""
    encode(work, stdlib)
    out.mkdir(parents=True, exist_ok=True)
    options = TrainOptions(steps=steps, batch=8, context=192, peak_lr=2e-3, warmup=30)
    torch.manual_seed(options.seed)
    model, head = CausalLM(TARGET), EagleHead(SHAPE)
    model.load_state_dict({name: each.float() for name, each in load_file(BUNDLED / "model.safetensors").items()})
    head.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.peak_lr, betas=(0.9, 0.95), weight_decay=0.0)
    batches = random_batches(load_tokens(work.train_tokens, torch.device("cpu")), options)
    for step, (tokens, _) in enumerate(islice(batches, steps)):
        optimizer.param_groups[0]["lr"] = learning_rate(step, options)
        loss = loss_of(head, model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    weights = {name: each.detach().to(torch.bfloat16).contiguous() for name, each in head.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    own = {"architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False}
    config = CONFIG | asdict(SHAPE) | own | {"draft_vocab_size": SHAPE.vocab_size}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
