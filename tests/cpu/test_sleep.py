"""Sleep gives memory back to the system.

A woken engine has its bits of before, or takes no requests.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from preheat import LLM, LoRARequest
from preheat.errors import InvalidRequest, ModelError, NotInvariant, NotReady, SettingsError
from preheat.model.files import BUNDLED_PATH
from preheat.model.residence import Dropped
from preheat.model.update import is_packed, tensors_of
from preheat.settings import Settings
from preheat.utils.memory import PAGE_BYTES, used_memory
from tests.adapters import write_adapter
from tests.cpu.test_boot_check import SMALL
from tests.cpu.test_weight_update import GREEDY, PROMPT, tokens

MIB = 2**20


@pytest.fixture(scope="module")
def engine() -> LLM:
    return LLM(**SMALL, enable_sleep_mode=True, num_gpu_blocks_override=3000, on_cold="raise")


def cache_bytes(engine: LLM) -> int:
    data = engine.loop.executor.cache.data
    return data.numel() * data.element_size()


def test_level_1_gives_back_the_cache(engine):
    said, digest, pool = tokens(engine), engine.state.digest, engine.loop.scheduler.pool
    size = cache_bytes(engine)
    assert size > 32 * MIB
    engine.loop.executor.cache.data.fill_(0)  # memory that was never written is not held
    before = used_memory()
    engine.sleep(1)
    assert engine.state.sleeping == 1 and used_memory() < before - 0.9 * size
    with pytest.raises(NotReady, match="asleep"):
        tokens(engine)
    engine.wake_up()
    assert engine.state.sleeping is None and engine.state.digest == digest and not engine.state.paused
    assert tokens(engine) == said
    pool.check(pool.refs * 0)


def test_level_2_frees_the_weights_and_needs_new_weights(engine, changed, fresh):
    weights = list(tensors_of(engine.loop.executor.decoder.weights))
    at = {id(each): each.data_ptr() for each in weights if not is_packed(each)}
    large = [each for each in weights if is_packed(each) or each.nbytes > 4 * PAGE_BYTES]
    assert all(each.to_dense().any() for each in large)
    engine.loop.executor.cache.data.fill_(0)
    before = used_memory()
    engine.sleep(2)
    assert used_memory() < before - 0.9 * cache_bytes(engine)
    assert all(
        each.numel() == 1
        if is_packed(each)
        else not each.flatten().view(torch.uint8)[2 * PAGE_BYTES : -PAGE_BYTES].any()
        for each in large
    )
    assert all(each.data_ptr() == at[id(each)] for each in weights if not is_packed(each))
    with pytest.raises(InvalidRequest, match="/update_weights first"):
        engine.wake_up()
    with pytest.raises(ModelError, match="missing tensors, and the weights are dropped"):
        engine.update_weights(
            {"model.norm.weight": load_file(changed / "model.safetensors")["model.norm.weight"]}.items()
        )
    engine.wake_up(["weights"])
    assert engine.state.sleeping == 2
    engine.update_weights(changed)
    assert not engine.state.digest  # there is no cache yet
    engine.wake_up(["kv_cache"])
    assert engine.state.sleeping is None
    assert engine.state.digest == fresh[0].digest and tokens(engine) == fresh[1]
    engine.sleep(2)
    engine.update_weights(BUNDLED_PATH)
    engine.wake_up()
    assert engine.state.digest != fresh[0].digest and tokens(engine) != fresh[1]


def test_only_a_sleep_that_loses_weights_makes_layers_as_new(engine, monkeypatch):
    """A sleep that loses weights resets the layers' counters.

    Any other sleep keeps them.
    """
    counter = torch.ones(3)
    layer = type(engine.loop.executor.decoder.weights.layers[0].attention.o)
    monkeypatch.setattr(layer, "state", lambda self: (counter,))
    engine.sleep(1)
    engine.wake_up()
    engine.update_weights(BUNDLED_PATH)
    assert counter.all()
    engine.sleep(2)
    engine.update_weights(BUNDLED_PATH)
    assert not counter.any()
    engine.wake_up()


def test_running_requests_survive_a_sleep(engine):
    expected = tokens(engine)
    for level in (0, 1):
        state = engine._prepare(0, PROMPT, GREEDY, False, 0)
        engine.frontend.start([state])
        engine.advance()
        engine.sleep(level, mode="keep")
        engine.wake_up()
        while engine.frontend.busy:
            engine.advance()
        assert state.output().outputs[0].token_ids == expected
    engine.loop.scheduler.check()


def test_adapters_are_put_back(tmp_path):
    """Served adapters are put back after a sleep.

    The check that ends a sleep puts its own adapters into the slots.
    """
    engine = LLM(**SMALL, enable_sleep_mode=True, enable_lora=True, max_lora_rank=4)
    adapter = LoRARequest("own", 1, str(write_adapter(tmp_path / "own", 1)))

    def answers() -> list[list[int]]:
        asked = [PROMPT, PROMPT]
        found = engine.generate(asked, GREEDY, use_tqdm=False, lora_request=[adapter, None])
        return [each.outputs[0].token_ids for each in found]

    expected = answers()
    assert expected[0] != expected[1]
    engine.sleep(1)
    engine.wake_up()
    assert answers() == expected
    engine.loop.scheduler.check()
    with pytest.raises(InvalidRequest, match=r"updates of weights .* adapters .*do not work together yet"):
        engine.sleep(2)
    assert answers() == expected


def test_bits_that_changed_are_found(engine, monkeypatch):
    """Control: a weight that is lost in the sleep keeps the engine from becoming ready."""
    digest, right = engine.state.digest, Dropped.restore

    def lossy(self: Dropped) -> None:
        right(self)
        next(tensors_of(engine.loop.executor.decoder.weights)).mul_(1.01)

    monkeypatch.setattr(Dropped, "restore", torch.no_grad()(lossy))
    engine.sleep(1)
    with pytest.raises(NotInvariant, match=r"the digest was .* before the sleep"):
        engine.wake_up()
    with pytest.raises(NotReady, match="No requests are taken since the engine was woken up"):
        tokens(engine)
    engine.update_weights(BUNDLED_PATH)
    engine.resume()
    assert engine.state.digest == digest and tokens(engine)


def test_wrong_sleeps_and_wake_ups_are_refused(engine):
    for wrong in (lambda: engine.sleep(3), engine.wake_up):
        with pytest.raises(InvalidRequest, match=r"level must be|does not sleep"):
            wrong()
    engine.sleep()
    for wrong, message in ((engine.sleep, "sleeps already"), (engine.resume, "wake it up")):
        with pytest.raises(InvalidRequest, match=message):
            wrong()
    with pytest.raises(InvalidRequest, match="tags are weights and kv_cache, not 'graphs'"):
        engine.wake_up(["graphs"])
    engine.wake_up()
    with pytest.raises(SettingsError, match="enable_sleep_mode"):
        Settings(enable_sleep_mode=True, data_parallel_size=2)
