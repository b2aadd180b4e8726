"""The scales that Intel Neural Compressor (INC) gives to a model's layers and caches.

No torch here. Configurations and ranges come from :mod:`preheat.model.inc_files`. Modules have the names that vLLM
gives them, where projections that share a matrix are one module (``qkv_proj``); the checkpoint's names are understood
too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from preheat.model.inc_files import CACHE_TYPE, WITHOUT_RANGES, IncConfig, Ranges, wrong
from preheat.model.mlp_specs import MoeSpec
from preheat.model.spec_tree import with_linears
from preheat.model.specs import ModelSpec
from preheat.model.tensor_specs import LinearSpec
from preheat.ops.kinds import Scheme

logger = logging.getLogger(__name__)

FORMAT = "inc"
"""Name of the format of rounded layers."""
SCHEME = Scheme(code="fp8", scales="tensor", activations="static")
"""Scheme of rounded layers, where a backend multiplies codes."""

FUSED = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}
TYPES = {
    "qkv": "QKVParallelLinear", "o": "RowParallelLinear", "gate_up": "MergedColumnParallelLinear",
    "down": "RowParallelLinear", "router": "ReplicatedLinear", "head": "ParallelLMHead",
}  # fmt: skip
"""vLLM's classes, by the last part of a layer's path."""


def module_name(spec: LinearSpec) -> str:
    """Return the name of a linear layer's module in vLLM."""
    parts = [name.rpartition(".") for name, _ in spec.parts]
    fused = FUSED.get(tuple(last for _, _, last in parts))
    return spec.parts[0][0] if fused is None else f"{parts[0][0]}.{fused}"


def linear_modules(spec: ModelSpec) -> Iterator[tuple[str, str, str, LinearSpec]]:
    """Yield every linear layer with its own weights.

    Each comes as path in the spec, name, class and spec. An output head that is the table of embeddings has none.
    """
    for path, linear in spec.linears():
        if not (path == "head" and spec.tied):
            yield path, module_name(linear), TYPES[path.rpartition(".")[2]], linear


def cache_modules(attention: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names of the modules that store keys, and values.

    They belong to the module ``attention``.
    """
    inside = ("attn.impl.", "attn.", "")
    keys, values = (tuple(f"{attention}.{where}{kind}_cache" for where in inside) for kind in "kv")
    return keys, values


def check_experts(config: IncConfig, spec: ModelSpec) -> None:
    """Raise SettingsError unless the experts are left out.

    They are not rounded here, in any layer.
    """
    for layer in spec.layers:
        if not isinstance(layer.mlp, MoeSpec):
            continue
        module = layer.mlp.experts.gate.partition(".{}")[0]
        if config.takes(module, "FusedMoE"):
            raise wrong(config.path, f"the experts of {module} cannot be rounded to FP8 by INC's ranges here: "
                         "add experts to the names of the blocklist")  # fmt: skip


def is_blocked(config: IncConfig, module: str, kind: str, linear: LinearSpec) -> bool:
    """Whether a linear layer is left as it is.

    Raises SettingsError if the lists split one matrix.
    """
    taken = {config.takes(name, kind) for name, _ in linear.parts}
    if not config.takes(module, kind):
        return True
    if len(taken) > 1:
        raise wrong(config.path, f"the lists name only some parts of {module}, and its parts share one matrix: "
                     f"name all of {', '.join(name for name, _ in linear.parts)}")  # fmt: skip
    return not taken.pop()


def linear_scales(config: IncConfig, spec: ModelSpec, ranges: Mapping[str, Ranges]) -> dict[str, float]:
    """Return the input scale of each rounded linear layer, by module.

    Raises SettingsError for a layer without ranges, unless the configuration is lenient.
    """
    check_experts(config, spec)
    found = {}
    for _, module, kind, linear in linear_modules(spec):
        if is_blocked(config, module, kind, linear):
            continue
        names = [module, *(name for name, _ in linear.parts)]
        seen = [ranges[name].inputs[0] for name in names if name in ranges and ranges[name].inputs]
        if seen:
            found[module] = config.input_scale(max(seen))
        elif config.method in WITHOUT_RANGES:
            found[module] = config.input_scale(0.0)
        elif not config.lenient:
            raise wrong(config.path, f"there are no ranges of {module}: measure it, or add it to the blocklist")
    return found


def with_inc(spec: ModelSpec, scales: Mapping[str, float], *, coded: bool) -> ModelSpec:
    """Return ``spec`` with the linear layers in ``scales`` of this format.

    ``coded``: layers have float8 codes; else they are simulated.
    """
    rounded = {path for path, module, _, _ in linear_modules(spec) if module in scales}
    scheme = SCHEME if coded else None
    return with_linears(
        spec, lambda path, linear: replace(linear, format=FORMAT, scheme=scheme) if path in rounded else linear
    )


def cache_scales(
    config: IncConfig, attentions: Iterable[str], ranges: Mapping[str, Ranges]
) -> list[tuple[float, float]]:
    """Return the scales of keys and values of each module in ``attentions``.

    Raises SettingsError for a module that is left out or has no ranges.
    """
    return [
        (_cache_scale(config, keys, ranges), _cache_scale(config, values, ranges))
        for keys, values in map(cache_modules, attentions)
    ]


def _cache_scale(config: IncConfig, names: tuple[str, ...], ranges: Mapping[str, Ranges]) -> float:
    name = next((name for name in names if name in ranges), None)
    if not config.takes(name or names[0], CACHE_TYPE):
        raise wrong(config.path, f"its lists leave out {name or names[0]}, so there is no scale for this cache: write "
                     "kv_cache_dtype auto, or fp8 for the checkpoint's scales")  # fmt: skip
    if name is None or not ranges[name].inputs:
        if config.method in WITHOUT_RANGES:
            return config.input_scale(0.0)
        raise wrong(
            config.path,
            f"kv_cache_dtype fp8_inc needs the ranges of {names[0]}, and there are none: measure them, or write auto",
        )
    return config.input_scale(ranges[name].inputs[0])


def warn_of_device(config: IncConfig, platform: str) -> None:
    """Log the device of the ranges, if known.

    Answers here are not that device's.
    """
    if config.device is not None:
        device = {"gaudi2": "Gaudi 2", "gaudi3": "Gaudi 3"}[config.device]
        logger.warning(
            "The ranges of %s were measured on %s: scales follow the rules of that device, rounding is simulated on "
            "%s, and answers differ from that device's", config.path, device, platform,
        )  # fmt: skip
