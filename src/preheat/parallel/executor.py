"""What the executors of all ranks have in common, the leader's and the others'."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from preheat.backends.base import Collective
from preheat.execution.executor import Executor
from preheat.plan.programs import AdaptedProgram, SamplerProgram


class SharedExecutor(Executor):
    """Rank 0 draws. Where the device goes on before the host knows the tokens, it gives the latest one of each slot to
    all of ``draws``, as a part of the sampling program. None: the host tells them with the next step.
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
