"""What the executors of all ranks have in common, the leader's and the others'."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from preheat.backends.base import Collective
from preheat.execution.executor import Executor
from preheat.plan.programs import AdaptedProgram, SamplerProgram


class SharedExecutor(Executor):
    """Where the device samples, rank 0 draws, and gives all of ``draws`` its latest token of each slot: the next step
    may begin with them before the host knows them. None: the host samples, and tells the others.
    """

    def __init__(self, draws: Collective | None, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._draws = draws

    def _sample(self, program: SamplerProgram | AdaptedProgram) -> Tensor:
        logits = super()._sample(program)
        if self._draws is not None:
            last_token = self.sampler.last_token
            last_token.copy_(self._draws.gather(last_token)[0])
        return logits
