"""Reading a checkpoint's quantization config into the specs.

No torch here. Each method has a line in :data:`METHODS` and a function from its config to the storage of each module.
Families know nothing of quantization: their finished trees are walked, and each linear layer gets a format and a
scheme.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, TypeVar, cast

from preheat.backends.base.facts import Facts
from preheat.errors import ModelError, SettingsError
from preheat.model import unread
from preheat.model.gguf.kinds import GROUP, PACKED
from preheat.model.latent_specs import UpSpec
from preheat.model.mlp_specs import STACKED, STACKED_MXFP4, ExpertsSpec, MoeSpec
from preheat.model.specs import ModelSpec, Rename, renamed
from preheat.model.tensor_specs import TIED_HEAD, GateSpec, LinearSpec
from preheat.model.unread import refuse_unread
from preheat.ops.kinds import Scheme

T = TypeVar("T")

INC = "inc"
"""Method that quantizes a plain checkpoint while it is loaded, by measured ranges."""


@dataclass(frozen=True)
class Stored:
    """The format (:data:`preheat.model.formats.FORMATS`) and the scheme of a module.

    ``others``: other sizes of groups, where the scheme's size does not divide the inputs of a module.
    """

    format: str
    scheme: Scheme
    others: tuple[int, ...] = ()

    def fitted(self, *inputs: int) -> Stored:
        """Return the storage with the first size of groups that divides all ``inputs``; else as it is."""
        sizes = (self.scheme.group, *self.others)
        found = next((size for size in sizes if size and not any(each % size for each in inputs)), self.scheme.group)
        return replace(self, scheme=replace(self.scheme, group=found))


MADE = "quantize"
"""Format of plain modules that are quantized while they are loaded."""

ONLINE: Mapping[str, Stored] = {
    "fp8": Stored(MADE, Scheme(code="fp8", scales="channel", activations="token")),
    "int8": Stored(MADE, Scheme(code="int8", scales="channel")),
    "int4": Stored(MADE, Scheme(code="int4", scales="group", group=128), others=(32,)),
}
"""Methods that quantize a plain checkpoint while it is loaded, by its own numbers."""

ONLINE_HEADS: Mapping[str, Stored] = {"int8": ONLINE["int8"], "int4": ONLINE["int8"]}
"""Storage of the output head by such a method; methods that are not named leave the head plain."""


WHOLE_WORDS = ("awq", "gptq", "gptq_v2", "gptq-symmetric")
"""Formats that pack whole words along both sides of a weight."""

LINEAR = "Linear"
"""The class of linear layers; compressed-tensors names all of them by it."""

Module = tuple[str, ...]
"""Names of a module in the spec and in other layouts."""

Says = Callable[[Module], Stored | None]
"""Storage rule of modules by their names; None: not quantized."""


Named = Callable[[str], Stored | None]
"""Storage rule of modules by their names in the spec."""


@dataclass(frozen=True)
class Quantization:
    """The rules of a method.

    ``says`` gives the storage of a module, ``head`` the storage of the output head; None: the head is plain.
    ``routers``: ``says`` applies to the routers of experts too. ``tables``: whether the config names a module as a
    quantized table of embeddings.
    """

    says: Says
    head: Says | None = None
    routers: bool = True
    tables: Callable[[Module], bool] = lambda module: False


def quantized(spec: ModelSpec, config: Mapping[str, Any] | None, asked: str | None = None) -> ModelSpec:
    """Return ``spec`` with the formats of ``config``, a checkpoint's ``quantization_config``.

    ``asked`` is the method of ``--quantization``. Raises ModelError for a config that is not supported, SettingsError
    if the asked method is not the checkpoint's.
    """
    if config is None:
        if asked in (None, INC):  # INC's ranges are not in the checkpoint: see preheat.model.quantize
            return spec
        if asked not in ONLINE:
            raise SettingsError(
                f"quantization {asked!r}: the checkpoint is not quantized, and only {', '.join(ONLINE)} and {INC} can "
                "be made while loading",
                param="quantization",
            )
        head = ONLINE_HEADS.get(asked)
        return _applied(spec, Quantization(lambda module: ONLINE[asked], lambda module: head, routers=False))
    method = str(config.get("quant_method", "unknown"))
    if method not in METHODS:
        raise ModelError(f"quantized checkpoints ({method}) are not supported; supported are {', '.join(METHODS)}")
    if asked not in (None, method):
        raise SettingsError(
            f"quantization {asked!r}: the checkpoint is quantized by {method}; leave the option out",
            param="quantization",
        )
    said = _Fields(method, config)
    found = METHODS[method](said)
    refuse_unread(method, config, unread.METHODS[method], said.read)
    return _applied(spec, found)


def bytes_by_scheme(spec: ModelSpec, facts: Facts, itemsize: int) -> dict[str, int]:
    """Return the bytes of the weights in a backend's memory, by scheme.

    ``itemsize`` are the bytes of the dtype of plain weights.
    """
    found: dict[str, int] = {}
    for scheme, size in spec.weight_bytes(itemsize).items():
        if scheme is None:
            found["not quantized"] = size
            continue
        kernel = facts.quantized[scheme.kind]
        found[scheme.name] = (
            size if kernel.keeps_codes else spec.quantized_weights(scheme) * (kernel.itemsize or itemsize)
        )
    return found


# ------------------------------------------------------------------------------------------------ into the tree


def _applied(spec: ModelSpec, quantization: Quantization) -> ModelSpec:
    says = partial(_said, quantization.says, spec.renames)
    for table in (spec.embedding, spec.positions):
        if table is not None and quantization.tables(names_of(table.name, spec.renames)):
            raise ModelError(f"quantized embeddings are not supported: {table.name}; add it to the modules to ignore")
    layers = tuple(_walked(layer, says, quantization.routers) for layer in spec.layers)
    return replace(spec, layers=layers, head=_head(spec, quantization.head))


def _head(spec: ModelSpec, says: Says | None) -> LinearSpec | None:
    """Return the output head, stored as ``says`` gives it.

    A head that is the table of embeddings can be quantized while it is loaded, beside the table. Raises ModelError for
    any other storage of it.
    """
    if spec.head is None or says is None:
        return spec.head
    named = partial(_said, says, spec.renames)
    if not spec.tied:
        return _linear(spec.head, named)
    stored = named(TIED_HEAD)
    if stored is not None and stored.format != MADE:
        raise ModelError(
            "quantized embeddings are not supported: the output head is the table of embeddings, so lm_head has to be "
            "among the modules to ignore"
        )
    return spec.head if stored is None else _linear(spec.head, lambda module: stored)


def _said(says: Says, renames: tuple[Rename, ...], module: str) -> Stored | None:
    return says(names_of(module, renames))


def names_of(module: str, renames: tuple[Rename, ...]) -> Module:
    """Return ``module``, and its names in other layouts by ``renames``."""
    rests = (module, module.partition(".")[2])
    others = dict.fromkeys(start + rest for start in _starts(renames) for rest in rests)
    return module, *(other for other in others if other != module and renamed(other, renames) == module)


@cache
def _starts(renames: tuple[Rename, ...]) -> tuple[str, ...]:
    """Return the beginnings of names that ``renames`` change as a whole.

    Beginnings of names with changed parts of a layer are left out.
    """
    return tuple(
        start for start in _STARTS if any(renamed(start + rest, renames) != start + rest for rest in ("x", TIED_HEAD))
    )


_STARTS = (
    "", "model.", "language_model.", "language_model.model.", "model.language_model.", "vision_tower.vision_model.",
    "model.vision_tower.", "model.vision_tower.vision_model.",
)  # fmt: skip
"""Beginnings of module names in some layout."""


def _walked(node: T, says: Named, routers: bool) -> T:
    """Return ``node`` with all linear layers and experts below it replaced."""
    changed: Any = node
    if isinstance(node, LinearSpec):
        changed = _linear(node, says)
    elif isinstance(node, ExpertsSpec):
        changed = _experts(node, says)
    elif isinstance(node, UpSpec):
        changed = _up(node, says)
    elif isinstance(node, GateSpec):
        if routers and says(node.name) is not None:
            raise ModelError(f"quantization of {node.name} is not supported: it must be among the modules to ignore")
    elif is_dataclass(node) and not isinstance(node, type):
        skipped = {"router"} if isinstance(node, MoeSpec) and not routers else set()
        names = [field.name for field in fields(node) if field.name not in skipped]
        below = {name: _walked(getattr(node, name), says, routers) for name in names}
        changed = replace(
            cast(Any, node), **{name: new for name, new in below.items() if new is not getattr(node, name)}
        )
    return cast(T, changed)


def _linear(spec: LinearSpec, says: Named) -> LinearSpec:
    stored = _agreed([name for name, _ in spec.parts], says)
    if stored is None:
        return spec
    stored = stored.fitted(spec.inputs)
    for name, outputs in spec.parts:
        _check_sizes(name, stored, outputs, spec.inputs)
    return replace(spec, format=stored.format, scheme=stored.scheme)


def _up(spec: UpSpec, says: Named) -> UpSpec:
    """Return the maps of latent vectors with the storage of their module; quantized while loading, they stay plain."""
    stored = says(spec.name)
    if stored is None or stored.format == MADE:
        return spec
    stored = stored.fitted(spec.rank)
    _check_sizes(spec.name, stored, *spec.shape)
    return replace(spec, format=stored.format, scheme=stored.scheme)


def _experts(spec: ExpertsSpec, says: Named) -> ExpertsSpec:
    modules = list(spec.modules)
    stored = _agreed(modules, says)
    if stored is None:
        return spec
    if stored.scheme.indexed:
        raise ModelError("experts with desc_act are not supported; use a checkpoint without it")
    if spec.format == STACKED and stored.format != STACKED_MXFP4:
        raise ModelError(f"{modules[0]}: stacked experts are plain or of MXFP4; {stored.scheme.name} is not supported")
    stored = stored.fitted(spec.hidden, spec.inner)
    _check_sizes(modules[0], stored, spec.inner, spec.hidden)
    _check_sizes(modules[2], stored, spec.hidden, spec.inner)
    return replace(spec, format=stored.format, scheme=stored.scheme)


def _agreed(modules: Sequence[str], says: Named) -> Stored | None:
    """Return the storage of all ``modules``, computed as one.

    Raises ModelError if it differs between them.
    """
    found = {module: says(module) for module in modules}
    first, *others = dict.fromkeys(found.values())
    if others:
        one, other = (next(module for module in modules if found[module] == each) for each in (first, others[0]))
        raise ModelError(
            f"{one} and {other} are computed as one layer, so the checkpoint must quantize them in the same way"
        )
    return first


def _check_sizes(module: str, stored: Stored, outputs: int, inputs: int) -> None:
    scheme = stored.scheme
    if scheme.scales == "group" and inputs % scheme.group:
        raise ModelError(f"{module}: its {inputs} inputs are not a multiple of the group size {scheme.group}")
    if stored.format in WHOLE_WORDS and (outputs % 8 or inputs % 8):
        raise ModelError(f"{module}: {outputs} outputs and {inputs} inputs must be multiples of 8 for {stored.format}")


# ---------------------------------------------------------------------------------------------------- the methods


class _Fields:
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

    def below(self, name: str, value: object) -> _Fields:
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.method}: {name} must be an object, got {value!r}")
        return _Fields(f"{self.method}: {name}", value)

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


def fp8(config: _Fields) -> Quantization:
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


def modelopt(config: _Fields) -> Quantization:
    """Read NVIDIA's ModelOpt: scales of a tensor, for weights and activations."""
    config.one_of("quant_algo", ["FP8"])
    scheme = Scheme(code="fp8", scales="tensor", activations="static")
    ignored = config.names("exclude_modules", "ignore")
    says = _except(ignored, Stored("fp8", scheme))
    return Quantization(says, head=None if "lm_head" in ignored else says)


