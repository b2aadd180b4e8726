"""Cache groups: blocks behind a window are given back, and a prefix is found in every group or in none.

The scheduler runs on a paper device. A row may read only its own places of its own group.
"""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.backends.cpu.facts import FACTS
from preheat.cache_groups import FEW_GROUPS, MAX_GROUPS, WHOLE, CacheGroup, Entry, cut, group_of, room_of
from preheat.errors import SettingsError
from preheat.plan.commands import plan
from preheat.schedule import results
from preheat.schedule.blocks import BlockPool
from preheat.schedule.prefix import Hit, PrefixCache
from preheat.schedule.running import RunningSequences
from preheat.schedule.scheduler import Caching
from preheat.schedule.sequence import Sequence
from preheat.schedule.slots import Slots
from preheat.settings import Settings
from tests.pure.paper import Harness, WrongCache, limits, request
from tests.specs import llama

SIZE = 4
MIXED = cut([None, 6, 6])
"""A group of full layers, and two groups with the same window."""
WINDOWS = st.lists(st.sampled_from([None, None, 3, 6, 9]), min_size=1, max_size=20)
ENTRIES: list[Entry] = [(2, 1, 8), (2, 2, 8), (2, 1, 12), ()]
LAYERS = st.lists(st.tuples(st.sampled_from([None, None, 3, 6]), st.sampled_from(ENTRIES)), min_size=1, max_size=20)


def roomy(groups=MIXED, **changes):
    return limits(groups=groups, num_blocks=200, **changes)


@given(windows=WINDOWS)
def test_each_layer_is_in_one_group_of_its_window(windows) -> None:
    groups = cut(windows)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    assert len(groups) <= MAX_GROUPS
    full = [group.window is None for group in groups]
    assert full == sorted(full, reverse=True), "groups without a window come first"
    places = [group_of(groups, layer) for layer in range(len(windows))]
    assert len(set(places)) == len(windows)
    assert max(place for _, place in places) < room_of(groups, [(1,)] * len(windows))


@given(layers=LAYERS.filter(lambda layers: any(entry for _, entry in layers)))
def test_entries_of_a_group_have_one_shape_and_fit_into_a_block(layers) -> None:
    """A layer without an entry of its own is in no group, and each row of an entry is whole."""
    windows, entries = [window for window, _ in layers], [entry for _, entry in layers]
    groups = cut(windows, entries)
    room = room_of(groups, entries)
    owners = [at for at, each in enumerate(entries) if each]
    assert sorted(layer for group in groups for layer in group.layers) == owners
    assert len(groups) <= MAX_GROUPS
    for group in groups:
        ((entry, window),) = {(entries[layer], windows[layer]) for layer in group.layers}
        assert (group.window, room % entry[-1]) == (window, 0)
        assert len(group.layers) * prod(entry) <= room
    assert room_of(WHOLE, entries) >= sum(prod(entry) for entry in entries if entry)


def gemma4(layers: int, *, full: Entry, local: Entry, shared: int = 0) -> tuple[list[int | None], list[Entry]]:
    windows = [None if (at + 1) % 6 == 0 else 1024 for at in range(layers)]
    entries = [local if window else full for window in windows[: layers - shared]]
    return windows, entries + [()] * shared


@pytest.mark.parametrize(
    ("shape", "sizes", "wasted"),
    [
        (gemma4(30, full=(2, 2, 512), local=(2, 8, 256)), [5] + [2] * 12 + [1], 0.28),
        (gemma4(60, full=(2, 4, 512), local=(2, 16, 256)), [10] + [5] * 10, 0.0),
        (gemma4(42, full=(2, 2, 512), local=(2, 2, 256), shared=18), [2, 2] + [4] * 5, 0.0),
    ],
    ids=["26B-A4B", "31B", "E4B"],
)
def test_groups_of_layers_with_larger_heads(shape, sizes, wasted) -> None:
    """No room of full layers is wasted, and of all layers no more than the part ``wasted``."""
    windows, entries = shape
    groups = cut(windows, entries)
    assert [len(group.layers) for group in groups] == sizes
    room, whole = room_of(groups, entries), room_of(WHOLE, entries)
    assert all(room == sum(prod(entries[layer]) for layer in each.layers) for each in groups if each.window is None)
    assert len(groups) * room / whole - 1 <= wasted


def test_more_groups_than_few_only_spare_full_layers() -> None:
    """A model that wastes nothing of full layers in few groups keeps few."""
    assert len(cut(([1024] * 5 + [None]) * 10 + [1024] * 2)) <= FEW_GROUPS


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None, 128] * 12, [12, 12]),
        (([512] * 5 + [None]) * 4 + [512] * 2, [4, 4, 4, 4, 4, 4, 2]),
        ([4096] * 32, [32]),
        ([None] * 3, [3]),
    ],
    ids=["gpt-oss", "gemma3", "mistral", "full"],
)
def test_groups_of_real_shapes(windows, sizes) -> None:
    assert [len(group.layers) for group in cut(windows)] == sizes


