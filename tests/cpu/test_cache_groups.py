"""Cache groups in the engine: the bits of one group for all layers, in less memory."""

from __future__ import annotations

import json
import logging
import random
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from preheat import LLM, SamplingParams
from preheat.backends.cpu import attention
from preheat.cache_groups import WHOLE, cut
from preheat.schedule.running import RunningSequences

WINDOW, SIZE = 20, 16
SIZES = {
    "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 199, "torch_dtype": "float32", "max_position_embeddings": 512, "sliding_window": WINDOW,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma": SIZES | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 5, "sliding_window_pattern": 3},
    "gpt-oss": SIZES | {
        "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 2, "num_local_experts": 4,
        "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 3, "max_model_len": 352,
    "max_num_batched_tokens": 48, "block_size": SIZE, "num_gpu_blocks_override": 80, "skip_warmup": True,
    "boot_check": "off", "num_threads": 1, "cache_dir": "off", "max_logprobs": 199,
}  # fmt: skip
OFF = {"disable_hybrid_kv_cache_manager": True}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=-1)
NO_LLVM = pytest.mark.skipif(find_spec("llvmlite") is None, reason="llvmlite is not installed: pip install llvmlite")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, path in found.items():
        (path / "config.json").write_text(json.dumps(CONFIGS[name]))
    return found


def prompts() -> list[list[int]]:
    """Return a prompt of two KV splits, one that shares its beginning, and a short one."""
    chance = random.Random(5)
    first = [chance.randrange(199) for _ in range(280)]
    return [first, first[:64] + first[:9], first[:3]]


def answers(llm: LLM) -> list[Any]:
    """Return tokens and all log-probabilities of greedy answers."""
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts()], GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@cache
def expected(folder: Path, mode: str) -> list[Any]:
    """Return the answers of an engine with one group."""
    return answers(LLM(**OPTIONS | {"model": str(folder), "execution_mode": mode} | OFF))


@pytest.mark.parametrize(
    ("name", "mode"),
    [("gemma", "eager"), pytest.param("gemma", "llvm", marks=NO_LLVM), pytest.param("gpt-oss", "llvm", marks=NO_LLVM)],
)
def test_groups_change_no_bit(folders: dict[str, Path], name: str, mode: str) -> None:
    """In chunks, and behind a cached prefix."""
    given = OPTIONS | {"model": str(folders[name]), "execution_mode": mode}
    right = expected(folders[name], mode)
    llm = LLM(**given)
    groups = llm.loop.scheduler.limits.groups
    assert [len(group.layers) for group in groups] == ([1, 1, 1, 1, 1] if name == "gemma" else [1, 1])
    assert answers(llm) == right
    hits = llm.loop.scheduler.stats().prefix_hits
    assert answers(llm) == right
    assert llm.loop.scheduler.stats().prefix_hits - hits == 272 + 64, "all but the last blocks"


def test_a_window_takes_less_memory(folders: dict[str, Path]) -> None:
    """The bytes of one sequence of full length hold several with groups."""
    given = OPTIONS | {"model": str(folders["gemma"]), "execution_mode": "eager", "enable_prefix_caching": False}
    del given["num_gpu_blocks_override"]
    token = 5 * 2 * 2 * 16 * 4
    given["kv_cache_memory_bytes"] = 24 * SIZE * token
    engines = [LLM(**given, **more) for more in ({}, OFF)]
    assert [llm.loop.scheduler.limits.num_blocks for llm in engines] == [5 * 24, 24]
    assert [len(llm.loop.executor.cache.data) for llm in engines] == [1, 5]
    right = expected(folders["gemma"], "eager")
    assert [answers(llm) for llm in engines] == [right, right]
    assert [llm.loop.scheduler.pool.num_used for llm in engines] == [0, 0]


def test_preemption_changes_no_bit(folders: dict[str, Path]) -> None:
    """Three sequences grow beyond the least memory that one of them needs."""
    given = OPTIONS | {"model": str(folders["gemma"]), "execution_mode": "eager", "max_num_batched_tokens": 24}
    given["enable_prefix_caching"] = False
    need = cut([WINDOW, WINDOW, None, WINDOW, WINDOW])
    blocks = -(-sum(group.columns(352, SIZE, 1) for group in need) // len(need)) + 1
    llm = LLM(**given | {"num_gpu_blocks_override": blocks})
    asked = [{"prompt_token_ids": prompts()[0][place:20]} for place in range(3)]
    long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    together = [each.outputs[0].token_ids for each in llm.generate(asked, long, use_tqdm=False)]
    assert llm.loop.scheduler.stats().preemptions > 0
    assert together == [llm.generate([each], long, use_tqdm=False)[0].outputs[0].token_ids for each in asked]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"max_model_len": WINDOW}, "no less memory"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 512}, "enable_chunked_prefill"),
        ({"kv_offloading_size": 0.001}, "returns from the host"),
        (OFF, "disable_hybrid_kv_cache_manager"),
    ],
    ids=str,
)
def test_other_engines_keep_one_group_and_say_why(
    folders: dict[str, Path], more: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "preheat"):
        llm = LLM(**OPTIONS | {"model": str(folders["gemma"]), "execution_mode": "eager", "log_level": "info"} | more)
    assert llm.loop.scheduler.limits.groups == WHOLE
    (line,) = [each for each in caplog.messages if "Cache groups are off" in each]
    assert reason in line


def test_control_a_table_of_another_group_is_seen(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    given = OPTIONS | {"model": str(folders["gemma"]), "execution_mode": "eager"}
    right = expected(folders["gemma"], "eager")
    heads = attention.Heads
    monkeypatch.setattr(attention, "Heads", lambda *parts, group, **more: heads(*parts, group=min(group, 3), **more))
    assert answers(LLM(**given)) != right


def test_control_a_block_given_back_early_is_seen(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    given = OPTIONS | {"model": str(folders["gemma"]), "execution_mode": "eager"}
    right = expected(folders["gemma"], "eager")
    give_back = RunningSequences.give_back
    monkeypatch.setattr(RunningSequences, "give_back", lambda self, rows, ends: give_back(self, rows, ends + SIZE))
    assert answers(LLM(**given)) != right
