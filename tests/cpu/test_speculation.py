"""Speculation on a whole engine: any drafting keeps the tokens and logprobs without it, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.core import Level
from preheat.errors import CheckFailed, NotInvariant, SettingsError
from preheat.execution import logit_stages
from preheat.execution.draft_model import DraftModel
from preheat.execution.input_batch import Packer
from preheat.model.files import BUNDLED_PATH
from preheat.ops import sampler
from preheat.ops.sampling import SamplingInput
from preheat.ops.top_k_top_p import SamplingMetadata
from preheat.schedule import results
from preheat.schedule.slots import Slots
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.verify.boot import BootCheck
from preheat.verify.check_runner import CheckRunner
from preheat.verify.drive import Engine
from preheat.verify.paths import PathRunner
from preheat.verify.prompt_sets import PromptSet
from preheat.verify.prompts import Size, make_prompts
from preheat.verify.verification import without_drafts
from preheat.warmup.record import Record
from tests.tokenizers import byte_level

VOCAB = 320
SMALL = {
    "max_num_seqs": 6, "max_num_batched_tokens": 64, "max_model_len": 96, "block_size": 16, "load_format": "dummy",
    "dtype": "float32", "num_threads": 1,
}  # fmt: skip
FEW_BLOCKS = {"num_gpu_blocks_override": 10, "defrag_threshold": 0}


@pytest.fixture(autouse=True)
def trials(monkeypatch) -> None:
    """Let ``auto`` try some drafts.

    On a busy machine, drafts of so small models may not pay.
    """
    monkeypatch.setattr("preheat.schedule.draft_length.SOONEST", 8)
    monkeypatch.setattr("preheat.schedule.draft_length.TRIALS", 1.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Write configurations without weights: the target, and smaller drafters of its vocabulary."""
    config = json.loads((BUNDLED_PATH / "config.json").read_text())
    found = {}
    head = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB // 2, "tie_word_embeddings": False}
    for name, hidden, layers in (("target", 32, 4), ("draft", 16, 1), ("eagle3", 32, 1)):
        folder = found[name] = tmp_path_factory.mktemp(name)
        sizes = {"hidden_size": hidden, "intermediate_size": 32, "num_hidden_layers": layers, "head_dim": 16}
        own = head if name == "eagle3" else {}
        (folder / "config.json").write_text(json.dumps(config | sizes | {"vocab_size": VOCAB} | own))
        byte_level().save(str(folder / "tokenizer.json"))
    return {name: str(folder) for name, folder in found.items()}


