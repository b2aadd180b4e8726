"""Models with states through the engine: against transformers, and the same bits for any cuts, slots and neighbors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.errors import ModelError, NotInvariant, SettingsError
from preheat.execution import mixers
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.ops.delta import DeltaRows
from preheat.verify.boot import BootCheck
from preheat.verify.check_runner import CheckRunner
from preheat.warmup.record import Record
from tests.cpu.checkpoints import MODELS, save_checkpoint, save_qwen3_5_with_images
from tests.cpu.test_model_families import error_at_each_position, logits_of, open_decoder, random_tokens

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "execution_mode": "eager", "num_threads": 1, "skip_tokenizer_init": True,
    "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": 16, "skip_warmup": True,
    "boot_check": "off",
}  # fmt: skip
LENGTHS = (1, 33, 90, 5, 17, 64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, Callable[[Tensor], Tensor]]:
    folder = tmp_path_factory.mktemp("hybrid")
    return folder, save_checkpoint(MODELS["qwen3-next"], folder)


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(str(checkpoint[0]), **OPTIONS)


def prompts() -> list[list[int]]:
    return [random_tokens(length).tolist() for length in LENGTHS]


def answers(llm: LLM, asked: Sequence[list[int]], count: int = 12) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": each} for each in asked], params, use_tqdm=False)
    choices = [output.outputs[0] for output in outputs]
    found = []
    for each in choices:
        entries = zip(each.token_ids, each.logprobs or (), strict=True)
        found.append((list(each.token_ids), [entry[token].logprob for token, entry in entries]))
    return found


def test_greedy_text_is_the_text_of_transformers(checkpoint, llm):
    """Two hundred tokens are the most likely ones, by one pass of the reference over the whole text."""
    (prompt,) = [random_tokens(7).tolist()]
    ((tokens, _),) = answers(llm, [prompt], 200)
    logits = checkpoint[1](torch.tensor([*prompt, *tokens]))[len(prompt) - 1 : -1]
    best = logits.topk(2).values
    differ = [place for place, token in enumerate(tokens) if token != int(logits[place].argmax())]
    assert all(best[place, 0] - best[place, 1] < 1e-4 for place in differ[:1])  # a tie of two paths of rounding
    assert not differ or differ[0] > 150


@pytest.fixture(scope="module")
def right(llm) -> list[tuple[list[int], list[float]]]:
    return [answers(llm, [each])[0] for each in prompts()]


def test_the_same_bits_together_and_again(llm, right):
    """Six sequences share four slots, so slots change hands."""
    assert answers(llm, prompts()) == right
    assert answers(llm, prompts()[::-1])[::-1] == right


def test_the_same_bits_for_other_chunks(checkpoint, right):
    other = LLM(str(checkpoint[0]), **OPTIONS | {"max_num_batched_tokens": 7, "max_num_seqs": 3})
    assert answers(other, prompts()) == right


def test_the_same_bits_after_preemption(checkpoint, llm):
    """A preempted sequence takes another slot, and begins anew at position 0."""
    few = LLM(str(checkpoint[0]), **OPTIONS | {"num_gpu_blocks_override": 9, "max_model_len": 128})
    asked = [each for each in prompts() if len(each) < 40]
    assert answers(few, asked, 40) == answers(llm, asked, 40)
    assert few.loop.scheduler.stats().preemptions > 0
    few.loop.scheduler.check()


def check_of(llm: LLM) -> BootCheck:
    loop = llm.loop
    record = Record.of(loop.packer.plan, model="hybrid", platform="cpu", dtype="float32", mode="eager")
    runner = CheckRunner(loop.scheduler.pool, loop.packer, loop.executor)
    return BootCheck(runner, record, loop.executor.backend.facts, loop.grammars)


CHECKS = ("states", "chunked", "decode", "co-batched", "poisoned", "compaction")


def test_each_check_at_boot_passes(llm):
    check = check_of(llm)
    for name in CHECKS:
        check.run(name)
    assert llm.loop.scheduler.slots.num_free == OPTIONS["max_num_seqs"]


def a_neighbors_slot(rows: DeltaRows) -> None:
    rows.read = rows.read.roll(1)


def a_late_window(rows: DeltaRows) -> None:
    rows.windows = (rows.windows - 1).clamp(min=0)


def test_the_checks_see_a_fault(llm, monkeypatch):
    """Control: a neighbor's slot, a late window, a state in bfloat16, and a state that is never begun anew."""
    plain = mixers.delta_rule

    def narrow(x: Tensor, begins: Tensor, rows: DeltaRows, weights: Any, states: Any, **how: Any) -> Tensor:
        out = plain(x, begins, rows, weights, states, **how)
        states.matrix.copy_(states.matrix.bfloat16())
        return out

    def stale(x: Tensor, begins: Tensor, *given: Any, **how: Any) -> Tensor:
        return plain(x, torch.zeros_like(begins), *given, **how)

    def changed(change: Callable[[DeltaRows], None]) -> Callable[..., Tensor]:
        def rule(x: Tensor, begins: Tensor, rows: DeltaRows, *given: Any, **how: Any) -> Tensor:
            own = DeltaRows(*(each.numpy() for each in (rows.read, rows.write, rows.extend)), 4, rows.read.device)
            change(own)
            return plain(x, begins, own, *given, **how)

        return rule

    check = check_of(llm)
    check.begin()
    for name, fault in (
        ("decode", changed(a_neighbors_slot)), ("chunked", changed(a_late_window)), ("decode", narrow),
        ("states", stale),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(mixers, "delta_rule", fault)
            with pytest.raises(NotInvariant):
                check.run(name)
    for each in llm.loop.executor.attention.states:
        each.matrix.zero_()
        each.window.zero_()
    check.run("co-batched")


def test_the_text_part_of_a_model_with_images(tmp_path):
    """Layers that draft and the encoder of images are in the files, and are not loaded."""
    reference, tokens = save_qwen3_5_with_images(tmp_path), random_tokens()
    assert error_at_each_position(logits_of(open_decoder(tmp_path), tokens), reference(tokens)).max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"linear_key_head_dim": 24}, "linear_key_head_dim 24"),
        ({"linear_num_value_heads": 3}, "3 linear_num_value_heads"),
        ({"layer_types": ["linear_attention"] * 4}, "without full_attention"),
        ({"layer_types": ["linear_attention", "mamba"] * 2}, "layer_types must be"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1"),
        ({"attn_output_gate": False}, "attn_output_gate"),
    ],
)
def test_other_sizes_are_refused_by_name(checkpoint, change, named):
    with pytest.raises(ModelError, match=named):
        read_spec(read_config(checkpoint[0]) | change)


def test_what_does_not_work_with_states_is_refused(checkpoint):
    for options in ({"execution_mode": "llvm"}, {"tensor_parallel_size": 2}, {"enable_lora": True}):
        with pytest.raises((SettingsError, ModelError), match="states"):
            LLM(str(checkpoint[0]), **OPTIONS | options)


def test_memory_of_states_is_counted(llm):
    """A slot beyond all others is for padding."""
    spec, executor = llm.loop.executor.decoder.spec, llm.loop.executor
    held = sum(each.matrix.nbytes + each.window.nbytes for each in executor.attention.states)
    assert held == (OPTIONS["max_num_seqs"] + 1) * spec.state_bytes(4)
    assert executor.cache.data.shape[0] == 1 and np.prod(executor.cache.data.shape[1:]) > 0
