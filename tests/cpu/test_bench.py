"""The bench on a small engine: every part gives its figures, and nothing is cold."""

from __future__ import annotations

import json
from math import isfinite

import pytest
import torch

from benchmarks.common.checkpoint import write_checkpoint
from benchmarks.common.shapes import FORMATS, WEIGHTS, config_of, engine_options, named
from preheat.backends.cpu.backend import CpuBackend
from preheat.cli.main import main
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.loader import load_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def test_offline_parts_share_an_engine_and_find_nothing_cold(tmp_path, capsys):
    parts = ["first", "latency", "throughput"]
    line = ["bench", *parts, "--tiny", "--shape", "bundled", "--output", str(tmp_path), "--no-skip-warmup"]
    assert main([*line, "--determinism-warmup-iterations", "0"]) == 0
    found = json.loads((tmp_path / "bundled.json").read_text())["parts"]
    assert list(found) == parts
    assert len(found["first"]["figures"]["rows"]) == 9
    latency = found["latency"]["figures"]
    assert set(latency["itl_ms"]) == {"1", "2"} and len(latency["prefill_tok_s_by_length"]) > 5
    assert found["throughput"]["figures"]["nanobench"]["requests"] == 4
    assert found["throughput"]["options"]["on_cold"] == "raise"
    assert found["throughput"]["machine"]["versions"]["torch"] == torch.__version__
    assert "nanobench, tokens/s" in capsys.readouterr().out


def test_a_format_has_a_file_of_its_own(tmp_path):
    """A format has a file of its own and a quantized engine.

    A checkpoint's format is in the shape's config.
    """
    line = ["bench", "throughput", "--tiny", "--shape", "bundled", "--output", str(tmp_path), "--on-cold", "count"]
    assert main([*line, "--format", "fp8", "--kv-cache-dtype", "fp8"]) == 0
    found = json.loads((tmp_path / "bundled_fp8_kv_fp8.json").read_text())["parts"]["throughput"]
    assert found["options"]["quantization"] == "fp8"
    assert [named("x", "awq", {}), named("x", None, {"kv_cache_dtype": "auto"})] == ["x_awq", "x"]
    for name in FORMATS:
        options = engine_options("qwen3-30b-a3b", {}, tmp_path, tiny=True, number_format=name)
        spec = read_spec(read_config(tmp_path), options.get("quantization"))
        assert spec.layers[0].mlp.experts.scheme is not None
    with pytest.raises(SystemExit):
        main([*line, "--format", "int3"])


def test_grammars_are_measured_beside_plain_rows(tmp_path):
    assert main(["bench", "grammars", "--tiny", "--device", "cpu", "--output", str(tmp_path)]) == 0
    figures = json.loads((tmp_path / "grammars_llama-3.1-8b.json").read_text())["figures"]
    rows = figures["between_tokens_ms"]
    assert list(rows) == ["1", "2"] and list(rows["2"]) == ["plain", "full", "nested"]
    assert rows["2"]["nested"]["wait"] > 0 == rows["2"]["plain"]["wait"]
    assert set(figures["to_first_token_ms"]) >= {"first_to_later", "new_more", "cached_more"}


def test_parts_that_do_not_fit_are_left_out_and_named(tmp_path):
    line = ["bench", "latency", "--tiny", "--shape", "bundled", "--output", str(tmp_path), "--on-cold", "count"]
    assert main([*line, "--max-num-seqs", "1", "--seconds", "0"]) == 0
    left_out = json.loads((tmp_path / "bundled.json").read_text())["parts"]["latency"]["figures"]["left_out"]
    assert "batch 2: max_num_seqs is lower" in left_out
    assert "batch 1: out of time" in left_out


def test_narrow_weights_send_all_tokens_to_the_same_experts(tmp_path):
    """Their figures have a file of their own, and refuse runs that would load other weights."""
    counted = {}
    for weights in WEIGHTS:
        line = ["bench", "latency", "--tiny", "--shape", "gpt-oss-20b", "--weights", weights, "--device", "cpu"]
        assert main([*line, "--output", str(tmp_path), "--on-cold", "count", "--execution-mode", "eager"]) == 0
        found = json.loads((tmp_path / f"{named('gpt-oss-20b', None, {}, weights)}.json").read_text())["parts"]
        counted[weights] = found["latency"]["figures"]["arithmetic"]["2"]["experts"]["counted"]
    top_k = config_of("gpt-oss-20b", tiny=True)["num_experts_per_tok"]
    assert counted["narrow"] == top_k < counted["normal"]
    for refused in (
        [*line, "--shape", "bundled"],
        [*line, "--tensor-parallel-size", "2"],
        ["bench", "serve", *line[2:]],
    ):
        assert main(refused) == 2


@pytest.mark.parametrize("tied", [False, True])
def test_a_written_checkpoint_is_one(tmp_path, monkeypatch, tied):
    monkeypatch.setattr("benchmarks.common.checkpoint.SHARD_BYTES", 5000)
    monkeypatch.setattr("benchmarks.common.checkpoint.BLOCK", 1 << 10)
    config = CONFIG | {"tie_word_embeddings": tied}
    size = write_checkpoint(config, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    weights = load_weights(read_spec(config), tmp_path, torch.bfloat16, CpuBackend())
    assert size > weights.embedding.numel() * 2
    assert 0.01 < float(weights.embedding.float().std()) < 0.03


def test_elastic_compares_digests_and_answers(tmp_path):
    from benchmarks.elastic import main as elastic

    elastic(["--tiny", "--save", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "elastic_bundled.json").read_text())["figures"]
    assert found["update"]["digest_equal"] and found["update"]["median_s"] > 0
    assert found["offload"]["answers_equal"] and found["offload"]["tokens_from_host"] > 100
    assert found["sleep"]["up_s"] > 0 and found["sleep"]["first_to_steady"] > 0


def test_adapters_are_measured_beside_an_engine_without(tmp_path):
    line = ["bench", "lora", "--tiny", "--adapters", "2", "--output", str(tmp_path), "device=cpu", "on_cold=count"]
    assert main(line) == 0
    figures = json.loads((tmp_path / "lora.json").read_text())["figures"]
    assert list(figures["itl_ms"]) == ["without", "base rows", "one", "mixed"]
    assert all(isfinite(value) for kind in figures["itl_ms"].values() for value in kind.values())
    assert figures["loading"]["place_host_ms"] > 0 and figures["places_mib"] > 0
    http, long = figures["http"], figures["long"]
    assert http["streams"] == 2 and http["loads"] == 2
    for span in ("still", "beside_requests", "while_loading"):
        assert set(http[span]) == {"seconds", "tokens", "itl_p50", "itl_p99", "itl_max"}
    assert http["while_loading"]["tokens"] > 0
    assert http["load_ms_max"] > 0 and http["first_token_ms_p50_after_load"] > 0
    assert (long["rows"], long["context"]) == (2, 100) and set(long) == {"rows", "context", "none", "mixed"}
    assert all(isfinite(long[kind][what]) for kind in ("none", "mixed") for what in ("prompt_ms", "itl_ms"))


def test_exchanges_of_ranks_are_measured_each_way(tmp_path):
    assert main(["bench", "ranks", "--calls", "3", "--output", str(tmp_path)]) == 0
    figures = json.loads((tmp_path / "ranks.json").read_text())["figures"]
    assert set(figures["step_us"]) == {"memory", "TCP"}
    for row in figures["gather_us"]:
        assert set(row) == {"bytes", "memory", "TCP", "gloo"} and all(value > 0 for value in row.values())
