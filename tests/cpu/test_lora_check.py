"""The check at boot and ``preheat verify`` see faults of adapters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from preheat.backends.cpu import experts as cpu_experts
from preheat.backends.cpu import lowrank
from preheat.backends.cpu.lowrank import CpuAdapterRows, Factors, Group
from preheat.errors import CheckFailed, NotInvariant
from preheat.schedule.adapters import AdapterSlotTable
from preheat.schedule.prefix import PrefixCache, chain_root
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.verify.boot import BootCheck
from preheat.verify.check_runner import CheckRunner
from preheat.verify.compare import PathResult
from preheat.verify.drive import Engine
from preheat.verify.paths import PathRunner
from preheat.verify.prompts import Size
from preheat.verify.verification import tight
from preheat.warmup.record import Record
from tests.cpu.checkpoints import MODELS, Model, save_checkpoint
from tests.cpu.test_lora import NO_LLVM

SETTINGS = {
    "max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 160, "block_size": 16, "skip_warmup": True,
    "dtype": "float32", "kv_cache_memory_bytes": 1 << 26, "contiguous_pa": False, "enable_lora": True, "max_loras": 2,
    "max_lora_rank": 24, "execution_mode": "eager",
}  # fmt: skip
"""Settings of engines in which faults of torch's operations are planted."""


