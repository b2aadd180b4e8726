"""Tensor parallelism on GPUs: the same bits on one and on two, and an end when a rank dies."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.conftest import serving
from tests.api.test_tensor_parallel import gone, ranks_of, streams

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "hidden_act": "silu",
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 16,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 500, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "eos_token_id": 2, "tie_word_embeddings": False,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def run(*arguments: str) -> None:
    """Run tests/cuda/ranks.py with ``arguments``, in a process."""
    command = [sys.executable, "-m", "tests.cuda.ranks", *arguments]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()[-6000:]


def engine(model: str, world: int, folder: Path, *more: str) -> dict[str, Any]:
    out = folder / f"{world}.json"
    run("engine", "--model", model, "--world", str(world), "--out", str(out), *more)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def named(name: str, folder: Path) -> str:
    """Return the model called ``name``, written to ``folder`` if it is not bundled."""
    if name == "moe":
        (folder / "config.json").write_text(json.dumps(MOE))
        return str(folder)
    return name


def test_k_splits_and_their_sum_have_the_bits_of_one_gpu():
    run("collective")


@pytest.mark.parametrize("name", ["bundled", "moe"])
@pytest.mark.parametrize("mode", [(), ("--eager",), ("--quantization", "fp8")], ids=["graphs", "eager", "fp8"])
def test_one_and_two_gpus_have_one_digest(name, mode, tmp_path):
    model = named(name, tmp_path)
    one, two = (engine(model, world, tmp_path, *mode) for world in (1, 2))
    assert len(one["digest"]) == 32 and one["digest"] == two["digest"]
    assert one["answers"] == two["answers"]
    assert [one["parts"]["ranks"], two["parts"]["ranks"]] == [1, 2]
    assert not two["unproved"] and not two["cold"]


@pytest.mark.parametrize(("name", "how"), [("bundled", "whole"), ("bundled", "divided"), ("moe", "whole")])
@pytest.mark.parametrize("mode", [(), ("--eager",)], ids=["graphs", "eager"])
def test_rows_with_adapters_have_the_bits_of_one_gpu(name, how, mode, tmp_path):
    """Two adapters and a row without one; first matrices are divided only with the inputs, or in all layers."""
    model = named(name, tmp_path)
    one, two = (engine(model, world, tmp_path, "--adapters", how, *mode) for world in (1, 2))
    assert len(one["digest"]) == 32 and one["digest"] == two["digest"]
    assert one["answers"] == two["answers"]
    assert not two["unproved"] and not two["cold"]
    (tmp_path / "plain").mkdir()
    plain = engine(model, 1, tmp_path / "plain", *mode)
    assert one["answers"][0] != plain["answers"][0] and one["answers"][2] == plain["answers"][2]


def test_a_killed_rank_ends_every_stream(tmp_path):
    log = tmp_path / "log"
    with serving("bundled", engine=None, log=log, tensor_parallel_size=2, device="cuda", log_level="error") as server:
        (rank,) = ranks_of(server)
        engine_pid = server.engine_pid
        answers, killed = asyncio.run(asyncio.wait_for(streams(server, 64, rank), 60))
        assert server.process.wait(10) == 1 and time.monotonic() - killed < 10
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 200") and b'"type":"engine_dead"' in answer, answer[-300:]
    assert gone(rank) and gone(engine_pid)
