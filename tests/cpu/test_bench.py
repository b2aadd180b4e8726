"""The bench on a small engine: every part gives its figures, and nothing is cold."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks import grammars
from benchmarks.common.checkpoint import write_checkpoint
from benchmarks.common.vocabulary import write_tokenizer
from preheat.backends.cpu.backend import CpuBackend
from preheat.cli import main
from preheat.model.families import read_spec
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


def test_what_does_not_fit_is_left_out_and_said(tmp_path):
    line = ["bench", "latency", "--tiny", "--shape", "bundled", "--output", str(tmp_path), "--on-cold", "count"]
    assert main([*line, "--max-num-seqs", "1", "--seconds", "0"]) == 0
    left_out = json.loads((tmp_path / "bundled.json").read_text())["parts"]["latency"]["figures"]["left_out"]
    assert "batch 2: max_num_seqs is lower" in left_out
    assert "batch 1: out of time" in left_out


def test_grammars_beside_plain_rows(capsys):
    options = {"skip_warmup": False, "determinism_warmup_iterations": 0, "boot_check": "off"}
    grammars.main(["--tiny", "--shape", "bundled", "--options", json.dumps(options)])
    *lines, figures = capsys.readouterr().out.splitlines()
    found = json.loads(figures)
    assert [line["setting"] for line in found["first"]] == list(grammars.kinds())
    assert set(found["to_first_token_ms"]) == {"plain", "new", "cached"}
    (line,) = found["between_tokens"]
    assert line["rows"] == 2 and 0 <= line["wait_ms"] < line["step_ms"] and line["masks_ms"] > 0
    assert any(text.startswith("first token, new schema") for text in lines)


def test_a_made_up_tokenizer_has_every_token_and_loses_no_text(tmp_path):
    write_tokenizer(tmp_path, 4096)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = '{"näme": [1, 234], "b": "the end 😀"}\n'
    ids = made.encode(text).ids
    assert made.get_vocab_size() == 4096 and made.decode(ids) == text and len(ids) < len(text.encode())
    assert made.token_to_id("<|end_of_text|>") == 4096 - 255


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