def awq(config: _Fields) -> Quantization:
    """Read AutoAWQ's layout "gemm"."""
    config.one_of("version", ["gemm", "GEMM"], "gemm")
    config.one_of("bits", [4], config.get("w_bit", 4))
    if not config.one_of("zero_point", [True], True):
        config.refuse("zero_point", False, [True])
    group = config.count("group_size", config.get("q_group_size", 128))
    ignored = config.names("modules_to_not_convert")
    stored = Stored("awq", Scheme(code="int4", scales="group", group=group, zeros=True))
    return Quantization(_except(ignored, stored))


def gptq(config: _Fields) -> Quantization:
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


def _plain_by_dynamic(config: _Fields) -> tuple[str, ...]:
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


def gguf(config: _Fields) -> Quantization:
    """Read the types of packed modules in a GGUF file; all other modules are plain."""
    modules = config.below("modules", config.get("modules", {}))
    schemes = {kind: Scheme(code=code, scales="group", group=GROUP) for kind, code in PACKED.items()}
    for name in modules.values:
        modules.one_of(name, [*PACKED])

    def says(module: Module) -> Stored | None:
        found = (Stored("gguf", schemes[modules.values[name]]) for name in module if name in modules.values)
        return next(found, None)

    return Quantization(says, head=says)


