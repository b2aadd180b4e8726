"""The tests of tests/kernels, in processes where Triton interprets, as part of a run of other tests."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.meta.source import ROOT

TOGETHER = ("device_executor", "digest", "elements", "launch", "linear")
"""Files that take about as long as a process needs to import torch and the plugins: they share one."""

FILES = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))


def runs() -> dict[str, list[str]]:
    """The files of each process, by its name."""
    found: dict[str, list[str]] = {}
    for file in FILES:
        name = file.stem.removeprefix("test_")
        found.setdefault("together" if name in TOGETHER else name, []).append(str(file.relative_to(ROOT)))
    assert len(found["together"]) == len(TOGETHER)
    return found


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it exists for Linux alone")
@pytest.mark.parametrize("files", runs().values(), ids=runs())
def test_the_kernels_in_the_interpreter(files):
    """Run the files without the plugin of Schemathesis: no kernel needs it, and its import takes longest."""
    plugins = ["-p", "no:cacheprovider", "-p", "no:schemathesis"]
    command = [sys.executable, "-m", "pytest", "--quiet", *plugins, *files]
    outer = ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    done = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
