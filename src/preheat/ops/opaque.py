"""Operations that a compiler calls without looking inside.

So compiled code has the bits of eager code. A compiler that sees inside may fuse, reorder a sum, or keep more digits
than a dtype has; each of these changes bits. Outside of compiled code a decorated function is called as it is.

Only a compiler needs the operations, and torch takes milliseconds to register one. So a backend that compiles calls
:func:`register_operations` before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "preheat"


_unregistered: list[Callable[[], None]] = []


def register_operations() -> None:
    """Register the operations of all modules imported so far in torch's library."""
    while _unregistered:
        _unregistered.pop()()


def opaque(schema: str, like: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function an operation of its name, for compilers.

    ``schema`` such as "(Tensor(a!) x) -> ()" must mark each argument changed in place. The results are new tensors.
    ``like`` takes the same arguments and returns an uninitialized result of the same shape.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__.lstrip("_")

        def register() -> None:
            torch.library.define(f"{NAMESPACE}::{name}", schema)
            torch.library.impl(f"{NAMESPACE}::{name}", "default", function)
            torch.library.register_fake(f"{NAMESPACE}::{name}", like)

        _unregistered.append(register)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch.compiler.is_compiling():
                return function(*args, **kwargs)
            operation: Callable[P, R] = getattr(getattr(torch.ops, NAMESPACE), name).default
            return operation(*args, **kwargs)

        return call

    return wrap
