"""A fake Gaudi for tests, and small models to run on it.

A context inserts the fake into the machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from preheat import LLM
from preheat.model.files import BUNDLED_PATH
from preheat.warmup import cold_monitor
from tests.meta.source import ROOT
from tests.tokenizers import byte_level

FAKES = ROOT / "tests" / "fakes"
VOCAB = 320
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16, "vocab_size": VOCAB}
OPTIONS: dict[str, Any] = {
    "device": "hpu", "use_fake_hpu": True, "dtype": "float32", "load_format": "dummy", "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 16, "cache_dir": "off", "boot_check": "off",
    "skip_warmup": False, "determinism_warmup_iterations": 0,
}  # fmt: skip


def model(folder: Path, **more: Any) -> str:
    """Write a configuration without weights, and a tokenizer."""
    config = json.loads((BUNDLED_PATH / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SMALL | more))
    byte_level().save(str(folder / "tokenizer.json"))
    return str(folder)


@contextmanager
def inserted(env: dict[str, str] | None = None, **how: Any) -> Iterator[Any]:
    """Insert a new fake card, with the variables ``env``, and restore the environment afterwards.

    The bridge reads the environment.
    """
    before, path, engines = dict(os.environ), list(sys.path), cold_monitor._OF_THIS_PROCESS
    cold_monitor._OF_THIS_PROCESS = WeakSet()  # as in another process with another card
    sys.path.insert(0, str(FAKES))
    os.environ.update(env or {})
    from habana_frameworks.simulator import plugged_in

    try:
        with plugged_in(**how) as card:
            yield card
    finally:
        sys.path[:], cold_monitor._OF_THIS_PROCESS = path, engines
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(name="small", scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the options of an engine of one layer."""
    return OPTIONS | {"model": model(tmp_path_factory.mktemp("small"))}


def boot(options: dict[str, Any], **more: Any) -> LLM:
    return LLM(**(options | more))
