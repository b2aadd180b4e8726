"""Quantized checkpoints, made of plain ones without our code.

compressed-tensors' own compressors make some. The packing rules of AutoAWQ and GPTQ make the others; they are written
again here in numpy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
E4M3 = torch.float8_e4m3fn


def scheme(bits: int, kind: str, strategy: str, inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs}


def inputs_of(strategy: str, dynamic: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": dynamic, **more}


@dataclass
class Kind:
    """One kind of quantization.

    ``config`` is the quantization_config. ``module(name, weight)`` returns a module's tensors, keyed by the part after
    the module's name, and the weight that they stand for.
    """

    config: dict[str, Any]
    module: Callable[[str, Tensor], tuple[Tensors, Tensor]]
    inputs: dict[str, Any] | None = None
    static: float = 0.0


# --------------------------------------------------------------------------------------------- compressed-tensors


def compressed(style: str, group: dict[str, Any], **more: Any) -> Kind:
    config = {
        "quant_method": "compressed-tensors",
        "format": style,
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "config_groups": {"a": group},
    }
    static = 0.04 if (group["input_activations"] or {}).get("dynamic") is False else 0.0

    def module(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        own = QuantizationScheme(**group)
        args = own.weights
        low, high = _ranges(weight, args)
        scale, zero = calculate_qparams(low, high, args)
        tensors = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(style)
        stored = compressor.compress(tensors, own)
        back = compressor.decompress(stored, own)["weight"]
        if style != "pack-quantized":
            stored.pop("weight_zero_point", None)
        if static:
            stored["input_scale"] = torch.tensor([static])
        return stored, back

    inputs = group["input_activations"]
    if inputs and inputs["dynamic"] and inputs["strategy"] == "tensor":
        inputs = inputs_of("token")  # our choice, since a scale of the batch would depend on it
    return Kind(config | more, module, inputs, static)


def fp4(style: str) -> Kind:
    """Weights of MXFP4 or NVFP4, packed by compressed-tensors; the meaning is its own too, in float32."""
    group = 32 if style.startswith("mx") else 16
    said = scheme(4, "float", "group" if group == 32 else "tensor_group", group_size=group)
    config = compressed(style, said).config

    def module(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization import QuantizationScheme

        greatest = weight.view(len(weight), -1, group).abs().amax(2)
        if group == 32:
            whole, scale = None, torch.exp2(torch.floor(torch.log2(greatest)) - 2)
            tensors = {"weight": weight, "weight_scale": scale}
        else:
            whole = (448 * 6 / weight.abs().max()).view(1)
            scale = (greatest / 6 * whole).to(E4M3).float()
            tensors = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
        stored = BaseCompressor.get_value_from_registry(style).compress(tensors, QuantizationScheme(**said))
        numbers = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
        each = (scale if whole is None else scale / whole).repeat_interleave(group, 1)
        return stored, numbers * each

    return Kind(config, module)


def _ranges(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight.shape
    if args.strategy == "tensor":
        return weight.min().view(1), weight.max().view(1)
    if args.strategy == "block":
        rows, columns = -(-outputs // 128), -(-inputs // 128)
        blocks = [
            [weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] for j in range(columns)] for i in range(rows)
        ]
        return tuple(torch.tensor([[float(f(b)) for b in row] for row in blocks]) for f in (torch.min, torch.max))
    groups = weight.view(outputs, -1, args.group_size or inputs)
    return groups.amin(2), groups.amax(2)


# ---------------------------------------------------------------------------------------- float8 as vLLM reads it


def fp8(static: bool = False, block: bool = False) -> Kind:
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    if block:
        config |= {"weight_block_size": [128, 128], "fmt": "e4m3", "modules_to_not_convert": ["lm_head", "mlp.gate"]}
    else:
        config["ignored_layers"] = ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(2))]

    def module(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if not block:
            scale = weight.abs().max() / 448
            codes = (weight / scale).to(E4M3)
            stored = {"weight": codes, "weight_scale": scale} | ({"input_scale": torch.tensor(0.04)} if static else {})
            return stored, codes.float() * scale
        codes, back = torch.empty_like(weight, dtype=E4M3), torch.empty_like(weight)
        scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                scales[i, j] = weight[at].abs().max() / 448
                codes[at] = (weight[at] / scales[i, j]).to(E4M3)
                back[at] = codes[at].float() * scales[i, j]
        return {"weight": codes, "weight_scale_inv": scales}, back

    inputs = (
        inputs_of("tensor", False) if static else inputs_of("group", group_size=128) if block else inputs_of("token")
    )
    return Kind(config, module, inputs, 0.04 if static else 0.0)


# --------------------------------------------------------------------------------------------------- AWQ and GPTQ


def _whole(weight: Tensor, group: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize to codes [inputs, outputs]; return codes, scales and zero points.

    Scales (float16) and zero points have shape [groups, outputs]. ``group`` is the group of each input.
    """
    w = weight.numpy().T
    count = group.max() + 1
    low = np.stack([np.minimum(w[group == g].min(0), 0) for g in range(count)])
    high = np.stack([np.maximum(w[group == g].max(0), 0) for g in range(count)])
    scales = ((high - low) / top).astype(np.float16)
    zeros = np.clip(np.round(-low / scales.astype(np.float32)), 1, top).astype(np.int64)
    codes = np.clip(np.round(w / scales[group].astype(np.float32)) + zeros[group], 0, top).astype(np.int64)
    return codes, scales, zeros


