"""The table of execution modes, and what the settings make of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from preheat.backends.registry import FACTS
from preheat.errors import SettingsError
from preheat.plan.modes import BY_BRIDGE, MODES, asked, resolve
from preheat.settings import OPTIONS, Settings

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


@pytest.mark.parametrize(("platform", "mode"), [("cpu", "eager"), ("cuda", "graphs"), ("hpu", "graphs")])
def test_the_default_of_each_platform(platform, mode):
    assert resolve(FACTS[platform], Settings()) == mode


@pytest.mark.parametrize("platform", FACTS)
def test_enforce_eager_is_eager(platform):
    assert resolve(FACTS[platform], Settings(enforce_eager=True)) == "eager"


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
@pytest.mark.parametrize("options", [{"execution_mode": "lazy"}, {"lazy_mode": True, "enforce_eager": True}])
def test_lazy_belongs_to_gaudi(platform, options):
    with pytest.raises(SettingsError, match="Gaudi"):
        resolve(FACTS[platform], Settings(**options))


@pytest.mark.parametrize("options", EVERYTHING, ids=str)
def test_settings_ask_for_one_mode_or_are_rejected(options):
    settings = Settings(**options)
    named = {options["execution_mode"]} - {"auto"}
    bridge = {BY_BRIDGE[options["lazy_mode"], options["enforce_eager"]]} - {None}
    if len(named | bridge) > 1:
        with pytest.raises(SettingsError, match="contradicts") as error:
            asked(settings)
        assert ("PT_HPU_LAZY_MODE" in error.value.message) is (options["lazy_mode"] is not None)
        assert ("enforce_eager" in error.value.message) is options["enforce_eager"]
    else:
        assert {asked(settings)} == (named | bridge or {None})


def test_options_and_table_name_the_same_modes():
    assert set(OPTIONS["execution_mode"].choices) == {"auto", *MODES}
    assert set(BY_BRIDGE.values()) == {None, *MODES}


@pytest.mark.parametrize("platform", FACTS)
def test_the_page_shows_the_table(platform):
    """A line for each mode of each platform: what it does, or why not."""
    row, lines = FACTS[platform].modes, PAGE.read_text().splitlines()
    for mode, text in [*row.runs.items(), *row.rejected.items()]:
        shown = f"`{mode}`, the default" if mode == row.default else f"`{mode}`"
        assert f"| {platform} | {shown} | {'refused: ' * (mode in row.rejected)}{text} |" in lines
