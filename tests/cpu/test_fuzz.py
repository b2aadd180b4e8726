"""``preheat verify --fuzz``: a few rounds of it, and a planted fault.

It finds the fault, and tells a way to see it again.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cpu.llvm.attention import LlvmAttention
from preheat.backends.cuda.facts import FACTS as CUDA
from preheat.cli.main import main
from preheat.errors import PreheatError
from preheat.model.families import read_spec
from preheat.ops.values import Cache, Refused
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.fuzz import ENCODED, Fuzz, for_whole_texts, possible, random_limits
from preheat.verify.random_engines import random_features
from preheat.verify.random_models import (
    ENCODERS,
    FAMILIES,
    HEAD_RATIOS,
    WITH_SIZES,
    random_config,
    random_encoder,
)
from tests.cpu.planted import split_by_batch
from tests.cpu.test_encoders import whole_step

ROUNDS, FIRST_SEED = 3, 1
"""The same rounds on every machine. The search for new ones is the command itself."""


def test_random_requests_in_random_models_have_the_bits_that_they_have_alone():
    fuzz = Fuzz(boot_engine, Settings.load({"device": "cpu"}), True, FIRST_SEED)
    rounds = list(islice(fuzz.results(3600.0), ROUNDS))
    differing = [result for result in rounds if result.identical < result.prompts]
    assert [f"{result.path}: {result.first}, {result.note}" for result in differing] == []
    assert [result.path for result in rounds] == [f"seed {FIRST_SEED + number}" for number in range(ROUNDS)]


@pytest.mark.usefixtures("eager_here")
def test_a_planted_kernel_is_found_and_its_seed_finds_it_again(monkeypatch, capsys):
    split_by_batch(monkeypatch)
    flags = ["verify", "--device", "cpu", "--log-level", "warning"]
    assert main([*flags, "--fuzz", "0", "--random-models", "--fuzz-seed", "1"]) == 1
    out = capsys.readouterr().out
    (again,) = re.findall(r"seed 1 again: preheat (.*), and the other flags", out)
    assert main([*again.split(), *flags[1:]]) == 1
    assert capsys.readouterr().out == out


def test_a_round_whose_engine_fails_is_a_failed_round_with_its_seed():
    def failing(settings, transport, *rest):
        raise PreheatError("out of memory")

    rounds = list(Fuzz(failing, Settings.load({"device": "cpu"}), True, 7).results(3600.0))
    assert [(each.path, each.identical < each.prompts, each.note) for each in rounds] == [
        (f"seed {seed}", True, "an engine failed: out of memory") for seed in (7, 8, 9)
    ]


def test_options_that_a_device_rejects_are_not_drawn(monkeypatch):
    drawn = {"contiguous_pa": True, "tensor_parallel_size": 2, "max_num_seqs": 3}
    assert possible(drawn, CPU) == drawn
    for cards, ranks in ((1, {}), (2, {"tensor_parallel_size": 2})):
        monkeypatch.setattr("torch.accelerator.device_count", lambda cards=cards: cards)
        assert possible(drawn, CUDA) == {"max_num_seqs": 3, **ranks}


def test_models_that_a_device_cannot_run_are_not_drawn(monkeypatch, tmp_path):
    backend = CpuBackend()
    monkeypatch.setattr(backend, "facts", replace(CUDA, no_layer_ends="nobody has written them"))
    monkeypatch.setattr("preheat.verify.fuzz.pick_backend", lambda device: backend)
    refused = {WITH_SIZES}
    seeds = [seed for seed in range(90) if random_config(random.Random(seed))["architectures"][0] in refused]
    for seed in seeds:
        fuzz = Fuzz(boot_engine, Settings.load({"device": "cpu"}), True)
        *_, shown = fuzz._model(tmp_path, random.Random(seed), seed)
        assert shown[0] not in refused
    assert len(seeds) > 3


def test_caches_that_a_device_does_not_have_are_not_drawn(monkeypatch, tmp_path):
    """The model alone is no obstacle; with a cache of one byte it would be."""
    drawn = [seed for seed in range(40) if "kv_cache_dtype" in _both(tmp_path / f"all {seed}", seed)]
    assert drawn
    right = CpuBackend.supports

    def supports(self, value):
        narrow = isinstance(value, Cache) and value.dtype.startswith("fp8")
        return Refused("no such cache") if narrow else right(self, value)

    monkeypatch.setattr(CpuBackend, "supports", supports)
    assert not any("kv_cache_dtype" in _both(tmp_path / f"few {seed}", seed) for seed in drawn)


def _both(folder: Path, seed: int) -> dict[str, object]:
    """Return what a round draws for both of its engines."""
    folder.mkdir()
    _, features, _ = Fuzz(boot_engine, Settings.load({"device": "cpu"}), True)._model(folder, random.Random(seed), seed)
    assert features is not None
    return features.both


def test_its_flags_belong_together(capsys):
    assert main(["verify", "--random-models"]) == 2
    assert main(["verify", "--fuzz", "1", "--reduced"]) == 2


def test_random_models_are_models():
    configs = [random_config(random.Random(seed)) for seed in range(600)]
    specs = [read_spec(config) for config in configs]
    first = [spec.attentions[0] for spec in specs]
    assert {each.num_heads // each.num_kv_heads for each in first if each.latent is None} == set(HEAD_RATIOS)
    assert {window for spec in specs for window in spec.layer_windows} > {None}
    assert {config["architectures"][0] for config in configs} == set(FAMILIES)
    assert {"quantization_config" in config for config in configs} == {True, False}


def test_random_encoders_are_encoders(tmp_path):
    configs = [random_encoder(random.Random(seed)) for seed in range(200)]
    assert all(read_spec(config).encodes for config in configs)
    names = {config["architectures"][0] for config in configs}
    assert names >= {f"{family}{head}" for family in ENCODERS for head in HEADS if (family, head) != NO_HEAD}
    features = [random_features(random.Random(seed), tmp_path, config) for seed, config in enumerate(configs)]
    kinds = {each.both.get("pooler_config", {}).get("pooling_type") for each in features}
    assert kinds == {None, "CLS", "LAST", "MEAN", "MAX", "WEIGHTEDMEAN"}
    assert any(random.Random(f"embeds {FIRST_SEED + number}").random() < ENCODED for number in range(ROUNDS))


def test_the_longest_text_of_an_encoder_has_blocks():
    """A block is never used, and the token behind a text of all blocks needs another one."""
    for seed in range(99):
        load = for_whole_texts(random_limits(random.Random(seed), 320))
        assert (load["num_gpu_blocks_override"] - 1) * load["block_size"] > 320 <= load["max_num_batched_tokens"]
    few = [random_limits(random.Random(seed), 320) for seed in range(99)]
    assert any((load["num_gpu_blocks_override"] - 1) * load["block_size"] <= 320 for load in few)


HEADS, NO_HEAD = ("Model", "ForSequenceClassification"), ("NomicBert", "ForSequenceClassification")


def test_an_encoder_whose_texts_see_others_is_found(monkeypatch):
    """A planted end of a row that depends on the rows beside it is found in the seed of an encoder."""
    seed = next(seed for seed in range(99) if random.Random(f"embeds {seed}").random() < ENCODED)
    monkeypatch.setattr(LlvmAttention, "plan", whole_step)
    (found,) = Fuzz(boot_engine, Settings.load({"device": "cpu"}), True, seed).results(0.0)
    assert found.identical < found.prompts


def test_the_fuzzer_draws_every_engine_feature(tmp_path):
    both, loaded, drafting = Counter[str](), Counter[str](), Counter[str]()
    for seed in range(400):
        draw = random.Random(seed)
        features = random_features(draw, tmp_path, random_config(draw))
        both.update(features.both.keys())
        loaded.update(features.loaded.keys())
        drafts = features.loaded.get("speculative_config", {})
        drafting.update([f"{drafts.get('method')} {Path(drafts.get('model', '')).name}"])
    adapters, ranks = {"enable_lora", "max_loras", "max_lora_rank"}, {"tp_invariant", "enable_expert_parallel"}
    assert set(both) == {"quantization", "kv_cache_dtype", *adapters, *ranks}
    states = {"mamba_cache_mode", "max_kept_states"}
    assert set(loaded) == {"speculative_config", "kv_offloading_size", "tensor_parallel_size", *states}
    assert set(drafting) == {"None ", "ngram ", "draft_model draft", "draft_model model"}
