"""Intel Neural Compressor's files, written here as INC writes them, and the scales that follow from them."""

from __future__ import annotations

import json
import logging
import math

import pytest

from preheat.errors import SettingsError
from preheat.model import inc
from preheat.model.inc import cache_scales, linear_modules, linear_scales, with_inc
from preheat.model.inc_files import DEVICES, Ranges, read_config, read_ranges
from tests.specs import llama

SPEC = llama(hidden=64, inner=96, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=128)
LAYER = "model.layers.{}."
INPUTS = {"self_attn.qkv_proj": 3.0, "self_attn.o_proj": 0.7, "mlp.gate_up_proj": 5.5, "mlp.down_proj": 40.0}
CACHES = {"self_attn.attn.impl.k_cache": 12.0, "self_attn.attn.impl.v_cache": 2.0}
QUANT = {
    "mode": "QUANTIZE", "observer": "maxabs", "scale_method": "maxabs_hw", "scale_format": "CONST",
    "allowlist": {"types": [], "names": []}, "blocklist": {"types": [], "names": []},
}  # fmt: skip


def nodes(times=1.0):
    found = {"lm_head": {"inputs": [[[9.0 * times]]], "params": {"weight": [[0.5]]}}}
    for layer in range(2):
        for name, most in INPUTS.items():
            found[LAYER.format(layer) + name] = {"inputs": [[[most * times]]], "params": {"weight": [[0.25]]}}
        for name, most in CACHES.items():
            found[LAYER.format(layer) + name] = {"inputs": [[[most * times]]]}
        found[LAYER.format(layer) + "self_attn.attn.impl.matmul_qk"] = {"inputs": [[[8.0]], [[12.0 * times]]]}
    return found


def write(folder, *, ranks=(1.0,), rank_names=True, sub="g3", **changes):
    """Write a configuration, with the ranges of each rank beside it, and return its path."""
    stats = folder / sub / "inc_output"
    stats.parent.mkdir(exist_ok=True)
    for rank, times in enumerate(ranks):
        suffix = f"_{rank}_{len(ranks)}" if rank_names else ""
        content = {"GlobalRank": None, "LocalRank": rank, "Mode": "DynamicRange", "Nodes": nodes(times)}
        stats.with_name(f"inc_output_hooks_maxabs{suffix}.json").write_text(json.dumps(content, indent=4))
        stats.with_name(f"inc_output_hooks_maxabs{suffix}_mod_list.json").write_text(json.dumps(list(nodes())))
        stats.with_name(f"inc_output_hooks_maxabs_MAXABS_HW{suffix}.json").write_text("{}")  # INC's scales
    path = folder / "maxabs_quant.json"
    values = {**QUANT, "dump_stats_path": str(stats), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return str(path)


def scales_of(path):
    config = read_config(path)
    ranges = read_ranges(config)
    attentions = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    return config, linear_scales(config, SPEC, ranges), cache_scales(config, attentions, ranges)


def test_a_file_is_read_and_scales_follow_gaudi_3(tmp_path):
    config, linear, cache = scales_of(write(tmp_path))
    assert config.device == "gaudi3"
    assert linear == {
        **{LAYER.format(layer) + name: 2.0 ** math.ceil(math.log2(most / 112)) for name, most in INPUTS.items()
           for layer in range(2)},
        "lm_head": 2.0 ** math.ceil(math.log2(9 / 112)),
    }  # fmt: skip
    assert cache == [(0.125, 2.0**-5)] * 2


def test_scales_apply_to_layers_outside_the_blocklist(tmp_path):
    _, linear, _ = scales_of(write(tmp_path, blocklist={"names": ["lm_head", r"mlp\.down_proj\b"], "types": []}))
    spec = with_inc(SPEC, linear, coded=False)
    formats = {path: each.format for path, each in spec.linears()}
    rounded = {path for path, name in formats.items() if name == "inc"}
    assert rounded == {f"layers.{n}.{at}" for n in range(2) for at in ("attention.qkv", "attention.o", "mlp.gate_up")}
    assert with_inc(SPEC, {}, coded=False) == SPEC
    coded = {path for path, each in with_inc(SPEC, linear, coded=True).linears() if each.scheme is not None}
    assert coded == rounded


@pytest.mark.parametrize(
    ("device", "method", "maxabs", "expected"),
    [("gaudi3", "maxabs_hw", 112.0, 1.0), ("gaudi3", "maxabs_hw", 113.0, 2.0), ("gaudi3", "maxabs_hw", 1e9, 2.0**7),
     ("gaudi3", "maxabs_hw", 0.0, 2.0**-55), ("gaudi2", "maxabs_hw", 60.0, 1.0), ("gaudi2", "maxabs_hw", 61.0, 16.0),
     ("gaudi2", "maxabs_hw", 3.0, 1 / 16), ("gaudi2", "maxabs_hw", 4.0, 1.0), ("gaudi2", "maxabs_hw", 1e-9, 2.0**-8),
     ("gaudi2", "maxabs_pow2", 61.0, 2.0), ("gaudi2", "maxabs_arbitrary", 30.0, 0.5),
     ("gaudi3", "maxabs_arbitrary", 11.2, 11.2 / 112), ("gaudi3", "maxabs_pow2", 1e9, 2.0**24),
     ("gaudi3", "unit_scale", 77.0, 1.0), ("gaudi2", "hw_aligned_single_scale", 1.0, 16.0)],
)  # fmt: skip
def test_scales_by_device_and_method(tmp_path, device, method, maxabs, expected):
    config = read_config(write(tmp_path, scale_method=method, sub="g2" if device == "gaudi2" else "g3"))
    assert config.device == device
    assert config.input_scale(maxabs) == pytest.approx(expected, rel=1e-15)
    if method.startswith("maxabs") and 0 < maxabs < 1e8:
        assert config.weight_scale(2 * maxabs) == config.input_scale(maxabs)  # the backoffs are 0.5 and 0.25


def test_scales_of_the_hardware():
    assert DEVICES["gaudi2"].hardware == [16.0**power for power in (1, 0, -1, -2)]
    assert len(DEVICES["gaudi3"].hardware) == 63


def test_ranks_are_unified_by_the_greatest(tmp_path):
    whole = scales_of(write(tmp_path, ranks=(4.0,), rank_names=False))
    (tmp_path / "ranks").mkdir()
    path = write(tmp_path / "ranks", ranks=(1.0, 4.0, 2.0))
    assert scales_of(path)[1:] == whole[1:]
    (tmp_path / "ranks" / "g3" / "inc_output_hooks_maxabs_1_3.json").unlink()
    with pytest.raises(SettingsError, match=r"hooks_maxabs_1_3\.json is missing"):
        scales_of(path)


def test_old_keys_old_names_and_missing_keys(tmp_path):
    """whitelist and blacklist, a checkpoint's own module names, and INC's defaults are read."""
    path = write(tmp_path, blocklist=None, allowlist=None, scale_method=None, mode=None, observer=None,
                 blacklist={"names": ["lm_head"]}, whitelist={"types": ["Linear", "KVCache"]})  # fmt: skip
    config, linear, _ = scales_of(path)
    assert (config.mode, config.method, config.lenient) == ("QUANTIZE", "maxabs_hw", False)
    assert len(linear) == 8
    ranges = {name: each for name, each in read_ranges(config).items() if "qkv" not in name}
    for layer in range(2):
        prefix = LAYER.format(layer) + "self_attn."
        ranges |= {f"{prefix}{part}_proj": Ranges((most,)) for part, most in zip("qkv", (1.0, 3.0, 2.0), strict=True)}
    assert linear_scales(config, SPEC, ranges) == linear


def test_types_are_vllms_classes(tmp_path):
    path = write(tmp_path, blocklist={"types": ["QKVParallelLinear", "ParallelLMHead"]})
    assert {name.rpartition(".")[2] for name in scales_of(path)[1]} == {"o_proj", "gate_up_proj", "down_proj"}
    assert [kind for *_, kind, _ in linear_modules(SPEC)][:4] == [
        "QKVParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"scale_method": "act_maxabs_hw_weights_pcs_maxabs_pow2"}, "scale_method act_maxabs"),
     ({"mode": "SHAPE"}, "mode SHAPE is not supported"), ({"observer": "shape"}, "observer shape"),
     ({"fp8_config": "E5M2"}, "fp8_config E5M2"), ({"dynamic_quantization": "True"}, "dynamic_quantization True"),
     ({"scale_methode": "maxabs_hw"}, "scale_methode is not supported"), ({"scale_params": {"a": 1}}, "scale_params"),
     ({"device_for_scales": "GAUDI1"}, "device_for_scales GAUDI1"), ({"blocklist": ["lm_head"]}, "an object of names"),
     ({"blocklist": {"names": ["("]}}, "not a regular expression"), ({"dump_stats_path": "/nowhere/x"}, "no ranges in"),
     ({"blocklist": {"names": ["k_proj"]}}, "name only some parts of .*qkv_proj"),
     ({"blocklist": {"names": ["self_attn"]}}, "leave out .*k_cache")],
)  # fmt: skip
def test_unsupported_inc_configs_are_named(tmp_path, changes, message):
    with pytest.raises(SettingsError, match=message):
        scales_of(write(tmp_path, **changes))