def asked(seed: int, count: int = 10) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return repetitive prompts, some with common beginnings, and all parameters of the sampler."""
    chance = random.Random(seed)
    common = [chance.randrange(VOCAB) for _ in range(20)]
    prompts, params = [], []
    for number in range(count):
        words = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 4))] for _ in range(3)]
        text = [token for _ in range(chance.randint(1, 8)) for token in chance.choice(words)]
        prompts.append([*common * (number % 3 == 0), *text][:48])
        more = {
            "repetition_penalty": chance.choice([1.0, 1.3]), "frequency_penalty": chance.choice([0.0, 0.4]),
            "presence_penalty": chance.choice([0.0, -0.5]), "top_k": chance.choice([0, 3, 40]),
            "top_p": chance.choice([1.0, 0.8]), "min_p": chance.choice([0.0, 0.1]),
            "logit_bias": chance.choice([None, {5: 3.0, 9: -2.0}]), "logprobs": chance.choice([None, 0, 3]),
            "min_tokens": chance.choice([0, 6]), "stop_token_ids": chance.sample(range(VOCAB), 12),
        }  # fmt: skip
        plain = {"logprobs": 2, "stop_token_ids": []}
        temperature = (0.0, 0.1, 1.0)[number % 3]  # at 0.1 answers repeat themselves: lookups find something
        own = more if number % 2 else plain
        params.append(SamplingParams(temperature=temperature, seed=number, max_tokens=chance.randint(6, 28), **own))
    return prompts, params


def said(llm: LLM, prompts, params) -> list[tuple[list[int], object]]:
    outputs = [result.outputs[0] for result in llm.generate(prompts, params, use_tqdm=False)]
    llm.loop.scheduler.check()
    return [(output.token_ids, output.logprobs) for output in outputs]


class RightAtRandom:
    """Drafter that knows every answer.

    Each draft is right with probability ``right``, else random.
    """

    writes_cache = False

    def __init__(self, tokens: int, prompts, params, answers, right: float) -> None:
        self.num_speculative_tokens, self._right, self._rng = tokens, right, random.Random(tokens)
        self._truth = {
            (tuple(prompt), own.seed): tokens for prompt, own, (tokens, _) in zip(prompts, params, answers, strict=True)
        }

    def propose(self, slots: Slots, rows: np.ndarray, most: np.ndarray) -> list[np.ndarray]:
        found = []
        for slot, count in zip(rows.tolist(), most.tolist(), strict=True):
            request = slots.request[slot]
            assert request is not None
            truth = self._truth[tuple(request.prompt), request.seed]
            drafts = truth[int(slots.device_len[slot]) - len(request.prompt) :][: self._rng.randint(0, count)]
            drafts = [each if self._rng.random() < self._right else self._rng.randrange(VOCAB) for each in drafts]
            found.append(np.array(drafts, np.int32))
        return found

    def ended(self, slots: Slots, stopped) -> None:
        """Keep nothing."""


def speculating(models, method: str, tokens: int | str, **more) -> LLM:
    config: dict = {"method": method, "num_speculative_tokens": tokens}
    if method in models:
        more_said = {"method": method} if method == "eagle3" else {}
        config = {"model": models[method], "num_speculative_tokens": tokens, **more_said}
    if method == "suffix":
        config["suffix_decoding_max_spec_factor"] = 4.0
    return LLM(models["target"], **SMALL, speculative_config=config, **more)


@pytest.fixture(scope="module")
def plain(models):
    """Return questions and answers without speculation, by seed."""
    llm = LLM(models["target"], **SMALL)
    return [(*(question := asked(seed)), said(llm, *question)) for seed in range(2)]


CASES = [
    ("ngram", 1, False),
    ("ngram", "auto", True),
    ("suffix", 7, True),
    ("draft", 2, True),
    ("draft", "auto", False),
    ("target", 3, True),
    ("eagle3", 3, True),
    ("eagle3", "auto", False),
]


@pytest.mark.parametrize(("method", "tokens", "tight"), CASES)
def test_answers_equal_answers_without_drafts(models, plain, method, tokens, tight):
    """Answers equal plain ones: all at once, with the prefix cache, and with preemption and moving blocks."""
    llm = speculating(models, method, tokens, **(FEW_BLOCKS if tight else {}), enable_prefix_caching=tokens != 1)
    for prompts, params, answers in plain:
        assert said(llm, prompts, params) == answers
        assert said(llm, prompts[:4], params[:4]) == answers[:4]
    stats = llm.loop.scheduler.stats()
    assert 0 < stats.accepted_tokens <= stats.draft_tokens
    assert sum(stats.accepted_per_pos) == stats.accepted_tokens
    assert (stats.preemptions > 0) == tight
    assert stats.blocks_moved or not tight


@pytest.mark.parametrize("tight", [False, True], ids=["", "few blocks"])
def test_any_drafts_give_the_same_answers(models, plain, tight):
    """Drafts of any number, right at random, always or never, give the same answers."""
    llm = speculating(models, "ngram", 7, **(FEW_BLOCKS if tight else {}))
    for tokens, right in zip(range(1, 8), (0.7, 0.0, 0.7, 1.0, 0.7, 0.9, 0.7), strict=True):
        prompts, params, answers = plain[tokens % 2]
        llm.loop.scheduler.drafting.proposer = RightAtRandom(tokens, prompts, params, answers, right)
        assert said(llm, prompts, params) == answers


def accept_by_a_coin(patch):
    """Plant a draft that is kept by a coin, as in a ratio test, whatever token was drawn."""
    right, chance = results.process_results, np.random.default_rng(0)

    def process(running, prefix, schedule, result, **more):
        rows, positions = schedule.sampled()
        drafted = (positions < schedule.ends[rows]) & (schedule.num_sampled[rows] > 1)
        drafts = running.slots.tokens[schedule.slots[rows], np.minimum(positions, running.slots.max_model_len - 1)]
        coin = chance.random(len(rows)) < 0.5
        result.tokens = np.where(drafted & coin, drafts, result.tokens)
        return right(running, prefix, schedule, result, **more)

    patch.setattr(results, "process_results", process)


def noise_by_place(patch):
    """Plant noise behind a draft by the token's place in its row.

    So the noise depends on the number of drafts.
    """
    right = logit_stages._metadata

    def metadata(slots, chosen, rows, position):
        found = right(slots, chosen, rows, position)
        first = np.array([position[chosen == slot].min() for slot in chosen], position.dtype)
        found.position = found.position + 1000 * (position > first)
        return found

    patch.setattr(logit_stages, "_metadata", metadata)


def drafts_not_penalised(patch):
    """Plant drafts that do not count in the penalties of later positions of their row."""
    right = logit_stages._penalties

    def penalties(slots, chosen, rows, position):
        found = right(slots, chosen, rows, position)
        found.tokens = [tokens[:known] for tokens, known in zip(found.tokens, found.known, strict=True)]
        return found

    patch.setattr(logit_stages, "_penalties", penalties)


@pytest.mark.parametrize("plant", [accept_by_a_coin, noise_by_place, drafts_not_penalised])
def test_control_drafts_that_change_a_token_are_seen(models, plain, plant, monkeypatch):
    llm = speculating(models, "ngram", 4)
    prompts, params, answers = plain[0]
    llm.loop.scheduler.drafting.proposer = RightAtRandom(4, prompts, params, answers, 0.7)
    plant(monkeypatch)
    assert said(llm, prompts, params) != answers


def test_control_noise_by_rank_would_change_the_draw_with_the_last_bit():
    """Control: where a last bit orders two tokens, noise by rank changes the draw.

    Noise by token id keeps it.
    """
    logits, rows = torch.zeros(1, 64), 400
    logits[0, 20:] = -50.0
    nudged = logits.clone()
    nudged[0, :20] += torch.arange(20) * 2e-7

    def changed(by_rank: bool) -> int:
        def draw(line: torch.Tensor) -> np.ndarray:
            order = np.argsort(-line[0].numpy(), kind="stable") if by_rank else np.arange(64)
            how = SamplingMetadata(
                np.arange(rows), *(np.full(rows, value, np.float32) for value in (1, 1)), np.zeros(rows, np.int32),
                np.zeros(rows, np.float32), np.arange(rows, dtype=np.uint64), *(np.zeros(rows, np.int32),) * 2,
            )  # fmt: skip
            asked = SamplingInput(rows, how, None, None)
            assert asked.level is Level.FILTERED
            drawn = sampler.HostSampler(1, 64).sample(line[:, order].expand(rows, -1).contiguous(), asked)
            return order[drawn.numpy()]

        return int((draw(logits) != draw(nudged)).sum())

    assert changed(by_rank=False) == 0
    assert changed(by_rank=True) > rows // 2


def test_a_draft_needs_the_targets_noise_to_be_kept(models, plain, monkeypatch):
    """A draft with the target's noise is kept, a draft with its own noise often not.

    Neither changes an answer. The target as its own draft gives its own answers at every temperature.
    """

    def share() -> float:
        llm = speculating(models, "target", 3)
        for prompts, params, answers in plain:
            assert said(llm, prompts, params) == answers
        stats = llm.loop.scheduler.stats()
        return stats.accepted_tokens / stats.draft_tokens

    coupled = share()
    right = DraftModel._run

    def salted(self, slots, schedule, drafts):
        before = slots.seed.copy()
        slots.seed ^= np.uint64(2**30)
        try:
            right(self, slots, schedule, drafts)
        finally:
            slots.seed[:] = before

    monkeypatch.setattr(DraftModel, "_run", salted)
    assert coupled > 0.95
    assert share() < coupled - 0.2


MORE = {"ngram": set(), "draft": {"draft", "pace"}, "eagle3": {"draft"}}


@pytest.mark.parametrize(("method", "tokens"), [("ngram", 3), ("draft", "auto"), ("eagle3", 3)])
def test_nothing_is_cold(models, plain, method, tokens):
    llm = speculating(models, method, tokens, skip_warmup=False, on_cold="raise")
    for prompts, params, answers in plain:
        assert said(llm, prompts, params) == answers
    record = Record.from_json(llm.loop.listener.report())
    assert not any(record.cold.values())
    assert record.misses == {}
    kinds = {entry.kind for entry in record.entries if entry.hits or entry.kind == "pace"}
    assert kinds == {"mixed", "decode", "verify", "sampler"} | MORE[method]
    assert {entry.outcome for entry in record.entries} <= {"ready", "dropped"}


def test_a_draft_that_does_not_fit_is_refused(models):
    with pytest.raises(SettingsError, match="vocabulary of 4096 tokens, the model one of 320"):
        LLM(models["target"], **SMALL, speculative_model="bundled", num_speculative_tokens=2)


DRAFTED = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "on_cold": "off"}


def moved(patch):
    """Plant drafts computed one position too far."""
    right = Packer._write_tokens

    def write(self, columns, schedule, rows):
        right(self, columns, schedule, rows)
        if schedule.verifies:
            columns[2][: int(rows.ends[-1])] += 1

    patch.setattr(Packer, "_write_tokens", write)


def test_the_check_at_boot_has_a_row_for_drafts(models, monkeypatch):
    settings = Settings.load({"model": models["target"], **SMALL, **DRAFTED, "boot_check": "full"})
    loop = boot_engine(settings, InlineTransport())
    plan, backend = loop.packer.plan, loop.executor.backend
    assert "drafts" in plan.checks
    record = Record.of(plan, model="tiny", platform="cpu", dtype="float32", mode="eager")
    check = BootCheck(CheckRunner(loop.scheduler.pool, loop.packer, loop.executor), record, backend.facts)
    check.run("drafts")
    buckets = plan.dispatcher.phases["verify"].buckets
    assert record.proof.compared > len(buckets) > 2
    for plant, error in ((drafts_not_penalised, CheckFailed), (moved, NotInvariant)):
        with monkeypatch.context() as patch:
            plant(patch)
            loop.executor.sampler.forget()
            check.run("decode")
            with pytest.raises(error, match="drafts: "):
                check.run("drafts")
    loop.scheduler.check()
    assert loop.scheduler.slots.num_free == SMALL["max_num_seqs"]


@pytest.mark.parametrize(("method", "plant"), [("ngram", None), ("ngram", moved), ("eagle3", None), ("eagle3", moved)])
def test_preheat_verify_compares_with_an_engine_that_does_not_speculate(
    models, method: str, plant: Callable | None, monkeypatch
):
    drafted = DRAFTED | {
        "speculative_config": {"method": method, "model": models.get(method), "num_speculative_tokens": 3}
    }
    settings = Settings.load({"model": models["target"], **SMALL, **drafted, "boot_check": "off"})
    size = Size(6, 1, 20, 40)
    if plant:
        plant(monkeypatch)
    engine = Engine(boot_engine, settings)
    prompts = make_prompts(size, engine.vocab_size, engine.ready.max_model_len)
    paths = PathRunner(size, lambda _: prompts, {"texts": PromptSet(prompts).seen(engine, engine.run(prompts))})
    assert engine.stats.draft_tokens > 0
    (result,) = paths.on(Engine(boot_engine, without_drafts(settings)), "without drafts", ["texts"])
    assert (result.first is None) == (plant is None)
