"""Reading a Hugging Face ``config.json``: sizes, flags, rope, sliding windows, dtype.

No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from preheat.errors import ModelError
from preheat.model.attention_specs import RopeKind, RopeSpec
from preheat.model.specs import Dtype
from preheat.model.unread import MODEL, refuse_unread
from preheat.utils.angles import log

RunDtype = Literal["float32", "bfloat16", "float16"]

_ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
_ROPE_NEEDS = {
    "linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}  # fmt: skip
_ROPE_NUMBERS = {
    "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
    "original_max_position_embeddings",
}  # fmt: skip
_YARN_NUMBERS = {"mscale", "mscale_all_dim"}
_ROPE_KNOWN = {
    *RopeSpec.__dataclass_fields__, *_ROPE_NUMBERS, "rope_type", "type", "rope_theta", "partial_rotary_factor",
    "finetuned", "max_position_embeddings",
} - {"kind", "theta", "partial", "interleaved", "original_length"}  # fmt: skip
_DTYPES: tuple[Dtype, ...] = get_args(Dtype)

MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
"""Bounds of a config's numbers.

A wrong number is an error, and no list of a billion layers.
"""


_LEFT_OUT = "; if the model does without it, set it to null with --hf-overrides"


class _Recorded(dict[str, Any]):
    """Fields that record the names ``read`` so far."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field ``name``, ``default`` without it; record the reading."""
        self.read.add(name)
        return super().get(name, default)


