"""New weights from a trainer in another process, by gloo.

The engine is like a fresh boot with them. After any fault the old weights stay and the engine answers.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.common.ports import free_port
from preheat import LLM, WeightGroup
from preheat.configs.weight_transfer import TransferGroup
from preheat.errors import InvalidRequest, ModelError, PreheatError, SettingsError
from preheat.settings import Settings
from tests.cpu.test_boot_check import SMALL
from tests.cpu.test_weight_update import tokens

NORM = "model.norm.weight"
GLOO = {"weight_transfer_config": {"backend": "gloo"}}


def train(pipe: Connection, port: int, folder: str, ranks: int) -> None:
    """Run a trainer of an engine of ``ranks`` on commands: join, send tensors, change tensors, die.

    It sends the tensors of the given names from the checkpoint in ``folder``.
    """
    torch.set_num_threads(1)
    tensors = load_file(f"{folder}/model.safetensors")
    group = None
    pipe.send("running")
    while (told := pipe.recv()) is not None:
        match told:
            case "join":
                group = WeightGroup("127.0.0.1", port, rank=0, world_size=1 + ranks, timeout=30)
            case ("send", names):
                assert group is not None
                group.send([(name, tensors[name]) for name in names])
            case ("fill", name, value):
                assert group is not None
                group.send([(name, torch.full_like(tensors[name], value))])
            case "die":
                os._exit(1)


class Trainer:
    """Trainer process with its checkpoint in ``folder``."""

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        self.ranks = ranks
        context = multiprocessing.get_context("spawn")
        self.port, (self._pipe, other) = free_port(), context.Pipe()
        self.tensors = load_file(folder / "model.safetensors")
        self.process = context.Process(target=train, args=(other, self.port, str(folder), ranks), daemon=True)
        self.process.start()

    def tell(self, what: object) -> None:
        self._pipe.send(what)

    def join(self, llm: LLM, timeout: float = 30) -> None:
        """Join; the process has started before the engine's ``timeout`` begins."""
        assert self._pipe.recv() == "running"
        self.tell("join")
        llm.init_weight_transfer_engine(self.info(timeout=timeout))

    def info(self, **more: Any) -> dict[str, Any]:
        place = {"master_address": "127.0.0.1", "master_port": self.port}
        return place | {"rank_offset": 1, "world_size": 1 + self.ranks} | more

    def announced(self, some: list[str], **changed: Any) -> dict[str, Any]:
        listed = [self.tensors[name] for name in some]
        return {
            "update_info": {
                "names": some,
                "dtype_names": [str(each.dtype).removeprefix("torch.") for each in listed],
                "shapes": [list(each.shape) for each in listed],
            }
            | changed
        }

    def send(self, llm: LLM, names: list[str], version: str | None = None) -> None:
        self.tell(("send", names))
        llm.update_weights(self.announced(names), version)


@pytest.fixture
def trainer(changed: Path) -> Iterator[Trainer]:
    made = Trainer(changed)
    yield made
    made.process.kill()
    made.process.join()


@pytest.fixture
def llm() -> LLM:
    return LLM(**SMALL, **GLOO, on_cold="raise")


def test_an_engine_with_weights_of_a_trainer_is_as_a_fresh_one(llm, trainer, fresh):
    """An engine with a trainer's weights is like a fresh one.

    The weights are sent whole, in two parts, and in any order. Neither of two parts counts before the last one has
    come.
    """
    boot, said = llm.state.digest, tokens(llm)
    trainer.join(llm)
    names = sorted(trainer.tensors)
    trainer.send(llm, names, "step-1")
    assert (llm.state.weight_version, llm.state.digest) == ("step-1", fresh[0].digest)
    assert tokens(llm) == fresh[1] != said
    from preheat.model.files import BUNDLED_PATH

    llm.update_weights(BUNDLED_PATH)
    assert (llm.state.digest, tokens(llm)) == (boot, said)
    llm.start_weight_update()
    for part in (names[::-2], names[-2::-2]):
        trainer.send(llm, part)
        assert (llm.state.digest, tokens(llm)) == (boot, said)
        with pytest.raises(InvalidRequest, match="finish_weight_update first"):
            llm.update_weights(BUNDLED_PATH)
    llm.finish_weight_update("step-2")
    assert (llm.state.weight_version, llm.state.digest) == ("step-2", fresh[0].digest)
    assert tokens(llm) == fresh[1]
    llm.loop.scheduler.check()


def test_tensors_with_other_bits_are_seen(llm, trainer, fresh):
    """Control: one tensor less gives another digest."""
    trainer.join(llm)
    trainer.send(llm, [name for name in trainer.tensors if name != NORM])
    assert llm.state.digest != fresh[0].digest
    trainer.send(llm, [NORM])
    assert llm.state.digest == fresh[0].digest


def wrong_name(t: Trainer) -> dict[str, Any]:
    return t.announced([NORM], names=["model.norm.wieght"])


