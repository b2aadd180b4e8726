"""The kernel of each layer: ``python -m tools.oracles.selection --write FILE | --against FILE``.

A cell is a shape of the shipped tables, or an unknown one. It holds the choices of the tables and the rule at each
number of rows from 1 to 8,192, as ranges of rows. There are cells for layers without adapters, and for layers with
adapters in steps in which rows have adapters. No GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch

from preheat.backends.cuda.device.card import HOPPER
from preheat.backends.cuda.matmul.config import (
    ExpertsShape,
    LinearShape,
    experts_reference,
    may_be_shuffled,
    reference,
)
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.tables import tables_for
from tools.oracles import files
from tools.oracles.card import CAPABILITY, NAME, card
from tools.oracles.layers import SCHEMES

ROWS = (*range(1, 258), *range(264, 1025, 8), *range(1088, 8193, 64))
SIZES = ((6144, 4096, False), (28672, 4096, True), (4096, 14336, False), (1000, 1112, False), (320, 640, True))
"""Outputs, inputs, gated: of Llama 3.1 8B, and odd ones that no table knows."""

EXPERTS = ((128, 2048, 768, 8), (8, 4096, 14336, 2), (60, 2048, 1408, 4))
DTYPES = (torch.bfloat16, torch.float32)


def ranges(choose: Callable[[int], Any]) -> str:
    """Return the choices, each with the number of rows from which it counts."""
    chosen = ((rows, _short(choose(rows))) for rows in ROWS)
    return "; ".join(f"{next(group)[0]} {text}" for text, group in groupby(chosen, key=lambda each: each[1]))


def _short(choice: Any) -> str:
    """Return a choice as text.

    A tile is its class and fields; a list is all its choices.
    """
    if isinstance(choice, list):
        return " + ".join(map(_short, choice))
    if hasattr(choice, "_fields"):
        return " ".join(_short(each) for each in choice)
    if hasattr(choice, "__struct_fields__"):
        return (
            type(choice).__name__ + "(" + ",".join(_short(getattr(choice, f)) for f in choice.__struct_fields__) + ")"
        )
    return str(int(choice)) if isinstance(choice, bool) else str(choice)


def shapes() -> Iterator[LinearShape]:
    """Yield the shapes of the tables, then others."""
    for table in tables_for(NAME, CAPABILITY, None):
        yield from dict.fromkeys(entry.shape for entry in table.entries)
    for scheme in SCHEMES.values():
        for outputs, inputs, gated in SIZES:
            for dtype in DTYPES:
                shuffled = scheme is not None and may_be_shuffled(scheme, outputs, inputs, dtype)
                for each in {False, shuffled}:
                    yield LinearShape(outputs, inputs, gated, dtype, scheme=scheme, shuffled=each)


def found(only: str) -> dict[str, str]:
    tables = tables_for(NAME, CAPABILITY, None)
    cells: dict[str, Callable[[], str]] = {}
    for shape in dict.fromkeys(shapes()):
        name = _named("layer", shape.outputs, shape.inputs, shape)
        for invariant in (True, False):
            configs = KernelConfigs(tables, invariant=invariant, card=HOPPER)
            kind = name if invariant else f"{name}, not invariant"
            cells[kind] = lambda c=configs, s=shape: ranges(lambda rows: c(s, rows))
        configs = KernelConfigs(tables, card=HOPPER)
        cells[f"{name}, adapted"] = lambda c=configs, s=shape: ranges(
            lambda rows: [c.own(s, rows), *filter(None, [c.wide(s, rows)])])  # fmt: skip
        cells[f"{name}, elsewhere"] = lambda s=shape: ranges(lambda rows: KernelConfigs()(s, rows))
        cells[f"{name}, reference"] = lambda s=shape: _short(reference(s))
        if not shape.gated and shape.inputs % 4 == 0:
            for k_splits in (1, 2, 4):
                of = LinearShape(shape.outputs, shape.inputs, dtype=shape.dtype, scheme=shape.scheme, splits=k_splits)
                cells[f"{name}, {k_splits} splits"] = lambda c=configs, s=of: ranges(lambda rows: c(s, rows))
                cells[f"{name}, {k_splits} splits, reference"] = lambda s=of: _short(reference(s))
    for scheme in SCHEMES.values():
        for dtype in DTYPES:
            for sizes in EXPERTS:
                shape = ExpertsShape(*sizes, dtype, scheme)
                name = _named("experts", *sizes, shape)
                configs = KernelConfigs(tables, card=HOPPER)
                cells[name] = lambda c=configs, s=shape: ranges(lambda tokens: c.experts(s, tokens))
                cells[f"{name}, reference"] = lambda s=shape: _short(experts_reference(s))
    with card():
        return {name: cells[name]() for name in files.chosen(list(cells), only)}


def _named(kind: str, *sizes: Any) -> str:
    *numbers, shape = sizes
    dtype = str(shape.dtype).removeprefix("torch.")
    named = {"gated": "gated", "shuffled": "dealt", "bf16_scales": "narrow"}  # as stored cells have it
    more = [name for field, name in named.items() if getattr(shape, field, False)]
    scheme = shape.scheme.name if shape.scheme else "plain"
    return ", ".join([f"{kind} {' x '.join(map(str, numbers))}", dtype, scheme, *more])


def main() -> int:
    args = files.parser(__doc__).parse_args()
    return files.finish(args, {}, lambda: found(args.only))


if __name__ == "__main__":
    files.end(main())
