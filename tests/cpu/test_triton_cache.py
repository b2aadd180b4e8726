"""Triton's cache on disk never replaces a library that a process has loaded."""

import os

import pytest
from triton import knobs
from triton.runtime.cache import FileCacheManager, get_cache_manager

from preheat.backends.cuda import launch
from preheat.backends.cuda.triton_cache import KeptLibraries


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))


def written_twice(manager, name):
    """Write a file twice, and return whether the first one stays."""
    first = os.stat(manager.put(b"one", name)).st_ino
    with open(manager.get_file(name), "rb"):  # as if a process had it, so that its inode is not given away
        second = os.stat(manager.put(b"two", name)).st_ino
    with open(manager.get_file(name), "rb") as file:
        assert file.read() == (b"one" if first == second else b"two")
    return first == second


def test_a_library_stays_and_other_files_do_not(folder):
    assert launch.overlap  # importing it installs the cache
    manager = get_cache_manager("00")
    assert type(manager) is KeptLibraries
    assert written_twice(manager, "__triton_launcher.cpython-312-x86_64-linux-gnu.so")
    assert not written_twice(manager, "__grp__kernel.json")
    assert len(os.listdir(manager.cache_dir)) == 2


def test_triton_itself_replaces_it(folder):
    """Control: Triton's own cache replaces the library."""
    assert not written_twice(FileCacheManager("00"), "__triton_launcher.so")
