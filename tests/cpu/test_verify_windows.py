"""The checks of sliding windows see a window of a wrong length, and a block that was given back too early."""

from __future__ import annotations

import json

import pytest

from preheat.backends.cpu import attention, decode_attention
from preheat.cache_groups import CacheGroup
from preheat.errors import CheckFailed
from preheat.plan.item import NothingToRun
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.drive import Engine
from preheat.verify.given_back import check_given_back
from preheat.verify.window_check import check_windows
from preheat.warmup.record import Record

pytestmark = pytest.mark.usefixtures("eager")  # faults are planted in operations of torch

WINDOW = 20
CONFIG = {
    "architectures": ["Gemma3ForCausalLM"], "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 200, "torch_dtype": "float32",
    "max_position_embeddings": 512, "sliding_window": WINDOW, "sliding_window_pattern": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("windows")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def engine(folder, **more) -> Engine:
    options = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 2,
               "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 16, "skip_warmup": True,
               "kv_cache_memory_bytes": 1 << 24, "on_cold": "off"}  # fmt: skip
    return Engine(boot_engine, Settings.load(options | more))


@pytest.mark.parametrize("more", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_a_window_is_as_long_as_it_should_be(folder, more):
    with engine(folder, **more).unwatched() as runner:
        assert check_windows(runner) == 1
        assert len(runner.plan.limits.groups) > 1
        assert check_given_back(runner) == 2


def test_a_block_that_is_given_back_a_token_early_is_seen(folder, monkeypatch):
    right = CacheGroup.behind
    monkeypatch.setattr(CacheGroup, "behind", lambda group, ends, size: right(group, ends + 1, size))
    with engine(folder).unwatched() as runner, pytest.raises(CheckFailed, match="given back: a token behind 50 others"):
        check_given_back(runner)


def test_a_window_that_no_sequence_is_longer_than_is_left_out(folder):
    with (
        engine(folder, max_model_len=WINDOW + 4).unwatched() as runner,
        pytest.raises(NothingToRun, match="no sequence"),
    ):
        check_windows(runner)


def in_all_rows(patch, more):
    right = attention.Heads
    patch.setattr(attention, "Heads", lambda window, *rest, **by: right(window and window + more, *rest, **by))


def in_rows_that_are_read(patch, more):
    right = attention.plan_tiles

    def plan(rows, block_size, window, *rest, **named):
        return right(rows, block_size, window and window + more, *rest, **named)

    patch.setattr(attention, "plan_tiles", plan)


def in_rows_that_decode(patch, more):
    right = decode_attention.DecodeAttention.__init__

    def begin(self, position, slots, table, heads, *rest, **named):
        other = heads._replace(window=heads.window and heads.window + more)
        right(self, position, slots, table, other, *rest, **named)

    patch.setattr(decode_attention.DecodeAttention, "__init__", begin)


@pytest.mark.parametrize("more", [1, -1])
@pytest.mark.parametrize("plant", [in_all_rows, in_rows_that_are_read, in_rows_that_decode])
def test_a_window_that_is_off_by_one_is_seen(folder, plant, more, monkeypatch):
    plant(monkeypatch, more)
    said = r"that is the first of|first of 5" if plant is in_rows_that_are_read else "decodes"
    with engine(folder).unwatched() as runner, pytest.raises(CheckFailed, match=said) as error:
        check_windows(runner)
    assert ("more" if more > 0 else "less") in str(error.value)


def test_the_check_at_boot_has_a_row_for_it(folder, monkeypatch):
    booted = {"skip_warmup": False, "boot_check": "quick", "max_num_batched_tokens": 32}
    checks = Record.from_json(engine(folder, **booted).ready.record).entries
    named = {each.shape.get("name"): each.outcome for each in checks}
    assert named["windows"] == named["given back"] == "ready"
    in_all_rows(monkeypatch, 1)
    assert "windows: a token that decodes sees more" in engine(folder, **booted).ready.blocked_reason
