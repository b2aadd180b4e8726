"""Configurations of Intel Neural Compressor (INC), and its files of ranges.

No torch here. A configuration (``QUANT_CONFIG``) names the modules to round to FP8, the rule, and the files of ranges.
There is a JSON file for each rank with the greatest magnitude of every module's inputs.

Source: neural_compressor/torch/algorithms/fp8_quant of INC 3, and vllm-gaudi's calibration folder.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from preheat.errors import SettingsError
from preheat.utils.files import TABLE_BYTES, read_text, shown, why_unread
from preheat.utils.text import did_you_mean

logger = logging.getLogger(__name__)


Device = Literal["gaudi2", "gaudi3"]


class Traits(NamedTuple):
    """The FP8 numbers and hardware scales of a device.

    ``full_scale`` is its greatest number. The scales are powers of ``base`` from ``least`` to ``most``.
    """

    full_scale: float
    base: int
    least: float
    most: float

    @property
    def hardware(self) -> list[float]:
        """All scales of the hardware, the greatest first."""
        found, step = [], self.most
        while step >= self.least:
            found.append(step)
            step /= self.base
        return found


DEVICES: Mapping[Device, Traits] = {
    "gaudi2": Traits(240.0, 16, 2.0**-8, 2.0**4),
    "gaudi3": Traits(448.0, 2, 2.0**-55, 2.0**7),
}
"""FP8 of each device.

Numbers here are e4m3 as on Gaudi 3; Gaudi 2 has the numbers up to 240 of them.
"""

INPUT_BACKOFF, WEIGHT_BACKOFF = 0.25, 0.5

ROUNDINGS = {"maxabs_hw": "hw", "maxabs_pow2": "pow2", "maxabs_arbitrary": "none"}

WITHOUT_RANGES = ("unit_scale", "hw_aligned_single_scale")

METHODS = (*ROUNDINGS, "maxabs_hw_opt_weight", "maxabs_pow2_opt_weight", *WITHOUT_RANGES)
"""Values of ``scale_method`` that give a tensor one scale."""

WITHOUT_EFFECT = {
    "method", "hp_dtype", "scale_format", "measure_on_hpu", "use_qdq", "fake_quant", "quantize_weight", "recalc_scales",
    "calibration_sample_interval", "local_rank", "global_rank", "world_size", "seperate_measure_files", "device_type",
    "measure_exclude", "use_stats_files", "verbose", "dump_stats_xlsx_path",
}  # fmt: skip
"""Keys without effect here.

