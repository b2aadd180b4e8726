"""Objects that the garbage collector is spared, and objects that it still sees."""

from __future__ import annotations

import os
import subprocess
import sys

from tests import shared_code

SCRIPT = """
import gc, weakref
from preheat import LLM
options = dict(device="cpu", skip_warmup=True, max_num_seqs=2, max_num_batched_tokens=64, boot_check="off")
llm = LLM(**options)
kept = gc.get_freeze_count()
assert kept > 50_000, kept  # torch
gone = weakref.ref(llm.loop)
del llm
gc.collect()
assert gone() is None  # an engine is no part of it
llm = LLM(**options)
assert gc.get_freeze_count() <= kept  # the second one freezes nothing
"""


def test_imports_are_frozen_once_and_engines_never(tmp_path_factory):
    env = os.environ | {"PREHEAT_CACHE_DIR": str(shared_code.folder_of(tmp_path_factory))}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr[-800:]
