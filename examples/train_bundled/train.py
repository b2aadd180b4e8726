"""Trains the model on one GPU (or, at toy size, on a CPU)."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from .common import CONTEXT, SEED, WorkFolder
from .model import CausalLM, LlamaShape


@dataclass(frozen=True)
class TrainOptions:
    """Everything that a run depends on besides the corpus.

    ``batch`` is the number of sequences of ``context`` tokens in a step.
    """

    steps: int = 3419
    batch: int = 32
    context: int = CONTEXT
    peak_lr: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.1
    eval_every: int = 400
    compile: bool = True
    seed: int = SEED
    shape: LlamaShape = field(default_factory=LlamaShape)


def learning_rate(step: int, options: TrainOptions) -> float:
    """Return the rate of a linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < options.warmup:
        return options.peak_lr * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    floor = options.peak_lr / 50
    return floor + (options.peak_lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def load_tokens(path: Path, device: torch.device) -> Tensor:
    """Return token ids as int32: small enough to live on the device as a whole."""
    return torch.from_numpy(np.load(path).astype(np.int32)).to(device)


def random_batches(tokens: Tensor, options: TrainOptions) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless batches of windows that start anywhere in the stream."""
    generator = torch.Generator().manual_seed(options.seed)
    offsets = torch.arange(options.context + 1, device=tokens.device)
    while True:
        starts = torch.randint(0, len(tokens) - options.context - 1, (options.batch, 1), generator=generator)
        window = tokens[starts.to(tokens.device) + offsets].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context of bfloat16 arithmetic on a GPU, plain float32 elsewhere."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


@torch.no_grad()
def evaluate(model: CausalLM, heldout: dict[str, tuple[Tensor, int]], context: int) -> dict[str, dict[str, float]]:
    """Return nats per token and bits per byte, for each kind and over all.

    ``heldout`` gives tokens and bytes of each kind.
    """
    model.eval()
    sums = {"all": [0.0, 0, 0]}
    for kind, (tokens, text_bytes) in heldout.items():
        nats = 0.0
        for start in range(0, len(tokens) - 1, context):
            window = tokens[start : start + context + 1].long()[None]
            with autocast(tokens.device):
                nats += model.token_losses(window[:, :-1], window[:, 1:]).sum().item()
        sums[kind] = [nats, len(tokens) - 1, text_bytes]
        sums["all"] = [total + more for total, more in zip(sums["all"], sums[kind], strict=True)]
    model.train()
    return {
        kind: {"nats_per_token": nats / count, "bits_per_byte": nats / math.log(2) / text_bytes, "tokens": count}
        for kind, (nats, count, text_bytes) in sums.items()
    }


def make_optimizer(model: CausalLM, options: TrainOptions) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices and leaves the norms' gains alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=options.peak_lr, betas=(0.9, 0.95), fused=fused)


def train(work: WorkFolder, out: Path, options: TrainOptions) -> None:
    """Train; write the weights in bfloat16 (``model.safetensors``) and ``metrics.json`` to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    model = CausalLM(options.shape, options.dropout).to(device)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return model.token_losses(tokens, targets).mean()

    compiled = torch.compile(loss_of) if options.compile else loss_of
    optimizer = make_optimizer(model, options)
    listed = json.loads(work.manifest.read_text())["heldout"]
    heldout = {kind: (load_tokens(work.heldout_tokens(kind), device), listed[kind]["bytes"]) for kind in sorted(listed)}
    tokens, started, losses = load_tokens(work.train_tokens, device), time.monotonic(), []
    for step, batch in zip(range(1, options.steps + 1), random_batches(tokens, options), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, options)
        with autocast(device):
            loss = compiled(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % options.eval_every == 0 or step == options.steps:
            report, train_loss = evaluate(model, heldout, options.context), torch.stack(losses).mean().item()
            print(f"step {step}: train {train_loss:.4f}, held-out {report['all']['nats_per_token']:.4f}", flush=True)
            losses = []
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    metrics: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_seen": options.steps * options.batch * options.context,
        "tokens_per_epoch": len(tokens),
        "minutes": (time.monotonic() - started) / 60,
        "train_loss": train_loss,
        "heldout": report,
        "options": asdict(options),
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
