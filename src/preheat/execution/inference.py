"""Torch's inference mode, entered once for all steps of an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` in inference mode, and enter the mode only if the caller has not.

    Torch's own decorator enters it at every call, for several microseconds.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run