They steer INC on its devices, or measurements that are not needed.
"""

LISTS = {"whitelist": "allowlist", "blacklist": "blocklist"}
"""Older names of the lists."""


CACHE_TYPE = "VLLMKVCache"


@dataclass(frozen=True)
class Names:
    """Modules by regular expressions in their names, or by classes."""

    names: tuple[str, ...] = ()
    types: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names or self.types)

    def match(self, module: str, kind: str) -> bool:
        """Whether a module of the class ``kind`` is meant.

        Every linear layer is a "Linear" too.
        """
        kinds = {kind, "KVCache" if kind == CACHE_TYPE else "Linear"}
        return bool(kinds & set(self.types)) or any(re.search(name, module) for name in self.names)


@dataclass(frozen=True, kw_only=True)
class IncConfig:
    """A configuration file.

    ``stats`` is the beginning of the paths of the files of ranges. ``device`` is the device they were measured on, None
    if unknown. ``lenient``: modules without ranges stay as they are.
    """

    path: Path
    mode: str
    method: str
    stats: Path
    allow: Names = field(default_factory=Names)
    block: Names = field(default_factory=Names)
    device: Device | None = None
    lenient: bool = False

    @property
    def traits(self) -> Traits:
        return DEVICES[self.device or "gaudi3"]

    def takes(self, module: str, kind: str) -> bool:
        """Whether a module is measured, or rounded."""
        allowed = not self.allow or self.allow.match(module, kind)
        return allowed and not self.block.match(module, kind)

    def input_scale(self, maxabs: float) -> float:
        """Return the scale of inputs with magnitudes up to ``maxabs``.

        Inputs are activations, or keys or values for the cache.
        """
        return self._scale(maxabs, INPUT_BACKOFF)

    def weight_scale(self, maxabs: float) -> float:
        """Return the scale of weights with magnitudes up to ``maxabs``.

        :meth:`candidates` are tried instead, if there are any.
        """
        return self._scale(maxabs, WEIGHT_BACKOFF)

    @property
    def candidates(self) -> list[float]:
        """Scales to try for weights.

        The one of least error wins. Empty: :meth:`weight_scale` decides.
        """
        if self.method == "maxabs_hw_opt_weight":
            return self.traits.hardware
        return [2.0**power for power in range(-10, 10)] if self.method == "maxabs_pow2_opt_weight" else []

    def _scale(self, maxabs: float, backoff: float) -> float:
        traits = self.traits
        if self.method == "unit_scale":
            return 1.0
        if self.method == "hw_aligned_single_scale":
            return traits.most
        rounding = ROUNDINGS[self.method.removesuffix("_opt_weight")]
        return rounded_scale(maxabs / (traits.full_scale * backoff), rounding, traits)


def rounded_scale(scale: float, rounding: str, traits: Traits) -> float:
    """Round ``scale`` by the rule ``rounding``.

    "none" keeps it, "pow2" rounds up to a power of two, "hw" up to a scale of the hardware. A scale of zero becomes the
    least of the hardware's scales, or 1 without "hw".
    """
    if scale == 0.0:
        return traits.least if rounding == "hw" else 1.0
    if rounding == "none":
        return scale
    mantissa, exponent = math.frexp(scale)
    power = exponent - 1 if mantissa == 0.5 else exponent  # the exponent of the least power of two that is not below
    if rounding == "pow2":
        return 2.0**power
    step = traits.base.bit_length() - 1
    return min(max(2.0 ** (math.ceil(power / step) * step), traits.least), traits.most)


def read_config(path: str) -> IncConfig:
    """Return the configuration in a JSON file, with INC's defaults.

    Raises SettingsError, naming the key, for values that are not supported here.
    """
    values = {LISTS.get(key, key): value for key, value in _read_json(Path(path)).items()}
    known = {*WITHOUT_EFFECT, *_READ}
    if unknown := sorted(values.keys() - known):
        raise wrong(path, f"{unknown[0]} is not supported{did_you_mean(unknown[0], known)}")
    method = str(values.get("scale_method", "maxabs_hw")).lower()
    if method not in METHODS:
        raise wrong(path, f"scale_method {method} is not supported, only {', '.join(METHODS)}")
    for key, allowed in _ONLY.items():
        if str(values.get(key, allowed[0])).lower() not in allowed:
            raise wrong(path, f"{key} {values[key]} is not supported, only {' or '.join(allowed)}")
    if values.get("scale_params"):
        raise wrong(path, "scale_params are not supported: leave them out")
    stats = Path(values.get("dump_stats_path", "stats"))
    return IncConfig(
        path=Path(path),
        mode=str(values.get("mode", "QUANTIZE")).upper(),
        method=method,
        stats=stats,
        allow=_names(path, values, "allowlist"),
        block=_names(path, values, "blocklist"),
        device=_device(values, stats, Path(path)),
        lenient=_flag(values.get("ignore_modules_wo_measures", False)),
    )


_ONLY = {
    "mode": ("quantize", "measure"),
    "observer": ("maxabs",),
    "fp8_config": ("e4m3",),
    "dynamic_quantization": ("false",),
}

_READ = {
    *_ONLY, "scale_method", "scale_params", "dump_stats_path", "allowlist", "blocklist", "device_for_scales",
    "ignore_modules_wo_measures",
}  # fmt: skip


def _names(path: str, values: Mapping[str, Any], key: str) -> Names:
    given = values.get(key) or {}
    if not isinstance(given, Mapping) or not given.keys() <= {"names", "types"}:
        raise wrong(path, f"{key} must be an object of names and types")
    names, types = (tuple(given.get(part) or ()) for part in ("names", "types"))
    for name in names:
        try:
            re.compile(name)
        except (re.error, TypeError) as error:
            raise wrong(path, f"{key}: {name!r} is not a regular expression: {error}") from None
    return Names(names, types)


def _flag(value: object) -> bool:
    return str(value).lower() == "true"


def _device(values: Mapping[str, Any], stats: Path, path: Path) -> Device | None:
    """Return the device of a configuration.

    The file states it, or the folders of its ranges or its own name do. Folders and names say g2 or g3, as vLLM's
    scripts for Gaudi write them.
    """
    if given := values.get("device_for_scales"):
        name = str(given).lower()
        if name not in DEVICES:
            raise wrong(path, f"device_for_scales {given} is not supported, only {' or '.join(DEVICES)}")
        return name  # type: ignore[return-value]
    for word in (*reversed(stats.parts), path.stem):
        if found := re.search(r"(?:^|[_.-])g([23])(?:$|[_.-])", word):
            return "gaudi2" if found[1] == "2" else "gaudi3"
    return None


class Ranges(NamedTuple):
    """Greatest magnitudes of a module's inputs, and of any weights."""

    inputs: tuple[float, ...]
    weight: float | None = None


