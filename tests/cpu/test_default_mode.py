"""The mode of an engine that asks for none: compiled layers, or torch's operations where functions are missing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from preheat import LLM
from preheat.backends.cpu import facts
from preheat.backends.cpu.backend import CpuBackend
from preheat.errors import SettingsError
from preheat.settings import Settings

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")

OPTIONS: dict[str, Any] = {
    "num_threads": 1, "skip_warmup": True, "boot_check": "off", "cache_dir": "off", "dtype": "float32",
    "max_model_len": 256, "max_num_seqs": 2, "num_gpu_blocks_override": 4,
}  # fmt: skip


def mode_of(llm: LLM) -> str:
    return "eager" if llm.loop.executor.decoder.functions is None else "llvm"


def test_layers_are_compiled_unless_an_option_has_no_functions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    llm = LLM("bundled", **OPTIONS | {"num_threads": 3})
    assert mode_of(llm) == "llvm"
    assert llm.loop.executor.decoder.functions.team.threads == 3
    assert torch.get_num_threads() == 1, "torch's threads would wait actively beside those of the functions"
    assert "instead of llvm" not in caplog.text
    CpuBackend().prepare(Settings(), "eager", None)
    assert torch.get_num_threads() == 3, "an engine without functions has torch's threads again"
    assert mode_of(LLM("bundled", tp_invariant=True, **OPTIONS)) == "eager"
    (line,) = (line for line in caplog.messages if "instead of llvm" in line)
    assert line.startswith(
        "Execution mode eager instead of llvm: mode llvm (execution_mode) and layers that ranks share"
    )


def test_a_mode_that_is_asked_for_is_not_replaced() -> None:
    with pytest.raises(SettingsError, match=r"mode llvm .* and layers that ranks share .* do not work together yet"):
        LLM("bundled", tp_invariant=True, execution_mode="llvm", **OPTIONS)


def test_float8_weights_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert mode_of(LLM("bundled", quantization="fp8", **OPTIONS)) == "eager"
    assert "instead of llvm: mode llvm (execution_mode) and layers of 8 bits with inputs of 8 bits" in caplog.text


def test_without_llvmlite_the_default_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.modes().default == "llvm"
    monkeypatch.setattr(facts, "find_spec", lambda name: None)
    found = facts.modes()
    assert found.default == "eager" and found.rejected["llvm"] == "it needs llvmlite: pip install llvmlite"
