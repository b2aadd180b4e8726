"""Files that a server reads for a client: large, hostile or at a limit.

There are images, adapters and weights.
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
import shutil
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import PIL.Image

from preheat.model.files import BUNDLED_PATH

WIDEST = 5792
"""Side of the largest square image that is decoded, with 2**25 pixels."""


# --- images ---


def data_url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@cache
def jpeg(scans: int, width: int = 4000, height: int = 3000) -> str:
    """Return a gray photograph that goes over all its pixels ``scans`` times."""
    file = io.BytesIO()
    PIL.Image.new("L", (width, height), 90).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    more = scans - data.count(b"\xff\xda")
    return data_url(data[:-2] + data[last:-2] * more + data[-2:], "jpeg")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@cache
def png(width: int, height: int, text: int = 0) -> str:
    """Return a black image of gray scale, with a comment that unpacks to ``text`` characters."""
    pack = zlib.compressobj(9)
    rows = b"".join(pack.compress(bytes(1 + width)) for _ in range(min(height, WIDEST)))
    said = _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(text), 9)) if text else b""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + head + said + _chunk(b"IDAT", rows + pack.flush()) + _chunk(b"IEND", b"")
    return data_url(data, "png")


def noise(size: int) -> str:
    """Return an image of noise with a URL of about ``size`` characters."""
    side = int((0.7 * size) ** 0.5)
    file = io.BytesIO()
    PIL.Image.frombytes("L", (side, side), random.Random(side).randbytes(side * side)).save(file, "PNG")
    return data_url(file.getvalue(), "png")


def seeing_model(folder: Path) -> str:
    """Write a model that sees, with no more weights than its files need."""
    from tests.llava import save_llava

    save_llava(folder)
    return str(folder)


# --- adapters ---

ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "v_proj", "o_proj"],
}
"""Config of an adapter that loads; :mod:`tests.adapters` writes its tensors."""

CATASTROPHIC = "((([a-z0-9_]+)+[.])+)+!"

CONFIGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "regex": {"target_modules": CATASTROPHIC},
    "patterns": {"rank_pattern": {f".*name{number}": 4 for number in range(2_000)}},
    "modules": {"target_modules": [f"module{number}" for number in range(200_000)]},
    "more_modules": {"target_modules": [f"module{number}" for number in range(1_000_000)]},
    "alpha": {"lora_alpha": 1e308},
    "digits": {"r": 10**4000},
    "layers": {"layers_to_transform": [*range(500_000)]},
}
"""Hostile fields of an adapter's config, by the adapter's name.

They replace fields of :data:`ADAPTER`.
"""


def adapters(folder: Path) -> None:
    """Write a folder for each of :data:`CONFIGS`, and folders with hostile files."""
    from tests.adapters import write_adapter

    folder.mkdir()
    write_adapter(folder / "good", 0)
    for name, fields in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text(_json(ADAPTER | fields))
        shutil.copy(folder / "good" / "adapter_model.safetensors", folder / name)
    _copied(folder / "whole", folder / "fifo", "adapter_config.json")
    os.mkfifo(folder / "fifo" / "adapter_config.json")
    _copied(folder / "whole", folder / "endless", "adapter_config.json")
    (folder / "endless" / "adapter_config.json").symlink_to("/dev/zero")
    _copied(folder / "whole", folder / "names", "adapter_model.safetensors")
    (folder / "names" / "adapter_model.safetensors").write_bytes(_many_names(280_000))
    _copied(folder / "whole", folder / "huge", "adapter_model.safetensors")
    _huge(folder / "good" / "adapter_model.safetensors", folder / "huge" / "adapter_model.safetensors")


def _json(fields: dict[str, Any]) -> str:
    """Return JSON with whole numbers of any length.

    ``json`` bounds the digits of a number.
    """
    long = {name: value for name, value in fields.items() if isinstance(value, int) and value > 10**100}
    text = json.dumps({name: value for name, value in fields.items() if name not in long})
    return text[:-1] + "".join(f', "{name}": 1{"0" * 4000}' for name in long) + "}"


def _copied(source: Path, target: Path, without: str) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(without))


def _many_names(count: int) -> bytes:
    """Return a file of ``count`` empty tensors, with a header of mostly names."""
    tensor = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    prefix = "base_model.model.model.layers"
    header = json.dumps({f"{prefix}.{number}.q_proj.lora_A.weight": tensor for number in range(count)}).encode()
    return len(header).to_bytes(8, "little") + header


def _huge(source: Path, target: Path) -> None:
    """Write the same tensors with finite numbers that overflow as soon as they are used."""
    from safetensors.torch import load_file, save_file

    save_file({name: each.fill_(3e38) for name, each in load_file(source).items()}, target)


# --- weights ---

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def weights(folder: Path, outside: Path) -> None:
    """Write folders of weights: the bundled model's, links that lead elsewhere, and files that never end."""
    shutil.copytree(BUNDLED_PATH, outside)
    for name in ("whole", "link", "fifo", "endless", "index", "index_long", "names", "cut"):
        (folder / name).mkdir(parents=True)
    shutil.copy(outside / WEIGHTS, folder / "whole")
    (folder / "link" / WEIGHTS).symlink_to(outside / WEIGHTS)
    os.mkfifo(folder / "fifo" / WEIGHTS)
    (folder / "endless" / INDEX).symlink_to("/dev/zero")
    for name, file, count in (("index", f"../../{outside.name}/{WEIGHTS}", 100), ("index_long", WEIGHTS, 100_000)):
        shutil.copy(outside / WEIGHTS, folder / name)
        named = {f"model.layers.{number}.mlp.up_proj.weight": file for number in range(count)}
        (folder / name / INDEX).write_text(json.dumps({"weight_map": named}))
    (folder / "names" / WEIGHTS).write_bytes(_many_names(50_000))
    (folder / "cut" / WEIGHTS).write_bytes((outside / WEIGHTS).read_bytes()[:-1000])