def test_a_module_without_ranges_is_named_or_left_unquantized(tmp_path):
    config = read_config(write(tmp_path))
    ranges = read_ranges(config)
    del ranges["model.layers.1.mlp.down_proj"]
    with pytest.raises(SettingsError, match=r"no ranges of model\.layers\.1\.mlp\.down_proj"):
        linear_scales(config, SPEC, ranges)
    lenient = read_config(write(tmp_path, ignore_modules_wo_measures="True"))
    assert len(linear_scales(lenient, SPEC, ranges)) == 8


@pytest.mark.parametrize("bad", [float("nan"), -1.0, "x", None])
def test_ranges_that_are_none_are_named(tmp_path, bad):
    path = write(tmp_path)
    file = tmp_path / "g3" / "inc_output_hooks_maxabs_0_1.json"
    content = json.loads(file.read_text())
    content["Nodes"]["lm_head"]["inputs"] = [[[bad]]]
    file.write_text(json.dumps(content))
    with pytest.raises(SettingsError, match="the ranges of lm_head cannot be read"):
        scales_of(path)


def test_a_pickle_alone_is_not_opened(tmp_path):
    path = write(tmp_path)
    (tmp_path / "g3" / "inc_output_hooks_maxabs_0_1.json").rename(tmp_path / "g3" / "inc_output_hooks_maxabs_0_1.npz")
    with pytest.raises(SettingsError, match="pickles"):
        scales_of(path)


def test_files_of_another_device_are_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        inc.warn_of_device(read_config(write(tmp_path, sub="g2")), "cpu")
        inc.warn_of_device(read_config(write(tmp_path, sub="own")), "cpu")
        inc.warn_of_device(read_config(write(tmp_path, sub="own", device_for_scales="GAUDI3")), "cpu")
    assert [word for message in caplog.messages for word in ("Gaudi 2", "Gaudi 3") if word in message] == [
        "Gaudi 2", "Gaudi 3",
    ]  # fmt: skip
