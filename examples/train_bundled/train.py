"""Trains the model on one GPU (or, at toy size, on a CPU).

Two checkpoints are kept: the one with the lowest held-out loss and the last. The loss is nearly
flat towards the end, where the learning rate fades out, so they differ little in figures; the
last one has seen the whole schedule.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from .layout import SEED, WorkFolder
from .model import CausalLM, LlamaShape


@dataclass(frozen=True)
class TrainOptions:
    """Everything a run depends on besides the corpus."""

    steps: int = 3200
    minutes: float = 10.0
    batch: int = 32
    context: int = 2048
    peak_lr: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.1
    eval_every: int = 400
    compile: bool = True
    seed: int = SEED
    shape: LlamaShape = field(default_factory=LlamaShape)


@dataclass(frozen=True)
class HeldOut:
    """One kind of held-out text as tokens, with its size in bytes."""

    kind: str
    tokens: Tensor
    text_bytes: int


def learning_rate(step: int, total: int, options: TrainOptions) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < options.warmup:
        return options.peak_lr * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, total - options.warmup)
    floor = options.peak_lr / 50
    return floor + (options.peak_lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def load_tokens(path: Path, device: torch.device) -> Tensor:
    """Token ids as int32: small enough to live on the device as a whole."""
    return torch.from_numpy(np.load(path).astype(np.int32)).to(device)


def load_heldout(work: WorkFolder, device: torch.device) -> list[HeldOut]:
    """The held-out streams that the encoding step listed in its manifest."""
    listed = json.loads(work.manifest.read_text())["heldout"]
    return [
        HeldOut(kind, load_tokens(work.heldout_tokens(kind), device), entry["bytes"])
        for kind, entry in sorted(listed.items())
    ]


def random_batches(tokens: Tensor, options: TrainOptions) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of windows that start anywhere in the stream."""
    generator = torch.Generator().manual_seed(options.seed)
    offsets = torch.arange(options.context + 1, device=tokens.device)
    last_start = len(tokens) - options.context - 1
    while True:
        starts = torch.randint(0, last_start, (options.batch, 1), generator=generator)
        window = tokens[starts.to(tokens.device) + offsets].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Bfloat16 arithmetic on a GPU; plain float32 elsewhere."""
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


@torch.no_grad()
def evaluate(model: CausalLM, heldout: list[HeldOut], context: int) -> dict[str, dict[str, float]]:
    """Nats per token and bits per byte for each kind and over all of them."""
    model.eval()
    report: dict[str, dict[str, float]] = {}
    nats_in_all, tokens_in_all, bytes_in_all = 0.0, 0, 0
    for part in heldout:
        nats, count = stream_loss(model, part.tokens, context)
        report[part.kind] = loss_figures(nats, count, part.text_bytes)
        nats_in_all, tokens_in_all = nats_in_all + nats, tokens_in_all + count
        bytes_in_all += part.text_bytes
    report["all"] = loss_figures(nats_in_all, tokens_in_all, bytes_in_all)
    model.train()
    return report


def loss_figures(nats: float, tokens: int, text_bytes: int) -> dict[str, float]:
    """The two usual ways to state a loss."""
    return {
        "nats_per_token": nats / tokens,
        "bits_per_byte": nats / math.log(2) / text_bytes,
        "tokens": tokens,
    }


def stream_loss(model: CausalLM, tokens: Tensor, context: int) -> tuple[float, int]:
    """Summed loss over consecutive windows that do not overlap, and the tokens counted."""
    nats = 0.0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context + 1].long()[None]
        with autocast(tokens.device):
            nats += model.token_losses(window[:, :-1], window[:, 1:]).sum().item()
    return nats, len(tokens) - 1


def make_optimizer(model: CausalLM, options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves the norms' gains alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=options.peak_lr, betas=(0.9, 0.95), fused=fused)


def save_weights(model: CausalLM, path: Path) -> None:
    """Write the parameters as bfloat16, under the names other programs expect."""
    rounded = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    save_file(rounded, path, metadata={"format": "pt"})


class Run:
    """One training run: its state, its record, and the best checkpoint so far."""

    def __init__(self, work: WorkFolder, out: Path, options: TrainOptions) -> None:
        self.options, self.out = options, out
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        self.model = CausalLM(options.shape, options.dropout).to(self.device)
        self.step_loss = torch.compile(self._loss) if options.compile else self._loss
        self.optimizer = make_optimizer(self.model, options)
        self.train_tokens = load_tokens(work.train_tokens, self.device)
        self.heldout = load_heldout(work, self.device)
        self.total_steps = options.steps
        self.history: list[dict[str, float]] = []
        self.best: dict[str, dict[str, float]] | None = None
        self.started = time.monotonic()

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.token_losses(tokens, targets).mean()

    def minutes(self) -> float:
        return (time.monotonic() - self.started) / 60

    def _step(self, step: int, batch: tuple[Tensor, Tensor]) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.total_steps, self.options)
        with autocast(self.device):
            loss = self.step_loss(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _fit_to_time(self, step: int, seconds_per_step: float) -> None:
        """Shorten the schedule, while it is still at its start, if it would not fit."""
        seconds_left = (self.options.minutes - self.minutes()) * 60
        affordable = step + int(seconds_left * 0.95 / seconds_per_step)
        self.total_steps = max(step + 1, min(self.total_steps, affordable))
        print(f"{seconds_per_step * 1e3:.1f} ms/step, {self.total_steps} steps", flush=True)

    def _record(self, step: int, train_loss: float) -> None:
        report = evaluate(self.model, self.heldout, self.options.context)
        entry = {"step": step, "minutes": self.minutes(), "train": train_loss}
        entry |= {kind: figures["nats_per_token"] for kind, figures in report.items()}
        self.history.append(entry)
        print(" ".join(f"{key}={value:.4g}" for key, value in entry.items()), flush=True)
        best_so_far = self.best["all"]["nats_per_token"] if self.best else math.inf
        if report["all"]["nats_per_token"] < best_so_far:
            self.best = report
            save_weights(self.model, self.out / "best.safetensors")
        if step >= self.total_steps:
            save_weights(self.model, self.out / "last.safetensors")
        self._write_metrics(step, report)

    def _write_metrics(self, step: int, report: dict[str, dict[str, float]]) -> None:
        options = self.options
        metrics = {
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": step,
            "tokens_seen": step * options.batch * options.context,
            "tokens_per_epoch": len(self.train_tokens),
            "minutes": self.minutes(),
            "heldout": {"best": self.best, "last": report},
            "options": asdict(options),
            "history": self.history,
        }
        (self.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")

    def train(self) -> None:
        timing_from, timing_to = min(20, self.options.steps // 4), min(60, self.options.steps // 2)
        clock = time.monotonic()
        losses: list[Tensor] = []
        batches = random_batches(self.train_tokens, self.options)
        for step, batch in enumerate(batches, start=1):
            losses.append(self._step(step - 1, batch))
            if step in (timing_from, timing_to):
                losses[-1].item()  # waits for the device, so that the clock tells the truth
                elapsed, clock = time.monotonic() - clock, time.monotonic()
                if step == timing_to:
                    self._fit_to_time(step, elapsed / (timing_to - timing_from))
            if step % self.options.eval_every == 0 or step >= self.total_steps:
                self._record(step, torch.stack(losses).mean().item())
                losses = []
            if step >= self.total_steps:
                return


def train(work: WorkFolder, out: Path, options: TrainOptions) -> None:
    """Train; leaves ``best.safetensors``, ``last.safetensors``, ``metrics.json`` in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    Run(work, out, options).train()
