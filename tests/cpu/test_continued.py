"""An answer goes on behind any of its tokens as if it had not been interrupted, and planted faults are found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace as changed

import pytest
from msgspec.structs import replace

from preheat.core import Resume, SamplingParams, StructuredOutputsParams
from preheat.errors import PreheatError
from preheat.execution import logit_stages
from preheat.frontend.journal import Journal
from preheat.grammar.state import State
from preheat.ops.sampler import TokenCounts
from preheat.schedule.slots import Slots
from preheat.settings import Settings
from preheat.startup import boot_engine, boot_front
from preheat.verify.compare import compare
from preheat.verify.continued_paths import REPEATED, behind, moved_while_served, whole_of
from preheat.verify.drive import Engine
from preheat.verify.masked import end_token
from preheat.verify.prompt_sets import PromptSet, alone
from preheat.verify.prompts import Prompt

pytestmark = pytest.mark.usefixtures("two_layers", "eager")

OUTPUTS = 12
PLAIN = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, ignore_eos=True, seed=0)
KINDS = {
    "greedy": replace(PLAIN, logprobs=2),
    "seeded": replace(PLAIN, temperature=1.0, seed=2**40 + 1, logprobs=1),
    "top": replace(PLAIN, temperature=1.5, seed=3, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": replace(PLAIN, temperature=1.0, seed=4, presence_penalty=1.5, frequency_penalty=1.5),
    "repetition": replace(PLAIN, repetition_penalty=1.8),
    "bias": replace(PLAIN, logit_bias={5: 3.0}, prompt_logprobs=1),
    "min_tokens": replace(PLAIN, logit_bias={7: 100.0}, stop_token_ids=[7], min_tokens=8),
    "allowed": replace(PLAIN, temperature=1.0, seed=5, allowed_token_ids=list(range(40, 90))),
    "regex": replace(PLAIN, temperature=1.0, seed=6, structured_outputs=StructuredOutputsParams(regex="([0-9][a-f])+")),
    "json": replace(PLAIN, structured_outputs=StructuredOutputsParams(json_object=True)),
}


@pytest.fixture(scope="module")
def settings(two_layers: None, eager: None) -> Settings:
    small = {"max_num_seqs": 24, "block_size": 16, "max_model_len": 256}
    return Settings.load(small | {"skip_warmup": True, "boot_check": "off", "on_cold": "off"})


@pytest.fixture(scope="module")
def engine(settings: Settings) -> Engine:
    return Engine(boot_engine, settings)


@pytest.fixture(scope="module")
def answered(engine: Engine) -> PromptSet:
    """Return a prompt of each kind, with its uninterrupted answer."""
    stop = [end_token(engine)]
    held = {name: replace(each, stop_token_ids=stop) for name, each in KINDS.items() if each.structured_outputs}
    prompts = [
        Prompt([(11 * number + 3 * at) % 200 for at in range(9 + 5 * number)], params)
        for number, params in enumerate((KINDS | held).values())
    ]
    return PromptSet(prompts).seen(engine, alone(engine, prompts))


def differing(engine: Engine, answered: PromptSet, places: Iterable[int]) -> set[str]:
    """Return the kinds of requests that differ when they are continued behind any of these ``places``."""
    whole, found = whole_of(answered), set[str]()
    for most in places:
        cuts = [min(most, len(answer.tokens) - 1) for answer in answered.answers]
        again = behind(engine, answered.prompts, answered.answers, whole, cuts)
        for kind, *pair in zip(KINDS, whole, again, strict=True):
            if compare(kind, pair[:1], [pair[1:]]).first:
                found.add(kind)
    return found


def test_every_kind_goes_on_behind_every_token(engine, answered):
    assert {len(answer.tokens) for answer in answered.answers} >= {OUTPUTS}
    assert differing(engine, answered, range(1, OUTPUTS)) == set()
    engine.forget_prefixes()
    assert differing(engine, answered, [OUTPUTS // 2]) == set()


def noise_restarts(patch):
    """Plant noise that counts from the place where the request goes on."""
    right = logit_stages._metadata

    def metadata(slots, chosen, rows, position):
        found = right(slots, chosen, rows, position)
        delivered = [len(logit_stages._request(slots, slot).delivered) for slot in chosen.tolist()]
        return changed(found, position=found.position - delivered)

    patch.setattr(logit_stages, "_metadata", metadata)


def output_counts_as_prompt(patch):
    """Plant penalties for which all known tokens of a new owner are its prompt."""
    right = TokenCounts.reset
    patch.setattr(TokenCounts, "reset", lambda self, slot, prompt, out: right(self, slot, [*prompt, *out], out[:0]))


def grammar_at_its_root(patch):
    """Plant a grammar that does not see the delivered tokens."""
    patch.setattr(State, "resumed", lambda self, request: self)


def min_tokens_again(patch):
    """Plant min_tokens that count from the place where the request goes on."""
    right = Slots._describe

    def describe(self, slot, request):
        right(self, slot, request)
        self.min_len[slot] += len(request.delivered)

    patch.setattr(Slots, "_describe", describe)


def appended_to_the_prompt(patch):
    """Plant delivered tokens that become a part of the prompt, as other engines migrate."""
    right = Prompt.request

    def request(self, id):
        found, done = right(self, id), list(self.delivered)
        least = max(found.params.min_tokens - len(done), 0)
        params = replace(found.params, min_tokens=least)
        left = found.max_tokens - len(done)
        return replace(found, prompt=found.prompt + done, max_tokens=left, params=params, resume=None)

    patch.setattr(Prompt, "request", request)


SEES = {
    noise_restarts: {"seeded", "top", "penalties", "allowed", "regex"},
    output_counts_as_prompt: {"penalties"},
    grammar_at_its_root: {"regex", "json"},
    min_tokens_again: {"min_tokens"},
    appended_to_the_prompt: {"seeded", "top", "penalties", "allowed", "regex", "json"},
}


@pytest.mark.parametrize("plant", SEES, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(engine, answered, monkeypatch, plant):
    plant(monkeypatch)
    assert differing(engine, answered, (1, 4, 9)) == SEES[plant]


def said(engine: Engine, prompts: list[Prompt], moves=lambda: False) -> list[list[object]]:
    """Return text, tokens, log-probabilities and end of each choice."""
    return [
        ["".join(choice.parts), choice.token_ids, repr(choice.logprobs), choice.finish_reason, choice.stop_reason]
        for state in engine.serve(prompts, moves)
        for choice in state.choices
    ]


def served(engine: Engine, settings: Settings) -> list[Prompt]:
    """Return prompts for clients: with stop strings, several choices, repetition, and every kind of request."""
    engine.frontend = boot_front(settings, engine._send)
    engine.frontend.ready = engine.ready
    text = said(engine, [Prompt([5, 6, 7], PLAIN)])[0][0]
    stops = replace(PLAIN, stop=[text[len(text) // 2 :][:3]], logprobs=0)
    several = replace(KINDS["seeded"], n=3, stop=["e", "th"], min_tokens=5)
    repeated = replace(PLAIN, logit_bias={9: 100.0}, repetition_detection=REPEATED)
    return [Prompt([5, 6, 7], params) for params in (stops, several, repeated, *KINDS.values())]


def test_a_client_sees_no_move(engine, settings):
    """The engine loses all requests before every step; text and ends stay, even where a move cuts a stop string."""
    prompts = served(engine, settings)
    first = said(engine, prompts)
    assert {entry[3] for entry in first} == {"stop", "length", "repetition"}
    moves = iter(range(1000))
    assert said(engine, prompts, lambda: next(moves) > 0) == first
    assert next(moves) >= OUTPUTS
    assert len(engine._journal) == 0


def test_a_journal_that_loses_a_token_is_found(engine, settings, monkeypatch):
    right = Journal._resumed

    def late(self, id):
        found = right(self, id)
        return found if len(found.delivered) < 3 else replace(found, resume=Resume(found.delivered[:-1]))

    prompts = served(engine, settings)
    first = said(engine, prompts)
    monkeypatch.setattr(Journal, "_resumed", late)
    steps = iter(range(1000))
    assert said(engine, prompts, lambda: next(steps) == 6) != first


def test_the_path_of_clients_sees_a_fault(engine, monkeypatch):
    engine.__dict__.pop("frontend", None)  # of the test before
    result = moved_while_served("moved", engine, OUTPUTS)
    assert result.first is None
    assert result.note == "all requests moved 2 times"
    noise_restarts(monkeypatch)
    assert moved_while_served("moved", engine, OUTPUTS).first is not None


@pytest.mark.parametrize(
    ("delivered", "error"),
    [
        ([1] * OUTPUTS, "12 tokens already, and max_tokens is 12"),
        ([1, 2, 7, 3], "ends at token 2, the stop token 7"),
        ([1, -5], "its output has the token -5"),
    ],
)
def test_an_output_that_cannot_go_on_is_refused(engine, delivered, error):
    params = replace(PLAIN, stop_token_ids=[7])
    with pytest.raises(PreheatError, match=error):
        engine.run([Prompt([1, 2], params, delivered=tuple(delivered))])


def test_a_grammar_refuses_an_output_that_is_not_its_own(engine):
    params = replace(KINDS["regex"], stop_token_ids=[end_token(engine)])
    with pytest.raises(PreheatError, match="output token 0 breaks its rules: the grammar"):
        engine.run([Prompt([1, 2], params, delivered=(0,))])


def test_the_adapter_of_the_output_is_compared(engine):
    request = replace(Prompt([1, 2], PLAIN, delivered=(1,)).request(9), resume=Resume([1], "abc"))
    with pytest.raises(PreheatError, match="has the digest of none here, and its output came from abc"):
        engine.loop.scheduler.add(request)
