"""The launch traces of all kinds of layers: ``python -m tools.oracles.launches --write FILE | --against FILE``.

A cell is a kind of layer of the CUDA backend and a number of rows: plain, codes of four and eight bits, float8, split
inputs, experts, each with and without adapters. It holds the launches and allocations of a call, in order: each kernel
with its grid, warps, stages, programmatic dependent launch, constants and types, each operation of torch that makes or
changes a tensor, and each exchange between ranks. No kernel runs, and no GPU is needed.

A renamed kernel or constant is a difference. ``--renamed`` compares without names: grids, warps, stages, overlap,
allocations and exchanges, in order.
"""

from __future__ import annotations

import re

import torch
import triton

from tools.oracles import files
from tools.oracles.card import card
from tools.oracles.layers import Card, traces


def found(only: str) -> dict[str, list[str]]:
    with card():
        seen = traces(Card(), lambda name: re.search(only, name) is not None)
        return {name: each.texts for name, each in seen}


def _bare(text: str) -> str:
    """Return a launch without the names of kernel, constants and arguments; a grid (n, 1) becomes (n,)."""
    launch = re.match(r"\w+ (\(.*?\) warps=\d+ stages=\d+(?: pdl)?(?: maxnreg=\d+)?(?: unfused)?)", text)
    return re.sub(r"(?:, 1)+\)|,\)", ")", launch[1], count=1) if launch else text


def main() -> int:
    parser = files.parser(__doc__)
    parser.add_argument("--renamed", action="store_true", help="compare without the names of kernels and constants")
    args = parser.parse_args()
    of = {"torch": torch.__version__.partition("+")[0], "triton": triton.__version__}
    change = (lambda cell: [_bare(text) for text in cell]) if args.renamed else None
    return files.finish(args, of, lambda: found(args.only), change)


if __name__ == "__main__":
    files.end(main())
