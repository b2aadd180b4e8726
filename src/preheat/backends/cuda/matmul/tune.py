"""``preheat tune`` on CUDA: measure the fastest kernel for each linear layer.

The table is kept for later boots.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from preheat.backends.base.backend import TuneRequest
from preheat.backends.cuda.device.hopper import is_hopper
from preheat.backends.cuda.matmul.config import (
    ExpertsConfig,
    ExpertsShape,
    KernelConfig,
    LinearShape,
    experts_shape_of,
    shape_of,
)
from preheat.backends.cuda.matmul.moe.tuner import tune_experts
from preheat.backends.cuda.matmul.tables import Entry, ExpertsEntry, Table, encode, merged, place, read
from preheat.backends.cuda.matmul.tuner import ROWS, tune
from preheat.errors import PreheatError, SettingsError
from preheat.ops.values import Finish
from preheat.utils.files import write_whole

logger = logging.getLogger(__name__)


def tune_layers(request: TuneRequest, device: torch.device) -> str:
    """Measure, write the table and return a summary, see :meth:`preheat.backends.base.backend.Backend.tune`."""
    name = torch.cuda.get_device_name(device)
    path = _path(request, name)
    layers = list(dict.fromkeys(shape_of(layer, hopper=is_hopper()) for layer in request.layers))
    shapes = ((experts_shape_of(value), value.gate_up.finish) for value in request.experts)
    kinds = dict.fromkeys(each for each in shapes if not each[0].splits)  # tables know experts that no ranks share
    share = request.seconds / (len(layers) + 1 + len(kinds))
    found, experts = _measure(request, layers, share), _measure_experts(request, kinds, share)
    if not found and not experts:
        raise PreheatError(f"--seconds {request.seconds:g} is too short for a single measurement: raise it")
    table = merged(read(path), Table(name, torch.cuda.get_device_capability(device), found, experts))
    _write(path, encode(table))
    measured, known = len(found) + len(experts), len(table.entries) + len(table.experts)
    return f"{path}: {measured} entries measured, {known} in all"


def _measure(request: TuneRequest, layers: Sequence[LinearShape], share: float) -> list[Entry]:
    """Return entries of ``layers`` and the head, up to the most rows of a step.

    Each of them has a ``share`` of the time, in seconds.
    """

    def report(shape: LinearShape, rows: int, times: dict[KernelConfig, float]) -> None:
        best = min(times, key=lambda config: times[config])
        logger.info("%d x %d, %d rows: %.1f us, %s", shape.outputs, shape.inputs, rows, times[best], best)

    rows = [size for size in ROWS if size <= request.max_rows]
    found = tune(layers, rows, share * len(layers), report)
    head_rows = [size for size in rows if size <= request.max_head_rows]
    return found + tune([shape_of(request.head)], head_rows, share, report)


def _measure_experts(
    request: TuneRequest, kinds: Iterable[tuple[ExpertsShape, Finish]], share: float
) -> list[ExpertsEntry]:
    """Return entries of each of ``kinds`` of experts up to the most tokens of a step.

    Each has a ``share`` of the time, in seconds.
    """

    def report(shape: ExpertsShape, tokens: int, config: ExpertsConfig, taken: float) -> None:
        logger.info("%s, %d tokens: %.1f us, %s", shape, tokens, taken, config)

    return [entry for shape, finish in kinds for entry in tune_experts(shape, request.max_rows, share, report, finish)]


def _path(request: TuneRequest, device: str) -> Path:
    if request.output is not None:
        path = Path(request.output).absolute()
        if not path.parent.is_dir():
            raise SettingsError(
                f"--output {request.output}: its folder does not exist; create it, or name another file"
            )
        return path
    if request.folder is None:
        raise SettingsError(
            "cache_dir is off, so there is no place for the table: give --output FILE", param="cache_dir"
        )
    return place(request.folder, device)


def _write(path: Path, text: bytes) -> None:
    """Write the whole file or none of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise PreheatError(f"cannot write {path}: {error.strerror}") from None
