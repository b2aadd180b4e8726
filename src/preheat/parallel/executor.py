"""The common part of the leader's and the other ranks' executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from preheat.backends.base.attention import StepInputs
from preheat.backends.base.collective import Collective
from preheat.execution.executor import Executor
from preheat.model.decoder import Attended, Tap
from preheat.parallel.groups import Pipe
from preheat.plan.buckets import Bucket
from preheat.plan.programs import Program


class SharedExecutor(Executor):
    """An executor of one of several ranks.

    The ranks share layers, or are stages of a pipeline. Rank 0 draws. Where the device goes on before the host knows
    the tokens, ``draws`` gives each slot's latest token to all ranks, as a part of the sampling program. Without
    ``draws`` the host sends the tokens with the next step.

    With a ``pipe`` it is the executor of a stage. Its input is the output of the stage before, and its output the input
    of the next stage. The output has the norm of the residual stream, and the stream, for all tokens.
    """

    goes_on = False  # ranks exchange during a step

    def __init__(self, draws: Collective | None, pipe: Pipe | None, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._draws, self._pipe = draws, pipe
        if pipe is not None:  # every run has each stage's first and last layer, so no stage waits in vain
            self._kinds = list(self._layers)

    def _forward(self, bucket: Bucket, layers: Sequence[int], tap: Tap | None = None) -> Attended:
        attended = super()._forward(bucket, layers, tap)
        if self._hands_on and layers[-1] == self._layers[-1]:
            assert self._pipe is not None
            self._pipe.send(self.decoder.finish(attended, eager=tap is not None), attended.residual)
        return attended

    def _begin(self, inputs: StepInputs, residual: Tensor) -> Tensor | None:
        if self._pipe is None or self._pipe.before is None:
            return super()._begin(inputs, residual)
        normed = self._normed[: len(residual)]
        self._pipe.receive(normed, residual)
        return normed

    def _head(self, program: Program[int]) -> Tensor:
        logits = self._logits[: program.size] if self._hands_on else super()._head(program)
        return logits if self._pipe is None else self._pipe.logits(logits)

    def _hidden(self, size: int, tap: Tap | None = None, *, adapted: bool = False) -> Tensor:
        if not self._hands_on:
            return super()._hidden(size, tap, adapted=adapted)
        residual = self.backend.take_rows(self._states.residual, self.buffers.sampled[:size])
        if tap is not None:  # the stage's last layer has run for all tokens
            tap(self._layers[-1], residual)
        return residual

    @property
    def _hands_on(self) -> bool:
        """Whether another stage follows."""
        return self._pipe is not None and self._pipe.after is not None

    def _sample(self, program: Program[int]) -> Tensor:
        logits = super()._sample(program)
        if self._draws is not None:
            last_token = self.sampler.last_token
            last_token.copy_(self._draws.gather(last_token)[0])
        return logits
