"""Adapters in execution mode llvm: right against PEFT, and one answer in any company and any slot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import Tensor

from preheat.backends.base import LayerContext, LayerWeights
from preheat.errors import NotInvariant
from preheat.ops.matmul import LowRankPair
from preheat.ops.values import LowRank
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.verify.boot import BootCheck
from preheat.verify.check_runner import CheckRunner
from preheat.verify.drive import in_groups
from preheat.warmup.record import Record
from tests.cpu.checkpoints import MODELS, Model, save_checkpoint
from tests.cpu.test_lora import (
    ADAPTERS,
    NAMES,
    alone,
    as_peft_says,
    counted_loads,
    engine,
    prompts,
    pytestmark,  # noqa: F401 - warnings of PEFT
    save_adapter,
)
from tests.cpu.test_lora_check import SETTINGS as CHECKED
from tests.layers import value_of

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from llvmlite import ir

from preheat.backends.cpu.llvm import functions, job, machine, targets, team, terms
from preheat.backends.cpu.llvm.adapters import PanelAdapterRows, PanelAdapters, PanelSlots
from preheat.backends.cpu.llvm.kinds import COUNTERS, LAYER_FRAME
from preheat.backends.cpu.llvm.layer import PanelLayer
from preheat.backends.cpu.llvm.memory import zeros

LLVM = {"execution_mode": "llvm", "num_threads": 2, "boot_check": "off"}
WITHOUT = {**LLVM, "enable_lora": False, "max_loras": 1, "max_lora_rank": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made: Path = tmp_path_factory.mktemp("lora")
    save_checkpoint(MODELS["llama"], made / "base")
    for number, (name, config) in enumerate(ADAPTERS.items()):
        save_adapter(made / "base", made / name, config, seed=number)
    return made


@pytest.fixture(scope="module")
def shared(folder):
    return engine(folder, **LLVM)


def merged(folder: Path, name: str) -> torch.nn.Module:
    """Return the model with an adapter merged into its weights, in float64."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager").double()
    return peft.PeftModel.from_pretrained(base, folder / name).double().merge_and_unload().eval()


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_equal_a_merge_in_float64(shared, folder, name):
    (prompt,) = prompts(name)
    with shared.keeping_logits() as kept:
        shared.run([prompt])
    (answer,) = shared.answers
    tokens = torch.tensor([prompt.tokens + answer.tokens[:-1]])
    with torch.inference_mode():
        expected = merged(folder, name)(tokens).logits[0, len(prompt.tokens) - 1 :]
    found = torch.stack(kept[0]).double()
    assert float((found - expected).norm() / expected.norm()) <= 1e-5


def test_rows_of_several_adapters_and_of_none_have_the_bits_they_have_alone(shared, folder):
    asked = prompts(*NAMES)
    seen = alone(shared, asked)
    assert shared.run(asked) == seen
    shared.forget_prefixes()
    assert shared.run(asked, in_groups([3, 1, 4])) == seen
    assert shared.run(asked) == seen  # from the prefix cache
    plain = [replace(prompt, lora_name="") for prompt in asked]
    expected = engine(folder, [], **WITHOUT).run(plain)
    beside = shared.run([*asked[::2], *plain[1::2], *asked[1::2]])
    assert beside[4:8] == expected[1::2]
    assert shared.run(plain) == expected


def test_bits_depend_neither_on_the_slot_nor_on_the_largest_rank_nor_on_eviction(shared, folder):
    asked = prompts("all", "qv", "rslora", "all", "qv")
    expected = alone(shared, asked)
    other = engine(folder, ["rslora", "qv", "all"], max_loras=1, max_lora_rank=70, max_cpu_loras=3, **LLVM)
    loaded = counted_loads(other)
    assert other.run(asked) == expected
    assert len(loaded) >= 3 and {place for place, _ in loaded} == {0}


