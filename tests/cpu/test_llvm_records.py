"""The record of a boot in mode llvm: mode, processor and LLVM are parts of its digest; compilations are cold events."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.cli.main import main
from preheat.plan.functions import Function
from preheat.warmup.record import Record
from preheat.warmup.run import WarmUp
from tests.cpu.test_llvm import checkpoint

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")

from preheat.backends.cpu.llvm import machine, model, sampler, targets
from preheat.backends.cpu.llvm.embed import EMBEDS

SHARING = {"start", "run", "post", "join", "work"}

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


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    checkpoint(folder)
    return LLM(str(folder), **SMALL)


# --- functions are items ---


def written(llm: LLM) -> set[str]:
    """Return the names of all compiled functions, without the ones by which threads share jobs."""
    sources = (*llm.loop.executor.decoder.functions._sources, sampler.source(targets.here()))
    names = {name for source in sources for name in re.findall(r'^define .*?@"(\w+)"', source, re.MULTILINE)}
    return {name for name in names if name not in SHARING}


def listed(llm: LLM, functions: Sequence[Function]) -> set[str]:
    """Return the names in the code that stand for ``functions`` of the plan."""
    found = {llm.loop.executor.build_function(*each) for each in functions}
    names = {"embed": EMBEDS, "draw": ("draw", "pick", "best", "digest"), "alone": ("alone0",)}
    return {name for each in found for name in names.get(each, (each,))}


def test_the_plan_lists_every_function_that_is_compiled(llm):
    functions = llm.loop.packer.plan.options.functions
    assert listed(llm, functions) == written(llm)
    assert listed(llm, functions[1:]) < written(llm)
    entries = Record.from_json(llm.loop.listener.report()).entries
    items = {item.name: item for item in entries if item.kind == "function"}
    assert len(items) == len(functions)
    assert {item.outcome for item in items.values()} == {"ready"}


def test_no_function_is_compiled_before_the_plan_runs(tmp_path, monkeypatch):
    """A boot without a profiling run: the first item compiles, and the check's first run comes behind it."""
    checkpoint(tmp_path)
    seen, right, first = list[str](), WarmUp._run_item, machine.compile_code

    def item(warm: WarmUp, item: Any, *at: int) -> None:
        seen.append(item.name)
        right(warm, item, *at)

    def compiled(*given: Any) -> tuple[bytes, bool]:
        seen.append("compiled")
        return first(*given)

    monkeypatch.setattr(WarmUp, "_run_item", item)
    monkeypatch.setattr(model, "compile_code", compiled)
    monkeypatch.setattr("preheat.boot.engine._known_peak", lambda *_: 0)
    LLM(str(tmp_path), **SMALL | {"boot_check": "quick"})
    assert seen[0] == "(function, front of layer 0)"
    assert seen.index("compiled") == 1
    assert not any("compiled" in name for name in seen[1 + seen.count("compiled") :])


# --- compilations are cold events ---


def test_a_compilation_during_a_step_is_a_cold_event_of_the_engine(llm, monkeypatch):
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
