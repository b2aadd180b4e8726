"""Requests that a caller adds and steps: ``LLMEngine``, and ``AsyncLLM``'s thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from preheat.core import RequestOutputKind, SamplingParams
from preheat.errors import InvalidRequest, PreheatError
from preheat.frontend.adapters import LoRARequest
from preheat.frontend.embedding import PoolingParams, pooled_output
from preheat.frontend.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from preheat.frontend.request_state import RequestState
from preheat.library.inputs import Prompt
from preheat.library.offline import OfflineClient
from preheat.pooling.pooling import Pooling

Output = RequestOutput | PoolingRequestOutput[PoolingOutput]


class Report:
    """The outputs of a running request.

    ``take`` returns the next one when ``params`` make it due.
    """

    def __init__(self, state: RequestState, params: SamplingParams | PoolingParams, pooling: Pooling | None) -> None:
        self.state, self._params, self._pooling = state, params, pooling
        self._tokens_returned = 0  # tokens of the longest choice

    def take(self) -> Output | None:
        """Return an output if one is due, or if the request has ended.

        An output is due if there are enough new tokens.
        """
        state, params = self.state, self._params
        if isinstance(params, PoolingParams):
            done = state.finished and state.error is None and self._pooling is not None
            return pooled_output(state, self._pooling, params) if done and self._pooling else None
        if not (state.finished or self._due(params)):
            return None
        if params.output_kind is not RequestOutputKind.DELTA:
            return state.output()
        return state.output([state.news(choice) for choice in state.choices if not choice.sent_end])

    def _due(self, params: SamplingParams) -> bool:
        state = self.state
        tokens = max((len(choice.token_ids) for choice in state.choices), default=0)
        unknown = params.prompt_logprobs is not None and not state.prompt_logprobs
        early = self._tokens_returned and tokens - self._tokens_returned < (params.stream_interval or 1)
        if params.output_kind is RequestOutputKind.FINAL_ONLY or unknown or not tokens or early:
            return False
        self._tokens_returned = tokens
        return True


class StepEngine:
    """Engine that runs the requests added to a ``client``, a step at a time.

    A request is identified by its ``request_id``.
    """

    def __init__(self, client: OfflineClient) -> None:
        self._client = client
        self._reports: dict[str, Report] = {}

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Send a request, and return its id. Raises InvalidRequest if it cannot be served or its id is in use."""
        if request_id in self._reports:
            raise InvalidRequest(
                f"request_id {request_id!r} belongs to a running request: choose another", param="request_id"
            )
        if isinstance(params, PoolingParams):
            (state,) = self._client.prepared_to_pool([prompt], params, lora_request, tokenization_kwargs)
        else:
            params = params.clone()  # the caller may change it
            (state,) = self._client.prepared([prompt], params, priority, lora_request, tokenization=tokenization_kwargs)
        state.request_id, state.trace_headers = request_id, trace_headers or {}
        self._client.start([state])
        self._reports[request_id] = Report(state, params, self._client.frontend.pooling)
        return request_id

    def has_unfinished_requests(self) -> bool:
        """Return whether :meth:`step` has something to do."""
        return bool(self._reports)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._reports)

    def abort_request(self, request_ids: str | Iterable[str]) -> list[Output]:
        """End requests, and return their outputs so far.

        Ids of requests that have ended are left out.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        reports = [self._reports.pop(id) for id in ids if id in self._reports]
        for report in reports:
            self._client.frontend.abort(report.state)
        if not self._reports:
            self._client.finish()
        return [output for report in reports if (output := report.take()) is not None]

    def step(self) -> list[Output]:
        """Run a step, and return the outputs that are due.

        A failed request has ``finish_reason`` "error", and the message as ``stop_reason``.
        """
        return [_failed(id, each) if isinstance(each, PreheatError) else each for id, each in self.advance()]

    def advance(self) -> list[tuple[str, Output | PreheatError]]:
        """Run a step, and return the due output of each request, by its id."""
        if not self._reports:
            return []
        self._client.advance()
        due: list[tuple[str, Output | PreheatError]] = []
        for id, report in [*self._reports.items()]:
            outcome = report.state.error or report.take()
            if outcome is not None:
                due.append((id, outcome))
            if report.state.finished:
                del self._reports[id]
        if not self._reports:
            self._client.finish()
        return due


def _failed(request_id: str, error: PreheatError) -> RequestOutput:
    """Return the output of a request that failed."""
    choice = CompletionOutput(0, "", [], finish_reason="error", stop_reason=error.message)
    return RequestOutput(request_id, None, [], None, [choice], finished=True)
