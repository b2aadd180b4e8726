"""Files are opened in one module.

It resolves them, refuses irregular files, and has limits.
"""

from __future__ import annotations

import ast

from tests.meta.source import MODULES, name_of

OPENS = {
    "open",
    "fdopen",
    "read_text",
    "read_bytes",
    "load_file",
    "safe_open",
    "from_file",
    "memmap",
    "from_pretrained",
    "write_text",
    "write_bytes",
    "savez",
}
"""Functions and methods that open a file by its name."""

ELSEWHERE = {
    "utils.files": "the place",
    "cli.main": "/dev/null",
    "boot.engine": "no file: the share of a rank",
    "parallel.ranks": "no file: memory of a node",
    "server.replicas.replicas": "no file: a router",
    "server.batches.output": "answers are written",
    "server.replicas.process": "standard input",
    "utils.lifeline": "memory that server and engine share, made by the server",
    "utils.trace": "a trace is written",
    "frontend.receipt_log": "receipts are written",
    "utils.shared_files": "memory that ranks share, made by the engine",
    "model.sources": "safetensors, behind regular_file",
    "model.formats_fp4": "a tensor of the checkpoint, by its loader",
    "model.formats_stacked": "a tensor of the checkpoint, by its loader",
    "frontend.tokenizer": "tokenizers, behind regular_file",
    "frontend.hf_tokenizer": "transformers, offline, what the caller's model has",
    "frontend.image_decoder": "bytes that were read",
    "__main__": "the standard streams",
    "utils.helper": "the system",
    "server.operations.try_it": "a page of the package",
    "extras.calibration": "Python's own library, and arrays behind output_file",
    "model.gguf.folder": "a new folder of the engine's own",
    "verify.random_models": "a new folder of the engine's own",
    "utils.memory": "the system",
    "utils.processors": "the system",
    "warmup.store": "the system",
    "backends.cuda.device.detect": "the system",
    "backends.cpu.environment": "the system",
    "backends.cuda.environment": "the system",
    "backends.cuda.matmul.tables": "tables of the package",
}
"""Exceptions: modules that open files or other things themselves.

They open something else than a file, or a file that the one module has checked; the value names it.
"""


def opened(source: str) -> set[str]:
    """Return the calls of ``source`` that open files, apart from functions of the one module."""
    tree, found = ast.parse(source), set()
    ours = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
            and node.module == "preheat.utils.files" for alias in node.names}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in OPENS and not (isinstance(function, ast.Name) and name in ours):
                found.add(name)
    return found


def test_files_are_opened_in_one_place_and_the_exceptions_are_needed():
    assert {name_of(path) for path in MODULES if opened(path.read_text())} == set(ELSEWHERE)


def test_the_rule_can_fail():
    assert opened("from pathlib import Path\nPath('x').read_text()") == {"read_text"}
    assert opened("with open('x') as file: ...") == {"open"}
    assert opened("from preheat.utils.files import read_text\nread_text('x')") == set()
