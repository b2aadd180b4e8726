"""GGUF files of every architecture: the bits of the safetensors checkpoint that they were made from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from preheat.errors import ModelError
from preheat.model import sources
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.gguf import architectures
from preheat.model.gguf.container import read_container
from preheat.model.gguf.folder import folder_of
from preheat.model.gguf.tensors import GgufTensors
from preheat.model.sources import StoredTensors
from tests.cpu.checkpoints import GEMMA_ROPE, LINEAR_ROPE, LLAMA3_ROPE, MODELS, Model, save_checkpoint
from tests.cpu.test_model_families import error_at_each_position, logits_of, open_decoder, random_tokens
from tests.cpu.test_quantized_ranks import on_sizes
from tests.cpu.test_tensor_parallel import TOKENS
from tests.gguf_files import write_checkpoint

FILES: dict[str, tuple[str, Model]] = {
    "llama": ("llama", MODELS["llama"]),
    "llama tied": ("llama", MODELS["llama tied"]),
    "llama with biases": ("llama", MODELS["llama with biases"]),
    "llama linear rope": ("llama", ("Llama", {"rope_parameters": LINEAR_ROPE})),
    "llama 3.1": (
        "llama",
        ("Llama", {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 8192}, "head_dim": 64}),
    ),
    "mistral": ("llama", MODELS["mistral"]),
    "mixtral": ("llama", MODELS["mixtral"]),
    "qwen2": ("qwen2", MODELS["qwen2"]),
    "qwen2 moe": (
        "qwen2moe",
        ("Qwen2Moe", MODELS["qwen2 moe"][1] | {
            "norm_topk_prob": False, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        }),
    ),
    "qwen3": ("qwen3", MODELS["qwen3"]),
    "qwen3 with yarn": ("qwen3", MODELS["qwen3 with yarn"]),
    "qwen3 moe": ("qwen3moe", MODELS["qwen3 moe"]),
    "phi3": ("phi3", MODELS["phi3"]),
    "phi3 with longrope": ("phi3", MODELS["phi3 with longrope"]),
    "phi4 mini": ("phi3", MODELS["phi4 mini"]),
    "gemma 3": (
        "gemma3",
        ("Gemma3", {
            "num_hidden_layers": 7, "sliding_window": 11, "head_dim": 40, "query_pre_attn_scalar": 40,
            "rope_parameters": GEMMA_ROPE,
        }),
    ),
}  # fmt: skip


def write(name: str, tmp_path: Path, kind: str = "F32"):
    """Return the folders of the checkpoint and of its GGUF file, and the reference."""
    architecture, model = FILES[name]
    reference = save_checkpoint(model, tmp_path / "original")
    file = write_checkpoint(tmp_path / "original", tmp_path / "m.gguf", architecture, kind)
    return tmp_path / "original", folder_of(file, tmp_path / "cache", tokenizer=False), reference


@pytest.mark.parametrize("name", FILES)
def test_the_bits_are_the_bits_of_the_original(name, tmp_path):
    original, folder, reference = write(name, tmp_path)
    tokens = random_tokens()
    got = logits_of(open_decoder(folder), tokens)
    assert torch.equal(got, logits_of(open_decoder(original), tokens))
    assert error_at_each_position(got, reference(tokens)).max() <= 1e-5


def test_rows_left_interleaved_are_seen(tmp_path, monkeypatch):
    """Control: rows of queries and keys in llama.cpp's order give other logits."""
    row = replace(architectures.ARCHITECTURES["llama"], interleaved=False)
    monkeypatch.setitem(architectures.ARCHITECTURES, "llama", row)
    _, folder, reference = write("llama", tmp_path)
    tokens = random_tokens()
    assert error_at_each_position(logits_of(open_decoder(folder), tokens), reference(tokens)).max() > 1e-3


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["llama", "qwen2 moe", "phi4 mini"])
def test_a_type_is_the_file_of_its_numbers(name, kind, tmp_path):
    """The bits are the bits of a file with the same numbers in F32; quantized layers keep their codes."""
    _, folder, _ = write(name, tmp_path, kind)
    numbers = GgufTensors(folder / "model.gguf")
    spec = read_spec(read_config(folder))
    schemes = {scheme and scheme.name for scheme in spec.weight_bytes(4)}
    codes = {"Q8_0": {"int8 per group 32"}, "Q4_0": {"int4 per group 32"}}.get(kind, set())
    assert schemes - {None} == codes
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(dict(dequantized(numbers)), plain / "model.safetensors")
    config = {key: value for key, value in read_config(folder).items() if key != "quantization_config"}
    (plain / "config.json").write_text(json.dumps(config))
    tokens = random_tokens()
    for dtype in (torch.float32, torch.bfloat16):
        got, right = (logits_of(open_decoder(each, dtype), tokens) for each in (folder, plain))
        assert torch.equal(got, right)


