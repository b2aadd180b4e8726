"""GGUF files for tests: a writer, and the files of checkpoints as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from preheat.model.gguf.architectures import ARCHITECTURES, TOP
from preheat.model.gguf.kinds import KINDS

NUMBER = {kind.name: number for number, kind in KINDS.items()}
Tensor = tuple[str, tuple[int, ...], bytes]
"""The type of a tensor, its shape (rows first) and its bytes."""


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def field(value: Any) -> bytes:
    """Return the type and the value of a field."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii" if value < 0 else "<II", 5 if value < 0 else 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    kind, code = {str: (8, ""), float: (6, "f"), int: (5, "i"), bool: (7, "?")}[type(value[0])]
    items = b"".join(text(each) if kind == 8 else struct.pack(f"<{code}", each) for each in value)
    return struct.pack("<IIQ", 9, kind, len(value)) + items


def file_bytes(fields: Mapping[str, Any], tensors: Mapping[str, Tensor], *, version: int = 3) -> bytes:
    """Return a GGUF file."""
    out = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(fields))]
    out += [text(name) + field(value) for name, value in fields.items()]
    at, data = 0, []
    for name, (kind, shape, raw) in tensors.items():
        out.append(text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1]))
        out.append(struct.pack("<IQ", NUMBER[kind], at))
        data.append(raw + bytes(-len(raw) % 32))
        at += len(data[-1])
    header = b"".join(out)
    return header + bytes(-len(header) % 32) + b"".join(data)


def quantized(kind: str, values: np.ndarray) -> bytes:
    """Return float32 numbers in a type, rounded to nearest."""
    if kind == "F32":
        return values.astype(np.float32).tobytes()
    if kind == "F16":
        return values.astype(np.float16).tobytes()
    if kind == "BF16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    blocks = values.astype(np.float32).reshape(-1, 32)
    greatest = np.abs(blocks).max(1, keepdims=True)
    scales = (greatest / (127 if kind == "Q8_0" else 7)).astype(np.float16)
    codes = np.rint(blocks / np.maximum(scales.astype(np.float32), 1e-30)).astype(np.int32)
    if kind == "Q8_0":
        return np.concatenate((scales.view(np.uint8), codes.astype(np.int8).view(np.uint8)), 1).tobytes()
    assert kind == "Q4_0"
    nibbles = (np.clip(codes, -8, 7) + 8).astype(np.uint8)
    return np.concatenate((scales.view(np.uint8), nibbles[:, :16] | nibbles[:, 16:] << 4), 1).tobytes()


def side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows with rotary partners next to each other."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


FIELDS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip


