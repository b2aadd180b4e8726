"""A GGUF file as a checkpoint: its ``config.json``, and its tensors under the family's names. No torch.

A linear layer in Q8_0 or Q4_0 keeps its codes, if all layers that are computed with it have the same type, and so does
the output head. A head that is the table of embeddings reads the table's codes, and tokens get the table's numbers.
Other tensors, tables of embeddings among them, are numbers of the model's dtype once they are loaded.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from preheat.errors import ModelError
from preheat.model.gguf.architectures import ARCHITECTURES, FUSED, NEUTRAL, NOT_WEIGHTS, SCALED, TOP, YARN, Architecture
from preheat.model.gguf.container import Container, Stored, read_container
from preheat.model.gguf.kinds import PACKED, READ
from preheat.model.gguf.rope import divided
from preheat.utils.files import shown
from preheat.utils.text import brief, some

ORIGINAL = "give the checkpoint that the file was made from, a directory or an organization/name with safetensors"

HEAD = TOP["output"]
_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_MOST_EXPERTS = 4096
_DTYPES = {"F32": "float32", "F16": "float16"}


@dataclass(frozen=True)
class Entry:
    """A tensor of the model: rows of a ``stored`` tensor.

    Its ``rows`` are [from, to) of all rows. ``pairs`` is the size of a head with rotary partners side by side, 0 for
    rows in order. ``less`` is subtracted from each number. ``packed`` names codes or scales of a packed tensor.
    """

    stored: Stored
    shape: tuple[int, ...]
    rows: tuple[int, int]
    pairs: int = 0
    less: float = 0.0
    packed: str = ""


class Description:
    """A GGUF file, read but for its weights. Raises ModelError for a model that does not run."""

    def __init__(self, path: Path) -> None:
        self.container: Container = read_container(path)
        self.path, self.fields, self.stored = path, self.container.fields, self.container.tensors
        if self.fields.get("split.count", 0) not in (0, 1):
            raise self.wrong("it is one part of several", "merge them with llama-gguf-split --merge")
        if wrong := [f"{each.name} ({each.kind.name})" for each in self.stored.values() if each.kind.name not in READ]:
            raise self.wrong(
                f"it has tensors of types that are not read: {some(wrong)}",
                f"quantize the model to one of {', '.join(READ)}, such as Q4_0, Q4_K_M or Q8_0",
            )
        self.name, self.architecture = self._architecture()

    def wrong(self, what: str, remedy: str = ORIGINAL) -> ModelError:
        """Return an error of this file."""
        return ModelError(f"{shown(self.path)} cannot be used: {what}; {remedy}")

    def field(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the field ``name`` of a type, or ``default``."""
        value = self.fields.get(name, default)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise self.wrong(f"the field {name} has the value {brief(value)}")
        return value

    def _architecture(self) -> tuple[str, Architecture]:
        name = self.field("general.architecture", str)
        if name is None:
            raise self.wrong("it has no field general.architecture")
        row = f"{name} with experts" if self.fields.get(f"{name}.expert_count") else name
        found = ARCHITECTURES.get(row, ARCHITECTURES.get(name))
        if found is None:
            known = ", ".join(each for each in ARCHITECTURES if " " not in each)
            raise self.wrong(f"the architecture {name!r} is not supported; supported are {known}")
        return name, found

    # ------------------------------------------------------------------------------------------------ config.json

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's ``config.json``."""
        row = self.architecture
        config: dict[str, Any] = {"architectures": [row.family], "model_type": row.model_type, **row.constants}
        for ours, theirs in row.fields.items():
            value = self._number(theirs)
            if value is not None:
                config[ours] = value
            elif theirs not in row.optional:
                raise self.wrong(f"it has no field {self.name}.{theirs}")
        for name in ("hidden_size", "num_attention_heads", "head_dim"):
            if name in config and (type(config[name]) is not int or config[name] < 1):
                raise self.wrong(f"the field {self.name}.{row.fields[name]} has the value {config[name]}")
        self._refuse_unread()
        config |= {ours: f"blk.0.{stem}.bias" in self.stored for ours, stem in row.biases.items()}
        config |= {"vocab_size": self._table.shape[0], "tie_word_embeddings": self._tied}
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        if config.get("sliding_window") == 0:
            config["sliding_window"] = None
        if (own := SCALED.get((self.name, config["num_hidden_layers"]))) is not None:
            config[own[0]] = config[own[1]] / config[own[2]]
        elif row.plus_one:
            config["query_pre_attn_scalar"] = config["head_dim"]
        config["torch_dtype"] = self._dtype()
        config |= self._rope(config)
        if packed := self.packed:
            config["quantization_config"] = {"quant_method": "gguf", "modules": packed}
        return config

    def _number(self, name: str) -> Any:
        """Return a field below the architecture's name; a list of equal numbers is one number."""
        value = self.field(f"{self.name}.{name}", (int, float, list))
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.wrong(f"the field {self.name}.{name} differs between layers: {brief(value)}")
            value = value[0]
        if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            raise self.wrong(f"the field {self.name}.{name} has the value {value}")
        return value

    def _refuse_unread(self) -> None:
        """Raise ModelError for a field that changes numbers and that the architecture's row does not read."""
        read = {*self.architecture.fields.values()}
        for name in NEUTRAL.keys() - read:
            value = self.fields.get(f"{self.name}.{name}")
            if value is not None and value not in NEUTRAL[name]:
                raise self.wrong(f"the field {self.name}.{name} has the value {brief(value)}, which is not computed")
        norm = self.field(f"{self.name}.expert_weights_norm", bool)
        if norm is not None and norm != self.architecture.constants.get("norm_topk_prob", True):
            raise self.wrong(f"the field {self.name}.expert_weights_norm is {norm}, which is not computed")
        value, key = (self.fields.get(f"{self.name}.attention.{each}_length") for each in ("value", "key"))
        if value != key and value is not None:
            raise self.wrong(f"keys of {key} numbers and values of {value} are not supported")

    @property
    def _tied(self) -> bool:
        """Whether the output head is the loaded table of embeddings."""
        return "output.weight" not in self.stored and HEAD not in self.packed

    @property
    def _table(self) -> Stored:
        table = self.stored.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise self.wrong("it has no table of embeddings, token_embd.weight")
        return table

    def _dtype(self) -> str:
        """Return the dtype of most numbers in matrices; of quantized ones, bfloat16."""
        bytes_of: Counter[str] = Counter()
        for tensor in self.stored.values():
            if len(tensor.shape) > 1:
                bytes_of[tensor.kind.name] += tensor.num_bytes
        return _DTYPES.get(max(bytes_of, key=lambda kind: bytes_of[kind]), "bfloat16")

    def _rope(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of rotary embedding, as ``config.json`` has them."""
        head, found = config["head_dim"], {}
        turned = self._number("rope.dimension_count") or head
        if turned != head:
            if not self.architecture.partial:
                raise self.wrong(f"{turned} of {head} dimensions of a head turn")
            found["partial_rotary_factor"] = turned / head
        kind = self.field(f"{self.name}.rope.scaling.type", str, "none")
        factor, original = self._number("rope.scaling.factor"), self._number("rope.scaling.original_context_length")
        scaling: dict[str, Any] = {}
        if kind in ("linear", "yarn"):
            scaling = {"rope_type": kind, "factor": factor or 1.0, "original_max_position_embeddings": original}
        if kind == "yarn":
            given = {ours: self._number(f"rope.scaling.{theirs}") for ours, theirs in YARN.items()}
            scaling |= {ours: value for ours, value in given.items() if value}
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise self.wrong(f"the rope scaling {kind!r} is not supported")
        of_tables = self._number("rope.scaling.attn_factor")
        if "rope_factors_long.weight" in self.stored or kind == "longrope":
            scaling = {
                "rope_type": "longrope", "short_factor": self._factors("rope_factors_short.weight"),
                "long_factor": self._factors("rope_factors_long.weight"), "attention_factor": of_tables,
            }  # fmt: skip
            found["original_max_position_embeddings"] = original or config["max_position_embeddings"]
        elif of_tables not in (None, 0, 1):
            raise self.wrong(f"the field {self.name}.rope.scaling.attn_factor is {of_tables}, which is not computed")
        elif "rope_freqs.weight" in self.stored:
            factors, theta = self._factors("rope_freqs.weight"), config.get("rope_theta", 10000.0)
            scaling = divided(factors, theta, config["max_position_embeddings"])
        known = {name: value for name, value in scaling.items() if value is not None}
        return found | {"rope_scaling": known or None}

    def _factors(self, name: str) -> list[float]:
        """Return a small tensor of float32 numbers."""
        tensor = self.stored.get(name)
        if tensor is None or len(tensor.shape) != 1 or tensor.kind.name != "F32":
            raise self.wrong(f"{name} is missing or no row of F32 numbers")
        return [float(each) for each in self.container.rows(tensor, 0, 1).cast("f")]

    # ---------------------------------------------------------------------------------------------------- tensors

    @cached_property
    def packed(self) -> dict[str, str]:
        """The type of each linear layer that keeps its codes, by module."""
        found: dict[str, str] = {}
        head = self.stored.get("output.weight", self._table)
        if head.kind.name in PACKED:
            found[HEAD] = head.kind.name
        matches = map(_LAYER.fullmatch, self.stored)
        for layer in sorted({int(match[1]) for match in matches if match}):
            for group in FUSED:
                names = [f"blk.{layer}.{stem}" for stem in group if f"blk.{layer}.{stem}.weight" in self.stored]
                tensors = [self.stored[f"{name}.weight"] for name in names]
                kinds = {tensor.kind.name for tensor in tensors}
                if len(kinds) == 1 and kinds <= PACKED.keys():
                    found |= {module: kind for tensor in tensors for module in self._modules(tensor) for kind in kinds}
        return found

    def _modules(self, tensor: Stored) -> list[str]:
        """Return the modules of the family in a tensor: one, or one for each expert."""
        stem, _, end = tensor.name.rpartition(".")
        if stem in TOP:
            return [TOP[stem]]
        match = _LAYER.fullmatch(tensor.name)
        module = self.architecture.layer.get(match[2]) if match and end in ("weight", "bias") else None
        if match is None or module is None:
            return []
        prefix = f"model.layers.{int(match[1])}."
        if "{}" not in module:
            return [prefix + module]
        if len(tensor.shape) != 3 or tensor.shape[0] > _MOST_EXPERTS:
            raise self.wrong(
                f"{tensor.name} has the shape {list(tensor.shape)}, and experts need three dimensions, of them at most "
                f"{_MOST_EXPERTS:,} experts"
            )
        return [prefix + module.format(expert) for expert in range(tensor.shape[0])]

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield every tensor of the model with its name; tensors of no module keep their names."""
        for tensor in self.stored.values():
            if tensor.name in NOT_WEIGHTS:
                continue
            modules, end = self._modules(tensor), tensor.name.rpartition(".")[2]
            if not modules:
                yield tensor.name, Entry(tensor, tensor.shape, (0, math.prod(tensor.shape[:-1])))
                continue
            shape = tensor.shape[1:] if len(tensor.shape) == 3 else tensor.shape
            if end == "weight" and modules[0].endswith("shared_expert_gate"):
                shape = (1, *shape[-1:])
            step = math.prod(shape[:-1])
            for place, module in enumerate(modules):
                yield from self._entry(tensor, module, end, shape, (place * step, (place + 1) * step))
        if HEAD in self.packed and "output.weight" not in self.stored:
            table = self._table
            yield from self._entry(table, HEAD, "weight", table.shape, (0, table.shape[0]))

    def _entry(
        self, tensor: Stored, module: str, end: str, shape: Sequence[int], rows: tuple[int, int]
    ) -> Iterator[tuple[str, Entry]]:
        less = 1.0 if self.architecture.plus_one and module.endswith("norm") else 0.0
        turns = self.architecture.interleaved and module.endswith(("q_proj", "k_proj"))
        entry = Entry(tensor, tuple(shape), rows, self.config["head_dim"] if turns else 0, less)
        if end == "weight" and module in self.packed:
            yield f"{module}.codes", Entry(tensor, entry.shape, rows, entry.pairs, packed="codes")
            groups = (*entry.shape[:-1], entry.shape[-1] // tensor.kind.numbers)
            yield f"{module}.scales", Entry(tensor, groups, rows, entry.pairs, packed="scales")
        else:
            yield f"{module}.{end}", entry
