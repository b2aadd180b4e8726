"""An engine on a GPU gives its memory back and takes it again at the addresses in its graphs.

The bits are the same, and nothing is captured again.
"""

from __future__ import annotations

import pytest
import torch

from preheat import LLM, LoRARequest, SamplingParams
from preheat.errors import InvalidRequest, NotInvariant
from preheat.model.files import BUNDLED_PATH
from preheat.model.update import tensors_of
from tests.adapters import write_adapter
from tests.cuda.test_engine import ROOMY, model

__all__ = ["model"]  # a fixture

PROMPT = list(range(3, 300))


@pytest.fixture(scope="module")
def engine(model: str) -> LLM:
    wanted = ROOMY | {"boot_check": "quick", "enable_sleep_mode": True, "skip_warmup": False, "on_cold": "raise"}
    return LLM(model, **wanted | {"num_gpu_blocks_override": 4000})


def tokens(engine: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    return engine.generate([PROMPT], params)[0].outputs[0].token_ids


def weights(engine: LLM) -> list[torch.Tensor]:
    return list(tensors_of(engine.loop.executor.decoder.weights))


def held() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_level_1_keeps_addresses_and_bits(engine):
    said, digest, before = tokens(engine), engine.state.digest, [each.clone() for each in weights(engine)]
    cache = engine.loop.executor.cache.data
    places, used = [each.data_ptr() for each in (*weights(engine), cache)], held()
    engine.sleep(1)
    assert held() < used - 0.9 * cache.numel() * cache.element_size()
    engine.wake_up()
    assert [each.data_ptr() for each in (*weights(engine), cache)] == places
    assert all(torch.equal(*pair) for pair in zip(weights(engine), before, strict=True))
    assert digest and engine.state.digest == digest and tokens(engine) == said


def test_adapters_are_put_back(tmp_path):
    """Adapter slots keep the addresses in graphs; the check that ends a sleep has overwritten their contents."""
    options = {"num_gpu_blocks_override": 400, "max_num_seqs": 8, "skip_warmup": False, "max_lora_rank": 4}
    engine = LLM("bundled", device="cuda", enable_sleep_mode=True, enable_lora=True, on_cold="raise", **options)
    adapter = LoRARequest("own", 1, str(write_adapter(tmp_path / "own", 1)))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def answers() -> list[list[int]]:
        found = engine.generate([PROMPT, PROMPT], params, lora_request=[adapter, None])
        return [each.outputs[0].token_ids for each in found]

    expected = answers()
    assert expected[0] != expected[1]
    engine.sleep(1)
    engine.wake_up()
    assert answers() == expected
    with pytest.raises(InvalidRequest, match="updates of weights"):
        engine.sleep(2)


def test_level_2_loses_the_weights_until_an_update_brings_all():
    options = {"enable_sleep_mode": True, "num_gpu_blocks_override": 400, "max_num_seqs": 8, "skip_warmup": False}
    engine = LLM("bundled", device="cuda", **options)
    digest, said = engine.state.digest, tokens(engine)
    engine.sleep(2)
    with pytest.raises(InvalidRequest, match="/update_weights first"):
        engine.wake_up()
    engine.wake_up(["weights"])
    engine.update_weights(BUNDLED_PATH)
    engine.wake_up(["kv_cache"])
    assert engine.state.digest == digest and tokens(engine) == said


def test_a_weight_that_is_lost_is_found(engine, monkeypatch):
    memory = engine.loop.executor.backend.sleep_memory()
    right = memory.wake

    def lossy(tag: str) -> None:
        right(tag)
        if tag == "weights":
            next(iter(weights(engine))).mul_(1.5)

    monkeypatch.setattr(memory, "wake", lossy)
    engine.sleep(1)
    with pytest.raises(NotInvariant, match="before the sleep"), torch.no_grad():
        engine.wake_up()
