"""The faults that ``python -m tools.planted_faults`` plants still have their places in the sources."""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.meta.source import PACKAGE, ROOT
from tools.fault_engines import ENGINES
from tools.faults import FAULTS, Fault


def lost(fault: Fault) -> list[str]:
    """Return the edits of ``fault`` with a text that is not in its file exactly once."""
    return [edit.path for edit in fault.edits if (PACKAGE / edit.path).read_text().count(edit.old) != 1]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_in_an_engine_and_its_test_exists(fault):
    assert lost(fault) == []
    assert all(edit.new != edit.old for edit in fault.edits)
    assert fault.engine in ENGINES
    path, _, name = fault.test.partition("::")
    assert f"def {name}" in (ROOT / path).read_text()


def undefined(faults: Sequence[Fault], folder: Path) -> dict[str, list[str]]:
    """Return the complaints about names that planted sources do not define, by fault: such a fault is only a crash.

    The sources are written to ``folder``.
    """
    names = {}
    for number, fault in enumerate(faults):
        for path in {edit.path for edit in fault.edits}:
            source = (PACKAGE / path).read_text()
            for edit in fault.edits:
                source = source.replace(edit.old, edit.new) if edit.path == path else source
            planted = folder / str(number) / path
            planted.parent.mkdir(parents=True, exist_ok=True)
            planted.write_text(source)
            names[str(planted.resolve())] = fault.name
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821,F823"]
    done = subprocess.run(
        [*command, "--output-format", "json", folder], capture_output=True, text=True, check=False
    )  # fmt: skip
    found: dict[str, list[str]] = {}
    for said in json.loads(done.stdout):
        found.setdefault(names[said["filename"]], []).append(said["message"])
    return found


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed: it comes with the extra dev")
def test_no_fault_is_a_name_that_is_not_defined(tmp_path):
    assert undefined(FAULTS, tmp_path / "planted") == {}
    edit = FAULTS[0].edits[0]
    wrong = FAULTS[0]._replace(edits=(edit._replace(new=f"no_such_name = {edit.new.strip()} or nowhere\n"),))
    assert undefined([wrong], tmp_path / "wrong").keys() == {wrong.name}


def test_a_fault_without_its_source_text_is_noticed():
    fault = FAULTS[0]._replace(edits=(FAULTS[0].edits[0]._replace(old="was never there"),))
    assert lost(fault) == [fault.edits[0].path]
