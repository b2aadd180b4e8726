"""Models with states on a GPU: kernels against the reference, and one set of bits for any cuts, slots and neighbors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.backends.cuda.recurrence import delta
from preheat.backends.cuda.recurrence.delta import (
    DECODING,
    ONE,
    PROMPTS,
    TOKENS,
    Config,
    CudaRecurrences,
    TapedStates,
    Tile,
)
from preheat.core import StepStates
from preheat.errors import NotInvariant
from preheat.ops.delta import delta_rule
from preheat.ops.values import DELTA, Recurrence
from preheat.plan.step_items import ForwardItem
from preheat.verify.boot import BootCheck
from preheat.verify.check_runner import CheckRunner
from preheat.warmup.record import Record
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.mtp_checkpoints import copying, save_with_layer
from tests.cpu.quantized import quantize_checkpoint
from tests.cpu.test_quantized_checkpoints import KINDS
from tests.cuda.test_families import model_of
from tests.delta_layer import DeltaLayer, step_four
from tests.recurrences import MAMBA

VALUE = Recurrence(key_heads=4, value_heads=8, key_dim=128, value_dim=128, taps=4)
OTHER = Recurrence(key_heads=1, value_heads=12, key_dim=128, value_dim=64, taps=4, rule=MAMBA._replace(normed=12))
"""As a layer of Granite 4 H, with fewer heads."""

VALUES = pytest.mark.parametrize("value", [VALUE, OTHER], ids=["delta", "mamba"])
LENGTHS = (300, 1, 37)
SIZES: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "hidden_size": 256, "head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "max_position_embeddings": 1024,
    },
    "granite 4 h": {
        "hidden_size": 192, "head_dim": 64, "mamba_d_head": 32, "mamba_d_state": 128, "max_position_embeddings": 1024,
    },
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 512, "max_num_seqs": 8,
    "max_num_batched_tokens": 256, "block_size": 16, "num_gpu_blocks_override": 300, "boot_check": "off",
    "skip_warmup": False, "on_cold": "raise",
}  # fmt: skip
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}
HARD: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 23, "max_num_seqs": 3},
    "few blocks": {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 64, "mamba_cache_mode": "all",
                   "max_kept_states": 5},
    "drafts": {"speculative_config": SUFFIX},
    "few drafts": {"speculative_config": SUFFIX, "max_kept_states": 4, "mamba_block_size": 32},
    "eager": {"enforce_eager": True},
}  # fmt: skip


class Device:
    """The parts of a backend that a layer of its own needs."""

    device = torch.device("cuda")

    @staticmethod
    def host_copy(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def layer(lengths: tuple[int, ...] = LENGTHS, value: Recurrence = VALUE) -> DeltaLayer:
    return DeltaLayer(Device(), value, lengths, torch.bfloat16)


@pytest.mark.parametrize(
    "config",
    [ONE, PROMPTS, DECODING, Config(4, 1, 8, 2), Config(16, 1, 4, 1), Config(16, 4, 32, 4), Config(64, 8, 0, 2)],
)
@pytest.mark.parametrize("key_dim", [64, 128, 256])
@pytest.mark.parametrize("rule", [DELTA, MAMBA._replace(normed=4)], ids=["delta", "mamba"])
def test_the_recurrence_has_the_bits_of_the_reference(config, key_dim, rule, monkeypatch):
    """The order of every sum is the contract's, in any configuration, and nothing is fused."""
    monkeypatch.setattr(delta, "ONE", config)
    monkeypatch.setattr(delta, "PROMPTS", config)
    value = Recurrence(key_heads=2, value_heads=4, key_dim=key_dim, value_dim=128, taps=4, rule=rule)
    made = layer((33, 1, 5), value)
    found, expected, matrix = step_four(made, monkeypatch)
    assert torch.equal(found, expected)
    for slot in (1, 2, 3):
        assert torch.equal(made.plain(slot), matrix[slot])


@VALUES
def test_a_layer_is_near_the_reference(value):
    """Exponentials, roots and divisions are the device's."""
    made = layer(value=value)
    found, states = torch.cat(made.whole()), made.zeros()
    begins = torch.ones(len(LENGTHS), dtype=torch.bool, device="cuda")
    expected = delta_rule(torch.cat(made.texts), begins, made.rows(), made.weights, states)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2)
    for slot in (1, 2, 3):
        torch.testing.assert_close(made.plain(slot), states.matrix[slot], rtol=1e-3, atol=1e-4)
        assert torch.equal(made.states.window[slot], states.window[slot])


