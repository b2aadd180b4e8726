"""A toy sampling field: one row gives the flag, the fields of HTTP bodies, their range and the description."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import preheat

ROW = '    toy_ban: Annotated[int | None, _Row("a token that is never drawn", "sampler", 0, 99)] = None\n'
BEFORE = "    output_kind: RequestOutputKind ="
ASKED = """
import json, sys
import msgspec
from preheat.cli.main import _parser
from preheat.core import SamplingParams
from preheat.server.openai.schema import ChatRequest, CompletionRequest
from preheat.server.openapi import _add_ranges
from preheat.server.openai.params import sampling_fields

body = {"model": "m", "toy_ban": 7}
kinds = (CompletionRequest, {"prompt": "x"}), (ChatRequest, {"messages": []})
bodies = [msgspec.convert(body | more, kind) for kind, more in kinds]
try:
    SamplingParams(toy_ban=100)
    refused = ""
except ValueError as error:
    refused = str(error)
described = {"toy_ban": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
_add_ranges(described)
print(json.dumps({
    "flag": _parser()[0].parse_args(["generate", "--toy-ban", "7"]).toy_ban,
    "bodies": [sampling_fields(each)["toy_ban"] for each in bodies],
    "refused": refused,
    "described": described["toy_ban"]["anyOf"][0],
}))
"""


def with_row(folder: Path, row: str) -> subprocess.CompletedProcess[str]:
    """Ask for the toy field where ``row`` is in the table; all other modules are the package's own."""
    (own,) = preheat.__path__
    source = (Path(own) / "core" / "sampling.py").read_text()
    assert source.count(BEFORE) == 1
    shutil.copytree(Path(own) / "core", folder / "preheat" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "preheat" / "core" / "sampling.py").write_text(source.replace(BEFORE, row + BEFORE))
    (folder / "preheat" / "__init__.py").write_text(f"__path__.append({own!r})\n__version__ = ''\n")
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{ASKED}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_row_is_a_flag_a_field_of_each_body_and_a_range(tmp_path: Path) -> None:
    done = with_row(tmp_path, ROW)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "flag": 7, "bodies": [7, 7], "refused": "toy_ban must be between 0 and 99, got 100",
        "described": {"type": "integer", "minimum": 0, "maximum": 99},
    }  # fmt: skip


def test_without_its_row_there_is_no_field(tmp_path: Path) -> None:
    assert with_row(tmp_path, "").returncode != 0