@given(
    window=st.one_of(st.none(), st.integers(1, 20)),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    size=st.integers(1, 6),
)
def test_no_sequence_holds_more_than_its_need(window, chunks, size) -> None:
    """Two steps are in flight: blocks are given back once the older one has settled."""
    group, begun, most = CacheGroup(window), 0, 0
    for before, chunk in zip([0, *chunks], chunks, strict=False):
        settled = begun - before  # the last step is still in flight
        begun += chunk
        most = max(most, -(-begun // size) - group.behind(settled, size))
    assert most <= group.columns(sum(chunks), size, 2 * max(chunks))


@given(end=st.integers(0, 40), window=st.integers(1, 20), size=st.integers(1, 6))
def test_exactly_the_blocks_behind_the_window_are_given_back(end, window, size) -> None:
    seen = {position // size for position in range(max(end - window + 1, 0), end + 1)}
    assert CacheGroup(window).behind(end, size) == min(seen)
    columns = end // size
    needed = {position // size for position in range(max(columns * size - window + 1, 0), columns * size)}
    assert CacheGroup(window).tail(columns, size) == len(needed)


def grown(harness: Harness, length: int = 40) -> Harness:
    harness.add(request(0, [number % 5 for number in range(length)], 12))
    harness.run()
    harness.verify()
    return harness


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [4, 16])
def test_a_repeated_prompt_is_found_to_its_last_block(overlap, chunk) -> None:
    harness = grown(Harness(roomy(max_num_batched_tokens=chunk), overlap=overlap))
    harness.add(request(1, [number % 5 for number in range(40)], 12))
    harness.run()
    harness.verify()
    assert harness.outcomes[1].starts == [36]


@given(windows=WINDOWS, seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_every_group_has_the_prefix_that_is_found(windows, seed) -> None:
    """Compare a hit with a slow search over all lengths, in a pool that has lost some blocks."""
    rng, groups = random.Random(seed), cut(windows)
    cache = PrefixCache(BlockPool(400, SIZE), groups=groups)
    sequence = Sequence(request(0, list(range(33))))
    known = {}
    for column in range(8):
        for group in range(len(groups)):
            if rng.random() < 0.8:
                (known[group, column],) = cache.pool.allocate(1)
                cache.pool.publish(known[group, column], cache._key(sequence, sequence.tokens, column, group))

    def has(columns: int) -> bool:
        return all(
            (number, column) in known
            for number, group in enumerate(groups)
            for column in range(columns - group.tail(columns, SIZE), columns)
        )

    hit = cache.lookup(sequence)
    assert hit.columns == max(columns for columns in range(9) if has(columns))
    for number, blocks in enumerate(hit.blocks):
        assert blocks == [known[number, column] for column in range(hit.columns - len(blocks), hit.columns)]


def test_a_window_needs_few_blocks_and_others_use_the_rest() -> None:
    """A cache that holds one and a half sequences in full holds three of them with windows."""
    few = limits(groups=cut([None, 4, 4, 4]), num_blocks=100, max_num_batched_tokens=8, max_num_seqs=3)
    harness = Harness(few, caching=Caching(False))
    harness.add(*(request(number, [number] * 24, 40) for number in range(3)))
    harness.run()
    harness.verify()
    assert harness.scheduler.stats().preemptions == 0
    assert 3 * 4 * 16 > 99 >= few.need(64) * 3 - 3 * 4


def test_limits_must_hold_a_whole_sequence_of_every_group() -> None:
    need = limits(groups=MIXED).need(64)
    assert need == 16 + 2 * 3
    Harness(limits(groups=MIXED, num_blocks=need + 1))
    with pytest.raises(SettingsError, match=f"needs {need} blocks"):
        Harness(limits(groups=MIXED, num_blocks=need))
    assert limits(groups=MIXED, num_blocks=10, max_num_seqs=8).max_rows == 3


@pytest.mark.parametrize("chunk", [5, 32])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_least_memory_runs_one_after_the_other(chunk, overlap) -> None:
    least = limits(groups=MIXED, num_blocks=limits(groups=MIXED).need(64) + 1, max_num_batched_tokens=chunk)
    harness = Harness(least, overlap=overlap, defrag_threshold=0)
    harness.add(*(request(number, [number % 2] * 30, 34) for number in range(3)))
    harness.run()
    harness.verify()


def branches() -> list[list[int]]:
    """Run prompts with a common beginning one after the other, in a small cache."""
    harness = Harness(limits(groups=cut([None, 4]), num_blocks=28, max_num_batched_tokens=8))
    common = [1, 2, 3, 4, 5, 6, 7, 8] * 2
    for number in range(5):
        harness.add(request(number, common + [number + 1] * 24, 4))
        harness.run()
    harness.verify()
    return [harness.outcomes[number].starts for number in range(5)]


def test_a_common_beginning_is_found_again_and_again() -> None:
    assert branches() == [[0], [16], [16], [16], [16]]


def test_control_a_beginning_that_is_not_kept_is_lost(monkeypatch) -> None:
    monkeypatch.setattr(RunningSequences, "_is_kept", lambda *_: False)
    assert branches()[-1] == [0]


give_back = RunningSequences.give_back


def one_early(self, settled, ends) -> None:
    give_back(self, settled, ends + SIZE)


def test_control_a_block_given_back_one_early_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(RunningSequences, "give_back", one_early)
    with pytest.raises((WrongCache, RuntimeError)):
        grown(Harness(roomy(max_num_batched_tokens=8)))


def test_control_a_block_published_after_its_release_is_noticed(monkeypatch) -> None:
    publish = results._publish

    def late(running, prefix, schedule, ends, live) -> None:
        running.give_back(schedule.slots[live], ends[live])
        publish(running, prefix, schedule, ends, live)

    monkeypatch.setattr(results, "_publish", late)
    with pytest.raises((WrongCache, RuntimeError)):
        grown(Harness(roomy(groups=cut([None, 2]), max_num_batched_tokens=16)))


def test_control_a_hit_of_the_full_group_alone_is_noticed(monkeypatch) -> None:
    harness = grown(Harness(roomy()))
    for key, block in list(harness.scheduler.pool._block_of.items()):
        if len(key) > 16 and not harness.scheduler.pool.refs[block]:  # windows lose what they have
            harness.scheduler.pool._cached.move_to_end(key, last=False)
    harness.scheduler.pool.release(harness.scheduler.pool.allocate(190))
    lookup = PrefixCache.lookup

    def full_alone(self, sequence) -> Hit:
        groups, self.groups = self.groups, WHOLE
        hit = lookup(self, sequence)
        self.groups = groups
        return Hit(hit.columns, [*hit.blocks, *([] for _ in groups[1:])], hit.branch)

    prompt = request(1, [number % 5 for number in range(40)], 12)
    assert (
        lookup(harness.scheduler.prefix, Sequence(prompt)).columns
        < full_alone(harness.scheduler.prefix, Sequence(prompt)).columns
    )
    monkeypatch.setattr(PrefixCache, "lookup", full_alone)
    harness.add(prompt)
    with pytest.raises(WrongCache):
        harness.run()


def test_control_the_table_of_another_group_is_noticed(monkeypatch) -> None:
    harness = Harness(roomy(groups=cut([None, 60])))
    harness.add(request(0, [1] * 9, 9))
    harness.step()
    slots: Slots = harness.scheduler.slots
    slots._blocks[0] = slots._blocks[0, ::-1].copy()
    with pytest.raises(WrongCache):
        harness.run()


def test_control_lengths_that_are_not_settled_are_noticed(monkeypatch) -> None:
    """With steps in flight, the slots' lengths are ahead of the results."""

    def ahead(self, settled: np.ndarray, ends: np.ndarray) -> None:
        give_back(self, settled, self.slots.device_len[settled] + 3)

    monkeypatch.setattr(RunningSequences, "give_back", ahead)
    with pytest.raises((WrongCache, RuntimeError)):
        grown(Harness(roomy(max_num_batched_tokens=16), overlap=True))


def test_the_plan_states_the_memory_of_each_group() -> None:
    """A third of the layers have no window; without groups the same memory holds fewer sequences."""
    plain = llama(hidden=64, inner=96, layers=3, heads=4, kv_heads=2, head_dim=16, vocab=128)
    layers = [replace(each, attention=replace(each.attention, window=32 if at else None))
              for at, each in enumerate(plain.layers)]  # fmt: skip
    spec = replace(plain, layers=tuple(layers))
    options = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16,
               "kv_cache_memory_bytes": 3 << 20, "device": "cpu"}  # fmt: skip
    said = plan(Settings.load(options), spec, 1024, facts=FACTS)
    assert "1 layers, all tokens: 128 B a token, 128 KiB a sequence of 1,024 tokens" in said
    assert "2 layers, a window of 32, at most 128 in flight: 256 B a token, 44 KiB a sequence" in said
    assert "4 such sequences fit; each takes 172 KiB, and 384 KiB without cache groups" in said
    off = plan(Settings.load(options | {"disable_hybrid_kv_cache_manager": True}), spec, 1024, facts=FACTS)
    assert "cache groups are off: disable_hybrid_kv_cache_manager is set" in off
    assert "such sequences fit" not in plan(Settings.load(options), plain, 1024, facts=FACTS)
