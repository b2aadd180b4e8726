"""``preheat verify``'s paths for penalties, salts, min_tokens and prompt logprobs, and the planted fault of each."""

from __future__ import annotations

import numpy as np
import pytest

from preheat.backends.cpu.decode_attention import DecodeAttention
from preheat.backends.cpu.sampler import CpuSampler
from preheat.core import Request
from preheat.execution import logit_stages
from preheat.execution.input_batch import Packer
from preheat.grammar.guidance import Guidance
from preheat.ops.sampler import TokenCounts
from preheat.ops.sampling import SamplingInput, allowed
from preheat.schedule import prefix
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify import paths
from preheat.verify.compare import PathResult
from preheat.verify.drive import Engine
from preheat.verify.paths import PATHS, Path, PathRunner
from preheat.verify.prompt_sets import CHUNKED
from preheat.verify.prompts import Size, make_prompts
from preheat.verify.verification import tight

pytestmark = pytest.mark.usefixtures("two_layers")

SIZE = Size(prompts=2, runs=1, outputs=20, longest=CHUNKED)
OPTIONS = {"max_num_seqs": 24, "block_size": 32, "skip_warmup": True, "boot_check": "off", "on_cold": "off"}
TAKEN = (
    "long texts", "short texts", "grammars", "cache salts", "logprobs of given tokens", "beam search",
    "penalties, interrupted", "grammars, interrupted",
)  # fmt: skip


def results() -> dict[str, PathResult]:
    settings = Settings.load(OPTIONS)
    engine, runner = Engine(boot_engine, settings), PathRunner(SIZE, lambda engine: [])
    found = list(runner.on(engine, "asked", TAKEN))
    prompts = make_prompts(SIZE, engine.vocab_size, engine.ready.max_model_len)
    found += runner.on(Engine(boot_engine, tight(settings, prompts)), "tight", TAKEN)
    return {result.path: result for result in found}


def test_all_is_well_and_was_really_taken(monkeypatch):
    """A toy path is a row beside the others."""
    toy = Path("toy path", "asked", "short texts", lambda trial: trial.compared(trial.run(), note="toy"))
    monkeypatch.setattr(paths, "PATHS", (*PATHS, toy))
    found = results()
    assert found["toy path"].note == "toy" and found["toy path"].prompts > 0
    assert [path for path, result in found.items() if result.first] == []
    assert found["penalties, long prompts"].note == "1,300 tokens"
    assert int(found["beam search"].note.split()[0].replace(",", "")) > 1000
    assert found["cache salts"].note == "640 tokens from an equal salt"
    assert int(found["penalties, few blocks"].note.split()[0]) > 1
    assert all(int(found[f"{name}, {when}"].note.split()[0]) > 0
               for name in ("penalties", "grammars") for when in ("few blocks", "interrupted"))  # fmt: skip
    assert found["logprobs of given tokens"].prompts == 4
    assert found["prompt logprobs, chunks"].note == "400 tokens"


def last_tokens_only(patch):
    """Plant a penalty that sees only the last 1,024 tokens of the prompt."""
    right = TokenCounts.reset
    patch.setattr(TokenCounts, "reset", lambda self, slot, prompt, out: right(self, slot, prompt[-1024:], out))


def no_salt(patch):
    """Plant one prefix cache for all salts."""
    right = prefix.chain_root
    patch.setattr(prefix, "chain_root", lambda request: right(Request(0, [], request.params, 0, 1)))


def no_bans(patch):
    """Plant stop ids that are drawn before min_tokens."""
    patch.setattr(logit_stages.MinTokens, "edits", lambda *_: ())


def chunks_lose_one(patch):
    """Plant a chunk that forgets the token after the last of the chunk before."""
    right = Packer._prompt_parts

    def parts(self, schedule, ends):
        found = right(self, schedule, ends)
        for part in found:
            if schedule.first[part.row]:
                part.successors = part.successors[1:]
        return found

    patch.setattr(Packer, "_prompt_parts", parts)


def ban_by_rows(patch):
    """Plant a mask that lacks every other token if there is more than one mask in the step."""
    right = Guidance.fill

    def fill(self, masks, rows):
        right(self, masks, rows)
        for _, place, _ in rows if len(rows) > 1 else ():
            ids = np.flatnonzero(allowed(masks[place], self.vocab_size))
            for id in ids[: len(ids) - 1 : 2].tolist():
                masks[place, id // 32] &= ~np.array(1 << id % 32, np.uint32).view(np.int32)

    patch.setattr(Guidance, "fill", fill)


def resumed_without_output(patch):
    """Plant penalties that forget a preempted sequence's output when it resumes."""
    right = TokenCounts.reset
    patch.setattr(TokenCounts, "reset", lambda self, slot, prompt, out: right(self, slot, prompt, out[:0]))


def another_rows_logprobs(patch):
    """Plant reports of the row before, if a step has many reports."""
    right = CpuSampler.read

    def read(self, turn, rows, reporting, alternatives):
        if len(reporting) > 4:
            self._raw = np.roll(self._raw, 1, 0)
        return right(self, turn, rows, reporting, alternatives)

    patch.setattr(CpuSampler, "read", read)


def far_back(patch):
    """Plant a larger merged result in decoding rows with at least three KV splits."""
    right = DecodeAttention._merge

    def merge(self, *parts):
        return right(self, *parts) * (1 + 2**-5 * (len(self._unseen) > 2))

    patch.setattr(DecodeAttention, "_merge", merge)


def logprob_ids_of_others(patch):
    """Plant the given tokens of another row of the step."""
    right = SamplingInput.logprob_ids_of
    patch.setattr(SamplingInput, "logprob_ids_of", lambda self, rows: right(self, rows)[::-1])


PLANTED = {
    "logprobs of given tokens": logprob_ids_of_others,
    "beam search": another_rows_logprobs,
    "grammars": ban_by_rows,
    "grammars, few blocks": lambda patch: None,  # sees the same
    "grammars, continued": lambda patch: None,
    "penalties, long prompts": last_tokens_only,
    "long answers as prompts": far_back,
    "cache salts": no_salt,
    "min_tokens": no_bans,
    "penalties, few blocks": resumed_without_output,
    "penalties, interrupted": lambda patch: None,  # sees the same
    "penalties, continued": lambda patch: None,
    "continued, few blocks": lambda patch: None,
    "prompt logprobs, chunks": chunks_lose_one,
}


@pytest.mark.usefixtures("eager_here")
def test_each_planted_fault_is_found_by_its_path(monkeypatch):
    """Each planted fault is found by its path, all at once: none reaches the path of another."""
    for plant in PLANTED.values():
        plant(monkeypatch)
    found = {path: result for path, result in results().items() if result.first is not None}
    assert set(found) == set(PLANTED)
    assert all(result.identical < result.prompts for result in found.values())
