"""Operands that were loaded in fewer bits than the matrix unit multiplies must keep the order of their inputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("compiled.py")


def widths(*arguments):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_pairs_of_inputs_lie_together_as_in_every_other_kernel():
    assert set(map(tuple, widths().values())) == {(2,)}


def test_the_compiler_would_deal_them_out_otherwise():
    assert all(4 in found for found in widths("seen_through").values())
