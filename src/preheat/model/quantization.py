"""Reading a checkpoint's quantization config into the specs.

No torch here. Each method is in :data:`preheat.model.quantization_methods.METHODS`. Families know nothing of
quantization: their finished trees are walked, and each linear layer gets a format and a scheme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar, cast

from preheat.backends.base.facts import Facts
from preheat.errors import ModelError, SettingsError
from preheat.model import unread
from preheat.model.latent_specs import UpSpec
from preheat.model.mlp_specs import STACKED, STACKED_MXFP4, ExpertsSpec, MoeSpec
from preheat.model.quantization_methods import METHODS, Fields
from preheat.model.specs import ModelSpec, Rename, renamed
from preheat.model.stored import Module, Named, Quantization, Says, Stored
from preheat.model.tensor_specs import TIED_HEAD, GateSpec, LinearSpec
from preheat.model.unread import refuse_unread
from preheat.ops.kinds import Scheme

T = TypeVar("T")

INC = "inc"
"""Method that quantizes a plain checkpoint while it is loaded, by measured ranges."""

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
    said = Fields(method, config)
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
