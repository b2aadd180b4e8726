"""When a dead engine starts again, and the adapters that it reads then."""

from __future__ import annotations

from preheat.configs.adapters import LoraModule
from preheat.core import AdapterReport, LoadAdapter
from preheat.errors import AdapterError, WireError
from preheat.frontend.adapters import Adapters
from preheat.server.replicas.restarts import MOST_FAILED, WINDOW_SECONDS, Restarts
from preheat.settings import Settings


def test_restarts_are_bounded_in_a_window() -> None:
    tested = Restarts(3)
    for now in (0.0, 1.0, 2.0):
        assert tested.allowed(now)
        tested.begin(now)
        tested.succeed()
    assert not tested.allowed(3.0) and not tested.allowed(WINDOW_SECONDS)
    assert tested.allowed(WINDOW_SECONDS + 0.5)


def test_an_engine_that_fails_to_start_is_given_up() -> None:
    tested = Restarts(100)
    for now in range(MOST_FAILED):
        assert tested.allowed(now)
        tested.begin(now)
    assert not tested.allowed(10.0)
    tested.succeed()
    assert tested.allowed(10.0)
    assert not Restarts(0).allowed(0.0)


def test_adapters_loaded_meanwhile_are_loaded_again() -> None:
    sent: list[LoadAdapter] = []
    settings = Settings(enable_lora=True, lora_modules=("configured=/c",))
    tested = Adapters(sent.append, settings)  # type: ignore[arg-type]
    assert tested.again() == []
    tested.load(LoraModule("later", "/l"), lambda error: None)
    tested.handle(AdapterReport("later", sent[0].id))
    tested.load(LoraModule("configured", "/d"), lambda error: None, in_place=True)
    tested.handle(AdapterReport("configured", sent[1].id))
    assert {(each.name, each.path, each.in_place) for each in tested.again()} == {
        ("later", "/l", True), ("configured", "/d", True)
    }  # fmt: skip
    tested.handle(AdapterReport("later", error=WireError.of(AdapterError("the folder is gone"))))
    assert [each.name for each in tested.again()] == ["configured"]
