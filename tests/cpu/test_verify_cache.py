"""``preheat verify``'s paths for blocks and for the frontend, and the planted fault of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from preheat.execution import executor, logit_stages
from preheat.frontend.input_processor import InputProcessor
from preheat.schedule import prefix, results
from preheat.schedule.slots import FIELDS, Slots
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.cache_paths import answers_as_prompts, given_up, moved, nearly_equal
from preheat.verify.compare import PathResult
from preheat.verify.drive import Engine
from preheat.verify.prompts import Size, make_prompts
from preheat.verify.served_path import served
from preheat.verify.verification import tight
from tests.cpu.planted import split_by_batch

pytestmark = pytest.mark.usefixtures("two_layers", "eager")

OUTPUTS = 12
OPTIONS = {"max_num_seqs": 8, "block_size": 32, "skip_warmup": True, "boot_check": "off", "on_cold": "off"}


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """Return an engine with few blocks, and one as asked."""
    settings, size = Settings.load(OPTIONS | {"dtype": "float32"}), Size(4, 1, OUTPUTS, 300)
    engine = Engine(boot_engine, settings)
    return Engine(boot_engine, tight(settings, make_prompts(size, engine.vocab_size, 600))), engine


WAYS: dict[str, Callable[[Engine, Engine], PathResult | None]] = {
    "nearly equal prompts": lambda few, engine: nearly_equal(engine, []),
    "prompts given up": lambda few, engine: given_up(engine),
    "blocks moved at once": lambda few, engine: moved(engine),
    "served, by the contract": lambda few, engine: served(engine, OUTPUTS),
}


def test_all_is_well_and_was_really_taken(engines):
    results = {path: way(*engines) for path, way in WAYS.items()}
    assert [path for path, result in results.items() if result.path != path or result.first] == []
    numbers = [[int(word.replace(",", "")) for word in result.note.split() if word[0].isdigit()]
               for result in results.values()]  # fmt: skip
    assert numbers[0] == [416]  # tokens from the prefix cache
    assert numbers[1][0] == 2 * OPTIONS["block_size"]
    assert numbers[2][0] > 4  # the fifth has 128 pairs
    clear, total = numbers[3]
    assert clear > 0.8 * total > 200


def without_last_token(patch):
    """Plant a block hash without the block's last token."""
    right = prefix.chained
    patch.setattr(prefix, "chained", lambda *args: right(*args[:-1], args[-1] - 1))


def ends_later(patch, more):
    right = results._publish
    patch.setattr(results, "_publish", lambda *args: right(*args[:3], args[3] + more, *args[4:]))


def one_token_early(patch):
    """Plant a block that is found before its last token is computed."""
    ends_later(patch, 1)


def some_pairs(patch):
    """Plant a swap that moves only its first 16 pairs."""
    right = executor.swap_parts
    patch.setattr(executor, "swap_parts", lambda pairs, size, padded: right(pairs[:16], size, padded=padded))


def short_seeds(patch):
    """Plant a frontend that knows 32 bits of a seed."""
    right = InputProcessor.fan_out
    patch.setattr(
        InputProcessor, "fan_out",
        lambda *args: [replace(each, seed=each.seed % 2**32) for each in right(*args)],
    )  # fmt: skip


PLANTED = {
    "nearly equal prompts": without_last_token,
    "prompts given up": one_token_early,
    "blocks moved at once": some_pairs,
    "served, by the contract": short_seeds,
}


@pytest.mark.parametrize("path", PLANTED)
def test_each_planted_fault_is_found_by_its_path(engines, path, monkeypatch):
    PLANTED[path](monkeypatch)
    assert WAYS[path](*engines).first is not None


def test_a_block_that_is_never_published_is_missed(engines, monkeypatch):
    """A block that is never published keeps the bits right.

    It breaks the rule of how much is found.
    """
    ends_later(monkeypatch, -1)
    result = nearly_equal(engines[1], [])
    assert result is not None
    assert result.first is not None
    assert result.first.gap == -OPTIONS["block_size"]


def another_choice(patch):
    right = InputProcessor.fan_out
    patch.setattr(InputProcessor, "fan_out", lambda *args: [replace(each, choice=0) for each in right(*args)])


def parameters_stay(patch):
    """Plant parameters that stay in a slot whose next owner has the default."""

    def describe(self, slots, request):
        for name, field in FIELDS.items():
            if value := field.of(request):
                getattr(self, name)[slots] = value

    patch.setattr(Slots, "describe", describe)


def one_short(patch):
    right = results._at_max_len
    patch.setattr(results, "_at_max_len", lambda slots, kept: right(slots, kept._replace(positions=kept.positions + 1)))


def bans_end_early(patch):
    right = logit_stages.MinTokens.edits
    patch.setattr(logit_stages.MinTokens, "edits", lambda *args: right(*args[:2], args[2] + 1, args[3]))


@pytest.mark.parametrize("plant", [short_seeds, another_choice, parameters_stay, one_short, bans_end_early])
def test_broken_contracts_are_found_through_the_frontend(engines, plant, monkeypatch):
    plant(monkeypatch)
    result = served(engines[1], OUTPUTS)
    assert result.first is not None
    assert result.identical < result.prompts


def test_a_difference_between_decoding_and_reading_is_found(engines, monkeypatch):
    engine = engines[1]
    prompts = make_prompts(Size(4, 1, OUTPUTS, 300), engine.vocab_size, 600)
    first = engine.run(prompts)
    said = engine.answers
    assert answers_as_prompts("answers", engine, prompts, first).first is None
    split_by_batch(monkeypatch)
    engine.answers = said
    assert answers_as_prompts("answers", engine, prompts, first).first is not None
