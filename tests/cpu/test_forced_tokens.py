"""Forced tokens as drafts: the same tokens in fewer steps."""

from __future__ import annotations

import numpy as np
import pytest

from preheat import LLM, PreheatError, SamplingParams
from preheat.errors import SettingsError
from preheat.grammar.guidance import Guidance
from preheat.grammar.state import State
from preheat.ops.sampling import allowed
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.drive import Engine
from preheat.verify.paths import PathRunner
from preheat.verify.prompts import Size
from preheat.warmup.record import Record
from tests.cpu.structured import held, random_llm, write_model
from tests.schemas import closed

BOX = closed({"identifier": {"enum": [1, 2, 3]}, "description": {"const": "something long"}, "ready": {"const": True}})
ASKED = [
    held(1.0, 1, json=BOX, disable_any_whitespace=True),
    held(0.0, 2, choice=["perhaps tomorrow", "certainly not"]),
    SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True),
    held(1.5, 4, json=BOX),
    held(1.0, 5, regex="[ab]{2,9} is the answer"),
    held(1.0, 6, json={"type": "array", "items": BOX, "maxItems": 3, "minItems": 2}, disable_any_whitespace=True),
    SamplingParams(temperature=0.7, seed=7, max_tokens=20, bad_words=["x"], logprobs=2),
    held(1.0, 8, choice=["one way alone"], max_tokens=4),
]
"""Parameters with and without grammars.

One request is cut off within its forced tokens.
"""

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 96, "block_size": 16, "dtype": "float32", "max_model_len": 256,
         "num_threads": 1}  # fmt: skip
FEW_BLOCKS = {"num_gpu_blocks_override": 22, "defrag_threshold": 0}


def engine(folder, method: str | None = None, tokens: int | str = 6, **more) -> LLM:
    config: dict = {"method": method, "num_speculative_tokens": tokens}
    if method == "draft_model":  # the model itself
        config["model"] = str(write_model(folder))
    return random_llm(folder, **SMALL | ({"speculative_config": config} if method else {}) | more)


