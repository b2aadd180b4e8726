"""Reading a Hugging Face ``config.json``: sizes, flags, rope, sliding windows, dtype. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from preheat.errors import ModelError
from preheat.model.specs import Dtype, RopeKind, RopeSpec

RunDtype = Literal["float32", "bfloat16"]

_ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
_ROPE_NEEDS = {"linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
_DTYPES: tuple[Dtype, ...] = get_args(Dtype)


class Config:
    """The fields of a ``config.json``. An absent or null field has its value in ``defaults``, if there is one: those of
    the reference implementation's config class.

    Methods raise ModelError, naming the field, for one that is missing, wrong or not supported.
    """

    def __init__(self, architecture: str, values: Mapping[str, Any], **defaults: object) -> None:
        self.architecture = architecture
        self._values = values
        self._fields = {**defaults, **{name: value for name, value in values.items() if value is not None}}

    def with_defaults(self, **defaults: object) -> Config:
        """The same fields with other defaults."""
        return Config(self.architecture, self._values, **defaults)

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._fields.get(name, default)
        if value is None:
            raise ModelError(f"config.json has no {name}")
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {name} must be a positive integer, got {value!r}")
        return value

    def positive(self, name: str, default: float) -> float:
        """A positive, finite number."""
        return _positive(name, self._fields.get(name, default))

    def flag(self, name: str) -> bool:
        """A boolean; absent is false."""
        return bool(self._fields.get(name, False))

    def require_silu(self) -> None:
        """Raise ModelError unless the activation of the feed-forward block is SiLU."""
        if self._fields.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act {self._fields['hidden_act']!r} is not supported, only 'silu' is")

    def require_unquantized(self) -> None:
        """Raise ModelError if the checkpoint's linear layers are quantized."""
        if "quantization_config" in self._fields:
            method = self._fields["quantization_config"].get("quant_method", "unknown")
            raise ModelError(f"quantized checkpoints ({method}) are not supported; use the unquantized model")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """See :func:`token_ids`."""
        return token_ids(self._fields.get(name))

    def dtype(self) -> Dtype:
        """The checkpoint's dtype."""
        name = str(self._fields.get("dtype", self._fields.get("torch_dtype", "float32"))).removeprefix("torch.")
        for dtype in _DTYPES:
            if name == dtype:
                return dtype
        raise ModelError(f"checkpoint dtype {name!r} is not supported; supported are {', '.join(_DTYPES)}")

    def rope(self) -> RopeSpec:
        """From ``rope_parameters`` (transformers 5), or from ``rope_theta`` and ``rope_scaling``."""
        fields = self._fields
        params: Mapping[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        kind = params.get("rope_type", params.get("type", "default"))
        if any(isinstance(value, Mapping) for value in params.values()):
            raise ModelError("rope parameters that differ between layers are not supported")
        if kind not in _ROPE_KINDS:
            raise ModelError(f"rope type {kind!r} is not supported; supported are {', '.join(_ROPE_KINDS)}")
        if (fields.get("partial_rotary_factor", 1.0), params.get("partial_rotary_factor", 1.0)) != (1.0, 1.0):
            raise ModelError("partial_rotary_factor other than 1 is not supported")
        if params.get("mscale") or params.get("mscale_all_dim"):
            raise ModelError("rope parameters mscale and mscale_all_dim are not supported")
        for name in _ROPE_NEEDS.get(kind, ()):
            if params.get(name) is None:
                raise ModelError(f"rope type {kind!r} needs {name} in config.json")
        given = {name: params[name] for name in RopeSpec.__dataclass_fields__ if params.get(name) is not None}
        given["theta"] = _positive("rope_theta", params.get("rope_theta", fields.get("rope_theta", 10000.0)))
        length = params.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
        given["original_length"] = length or self.size("max_position_embeddings")
        return RopeSpec(**given | {"kind": kind})

    def max_positions(self, rope: RopeSpec) -> int:
        """The longest sequence. With linear or yarn scaling, configs state the length either before or after it."""
        stated = self.size("max_position_embeddings")
        if rope.kind in ("linear", "yarn"):
            return max(stated, int(rope.original_length * rope.factor))
        return stated

    def windows(self, *, used: bool = True, first_layer: str | None = None) -> tuple[int | None, ...]:
        """Each layer's sliding window: by ``layer_types`` if the config has it, else for all layers from the one that
        the field ``first_layer`` names. Not ``used``: none.
        """
        num_layers = self.size("num_hidden_layers")
        # An explicit null means "none", an absent field means the default.
        window = (self._values if "sliding_window" in self._values else self._fields).get("sliding_window")
        if not used:
            window = None
        kinds = self._fields.get("layer_types")
        if kinds is None:
            first = self._fields[first_layer] if first_layer else 0
            kinds = ["full_attention"] * min(first, num_layers) + ["sliding_attention"] * (num_layers - first)
        if len(kinds) != num_layers:
            raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers")
        if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
            raise ModelError(f"layer type {unknown[0]!r} is not supported")
        if window is not None and window < 1 and "sliding_attention" in kinds:
            raise ModelError("config.json: sliding_window must be at least 1")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def resolve_dtype(asked: str, checkpoint: Dtype, native_bfloat16: bool) -> tuple[RunDtype, str | None]:
    """The dtype to compute in for ``--dtype asked``, and a sentence to log if it is another one.

    ``auto`` is the checkpoint's dtype, except that float32 replaces bfloat16 where the device has no native bfloat16.
    """
    if asked not in ("auto", *_DTYPES):
        raise ModelError(f"dtype {asked!r} is not supported; use auto, bfloat16 or float32", param="dtype")
    wanted = checkpoint if asked == "auto" else asked
    if wanted == "float32":
        return "float32", None
    if asked == "auto" and not native_bfloat16:
        return "float32", f"the checkpoint is {wanted}, but this device has no native bfloat16: running as float32"
    if wanted == "float16":
        return "bfloat16", "float16 runs as bfloat16, which has the same size and a wider range"
    return "bfloat16", None


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """The ids of a token id field, which may be one id, a list or null."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _positive(name: str, value: object) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)
