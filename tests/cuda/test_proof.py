"""The proof on a GPU: graphs are checked against eager runs, digests are the host's, planted kernels are found."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.common.shapes import SHAPES
from preheat.backends.cuda.matmul.config import Library
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.core import Ready
from preheat.ops.digest import row_digests
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.verify.prompts import Size, make_prompts
from preheat.verify.verification import Verification
from preheat.warmup.record import Record

OPTIONS = {
    "device": "cuda", "skip_warmup": False, "max_num_seqs": 64, "max_num_batched_tokens": 2048,
    "determinism_warmup_iterations": 0, "num_gpu_blocks_override": 2049,
}  # fmt: skip
SIZE = Size(prompts=70, runs=2, outputs=24, longest=700)


def boot(**options) -> tuple[Ready, Record]:
    transport = InlineTransport()
    boot_engine(Settings.load(OPTIONS | options), transport)
    ready = next(message for message in transport.receive() if isinstance(message, Ready))
    return ready, Record.from_json(ready.record)


def checks(record: Record) -> dict[str, tuple[str, str]]:
    return {str(e.shape["name"]): (e.outcome, e.reason) for e in record.entries if e.kind == "check"}


def test_every_path_agrees_and_two_boots_have_one_digest():
    ready, record = boot(boot_check="full")
    assert not ready.blocked_reason
    assert "eager" in checks(record)
    assert set(checks(record).values()) == {("ready", "")}
    assert boot()[1].proof.digest == record.proof.digest


@pytest.mark.parametrize("vocab", [1, 4096, 128_256])
def test_digests_are_the_hosts(vocab):
    from preheat.backends.cuda.pointwise.digest import digest_rows

    logits = torch.randn(33, vocab, generator=torch.Generator().manual_seed(0))
    logits[3] = float("-inf")
    assert torch.equal(digest_rows(logits.cuda()).cpu(), row_digests(logits))


def layout_of_the_batch(monkeypatch) -> None:
    """Plant a norm with a sum order that depends on the number of rows, through its number of warps."""
    from preheat.backends.cuda.pointwise import norm

    def launch(self, x, residual, out):
        size = x.shape[1]
        layout = norm.layout(size) | {"num_warps": 1 if len(x) <= 16 else 8}
        norm._norm[(len(x),)](
            x, residual, self.weight, self.bias, out, None, None, None, 1.0 / size, self.eps,
            x.stride(0), KIND=self.kind, SCALES=None, SIZE=size, **layout,
        )  # fmt: skip

    monkeypatch.setattr(norm.CudaNorm, "_launch", launch)


def split_by_batch(monkeypatch) -> None:
    """Plant a linear layer that adds its inputs in two halves from 128 rows on."""
    from preheat.backends.cuda.matmul.layer import Layer

    right = Layer.__call__

    def split(self, x, out=None):
        if len(x) < 128 or self._gated:
            return right(self, x, out)
        first = x.clone()
        first[:, x.shape[1] // 2 :] = 0
        total = right(self, first) + right(self, x - first)
        return total if out is None else out.copy_(total)

    monkeypatch.setattr(Layer, "__call__", split)


@pytest.mark.parametrize(("plant", "dtype"), [(layout_of_the_batch, "float32"), (split_by_batch, "bfloat16")])
def test_a_planted_kernel_is_named(plant, dtype, monkeypatch):
    """The norm is planted in float32: bfloat16 rounds its error away, but for few numbers in a million."""
    plant(monkeypatch)
    ready, record = boot(dtype=dtype)
    failed = {name: reason for name, (outcome, reason) in checks(record).items() if outcome == "failed"}
    assert "decode" in failed or "chunked" in failed
    assert "the first layer that differs is layer 0" in ready.blocked_reason


def test_a_graph_that_differs_from_eager_is_named(monkeypatch):
    """Tapped steps run eagerly, and their outputs are changed."""
    from preheat.execution.executor import Executor

    right = Executor._forward

    def forward(self, bucket, layers, tap=None):
        attended = right(self, bucket, layers, tap)
        if tap is not None:
            attended.out.mul_(1 + 2**-6)
        return attended

    monkeypatch.setattr(Executor, "_forward", forward)
    _, record = boot()
    assert checks(record)["eager"][0] == "failed"


def verification(**options) -> Verification:
    def prompts(engine):
        return make_prompts(SIZE, engine.vocab_size, engine.ready.max_model_len)

    return Verification(boot_engine, Settings.load(OPTIONS | options), prompts, SIZE)


def test_verify_finds_nothing():
    run = verification()
    results = list(run.results())
    assert run.verdict(results).ok, [str(result.first) for result in results]


def test_verify_finds_a_planted_kernel(monkeypatch):
    layout_of_the_batch(monkeypatch)
    run = verification()
    assert not run.verdict(list(run.results())).ok


@pytest.mark.parametrize("left_to_itself", [False, True])
def test_cublas_left_to_itself_is_found_at_the_sizes_of_8b(left_to_itself, monkeypatch, tmp_path):
    """Without invariance, cuBLAS splits the inputs for few rows, and a request differs between batches.

    This happens where no faster kernel keeps the order. Two layers are enough.
    """
    if left_to_itself:
        monkeypatch.setattr(KernelConfigs, "_find", lambda self, shape, rows: Library(split=True))
    config = SHAPES["llama-3.1-8b"] | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024}
    run = verification(**options, batch_invariant=not left_to_itself)
    results = list(run.results())
    assert run.verdict(results).ok != left_to_itself, [str(result.first) for result in results]
