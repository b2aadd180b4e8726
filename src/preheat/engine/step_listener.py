"""Observers of an engine's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from preheat.core import Swaps

if TYPE_CHECKING:
    from preheat.execution.input_batch import InputBatch


class StepListener(Protocol):
    """Observer of every launched batch and every compaction.

    A step can be cold at its launch. An error that the observer raises fails the step's requests.
    """

    def step(self, event: InputBatch | Swaps) -> None: ...

    def report(self) -> bytes:
        """Return the recorded data, for a Report."""


class SilentListener:
    """A listener that records nothing, for dummy requests."""

    def step(self, event: InputBatch | Swaps) -> None:
        """Do nothing."""

    def report(self) -> bytes:
        return b""
