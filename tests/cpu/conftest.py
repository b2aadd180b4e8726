"""Fixtures that restore the number of threads after each test, and weights for updates."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import llguidance
import pytest
import torch
from safetensors.torch import load_file, save_file

from preheat.core import EngineState
from preheat.model.files import BUNDLED_PATH
from tests import shared_code
from tests.cpu import forked_ranks

LAYERS = 2


@pytest.fixture(scope="session", autouse=True)
def _shared_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile each source of mode llvm once a run: see ``shared_code.py``."""
    if find_spec("llvmlite") is None:
        yield
        return
    undo = shared_code.share(shared_code.folder_of(tmp_path_factory))
    yield
    undo()


@pytest.fixture(scope="session", autouse=True)
def _forked_ranks() -> Iterator[None]:
    """Fork the processes of ranks: see ``forked_ranks.py``."""
    undo = forked_ranks.install()
    yield
    undo()


@pytest.fixture(scope="session", autouse=True)
def _shared_tokenizers() -> Iterator[None]:
    """Build llguidance's tokenizer of each text once: it takes 26 ms for the bundled model, and nothing changes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llguidance, "LLTokenizer", functools.lru_cache(maxsize=8)(llguidance.LLTokenizer))
        yield


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def eager() -> Iterator[None]:
    """Run engines in mode eager: a fault planted in an operation of torch reaches them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREHEAT_EXECUTION_MODE", "eager")
        yield


@pytest.fixture
def eager_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the engines of one test in mode eager, as ``eager`` does for a module."""
    monkeypatch.setenv("PREHEAT_EXECUTION_MODE", "eager")


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the first two layers of the bundled model.

    All its layers are of one kind. A law about bits needs one layer that writes a cache, and one that reads its output.
    """
    folder = tmp_path_factory.mktemp("shallow")
    shutil.copytree(BUNDLED_PATH, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    tensors = load_file(folder / "model.safetensors")
    kept = [name for name in tensors if (found := re.search(r"layers\.(\d+)", name)) is None or int(found[1]) < LAYERS]
    save_file({name: tensors[name] for name in kept}, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def two_layers(shallow: str) -> Iterator[None]:
    """Make ``shallow`` the model of settings that name none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREHEAT_MODEL", shallow)
        yield


@pytest.fixture(scope="session")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the bundled model with other weights."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(BUNDLED_PATH, folder, dirs_exist_ok=True)
    chance = torch.Generator().manual_seed(0)
    noise = {
        name: (each.float() * (1 + 0.3 * torch.randn(each.shape, generator=chance))).to(each.dtype)
        for name, each in load_file(folder / "model.safetensors").items()
    }
    save_file(noise, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def fresh(changed: Path) -> tuple[EngineState, list[int]]:
    """Return the tokens of an engine that has only ever had the changed weights."""
    from preheat import LLM
    from tests.cpu.test_boot_check import SMALL
    from tests.cpu.test_weight_update import tokens

    llm = LLM(str(changed), **SMALL)
    return llm.state, tokens(llm)
