"""``preheat verify`` on the real engine: all paths are equal, and every planted fault is found."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import islice

import pytest

from preheat.backends.cpu.sampler import CpuSampler
from preheat.cli.main import main
from preheat.errors import InvalidRequest
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify import command
from preheat.verify.compare import PathResult
from preheat.verify.paths import PATHS as ROWS
from preheat.verify.paths import group_sizes
from preheat.verify.prompt_sets import MAKERS
from preheat.verify.prompts import FULL, REDUCED, Size, make_prompts
from preheat.verify.verification import Verification
from tests.cpu.planted import PLANTS

pytestmark = pytest.mark.usefixtures("two_layers")

SMALL = Size(prompts=14, runs=2, outputs=20, longest=300)
TINY = Size(prompts=6, runs=2, outputs=6, longest=60)
OPTIONS = {"max_num_seqs": 24, "max_num_batched_tokens": 2048, "block_size": 32}
FEATURES = [
    "answers as prompts",
    "served, by the contract",
    "continued",
    "moved while served",
    "penalties, long prompts",
    "long answers as prompts",
    "cache salts",
    "min_tokens",
    "logprobs of given tokens",
    "beam search",
    "penalties, continued",
    "grammars",
    "grammars, continued",
    "nearly equal prompts",
    "prompts given up",
    "blocks moved at once",
]
TIGHT = [
    "chunks, few blocks",
    "penalties, few blocks",
    "prompt logprobs, chunks",
    "continued, few blocks",
    "grammars, few blocks",
    "penalties, interrupted",
    "grammars, interrupted",
]
PATHS = ["later runs", "prefix cache cold", "shuffled arrivals", "batches of 1 to 5", *FEATURES, *TIGHT]


def verification(size: Size, **more: str) -> Verification:
    def prompts(engine):
        return make_prompts(size, engine.vocab_size, engine.ready.max_model_len)

    return Verification(boot_engine, Settings.load(OPTIONS | more), prompts, size)


def by_path(results: list[PathResult]) -> dict[str, PathResult]:
    return {result.path: result for result in results}


@pytest.fixture(scope="module")
def verified():
    run = verification(SMALL)
    return run, list(run.results())


def test_all_paths_are_identical_and_were_really_taken(verified):
    run, results = verified
    assert [result.path for result in results] == PATHS
    assert {result.share for result in results} == {"100.00 %"}
    features = [*FEATURES, *TIGHT[1:]]
    assert {result.prompts for result in results if result.path not in features} == {14}
    assert {len(seen.bits) for seen in run.first} == {SMALL.outputs}
    notes = {path: [int(word.replace(",", "")) for word in result.note.split() if word[0].isdigit()]
             for path, result in by_path(results).items()}  # fmt: skip
    assert notes["later runs"][0] > 500  # tokens from the prefix cache
    preemptions, moved = notes["chunks, few blocks"]
    assert preemptions > 0
    assert moved > 0
    verdict = run.verdict(results)
    assert verdict.ok
    assert verdict.positions == 14 * SMALL.outputs
    assert len(verdict.digest) == 32


@pytest.mark.usefixtures("eager_here")
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_kernel_is_found(plant, monkeypatch):
    """The model is whole: two layers round the smaller fault away in bfloat16."""
    PLANTS[plant](monkeypatch, rows=9)
    run, results = verification(TINY, model="bundled"), []
    for result in run.results():
        results.append(result)
        if result.first:
            break
    assert not run.verdict(results).ok
    found = results[-1]
    assert found.identical < found.prompts
    assert 0 <= found.first.position < TINY.outputs
    assert 0 <= found.first.gap < 5


def test_only_the_first_run_differing_is_found(monkeypatch):
    """A fault of only the first run is found, as in a cold engine.

    Every run is compared with the first.
    """
    right, calls = CpuSampler.sample, []

    def first_is_off(self, level, logits):
        calls.append(1)
        if len(calls) == 3:
            logits *= 1 + 2**-7
        return right(self, level, logits)

    monkeypatch.setattr(CpuSampler, "sample", first_is_off)
    results = list(islice(verification(TINY).results(), 4))  # later paths compare with a run of their own
    assert [result.path for result in results] == [*PATHS[:3], "batches of 1 to 3"]
    assert all(result.identical < result.prompts for result in results)
    assert {result.first.run for result in results} == {1}


# ---------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(command, "REDUCED", replace(TINY, outputs=4))
    return ["verify", "--reduced", *(part for name, value in OPTIONS.items()
            for part in ("--" + name.replace("_", "-"), str(value)))]  # fmt: skip


def test_the_command_says_so_and_exits_with_0(quick, capsys, tmp_path):
    """Its prompts come from a file."""
    path = tmp_path / "prompts.txt"
    path.write_text('def add(a, b):\n{"prompt": [5, 6, 7]}\nimport os\n')
    assert main([*quick, "--prompts", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["path", "prompts", "runs", "identical", "first", "divergence"]
    taken = [line.split("  ") for line in lines[1:5]]
    assert [[part.strip() for part in each if part][:2] for each in taken] == [
        [path, "3"] for path in (*PATHS[:3], "batches of 1 to 2")
    ]
    others = [*FEATURES, *TIGHT[:-2]]  # three prompts find blocks enough
    assert [line.split("  ")[0] for line in lines[5:-3]] == others
    assert lines[-3].startswith("12 positions of the first run, digest ")
    assert lines[-2] == "check at boot: did not run"
    assert lines[-1].startswith("contract ")


@pytest.mark.usefixtures("eager_here")
def test_the_command_exits_with_1_on_any_difference(quick, capsys, monkeypatch):
    PLANTS["threshold"](monkeypatch, rows=3)
    assert main([*quick, "--json", "--dtype", "float32"]) == 1  # bfloat16 rounds most of it away
    verdict = json.loads(capsys.readouterr().out)
    assert any(path["first"] for path in verdict["paths"])


def test_a_digest_is_compared(capsys, tmp_path, monkeypatch):
    flags = ["--max-num-seqs", "2", "--max-model-len", "40", "--max-num-batched-tokens", "64", "--no-skip-warmup"]
    assert main(["warm", "--json", *flags]) == 0
    stored = json.loads(capsys.readouterr().out)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(stored))
    assert main(["verify", "--digest", str(path), *flags]) == 0
    assert capsys.readouterr().out == f"The bits are equal: digest {stored['proof']['digest']}\n"
    other = "f" * len(stored["proof"]["digest"])
    stored["proof"]["digest"], stored["proof"]["parts"]["threads"] = other, 64
    path.write_text(json.dumps(stored))
    assert main(["verify", "--digest", str(path), *flags]) == 1
    out = capsys.readouterr().out
    assert "threads: 64 -> " in out
    assert f"bits: {other} -> " in out
    assert main(["verify", "--digest", str(tmp_path / "none"), *flags]) == 2
    assert main(["verify", "--digest", str(path), "--json", *flags]) == 2


# ---------------------------------------------------------------------------------------------------- the prompts


def test_the_default_prompts_are_as_promised():
    prompts = make_prompts(FULL, 128_256, 4096)
    lengths = [len(prompt.tokens) for prompt in prompts]
    assert (len(lengths), min(lengths), max(lengths)) == (1_492, 1, 1_900)
    assert sum(length > 256 for length in lengths) >= 0.3 * len(lengths)
    assert prompts == make_prompts(FULL, 128_256, 4096)
    assert {prompt.params.max_tokens for prompt in prompts} == {128}
    assert sum(prompt.params.greedy for prompt in prompts) == 746
    assert len({prompt.params.top_k for prompt in prompts}) > 3
    starts = [tuple(prompt.tokens[:64]) for prompt in prompts if len(prompt.tokens) > 300]
    assert len(set(starts)) < len(starts)  # for the prefix cache
    reduced = [len(prompt.tokens) for prompt in make_prompts(REDUCED, 4096, 2048)]
    assert sum(length > 256 for length in reduced) >= 0.3 * len(reduced)


def test_prompts_fit_the_model():
    assert max(len(prompt.tokens) for prompt in make_prompts(FULL, 100, 500)) == 500 - 128
    with pytest.raises(InvalidRequest, match="no room"):
        make_prompts(FULL, 100, 128)


def test_every_set_of_prompts_is_made_before_another_engine_takes_it():
    made: set[str] = set()
    for row in ROWS:
        assert row.prompts in {"", *MAKERS}
        made |= {row.prompts} if row.engine == "asked" else set()
        assert row.prompts in made
    assert made == {"", *MAKERS}


def test_groups_add_up():
    for count in [1, 5, 520, 1_492, random.Random(0).randrange(2_000)]:
        assert sum(group_sizes(count)) == count
        assert max(group_sizes(count)) <= 256
