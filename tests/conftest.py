"""Settings for all tests.

Most tests boot an engine for a few steps and look at its results: they leave warm-up to the tests of the warm-up. Their
models are small: one thread computes them faster than two that wait for each other. Tests about threads set the number
of threads. Waiting threads must not spin, as other tests may run beside them.

Tests, their modules and their imports live until the process ends: no garbage collection looks at them.
"""

from __future__ import annotations

import gc
import os

os.environ.setdefault("PREHEAT_SKIP_WARMUP", "1")
os.environ.setdefault("PREHEAT_ON_COLD", "count")
os.environ.setdefault("PREHEAT_CACHE_DIR", "off")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import settings

from tests import turns

# The same examples at every run, however slow: a law that fails, fails again. `--hypothesis-profile search` finds more.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("fixed")


def pytest_collection() -> None:
    gc.disable()


@pytest.hookimpl(tryfirst=True)  # of all cases, whatever else selects some of them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turns.take_turn(config, items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if line := turns.summary():
        terminalreporter.write_line(line)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