def dequantized(numbers: GgufTensors):
    """Yield every tensor as a plain one."""
    for key in numbers.keys():  # noqa: SIM118 - not a mapping
        if key.endswith(".codes"):
            module = key.removesuffix(".codes")
            scales = numbers.get_tensor(f"{module}.scales").repeat_interleave(32, 1)
            yield f"{module}.weight", numbers.get_tensor(key).float() * scales
        elif not key.endswith(".scales"):
            yield key, numbers.get_tensor(key).contiguous()


def mixed(name: str) -> str:
    """Return another type for a value, a whole layer and the table."""
    return "Q8_0" if name == "token_embd.weight" or ".1." in name else "F16" if "attn_v" in name else "Q4_0"


def test_types_may_differ_between_layers(tmp_path):
    """Layers that are computed as one keep their codes only if their types agree."""
    save_checkpoint(FILES["llama"][1], tmp_path)
    file = write_checkpoint(tmp_path, tmp_path / "m.gguf", "llama", mixed)
    folder = folder_of(file, tmp_path / "cache", tokenizer=False)
    first, second, _ = read_spec(read_config(folder)).layers
    assert (first.attention.qkv.scheme, first.attention.o.scheme.code) == (None, "int4")
    assert {second.attention.qkv.scheme.code, second.mlp.down.scheme.code} == {"int8"}
    assert logits_of(open_decoder(folder), random_tokens()).isfinite().all()


def test_a_tensor_is_filled_in_parts(tmp_path, monkeypatch):
    _, folder, _ = write("llama", tmp_path, "Q4_0")
    whole = logits_of(open_decoder(folder), random_tokens())
    filled: list[int] = []
    fill = StoredTensors._fill

    def counted(self, name, out, piece):
        filled.append(out.numel())
        fill(self, name, out, piece)

    monkeypatch.setattr(StoredTensors, "_fill", counted)
    monkeypatch.setattr(sources, "AT_ONCE", 1000)
    assert torch.equal(logits_of(open_decoder(folder), random_tokens()), whole)
    assert max(filled) <= 1000


def test_a_scale_that_is_not_finite_is_named(tmp_path):
    original = tmp_path / "original"
    save_checkpoint(FILES["llama"][1], original)
    file = write_checkpoint(original, tmp_path / "m.gguf", "llama", "Q8_0")
    stored = read_container(file).tensors["blk.2.ffn_down.weight"]
    data = bytearray(file.read_bytes())
    data[stored.offset : stored.offset + 2] = b"\x00\x7e"
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"model.layers.2.mlp.down_proj.scales of the checkpoint is not finite: 1 of"):
        open_decoder(folder_of(file, tmp_path / "cache", tokenizer=False))


def test_ranks_read_their_parts(tmp_path):
    """Pieces of plain and of packed tensors are the whole, cut."""
    _, folder, _ = write("llama", tmp_path, "Q8_0")
    numbers = GgufTensors(folder / "model.gguf")
    for name in ("model.layers.1.self_attn.q_proj.codes", "model.embed_tokens.weight", "model.norm.weight"):
        whole, part = numbers.get_tensor(name), numbers.get_slice(name)
        assert torch.equal(part[16:48], whole[16:48])
        if whole.dim() > 1:
            assert torch.equal(part[16:48, 32:64], whole[16:48, 32:64])


def test_names_are_the_names_of_llama_cpp():
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: scripts/install test")
    for name, row in architectures.ARCHITECTURES.items():
        arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name.split(" ")[0])
        known = gguf.get_tensor_name_map(arch, 2)
        top = {ours: theirs for theirs, ours in architectures.TOP.items()}
        layer = {f"model.layers.1.{ours}": f"blk.1.{theirs}" for theirs, ours in row.layer.items()}
        for ours, theirs in (top | layer).items():
            found = known.get_name(ours.replace(".experts.{}.", ".experts."))
            if found is not None or ours in top:  # a row has names of layers that its models lack
                assert found == theirs, (name, ours)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_ranks_share_a_file(kind, tmp_path):
    """One, two and four ranks compute the same bits, near the bits without ranks."""
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 256}
    save_checkpoint(("Llama", sizes), tmp_path)
    folder = folder_of(
        write_checkpoint(tmp_path, tmp_path / "m.gguf", "llama", kind), tmp_path / "cache", tokenizer=False
    )
    one, two, four = on_sizes(folder, tmp_path)
    assert torch.equal(one, two) and torch.equal(one, four)
    assert error_at_each_position(one, logits_of(open_decoder(folder), random_tokens(TOKENS))).max() <= 1e-5
