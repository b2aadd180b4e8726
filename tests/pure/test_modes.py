"""The table of execution modes, and the mode that settings choose from it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from preheat.backends.base.facts import Mode
from preheat.backends.cpu import facts as cpu_facts
from preheat.backends.registry import FACTS
from preheat.errors import SettingsError
from preheat.plan.modes import BY_BRIDGE, asked, resolve
from preheat.settings import OPTIONS, Settings

MODES = get_args(Mode)
PAGE = Path(__file__).parents[2] / "docs" / "execution-modes.md"
EVERYTHING = [
    {"execution_mode": mode, "lazy_mode": lazy, "enforce_eager": eager}
    for mode, lazy, eager in itertools.product(OPTIONS["execution_mode"].choices, (None, False, True), (False, True))
]


@pytest.mark.parametrize("platform", FACTS)
def test_a_platform_says_yes_or_no_to_every_mode(platform):
    row = FACTS[platform].modes
    assert sorted([*row.runs, *row.rejected]) == sorted(MODES)
    assert row.default in row.runs
    assert all([*row.runs.values(), *row.rejected.values()])


@pytest.mark.parametrize(
    ("lazy", "eager", "mode"), [("0", "0", "compile"), ("0", "1", "eager"), ("1", "0", "graphs"), ("1", "1", "lazy")]
)
def test_gaudis_own_table(lazy, eager, mode):
    settings = Settings.load({"enforce_eager": eager}, env={"PT_HPU_LAZY_MODE": lazy})
    assert resolve(FACTS["hpu"], settings) == mode


@pytest.mark.parametrize(("platform", "mode"), [("cpu", "llvm"), ("cuda", "graphs"), ("hpu", "graphs")])
def test_the_default_of_each_platform(platform, mode):
    assert resolve(FACTS[platform], Settings()) == mode


@pytest.mark.parametrize("platform", FACTS)
def test_enforce_eager_is_eager(platform):
    assert resolve(FACTS[platform], Settings(enforce_eager=True)) == FACTS[platform].modes.enforced
    assert FACTS[platform].modes.enforced == ("lazy" if platform == "hpu" else "eager")  # as in vLLM on Gaudi


@pytest.mark.parametrize("platform", FACTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_named_mode_runs_or_is_rejected_with_the_reason(platform, mode):
    row, settings = FACTS[platform].modes, Settings(execution_mode=mode)
    if mode in row.runs:
        assert resolve(FACTS[platform], settings) == mode
        return
    with pytest.raises(SettingsError) as error:
        resolve(FACTS[platform], settings)
    assert row.rejected[mode] in error.value.message
    assert all(other in error.value.message for other in row.runs)
    assert error.value.param == "execution_mode"


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_lazy_belongs_to_gaudi(platform):
    with pytest.raises(SettingsError, match="Gaudi"):
        resolve(FACTS[platform], Settings(execution_mode="lazy"))


@pytest.mark.parametrize("platform", FACTS)
@pytest.mark.parametrize("options", EVERYTHING, ids=str)
def test_gaudis_variable_never_stops_a_boot(platform, options, caplog):
    """Gaudi's variable never stops a boot.

    If its mode is missing or an option names another mode, it has no effect, and this is told.
    """
    without = Settings(**options | {"lazy_mode": None})
    try:
        expected = resolve(FACTS[platform], without)
    except SettingsError:
        return
    found = resolve(FACTS[platform], Settings(**options))
    bridge = BY_BRIDGE[options["lazy_mode"], options["enforce_eager"]]
    assert found in {expected, bridge}
    ignored = options["lazy_mode"] is not None and found != bridge
    assert ("PT_HPU_LAZY_MODE" in caplog.text) is ignored


@pytest.mark.parametrize("options", EVERYTHING, ids=str)
def test_settings_ask_for_one_mode_or_are_rejected(options):
    settings = Settings(**options)
    mode = options["execution_mode"]
    bridge = BY_BRIDGE[options["lazy_mode"], options["enforce_eager"]]
    if options["enforce_eager"] and mode not in ("auto", "eager", bridge):
        with pytest.raises(SettingsError, match="contradicts enforce_eager"):
            asked(settings)
    else:
        assert asked(settings) == (bridge if mode == "auto" else mode)


def test_options_and_table_name_the_same_modes():
    assert set(OPTIONS["execution_mode"].choices) == {"auto", *MODES}
    assert set(BY_BRIDGE.values()) == {None, *MODES} - {"llvm"}  # no bridge of a Gaudi has it


@pytest.mark.parametrize("platform", FACTS)
def test_the_page_shows_the_table(platform):
    """The page has a line for each mode of each platform.

    The line has the mode's effect, or the reason for its refusal.
    """
    row, lines = FACTS[platform].modes, PAGE.read_text().splitlines()
    for mode, text in [*row.runs.items(), *row.rejected.items()]:
        shown = f"`{mode}`, the default" if mode == row.default else f"`{mode}`"
        assert f"| {platform} | {shown} | {'refused: ' * (mode in row.rejected)}{text} |" in lines


def test_without_a_compiler_the_bridge_gives_way_and_a_named_mode_is_an_error(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    facts = replace(FACTS["cpu"], modes=cpu_facts.modes())
    assert resolve(facts, Settings.load({}, env={"PT_HPU_LAZY_MODE": "0"})) == facts.modes.default
    assert "install g++" in caplog.text
    with pytest.raises(SettingsError, match=r"install g\+\+"):
        resolve(facts, Settings.load({"execution_mode": "compile"}))
