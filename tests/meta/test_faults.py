"""The faults that ``python -m tools.planted_faults`` plants still have their places in the sources."""

import subprocess
import sys
from importlib.util import find_spec

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


def undefined(fault: Fault) -> list[str]:
    """Return the complaints about names that the planted sources do not define: such a fault is only a crash."""
    found = []
    for path in {edit.path for edit in fault.edits}:
        source = (PACKAGE / path).read_text()
        for edit in fault.edits:
            source = source.replace(edit.old, edit.new) if edit.path == path else source
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F823", "--quiet", "-"]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        found += done.stdout.splitlines()
    return found


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed: it comes with the extra dev")
def test_no_fault_is_a_name_that_is_not_defined():
    assert {fault.name: said for fault in FAULTS if (said := undefined(fault))} == {}
    edit = FAULTS[0].edits[0]
    assert undefined(FAULTS[0]._replace(edits=(edit._replace(new=f"no_such_name = {edit.new.strip()} or nowhere\n"),)))


def test_a_fault_without_its_source_text_is_noticed():
    fault = FAULTS[0]._replace(edits=(FAULTS[0].edits[0]._replace(old="was never there"),))
    assert lost(fault) == [fault.edits[0].path]
