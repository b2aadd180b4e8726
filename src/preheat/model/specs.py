"""ModelSpec: everything that preheat knows of a model, and the only reader of a Hugging Face ``config.json``.

No torch here: planning needs a model's sizes long before its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from preheat.errors import ModelError
from preheat.model.registry import FAMILIES, Family, Flag

RopeKind = Literal["default", "linear", "llama3", "yarn"]
Dtype = Literal["float32", "bfloat16", "float16"]
RunDtype = Literal["float32", "bfloat16"]

_ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
_DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: base ``theta`` and how the frequencies are scaled for longer contexts.

    ``original_length`` is the context length before scaling. ``low_freq_factor`` and ``high_freq_factor`` belong to
    kind llama3, the fields after them to yarn (``attention_factor`` None: derived from ``factor``).
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. ``layer_windows[i]`` is layer i's sliding window in tokens, None for full attention.

    ``max_position_embeddings`` is the longest sequence, rope scaling included. ``dtype`` is the checkpoint's.
    ``eos_ids`` end a sequence; ``bos_id`` begins one where the tokenizer says so.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    layer_windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: Dtype

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, which is that of all value heads."""
        return self.num_kv_heads * self.head_dim


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a parsed ``config.json``; raises ModelError naming what is missing or not supported."""
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    fields = {**family.defaults, **{name: value for name, value in config.items() if value is not None}}
    if "sliding_window" in config:  # an explicit null means "none", an absent field means the default
        fields["sliding_window"] = config["sliding_window"]
    _refuse_unsupported(fields)
    num_layers, num_heads = _size(fields, "num_hidden_layers"), _size(fields, "num_attention_heads")
    hidden_size = _size(fields, "hidden_size")
    rope = _rope(fields)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=_size(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_size(fields, "num_key_value_heads", num_heads),
        head_dim=_size(fields, "head_dim", hidden_size // num_heads),
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope=rope,
        layer_windows=_layer_windows(family, fields, num_layers),
        qkv_bias=_flag(family.qkv_bias, fields),
        o_bias=_flag(family.o_bias, fields),
        mlp_bias=_flag(family.mlp_bias, fields),
        qk_norm=family.qk_norm,
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_position_embeddings=_longest(rope, _size(fields, "max_position_embeddings")),
        eos_ids=token_ids(fields.get("eos_token_id")),
        bos_id=next(iter(token_ids(fields.get("bos_token_id"))), None),
        dtype=_dtype(fields),
    )
    _check(spec)
    return spec


def resolve_dtype(asked: str, checkpoint: Dtype, native_bfloat16: bool) -> tuple[RunDtype, str | None]:
    """The dtype to compute in for ``--dtype asked``, and a sentence to log where it is not simply what was asked.

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
    """A config's token id field, which may be one id, a list or null, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return str(name)
    found = ", ".join(names) if names else f"none named (model_type {config.get('model_type')!r})"
    raise ModelError(f"architecture {found} is not supported; supported are {', '.join(FAMILIES)}")


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {fields['hidden_act']!r} is not supported, only 'silu' is")
    if "quantization_config" in fields:
        method = fields["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"quantized checkpoints ({method}) are not supported; use the unquantized model")
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial_rotary_factor other than 1 is not supported")


def _size(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if value is None:
        raise ModelError(f"config.json has no {name}")
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


def _flag(flag: Flag, fields: Mapping[str, Any]) -> bool:
    return bool(fields.get(flag, False)) if isinstance(flag, str) else flag


def _rope(fields: Mapping[str, Any]) -> RopeSpec:
    """Both forms: ``rope_parameters`` (transformers 5), or ``rope_theta`` with ``rope_scaling`` beside it."""
    params: Mapping[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = params.get("rope_type", params.get("type", "default"))
    if any(isinstance(value, Mapping) for value in params.values()):
        raise ModelError("rope parameters that differ between layers are not supported")
    if kind not in _ROPE_KINDS:
        raise ModelError(f"rope type {kind!r} is not supported; supported are {', '.join(_ROPE_KINDS)}")
    if params.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial_rotary_factor other than 1 is not supported")
    if params.get("mscale") or params.get("mscale_all_dim"):
        raise ModelError("rope parameters mscale and mscale_all_dim are not supported")
    needed = {"linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for name in needed.get(kind, ()):
        if params.get(name) is None:
            raise ModelError(f"rope type {kind!r} needs {name} in config.json")
    given = {name: params[name] for name in RopeSpec.__dataclass_fields__ if params.get(name) is not None}
    given |= {"kind": kind, "theta": float(params.get("rope_theta", fields.get("rope_theta", 10000.0)))}
    length = params.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    return RopeSpec(**given, original_length=length or _size(fields, "max_position_embeddings"))


def _longest(rope: RopeSpec, stated: int) -> int:
    """The longest sequence: configs state the length before linear or yarn scaling, or the one after it."""
    if rope.kind in ("linear", "yarn"):
        return max(stated, int(rope.original_length * rope.factor))
    return stated


def _layer_windows(family: Family, fields: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window: by ``layer_types`` where the config has it, else by the family's own rule."""
    window = fields.get("sliding_window") if family.sliding_window else None
    if family.window_switch and not fields.get(family.window_switch, False):
        window = None
    kinds = fields.get("layer_types")
    if kinds is None or not family.sliding_window:
        first = fields[family.window_first_layer] if family.window_first_layer else 0
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers")
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise ModelError(f"layer type {unknown[0]!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(fields: Mapping[str, Any]) -> Dtype:
    name = str(fields.get("dtype", fields.get("torch_dtype", "float32"))).removeprefix("torch.")
    for dtype in _DTYPES:
        if name == dtype:
            return dtype
    raise ModelError(f"checkpoint dtype {name!r} is not supported; supported are {', '.join(_DTYPES)}")


def _check(spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key/value heads evenly")
    if spec.head_dim % 2:
        raise ModelError(f"head_dim must be even for rotary embedding, got {spec.head_dim}")
    if any(window is not None and window < 1 for window in spec.layer_windows):
        raise ModelError("config.json: sliding_window must be at least 1")
