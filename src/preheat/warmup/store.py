"""The store: files of a boot for later ones.

The later boots have the same fingerprint. ``--cache-dir`` has one folder for each fingerprint, with the last record and
the caches of compilers. Folders are independent and may be deleted at any time. Nothing is locked: records are written
atomically. Of two boots at the same time, the later one's record is kept.

A stored record is no proof. A boot takes three facts from it: how long items took, to announce the time, the items
that an earlier boot compiled and need not repeat, and on a host the most memory of a step. Digests and outcomes of
checks are always of this boot.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from preheat import __version__
from preheat.plan.cache_items import SwapItem
from preheat.plan.plan import Plan
from preheat.plan.repeat_items import CheckItem
from preheat.utils.files import TABLE_BYTES, open_file, read_file, why_unread, write_whole
from preheat.utils.versions import version_of
from preheat.warmup.record import DONE, ItemRecord, Record

logger = logging.getLogger(__name__)

RECORD = "record.json"
SAMPLES, SAMPLE_BYTES = 64, 4096
LONGEST_SECONDS = 86_400.0
"""An upper bound of an item's time: a longer one was not measured."""

HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""

GGUF = b"GGUF"
"""The beginning of a GGUF file, in place of the length of a header."""

LIBRARIES = ("torch", "triton", "numpy")
PROCESSOR = ("model name", "flags", "Features", "CPU implementer", "CPU part")


class Store:
    """The folder of one fingerprint in ``root``, made if need be.

    Without a root nothing is kept. A store never stops a boot: it logs a warning if something cannot be read or
    written.
    """

    def __init__(self, root: Path | None, fingerprint: str) -> None:
        self.fingerprint, self._root = fingerprint, root
        self.folder = root / fingerprint if root and _can_write(root / fingerprint) else None
        """The folder for the caches of compilers; None if nothing can be written."""

    @cached_property
    def last(self) -> Record | None:
        """The last record with this fingerprint, as it was at first access.

        None if there is none.
        """
        return last_record(self._root, self.fingerprint)

    def costs(self) -> dict[str, float]:
        """Return the measured seconds of items, by name.

        An earlier boot ran the items; their compiled code is in the folder.
        """
        entries = self.last.entries if self.last else []
        return {entry.name: entry.seconds for entry in entries if entry.outcome in DONE and _is_time(entry)}

    def save(self, record: Record) -> None:
        """Keep ``record`` for the next boot, replacing the last one."""
        if self.folder is None:
            return
        data = msgspec.structs.replace(record, fingerprint=self.fingerprint).to_json()
        try:
            write_whole(self.folder / RECORD, data)
        except OSError as error:
            logger.warning("The record cannot be kept for the next boot: %s", error)


def last_record(root: Path | None, fingerprint: str) -> Record | None:
    """Return the last record with ``fingerprint`` below ``root``, None if there is none that can be read."""
    if root is None:
        return None
    path = root / fingerprint / RECORD
    try:
        record = Record.from_json(read_file(path, most=TABLE_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        logger.warning("%s cannot be read and is ignored: %s", path, why_unread(error))
        return None
    if record.fingerprint != fingerprint:
        logger.warning("%s is the record of another boot (%r) and is ignored", path, record.fingerprint)
        return None
    return record


def fingerprint(parts: Mapping[str, object]) -> str:
    """Return 32 hexadecimal digits that depend on all of ``parts``.

    ``parts`` are plain data; the order of keys does not matter.
    """
    text = json.dumps(parts, sort_keys=True, allow_nan=False)
    return sha256(text.encode()).hexdigest()[:32]


class ModelPart(NamedTuple):
    """The model of a boot.

    ``weights`` are the checkpoint's files in ``folder``, none for dummy weights. ``overrides`` replace fields of the
    config. ``numerics`` are types and scales other than the model's own.
    """

    folder: Path
    weights: Sequence[Path]
    dtype: str
    overrides: Mapping[str, object] | None = None
    numerics: Mapping[str, object] | None = None


class DevicePart(NamedTuple):
    """The device of a boot: its platform, such as name and instruction set, torch's threads, and the mode."""

    platform: Iterable[str]
    threads: int
    mode: str


def boot_parts(
    model: ModelPart,
    device: DevicePart,
    plan: Plan,
    *,
    grammars: str | None = None,
    more: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, object]:
    """Return everything that a boot's caches depend on.

    ``grammars`` is the library that makes masks and its version. ``more`` are parts of features that are on.
    """
    config = [read_file(model.folder / "config.json")]
    if model.overrides:
        config.append(json.dumps(model.overrides, sort_keys=True).encode())
    masks = {} if grammars is None else {"grammars": grammars}
    return {
        **masks,
        "model": {"config": _digest(config), "files": [*map(file_part, model.weights)]},
        "dtype": model.dtype,
        "versions": versions(),
        "device": [*device.platform, processor()],
        "threads": device.threads,
        "mode": device.mode,
        "plan": plan_part(plan),
        **({"numerics": dict(model.numerics)} if model.numerics else {}),
        **more,
    }


def file_part(path: Path) -> list[object]:
    """Return name, size and digest of a weight file.

    The digest covers its safetensors header and spread samples; a GGUF file's header is in the config. Reads a few
    hundred KiB whatever the file's size, so a change of a single weight may go unseen, but not training.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = file.read(8)
        header = 0 if length.startswith(GGUF) else int.from_bytes(length, "little")
        parts = [length, file.read(min(header, HEADER_BYTES))]
        for sample in range(SAMPLES):
            file.seek(max(size - SAMPLE_BYTES, 0) * sample // (SAMPLES - 1))
            parts.append(file.read(SAMPLE_BYTES))
    return [path.name, size, _digest(parts)]


def plan_part(plan: Plan) -> dict[str, object]:
    """Return limits, options and the names of all items except checks and swaps.

    The number of blocks is left out, as it varies with the free memory. The swaps are left out because their sizes
    follow from it. Where the number matters otherwise, the items' names differ.
    """
    limits = asdict(plan.limits)
    del limits["num_blocks"]
    return {
        "items": [item.name for item in plan.items if not isinstance(item, CheckItem | SwapItem)],
        "options": asdict(plan.options),
        "limits": limits,
    }


def versions() -> dict[str, str | None]:
    """Return the versions of preheat, Python and the computing libraries.

    A version is None if the library is not installed. Nothing is imported.
    """
    return {
        "preheat": __version__,
        "python": platform.python_version(),
        **{name: version_of(name) for name in LIBRARIES},
    }


def processor() -> list[str]:
    """Return the host's processor and its instruction set, as the operating system names them."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return [platform.machine(), platform.processor()]
    lines = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    known = {name.strip(): value.strip() for name, value in lines}
    return [platform.machine(), *(known[name] for name in PROCESSOR if name in known)]


def _is_time(entry: ItemRecord) -> bool:
    """Return whether the times of ``entry`` can have been measured."""
    return 0 <= entry.compile_seconds < LONGEST_SECONDS and 0 <= entry.touch_seconds < LONGEST_SECONDS


def _digest(parts: Iterable[bytes]) -> str:
    found = sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it is read-only")
    except OSError as error:
        logger.warning("%s cannot be used, so the next boot starts from nothing (%s); set --cache-dir", folder, error)
        return False
    return True