def _words(numbers: np.ndarray, bits: int, order: list[int]) -> np.ndarray:
    """Pack numbers into words along the last axis: position i of a word holds its number ``order[i]``."""
    each = 32 // bits
    parts = numbers.reshape(*numbers.shape[:-1], -1, each)
    words = np.zeros(parts.shape[:-1], np.uint64)
    for place, column in enumerate(order):
        words |= parts[..., column].astype(np.uint64) << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


def _meant(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: np.ndarray) -> Tensor:
    return torch.from_numpy(((codes - zeros[group]) * scales[group].astype(np.float32)).T.astype(np.float32).copy())


def awq(group_size: int = 32) -> Kind:
    """AutoAWQ, WQLinear_GEMM: a word holds outputs 0, 2, 4, 6, 1, 3, 5, 7 of each eight, in this order."""

    def module(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        group = np.arange(weight.shape[1]) // group_size
        codes, scales, zeros = _whole(weight, group, 15)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        stored = {"qweight": _words(codes, 4, order), "qzeros": _words(zeros, 4, order), "scales": scales}
        return {key: torch.from_numpy(value) for key, value in stored.items()}, _meant(codes, scales, zeros, group)

    config = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["mlp.gate"],
    }  # fmt: skip
    return Kind(config, module)


def gptq(bits: int = 4, version: int = 1, desc_act: bool = False, group_size: int = 32) -> Kind:
    """AutoGPTQ's QuantLinear: inputs packed in order.

    Files of version 1 hold zero points less one.
    """

    def module(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        group = np.arange(inputs) // (group_size if group_size > 0 else inputs)
        if desc_act:
            group = group[np.random.default_rng(inputs).permutation(inputs)]
        codes, scales, zeros = _whole(weight, group, (1 << bits) - 1)
        order = list(range(32 // bits))
        stored = {
            "qweight": _words(codes.T, bits, order).T, "qzeros": _words(zeros - (version == 1), bits, order),
            "scales": scales, "g_idx": group.astype(np.int32),
        }  # fmt: skip
        stored = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in stored.items()}
        return stored, _meant(codes, scales, zeros, group)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act, "sym": False}
    return Kind(config | ({"checkpoint_format": "gptq_v2"} if version == 2 else {}), module)


def symmetric(bits: int, stored: int, group_size: int = 32, desc_act: bool = False, **said: Any) -> Kind:
    """Symmetric GPTQ, with the half of the range as the zero point.

    ``stored`` is the zero point in the file; ``said`` are more fields of its config.
    """

    def module(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        inputs, half = weight.shape[1], 1 << (bits - 1)
        group = np.arange(inputs) // (group_size if group_size > 0 else inputs)
        if desc_act:
            group = group[np.random.default_rng(inputs).permutation(inputs)]
        w = weight.numpy().T
        largest = np.stack([np.abs(w[group == each]).max(0) for each in range(group.max() + 1)])
        scales = (largest / (half - 1)).astype(np.float16)
        zeros = np.full(scales.shape, half)
        codes = np.clip(np.round(w / scales[group].astype(np.float32)) + half, 0, 2 * half - 1).astype(np.int64)
        order = list(range(32 // bits))
        parts = {
            "qweight": _words(codes.T, bits, order).T, "qzeros": _words(np.full(scales.shape, stored), bits, order),
            "scales": scales, "g_idx": group.astype(np.int32),
        }  # fmt: skip
        found = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in parts.items()}
        return found, _meant(codes, scales, zeros, group)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act}
    return Kind(config | said, module)


# ------------------------------------------------------------------------------------------------------ a checkpoint


def quantize_checkpoint(folder: Path, kind: Kind, out: Path, config: dict[str, Any] | None = None) -> list[str]:
    """Quantize the checkpoint in ``folder`` into ``out``, and return the names of the quantized modules.

    ``folder`` gets the dequantized weights.
    """
    tensors, stored, done = load_file(folder / "model.safetensors"), {}, []
    for name, tensor in list(tensors.items()):
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        plain = tensor.dim() != 2 or "embed" in name or last in ("gate", "lm_head")
        if plain:
            stored[name] = tensor
            continue
        parts, meant = kind.module(module, tensor.float())
        tensors[name] = meant.contiguous()
        stored |= {f"{module}.{key}": value.contiguous() for key, value in parts.items()}
        done.append(module)
    out.mkdir(exist_ok=True)
    save_file(stored, out / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((folder / "config.json").read_text()) | (config or {"quantization_config": kind.config})
    (out / "config.json").write_text(json.dumps(whole))
    return done


def reference_logits(folder: Path, tokens: Tensor, kind: Kind, modules: list[str]) -> Tensor:
    """Return transformers' logits of the plain checkpoint.

    compressed-tensors rounds the inputs of each quantized module.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    if kind.inputs is not None:
        for name in modules:
            model.get_submodule(name).register_forward_pre_hook(lambda module, x: (rounded(x[0], kind),))
    with torch.inference_mode():
        logits: Tensor = model.eval()(tokens[None]).logits[0]
    return logits


def rounded(x: Tensor, kind: Kind) -> Tensor:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args = QuantizationArgs(**kind.inputs)
    if kind.static:
        scale, zero = torch.tensor([kind.static]), torch.zeros(1)
        return fake_quantize(x, scale, zero, args)
    if args.strategy == "group":
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % 128))
        scale, zero = compute_dynamic_scales_and_zp(padded, args, torch.nn.Identity())
        return fake_quantize(padded, scale, zero, args)[..., : x.shape[-1]]
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
    return fake_quantize(x, scale, zero, args)
