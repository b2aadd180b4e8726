"""Special contexts of the check at boot: each row passes, and sees the fault planted for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from preheat import LLM
from preheat.backends.base.facts import Facts
from preheat.backends.cpu import decode_attention, hidden, paged_attention
from preheat.backends.cpu import sampler as cpu_sampler
from preheat.backends.cpu.facts import FACTS
from preheat.boot import engine
from preheat.errors import CheckFailed, NotInvariant, PreheatError
from preheat.execution import logit_stages
from preheat.grammar import guidance, service
from preheat.limits import Limits
from preheat.ops import sampler, sampling
from preheat.schedule import prefix, slots
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.verify import boot as boot_checks
from preheat.verify import draws, names
from preheat.verify.boot import BootCheck
from preheat.verify.check_runner import CheckRunner
from preheat.verify.names import long_context
from preheat.warmup.record import Record
from tests.cpu import planted
from tests.cpu.sampling_reference import Row, answer

pytestmark = pytest.mark.usefixtures("two_layers", "eager")

ROOMY = {
    "max_num_seqs": 4, "max_num_batched_tokens": 1024, "max_model_len": 640, "block_size": 32, "skip_warmup": True,
    "dtype": "float32", "kv_cache_memory_bytes": 1 << 26,
}  # fmt: skip


@pytest.fixture(scope="module")
def loop():
    return boot_engine(Settings.load(ROOMY), InlineTransport())


@pytest.fixture
def check(loop):
    plan, backend = loop.packer.plan, loop.executor.backend
    record = Record.of(plan, model="bundled", platform="cpu", dtype="float32", mode="eager")
    runner = CheckRunner(loop.scheduler.pool, loop.packer, loop.executor)
    yield BootCheck(runner, record, backend.facts, loop.grammars)
    loop.scheduler.check()
    assert loop.scheduler.slots.num_free == ROOMY["max_num_seqs"]


@pytest.mark.parametrize(
    "name", ["finite", "poisoned", "resumed", "long context", "full step", "sampler", "logprobs", "grammar"]
)
def test_all_is_well(check, loop, name, monkeypatch):
    """Every row passes and computes something."""
    ran: list[str] = []

    def noted(kind):
        right = getattr(loop.executor, kind)

        def run(*args, **more):
            ran.append(kind)
            return right(*args, **more)

        return run

    for kind in ("logits", "draw_with_logprobs"):
        monkeypatch.setattr(loop.executor, kind, noted(kind))
    check.run(name)
    assert set(ran) == {"draw_with_logprobs" if name in ("sampler", "logprobs", "grammar") else "logits"}


PLANTED = {
    "resumed": lambda patch: planted.resumed(patch, "rope"),
    "long context": planted.merge_from_last,
    "full step": lambda patch: planted.split_by_batch(patch, rows=600),
}


@pytest.mark.parametrize("name", PLANTED)
def test_only_the_special_check_sees_its_planted_fault(check, name, monkeypatch):
    PLANTED[name](monkeypatch)
    for usual in ("later run", "co-batched", "chunked", "decode"):
        check.run(usual)
    with pytest.raises(NotInvariant, match=f"{name}: .* the first layer that differs is layer 0"):
        check.run(name)


def test_the_long_context_has_three_splits_where_there_is_room():
    def limits(**more) -> Limits:
        return Limits(**({"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 2048, "block_size": 16,
                          "num_blocks": 100, "max_num_prefill_seqs": None} | more))  # fmt: skip

    facts: Facts = FACTS
    assert long_context(limits(), facts) == 2 * facts.split + 44
    assert long_context(limits(max_model_len=500), facts) is None
    assert long_context(limits(num_blocks=30), facts) is None


def multiplied(patch):
    """Plant attention that multiplies hidden values by zero."""
    for module in (decode_attention, paged_attention):
        patch.setattr(
            module,
            "attend",
            lambda q, k, v, mask, scale: hidden.kernel(q, k, v, 0.0, False, attn_mask=mask, scale=scale),
        )


def unmarked(patch):
    """Plant a sampler that gives a row with logits that are not finite a token like any other."""
    patch.setattr(cpu_sampler, "finite_rows", lambda logits: np.ones(len(logits), bool))


@pytest.mark.parametrize(("plant", "error"), [(multiplied, NotInvariant), (unmarked, CheckFailed)])
def test_poison_that_reaches_others_is_seen(check, plant, error, monkeypatch):
    plant(monkeypatch)
    check.run("decode")
    with pytest.raises(error, match="poisoned"):
        check.run("poisoned")


def no_last_token(patch):
    right = prefix.chained
    patch.setattr(prefix, "chained", lambda *args: right(*args[:-1], args[-1] - 1))


def no_block_before(patch):
    right = prefix.chained
    patch.setattr(prefix, "chained", lambda parent, *more: right(b"", *more))


def no_salt(patch):
    patch.setattr(prefix, "chain_root", lambda request: b"")


def no_images(patch):
    patch.setattr(prefix, "_images", lambda *args: b"")


def no_adapter(patch):
    patch.setattr(prefix.PrefixCache, "_root", lambda self, sequence: prefix.chain_root(sequence.request))


def no_room(patch):
    """Plant a lookup that also finds the last token, so that nothing is left to sample from."""
    right = prefix.PrefixCache.lookup

    def lookup(self, sequence):
        sequence.tokens = np.append(sequence.tokens, 0)
        return right(self, sequence)

    patch.setattr(prefix.PrefixCache, "lookup", lookup)


@pytest.mark.parametrize("plant", [no_last_token, no_block_before, no_salt, no_images, no_adapter, no_room])
def test_blocks_that_are_not_a_prompts_own_are_seen(check, plant, monkeypatch):
    check.run("prefix hit")
    plant(monkeypatch)
    with pytest.raises(CheckFailed, match=r"prefix hit: a prompt with .* finds \d blocks, and \d are its own"):
        check.run("prefix hit")


def wrong_position(patch):
    right = sampler.gumbel_at
    patch.setattr(sampler, "gumbel_at", lambda seed, position, *more: right(seed, position + 1, *more))


def low_seed(patch):
    right = sampler.gumbel_at
    patch.setattr(sampler, "gumbel_at", lambda seed, *more: right(seed & draws.np.uint64(0xFFFFFFFF), *more))


def no_bans(patch):
    patch.setattr(logit_stages.MinTokens, "edits", lambda *_: ())


def prompt_unseen(patch):
    right = sampler.TokenCounts.reset
    patch.setattr(sampler.TokenCounts, "reset", lambda self, slot, prompt, out: right(self, slot, prompt[1:], out))


@pytest.mark.parametrize("plant", [wrong_position, low_seed, no_bans, prompt_unseen])
def test_draws_that_are_not_the_contracts_are_seen(check, plant, monkeypatch, loop):
    plant(monkeypatch)
    loop.executor.sampler.forget()
    with pytest.raises(CheckFailed, match=r"sampler: token \d+ was drawn where the contract has \d+, at position"):
        check.run("sampler")


def logprob_ids_upside_down(patch):
    right = sampling.SamplingInput.logprob_ids_of
    patch.setattr(sampling.SamplingInput, "logprob_ids_of", lambda *args: [each[::-1] for each in right(*args)])


def logprob_ids_of_the_first(patch):
    right = sampling.SamplingInput.logprob_ids_of
    patch.setattr(sampling.SamplingInput, "logprob_ids_of", lambda *args: right(*args)[:1] * len(right(*args)))


def after_temperature(patch):
    right = cpu_sampler.token_logprobs
    patch.setattr(cpu_sampler, "token_logprobs", lambda logits, *more: right(logits * 1.001, *more))


def by_company(patch):
    """Plant logprobs whose last bit depends on the number of rows in the batch."""
    right = cpu_sampler.token_logprobs
    patch.setattr(cpu_sampler, "token_logprobs", lambda logits, *more: right(logits * (1 + 1e-7 * len(logits)), *more))


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (logprob_ids_upside_down, "were asked for, and"),
        (logprob_ids_of_the_first, "were asked for, and"),
        (after_temperature, "and the distribution has"),
        (by_company, "have other bits alone"),
    ],
)
def test_log_probabilities_that_are_not_the_distributions_are_seen(check, plant, message, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(CheckFailed, match=f"logprobs: .*{message}"):
        check.run("logprobs")


def no_mask(patch):
    patch.setattr(sampler, "allowed", lambda mask, vocab: np.ones(vocab, bool))


def one_bit_less(patch):
    """Plant a mask without its highest token."""
    right = guidance.Guidance.fill

    def fill(self, masks, rows):
        right(self, masks, rows)
        for _, place, _ in rows:
            last = np.flatnonzero(sampling.allowed(masks[place], self.vocab_size))[-1]
            masks[place, last // 32] &= ~np.int32(1 << last % 32)

    patch.setattr(guidance.Guidance, "fill", fill)


def ends_anywhere(patch):
    right = guidance.Guidance.fill

    def fill(self, masks, rows):
        right(self, masks, rows)
        for state, place, _ in rows:
            masks[place] |= state._stops

    patch.setattr(guidance.Guidance, "fill", fill)


def every_row(patch):
    """Plant a mask that applies to all rows."""
    right = slots.Slots.describe

    def describe(self, slot, request):
        right(self, slot, request)
        self.has_grammar[slot] = True

    patch.setattr(slots.Slots, "describe", describe)
    patch.setattr(service.Grammars, "fill", _fill_for_all)


def _fill_for_all(self, masks, held, schedule):
    self.backend.fill(masks, [(next(iter(held.grammars.values())), 0, ())])
    masks[: schedule.rows] = masks[0]
    return self._masks.submit(lambda: 0.0)


@pytest.mark.parametrize("plant", [no_mask, one_bit_less, ends_anywhere, every_row])
def test_masks_that_are_not_the_grammars_are_seen(check, plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(CheckFailed, match=r"grammar: (a row without grammar drew )?token \d+"):
        check.run("grammar")


@pytest.mark.parametrize("vocab", [40, 4096, 70_000])
def test_the_contract_is_that_of_the_tests(vocab):
    ids = [1 + place * (vocab - 2) // 8 for place in range(8)]
    logits = torch.full((vocab,), draws.IMPOSSIBLE)
    logits[ids] = torch.tensor(draws.LOGITS)
    clear = 0
    for row in draws.ROWS:
        token, sure = draws.contract(row, ids)
        expected = answer(Row(
            logits.numpy(), draws._request(row, ids).params, [ids[row.prompt]], draws._output(row, ids),
            [ids[place] for place in row.stops], row.seed, row.choice,
        ))  # fmt: skip
        clear += sure
        assert token == expected.token or not sure
    assert clear >= len(draws.ROWS) - 1


@pytest.mark.parametrize(
    ("layer", "said"), [(1, "with an output that is not finite is layer 1"), (None, "all 2 layers are")]
)
def test_logits_that_are_not_finite_are_named(check, loop, layer, said):
    weights = loop.executor.decoder.weights
    where = weights.final_norm if layer is None else weights.layers[layer].post_norm
    kept = where.weight.clone()
    try:
        where.weight[5] = torch.inf
        with pytest.raises(CheckFailed, match=rf"finite: [\d,]+ of 4,096 logits are not finite after .*{said}"):
            check.run("finite")
    finally:
        where.weight.copy_(kept)


def test_an_engine_with_infinite_products_does_not_become_ready(monkeypatch):
    """An engine with finite weights but infinite products does not become ready."""
    right = engine.load_model

    def load(*args, **more):
        model = right(*args, **more)
        weight = model.weights.layers[2].post_norm.weight
        weight.fill_(torch.finfo(weight.dtype).max)
        return model

    monkeypatch.setattr(engine, "load_model", load)
    with pytest.raises(PreheatError, match="not finite is layer 2"):
        LLM(max_num_seqs=1, max_num_batched_tokens=32, max_model_len=32, block_size=16, skip_warmup=False)


def test_every_check_says_when_it_runs_and_how():
    assert {check.name for check in names.CHECKS} == boot_checks.CHECKS.keys()
    assert len({check.name for check in names.CHECKS}) == len(names.CHECKS)
