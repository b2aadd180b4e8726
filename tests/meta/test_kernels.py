"""The tests of tests/kernels, in processes where Triton interprets, as part of a run of other tests."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.meta.source import ROOT

PROCESSES = 2
"""Number of processes. Each one needs seconds to import torch and Triton, as long as five files of tests take."""

FILES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "kernels").glob("test_*.py"))]


@pytest.mark.timeout(900)  # minutes of work in a test, on a machine that may have other work
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it exists for Linux alone")
@pytest.mark.parametrize("files", [FILES[first::PROCESSES] for first in range(PROCESSES)], ids=" ".join)
def test_the_kernels_in_the_interpreter(files):
    """Run the files without the plugin of Schemathesis: no kernel needs it, and its import takes longest."""
    plugins = ["-p", "no:cacheprovider", "-p", "no:schemathesis"]
    command = [sys.executable, "-m", "pytest", "--quiet", *plugins, *files]
    outer = ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    done = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
