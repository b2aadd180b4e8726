"""Models with states through the engine: against transformers, and the same bits for any cuts, slots and neighbors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat import LLM, BeamSearchParams, SamplingParams
from preheat.errors import ModelError, NotInvariant, SettingsError
from preheat.execution import mixers
from preheat.execution.build import Assembly, build
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.loader import load_model
from preheat.ops.delta import DeltaRows
from preheat.schedule.prefix import PrefixCache
from preheat.settings import Settings
from preheat.startup import boot_engine, planned
from preheat.verify.boot import BootCheck
from preheat.verify.cache_paths import nearly_equal
from preheat.verify.check_runner import CheckRunner
from preheat.verify.drive import Engine
from preheat.verify.kept_states import KeptStates
from preheat.verify.prompts import Size
from preheat.verify.state_paths import any_chunks, any_end
from preheat.warmup.record import Record
from tests.cpu.checkpoints import MODELS, save_checkpoint, save_qwen3_5_with_images
from tests.cpu.test_model_families import error_at_each_position, logits_of, open_decoder, random_tokens

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "execution_mode": "eager", "num_threads": 1, "skip_tokenizer_init": True,
    "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": 16, "skip_warmup": True,
    "boot_check": "off",
}  # fmt: skip
LENGTHS = (1, 33, 90, 5, 17, 64)


FAMILIES = ("qwen3-next", "granite 4 h", "granite 4 h with experts")


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory) -> tuple[Path, Callable[[Tensor], Tensor]]:
    folder = tmp_path_factory.mktemp("hybrid")
    return folder, save_checkpoint(MODELS[request.param], folder)


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(str(checkpoint[0]), **OPTIONS)


def prompts() -> list[list[int]]:
    return [random_tokens(length).tolist() for length in LENGTHS]


Answer = tuple[list[int], list[float]]


def outputs(llm: LLM, asked: Sequence[list[int]], count: int = 12, **params: Any) -> list[Any]:
    params = {"temperature": 0, "max_tokens": count, "ignore_eos": True, "logprobs": 0} | params
    return llm.generate([{"prompt_token_ids": each} for each in asked], SamplingParams(**params), use_tqdm=False)


def answers(llm: LLM, asked: Sequence[list[int]], count: int = 12, **params: Any) -> list[Answer]:
    choices = [choice for output in outputs(llm, asked, count, **params) for choice in output.outputs]
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


def cold(llm: LLM, asked: Sequence[list[int]], count: int = 12, **params: Any) -> list[Answer]:
    """Return the answers to prompts that run alone and find no prefix."""
    return [one for each in asked for one in answers(llm, [each], count, skip_reading_prefix_cache=True, **params)]


@pytest.fixture(scope="module")
def right(llm) -> list[Answer]:
    return cold(llm, prompts())


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
    assert answers(few, asked, 40) == cold(llm, asked, 40)
    assert few.loop.scheduler.stats().preemptions > 0
    few.loop.scheduler.check()


SIZE = OPTIONS["block_size"]


def grown() -> list[list[int]]:
    """Return prompts that end beside blocks, then two longer ones, and one that branches off."""
    text = random_tokens(90).tolist()
    lengths = (SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 2 * SIZE + 1, 5 * SIZE)
    return [*(text[:length] for length in lengths), [*text[:SIZE], 5, 6], [*text[:80], 5, 6], [*text[:70], *text[:20]]]


def test_hits_at_each_blocks_end_have_the_same_bits(llm):
    """Short prefixes are found, and prompts that are a whole number of blocks (vllm#51250, sglang#22819)."""
    found = []
    for prompt in grown():
        (without,) = cold(llm, [prompt], 3)
        assert answers(llm, [prompt], 3) == [without]
        found.append(outputs(llm, [prompt], 3)[0].num_cached_tokens)
    assert found == [(len(prompt) - 1) // SIZE * SIZE for prompt in grown()]
    llm.loop.scheduler.check()


@pytest.fixture(scope="module")
def wanted(llm) -> list[Answer]:
    return cold(llm, grown()[2::3], n=2)


SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}
HARD = {
    "preempted": {"max_num_batched_tokens": 7, "mamba_cache_mode": "all", "max_kept_states": 3, "max_model_len": 128,
                  "num_gpu_blocks_override": 10},
    "drafts": {"speculative_config": SUFFIX, "max_model_len": 128},
    "few drafts": {"speculative_config": SUFFIX, "max_kept_states": 2, "mamba_block_size": 2 * SIZE},
}  # fmt: skip


@pytest.mark.parametrize("options", HARD.values(), ids=HARD.keys())
def test_the_same_bits_with_hits_and_drafts(checkpoint, llm, wanted, options):
    """Hits, drafts that past answers give, several choices and beams (vllm#47194)."""
    asked, other = grown()[2::3], LLM(str(checkpoint[0]), **OPTIONS | options)
    for _ in range(2):
        assert answers(other, asked, n=2) == wanted
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    beams = [repr(engine.beam_search([{"prompt_token_ids": asked[0]}], params)) for engine in (llm, other)]
    assert beams[0] == beams[1]
    stats = other.loop.scheduler.stats()
    assert stats.prefix_hits > 0 or options.get("max_kept_states") == 2  # drafts take both slots
    assert stats.accepted_tokens > 0 or "speculative_config" not in options
    assert stats.preemptions > 0 or "num_gpu_blocks_override" not in options
    other.loop.scheduler.check()


def check_of(llm: LLM) -> BootCheck:
    loop = llm.loop
    record = Record.of(loop.packer.plan, model="hybrid", platform="cpu", dtype="float32", mode="eager")
    runner = CheckRunner(loop.scheduler.pool, loop.packer, loop.executor)
    return BootCheck(runner, record, loop.executor.backend.facts, loop.grammars)


CHECKS = ("states", "chunked", "prefix hit", "decode", "co-batched", "poisoned", "compaction")


def test_each_check_at_boot_passes(llm):
    check = check_of(llm)
    for name in CHECKS:
        check.run(name)
    assert llm.loop.scheduler.slots.num_free == OPTIONS["max_num_seqs"]


def test_the_checks_of_drafts_and_hits_see_a_fault(checkpoint, monkeypatch):
    """Control: drafts' states stay, and a kept state is rounded to bfloat16 or has a late window."""
    speculating = LLM(str(checkpoint[0]), **OPTIONS | {"speculative_config": SUFFIX})
    check, plain = check_of(speculating), mixers.delta_rule
    check.begin()
    check.run("drafts")

    def of_kept(change: Callable[[Tensor, Tensor], object]) -> Callable[..., Tensor]:
        def rule(x: Tensor, begins: Tensor, rows: DeltaRows, weights: Any, states: Any, **how: Any) -> Tensor:
            out = plain(x, begins, rows, weights, states, **how)
            for slot in rows.write[rows.write > OPTIONS["max_num_seqs"]].tolist():
                change(states.matrix[slot], states.window[slot])
            return out

        return rule

    forget = KeptStates.forget
    faults = {
        "drafts": lambda patch: patch.setattr(KeptStates, "forget", lambda self, slot, _: forget(self, slot, -1)),
        "prefix hit": lambda patch: patch.setattr(
            mixers, "delta_rule", of_kept(lambda matrix, window: matrix.copy_(matrix.bfloat16()))
        ),
        "prefix hit ": lambda patch: patch.setattr(
            mixers, "delta_rule", of_kept(lambda matrix, window: window.copy_(window.roll(1, 0)))
        ),
    }
    for name, fault in faults.items():
        with monkeypatch.context() as patch:
            fault(patch)
            with pytest.raises(NotInvariant):
                check.run(name.strip())


def a_neighbors_slot(rows: DeltaRows) -> None:
    rows.read = rows.read.roll(1)


def a_late_window(rows: DeltaRows) -> None:
    rows.windows = (rows.windows - 1).clamp(min=0)


def changed(change: Callable[[DeltaRows], None]) -> Callable[..., Tensor]:
    """Return the rule of rows that ``change`` edits."""
    plain = mixers.delta_rule

    def rule(x: Tensor, begins: Tensor, rows: DeltaRows, *given: Any, **how: Any) -> Tensor:
        given_rows = (each.numpy() for each in (rows.read, rows.write, rows.extend))
        own = DeltaRows(*given_rows, rows.inputs.shape[1], rows.read.device)
        change(own)
        return plain(x, begins, own, *given, **how)

    return rule


def test_the_checks_see_a_fault(llm, monkeypatch):
    """Control: a neighbor's slot, a late window, a state in bfloat16, and a state that is never begun anew."""
    plain = mixers.delta_rule

    def narrow(x: Tensor, begins: Tensor, rows: DeltaRows, weights: Any, states: Any, **how: Any) -> Tensor:
        out = plain(x, begins, rows, weights, states, **how)
        states.matrix.copy_(states.matrix.bfloat16())
        return out

    def stale(x: Tensor, begins: Tensor, *given: Any, **how: Any) -> Tensor:
        return plain(x, torch.zeros_like(begins), *given, **how)

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


SIZES = Size(prompts=1, runs=1, outputs=4, longest=18)
"""Sizes of paths: the largest chunk has this many tokens."""


@pytest.fixture(scope="module")
def engine(checkpoint) -> Engine:
    options = {"model": str(checkpoint[0]), "max_model_len": 96, "num_gpu_blocks_override": 100, "max_kept_states": 90}
    return Engine(boot_engine, Settings.load(OPTIONS | options))


WAYS = {
    "nearly equal": lambda engine: nearly_equal(engine, []),
    "chunks": lambda engine: any_chunks("chunks", engine, SIZES),
    "ends": lambda engine: any_end("ends", engine, SIZES),
}
FOUND = {"nearly equal": "192 tokens from the prefix cache", "chunks": "11 sizes up to 18 tokens",
         "ends": "800 tokens from the prefix cache"}  # fmt: skip


def another_hash(patch: pytest.MonkeyPatch) -> None:
    """File a state under the neighboring hash."""
    right = PrefixCache.key_at
    patch.setattr(PrefixCache, "key_at", lambda self, *given: right(self, *given[:2], max(given[2] - SIZE, SIZE)))


def late_windows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mixers, "delta_rule", changed(a_late_window))