def read_ranges(config: IncConfig) -> dict[str, Ranges]:
    """Return the ranges of all modules by name.

    They are the greatest over all ranks. Raises SettingsError, naming the file, if one is missing or has no ranges.
    """
    found: dict[str, Ranges] = {}
    for path in rank_files(config):
        nodes = _read_json(path).get("Nodes")
        if not isinstance(nodes, Mapping):
            raise wrong(path, "it has no Nodes, so it is not a file of ranges")
        for name, node in nodes.items():
            now = _node(path, name, node)
            before = found.get(name, now)
            if len(before.inputs) != len(now.inputs):
                raise wrong(
                    path, f"{name} has {len(now.inputs)} inputs, and {len(before.inputs)} in another rank's file"
                )
            inputs = tuple(max(pair) for pair in zip(before.inputs, now.inputs, strict=True))
            found[name] = Ranges(inputs, _greatest([before.weight, now.weight]))
    return found


def rank_files(config: IncConfig) -> list[Path]:
    """Return the files of ranges.

    There is one without a rank, or one per rank of the smallest world.
    """
    base = config.stats.with_name(f"{config.stats.name}_hooks_maxabs")
    whole = base.with_name(base.name + ".json")
    if os.path.lexists(whole):
        return [whole]
    by_world: dict[int, dict[int, Path]] = {}
    for path in base.parent.glob(f"{base.name}_*.json"):
        if match := re.fullmatch(re.escape(base.name) + r"_(\d+)_(\d+)\.json", path.name):
            by_world.setdefault(int(match[2]), {})[int(match[1])] = path
    if not by_world:
        also = " (there is only an .npz: it is a pickle, and pickles are not opened)" if _npz(base) else ""
        raise wrong(config.path, f"no ranges in {whole} or {base.name}_RANK_RANKS.json beside it{also}: "
                     "measure with preheat calibrate")  # fmt: skip
    world, ranks = min(by_world.items())
    if missing := sorted(set(range(world)) - ranks.keys()):
        raise wrong(config.path, f"{base}_{missing[0]}_{world}.json is missing: every rank's ranges are needed")
    return [ranks[rank] for rank in range(world)]


def _npz(base: Path) -> bool:
    return any(base.parent.glob(f"{base.name}*.npz"))


def _node(path: Path, name: str, node: Any) -> Ranges:
    try:
        inputs = tuple(_greatest(_numbers(each)) or 0.0 for each in node.get("inputs", node.get("input", ())))
        weight = (node.get("params") or {}).get("weight")
        return Ranges(inputs, None if weight is None else _greatest(_numbers(weight)))
    except (AttributeError, TypeError, ValueError) as error:
        raise wrong(path, f"the ranges of {name} cannot be read: {error}") from None


def _numbers(nested: Any) -> Iterator[float]:
    if isinstance(nested, list):
        for each in nested:
            yield from _numbers(each)
        return
    value = float(nested)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value} is not a magnitude (a finite number of at least 0)")
    yield value


def _greatest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_text(path, most=TABLE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"{shown(path)} cannot be read as JSON: {why_unread(error)}", param="quant_config"
        ) from None
    if not isinstance(values, dict):
        raise SettingsError(f"{path} must hold a JSON object", param="quant_config")
    return values


def wrong(path: Path | str, what: str) -> SettingsError:
    """Return the error of a configuration, or of a file of ranges, at ``path``."""
    return SettingsError(f"{path}: {what}", param="quant_config")
