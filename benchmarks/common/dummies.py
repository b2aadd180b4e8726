"""Dummy weights other than preheat's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from preheat.model.dummy_tensors import DummyTensors
from preheat.model.sources import SCALES

BOUND = 1e-3
SEED = 1234


def dummy_weights(name: str) -> Any:
    """Return a context in which models load dummy weights ``name`` of ``shapes.WEIGHTS``, in this process.

    Normal ones are preheat's: a router sends tokens to all experts with about equal chances. Narrow ones are those of
    vLLM's ``--load-format dummy``: each number of each tensor, norms and biases too, lies between -0.001 and 0.001.
    Inputs of a router are then small beside its bias, and all tokens choose the same few experts.
    """
    return nullcontext() if name == "normal" else _narrow()


@contextmanager
def _narrow() -> Iterator[None]:
    right = DummyTensors.fill

    def fill(self: DummyTensors, name: str, out: Tensor, piece: Any = None) -> None:
        whole = piece is None or piece.shape == tuple(out.shape)
        if whole and out.is_floating_point() and out.itemsize > 1 and not name.endswith(SCALES):
            out.uniform_(-BOUND, BOUND, generator=torch.Generator(out.device).manual_seed(SEED))
        else:
            right(self, name, out, piece)

    with mock.patch.object(DummyTensors, "fill", fill):
        yield