def wrong_shape(t: Trainer) -> dict[str, Any]:
    size = len(t.tensors[NORM])
    return t.announced([NORM], shapes=[[2, size // 2]])


SENT_WRONG: dict[str, tuple[Callable[[Trainer], dict[str, Any]], float, type[PreheatError], str]] = {
    "name": (wrong_name, 1.0, ModelError, "unknown tensors: model.norm.wieght"),
    "shape": (wrong_shape, 1.0, ModelError, r"model.norm.weight has shape \[2, \d+\], needs"),
    "nan": (lambda t: t.announced([NORM]), float("nan"), ModelError, "not finite"),
    "huge": (lambda t: t.announced([NORM]), 3e38, InvalidRequest, "the old weights stay"),
}


def test_tensors_that_do_not_fit_change_nothing(llm, trainer, fresh):
    """Wrong tensors change nothing.

    They are received as announced, so that trainer and engine go on together.
    """
    trainer.join(llm)
    before, said = llm.state, tokens(llm)
    for announced, value, kind, message in SENT_WRONG.values():
        trainer.tell(("fill", NORM, value))
        with pytest.raises(kind, match=message):
            llm.update_weights(announced(trainer))
        assert llm.state == before and tokens(llm) == said
    trainer.send(llm, sorted(trainer.tensors))
    assert llm.state.digest == fresh[0].digest


def test_a_trainer_that_stops(llm, trainer):
    trainer.join(llm, timeout=3)
    before, said = llm.state, tokens(llm)
    names = sorted(trainer.tensors)
    trainer.tell(("send", names[:3]))
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match=rf"old weights stay, .*after 3 tensors, at {names[3]}: no data for 3 s"):
        llm.update_weights(trainer.announced(names))
    assert time.monotonic() - began >= 3
    assert llm.state == before and tokens(llm) == said
    with pytest.raises(InvalidRequest, match="no group with a trainer: call /init_weight_transfer_engine first"):
        llm.update_weights(trainer.announced(names))


def test_a_trainer_that_dies(llm, trainer, changed, fresh):
    trainer.join(llm, timeout=30)
    before, said = llm.state, tokens(llm)
    names = sorted(trainer.tensors)
    trainer.tell(("send", names[:3]))
    trainer.tell("die")
    with pytest.raises(InvalidRequest, match=r"the old weights stay, as not all of .* tensors have arrived"):
        llm.update_weights(trainer.announced(names))
    assert llm.state == before and tokens(llm) == said
    again = Trainer(changed)
    try:
        again.join(llm)
        again.send(llm, names)
        assert llm.state.digest == fresh[0].digest
    finally:
        again.process.kill()
        again.process.join()


def test_no_trainer_is_there(llm):
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2, "timeout": 1}
    with pytest.raises(InvalidRequest, match=r"no group with a trainer at 127\.0\.0\.1"):
        llm.init_weight_transfer_engine({"init_info": info})
    assert tokens(llm)


def test_steps_go_on_while_tensors_arrive(llm, trainer, fresh):
    """Requests are answered before the trainer sends its last tensor.

    Another transfer waits for its turn.
    """
    trainer.join(llm)
    names, outcomes = sorted(trainer.tensors), list[Any]()
    trainer.tell(("send", names[:-1]))
    from preheat.configs.weight_transfer import announced

    info = trainer.announced(names)["update_info"]
    llm.frontend.command("update_weights", outcomes.append, announced=announced(*info.values()))
    said = tokens(llm)
    assert said != fresh[1] and not outcomes
    with pytest.raises(InvalidRequest, match="update_weights is waiting for the trainer"):
        llm.start_weight_update()
    trainer.tell(("send", names[-1:]))
    while not outcomes:
        llm.advance()
    assert outcomes[0].error is None and llm.state.digest == fresh[0].digest
    assert tokens(llm) == fresh[1]


def lengths(t: dict[str, Any]) -> dict[str, Any]:
    return {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": []} | t}


WRONG = {
    "no shape": (lengths({}), "1 names, 1 dtype_names and 0 shapes"),
    "nothing": (lengths({"names": [], "dtype_names": []}), "0 names"),
    "twice": (lengths({"names": ["a"] * 2, "dtype_names": ["float32"] * 2, "shapes": [[1]] * 2}), "a tensor twice"),
    "type": (lengths({"dtype_names": ["complex64"], "shapes": [[1]]}), "a is of complex64; float32"),
    "shape": (lengths({"shapes": [[-1]]}), r"a has shape \[-1\]"),
    "no group": (lengths({"shapes": [[1]]}), "no group with a trainer"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_announcements_are_refused(plain, name):
    body, message = WRONG[name]
    with pytest.raises(InvalidRequest, match=message):
        plain.update_weights(body)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(**SMALL, **GLOO)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"rank_offset": 0}, "rank_offset must be 1 to 1"), ({"rank_offset": 2}, "rank_offset must be 1 to 1"),
     ({"master_port": 0}, "master_port must be"), ({"timeout": 0}, "timeout must be")],
)  # fmt: skip
def test_a_wrong_rank_offset_is_refused(plain, changed, message):
    info = {"master_address": "127.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 2} | changed
    with pytest.raises(InvalidRequest, match=message):
        plain.init_weight_transfer_engine(info)


def test_too_much_leaves_the_group(llm, trainer):
    trainer.join(llm)
    with pytest.raises(
        InvalidRequest, match=r"announces 4,000,000,000,000 bytes, .*: the engine leaves the trainer's group"
    ):
        llm.update_weights(lengths({"shapes": [[10**12]]}))
    with pytest.raises(InvalidRequest, match="no group with a trainer"):
        llm.update_weights(lengths({"shapes": [[1]]}))


def test_settings():
    with pytest.raises(SettingsError, match="weight_transfer_config: Invalid enum value 'ipc'"):
        Settings(weight_transfer_config={"backend": "ipc"})
    llm = LLM(**SMALL)
    with pytest.raises(InvalidRequest, match="started with --weight-transfer-config"):
        llm.init_weight_transfer_engine({"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2})
    with pytest.raises(InvalidRequest, match="started with --weight-transfer-config"):
        llm.start_weight_update()
    with pytest.raises(InvalidRequest, match="start_weight_update first"):
        LLM(**SMALL, **GLOO).finish_weight_update()
    nccl = LLM(**SMALL, weight_transfer_config={"backend": "nccl"})
    with pytest.raises(InvalidRequest, match="nccl does not support this device: write gloo"):
        nccl.init_weight_transfer_engine({"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2})
    assert TransferGroup("x", 1, 1, 2).timeout == 300