def compressed_tensors(config: _Fields) -> Quantization:
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


def _check_cache(config: _Fields) -> None:
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


def _group(config: _Fields, group: _Fields) -> tuple[tuple[str, ...], Stored]:
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


def _fp4_scheme(weights: _Fields, style: str) -> Scheme:
    strategy, size = _FP4[style]
    weights.one_of("strategy", [strategy])
    weights.one_of("group_size", [size])
    weights.one_of("symmetric", [True], True)
    return Scheme(code="fp4", scales="group", group=size)


def _float_scheme(group: _Fields, weights: _Fields) -> Scheme:
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


def mxfp4(config: _Fields) -> Quantization:
    """Read OpenAI's method: the stacked experts of each layer are MXFP4, all other modules are plain."""
    plain = config.names("modules_to_not_convert")
    stored = Stored(STACKED_MXFP4, Scheme(code="fp4", scales="group", group=32))

    def says(module: Module) -> Stored | None:
        expert = any(".experts." in f"{own}." for own in module)
        return stored if expert and not _named(module, plain) else None

    return Quantization(says)


METHODS: Mapping[str, Callable[[_Fields], Quantization]] = {
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "modelopt": modelopt,
    "awq": awq,
    "gptq": gptq,
    "gguf": gguf,
    "mxfp4": mxfp4,
}
"""The methods by ``quant_method``."""
