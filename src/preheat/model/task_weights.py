"""Weights of one task, from a checkpoint that stores each weight beside narrow matrices for its tasks.

Contract: weight[i, j] = stored[i, j] + factor * sum. The sum over r of B[i, r] * A[r, j] is taken in float32, in
ascending order of r, with a rounding for each product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from preheat.errors import ModelError
from preheat.model.specs import TaskSpec

STORED, NARROW = ".parametrizations.weight.original", ".parametrizations.weight.0.lora_"
"""Parts of names: of a weight, and of its matrices A and B."""


class TaskFile:
    """An open safetensors ``file``; its weights have ``task`` added.

    A table of embeddings has its rows in A, and another layer has them in B.
    """

    def __init__(self, file: Any, task: TaskSpec) -> None:
        self._file, self._task, self._names = file, task, set(file.keys())

    def keys(self) -> list[str]:
        return [
            f"{name.removesuffix(STORED)}.weight" if name.endswith(STORED) else name
            for name in sorted(self._names)
            if NARROW not in name
        ]

    def get_tensor(self, name: str) -> Tensor:
        if name in self._names:
            return cast(Tensor, self._file.get_tensor(name))
        part = self.get_slice(name)
        return cast(Tensor, part[:, :])

    def get_slice(self, name: str) -> Any:
        module = name.removesuffix(".weight")
        if name in self._names:
            return self._file.get_slice(name)
        stored = self._file.get_slice(module + STORED)
        tall, wide = self._matrices(module, tuple(stored.get_shape()))
        return _Sum(stored, tall, wide, self._task.factor)

    def _matrices(self, module: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the task's matrices [rows, rank] and [rank, columns]. Raises ModelError for other shapes."""
        names = [f"{module}{NARROW}{letter}" for letter in "BA"]
        if missing := [name for name in names if name not in self._names]:
            raise ModelError(f"tensor {missing[0]} is not in the file of {module}{STORED}: put them into one file")
        stacks = [self._file.get_slice(name) for name in names]
        sizes = [tuple(stack.get_shape()) for stack in stacks]
        if all(len(size) == 3 and size[0] > self._task.index for size in sizes):
            tall, wide = (stack[self._task.index].float() for stack in stacks)
            if tall.shape[0] != shape[0] or wide.shape[1] != shape[1]:
                tall, wide = wide, tall
            if (*tall.shape, *wide.shape) == (shape[0], tall.shape[1], tall.shape[1], shape[1]):
                return tall, wide
        raise ModelError(
            f"{names[0]} {list(sizes[0])} and {names[1]} {list(sizes[1])} do not fit a weight {list(shape)} and "
            f"task {self._task.index}"
        )


@dataclass(frozen=True)
class _Sum:
    """Parts of ``stored`` and ``factor`` times the product of ``tall`` and ``wide``, in float32."""

    stored: Any
    tall: Tensor
    wide: Tensor
    factor: float

    def get_shape(self) -> list[int]:
        return list(self.stored.get_shape())

    def __getitem__(self, part: Any) -> Tensor:
        rows, columns = part if isinstance(part, tuple) and len(part) == 2 else (*_only(part), slice(None))
        tall, wide = self.tall[rows], self.wide[:, columns]
        total = torch.zeros(len(tall), wide.shape[1])
        for index in range(len(wide)):
            total += tall[:, index, None] * wide[index]
        return cast(Tensor, self.stored[rows, columns].float() + total.mul_(self.factor))


def _only(part: Any) -> tuple[Any, ...]:
    return part if isinstance(part, tuple) else (part,)
