"""All kernels of a boot are compiled in one go, before anything runs."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import triton
from preheat.warmup import trial

rounds, read = [0], []
triton.knobs.compilation.listener = lambda **told: read.append((rounds[0], told["src"].name))
compile_kernels = trial.compile_kernels

def watched(*given):
    compile_kernels(*given)
    rounds[0] += 1

import preheat.warmup.fitting as fitting
fitting.compile_kernels = watched
from preheat import LLM
LLM(device="cuda", max_num_seqs=4, max_model_len=256, cache_dir="off", **json.loads(sys.argv[1]))
print(json.dumps({"first": sum(not at for at, _ in read), "later": [name for at, name in read if at]}))
"""


def boot(folder, options):
    """Boot in a process of its own; return how many kernels it compiled or read in the first round, and later ones."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(options)],
        env=os.environ | {"TRITON_CACHE_DIR": str(folder)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("options", [{}, {"enable_lora": True, "max_lora_rank": 8}], ids=["plain", "adapters"])
def test_a_boot_compiles_in_one_round_and_the_next_one_not_at_all(tmp_path, options):
    first = boot(tmp_path, options)
    compiled = set(tmp_path.rglob("*.cubin"))
    assert first["first"] == len(compiled) > 10 and not first["later"]
    assert boot(tmp_path, options) == first
    assert set(tmp_path.rglob("*.cubin")) == compiled
