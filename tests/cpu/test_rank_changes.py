"""Sleep, and new weights, in an engine of two ranks: all ranks do the same, with the bits of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from preheat import LLM
from preheat.errors import InvalidRequest, ModelError
from preheat.execution.contents import NewWeights
from preheat.model.files import BUNDLED_PATH
from preheat.parallel.leader import ParallelExecutor
from preheat.parallel.ranks import Ranks
from tests.cpu.test_boot_check import SMALL
from tests.cpu.test_tensor_parallel import record_of
from tests.cpu.test_weight_transfer import GLOO, Trainer
from tests.cpu.test_weight_update import tokens

OPTIONS: dict[str, Any] = {**SMALL, **GLOO, "execution_mode": "eager", "num_threads": 1, "enable_sleep_mode": True}

State = tuple[str, Any]
"""The digest of an engine, and what it answers."""


def state(llm: LLM) -> State:
    return llm.state.digest, tokens(llm)


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    llm = LLM(tensor_parallel_size=2, **OPTIONS)
    yield llm
    ranks_of(llm).close()


@pytest.fixture(scope="module")
def right(changed: Path) -> tuple[State, State]:
    """The state of one rank, at boot and with the changed weights."""
    llm = LLM(tp_invariant=True, **OPTIONS)
    boot = state(llm)
    llm.update_weights(changed)
    return boot, state(llm)


@pytest.fixture
def boot(two: LLM, right: tuple[State, State]) -> Iterator[State]:
    """The state at boot, before and after a test; no step after a change is cold on any rank."""
    assert state(two) == right[0]
    yield right[0]
    two.update_weights(BUNDLED_PATH)
    assert state(two) == right[0]
    assert not record_of(two).cold


def ranks_of(llm: LLM) -> Ranks:
    executor = llm.loop.executor
    assert isinstance(executor, ParallelExecutor)
    return executor.ranks


def resident(llm: LLM) -> int:
    """Return the kilobytes of the second rank that no file backs."""
    (process,) = ranks_of(llm).processes
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


@pytest.mark.usefixtures("boot")
def test_all_ranks_give_memory_back_and_wake_with_their_bits(two: LLM, right: tuple[State, State]) -> None:
    awake = resident(two)
    two.sleep(2)
    assert resident(two) < awake - 5_000
    with pytest.raises(InvalidRequest, match="dropped the weights"):
        two.wake_up()
    two.update_weights(BUNDLED_PATH)
    two.wake_up()
    assert state(two) == right[0]
    two.sleep(1)
    two.wake_up(["weights"])
    two.wake_up(["kv_cache"])
    assert state(two) == right[0]


@pytest.mark.parametrize("given", ["files", "tensors"])
@pytest.mark.usefixtures("boot")
def test_new_weights_have_the_bits_of_one_rank(given: str, two: LLM, right: tuple[State, State], changed: Path) -> None:
    two.update_weights(changed if given == "files" else load_file(changed / "model.safetensors").items())
    assert state(two) == right[1] != right[0]


@pytest.mark.usefixtures("boot")
def test_every_rank_receives_from_a_trainer(two: LLM, right: tuple[State, State], changed: Path) -> None:
    """In one update and in one of two parts; then the trainer dies, and the weights stay."""
    trainer = Trainer(changed, 2)
    trainer.join(two)
    names = sorted(trainer.tensors)
    trainer.send(two, names)
    assert state(two) == right[1]
    two.update_weights(BUNDLED_PATH)
    two.start_weight_update()
    for part in (names[::2], names[1::2]):
        trainer.send(two, part)
    two.finish_weight_update()
    assert state(two) == right[1]
    trainer.tell("die")
    with pytest.raises(InvalidRequest, match="the old weights stay"):
        two.update_weights(trainer.announced(names))
    with pytest.raises(InvalidRequest, match="call /init_weight_transfer_engine first"):
        two.update_weights(trainer.announced(names))
    assert state(two) == right[1]
    trainer.process.join()


def test_what_does_not_fit_changes_no_rank(two: LLM, boot: State) -> None:
    norm = "model.norm.weight"
    for name, wrong in (("nobody.weight", torch.zeros(3)), (norm, torch.zeros(3)), (norm, torch.tensor([torch.nan]))):
        with pytest.raises(ModelError):
            two.update_weights([(name, wrong)])
        assert state(two) == boot
    with pytest.raises(InvalidRequest, match="world_size must be above 2, not 2"):
        two.init_weight_transfer_engine(
            {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
        )


@pytest.mark.usefixtures("boot")
def test_a_rank_that_keeps_other_weights_is_seen(two: LLM, right: tuple[State, State], changed: Path) -> None:
    """Control: the second rank alone swaps its weights."""
    ranks = ranks_of(two)
    ranks.call("change", "load", NewWeights(str(changed)), None)
    ranks.call("change", "swap")
    assert tokens(two) not in (right[0][1], right[1][1])
    ranks.call("change", "swap")
    ranks.call("change", "release")
