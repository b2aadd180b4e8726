"""A backend whose layers are read on the host, and placed on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.layers import ExpertsWeights, LayerWeights
from preheat.ops.quantization import QuantizedWeight

Copy = Callable[[Tensor, Tensor], object]


class FromHost:
    """A ``backend`` for a loader that fills tensors on the host.

    Tensors in arguments are copied to the device by ``upload(source, out)``.
    """

    def __init__(self, backend: Backend, upload: Copy) -> None:
        self._backend, self._copy = backend, upload

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found):
            return found

        def call(*args: object, **more: object) -> object:
            return found(*map(self.place, args), **{key: self.place(value) for key, value in more.items()})

        return call

    def place(self, value: Any) -> Any:
        """Return a tensor, or a layer's tensors, on the device.

        Any other value stays as it is.
        """
        if isinstance(value, LayerWeights | ExpertsWeights):
            return type(value)(*map(self.place, value))
        if isinstance(value, QuantizedWeight):
            return replace(value, **{part.name: self.place(getattr(value, part.name)) for part in fields(value)})
        if not isinstance(value, Tensor) or value.device == self._backend.device:
            return value
        out = torch.empty_like(value, device=self._backend.device)
        self._copy(value, out)
        return out
