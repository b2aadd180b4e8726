"""The tests of tests/kernels, in processes where Triton interprets, as part of a run of other tests."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.meta.source import ROOT

FILES = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "kernels").glob("test_*.py"))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it exists for Linux alone")
@pytest.mark.parametrize("file", FILES)
def test_the_kernels_in_the_interpreter(file):
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", file]
    outer = ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    done = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
