"""The record of a boot in mode llvm: mode, processor and LLVM are parts of its digest; compilations are cold events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.cli import main
from preheat.warmup.record import Record
from tests.cpu.test_llvm import checkpoint

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")

from preheat.backends.cpu.llvm import machine, model, targets

FLAGS = """--device cpu --dtype float32 --skip-tokenizer-init --max-model-len 32 --max-num-seqs 1 --num-threads 1
--max-num-batched-tokens 16 --block-size 16 --num-gpu-blocks-override 20 --cache-dir off --no-skip-warmup""".split()

SMALL = {
    "device": "cpu", "dtype": "float32", "execution_mode": "llvm", "skip_tokenizer_init": True, "max_model_len": 64,
    "max_num_seqs": 1, "num_threads": 1, "max_num_batched_tokens": 16, "block_size": 16, "num_gpu_blocks_override": 20,
    "cache_dir": "off", "skip_warmup": False, "boot_check": "off", "on_cold": "count",
}  # fmt: skip


def test_a_digest_of_another_mode_or_processor_is_named(tmp_path, capsys, monkeypatch):
    checkpoint(tmp_path)
    path = tmp_path / "record.json"
    flags = ["--model", str(tmp_path), *FLAGS]
    assert main(["warm", "--json", *flags, "--execution-mode", "llvm"]) == 0
    path.write_text(capsys.readouterr().out)
    proof = json.loads(path.read_text())["proof"]
    assert proof["parts"]["mode"] == "llvm"
    assert proof["parts"]["device"][1].endswith(f", {targets.here().title}")
    asked = ["verify", "--digest", str(path), *flags, "--execution-mode"]
    assert main([*asked, "eager"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert "mode: llvm -> eager" in told
    assert any(line.startswith("device[1]: ") for line in told)
    assert any(line.startswith(f"bits: {proof['digest']} -> ") for line in told)
    # Code for another processor: named, and with the same bits.
    other = targets.TARGETS["avx2" if targets.TARGETS["avx2"].runs_here else "neon"]
    monkeypatch.setattr(targets, "here", lambda: other)
    assert main([*asked, "llvm"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == f"The bits are equal: digest {proof['digest']}"
    assert any(line.startswith("device[1]: ") and line.endswith(other.title) for line in told)


def test_a_compilation_during_a_step_is_a_cold_event_of_the_engine(tmp_path, monkeypatch):
    checkpoint(tmp_path)
    llm = LLM(str(tmp_path), **SMALL)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert Record.from_json(llm.loop.listener.report()).cold == {}
    right, source = (
        model.Functions.start,
        f'target triple = "{targets.here().triple}"\ndefine void @late() {{ ret void }}',
    )

    def late(functions: model.Functions, *given: Any) -> Tensor | None:
        machine.compile_code(source, None)
        return right(functions, *given)

    monkeypatch.setattr(model.Functions, "start", late)
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
    record = Record.from_json(llm.loop.listener.report())
    assert record.cold == {"llvm": 1}
    assert [(event.source, event.detail) for event in record.events] == [
        ("llvm", "the functions of a model were compiled")
    ]
