"""Tensor parallelism on GPUs: the same bits on one and on two, and an end when a rank dies."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.api.conftest import serving
from tests.api.test_tensor_parallel import gone, ranks_of, streams
from tests.cpu.checkpoints import MODELS, SMALL
from tests.cuda.test_qwen_vl import widen
from tests.qwen_vl import save_qwen_vl
from tests.waiting import until

pytestmark = pytest.mark.two_gpus

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "hidden_act": "silu",
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 16,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 500, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "eos_token_id": 2, "tie_word_embeddings": False,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


WIDE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 2000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
"""A model whose steps are large enough for every form of exchange, and for cuBLAS."""


FAMILIES: dict[str, dict[str, Any]] = {
    "sinks": {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256},
    "latents": {"head_dim": 16},
    "sizes": {"num_hidden_layers": 5, "global_head_dim": 128, "vocab_size_per_layer_input": 500},
    "sizes with experts": {"num_hidden_layers": 5, "global_head_dim": 128, "vocab_size_per_layer_input": 500},
    "states": {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 64},
}
"""Models of families with layers of their own, with their changes to `MODELS`."""

NAMES = {
    "sinks": "gpt-oss",
    "latents": "glm 4.7 flash",
    "sizes": "gemma 4",
    "sizes with experts": "gemma 4 with experts",
    "states": "qwen3.5 moe",
}


class Case(NamedTuple):
    """An engine: its model, options, and adapters; ``only`` are the options of two GPUs alone."""

    model: str = "bundled"
    options: Mapping[str, Any] = {}
    adapters: str | None = None
    only: Mapping[str, Any] = {}


LARGE = {"max_model_len": 2048, "max_num_batched_tokens": 2048}
CASES = {
    "plain": Case(),
    "wide": Case("wide", LARGE),
    "wide fp8, fp8 cache": Case("wide", LARGE | {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "moe": Case("moe"),
    "moe fp8": Case("moe", {"quantization": "fp8"}),
    "moe dealt": Case("moe", {"enable_expert_parallel": True}),
    "moe fp8 dealt": Case("moe", {"quantization": "fp8", "enable_expert_parallel": True}),
    "int4": Case("wide", {"quantization": "int4"}),
    "int8": Case("wide", {"quantization": "int8"}),
    "adapters": Case("wide", adapters="whole"),
    "divided adapters": Case(adapters="divided"),
    "moe adapters": Case("moe", adapters="whole"),
    "sinks dealt": Case("sinks", {"enable_expert_parallel": True}),
    "latents": Case("latents"),
    "sizes": Case("sizes"),
    "sizes dealt": Case("sizes with experts", {"enable_expert_parallel": True}),
    "states": Case("states"),
    "states dealt": Case("states", {"enable_expert_parallel": True}),
    "stages": Case(options={"tp_invariant": False}, only={"pipeline_parallel_size": 2, "tensor_parallel_size": 1}),
    "stages, fp8 cache": Case(
        "wide",
        LARGE | {"tp_invariant": False, "kv_cache_dtype": "fp8"},
        only={"pipeline_parallel_size": 2, "tensor_parallel_size": 1},
    ),
    "sleep": Case(
        options={"enable_sleep_mode": True, "num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 28}
    ),
    "images": Case("images", {"execution_mode": "graphs"}),
    "embeddings": Case(options={"enable_prompt_embeds": True}),
    "pooling": Case(options={"runner": "pooling"}),
    "drafts": Case(options={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    "a model drafts": Case(
        options={"speculative_config": {"method": "draft_model", "model": "bundled", "num_speculative_tokens": 3}}
    ),
    "a layer drafts": Case("states", {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}),
    "through NCCL": Case("wide", LARGE, only={"disable_custom_all_reduce": True}),
    "eager": Case(options={"enforce_eager": True}),
}
"""Every feature of ranks on GPUs, at least once."""

AT_ONCE = {1: 8, 2: 4}
"""Engines that run at once, by their GPUs."""


def run(*arguments: str, gpus: str = "0,1") -> None:
    """Run tests/cuda/ranks.py with ``arguments``, in a process."""
    command = [sys.executable, "-m", "tests.cuda.ranks", *arguments]
    done = subprocess.run(
        command, capture_output=True, timeout=280, check=False, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus}
    )
    assert done.returncode == 0, done.stderr.decode()[-6000:]


def written(model: str, folder: Path) -> str:
    """Write ``model`` into ``folder``, without weights unless it sees images; return where it is."""
    if model == "bundled":
        return model
    folder.mkdir()
    if model == "images":
        with pytest.MonkeyPatch.context() as patch:
            widen(patch)
            save_qwen_vl(folder)
    else:
        (folder / "config.json").write_text(json.dumps(config_of(model)))
    return str(folder)


def config_of(model: str) -> dict[str, Any] | None:
    """Return the configuration of ``model``."""
    if model not in FAMILIES:
        return {"moe": MOE, "wide": WIDE}.get(model)
    import transformers

    family, changes = MODELS[NAMES[model]]
    sizes = {"vocab_size": 500, "hidden_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class(**SMALL | changes | sizes | FAMILIES[model])
    found: dict[str, Any] = config.to_dict() | {"architectures": [kind.__name__], "dtype": "bfloat16"}
    return found


def engine(case: Case, model: str, world: int, out: Path, at: int = 0) -> dict[str, Any]:
    """Return the answers of the engine of ``case`` on ``world`` GPUs; one GPU is the first or the second, by ``at``."""
    options = {**case.options, **(case.only if world > 1 else {})}
    words = ["engine", "--model", model, "--world", str(world), "--out", str(out), "--options", json.dumps(options)]
    words += ["--seconds", "250", *(["--adapters", case.adapters] if case.adapters else [])]
    run(*words, gpus="0,1" if world > 1 else str(at % 2))
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, int], Future[dict[str, Any]]]]:
    """Yield the answers to come of the cases that tests ask for, on one and on two GPUs; one GPU comes first."""
    folder = tmp_path_factory.mktemp("engines")
    specs = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    asked = {name for spec in specs for name in spec.params.values() if isinstance(name, str)}
    cases = {name: case for name, case in CASES.items() if name in asked}
    models = {name: written(case.model, folder / str(at)) for at, (name, case) in enumerate(cases.items())}
    with ThreadPoolExecutor(AT_ONCE[1]) as alone:
        found = {
            (name, 1): alone.submit(engine, case, models[name], 1, folder / f"{at} alone", at)
            for at, (name, case) in enumerate(cases.items())
        }
    with ThreadPoolExecutor(AT_ONCE[2]) as shared:
        for at, (name, case) in enumerate(cases.items()):
            found[name, 2] = shared.submit(engine, case, models[name], 2, folder / f"{at} shared")
        yield found


def test_k_splits_and_their_sum_have_the_bits_of_one_gpu():
    run("collective")


@pytest.mark.parametrize("name", CASES)
def test_one_and_two_gpus_have_one_digest(engines, name):
    one, two = (engines[name, world].result() for world in (1, 2))
    assert len(one["digest"]) == 32 and one["digest"] == two["digest"]
    assert one["answers"] == two["answers"]
    if "pipeline_parallel_size" in CASES[name].only:
        assert "stages" not in one["parts"] and two["parts"]["stages"] == 2
    else:
        assert [one["parts"]["ranks"], two["parts"]["ranks"]] == [1, 2]
    assert two["exchange"] == ("Nccl" if "disable_custom_all_reduce" in CASES[name].only else "Peers")
    assert not two["unproved"] and not two["cold"]


@pytest.mark.parametrize(("name", "without"), [("moe adapters", "moe")])
def test_adapters_change_their_own_rows(engines, name, without):
    adapted, plain = engines[name, 2].result(), engines[without, 2].result()
    assert adapted["answers"][0] != plain["answers"][0] and adapted["answers"][2] == plain["answers"][2]


def test_a_killed_rank_ends_every_stream(tmp_path):
    log, options = tmp_path / "log", {"tensor_parallel_size": 2, "device": "cuda", "engine_restarts": 0}
    with serving("bundled", engine=None, log=log, log_level="error", **options) as server:
        (rank,) = ranks_of(server)
        engine_pid = server.engine_pid
        answers = asyncio.run(asyncio.wait_for(streams(server, 64, rank), 120))
        assert server.process.wait(60) == 1
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 200") and b'"type":"engine_dead"' in answer, answer[-300:]
    assert until(lambda: gone(rank) and gone(engine_pid))
