"""Fixtures that restore the number of threads after each test, and weights for updates."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from preheat.core import EngineState
from preheat.model.files import BUNDLED_PATH


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