EXPERTS: Model = (
    "Qwen2Moe",
    {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
)


def test_adapters_of_experts_have_the_logits_of_peft_and_change_only_their_own_rows(tmp_path):
    save_checkpoint(EXPERTS, tmp_path / "base")
    stacked = ["experts.gate_up_proj", "experts.down_proj"]
    config = {"r": 5, "lora_alpha": 9, "target_modules": ["q_proj", "shared_expert.down_proj"]}
    save_adapter(tmp_path / "base", tmp_path / "own", config | {"target_parameters": stacked}, seed=1)
    save_adapter(tmp_path / "base", tmp_path / "qv", ADAPTERS["qv"], seed=2)
    own = engine(tmp_path, ["own", "qv"], **LLVM)
    as_peft_says(own, tmp_path)
    asked = prompts("own", "", "qv", "own", "", "own")
    seen = alone(own, asked)
    assert own.run(asked) == seen
    plain = [replace(prompt, lora_name="") for prompt in asked]
    expected = engine(tmp_path, [], **WITHOUT).run(plain)
    assert seen[1] == expected[1] and seen[4] == expected[4] and seen[0] != expected[0]
    other = engine(tmp_path, ["qv", "own"], max_loras=1, max_lora_rank=70, **LLVM)
    assert other.run(asked) == seen


# --- one product with adapters ---

INPUTS, OUTPUTS, RANK = 1104, (72, 40), 23


class Adapted:
    """A product with adapters as a function; ``dtype`` is the model's."""

    def __init__(self, dtype: torch.dtype = torch.float32, slots: int = 3) -> None:
        draw = torch.Generator().manual_seed(5)
        weight = torch.randn(sum(OUTPUTS), INPUTS, generator=draw).to(dtype) / 30
        term = LowRank(OUTPUTS, slots, 40, str(dtype).removeprefix("torch."))
        self.rows = PanelAdapters().rows(64, slots)
        value = value_of(weight, terms=(term,))
        self.layer = PanelLayer(value, LayerWeights(weight), LayerContext(rows=self.rows))
        module = ir.Module("test")
        module.triple = targets.here().triple
        functions.alone(module, "alone", self.layer.how)
        job.jobs(module, COUNTERS)
        code = machine.Code(machine.compile_code(str(module), None)[0])
        self.team, self.address = team.Team(code, 2), code.address("alone")
        self.shrunk = zeros(64 * self.layer.how.shrunk, np.float32)
        self.team.set("shrunk", self.shrunk.ctypes.data)
        self.frame = zeros(len(LAYER_FRAME), np.int64)
        for name, address in self.layer.fields("qkv"):
            self.frame[LAYER_FRAME[name]] = address

    def __call__(self, x: Tensor, slots: list[int]) -> Tensor:
        self.rows.describe(0, "tokens", np.array(slots, np.int32))
        self.rows.use("tokens")
        out = torch.empty(len(x), sum(OUTPUTS))
        self.team.set("adapted", self.rows.adapted)
        self.team.set("slots", self.rows.address)
        self.team.point("x", x)
        self.team.point("attended", out)
        self.team.run(self.address, self.frame.ctypes.data, len(x))
        return out


def pairs(rank: int, dtype: torch.dtype, seed: int) -> dict[int, LowRankPair]:
    draw = torch.Generator().manual_seed(seed)
    return {
        part: LowRankPair(
            torch.randn(rank, INPUTS, generator=draw).to(dtype) / 30,
            torch.randn(outputs, rank, generator=draw).to(dtype),
            0.37,
        )
        for part, outputs in enumerate(OUTPUTS)
    }


def put(made: Adapted, slot: int, given: dict[int, LowRankPair]) -> None:
    assert made.layer.slots is not None
    made.layer.slots.write(slot, made.layer.slots.pack(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_term_follows_the_contract(dtype):
    """The scaled sums of a model and adapters in bfloat16 are rounded to it; other steps are float32."""
    made, given = Adapted(dtype), pairs(RANK, dtype, seed=1)
    put(made, 1, given)
    x = torch.randn(19, INPUTS)
    more = made(x, [1] * 19).double() - made(x, [-1] * 19)
    scaled = [(x.double() @ given[part].a.double().T * 0.37) for part in (0, 1)]
    scaled = [each.float().to(dtype).double() for each in scaled]
    exact = torch.cat([each @ given[part].b.double().T for part, each in enumerate(scaled)], 1)
    flips = 1e-2 if dtype == torch.bfloat16 else 1e-5  # few sums lie at the middle of two bfloat16 numbers
    assert float((more - exact).abs().max()) < flips
    assert float((more - exact).abs().median()) < 1e-6


def test_rows_without_an_adapter_and_parts_without_matrices_are_left_alone():
    made = Adapted()
    put(made, 0, {0: pairs(RANK, torch.float32, seed=1)[0]})
    x = torch.randn(9, INPUTS)
    plain, found = made(x, [-1] * 9), made(x, [0, -1, 1] * 3)
    assert torch.equal(found[1::3], plain[1::3])
    assert torch.equal(found[2::3], plain[2::3])  # an empty slot
    assert torch.equal(found[:, OUTPUTS[0] :], plain[:, OUTPUTS[0] :])
    assert bool((found[::3, : OUTPUTS[0]] != plain[::3, : OUTPUTS[0]]).all())
    assert made.layer.slots is not None
    made.layer.slots.clear(0)
    assert torch.equal(made(x, [0, -1, 1] * 3), plain)


@pytest.mark.parametrize("target", ["", "avx2", "sse"])
def test_a_rows_bits_depend_on_the_row_and_its_adapter_alone(target, monkeypatch):
    x = torch.randn(13, INPUTS, generator=torch.Generator().manual_seed(2))
    found = list[Tensor]()
    for slots, slot, where in ((3, 1, targets.here()), (5, 4, targets.TARGETS.get(target, targets.here()))):
        monkeypatch.setattr(targets, "here", lambda where=where: where)
        made = Adapted(slots=slots)
        for other in range(slots):
            put(made, other, pairs(30, torch.float32, seed=20 + other))
        put(made, slot, pairs(RANK, torch.float32, seed=1))
        found.append(made(x, [slot] * 13))
        found.append(torch.cat([made(row[None], [slot]) for row in x]))
        found.append(made(x.repeat_interleave(2, 0), [slot, 0] * 13)[::2])
    assert all(torch.equal(each, found[0]) for each in found)


# --- what is planted is seen ---


def test_a_term_of_the_neighboring_slot_is_seen(shared, folder, monkeypatch):
    asked = prompts(*NAMES)
    right = terms.pair
    monkeypatch.setattr(terms, "pair", lambda e, how, slot, part: right(e, how, e.rem(e.add(slot, 1), 3), part))
    wrong = engine(folder, **LLVM)
    assert alone(wrong, asked) != wrong.run(asked)


def test_a_term_that_follows_the_number_of_rows_is_seen(monkeypatch):
    right = terms._sums

    def cut(e, inputs, x, first):
        found = right(e, inputs, x, first)
        return e.b.select(e.b.icmp_signed("==", e.rows, e.i(1)), found, e.b.fmul(found, e.v(1 + 2**-20)))

    monkeypatch.setattr(terms, "_sums", cut)
    with pytest.raises(AssertionError):
        test_a_rows_bits_depend_on_the_row_and_its_adapter_alone("", monkeypatch)


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Boot an engine of experts with adapters, checked as a boot is."""
    folder = tmp_path_factory.mktemp("checked")
    save_checkpoint(EXPERTS, folder)
    settings = CHECKED | {"model": str(folder), "execution_mode": "llvm"}
    loop = boot_engine(Settings.load(settings, {}), InlineTransport())
    record = Record.of(loop.packer.plan, model="experts", platform="cpu", dtype="float32", mode="llvm")
    runner = CheckRunner(loop.scheduler.pool, loop.packer, loop.executor)
    return BootCheck(runner, record, loop.executor.backend.facts, loop.grammars)


def by_place(patch):
    """Plant matrices of later slots that are slightly off."""
    right = PanelSlots.write

    def write(self, slot, packed):
        off = 1 + 2**-16 * slot
        right(self, slot, [each and each._replace(scale=each.scale * off) for each in packed])

    patch.setattr(PanelSlots, "write", write)


def left_behind(patch):
    """Plant a slot that keeps the ranks of the adapter before."""
    right = PanelSlots.write

    def write(self, slot, packed):
        before = self._tiles[slot].copy()
        right(self, slot, packed)
        self._tiles[slot] = np.maximum(before, self._tiles[slot])

    patch.setattr(PanelSlots, "write", write)
    patch.setattr(PanelSlots, "clear", lambda self, slot: None)


def neighbors_adapter(patch):
    """Plant a step where all adapted rows have the lowest slot among them."""
    right = PanelAdapterRows.describe

    def describe(self, turn, step, slots):
        lowest = min(slots[slots >= 0], default=-1)
        right(self, turn, step, np.where(slots < 0, slots, lowest).astype(slots.dtype))

    patch.setattr(PanelAdapterRows, "describe", describe)


def test_all_is_well_at_boot(checked):
    checked.run("adapters")


@pytest.mark.parametrize("plant", [by_place, left_behind, neighbors_adapter])
def test_the_check_at_boot_sees_a_fault_of_adapters_alone(checked, monkeypatch, plant):
    plant(monkeypatch)
    for usual in ("later run", "co-batched", "chunked", "decode"):
        checked.run(usual)
    with pytest.raises(NotInvariant, match="adapters: a context has other logits"):
        checked.run("adapters")