EXPERTS: Model = (
    "Qwen2Moe",
    {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
)
LLVM = pytest.param("llvm", marks=NO_LLVM)


@pytest.fixture(scope="module", params=["eager", LLVM])
def loop(request, tmp_path_factory):
    """Boot the bundled model in mode eager, or a model of experts in mode llvm."""
    changes = {"execution_mode": request.param}
    if request.param == "llvm":
        folder = tmp_path_factory.mktemp("checked")
        save_checkpoint(EXPERTS, folder)
        changes["model"] = str(folder)
    return boot_engine(Settings.load(SETTINGS | changes, {}), InlineTransport())


@pytest.fixture
def check(loop):
    plan, backend = loop.packer.plan, loop.executor.backend
    mode = "eager" if loop.executor.decoder.functions is None else "llvm"
    record = Record.of(plan, model="bundled", platform="cpu", dtype="float32", mode=mode)
    yield BootCheck(CheckRunner(loop.scheduler.pool, loop.packer, loop.executor), record, backend.facts, loop.grammars)
    loop.scheduler.check()
    assert loop.scheduler.slots.num_free == SETTINGS["max_num_seqs"]


def test_all_is_well(check, loop):
    assert "adapters" in loop.packer.plan.checks
    check.run("adapters")
    assert check._record.proof.compared >= 8


def touches_all_rows(patch):
    """Plant one more rounding of rows without an adapter beside rows with one."""
    right = lowrank.expand

    def expand(y, shrunk, roots):
        right(y, shrunk, roots)
        if shrunk:
            y.mul_(3).div_(3)

    patch.setattr(lowrank, "expand", expand)


def split_by_rows(patch):
    """Plant a product that cuts its inputs in two if many rows share an adapter."""
    right = lowrank.product

    def product(x, weight, most):
        if len(x) < 38:
            return right(x, weight, most)
        half = x.clone()
        half[:, x.shape[1] // 2 :] = 0
        return right(half, weight, most) + right(x - half, weight, most)

    patch.setattr(lowrank, "product", product)


def by_place(patch):
    """Plant adapter slots with matrices slightly off."""
    right = Factors.write

    def write(self, place, packed):
        right(self, place, packed._replace(scale=packed.scale * (1 + 2**-20 * place)))

    patch.setattr(Factors, "write", write)


def left_behind(patch):
    """Plant a slot that still adds the previous adapter's parts beyond the rank of the next one."""

    def write(self, place, packed):
        before = self._tiles[place]
        right(self, place, packed)
        self._tiles[place] = max(before, self._tiles[place])

    right = Factors.write
    patch.setattr(Factors, "write", write)
    patch.setattr(Factors, "clear", lambda self, place: None)


def neighbours_adapter(patch):
    """Plant a step where all rows have the adapter of the first adapted row."""
    right = CpuAdapterRows.describe

    def describe(self, turn, step, slots):
        right(self, turn, step, slots)
        found = self._described[step]
        if len(found) > 1:
            self._described[step] = [Group(found[0].slot, torch.cat([each.rows for each in found]))]

    patch.setattr(CpuAdapterRows, "describe", describe)


def by_panel_slot(patch):
    """Plant matrices of later slots that are slightly off."""
    from preheat.backends.cpu.llvm.adapters import PanelSlots

    right = PanelSlots.write

    def write(self, slot, packed):
        off = 1 + 2**-16 * slot
        right(self, slot, [each and each._replace(scale=each.scale * off) for each in packed])

    patch.setattr(PanelSlots, "write", write)


def left_in_panels(patch):
    """Plant a slot that keeps the ranks of the adapter before."""
    from preheat.backends.cpu.llvm.adapters import PanelSlots

    right = PanelSlots.write

    def write(self, slot, packed):
        before = self._tiles[slot].copy()
        right(self, slot, packed)
        self._tiles[slot] = np.maximum(before, self._tiles[slot])

    patch.setattr(PanelSlots, "write", write)
    patch.setattr(PanelSlots, "clear", lambda self, slot: None)


def lowest_slot(patch):
    """Plant a step where all adapted rows have the lowest slot among them."""
    from preheat.backends.cpu.llvm.adapters import PanelAdapterRows

    right = PanelAdapterRows.describe

    def describe(self, turn, step, slots):
        lowest = min(slots[slots >= 0], default=-1)
        right(self, turn, step, np.where(slots < 0, slots, lowest).astype(slots.dtype))

    patch.setattr(PanelAdapterRows, "describe", describe)


PLANTS = [
    *(("eager", plant) for plant in (touches_all_rows, split_by_rows, by_place, left_behind, neighbours_adapter)),
    *(pytest.param("llvm", plant, marks=NO_LLVM) for plant in (by_panel_slot, left_in_panels, lowest_slot)),
]


@pytest.mark.parametrize(("loop", "plant"), PLANTS, indirect=["loop"])
def test_only_the_adapters_check_sees_an_adapter_fault(check, monkeypatch, plant):
    plant(monkeypatch)
    for usual in ("later run", "co-batched", "chunked", "decode"):
        check.run(usual)
    with pytest.raises(NotInvariant, match="adapters: a context has other logits"):
        check.run("adapters")


@pytest.mark.parametrize("loop", ["eager"], indirect=True)
def test_adapters_that_change_nothing_are_seen(check, monkeypatch):
    monkeypatch.setattr(Factors, "has", lambda *_: False)
    with pytest.raises(CheckFailed, match="the same logits with different adapters"):
        check.run("adapters")


PATHS = ("adapters, together", "adapters, prefix cache", "adapters, continued", "adapters, chunks, few blocks")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    save_checkpoint(MODELS["llama"], folder)
    return {**SETTINGS, "model": str(folder), "boot_check": "off"}


def verified(settings) -> dict[str, PathResult]:
    engine = Engine(boot_engine, Settings.load(settings, {}))
    paths = PathRunner(Size(0, 1, 4, 0), lambda engine: [])
    results = [*paths.on(engine, "asked", ["adapters"])]
    few = tight(Settings.load(settings, {}), paths.for_few_blocks)
    results += paths.on(Engine(boot_engine, few), "tight", ["adapters"])
    return {result.path: result for result in results}


def test_verify_takes_paths_with_adapters(small):
    results = verified(small)
    assert all(result.first is None for result in results.values())
    assert list(results) == list(PATHS)
    assert int(results["adapters, prefix cache"].note.split()[0].replace(",", "")) > 0


def one_prefix_cache(patch):
    """Plant a prefix cache where an adapter finds the blocks of another adapter."""
    patch.setattr(PrefixCache, "_root", lambda self, sequence: chain_root(sequence.request))


def test_verify_sees_a_prefix_cache_that_knows_no_adapters(monkeypatch, small):
    one_prefix_cache(monkeypatch)
    found = {path for path, result in verified(small).items() if result.first is not None}
    assert found and found <= set(PATHS) and "adapters, prefix cache" in found


def test_verify_sees_an_adapter_slot_that_keeps_its_old_adapter(monkeypatch, small):
    right, seen = AdapterSlotTable.take_loads, dict[AdapterSlotTable, set[int]]()

    def only_the_first(self):
        """Return only the first load of each adapter slot."""
        known = seen.setdefault(self, set())
        return [(place, adapter) for place, adapter in right(self) if place not in known and not known.add(place)]

    monkeypatch.setattr(AdapterSlotTable, "take_loads", only_the_first)
    found = {path for path, result in verified(small).items() if result.first is not None}
    assert found and found <= set(PATHS)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """Write a model with experts as its feed-forward blocks."""
    folder = tmp_path_factory.mktemp("experts")
    save_checkpoint(MODELS["qwen3 moe"], folder)
    return {**SETTINGS, "model": str(folder), "boot_check": "off"}


def down_by_company(patch):
    """Plant a down adapter that is slightly off if rows of another adapter visit the same expert."""
    right = cpu_experts.expand

    def expand(y, shrunk, roots):
        right(y, shrunk, roots)
        for each in shrunk:
            if each.columns == (0, y.shape[1]) and each.slot and len(each.rows) < len(y):
                y[each.rows] *= 1 + 2**-20

    patch.setattr(cpu_experts, "expand", expand)


def test_the_check_adapts_experts_and_finds_their_faults(experts, monkeypatch):
    checked = {name: value for name, value in experts.items() if name != "boot_check"}
    loop = boot_engine(Settings.load(checked, {}), InlineTransport())
    modules = loop.executor.adapters.modules
    assert sum(".experts." in name for name in modules) == 3 * 3 * 7
    assert loop.executor.adapters.bytes > sum(24 * 4 * 2 * sum(shape) for shape in modules.values())
    record = Record.of(loop.packer.plan, model="experts", platform="cpu", dtype="float32", mode="eager")
    runner = CheckRunner(loop.scheduler.pool, loop.packer, loop.executor)
    check = BootCheck(runner, record, loop.executor.backend.facts, loop.grammars)
    check.run("adapters")
    down_by_company(monkeypatch)
    with pytest.raises(NotInvariant, match="adapters: a context has other logits"):
        check.run("adapters")


def test_verify_takes_paths_with_adapters_of_experts(experts, monkeypatch):
    assert all(result.first is None for result in verified(experts).values())
    down_by_company(monkeypatch)
    found = {path for path, result in verified(experts).items() if result.first is not None}
    assert found and found <= set(PATHS)
