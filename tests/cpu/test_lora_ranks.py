"""Adapters on ranks that share the layers.

One, two and four ranks give the same bits, and PEFT's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat.backends import layer as layer_module
from preheat.backends.base.collective import Collective
from preheat.backends.base.layers import LayerContext
from preheat.backends.cpu import lowrank
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.lowrank import CpuAdapters, LinearFactors
from preheat.core import LoadAdapter, UnloadAdapter
from preheat.errors import SettingsError
from preheat.lora.adapter import read_adapter
from preheat.model.adapters import ModelAdapterSlots, check_tiles
from preheat.model.decoder import Decoder
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.loader import load_weights
from preheat.model.shard import shard
from preheat.model.values import AdapterLimits
from preheat.ops.matmul import LowRankPair, add_delta, delta
from preheat.ops.proof import noise
from preheat.ops.values import LowRank
from preheat.settings import Settings
from preheat.verify.drive import Engine
from tests import layers
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.test_lora import ADAPTERS, ALL, STACKED, alone, engine, prompts, reference, save_adapter, send
from tests.cpu.test_model_families import logits_of, random_tokens
from tests.cpu.test_tensor_parallel import on_ranks, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning"),  # but parameters
]
TOKENS, MAX_RANK = 24, 70  # five tiles of ranks
MIXED = np.array([0, 1, -1] * (TOKENS // 3), np.int32)
TARGETS: dict[str, list[str]] = {
    "llama": [*ALL, "lm_head"],
    "llama with biases": ALL,
    "llama tied": ALL,
    "phi3": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"],
    "qwen2 moe": ["q_proj", "o_proj", "shared_expert.down_proj"],
}


def logits_on(
    collective: Collective, model: Path, adapters: list[Path], slots: np.ndarray, divided: bool = False
) -> Tensor:
    """Return the logits of rows of all ``adapters`` and of rows without an adapter.

    With ``divided``, all first matrices of the adapters are split over the ranks; otherwise only the first matrices of
    row-split layers.
    """
    spec = read_spec(read_config(model))
    mine = shard(spec, collective.rank, collective.world)
    room = AdapterLimits(len(adapters), MAX_RANK, "float32", divided)
    adapter_slots = ModelAdapterSlots(CpuAdapters().rows(TOKENS, len(adapters)), room)
    weights = load_weights(spec, model, torch.float32, CpuBackend(), collective=collective, adapter_slots=adapter_slots)
    for slot, folder in enumerate(adapters):
        adapter_slots.load(
            slot, adapter_slots.pack(read_adapter("own", str(folder), mine, MAX_RANK, torch.float32).factors)
        )
    adapter_slots.describe(0, "tokens", slots)
    adapter_slots.use("tokens")
    return logits_of(Decoder(mine, weights, 256), random_tokens(TOKENS))


def on_sizes(model: Path, adapters: list[Path], folder: Path, slots: np.ndarray) -> list[Tensor]:
    found = []
    for world in (1, 2, 4):
        ranks = on_ranks(world, folder / str(world), lambda c: logits_on(c, model, adapters, slots))
        assert same(ranks)
        found.append(ranks[0])
    return found


@pytest.fixture(scope="module", params=TARGETS)
def saved(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    save_checkpoint(MODELS[request.param], folder / "base")
    for number, rank in enumerate((5, 69)):
        config = {"r": rank, "lora_alpha": 9, "target_modules": TARGETS[request.param]}
        save_adapter(folder / "base", folder / str(number), config, seed=number)
    return folder


def test_bits_do_not_depend_on_the_number_of_ranks(saved, tmp_path):
    adapters = [saved / "0", saved / "1"]
    mixed = on_sizes(saved / "base", adapters, tmp_path / "mixed", MIXED)
    assert same(mixed)
    none = on_sizes(saved / "base", adapters, tmp_path / "none", np.full(TOKENS, -1, np.int32))
    assert same(none) and not torch.equal(none[0], mixed[0])
    assert same([mixed[0], *fully_sharded(saved, tmp_path)])


def fully_sharded(saved: Path, folder: Path) -> list[Tensor]:
    adapters, found = [saved / "0", saved / "1"], []
    for world in (2, 4):
        own = folder / f"fully {world}"
        found += on_ranks(world, own, lambda c: logits_on(c, saved / "base", adapters, MIXED, divided=True))
    return found


def test_tiles_in_the_order_of_ranks_have_other_bits(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_module, "in_order", lambda shrunk: shrunk.flatten(0, 1))
    (one,) = on_ranks(1, tmp_path / "1", lambda c: logits_on(c, saved / "base", [saved / "0", saved / "1"], MIXED))
    assert not any(torch.equal(each, one) for each in fully_sharded(saved, tmp_path))


def test_a_rank_holds_its_tiles_of_the_first_matrix_alone(saved, tmp_path):
    def held(collective: Collective, divided: bool) -> Tensor:
        spec = read_spec(read_config(saved / "base"))
        adapter_slots = ModelAdapterSlots(CpuAdapters().rows(TOKENS, 1), AdapterLimits(1, 64, "float32", divided))
        load_weights(
            spec, saved / "base", torch.float32, CpuBackend(), collective=collective, adapter_slots=adapter_slots
        )
        return torch.tensor(adapter_slots.bytes)

    for world in (2, 4):
        whole, part = (on_ranks(world, tmp_path / f"{world} {d}", lambda c, d=d: held(c, d)) for d in (False, True))
        assert all(mine < all_of_it for mine, all_of_it in zip(part, whole, strict=True))


def test_logits_of_two_ranks_equal_peft(saved, tmp_path):
    whose = np.zeros(TOKENS, np.int32)
    found = on_ranks(2, tmp_path / "ranks", lambda c: logits_on(c, saved / "base", [saved / "1"], whose))
    with torch.inference_mode():
        expected = reference(saved / "base", saved / "1")(random_tokens(TOKENS)[None]).logits[0]
    torch.testing.assert_close(found[0], expected, atol=5e-4, rtol=1e-4)


INPUTS, OUTPUTS, ROWS = 4 * 1100, 40, 19


def added(collective: Collective) -> Tensor:
    """Return the output of a layer with K splits of several parts.

    There are rows with and without an adapter.
    """
    part = INPUTS // collective.world
    mine = slice(collective.rank * part, (collective.rank + 1) * part)
    weight, bias, a = noise(OUTPUTS, INPUTS) / 60, noise(OUTPUTS, seed=4), noise(23, INPUTS, seed=1) / 60
    rows, term = CpuAdapters().rows(32, 2), LowRank((OUTPUTS,), 2, 40, "float32", shared="inputs")
    layer = layers.linear(
        CpuBackend(), weight[:, mine].contiguous(), bias, order=layers.splits(4 // collective.world, collective.rank),
        context=LayerContext(collective, rows), terms=(term,),
    )  # fmt: skip
    assert layer.slots is not None
    layer.slots.write(1, layer.slots.pack({0: LowRankPair(a[:, mine], noise(OUTPUTS, 23, seed=2), 0.37)}))
    rows.describe(0, "tokens", np.array([1, -1] * ROWS, np.int32)[:ROWS])
    rows.use("tokens")
    return layer(noise(ROWS, INPUTS, seed=5)[:, mine].contiguous())


def on_worlds(folder: Path) -> list[Tensor]:
    return [on_ranks(world, folder / str(world), added)[0] for world in (1, 2, 4)]


def test_the_added_term_equals_the_reference(tmp_path):
    found = on_worlds(tmp_path)
    assert same(found)
    x, weight = noise(ROWS, INPUTS, seed=5), noise(OUTPUTS, INPUTS) / 60
    a, b = noise(23, INPUTS, seed=1) / 60, noise(OUTPUTS, 23, seed=2)
    base = x @ weight.T + noise(OUTPUTS, seed=4)
    torch.testing.assert_close(
        found[0][::2], add_delta(base, delta(x, LowRankPair(a, b, 0.37), 4))[::2], atol=1e-4, rtol=1e-5
    )
    torch.testing.assert_close(found[0][1::2], base[1::2], atol=1e-4, rtol=1e-5)


def in_a_row(patch):
    """Plant a rank that adds its K splits from the first to the last."""
    patch.setattr(lowrank, "tree_sum", lambda sums: sum(sums[1:], sums[0]))


def parts_of_the_rank(patch):
    """Plant parts cut from a rank's first input on, instead of each K split's first input."""
    right = LinearFactors.__init__

    def made(self: LinearFactors, *sizes: int, **more: Any) -> None:
        right(self, *sizes, **{**more, "k_splits": 1})

    patch.setattr(LinearFactors, "__init__", made)


@pytest.mark.parametrize("plant", [in_a_row, parts_of_the_rank])
def test_controls(plant, tmp_path, monkeypatch):
    plant(monkeypatch)
    assert not same(on_worlds(tmp_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    family, sizes = MODELS["qwen3 moe with dense layers"]
    save_checkpoint((family, {**sizes, "num_hidden_layers": 2}), made / "base")
    config = {**ADAPTERS["all"], "target_parameters": STACKED}
    for number, (name, own) in enumerate({"all": config, "qv": ADAPTERS["qv"]}.items()):
        save_adapter(made / "base", made / name, own, seed=number)
    return made


def test_ranks_that_would_have_no_tile_are_refused_before_anything_is_loaded():
    own = Settings(
        model="bundled", enable_lora=True, fully_sharded_loras=True, tensor_parallel_size=4, max_lora_rank=63
    )
    with pytest.raises(SettingsError, match="to 64 or more"):
        check_tiles(own)
    check_tiles(replace(own, max_lora_rank=64))


SHARED: dict[str, Any] = {
    "tp_invariant": True, "num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64,
}  # fmt: skip


@contextmanager
def ranks_of(folder: Path, size: int, **more: Any) -> Iterator[Engine]:
    own = engine(
        folder, [], **SHARED, max_loras=1, max_cpu_loras=1, max_lora_rank=32, tensor_parallel_size=size,
        boot_check="quick", skip_warmup=bool(more), determinism_warmup_iterations=0, **more,
    )  # fmt: skip
    try:
        yield own
    finally:
        if size > 1:
            own.loop.executor.ranks.close()


def test_engines_of_one_and_two_ranks_load_and_unload_alike(folder):
    """One and two ranks give equal answers and digests; the sums of four ranks are compared above, in threads.

    Two adapters take turns in one adapter slot. The digests are of random adapters in all modules. With split first
    matrices, experts are not adapted.
    """
    asked, seen, digests = prompts("all", "", "qv", "all", "qv"), [], []
    for size in (1, 2):
        with ranks_of(folder, size) as own:
            (missing,) = send(own, LoadAdapter("x", str(folder / "nothing")))
            assert missing.error and missing.error.name == "AdapterError"
            assert send(own, LoadAdapter("all", str(folder / "all")))[0].error is None
            assert send(own, LoadAdapter("qv", str(folder / "qv")))[0].error is None
            seen.append(alone(own, asked))
            assert own.run(asked) == seen[-1]
            assert send(own, UnloadAdapter("qv"))[0].error is None
            digests.append(own.loop.listener.record.proof.digest)
    assert all(each == seen[0] for each in seen)
    assert len(set(digests)) == 1
    with ranks_of(folder, 2, fully_sharded_loras=True) as own:
        (refused,) = send(own, LoadAdapter("all", str(folder / "all")))
        assert refused.error and "experts are not served with --fully-sharded-loras" in refused.error.message
        assert send(own, LoadAdapter("qv", str(folder / "qv")))[0].error is None
        assert alone(own, asked[1:3]) == seen[0][1:3]
    plain = engine(folder, [], **SHARED, enable_lora=False, max_loras=1, max_lora_rank=16)
    assert alone(plain, asked[1:2]) == seen[0][1:2]
