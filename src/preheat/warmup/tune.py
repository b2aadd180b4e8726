"""``preheat tune``: measure, on this GPU, which kernel is fastest for each of a model's linear layers.

No weights are read. The table goes to the folder where boots look for it; neither boots nor requests measure.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from preheat.backends import pick_backend
from preheat.backends.cuda.tuning import Entry, KernelConfig, LinearShape, Table, encode, place, read
from preheat.errors import PreheatError, SettingsError
from preheat.model.config import resolve_dtype
from preheat.model.families import read_spec
from preheat.model.files import find_checkpoint, read_config
from preheat.model.specs import ModelSpec
from preheat.settings import Settings
from preheat.warmup.store import cache_root

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)


def tune_model(settings: Settings, output: str | None = None, seconds: float | None = None) -> str:
    """Measure the linear layers of ``settings.model`` and say where the table is: in ``output``, or where boots look.

    Ends after about ``seconds`` with what it has by then. Raises SettingsError without a GPU or a place for the table.
    """
    platform = pick_backend("cuda")
    platform.prepare(settings, cache_root(settings))
    device = torch.cuda.get_device_name(platform.device)
    path = _path(settings, output, device)
    spec = read_spec(read_config(find_checkpoint(settings.model, settings.revision, with_weights=False)))
    name, _ = resolve_dtype(settings.dtype, spec.dtype, platform.supports_bfloat16())
    layers, head = shapes(spec, getattr(torch, name))
    found = _measure(settings, layers, head, math.inf if seconds is None else seconds)
    if not found:
        raise PreheatError("no time for a single measurement: give more --seconds")
    table = merged(read(path), Table(device, torch.cuda.get_device_capability(platform.device), found))
    _write(path, encode(table))
    return f"{path}: {len(found)} entries measured, {len(table.entries)} in all"


def shapes(spec: ModelSpec, dtype: torch.dtype) -> tuple[list[LinearShape], LinearShape]:
    """The linear layers of a model, each shape once, and the output head."""
    *layers, head = (
        LinearShape(linear.outputs, linear.inputs, linear.gated, dtype, linear.bias) for _, linear in spec.linears()
    )
    return list(dict.fromkeys(layers)), head


def merged(before: Sequence[Table], new: Table) -> Table:
    """``new``, with the entries of the tables ``before`` for shapes that are not in it."""
    known = {entry.shape for entry in new.entries}
    kept = [entry for table in before for entry in table.entries if entry.shape not in known]
    return Table(new.device, new.capability, kept + new.entries)


def _measure(settings: Settings, layers: list[LinearShape], head: LinearShape, seconds: float) -> list[Entry]:
    """Entries up to the largest step that the settings allow. The head, a single layer, has its share of the time."""
    from preheat.backends.cuda.tuner import ROWS, tune

    def report(shape: LinearShape, rows: int, times: dict[KernelConfig, float]) -> None:
        best = min(times, key=lambda choice: times[choice])
        logger.info("%d x %d, %d rows: %.1f us, %s", shape.outputs, shape.inputs, rows, times[best], best)

    share = seconds / (len(layers) + 1)
    rows = [size for size in ROWS if size <= settings.max_num_batched_tokens]
    found = tune(layers, rows, share * len(layers), report)
    return found + tune([head], [size for size in rows if size <= settings.max_num_seqs], share, report)


def _path(settings: Settings, output: str | None, device: str) -> Path:
    if output is not None:
        path = Path(output).absolute()
        if not path.parent.is_dir():
            raise SettingsError(f"--output {output}: there is no such folder")
        return path
    root = cache_root(settings)
    if root is None:
        raise SettingsError(
            "cache_dir is off, so there is no place for the table: give --output FILE", param="cache_dir"
        )
    return place(root, device)


def _write(path: Path, text: bytes) -> None:
    """Write the whole file or none of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        raise PreheatError(f"cannot write {path}: {error.strerror}") from None
