"""The type of the KV cache: accepted values, the origin of its scales, and refusals by name."""

from __future__ import annotations

import logging

import pytest

from preheat.backends.cpu.facts import FACTS
from preheat.errors import ModelError, SettingsError
from preheat.limits import resolve_limits
from preheat.model.kv_scales import FP8, identity, names, resolve_scales, with_kv_dtype
from preheat.plan.commands import plan
from preheat.plan.cost import ModelSizes
from preheat.plan.modes import with_defaults
from preheat.schedule.blocks import BlockPool
from preheat.schedule.prefix import PrefixCache
from preheat.schedule.sequence import Sequence
from preheat.settings import OPTIONS, Settings
from tests.pure.paper import request
from tests.pure.test_prefix import publish
from tests.specs import llama

SPEC = llama(hidden=64, inner=96, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=128)
ATTENTION = "model.layers.{}.self_attn"


def resolved(stored, asked="fp8"):
    return resolve_scales(with_kv_dtype(SPEC, asked, "bfloat16"), stored, stored.__getitem__)


def test_the_option_has_the_choices_of_the_table():
    assert set(OPTIONS["kv_cache_dtype"].choices) == {"auto", *FP8, "bfloat16", "float16", "float32"}


@pytest.mark.parametrize(
    ("asked", "dtype", "stored"),
    [("auto", "float32", "auto"), ("fp8", "bfloat16", "fp8_e4m3"), ("fp8_e4m3", "float32", "fp8_e4m3"),
     ("fp8_e5m2", "bfloat16", "fp8_e5m2"), ("fp8_inc", "bfloat16", "fp8_e4m3"), ("bfloat16", "bfloat16", "auto"),
     ("float32", "float32", "auto"), ("float16", "bfloat16", "auto")],
)  # fmt: skip
def test_the_stored_dtype_of_each_setting(asked, dtype, stored):
    assert with_kv_dtype(SPEC, asked, dtype).kv_dtype == stored


@pytest.mark.parametrize(("asked", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")])
def test_another_wide_type_than_the_models_is_refused(asked, dtype):
    with pytest.raises(SettingsError, match=f"kv_cache_dtype {asked} differs from the model's dtype, {dtype}"):
        with_kv_dtype(SPEC, asked, dtype)


def test_bytes_blocks_and_the_plan_follow():
    small = with_kv_dtype(SPEC, "fp8", "bfloat16")
    assert SPEC.kv_bytes_per_token(2) == 2 * small.kv_bytes_per_token(2) == 2 * small.kv_bytes_per_token(4)
    sizes = ModelSizes.of(small, 2)
    assert (sizes.kv_bytes_per_token, sizes.dtype_bytes) == (small.kv_bytes_per_token(2), 2)
    settings = with_defaults(Settings(kv_cache_memory_bytes=1 << 20, max_model_len=64, max_num_seqs=4096), FACTS)
    blocks = [
        resolve_limits(settings, 64, 256 * spec.kv_bytes_per_token(2), usable=1 << 30).num_blocks
        for spec in (SPEC, small)
    ]
    assert blocks[1] == 2 * blocks[0] > 2
    assert "KV cache: 256 B a token, at most 16 blocks, 1 MiB" in plan(settings, SPEC, 64, facts=FACTS)
    assert "KV cache: 128 B a token" in plan(settings, small, 64, facts=FACTS)


@pytest.mark.parametrize("names_of", range(5))
def test_each_name_of_a_scale_is_read(names_of):
    stored = {}
    for number, layer in enumerate(SPEC.layers):
        key, value = (each[names_of] for each in names(layer.attention))
        stored |= {key: 0.5 + number, value: 0.25 + number}
    assert [layer.kv.scales for layer in resolved(stored).layers] == [(0.5, 0.25), (1.5, 1.25)]


def test_the_old_single_scale_is_for_both():
    stored = {f"{ATTENTION.format(number)}.kv_scale": 2.0 for number in range(2)}
    assert {layer.kv.scales for layer in resolved(stored).layers} == {(2.0, 2.0)}


def test_without_scales_all_are_1_with_a_single_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert {layer.kv.scales for layer in resolved({}).layers} == {(1.0, 1.0)}
    (message,) = caplog.messages
    assert "scales of 1.0" in message
    assert "preheat calibrate" in message


@pytest.mark.parametrize(
    ("stored", "error", "message"),
    [({f"{ATTENTION.format(0)}.k_scale": 1.0}, ModelError, "layers.0.self_attn.v_scale is missing"),
     ({f"{ATTENTION.format(n)}.kv_scale": (1.0, -1.0)[n] for n in range(2)}, ModelError, "kv_scale .* is not a scale")],
)  # fmt: skip
def test_scales_that_cannot_be_are_named(stored, error, message):
    with pytest.raises(error, match=message):
        resolved(stored)


def test_scales_of_e4m3_are_refused_for_e5m2():
    with pytest.raises(SettingsError, match="write fp8_e4m3"):
        resolved({f"{ATTENTION.format(number)}.kv_scale": 2.0 for number in range(2)}, "fp8_e5m2")


def test_inc_scales_need_inc():
    with pytest.raises(SettingsError, match="QUANT_CONFIG"):
        Settings(kv_cache_dtype="fp8_inc")
    with pytest.raises(SettingsError, match="belong together"):
        Settings(quantization="inc")
    with pytest.raises(SettingsError, match="belong together"):
        Settings.load({"quant_config": "x.json"}, {})


def test_dtype_and_scales_are_part_of_a_blocks_hash():
    """A block's hash depends on the cache's type and scales, since other ones mean other contents."""
    small = with_kv_dtype(SPEC, "fp8", "bfloat16")
    scaled = resolved({f"{ATTENTION.format(number)}.kv_scale": 2.0 for number in range(2)})
    contents = ["", *(str(identity(spec)) for spec in (small, with_kv_dtype(SPEC, "fp8_e5m2", "bfloat16"), scaled))]
    assert identity(SPEC) is None
    assert len(set(contents)) == 4
    pool = BlockPool(64, 3)
    publish(PrefixCache(pool, contents=contents[1]), [1] * 7)
    found = [PrefixCache(pool, contents=each).lookup(Sequence(request(1, [1] * 7))).columns for each in contents]
    assert found == [0, 2, 0, 0]
