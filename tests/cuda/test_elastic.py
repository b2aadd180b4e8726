"""New weights in place under captured graphs, and blocks that come back from the host, on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.common.ports import free_port
from preheat import LLM, SamplingParams, WeightGroup
from preheat.execution.offload import HostTier
from preheat.model.dummy_tensors import DummyTensors
from preheat.model.formats import expected_tensors
from preheat.schedule.prefix import PrefixCache
from tests.cuda.test_engine import CONFIG

OPTIONS: dict[str, Any] = {
    "device": "cuda", "load_format": "dummy", "max_model_len": 320, "max_num_seqs": 4, "max_num_batched_tokens": 128,
    "block_size": 16, "num_gpu_blocks_override": 80, "skip_tokenizer_init": True, "skip_warmup": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
PROMPTS = [[(31 * i + 7 * j) % 300 for j in range(200)] for i in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, **OPTIONS, seed=0)


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS[:2]) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def weights(llm: LLM, seed: int) -> dict[str, Tensor]:
    """Return the tensors, on the host, of an engine with dummy weights of ``seed``."""
    found = {}
    for name, shape in expected_tensors(llm.loop.executor.decoder.spec).items():
        tensor = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        DummyTensors(seed).fill(name, tensor)
        found[name] = tensor.cpu()
    return found


@pytest.fixture(scope="module")
def fresh(model: str) -> tuple[str | None, list[Any]]:
    """Return digest and answers of an engine that had only the weights of seed 1."""
    llm = LLM(model, **OPTIONS, seed=1)
    return llm.state.digest, answers(llm)


def test_an_update_makes_a_fresh_engine(llm: LLM, fresh: tuple[str | None, list[Any]]) -> None:
    digest, said = llm.state.digest, answers(llm)
    assert digest and digest != fresh[0] and said != fresh[1]
    for _ in range(2):  # the second round runs on memory taken in the first
        llm.update_weights(weights(llm, 1).items())
        assert llm.state.digest == fresh[0] and answers(llm) == fresh[1]
        llm.update_weights(weights(llm, 0).items())
        assert llm.state.digest == digest and answers(llm) == said


def test_an_old_prefix_would_be_noticed(
    llm: LLM, fresh: tuple[str | None, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixCache, "rekey", lambda *_: None)
    monkeypatch.setattr("preheat.schedule.blocks.BlockPool.forget_contents", lambda _: None)
    answers(llm)  # fills the prefix cache
    llm.update_weights(weights(llm, 1).items())
    assert answers(llm) != fresh[1]
    monkeypatch.undo()
    llm.update_weights(weights(llm, 0).items())


@pytest.fixture(scope="module")
def small(model: str) -> LLM:
    """An engine with cache for one prompt and a half."""
    few = {"num_gpu_blocks_override": 24, "kv_offloading_size": 0.1}
    return LLM(model, **(OPTIONS | few), seed=0)


def test_blocks_come_back_with_their_bits(small: LLM, llm: LLM) -> None:
    expected = []
    for prompt in PROMPTS:
        llm.reset_prefix_cache()
        expected += answers(llm, [prompt])
    small.reset_prefix_cache()
    for _ in range(3):
        small.loop.scheduler.forget()
        assert answers(small, PROMPTS) == expected
    assert small.loop.scheduler.stats().external_hits > 1000


def test_blocks_of_others_are_noticed(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    small.reset_prefix_cache()
    expected = answers(small, PROMPTS)
    right = HostTier.copy

    def shifted(self: HostTier, transfer: Any, block: int, place: int) -> None:
        right(self, transfer, block, place if transfer == "store" else (place + 1) % self.places)

    monkeypatch.setattr(HostTier, "copy", shifted)
    assert answers(small, PROMPTS) != expected
    small.reset_prefix_cache()


def test_weights_of_a_trainer_equal_the_weights_of_a_fresh_boot(
    model: str, fresh: tuple[str | None, list[Any]]
) -> None:
    """Transfer by gloo, from a thread; NCCL would need a GPU for the trainer, too."""
    llm = LLM(model, **OPTIONS, seed=0, weight_transfer_config={"backend": "gloo"})
    pairs, port = list(weights(llm, 1).items()), free_port()

    def train() -> None:
        group = WeightGroup("127.0.0.1", port, rank=0, world_size=2, timeout=60)
        announced.append(group.announce(pairs))
        group.send(pairs)

    announced: list[dict[str, Any]] = []
    trainer = Thread(target=train, daemon=True)
    trainer.start()
    llm.init_weight_transfer_engine(
        {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "timeout": 60}
    )
    while not announced:
        trainer.join(0.01)
    llm.update_weights({"update_info": announced[0]})
    assert (llm.state.digest, answers(llm)) == fresh
