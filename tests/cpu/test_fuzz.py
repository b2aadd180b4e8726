"""``preheat verify --fuzz``: a minute of it, and that it finds what is planted and says how to see it again."""

from __future__ import annotations

import random
import re

from preheat.cli import main
from preheat.model.families import read_spec
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.fuzz import Fuzz
from preheat.verify.random_models import HEAD_RATIOS, random_config
from tests.cpu.planted import split_by_batch

SECONDS = 50
FIRST_SEED = 100


def test_random_requests_in_random_models_have_the_bits_that_they_have_alone():
    rounds = list(Fuzz(boot_engine, Settings.load({"device": "cpu"}), True, FIRST_SEED).results(SECONDS))
    assert [f"{result.path}: {result.first}, {result.note}" for result in rounds if result.first] == []
    assert [result.path for result in rounds] == [f"seed {FIRST_SEED + number}" for number in range(len(rounds))]


def test_a_planted_kernel_is_found_and_its_seed_finds_it_again(monkeypatch, capsys):
    split_by_batch(monkeypatch)
    flags = ["verify", "--device", "cpu", "--log-level", "warning"]
    assert main([*flags, "--fuzz", "0", "--random-models", "--fuzz-seed", "3"]) == 1
    out = capsys.readouterr().out
    (again,) = re.findall(r"seed 3 again: preheat (.*), and the other flags", out)
    assert main([*again.split(), *flags[1:]]) == 1
    assert capsys.readouterr().out == out


def test_its_flags_belong_together(capsys):
    assert main(["verify", "--random-models"]) == 2
    assert main(["verify", "--fuzz", "1", "--reduced"]) == 2


def test_random_models_are_models():
    configs = [random_config(random.Random(seed)) for seed in range(400)]
    specs = [read_spec(config) for config in configs]
    assert {spec.layers[0].attention.num_heads // spec.num_kv_heads for spec in specs} == set(HEAD_RATIOS)
    assert {window for spec in specs for window in spec.layer_windows} > {None}
