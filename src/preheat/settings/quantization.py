"""Options of the types of weights and of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from preheat.backends.names import HOST
from preheat.options.options import option

_quant = partial(option, group="Quantization")


@dataclass(frozen=True, kw_only=True)
class QuantizationSettings:
    """Options of the group Quantization."""

    quantization: str | None = _quant(
        None,
        "Quantization while loading a checkpoint: `fp8` converts weights to float8, `int8` and `int4` to integers; "
        "`inc` rounds linear layers to FP8 by the measured ranges that `quant_config` names. A quantized checkpoint "
        "needs no option; to name another method than its own is an error.",
    )
    quant_config: str | None = _quant(
        None,
        "JSON file of Intel Neural Compressor (INC) with the modules to quantize, the method, and the path of the "
        "measured ranges.",
        env="QUANT_CONFIG",
        path="file",
    )
    kv_cache_dtype: str = _quant(
        "auto",
        "Type of the KV cache: `auto` is the model's, `fp8` is e4m3, and `fp8_inc` takes its scales from "
        "`quant_config`.",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "bfloat16", "float16", "float32"),
    )
    weights_load_device: str | None = _quant(
        None,
        "Device for reading and preparing weights, layer by layer, before they go to the model's device.",
        choices=(HOST,),
        default_text="the device",
    )
