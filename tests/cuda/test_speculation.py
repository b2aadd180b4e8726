"""Speculation on a GPU: any drafts leave tokens and exact log-probabilities unchanged.

One model is small and random, with a sliding window in some of its layers. The other is the bundled model, and its
answers repeat themselves. Contexts reach beyond a split of the keys. Engines are shared where possible, as a start
takes seconds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat import LLM, SamplingParams, StructuredOutputsParams
from preheat.execution import logit_stages
from preheat.model.files import BUNDLED, BUNDLED_PATH
from preheat.schedule.draft_length import FixedLength
from preheat.warmup.record import Record
from tests.cpu.test_random_requests import VOCAB
from tests.cpu.test_speculation import RightAtRandom
from tests.cuda.test_engine import CONFIG, ignore_other_engines
from tests.tokenizers import byte_level

ROOMY: dict[str, Any] = {
    "device": "cuda", "max_model_len": 704, "max_num_seqs": 64, "max_num_batched_tokens": 1024, "block_size": 64,
    "num_gpu_blocks_override": 720, "boot_check": "off", "on_cold": "raise", "skip_warmup": False,
}  # fmt: skip
TIGHT = ROOMY | {
    "block_size": 16, "num_gpu_blocks_override": 70, "max_num_seqs": 12, "max_num_batched_tokens": 128,
    "defrag_threshold": 0,
}  # fmt: skip
COUNT = 64
REGEXES = ["[ab]{1,9}", "(yes|no)?", "(first|second) word"]

Questions = tuple[list[list[int]], list[SamplingParams]]
Said = list[tuple[list[int], Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write configurations of a model and of a head for it, both without weights."""
    target, head = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    target_config = CONFIG | {"num_hidden_layers": 4, "max_window_layers": 2}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB // 2, "tie_word_embeddings": False}
    bundled = json.loads((BUNDLED_PATH / "config.json").read_text())
    head_config = bundled | own | {"num_hidden_layers": 1, "vocab_size": VOCAB}
    for folder, config in ((target, target_config), (head, head_config)):
        (folder / "config.json").write_text(json.dumps(config))
        byte_level().save(str(folder / "tokenizer.json"))
    return {"random": str(target), "head": str(head), "bundled": BUNDLED}


def engine(models: dict[str, str], name: str, options: dict[str, Any], **config: Any) -> LLM:
    """Return an engine of the model ``name`` that speculates with ``config``."""
    more: dict[str, Any] = {} if name == "bundled" else {"load_format": "dummy"}
    return LLM(models[name], **options, **more, **({"speculative_config": config} if config else {}))


def questions(vocab: int, text: list[int]) -> Questions:
    """Return pieces of ``text``, most of them repeated, and every parameter of the sampler."""
    chance = random.Random(vocab)
    prompts, params = [], []
    for number in range(COUNT):
        piece = text[(begin := chance.randrange(len(text) - 700)) : begin + chance.randint(3, 60)]
        prompt = (piece * 30)[: chance.choice([len(piece), len(piece) + 5, 2 * len(piece) + 3, 520, 600])]
        more: dict[str, Any] = {
            "repetition_penalty": chance.choice([1.0, 1.3]), "frequency_penalty": chance.choice([0.0, 0.4]),
            "presence_penalty": chance.choice([0.0, -0.5]), "top_k": chance.choice([0, 3, 40]),
            "top_p": chance.choice([1.0, 0.8]), "min_p": chance.choice([0.0, 0.1]),
            "logit_bias": chance.choice([None, {5: 3.0, 9: -2.0}]), "logprobs": chance.choice([None, 0, 3]),
            "min_tokens": chance.choice([0, 6]), "stop_token_ids": chance.sample(range(vocab), 4),
        }  # fmt: skip
        if number % 8 == 5:
            more = {"structured_outputs": StructuredOutputsParams(regex=chance.choice(REGEXES)), "logprobs": 2}
        temperature = (0.0, 0.2, 1.0)[number % 3]
        own = more if number % 2 else {"logprobs": 2}
        prompts.append(prompt)
        params.append(SamplingParams(temperature=temperature, seed=number, max_tokens=chance.randint(8, 48), **own))
    return prompts, params