def said(llm: LLM) -> list[tuple[list[int], object, str | None]]:
    prompts = [f"x{number}" for number in range(len(ASKED))]
    outputs = [result.outputs[0] for result in llm.generate(prompts, ASKED, use_tqdm=False)]
    llm.loop.scheduler.check()
    return [(output.token_ids, output.logprobs, output.finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return answers and number of steps without speculation, by grammar library."""
    found = {}
    for backend in ("guidance", "xgrammar"):
        llm = engine(tmp_path_factory.mktemp("plain"), structured_outputs_config={"backend": backend})
        before = llm.loop.scheduler.stats().steps
        found[backend] = said(llm), llm.loop.scheduler.stats().steps - before
    return found


@pytest.mark.parametrize(
    ("method", "tokens", "more"),
    [
        ("grammar", 6, {}),
        ("grammar", 2, FEW_BLOCKS),
        ("grammar", "auto", {}),
        ("ngram", 4, {}),
        ("suffix", 4, FEW_BLOCKS),
        ("draft_model", 3, {}),
        ("grammar", 6, {"structured_outputs_config": {"backend": "xgrammar"}}),
    ],
)
def test_the_same_tokens_in_fewer_steps(tmp_path, plain, method, tokens, more):
    llm = engine(tmp_path, method, tokens, **more)
    before = llm.loop.scheduler.stats()
    answers, steps = plain[more.get("structured_outputs_config", {}).get("backend", "guidance")]
    assert said(llm) == answers
    after = llm.loop.scheduler.stats()
    accepted = after.accepted_tokens - before.accepted_tokens
    if tokens != "auto":  # auto measures whether drafts pay, and may draft nothing
        assert accepted > 20
    if not set(FEW_BLOCKS) & set(more) and tokens != "auto":
        assert after.steps - before.steps < steps * 0.8


def test_nothing_is_cold(tmp_path, plain):
    llm = engine(tmp_path, "grammar", skip_warmup=False, on_cold="raise", max_num_batched_tokens=64)
    assert said(llm) == plain["guidance"][0]
    assert not any(Record.from_json(llm.loop.listener.report()).cold.values())


def test_with_llguidance_forced_tokens_are_always_accepted(tmp_path, plain):
    llm = engine(tmp_path, "grammar")
    before = llm.loop.scheduler.stats()
    said(llm)
    after = llm.loop.scheduler.stats()
    drafted, accepted = (getattr(after, name) - getattr(before, name) for name in ("draft_tokens", "accepted_tokens"))
    assert drafted == accepted > 50


def test_wrong_forced_tokens_change_nothing(tmp_path, plain, monkeypatch):
    llm = engine(tmp_path, "grammar")
    right = State.forced
    monkeypatch.setattr(State, "forced", lambda self: [*right(self)[:1], 7, 8][:3])
    assert said(llm) == plain["guidance"][0]


def test_control_masks_that_ignore_drafts_are_seen(tmp_path, monkeypatch):
    """Control: every position of a row gets the mask of its first."""
    llm = engine(tmp_path, "grammar")
    right = Guidance.fill

    def fill(self, masks, rows):
        right(self, masks, rows)
        for _, place, drafts in rows:
            masks[place + 1 : place + 1 + len(drafts)] = masks[place]

    monkeypatch.setattr(Guidance, "fill", fill)
    with pytest.raises(PreheatError, match="does not allow token"):
        said(llm)


@pytest.mark.parametrize("planted", [False, True], ids=["", "planted"])
def test_preheat_verify_compares_with_an_engine_that_does_not_speculate(tmp_path, planted, monkeypatch):
    """preheat verify finds a planted mask behind drafts.

    Without drafts the mask is not used. The planted mask allows only one token.
    """
    write_model(tmp_path)
    options = {"model": str(tmp_path), "load_format": "dummy", "skip_warmup": True, "boot_check": "off", **SMALL}
    config = {"speculative_config": {"method": "grammar", "num_speculative_tokens": 4}, "on_cold": "off"}
    right = Guidance.fill

    def fill(self, masks, rows):
        right(self, masks, rows)
        for _, place, drafts in rows:
            if len(drafts):
                mask = masks[place + len(drafts)]
                first = int(np.flatnonzero(allowed(mask, self.vocab_size))[0])
                mask[:] = 0
                mask[first // 32] = np.array(1 << first % 32, np.uint32).view(np.int32)

    if planted:
        monkeypatch.setattr(Guidance, "fill", fill)
    paths = PathRunner(Size(0, 1, 24, 8), lambda engine: [])
    list(paths.on(Engine(boot_engine, Settings.load(options | config)), "asked", ["grammars"]))
    plain = Engine(boot_engine, Settings.load(options | {"on_cold": "off"}))
    (result,) = paths.on(plain, "without drafts", ["grammars"])
    assert (result.first is None) == (not planted)


def test_requests_without_a_grammar_draft_nothing(tmp_path):
    llm = engine(tmp_path, "grammar")
    before = llm.loop.scheduler.stats().draft_tokens
    llm.generate(["x", "y"], [SamplingParams(max_tokens=9, ignore_eos=True)] * 2, use_tqdm=False)
    assert llm.loop.scheduler.stats().draft_tokens == before
    drafting = llm.loop.scheduler.drafting
    drafting.begin(1)
    slots = llm.loop.scheduler.slots
    assert drafting.most and len(drafting.visible(slots, np.zeros(1, np.int64))) == 1


def test_without_grammars_the_method_is_refused():
    config = {"speculative_config": {"method": "grammar", "num_speculative_tokens": 3}}
    with pytest.raises(SettingsError, match="there are no grammars: "):
        _ = Settings(**config, structured_outputs_config={"backend": "none"}).speculation
