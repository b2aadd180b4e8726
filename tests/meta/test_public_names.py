"""The names that ``from preheat import ...`` offers: sorted, present, and loaded without torch."""

import subprocess
import sys

import pytest

import preheat


def test_public_names_are_sorted_and_complete():
    assert preheat.__all__ == sorted(preheat.__all__)
    assert dir(preheat) == preheat.__all__
    assert set(preheat._HOME) == set(preheat.__all__) - {"__version__", "__version_tuple__"}


@pytest.mark.parametrize("name", preheat.__all__)
def test_public_names_exist(name):
    assert getattr(preheat, name) is not None


def test_other_names_do_not():
    with pytest.raises(AttributeError, match="no attribute 'heat'"):
        preheat.heat  # noqa: B018


@pytest.mark.parametrize("code", ["import preheat", "from preheat import SamplingParams, RequestOutput, PreheatError"])
def test_import_is_cheap(code):
    check = f"import sys; {code}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
