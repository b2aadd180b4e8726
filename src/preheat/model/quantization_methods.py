"""The methods of quantization: reading a checkpoint's config into the storage of each module.

No torch here. A method is a line in :data:`METHODS`, and a function from its config to its rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from preheat.errors import ModelError
from preheat.model.gguf.kinds import GROUP, PACKED
from preheat.model.mlp_specs import STACKED_MXFP4
from preheat.model.stored import Module, Quantization, Says, Stored
from preheat.model.tensor_specs import TIED_HEAD
from preheat.ops.kinds import Scheme

LINEAR = "Linear"
"""The class of linear layers; compressed-tensors names all of them by it."""


class Fields:
    """Fields of a config.

    Methods raise ModelError that names method and field.
    """

    def __init__(self, method: str, values: Mapping[str, Any]) -> None:
        self.method, self.values, self.read = method, values, set[str]()

    def get(self, name: str, default: object = None) -> Any:
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def one_of(self, name: str, allowed: Sequence[object], default: object = None) -> Any:
        value = self.get(name, default)
        if not any(value == each and type(value) is type(each) for each in allowed):
            self.refuse(name, value, allowed)
        return value

    def refuse(self, name: str, value: object, allowed: Iterable[object]) -> None:
        known = ", ".join(map(str, allowed))
        raise ModelError(f"{self.method}: {name} {value!r} is not supported; supported: {known}")

    def names(self, *fields: str) -> tuple[str, ...]:
        """Return the list of names in the first of ``fields`` that exists."""
        value: Any = next((self.values[name] for name in fields if self.values.get(name) is not None), [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ModelError(f"{self.method}: {fields[0]} must be a list of names, got {value!r}")
        for name in value:
            if name.startswith("re:"):
                self.check_pattern(name)
        return tuple(value)

    def nested_names(self, name: str) -> tuple[str, ...]:
        """Return the names in a list, or in a list of lists."""
        value = self.get(name, [])
        lists = (
            [entry if isinstance(entry, list) else [entry] for entry in value] if isinstance(value, list) else [[value]]
        )
        found = [each for entry in lists for each in entry]
        if not all(isinstance(each, str) for each in found):
            raise ModelError(f"{self.method}: {name} must be a list of names, got {value!r}")
        return tuple(found)

    def check_pattern(self, name: str) -> None:
        try:
            re.compile(name[3:])
        except re.error as error:
            raise ModelError(f"{self.method}: {name!r} is not a regular expression: {error}") from None

    def below(self, name: str, value: object) -> Fields:
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.method}: {name} must be an object, got {value!r}")
        return Fields(f"{self.method}: {name}", value)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int or not 0 < value <= 1 << 20:
            raise ModelError(f"{self.method}: {name} must be a positive number, got {value!r}")
        return value


def _named(module: Module, names: Iterable[str]) -> bool:
    """Whether one of ``names`` means ``module``.

    A name is consecutive words of the module's name (so also a module around it), a pattern with *, or a regular
    expression after "re:". The expression must match from the beginning.
    """
    return any(_means(name, own) for name in names for own in module)


def _means(name: str, module: str) -> bool:
    if name.startswith("re:"):
        return re.match(name[3:], module) is not None
    return fnmatchcase(module, name) if "*" in name else f".{name}." in f".{module}."


def _except(ignored: Sequence[str], stored: Stored) -> Says:
    return lambda module: None if _named(module, ignored) else stored


def _matched(module: Module, names: Iterable[str]) -> bool:
    """Whether one of ``names`` means the linear layer ``module``.

    A name of a module around it does not. A name is the whole name, the class, or a regular expression that matches
    from the beginning. This is the rule of ``compressed_tensors.match_named_modules``.
    """
    return any(
        any(re.match(name[3:], own) for own in module) if name.startswith("re:") else name in (*module, LINEAR)
        for name in names
    )


def fp8(config: Fields) -> Quantization:
    """Read the method of Hugging Face and vLLM.

    Scales belong to a tensor, or to blocks of 128 x 128. DeepSeek and Qwen3 use blocks.
    """
    how = config.one_of("activation_scheme", ["dynamic", "static"], "dynamic")
    config.one_of("fmt", ["e4m3"], "e4m3")
    ignored = config.names("ignored_layers", "modules_to_not_convert")
    block = config.get("weight_block_size")
    if block is None:
        scheme = Scheme(code="fp8", scales="tensor", activations="static" if how == "static" else "token")
        return Quantization(_except(ignored, Stored("fp8", scheme)))
    if block != [128, 128]:
        config.refuse("weight_block_size", block, ["[128, 128]"])
    if how == "static":
        config.refuse("activation_scheme", how, ["dynamic, with weight_block_size"])
    scheme = Scheme(code="fp8", scales="block", group=128, activations="block")
    return Quantization(_except(ignored, Stored("fp8-block", scheme)))


def modelopt(config: Fields) -> Quantization:
    """Read NVIDIA's ModelOpt: scales of a tensor, for weights and activations."""
    config.one_of("quant_algo", ["FP8"])
    scheme = Scheme(code="fp8", scales="tensor", activations="static")
    ignored = config.names("exclude_modules", "ignore")
    says = _except(ignored, Stored("fp8", scheme))
    return Quantization(says, head=None if "lm_head" in ignored else says)


