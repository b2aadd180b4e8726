"""The faults that ``python -m tools.planted_faults`` plants still have their places in the sources."""

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


def test_a_place_that_is_gone_is_noticed():
    fault = FAULTS[0]._replace(edits=(FAULTS[0].edits[0]._replace(old="was never there"),))
    assert lost(fault) == [fault.edits[0].path]
