"""Read an adapter of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

The reader is strict: config and tensors must agree with each other and with the model. An adapter with missing or
misread parts would still answer, only worse. Every error names the adapter and the remedy.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from preheat.configs.adapters import ADAPTER_TENSORS as TENSORS
from preheat.errors import AdapterError, ModelError
from preheat.lora.config import AdapterConfig, ModuleRules, endings
from preheat.lora.experts import Stack, alike, stacks_of
from preheat.lora.matrix import read_matrix
from preheat.model.mlp_specs import MoeSpec
from preheat.model.sources import open_tensors
from preheat.model.spec_tree import leaves
from preheat.model.specs import ModelSpec
from preheat.model.tensor_specs import TIED_HEAD, LinearSpec
from preheat.ops.matmul import LowRankPair
from preheat.utils.files import open_file, why_unread
from preheat.utils.text import some

_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"base_model\.model\.(.+)\.(lora_[AB]\.weight|lora_embedding_[AB])")
_LINEAR, _TABLE = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")
_DTYPES = ("F32", "BF16", "F16")

READERS = 4
"""Threads that read and hash the tensors of an adapter."""

FEW_TENSORS = 10_000
"""A number of tensors that are read in a moment, for any model."""

HEADER_BYTES = 32 << 20
"""The longest header of an adapter's tensors: some hundred thousand names."""

MESSAGE_CHARACTERS = 2000
"""Most characters of an error; it may name a tensor of any length."""

_OTHERS = {
    "lora_magnitude_vector": "belongs to DoRA, and DoRA is not supported",
    "lora_A.": "is not named as PEFT names it: save the adapter with save_pretrained",
    "lora_B.": "is a bias or not named as PEFT names it; neither is supported",
    "lora_": "is of a variant of LoRA that is not supported",
    "": "is a whole weight (of modules_to_save, a bias or a resized vocabulary): only the base model's whole weights "
    "are served",
}
"""Why a tensor that is no factor is refused, by a part of its name."""


class Single(NamedTuple):
    """The adapter of one module.

    ``raw`` is the module's name in the model's code, ``module`` its name in the checkpoint. ``halves`` are PEFT's names
    of both matrices. ``parameter`` is the name that the config's patterns match: the module's, or its weight's if the
    config lists the weight as a parameter.
    """

    raw: str
    module: str
    halves: tuple[str, str]
    parameter: str

    @property
    def key(self) -> str:
        """The key of the module in the adapter's digest."""
        return self.module

    @property
    def names(self) -> list[str]:
        """The names of the modules in the checkpoint."""
        return [self.module]

    def split(self, a: Tensor, b: Tensor, scale: float) -> Iterator[tuple[str, LowRankPair]]:
        """Yield the name and the matrices of the module."""
        yield self.module, LowRankPair(a, b, scale)


Found = Mapping[str, Single | Stack]
"""Single modules by their names in the checkpoint, stacks by their names in the adapter."""


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read.

    ``factors`` are by the checkpoint's module, ``rank`` is the largest rank. Adapters with an equal ``digest`` have
    equal factors and scales as stored, whatever their names.
    """

    name: str
    path: str
    rank: int
    factors: Mapping[str, LowRankPair]
    digest: str


def read_adapter(
    name: str, path: str, spec: ModelSpec, max_rank: int, dtype: torch.dtype, *, without_experts: str = ""
) -> Adapter:
    """Return the adapter in the folder ``path`` for the model of ``spec``.

    Its matrices are in ``dtype``. ``max_rank``: ``--max-lora-rank``. ``without_experts``: the reason if experts have no
    adapter slots. No tensor is read before all names and shapes are known to fit. Raises AdapterError.
    """
    try:
        config = AdapterConfig.read(Path(path))
        with _opened(Path(path), _most_tensors(spec)) as file:
            rules, found = _checked(file, config, spec, max_rank)
            if without_experts and (of_experts := sorted(expert_modules(spec).keys() & set(_adapted(found)))):
                raise AdapterError(
                    f"module {of_experts[0]} belongs to an expert: adapters of experts are not served "
                    f"{without_experts}; adapters of attention, routers and shared experts are"
                )
            factors, digest = _read(file, rules, found, dtype)
    except (AdapterError, ModelError, OSError, SafetensorError) as error:
        text = f"adapter {name!r} in {path}: {why_unread(error)}"
        raise AdapterError(text[:MESSAGE_CHARACTERS], param="lora_path") from error
    return Adapter(name, path, max(len(each.a) for each in factors.values()), factors, digest)


def adapted_modules(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of every layer that may be adapted, by module.

    The layers are the linear layers of the decoder, as the checkpoint stores them, and the output head. The output head
    is there even if it is the table of embeddings.
    """
    return {
        TIED_HEAD if module == spec.embedding.name else module: (outputs, linear.stored_inputs or linear.inputs)
        for _, linear in spec.linears()
        for module, outputs in linear.parts
    }


