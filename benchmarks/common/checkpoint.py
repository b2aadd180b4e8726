"""A checkpoint of the right size, to time how fast one is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from preheat.model.families import read_spec
from preheat.model.formats import expected_tensors

SHARD_BYTES = 4 << 30
BLOCK = 1 << 25


def write_checkpoint(config: dict[str, Any], folder: Path) -> int:
    """Write safetensors shards for ``config``, in bfloat16, and return their bytes.

    The weights are meaningless: one block of small numbers, repeated.
    """
    shapes = expected_tensors(read_spec(config))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if filled > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += 2 * math.prod(shape)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    block = _block()
    for file, shard in zip(names, shards, strict=True):
        _write(folder / file, shard, block)
    places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return sum((folder / file).stat().st_size for file in names)


def _block() -> memoryview:
    """Return normal numbers of deviation 0.02, in bfloat16."""
    numbers = np.random.default_rng(0).standard_normal(BLOCK // 2, np.float32) * np.float32(0.02)
    return memoryview((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def _write(path: Path, shapes: dict[str, tuple[int, ...]], block: memoryview) -> None:
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(end // len(block)):
            file.write(block)
        file.write(block[: end % len(block)])