def fields_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of a ``config.json`` for the architecture ``name``."""
    found = {theirs: config.get(ours) for theirs, ours in FIELDS.items()}
    found["expert_count"] = config.get("num_local_experts") or config.get("num_experts")
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    if name == "gemma3":
        found["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    found |= {"attention.key_length": head, "attention.value_length": head, "rope.freq_base": rope["rope_theta"]}
    found["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1.0))
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
        found["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope":
        found["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        found["rope.scaling.attn_factor"] = rope.get("attention_factor")
    fields = {f"{name}.{key}": value for key, value in found.items() if value is not None}
    return {"general.architecture": name, **fields}


def rope_tensors(config: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the factors of frequencies, computed as the converter does."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{each}.weight": rope[f"{each}_factor"] for each in ("short", "long")}
    if rope.get("rope_type") != "llama3":
        return {}
    dim, original = config["head_dim"], rope["original_max_position_embeddings"]
    found = []
    for pair in range(dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / dim)
        if wavelength < original / rope["high_freq_factor"]:
            found.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            found.append(rope["factor"])
        else:
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": found}


def write_checkpoint(
    folder: Path, out: Path, name: str, kind: str | Callable[[str], str] = "F32", **fields: Any
) -> Path:
    """Write the safetensors checkpoint in ``folder`` as the GGUF file ``out`` of the architecture ``name``.

    ``kind`` is the type of matrices, or a function from a tensor's name to it; other tensors are F32.
    """
    config = json.loads((folder / "config.json").read_text())
    moe = config["model_type"] == "mixtral"
    row = ARCHITECTURES[f"{name} with experts" if moe else name]
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for stored in file.keys():  # noqa: SIM118 - not a mapping
            for hf, original in split(stored, file.get_tensor(stored).float().numpy(), moe):
                target, values = renamed(hf, row.layer), changed(original, hf, name, config)
                if target.endswith("_exps.weight"):
                    stacks.setdefault(target, []).append(values)
                else:
                    found[target] = values
    found |= {target: np.stack(values) for target, values in stacks.items()}
    if config.get("tie_word_embeddings"):
        found.pop("output.weight", None)
    found |= {target: np.array(values, np.float32) for target, values in rope_tensors(config).items()}
    kinds = {each: (kind if isinstance(kind, str) else kind(each)) if found[each].ndim > 1 else "F32" for each in found}
    tensors = {each: (kinds[each], values.shape, quantized(kinds[each], values)) for each, values in found.items()}
    out.write_bytes(file_bytes(fields_of(config, name) | fields, tensors))
    return out


def split(stored: str, values: np.ndarray, mixtral: bool) -> list[tuple[str, np.ndarray]]:
    """Return the modules in a tensor; experts are stacked in checkpoints of transformers 5."""
    if not stored.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [(stored.replace("mlp.gate.", "block_sparse_moe.gate.") if mixtral else stored, values)]
    at = stored.rpartition(".")[0].replace("mlp.", "block_sparse_moe." if mixtral else "mlp.")
    down, gate, up = ("w2", "w1", "w3") if mixtral else ("down_proj", "gate_proj", "up_proj")
    if stored.endswith("down_proj"):
        return [(f"{at}.{{}}.{down}.weight", each) for each in values]
    half = values.shape[1] // 2
    return [(f"{at}.{{}}.{module}.weight", each[rows])
            for module, rows in ((gate, slice(half)), (up, slice(half, None))) for each in values]  # fmt: skip


def renamed(hf: str, layer: Mapping[str, str]) -> str:
    """Return the name in the file of the tensor ``hf``."""
    module, _, end = hf.rpartition(".")
    top = {ours: theirs for theirs, ours in TOP.items()}
    if module in top:
        return f"{top[module]}.{end}"
    _, _, number, inner = module.split(".", 3)
    inner = re.sub(r"experts\.\d+\.", "experts.{}.", inner)
    names = {ours: theirs for theirs, ours in layer.items()}
    return f"blk.{number}.{names[inner]}.{end}"


def changed(values: np.ndarray, hf: str, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """Return the numbers as the converter writes them."""
    if name == "llama" and ".q_proj." in hf:
        return side_by_side(values, config["num_attention_heads"])
    if name == "llama" and ".k_proj." in hf:
        return side_by_side(values, config["num_key_value_heads"])
    if name == "gemma3" and hf.endswith("norm.weight"):
        return values + np.float32(1)
    return values[0] if hf.endswith("shared_expert_gate.weight") else values


def tokenizer_fields(folder: Path, pre: str = "gpt-2") -> dict[str, Any]:
    """Return the fields of the byte-level tokenizer in ``folder``."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    special = {each["id"]: each["special"] for each in stored["added_tokens"]}
    vocab = {**stored["model"]["vocab"], **{each["content"]: each["id"] for each in stored["added_tokens"]}}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = [each if isinstance(each, str) else " ".join(each) for each in stored["model"]["merges"]]
    found: dict[str, Any] = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges,
        "token_type": [{True: 3, False: 4}.get(special.get(id), 1) for id in range(len(tokens))],
        "add_bos_token": "TemplateProcessing" in json.dumps(stored["post_processor"]),
        **{f"{name}_token_id": vocab[config[f"{name}_token"]] for name in ("bos", "eos")},
    }  # fmt: skip
    fields = {f"tokenizer.ggml.{name}": value for name, value in found.items()}
    return fields | {"tokenizer.chat_template": config["chat_template"]} if "chat_template" in config else fields