def awq(config: Fields) -> Quantization:
    """Read AutoAWQ's layout "gemm"."""
    config.one_of("version", ["gemm", "GEMM"], "gemm")
    config.one_of("bits", [4], config.get("w_bit", 4))
    if not config.one_of("zero_point", [True], True):
        config.refuse("zero_point", False, [True])
    group = config.count("group_size", config.get("q_group_size", 128))
    ignored = config.names("modules_to_not_convert")
    stored = Stored("awq", Scheme(code="int4", scales="group", group=group, zeros=True))
    return Quantization(_except(ignored, stored))


def gptq(config: Fields) -> Quantization:
    """Read GPTQ, files of version 1 and 2. Routers of experts are never quantized.

    A symmetric file has one possible zero point, whatever version it states. With ``modules_in_block_to_quantize`` a
    layer is quantized only if its name holds one of the listed names.
    """
    bits = config.one_of("bits", [4, 8])
    version = config.one_of("checkpoint_format", ["gptq", "gptq_v2"], config.get("format", "gptq"))
    if config.one_of("sym", [True, False], False):
        version = "gptq-symmetric"
    group = config.get("group_size", 128)
    if group != -1:
        group = config.count("group_size", 128)
    indexed = bool(config.get("desc_act", False)) and group != -1
    scheme = Scheme(
        code="int4" if bits == 4 else "int8", scales="channel" if group == -1 else "group",
        group=max(group, 0), zeros=True, indexed=indexed,
    )  # fmt: skip
    stored, only = Stored(version, scheme), config.nested_names("modules_in_block_to_quantize")
    plain = _plain_by_dynamic(config)

    def says(module: Module) -> Stored | None:
        chosen = not only or TIED_HEAD in module or any(name in own for name in only for own in module)
        return stored if chosen and not _matched(module, plain) else None

    return Quantization(says, head=says if config.get("lm_head", False) else None, routers=False)


def _plain_by_dynamic(config: Fields) -> tuple[str, ...]:
    """Return the regular expressions of GPTQModel's ``dynamic`` for layers that stay plain.

    Raises ModelError for any other entry of ``dynamic``.
    """
    dynamic = config.below("dynamic", config.get("dynamic", {})).values
    if other := {name: how for name, how in dynamic.items() if not str(name).startswith("-:")}:
        config.refuse("dynamic", other, ["-: and a regular expression, for layers that are not quantized"])
    expressions = tuple(f"re:{name[2:]}" for name in dynamic)
    for expression in expressions:
        config.check_pattern(expression)
    return expressions


def gguf(config: Fields) -> Quantization:
    """Read the types of packed modules in a GGUF file; all other modules are plain."""
    modules = config.below("modules", config.get("modules", {}))
    schemes = {kind: Scheme(code=code, scales="group", group=GROUP) for kind, code in PACKED.items()}
    for name in modules.values:
        modules.one_of(name, [*PACKED])

    def says(module: Module) -> Stored | None:
        found = (Stored("gguf", schemes[modules.values[name]]) for name in module if name in modules.values)
        return next(found, None)

    return Quantization(says, head=says)


def compressed_tensors(config: Fields) -> Quantization:
    """Read several groups of targets, each with its scheme."""
    for name in ("sparsity_config", "transform_config"):
        if config.get(name, {}) not in ({}, {"format": "dense"}):
            config.refuse(name, config.get(name), ["none"])
    _check_cache(config)
    ignored = config.names("ignore")
    named = config.below("config_groups", config.get("config_groups", {})).values
    groups = [_group(config, config.below(str(name), group)) for name, group in named.items()]
    for targets, _ in groups:
        for target in targets:
            if target == "Embedding":
                raise ModelError("quantized embeddings are not supported: target 'Embedding'")
            if target != LINEAR and target[:1].isupper():
                raise ModelError(f"compressed-tensors: target {target!r} is not supported; supported: {LINEAR}, names")

    def by_name(module: Module) -> Stored | None:
        if _matched(module, ignored):
            return None
        return next((stored for targets, stored in groups if _matched(module, set(targets) - {LINEAR})), None)

    def says(module: Module) -> Stored | None:
        by_kind = (stored for targets, stored in groups if LINEAR in targets and not _matched(module, ignored))
        return by_name(module) or next(by_kind, None)

    return Quantization(says, head=says, tables=lambda module: by_name(module) is not None)