@pytest.mark.parametrize(("heads", "value_heads"), [(4, 8), (8, 8), (8, 12), (8, 32)])
def test_the_gated_norm_has_the_bits_of_one_head_a_program(heads, value_heads, monkeypatch):
    value = replace(VALUE, value_heads=value_heads)
    monkeypatch.setattr(delta, "FINISH_HEADS", 1)
    expected = layer((33, 1), value).whole()
    monkeypatch.setattr(delta, "FINISH_HEADS", heads)
    found = layer((33, 1), value).whole()
    assert all(map(torch.equal, found, expected)) and all(each.any() for each in expected)


def inputs_of(value: Recurrence, tile: Tile | None, patch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the inputs of the recurrence in steps of cut prompts and of rows that decode; unwritten numbers are 7."""
    made, seen = layer((38, 2, 4), value), list[Tensor]()
    own = made.kernels.prepare

    def prepare(*args: Any) -> None:
        for each in args[-1]:
            each.fill_(7.0)
        own(*args)
        seen.extend(each.clone() for each in args[-1])

    patch.setattr(made.kernels, "prepare", prepare)
    for name in ("PREPARE_PROMPTS", "PREPARE_DECODING"):
        patch.setattr(delta, name, tile)
    made.step((0, 17, 1, 1), (1, 1, 2, 2), (2, 2, 3, 3))
    made.step((2, 1, 3, 3), (0, 20, 1, 1))
    made.step((2, 1, 3, 3), (0, 1, 1, 1), (1, 1, 2, 2), width=1)
    return seen


@pytest.mark.parametrize("tile", [Tile(1, 2), Tile(2, 4), Tile(4, 4), Tile(8, 1)])
@pytest.mark.parametrize(
    "value",
    [
        VALUE,
        replace(VALUE, value_heads=4, taps=2),
        replace(VALUE, key_heads=2, key_dim=256, value_heads=6),
        replace(VALUE, key_heads=1, key_dim=64, value_heads=1, taps=3),
        OTHER,
        replace(OTHER, key_heads=2, key_dim=256, rule=OTHER.rule._replace(limits=(0.3, 1.2), normed=6, bias=False)),
    ],
)
def test_inputs_have_the_bits_of_a_token_a_program(value, tile, monkeypatch):
    expected, found = inputs_of(value, None, monkeypatch), inputs_of(value, tile, monkeypatch)
    assert len(found) == 9 and all(map(torch.equal, found, expected))
    assert all((each != 7).any() for each in found)


@VALUES
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 299])
def test_bits_do_not_depend_on_cuts(size, value):
    whole, cut = layer(value=value), layer(value=value)
    right, parts = whole.whole()[0], []
    for at in range(0, LENGTHS[0], size):
        count = min(size, LENGTHS[0] - at)
        parts.append(cut.step((0, count, 4, 4), width=int(count == 1)))
    assert torch.equal(torch.cat(parts), right)
    assert torch.equal(cut.settled(0, 4), whole.states.matrix[1])
    assert torch.equal(cut.states.window[4], whole.states.window[1])


@pytest.mark.parametrize("config", [TOKENS, Config(16, 4, 0, 1, ahead=4), Config(32, 8, 0, 2, ahead=1)])
@pytest.mark.parametrize(("key_dim", "taps"), [(64, 2), (128, 4), (256, 4)])
@VALUES
def test_rows_of_one_token_have_the_bits_of_their_prompts(config, key_dim, taps, value, monkeypatch):
    """Programs take one, two or all rows; rows read one slot and write another one."""
    monkeypatch.setattr(delta, "TOKENS", config)
    value = replace(value, key_dim=key_dim, taps=taps)
    prompts, rows = layer((9, 9, 9), value), layer((9, 9, 9), value)
    right, found = prompts.whole(), list[Tensor]()
    for turn in range(9):
        ways = ((text, 1, 1 + text + turn % 2 * 3, 4 + text - turn % 2 * 3) for text in range(3))
        found.append(rows.step(*ways, width=1))
    assert torch.equal(torch.stack(found, 1), torch.stack(right))
    for text in range(3):
        assert torch.equal(rows.states.matrix[4 + text], prompts.states.matrix[1 + text])
        assert torch.equal(rows.states.window[4 + text], prompts.states.window[1 + text])


def lagging(made: DeltaLayer, chance: random.Random, spoil: Callable[[], object] = lambda: None) -> list[Tensor]:
    """Compute the texts by drawn steps, most of one token a row, and return their outputs.

    Each text has a slot of its own, and leaves it for one of the other slots now and then.
    """
    own = {text: text + 1 for text in range(len(made.lengths))}
    at, found = dict(own), [list[Tensor]() for _ in made.lengths]
    while left := [text for text, length in enumerate(made.lengths) if made.done[text] < length]:
        rows, width, parts = chance.sample(left, chance.randint(1, len(left))), chance.random() < 0.8, list[Any]()
        for text in rows:
            count = 1 if width else min(chance.choice((1, 1, 2, 5)), made.lengths[text] - made.done[text])
            to = chance.choice((own[text],) * 9 + (5 + text,))
            if at[text] != own[text]:
                to = own[text]
            parts.append((text, count, at[text], to))
            at[text] = to
        spoil()
        outputs = made.step(*parts, width=int(width)).split([count for _, count, *_ in parts])
        for (text, *_), out in zip(parts, outputs, strict=True):
            found[text].append(out)
    return [torch.cat(each) for each in found]


@pytest.mark.parametrize("seed", range(6))
@VALUES
def test_states_that_lag_have_the_bits_of_their_prompts(value, seed):
    """States are written seldom: behind tokens that depend on the slot, before prompts, and into other slots."""
    whole, rows = layer((40, 23, 37), value), layer((40, 23, 37), value)
    right, found = whole.whole(), lagging(rows, random.Random(seed))
    assert all(map(torch.equal, found, right))


@pytest.mark.parametrize("change", ["begun", "tape"])
def test_a_token_that_a_tape_lacks_changes_bits(change):
    """Control: a step is told that a state has one token more, or finds other numbers."""
    whole, rows = layer((40, 23, 37)), layer((40, 23, 37))
    states = rows.states
    assert isinstance(states, TapedStates)
    spoils = {"begun": lambda: states.begun.add_(1), "tape": lambda: states.tape[1].mul_(1.01)}
    right, found = whole.whole(), lagging(rows, random.Random(1), spoils[change])
    assert not all(map(torch.equal, found, right))


def test_kept_states_have_the_bits_of_a_row_that_ends_there():
    whole, kept = layer(), layer()
    right = whole.whole()
    found = kept.step((0, 64, 1, 5), (0, 1, 5, 6), (0, 235, 6, 1), (2, 37, 3, 3))
    assert torch.equal(found, torch.cat((right[0], right[2])))
    for end, slot in ((64, 5), (65, 6)):
        alone = layer()
        alone.step((0, end, 1, 1))
        assert torch.equal(alone.states.matrix[1], kept.states.matrix[slot])
        assert torch.equal(alone.states.window[1], kept.states.window[slot])


@pytest.fixture(scope="module", params=SIZES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("hybrid")
    family, changes = MODELS[request.param]
    save_checkpoint((family, changes | SIZES[request.param]), folder)
    return str(folder)


@pytest.fixture(scope="module")
def llm(checkpoint: str) -> LLM:
    return LLM(checkpoint, **OPTIONS)


def prompts() -> list[list[int]]:
    """Return prompts of many lengths; some are beginnings of others, and end beside blocks."""
    chance = random.Random(2)
    text = [chance.randrange(199) for _ in range(400)]
    lengths = (1, 15, 16, 17, 64, 65, 200, 400)
    return [*(text[:length] for length in lengths), [*text[:80], 5, 6], [*text[:70], *text[:90]], text[250:]]


Answer = tuple[list[int], list[float]]


def answers(llm: LLM, asked: list[list[int]], count: int = 24, **params: Any) -> list[Answer]:
    wanted = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, **params)
    found = []
    for output in llm.generate([{"prompt_token_ids": each} for each in asked], wanted, use_tqdm=False):
        for choice in output.outputs:
            entries = zip(choice.token_ids, choice.logprobs or (), strict=True)
            found.append((list(choice.token_ids), [entry[token].logprob for token, entry in entries]))
    return found


@pytest.fixture(scope="module")
def right(llm: LLM) -> list[Answer]:
    """Return the answers to prompts that run alone and find no prefix."""
    return [one for each in prompts() for one in answers(llm, [each], skip_reading_prefix_cache=True)]


def test_the_same_bits_together_and_again(llm, right):
    """The second round finds prefixes at ends of blocks, and sequences share slots."""
    assert answers(llm, prompts()) == right
    assert answers(llm, prompts()[::-1])[::-1] == right
    assert llm.loop.scheduler.stats().prefix_hits > 0
    llm.loop.scheduler.check()


def of(checkpoint: str, name: str) -> LLM:
    return LLM(checkpoint, **OPTIONS | HARD[name])


@pytest.mark.parametrize("name", [name for name in HARD if name != "eager"])
def test_the_same_bits_in_every_way(name, checkpoint, right):
    other = of(checkpoint, name)
    for _ in range(2):
        assert answers(other, prompts()) == right
    stats = other.loop.scheduler.stats()
    assert stats.preemptions > 0 or name != "few blocks"
    assert stats.accepted_tokens > 0 or "drafts" not in name
    other.loop.scheduler.check()


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5 moe", "deepseek v3"])
def test_a_layer_that_predicts_changes_no_answer(name, tmp_path):
    """The layer drafts in graphs, and is right: it has the weights of a model that repeats a token."""
    save_with_layer(model_of(name), tmp_path, copying)
    right = answers(LLM(str(tmp_path), **OPTIONS), prompts())
    drafting = LLM(str(tmp_path), **OPTIONS, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    for _ in range(2):
        assert answers(drafting, prompts()) == right
    stats = drafting.loop.scheduler.stats()
    assert stats.accepted_tokens > 0 and stats.prefix_hits > 0
    drafting.loop.scheduler.check()


def test_graphs_have_the_bits_of_operations(checkpoint, llm, right):
    forwards = [item.program for item in llm.loop.packer.plan.items if isinstance(item, ForwardItem)]
    assert forwards and all(llm.loop.executor.is_captured(program) for program in forwards)
    assert answers(of(checkpoint, "eager"), prompts()) == right


def check_of(llm: LLM) -> BootCheck:
    loop = llm.loop
    record = Record.of(loop.packer.plan, model="hybrid", platform="cuda", dtype="bfloat16", mode="eager")
    runner = CheckRunner(loop.scheduler.pool, loop.packer, loop.executor)
    return BootCheck(runner, record, loop.executor.backend.facts, loop.grammars)


CHECKS = ("states", "chunked", "prefix hit", "decode", "co-batched", "poisoned", "compaction")


@pytest.fixture(scope="module")
def eager(checkpoint: str) -> LLM:
    return LLM(checkpoint, **OPTIONS | HARD["eager"] | HARD["drafts"])


def test_each_check_at_boot_passes(eager):
    check = check_of(eager)
    check.begin()
    for name in (*CHECKS, "drafts"):
        check.run(name)


def changed(read: Callable[[StepStates], StepStates]) -> Callable[..., Any]:
    plan = CudaRecurrences.plan
    return lambda self, step, states: plan(self, step, read(states))


def after(change: Callable[[Any], object]) -> Callable[..., Tensor]:
    run = CudaRecurrences.run

    def wrong(self: Any, inputs: Any, x: Tensor, weights: Any, states: Any, out: Tensor) -> Tensor:
        found = run(self, inputs, x, weights, states, out)
        change(states)
        return found

    return wrong


FAULTS = {
    "a neighbor's slot": ("decode", "plan", changed(lambda states: states._replace(read=states.read[::-1].copy()))),
    "a narrow state": ("decode", "run", after(lambda states: states.matrix.copy_(states.matrix.bfloat16()))),
    "a late window": ("chunked", "run", after(lambda states: states.window.copy_(states.window.roll(1, 1)))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checks_see_a_fault(fault, eager, monkeypatch):
    """Control: kernels' results are changed between launches, in operations without graphs."""
    name, method, wrong = FAULTS[fault]
    check = check_of(eager)
    check.begin()
    with monkeypatch.context() as patch:
        patch.setattr(CudaRecurrences, method, wrong)
        with pytest.raises(NotInvariant):
            check.run(name)
    for each in eager.loop.executor.attention.states:
        each.matrix.zero_()
        each.window.zero_()
    check.run("co-batched")


def test_states_sleep_with_the_cache(checkpoint, right):
    """Contents of states are lost in a sleep; graphs keep their addresses, and answers their bits."""
    engine = LLM(checkpoint, **OPTIONS | {"enable_sleep_mode": True, "boot_check": "quick"})
    assert answers(engine, prompts()) == right
    engine.sleep(1)
    engine.wake_up()
    assert answers(engine, prompts()) == right


@pytest.mark.parametrize("name", ["fp8", "gptq"])
def test_quantized_layers_give_the_same_bits(name, tmp_path):
    """Layers with states read codes, together and alone, the second time with hits."""
    family, changes = MODELS["qwen3.5"]
    wider = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    save_checkpoint((family, changes | SIZES["qwen3-next"] | wider), tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", KINDS[name], tmp_path / "quantized")
    engine = LLM(str(tmp_path / "quantized"), **OPTIONS)
    alone = [one for each in prompts() for one in answers(engine, [each], skip_reading_prefix_cache=True)]
    for _ in range(2):
        assert answers(engine, prompts()) == alone


def test_memory_of_states_is_counted(llm):
    limits, executor = llm.loop.packer.plan.limits, llm.loop.executor
    states, spec = executor.attention.states, executor.decoder.spec
    held = sum(each.matrix.nbytes + each.window.nbytes for each in states)
    assert held == limits.state_slots * spec.state_bytes(executor.decoder.dtype.itemsize)
    tapes = sum(part.nbytes for each in states for part in each.tape)
    assert tapes == (1 + limits.max_num_seqs) * sum(map(delta.tape_bytes, spec.recurrences)) > 0
