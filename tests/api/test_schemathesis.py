"""The promises of /openapi.json, in a process that has the plugin of Schemathesis.

The plugin takes seconds to import, and it makes requests for all operations while it collects. Each process of a run
would pay for both: ``pyproject.toml`` turns the plugin off, and one process turns it on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from preheat.server import openapi
from tests.meta.source import ROOT

METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}


@pytest.mark.timeout(900)  # a minute of work in a test, on a machine that may have other work
def test_the_document_holds_for_every_operation() -> None:
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "schemathesis", "tests/api/document_holds.py"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(openapi.document())
    operations = [method for path in document["paths"].values() for method in path if method in METHODS]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= len(operations) > 50, done.stdout