def expert_modules(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the modules of every routed expert, by module."""
    found = dict[str, tuple[int, int]]()
    for layer in spec.layers:
        if isinstance(layer.mlp, MoeSpec):
            own = layer.mlp.experts
            gated, down = (own.whole_inner, own.hidden), (own.hidden, own.whole_inner)
            shapes = gated, gated, down
            found |= {name: shapes[at % len(shapes)] for at, name in enumerate(own.modules)}
    return found


def _most_tensors(spec: ModelSpec) -> int:
    """Return a bound on an adapter's tensors: factors of each module, and copies of base weights."""
    return max(4 * (len(adapted_modules(spec)) + len(expert_modules(spec)) + 1), FEW_TENSORS)


def _opened(folder: Path, most: int) -> Any:
    """Return the open file of at most ``most`` tensors. Raises AdapterError if there is none."""
    if os.path.lexists(folder / TENSORS):
        _check_header(folder / TENSORS, most)
        return open_tensors(folder / TENSORS)
    if pickle := next((name for name in _PICKLES if os.path.lexists(folder / name)), None):
        raise AdapterError(f"{pickle} is a pickle, and reading one may run code: save the adapter as {TENSORS}")
    raise AdapterError(f"the folder holds no {TENSORS}")


def _check_header(path: Path, most: int) -> None:
    """Raise AdapterError for more tensors than an adapter has: reading their names would hold other requests up."""
    try:
        with open_file(path) as file:
            length = int.from_bytes(file.read(8), "little")
            count = file.read(length).count(b"{") if length <= HEADER_BYTES else 0  # each tensor has a brace
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {why_unread(error)}") from None
    if length > HEADER_BYTES:
        raise AdapterError(f"the header of {TENSORS} has {length:,} bytes; at most {HEADER_BYTES:,} are read")
    if count > most:
        raise AdapterError(f"{TENSORS} names up to {count:,} tensors; an adapter of this model has {most:,} at most")


def _checked(file: Any, config: AdapterConfig, spec: ModelSpec, max_rank: int) -> tuple[ModuleRules, Found]:
    """Return the rules of ``config`` for the adapted modules, and the adapted modules.

    Raises AdapterError unless names, shapes and dtypes of all tensors agree with ``config`` and ``spec``.
    """
    table, experts = spec.embedding, expert_modules(spec)
    expected = adapted_modules(spec) | experts | {table.name: (table.size, table.vocab_size)}
    singles, stacks = dict[str, Single](), dict[str, list[Stack]]()
    for raw in _modules(file, spec):
        module = _stored_name(raw, spec)
        if of_raw := stacks_of(raw, spec):
            stacks[raw] = of_raw
            continue
        if module not in expected:
            raise AdapterError(f"module {raw} {_why_not(module, spec, expected)}")
        if module in singles:
            raise AdapterError(f"{raw} and {singles[module].raw} are the same module")
        weight = f"{raw}.weight"
        parameter = weight if config.lists_parameter(weight) else raw
        singles[module] = Single(raw, module, _halves(module, spec), parameter)
    parameters = (stack.parameter for each in stacks.values() for stack in each)
    names = (name for each in singles.values() for name in (each.raw, each.parameter))
    rules = config.about([*expected, *names, *parameters])
    for module, single in singles.items():
        _check_single(file, single, expected[module], rules, max_rank)
    stacked = {raw: _checked_stack(file, raw, of_raw, rules, max_rank) for raw, of_raw in stacks.items()}
    found: dict[str, Single | Stack] = {**singles, **stacked}
    if not found:
        raise AdapterError(f"{TENSORS} holds no LoRA tensors")
    if config.ties and spec.tied and found.keys() & {table.name, TIED_HEAD}:
        raise AdapterError(
            "ensure_weight_tying is set: an adapter of the table of embeddings would also adapt the output head, and "
            "that is not supported: train one or both without it"
        )
    _check_complete(found, rules, spec, expected.keys() if found.keys() & experts.keys() else expected.keys() - experts)
    return rules, found


def _check_single(file: Any, single: Single, sizes: tuple[int, int], rules: ModuleRules, max_rank: int) -> None:
    """Raise AdapterError unless ``single`` fits a module of ``sizes``, its outputs and inputs."""
    raw = single.raw
    if single.parameter == raw and not rules.names(raw):
        raise AdapterError(f"module {raw} has tensors, but the config's target_modules does not name it")
    (outputs, inputs), rank = sizes, rules.rank_of(single.parameter)
    _check_rank(raw, rank, max_rank)
    _check_shapes(file, _tensors(single), rank, ([rank, inputs], [outputs, rank]))


def _checked_stack(file: Any, raw: str, stacks: list[Stack], rules: ModuleRules, max_rank: int) -> Stack:
    """Return the stacked parameter, one of ``stacks``, that the adapter of the module ``raw`` fits."""
    a, b = (file.get_slice(name).get_shape() for name in _tensors(stacks[0]))
    fitting = [each for each in stacks if [each.inputs, each.outputs] == [a[-1], b[0]]]
    if not fitting:
        shapes = " or ".join(f"[., {each.inputs}] and [{each.outputs}, .]" for each in stacks)
        raise AdapterError(f"the tensors of {raw} have shapes {list(a)} and {list(b)}, but the model needs {shapes}")
    stack = fitting[0]
    if not rules.config.lists_parameter(stack.parameter):
        raise AdapterError(f"{stack.parameter} has tensors, but the config's target_parameters does not name it")
    rank = rules.rank_of(stack.parameter)
    _check_rank(stack.parameter, rank, max_rank)
    _check_shapes(file, _tensors(stack), rank, stack.shapes(rank))
    return stack


def _check_complete(found: Found, rules: ModuleRules, spec: ModelSpec, expected: Set[str]) -> None:
    """Raise AdapterError if a module is adapted twice, or has no tensors.

    A module without tensors is an error if the config names it. Names like gate_proj mean no experts unless an expert
    has tensors of its own: PEFT sees the experts stacked.
    """
    adapted, stacks = _adapted(found), [each for each in found.values() if isinstance(each, Stack)]
    if len(adapted) > len(set(adapted)):
        raise AdapterError("experts are adapted twice: one by one, or in two stacks of the same parameter")
    missing = sorted(
        module for module in expected - found.keys() if rules.names(module) and not rules.config.all_linear
    )
    if missing:
        raise AdapterError(f"target_modules names modules that have no tensors: {some(missing)}")
    there = {each.parameter for each in found.values()}
    alone = {f"{module}.weight" for module in expected - found.keys()}
    wanted = alone | {name for stack in stacks for name in alike(stack, spec)}
    lacking = {name for name in wanted if rules.config.lists_parameter(name)} - there
    unused = rules.config.parameters - {ending for each in there for ending in endings(each)}
    if lacking | unused:
        raise AdapterError(f"target_parameters names parameters that have no tensors: {some(sorted(lacking | unused))}")


def _adapted(found: Found) -> list[str]:
    """Return the names in the checkpoint of all modules in ``found``."""
    return [name for each in found.values() for name in each.names]


def _modules(file: Any, spec: ModelSpec) -> list[str]:
    """Return the modules with both factors, by their names in the adapter. Raises AdapterError for other tensors."""
    halves: dict[str, set[str]] = {}
    for tensor in sorted(file.keys()):
        if match := _FACTOR.fullmatch(tensor):
            halves.setdefault(match[1], set()).add(match[2])
        elif not _is_copy(file, tensor, spec):
            why = next(why for part, why in _OTHERS.items() if part in tensor)
            raise AdapterError(f"tensor {tensor} {why}")
    for module, there in halves.items():
        if missing := set(_halves(_stored_name(module, spec), spec)) - there:
            raise AdapterError(f"module {module} has no {min(missing)}: both matrices are needed")
        if more := there - set(_halves(_stored_name(module, spec), spec)):
            raise AdapterError(f"module {module} has {min(more)}, and only modules of another kind have it")
    return list(halves)


def _halves(module: str, spec: ModelSpec) -> tuple[str, str]:
    """Return PEFT's names of both matrices of ``module``, a name in the checkpoint."""
    return _TABLE if module == spec.embedding.name else _LINEAR


def _is_copy(file: Any, tensor: str, spec: ModelSpec) -> bool:
    """Return whether ``tensor`` repeats the output head or the table of embeddings.

    PEFT saves such a copy beside the factors if the module is adapted. The vocabulary must be the base model's.
    """
    module = tensor.removeprefix(_PREFIX).removesuffix(".base_layer.weight")
    if tensor != f"{_PREFIX}{module}.base_layer.weight":
        return False
    if _stored_name(module, spec) not in (TIED_HEAD, spec.embedding.name):
        return False
    return tuple(file.get_slice(tensor).get_shape()) == (spec.vocab_size, spec.hidden_size)


def _stored_name(module: str, spec: ModelSpec) -> str:
    """Return the name in the checkpoint of ``module``, a name in the model's code."""
    for rename in spec.renames:
        if match := re.fullmatch(rename.stored, f"{module}.weight"):
            return match.expand(rename.names[0]).removesuffix(".weight") if len(rename.names) == 1 else module
    return module


def _why_not(module: str, spec: ModelSpec, expected: Mapping[str, object]) -> str:
    """Return the reason why ``module`` cannot be adapted."""
    tower = (leaf for _, leaf in leaves(spec.vision) if isinstance(leaf, LinearSpec)) if spec.vision else ()
    if any(module == name for linear in tower for name, _ in linear.parts):
        return "belongs to the vision tower: adapters of the image encoder are not supported"
    ends = sorted({name.rpartition(".")[2] for name in expected})
    return f"cannot be adapted in this model: only {', '.join(ends)} of its layers can"


def _check_rank(module: str, rank: int, max_rank: int) -> None:
    if rank > max_rank:
        raise AdapterError(f"module {module} has rank {rank}, but at most {max_rank} is served (--max-lora-rank)")


def _check_shapes(file: Any, tensors: Iterable[str], rank: int, shapes: Iterable[list[int]]) -> None:
    """Raise AdapterError unless the ``tensors`` have the ``shapes`` by the config's ``rank``."""
    for name, wanted in zip(tensors, shapes, strict=True):
        stored = file.get_slice(name)
        shape, dtype = list(stored.get_shape()), stored.get_dtype()
        if shape != wanted:
            raise AdapterError(
                f"tensor {name} has shape {shape}, but the model and rank {rank} of the config need {wanted}"
            )
        if dtype not in _DTYPES:
            raise AdapterError(f"tensor {name} is of type {dtype}; supported are {', '.join(_DTYPES)}")


def _tensors(each: Single | Stack) -> Iterator[str]:
    """Return the names of both matrices."""
    halves = each.halves if isinstance(each, Single) else _LINEAR
    return (f"{_PREFIX}{each.raw}.{half}" for half in halves)


def _read(file: Any, rules: ModuleRules, found: Found, dtype: torch.dtype) -> tuple[dict[str, LowRankPair], str]:
    """Return the factors of the modules in ``found``, and their digest: of the modules' digests, in order of names."""
    digest, factors = hashlib.sha256(), dict[str, LowRankPair]()
    modules = [each for _, each in sorted(found.items(), key=lambda item: item[0])]
    with ThreadPoolExecutor(READERS, "adapter") as threads:
        parts = threads.map(lambda each: _read_module(file, rules, each, dtype), modules)
        for own, of_module in parts:
            digest.update(of_module)
            factors |= own
    return factors, digest.hexdigest()


def _read_module(
    file: Any, rules: ModuleRules, each: Single | Stack, dtype: torch.dtype
) -> tuple[dict[str, LowRankPair], bytes]:
    """Return the factors of one module, or of a stack of modules, and their digest."""
    scale, digest = rules.scale_of(each.parameter), hashlib.sha256()
    digest.update(f"{each.key} {scale.hex()}".encode())
    a, b = (read_matrix(file, name, dtype, digest) for name in _tensors(each))
    largest = max(1.0, a.largest, b.largest)
    if abs(scale) * largest > torch.finfo(torch.float32).max:  # the product is in float32, whatever the dtype
        raise AdapterError(
            f"lora_alpha {rules.alpha_of(each.parameter):g} scales {each.parameter} by {scale:g}, beyond the range of "
            "float32: make lora_alpha smaller"
        )
    return dict(each.split(a.numbers, b.numbers, scale)), digest.digest()