def said(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Said:
    """Return tokens and exact log-probabilities."""
    ignore_other_engines(llm)
    outputs = [result.outputs[0] for result in llm.generate(prompts, params, use_tqdm=False)]
    llm.loop.scheduler.check()
    assert llm.loop.scheduler.stats().blocks_used == 0
    return [(list(output.token_ids), output.logprobs) for output in outputs]


@pytest.fixture(scope="module")
def truth(models: dict[str, str]) -> Callable[[str], tuple[Questions, Said]]:
    """Return a function that gives a model's questions and its answers without speculation."""
    known: dict[str, tuple[Questions, Said]] = {}

    def find(name: str) -> tuple[Questions, Said]:
        if name not in known:
            llm = engine(models, name, ROOMY)
            vocab, chance = llm.loop.executor.decoder.spec.vocab_size, random.Random(3)
            text = [chance.randrange(vocab) for _ in range(2000)]
            if name == "bundled":
                text = llm.frontend.tokenizer.encode(Path(argparse.__file__).read_text()[:20_000], False)
            asked = questions(vocab, text)
            known[name] = asked, said(llm, *asked)
        return known[name]

    return find


@pytest.fixture(autouse=True)
def trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``auto`` try some drafts, although drafts of such small models do not pay."""
    monkeypatch.setattr("preheat.schedule.draft_length.SOONEST", 8)
    monkeypatch.setattr("preheat.schedule.draft_length.TRIALS", 1.0)


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("bundled", ROOMY, {"method": "ngram", "num_speculative_tokens": 7}),
    ("bundled", TIGHT, {"method": "ngram", "num_speculative_tokens": "auto"}),
    ("bundled", ROOMY, {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_spec_factor": 4.0}),
    ("bundled", ROOMY, {"model": "bundled", "num_speculative_tokens": 3}),
    ("bundled", TIGHT, {"model": "bundled", "num_speculative_tokens": 2}),
    ("bundled", ROOMY, {"method": "grammar", "num_speculative_tokens": 5}),
    ("random", ROOMY, {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}),
    ("random", TIGHT, {"method": "eagle3", "model": "head", "num_speculative_tokens": "auto"}),
]


def label(each: Any) -> str:
    """Return a short label for a part of a case."""
    if each is ROOMY or each is TIGHT:
        return "roomy" if each is ROOMY else "tight"
    return each if isinstance(each, str) else str(each.get("method", "model"))


@pytest.mark.parametrize(("name", "options", "config"), CASES, ids=label)
def test_answers_equal_answers_without_drafts(
    models: dict[str, str],
    truth: Callable[[str], tuple[Questions, Said]],
    name: str,
    options: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """All at once, alone, and again with a warm prefix cache; with few blocks some are preempted and moved."""
    (prompts, params), right = truth(name)
    own = {"model": models[config["model"]]} if "model" in config else {}
    llm = engine(models, name, options, **config | own)
    assert said(llm, prompts, params) == right
    for number in (0, 1, 5, 11):
        assert said(llm, prompts[number : number + 1], params[number : number + 1]) == right[number : number + 1]
    assert said(llm, prompts, params) == right
    stats = llm.loop.scheduler.stats()
    assert stats.draft_tokens > 0
    assert stats.accepted_tokens > 0 or name == "random"
    assert (stats.preemptions > 0) == (options is TIGHT)
    assert stats.blocks_moved or options is ROOMY
    record = Record.from_json(llm.loop.listener.report())
    assert not any(record.cold.values()), record.events
    assert record.misses == {}


@pytest.fixture(scope="module")
def guessing(models: dict[str, str]) -> dict[str, LLM]:
    """Return engines with drafts to be replaced by a test."""
    config = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 2}
    return {
        "roomy": engine(models, "random", ROOMY, **config),
        "tight": engine(models, "random", TIGHT, **config),
        "eager": engine(models, "random", ROOMY | {"enforce_eager": True, "on_cold": "off"}, **config),
    }


@pytest.mark.parametrize("form", ["roomy", "tight", "eager"])
def test_any_drafts_give_the_same_answers(
    truth: Callable[[str], tuple[Questions, Said]], guessing: dict[str, LLM], form: str
) -> None:
    """Drafts are right at random, always or never, of any number, in batches of 1 to 64."""
    (prompts, params), right = truth("random")
    drafting = guessing[form].loop.scheduler.drafting
    assert drafting is not None
    drafting.length = FixedLength()
    for tokens, share in zip(range(1, 8), (0.7, 0.0, 0.7, 1.0, 0.7, 0.9, 0.7), strict=True):
        drafting.proposer = RightAtRandom(tokens, prompts, params, right, share)
        for batch in (64, 5, 1):
            some = slice(tokens, tokens + batch) if batch < 64 else slice(None)
            assert said(guessing[form], prompts[some], params[some]) == right[some]
    assert guessing[form].loop.scheduler.stats().accepted_tokens > 1000


def drafts_not_penalised(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: a row's drafts do not count in the penalties of its later positions."""
    right = logit_stages._penalties

    def penalties(*args: Any) -> Any:
        found = right(*args)
        found.tokens = [tokens[:known] for tokens, known in zip(found.tokens, found.known, strict=True)]
        return found

    patch.setattr(logit_stages, "_penalties", penalties)


def all_final(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: the device counts tokens drawn behind wrong drafts."""
    patch.setattr(logit_stages, "_final", lambda slots, rows, position: rows >= 0)


def noise_by_place(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: every position of a row draws with the noise of its first position."""
    right = logit_stages._metadata

    def metadata(slots: Any, chosen: Any, rows: Any, position: Any) -> Any:
        found = right(slots, chosen, rows, position)
        first = dict(reversed(list(zip(chosen.tolist(), found.position, strict=True))))
        found.position = found.position * 0 + [first[slot] for slot in chosen.tolist()]
        return found

    patch.setattr(logit_stages, "_metadata", metadata)


@pytest.mark.parametrize("plant", [drafts_not_penalised, all_final, noise_by_place])
def test_control_drafts_that_change_a_token_are_seen(
    truth: Callable[[str], tuple[Questions, Said]],
    guessing: dict[str, LLM],
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (prompts, params), right = truth("random")
    drafting = guessing["roomy"].loop.scheduler.drafting
    assert drafting is not None
    drafting.proposer = RightAtRandom(5, prompts, params, right, 0.7)
    plant(monkeypatch)
    assert said(guessing["roomy"], prompts, params) != right


def test_the_check_at_boot_has_a_row_for_drafts(models: dict[str, str]) -> None:
    """The digest is the same without drafts, with drafts, and with a head that keeps features."""
    config = {"num_speculative_tokens": 3}
    full = ROOMY | {"boot_check": "full", "on_cold": "off"}
    kinds: list[dict[str, Any]] = [{}, {"method": "ngram"}, {"method": "eagle3", "model": models["head"]}]
    digests = set()
    for kind in kinds:
        llm = engine(models, "random", full, **(config | kind if kind else {}))
        record = Record.from_json(llm.loop.listener.report())
        assert {entry.outcome for entry in record.entries} <= {"ready", "reused"}
        digests.add(record.proof.digest)
    assert len(digests) == 1
