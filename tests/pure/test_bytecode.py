"""Bytecode is kept where an installation has none, and only there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from preheat.utils.pycache import kept

MODULE = "module_without_bytecode"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a module, for an interpreter that was told to write no bytecode."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / f"{MODULE}.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return folder


def imported(folder: Path | None) -> None:
    with kept(folder, MODULE):
        __import__(MODULE)
    del sys.modules[MODULE]
    assert (sys.dont_write_bytecode, sys.pycache_prefix) == (True, None)


def test_modules_without_bytecode_are_cached_in_the_folder(sources: Path, tmp_path: Path) -> None:
    imported(tmp_path / "kept")
    (found,) = (tmp_path / "kept").rglob("*.pyc")
    written = found.stat().st_mtime_ns
    imported(tmp_path / "kept")
    assert found.stat().st_mtime_ns == written
    assert not list(sources.rglob("*.pyc"))


def test_modules_with_bytecode_are_left_alone(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as at_installation:
        at_installation.setattr(sys, "dont_write_bytecode", False)
        __import__(MODULE)
    del sys.modules[MODULE]
    assert list(sources.rglob("*.pyc"))
    imported(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_without_a_folder_nothing_is_kept(sources: Path, tmp_path: Path) -> None:
    imported(None)
    assert not list(tmp_path.rglob("*.pyc"))
