"""Cache groups on a GPU: a block table for each group, and window blocks that are given back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from preheat import LLM, SamplingParams
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.drive import Engine
from preheat.verify.prompts import REDUCED, Prompt, make_prompts
from preheat.verify.verification import Verification
from preheat.warmup.record import Record
from tests.cpu.checkpoints import save_checkpoint
from tests.cuda.test_families import LENGTH, VOCAB, model_of

OPTIONS: dict[str, Any] = {
    "device": "cuda", "skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 128, "block_size": 16,
    "max_model_len": LENGTH, "num_gpu_blocks_override": 300, "boot_check": "full", "on_cold": "raise",
    "skip_warmup": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module", params=["gpt-oss", "gemma 3", "olmo 3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("groups")
    save_checkpoint(model_of(request.param), path)
    return str(path)


def bits(llm: LLM) -> list[Any]:
    chance = random.Random(3)
    prompts = [[chance.randrange(VOCAB) for _ in range(length)] for length in (5, 130, 400, 700)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_windows_give_blocks_back_and_change_no_bits(folder: str, dtype: str) -> None:
    """Graphs and launches, with groups and with all blocks kept, in other chunks; nothing is cold."""
    llm = LLM(folder, dtype=dtype, **OPTIONS)
    limits = llm.loop.executor.buffers.limits
    assert len(limits.groups) > 1
    assert "given back" in {each.shape.get("name") for each in Record.from_json(llm.loop.listener.report()).entries}
    right = bits(llm)
    assert bits(llm) == right
    assert not any(Record.from_json(llm.loop.listener.report()).cold.values())
    llm.loop.scheduler.check()
    plain = OPTIONS | {"skip_warmup": True, "boot_check": "off", "on_cold": "off"}
    for more in (
        {"disable_hybrid_kv_cache_manager": True},
        {"enforce_eager": True, "max_num_batched_tokens": 48},
        {"enforce_eager": True, "block_size": 64, "num_gpu_blocks_override": 120},
    ):
        assert bits(LLM(folder, dtype=dtype, **plain | more)) == right


def test_the_check_at_boot_and_verify_pass(folder: str) -> None:
    asked_for = {"max_num_seqs": 16, "num_gpu_blocks_override": 900, "on_cold": "warn"}  # digests are for verify alone
    settings = Settings.load({**OPTIONS, **asked_for, "model": folder})

    def prompts(engine: Engine) -> list[Prompt]:
        return make_prompts(REDUCED, engine.vocab_size, engine.ready.max_model_len)

    asked = Verification(boot_engine, settings, prompts, REDUCED)
    results = list(asked.results())
    assert asked.verdict(results).ok, [str(result.first) for result in results]
    assert "given back" in {result.path for result in results}