class Config:
    """The fields of a ``config.json``.

    An absent or null field takes its value from ``defaults``, if there is one: the defaults of the reference
    implementation's config class. Methods raise ModelError, naming the field, for a field that is missing, wrong or not
    supported.
    """

    def __init__(
        self, architecture: str, values: Mapping[str, Any], names: Mapping[str, str] | None = None, **defaults: object
    ) -> None:
        self.architecture = architecture
        self._names = names or {}
        self._values = {**values, **{name: values.get(own) for name, own in self._names.items()}}
        self._fields = _Recorded(defaults)
        self._fields.update({name: value for name, value in self._values.items() if value is not None})

    def _again(
        self, values: Mapping[str, Any], names: Mapping[str, str] | None, defaults: Mapping[str, object]
    ) -> Config:
        """Return another view of the same config.

        A field read through one view counts as read in both.
        """
        other = Config(self.architecture, values, names, **defaults)
        other._fields.read = self._fields.read
        return other

    @property
    def fields(self) -> Mapping[str, Any]:
        """All fields that the config states."""
        return self._values

    def with_defaults(self, **defaults: object) -> Config:
        """Return the same fields with other defaults."""
        return self._again(self._values, self._names, defaults)

    def updated(self, values: Mapping[str, Any]) -> Config:
        """Return the same fields without defaults, updated by ``values``."""
        return self._again({**self._values, **values}, self._names, {})

    def renamed(self, **names: str) -> Config:
        """Return the same fields without defaults, some under other names: ``hidden_size="n_embd"``."""
        return self._again(self._values, names, {})

    def refuse_unread(self, where: str = "config.json") -> None:
        """Raise ModelError for a field that changes numbers but was never read.

        A field with a neutral value is accepted: see :mod:`preheat.model.unread`.
        """
        refuse_unread(where, self._values, MODEL, self._fields.read, hint=_LEFT_OUT)

    def size(self, name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """Return a positive integer, at most ``most``."""
        value, own = self._fields.get(name, default), self._names.get(name, name)
        if value is None:
            raise ModelError(f"config.json has no {own}")
        if type(value) is not int or value < 1:
            raise ModelError(f"config.json: {own} must be a positive integer, got {value!r}")
        if value > most:
            raise ModelError(f"config.json: {own} is {value}, but at most {most} are possible")
        return value

    def optional_size(self, name: str) -> int | None:
        """Return a positive integer, or None where the config states null."""
        return None if name in self._values and self._values[name] is None else self.size(name)

    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return self.size("num_hidden_layers", most=MAX_LAYERS)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object; an absent one is empty."""
        value = self._fields.get(name, {})
        if not isinstance(value, Mapping):
            raise ModelError(f"config.json: {name} must be an object, got {value!r}")
        return value

    def positive(self, name: str, default: float) -> float:
        """Return a positive, finite number."""
        return _positive(self._names.get(name, name), self._fields.get(name, default))

    def get(self, name: str) -> object:
        """Return the field's value; None without value and default."""
        return self._fields.get(name)

    def flag(self, name: str) -> bool:
        """Return a boolean; an absent one is false."""
        return bool(self._fields.get(name, False))

    def has(self, name: str) -> bool:
        """Whether the config states ``name``, whatever its default."""
        return self._values.get(name) is not None

    def require(self, name: str) -> None:
        """Raise ModelError unless the config states ``name``."""
        if not self.has(name):
            raise ModelError(f"config.json has no {name}, and models of {self.architecture} need it")

    def ids(self, name: str) -> tuple[int, ...]:
        """Return a list of numbers; an absent one is empty."""
        value = self._fields.get(name) or ()
        if not isinstance(value, list | tuple) or any(type(id) is not int for id in value):
            raise ModelError(f"config.json: {name} must be a list of numbers, got {value!r}")
        return tuple(value)

    def refuse(self, name: str, *allowed: object) -> None:
        """Raise ModelError unless the field is absent, false or ``allowed``."""
        value = self._fields.get(name)
        if value and value not in allowed:
            only = f", only {' or '.join(map(repr, allowed))}" if allowed else ""
            raise ModelError(f"{self._names.get(name, name)} {value!r} is not supported{only}")

    def require_silu(self) -> None:
        """Raise ModelError unless the activation of the feed-forward block is SiLU."""
        if self._fields.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act {self._fields['hidden_act']!r} is not supported, only 'silu' is")

    def quantization(self) -> Mapping[str, Any] | None:
        """Return the checkpoint's quantization config; None if it is not quantized."""
        return self.mapping("quantization_config") if "quantization_config" in self._fields else None

    def require_unquantized(self) -> None:
        """Raise ModelError if this part has its own quantization config."""
        if (config := self.quantization()) is not None:
            method = config.get("quant_method", "unknown")
            raise ModelError(f"a quantization_config of one part of a model ({method}) is not supported")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return the ids of a field: one id, a list or null."""
        value = self._fields.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(id) is not int for id in ids):
            raise ModelError(f"config.json: {name} must be a token id or a list of them, got {value!r}")
        return tuple(ids)

    def dtype(self) -> Dtype:
        """Return the checkpoint's dtype."""
        name = str(self._fields.get("dtype", self._fields.get("torch_dtype", "float32"))).removeprefix("torch.")
        for dtype in _DTYPES:
            if name == dtype:
                return dtype
        raise ModelError(f"checkpoint dtype {name!r} is not supported; supported are {', '.join(_DTYPES)}")

    def rope_fields(self) -> Mapping[str, Any]:
        """Return ``rope_parameters`` (transformers 5) or ``rope_scaling``; the default without both.

        Raises ModelError if the config states both with different values.
        """
        stated = [self.mapping(name) for name in ("rope_parameters", "rope_scaling") if self.has(name)]
        stated = [each for each in stated if each]
        if stated[1:] and stated[0] != stated[1]:
            raise ModelError(
                "config.json has rope_parameters and rope_scaling with different values: set one of them to null with "
                "--hf-overrides"
            )
        return stated[0] if stated else self.mapping("rope_parameters")

    def rope(
        self,
        layers: str | None = None,
        *,
        partial: bool = False,
        interleaved: bool = False,
        theta: float = 10000.0,
        also: Mapping[str, str] | None = None,
        read: Collection[str] = (),
    ) -> RopeSpec:
        """Return the spec of :meth:`rope_fields`, and of ``rope_theta`` beside them.

        ``layers`` selects the parameters of this layer type, if the config has them by type. ``partial``: only a part
        of a head may turn. ``interleaved``: partners are neighbors. ``theta`` is the default. ``also`` are other names
        of kinds, ``read`` the parameters that the family reads itself.
        """
        fields, params = self._fields, self.rope_fields()
        if layers is not None and isinstance(params.get(layers), Mapping):
            params = params[layers]
        kind = params.get("rope_type", params.get("type", "default"))
        kind = (also or {}).get(str(kind), kind)
        if any(isinstance(value, Mapping) for value in params.values()):
            raise ModelError("rope parameters that differ between layers are not supported")
        if kind not in _ROPE_KINDS:
            raise ModelError(f"rope type {kind!r} is not supported; supported are {', '.join(_ROPE_KINDS)}")
        own = fields.get("partial_rotary_factor")  # beside the rope parameters: some writers repeat it there
        part = params.get("partial_rotary_factor") or own or 1.0
        if part != 1.0 and not partial:
            raise ModelError(f"partial_rotary_factor other than 1 is not supported by {self.architecture}")
        known = {*_ROPE_KNOWN, *read, *(_YARN_NUMBERS if kind == "yarn" else ())}
        if unknown := sorted(name for name in params.keys() - known if params[name]):
            raise ModelError(f"rope parameter {unknown[0]} {params[unknown[0]]!r} is not supported")
        for name in _ROPE_NEEDS.get(kind, ()):
            if params.get(name) is None:
                raise ModelError(f"rope type {kind!r} needs {name} in config.json")
        for name in sorted((_ROPE_NUMBERS | _YARN_NUMBERS) & params.keys()):
            if params[name] is not None:
                _check_rope(name, params[name])
        given = {name: params[name] for name in RopeSpec.__dataclass_fields__ if params.get(name) is not None}
        for name in ("short_factor", "long_factor"):
            _check_numbers(name, params.get(name))
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        given["interleaved"] = interleaved
        if kind == "yarn":
            given |= _yarn_factor(params)
        given["partial"] = _positive("partial_rotary_factor", part)
        given["theta"] = _positive("rope_theta", params.get("rope_theta", fields.get("rope_theta", theta)))
        name = "original_max_position_embeddings"
        own_length = self.size(name) if name in fields else params.get(name)  # the reference lets the outer one win
        given["original_length"] = own_length or self.size("max_position_embeddings")
        if kind == "longrope" and "factor" not in given:
            given["factor"] = self.size("max_position_embeddings") / given["original_length"]
        if (kind, given["original_length"]) == ("longrope", 1) or (kind, given["theta"]) == ("yarn", 1.0):
            name = "rope_theta" if kind == "yarn" else name
            raise ModelError(f"config.json: rope type {kind!r} divides by the logarithm of {name}, so it cannot be 1")
        return RopeSpec(**given | {"kind": kind})

    def max_positions(self, rope: RopeSpec) -> int:
        """Return the longest sequence.

        With linear or yarn scaling, configs state the length either before or after it.
        """
        stated = self.size("max_position_embeddings")
        if rope.kind in ("linear", "yarn"):
            if (grown := rope.original_length * rope.factor) > MAX_SIZE:
                raise ModelError(f"config.json: the rope's factor {rope.factor} makes {grown:g} positions: lower it")
            return max(stated, int(grown))
        return stated

    def window(self) -> int | None:
        """Return the size of sliding windows.

        An explicit null means none, an absent field means the default.
        """
        name = "sliding_window"
        window = self._values[name] if name in self._values else self._fields.get(name)
        if window is not None and type(window) is not int:
            raise ModelError(f"config.json: {name} must be a whole number or null, got {window!r}")
        return window

    def windows(self, *, used: bool = True, first_layer: str | None = None, every: int = 0) -> tuple[int | None, ...]:
        """Return each layer's sliding window, None for full attention.

        ``layer_types`` decides if the config has it. Else layers have a window from the layer in the field
        ``first_layer`` on, except each ``every``-th layer. Not ``used``: no layer has a window.
        """
        num_layers, window = self.num_layers(), self.window() if used else None
        kinds = self._fields.get("layer_types")
        if kinds is None:
            first = self._fields[first_layer] if first_layer else 0
            if type(first) is not int:
                raise ModelError(f"config.json: {first_layer} must be a whole number, got {first!r}")
            full = (index < first or (every and (index + 1) % every == 0) for index in range(num_layers))
            kinds = ["full_attention" if each else "sliding_attention" for each in full]
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise ModelError(f"config.json: layer_types must be a list of names, got {kinds!r}")
        if len(kinds) != num_layers:
            raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers")
        if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
            raise ModelError(f"layer type {unknown[0]!r} is not supported")
        if not used and self.has("layer_types") and "sliding_attention" in kinds:
            raise ModelError(
                "config.json: layer_types has sliding_attention, but use_sliding_window is false: change one of them "
                "with --hf-overrides"
            )
        if window is not None and window < 1 and "sliding_attention" in kinds:
            raise ModelError("config.json: sliding_window must be at least 1")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def resolve_dtype(
    asked: str, checkpoint: Dtype, native_bfloat16: bool, *, float16: bool = False
) -> tuple[RunDtype, str | None]:
    """Return the dtype for ``--dtype asked``, and a sentence to log.

    The sentence is None if the dtype is the expected one. ``auto`` is the checkpoint's dtype, except that float32
    replaces bfloat16 where the device has no native bfloat16. ``float16``: the device runs float16 as it is.
    """
    if asked not in ("auto", *_DTYPES):
        raise ModelError(f"dtype {asked!r} is not supported; use auto, bfloat16 or float32", param="dtype")
    wanted = checkpoint if asked == "auto" else asked
    if wanted == "float32":
        return "float32", None
    if wanted == "float16" and float16:
        return "float16", None
    if asked == "auto" and not native_bfloat16:
        return "float32", f"the checkpoint is {wanted}, but this device has no native bfloat16: running as float32"
    if wanted == "float16":
        return "bfloat16", "float16 runs as bfloat16, with the same size and a wider range"
    return "bfloat16", None


def _yarn_factor(params: Mapping[str, Any]) -> dict[str, float]:
    """Return yarn's factor of cosines and sines if the parameters ``mscale`` and ``mscale_all_dim`` state it."""
    one, other, factor = params.get("mscale"), params.get("mscale_all_dim"), params["factor"]
    if params.get("attention_factor") is not None or not (one and other):
        return {}
    grown = [0.1 * each * log(factor) + 1.0 if factor > 1 else 1.0 for each in (one, other)]
    return {"attention_factor": grown[0] / grown[1]}


def _positive(name: str, value: object) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def _check_rope(name: str, value: object) -> None:
    """Raise ModelError unless ``value`` is a number, and a positive one where wavelengths are divided by it."""
    if type(value) not in (int, float) or not math.isfinite(value) or (name in _ROPE_NUMBERS and value <= 0):  # type: ignore[arg-type, operator]
        kind = "positive number" if name in _ROPE_NUMBERS else "number"
        raise ModelError(f"config.json: {name} of the rope parameters must be a {kind}, got {value!r}")


def _check_numbers(name: str, values: object) -> None:
    """Raise ModelError unless ``values`` is a list of positive numbers, or absent."""
    if values is not None and not isinstance(values, list):
        raise ModelError(f"config.json: {name} must be a list of numbers, got {values!r}")
    for value in values or ():
        _positive(name, value)