PLANTED = {"nearly equal": another_hash, "chunks": late_windows, "ends": another_hash}


@pytest.mark.parametrize("way", WAYS)
def test_verify_cuts_anywhere_and_counts_the_tokens_of_kept_states(engine, way, monkeypatch):
    """Control: a state under the neighboring hash, and a late window, change answers."""
    found = WAYS[way](engine)
    assert found is not None and found.identical == found.prompts and FOUND[way] in found.note
    PLANTED[way](monkeypatch)
    wrong = WAYS[way](engine)
    assert wrong is not None and wrong.identical < wrong.prompts


def test_the_plan_names_the_memory_of_states(checkpoint):
    text = planned(Settings.load({"model": str(checkpoint[0])} | OPTIONS))
    size = f"{read_spec(read_config(checkpoint[0])).state_bytes(4) / 1024:.4g}"
    assert size in ("30.75", "81", "79.5")
    assert f"states: 9 slots of {size} KiB (4 of sequences, 4 for kept states and drafts, one for padding)" in text


def test_the_text_part_of_a_model_with_images(tmp_path):
    """Layers that draft and the encoder of images are in the files, and are not loaded."""
    reference, tokens = save_qwen3_5_with_images(tmp_path), random_tokens()
    assert error_at_each_position(logits_of(open_decoder(tmp_path), tokens), reference(tokens)).max() <= 1e-5


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "qwen3-next": [
        ({"linear_key_head_dim": 24}, "linear_key_head_dim 24"),
        ({"linear_num_value_heads": 3}, "3 linear_num_value_heads"),
        ({"layer_types": ["linear_attention"] * 4}, "without full_attention"),
        ({"layer_types": ["linear_attention", "mamba"] * 2}, "layer_types must be"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1"),
        ({"attn_output_gate": False}, "attn_output_gate"),
    ],
    "granite 4 h": [
        ({"mamba_d_state": 24}, "mamba_d_state 24"),
        ({"mamba_d_head": 32}, "mamba_n_heads 12 times mamba_d_head 32"),
        ({"mamba_d_head": "auto", "mamba_n_heads": 16}, "mamba_d_head 12 is not supported"),
        ({"mamba_n_groups": 5}, "12 mamba_n_heads"),
        ({"mamba_d_conv": 1}, "mamba_d_conv 1"),
        ({"time_step_limit": [0.1]}, "time_step_limit"),
        ({"time_step_limit": [0.3, {"__float__": "NaN"}]}, "time_step_limit"),
        ({"layer_types": ["mamba"] * 4}, "without full_attention"),
        ({"layers_block_type": ["mamba", "attention"] * 2}, "layers_block_type"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
        ({"normalization_function": "layernorm"}, "normalization_function"),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok is 3"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "named"), [(name, *each) for name, changes in REFUSED.items() for each in changes]
)
def test_other_sizes_are_refused_by_name(name, change, named, tmp_path):
    save_checkpoint(MODELS[name], tmp_path)
    with pytest.raises(ModelError, match=named):
        read_spec(read_config(tmp_path) | change)


def test_what_does_not_work_with_states_is_refused(checkpoint):
    for options in ({"execution_mode": "llvm"}, {"pipeline_parallel_size": 2}, {"enable_lora": True}):
        with pytest.raises((SettingsError, ModelError), match="states"):
            LLM(str(checkpoint[0]), **OPTIONS | options)


def test_memory_of_states_is_counted(llm):
    """A slot is for padding, one for each sequence, and as many are for kept states."""
    spec, executor = llm.loop.executor.decoder.spec, llm.loop.executor
    held = sum(each.matrix.nbytes + each.window.nbytes for each in executor.attention.states)
    assert held == (1 + 2 * OPTIONS["max_num_seqs"]) * spec.state_bytes(4)
    model = load_model(llm.settings, executor.backend)
    how = Assembly("eager", num_blocks=2)  # of the profiling run: it must not count the states, too
    _, small = build(llm.settings, executor.backend, model, llm.loop.packer.plan, llm.loop.scheduler.slots, how=how)
    assert sum(each.matrix.nbytes + each.window.nbytes for each in small.attention.states) == spec.state_bytes(4)
    assert executor.cache.data.shape[0] == 1 and np.prod(executor.cache.data.shape[1:]) > 0
