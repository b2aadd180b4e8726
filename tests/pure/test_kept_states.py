"""Kept states: a prefix goes on behind a state, and no row reads a state that is not its own.

The scheduler runs on a paper device. `test_scheduler.py` draws random requests with states, too.
"""

from __future__ import annotations

from typing import Any

import pytest

from preheat.errors import SettingsError
from preheat.limits import check_ends, more_states
from preheat.schedule.prefix import PrefixCache
from preheat.schedule.scheduler import Caching
from preheat.schedule.states import NO_ENDS, Ends, StateSlots
from preheat.settings import Settings
from tests.pure.paper import Harness, Scripted, WrongCache, limits, request

SIZE = 4
LONG = [number % 5 for number in range(40)]
EVERY = Ends(SIZE, each=True)


def harness(states: int = 16, **changes: Any) -> Harness:
    kinds = ("caching", "overlap", "proposer")
    own = {"caching": Caching(kept=Ends(SIZE))} | {name: changes.pop(name) for name in kinds if name in changes}
    return Harness(limits(states=states, **changes), **own)


def cached(made: Harness, *prompts: list[int], answer: int = 6) -> list[int]:
    """Return the tokens that each prompt found; prompts run one after another."""
    for prompt in prompts:
        made.add(request(len(made.requests), prompt, answer))
        made.run()
    made.verify()
    assert made.scheduler.pool.states is not None
    assert made.scheduler.pool.states.num_used == 0
    return [made.outcomes[number].starts[0] for number in range(len(made.requests))]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [5, 32])
@pytest.mark.parametrize("length", [1, SIZE, SIZE + 1, 2 * SIZE, 23, 24, 25])
def test_a_repeated_prompt_is_found_to_its_last_block(length, chunk, overlap) -> None:
    """Short prompts too, and prompts that end with a block."""
    made = harness(max_num_batched_tokens=chunk, overlap=overlap)
    assert cached(made, LONG[:length], LONG[:length]) == [0, (length - 1) // SIZE * SIZE]
    assert cached(made, [*LONG[:length], 6, 6, 6, 6, 6])[-1] == length // SIZE * SIZE


def test_a_shared_beginning_is_found_from_the_third_prompt_on() -> None:
    """The second prompt shows where prompts branch off, and keeps the state there."""
    asked = [[*LONG[:17], *[other] * 9] for other in (5, 6, 1)]
    assert cached(harness(), *asked) == [0, 0, 16]
    assert cached(harness(caching=Caching(kept=EVERY)), *asked) == [0, 16, 16]


@pytest.mark.parametrize("most", [0, 3])
def test_a_conversation_goes_on_behind_its_last_answer(most) -> None:
    made = harness(proposer=Scripted(most, 0.7))
    cached(made, LONG[:10], answer=12)
    said = [*LONG[:10], *made.outcomes[0].tokens]
    assert cached(made, [*said, 6, 6])[-1] == (len(said) - 1) // SIZE * SIZE


def test_other_ends_than_every_block_are_asked_for() -> None:
    assert cached(harness(caching=Caching(kept=Ends(2 * SIZE))), LONG[:23], LONG[:23], LONG[:15]) == [0, 16, 0]
    assert cached(harness(caching=Caching(kept=NO_ENDS)), LONG[:23], LONG[:23]) == [0, 0]


def test_an_answers_earlier_ends_are_evicted_before_the_ends_of_prompts() -> None:
    first, second = LONG[:9], [6, *LONG[:9]]
    assert cached(harness(states=4), first, second, first, second, answer=16) == [0, 0, 8, 8]


def test_states_are_forgotten_with_the_blocks() -> None:
    made = harness()
    cached(made, LONG[:23])
    made.reset_prefix_cache()
    assert cached(made, LONG[:23])[-1] == 0


def test_drafts_take_the_state_slots_that_are_free() -> None:
    """Four rows draft three tokens each; with two slots most of them wait."""
    drafted = []
    for states in (2, 12):
        made = harness(states, proposer=Scripted(3, 1.0), caching=Caching(kept=NO_ENDS))
        made.add(*(request(number, LONG[number : number + 5], 20) for number in range(4)))
        made.run()
        made.verify()
        drafted.append(made.scheduler.stats().draft_tokens)
    assert 0 < drafted[0] < drafted[1]


def neighbor(patch: pytest.MonkeyPatch) -> None:
    right = PrefixCache.key_at
    patch.setattr(PrefixCache, "key_at", lambda self, *given: right(self, *given[:2], max(given[2] - SIZE, SIZE)))


def without_references(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateSlots, "_move", lambda self, slot, to: self.at.__setitem__(slot, to))


def missed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_with_state", lambda self, sequence, columns: (columns, 0))


def drafted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateSlots, "settle", lambda self, schedule, *_: self.drop(schedule))


def at_once(patch: pytest.MonkeyPatch) -> None:
    """A slot that a row reads is free for another row of the same step."""
    right = StateSlots.book

    def book(self: StateSlots, schedule: Any, running: Any) -> Any:
        held = self.at[schedule.slots] - self._base
        blocks = held[held > 0].tolist()
        self.pool.release(blocks)
        found = right(self, schedule, running)
        self.pool.share(blocks)
        return found

    patch.setattr(StateSlots, "book", book)


def crowded() -> None:
    """Run prompts that share beginnings and draft, with few and with many state slots."""
    for states in (1, 2, 6):
        made = harness(states, caching=Caching(kept=EVERY), proposer=Scripted(2, 0.5, seed=states))
        for number in range(12):
            made.add(request(number, LONG[: 9 + number % 4], 9))
            made.step()
        made.run()
        made.verify()


def test_crowded_states_are_right() -> None:
    crowded()


@pytest.mark.parametrize("fault", [neighbor, without_references, missed, drafted, at_once])
def test_the_paper_device_sees_a_fault(fault, monkeypatch) -> None:
    """Control: a state under the neighboring hash, a hit without its state, a slot reused too early, drafts kept."""
    fault(monkeypatch)
    with pytest.raises((WrongCache, RuntimeError)):
        crowded()


def test_settings() -> None:
    """Slots follow the features that need them; ends are ends of blocks."""
    own = Settings(max_num_seqs=4, block_size=16)
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}
    assert more_states(own) == 4
    assert more_states(Settings.load({"max_num_seqs": 4} | drafts)) == 16
    assert more_states(Settings(max_num_seqs=4, enable_prefix_caching=False)) == 0
    assert more_states(Settings(max_num_seqs=4, max_kept_states=7)) == 7
    assert more_states(Settings(max_num_seqs=4, mamba_cache_mode="none")) == 0
    assert Ends.of(Settings(block_size=16, mamba_cache_mode="none")) == NO_ENDS
    assert Ends.of(own) == Ends(16)
    assert Ends.of(Settings(block_size=16, mamba_block_size=32, mamba_cache_mode="all")) == Ends(32, each=True)
    with pytest.raises(SettingsError, match="mamba_block_size 24 is no multiple of block_size 16"):
        check_ends(Settings(block_size=16, mamba_block_size=24))