def _check_cache(config: Fields) -> None:
    """Raise ModelError for a ``kv_cache_scheme`` that cannot be read.

    It must be absent or one static scale for each layer. :mod:`preheat.model.kv_scales` reads such scales.
    """
    if config.get("kv_cache_scheme") is None:
        return
    scheme = config.below("kv_cache_scheme", config.get("kv_cache_scheme"))
    scheme.one_of("num_bits", [8])
    scheme.one_of("type", ["float"])
    scheme.one_of("strategy", ["tensor"], "tensor")
    scheme.one_of("symmetric", [True], True)
    scheme.one_of("dynamic", [False], False)


def _group(config: Fields, group: Fields) -> tuple[tuple[str, ...], Stored]:
    """Return the targets of one of the config's groups, and their storage."""
    if group.get("output_activations") is not None:
        group.refuse("output_activations", "set", ["none"])
    weights = group.below("weights", group.get("weights"))
    kind, bits = weights.one_of("type", ["float", "int"]), weights.one_of("num_bits", [4, 8])
    weights.one_of("dynamic", [False], False)
    style = group.get("format") or config.get("format")
    if kind == "float" and bits == 8:
        group.one_of("format", ["float-quantized", "naive-quantized"], style)
        return group.names("targets"), Stored("fp8", _float_scheme(group, weights))
    if style not in (("pack-quantized",) if kind == "int" else _FP4):
        known = ["float-quantized with 8 bits", "pack-quantized with 4 or 8 bits", *_FP4]
        group.refuse("format", f"{style} with {bits} bits {kind}", known)
    if group.get("input_activations") is not None:
        group.refuse("input_activations", f"set, with {style} weights", ["none"])
    if kind == "float":
        return group.names("targets"), Stored(style, _fp4_scheme(weights, style))
    weights.one_of("strategy", ["group", "channel"])
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static"):
        weights.refuse("actorder", order, ["weight", "none"])
    size = weights.count("group_size") if weights.get("strategy") == "group" else 0
    scheme = Scheme(
        code="int4" if bits == 4 else "int8", scales="group" if size else "channel", group=size,
        zeros=not weights.get("symmetric", True),
    )  # fmt: skip
    return group.names("targets"), Stored("pack-quantized", scheme)


_FP4 = {"mxfp4-pack-quantized": ("group", 32), "nvfp4-pack-quantized": ("tensor_group", 16)}
"""Formats of four-bit floats, with the strategy and the size of their blocks."""


def _fp4_scheme(weights: Fields, style: str) -> Scheme:
    strategy, size = _FP4[style]
    weights.one_of("strategy", [strategy])
    weights.one_of("group_size", [size])
    weights.one_of("symmetric", [True], True)
    return Scheme(code="fp4", scales="group", group=size)


def _float_scheme(group: Fields, weights: Fields) -> Scheme:
    scales = weights.one_of("strategy", ["tensor", "channel", "block"])
    if scales == "block" and weights.get("block_structure") != [128, 128]:
        weights.refuse("block_structure", weights.get("block_structure"), ["[128, 128]"])
    weights.one_of("symmetric", [True], True)
    size = 128 if scales == "block" else 0
    inputs = group.get("input_activations")
    if inputs is None:
        return Scheme(code="fp8", scales=scales, group=size)
    inputs = group.below("input_activations", inputs)
    inputs.one_of("num_bits", [8])
    inputs.one_of("type", ["float"])
    inputs.one_of("symmetric", [True], True)
    strategy = inputs.one_of("strategy", ["tensor", "token", "group"])
    if not inputs.one_of("dynamic", [True, False], False):
        if strategy != "tensor":
            inputs.refuse("strategy", f"{strategy}, static", ["tensor, static", "token and group, dynamic"])
        return Scheme(code="fp8", scales=scales, group=size, activations="static")
    if strategy == "group" and inputs.get("group_size") != 128:
        inputs.refuse("group_size", inputs.get("group_size"), [128])
    return Scheme(code="fp8", scales=scales, group=size, activations="block" if strategy == "group" else "token")


def mxfp4(config: Fields) -> Quantization:
    """Read OpenAI's method: the stacked experts of each layer are MXFP4, all other modules are plain."""
    plain = config.names("modules_to_not_convert")
    stored = Stored(STACKED_MXFP4, Scheme(code="fp4", scales="group", group=32))

    def says(module: Module) -> Stored | None:
        expert = any(".experts." in f"{own}." for own in module)
        return stored if expert and not _named(module, plain) else None

    return Quantization(says)


METHODS: Mapping[str, Callable[[Fields], Quantization]] = {
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "modelopt": modelopt,
    "awq": awq,
    "gptq": gptq,
    "gguf": gguf,
    "mxfp4": mxfp4,
}
"""The methods by ``quant_method``."""
