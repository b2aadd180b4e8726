"""The engine's one worker, in this process, for ``LLM.collective_rpc`` and ``LLM.apply_model``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from preheat.errors import InvalidRequest
from preheat.settings import Settings

if TYPE_CHECKING:
    import torch

    from preheat.engine.loop import Loop
    from preheat.model.decoder import Decoder

R = TypeVar("R")


class Worker:
    """The device, the model and the settings of an engine.

    Functions of ``collective_rpc`` get it as argument.
    """

    rank = local_rank = 0

    def __init__(self, settings: Settings, loop: Loop) -> None:
        self.settings, self._loop = settings, loop

    @property
    def device(self) -> torch.device:
        return self._loop.executor.backend.device

    def get_model(self) -> Decoder:
        """Return the decoder; its ``weights`` and ``spec`` are the model. It is for inspection only.

        The checks at boot covered the model as it was loaded; ``LLM.update_weights`` replaces weights.
        """
        return self._loop.executor.decoder

    def apply_model(self, func: Callable[[Decoder], R]) -> R:
        """Return the result of ``func`` with the model."""
        return func(self.get_model())

    def check_health(self) -> None:
        """Return: a worker that can be called, in the caller's process, is alive."""


METHODS = tuple(name for name in vars(Worker) if not name.startswith("_") and callable(vars(Worker)[name]))
"""The methods that can be called by name."""


def collective_rpc(
    worker: Worker, method: str | Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> list[Any]:
    """Call ``method`` of the worker, or a function with the worker. Raises InvalidRequest.

    No step runs meanwhile.
    """
    import torch

    settings = worker.settings
    if (ranks := settings.tensor_parallel_size * settings.pipeline_parallel_size) > 1:
        raise InvalidRequest(
            f"the engine has {ranks} ranks, and each is a process that runs no code of a caller: inspect a model with "
            "one rank, and change weights by update_weights",
            param="method",
        )
    if isinstance(method, str) and method not in METHODS:
        raise InvalidRequest(
            f"workers have no method {method!r}: they have {', '.join(METHODS)}, and a function is called with the "
            "worker; weights, sleep and the prefix cache are methods of LLM",
            param="method",
        )
    worker._loop.drain_steps()
    called = getattr(worker, method) if isinstance(method, str) else partial(method, worker)
    with torch.inference_mode():
        return [called(*args, **(kwargs or {}))]
