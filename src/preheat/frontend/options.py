"""The options of a frontend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preheat.frontend.adapters import Adapters
from preheat.frontend.answer_cache import AnswerCache
from preheat.frontend.answer_format import AnswerFormats
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.receipts import Receipts
from preheat.frontend.tracing import RequestTraces
from preheat.metrics import Metrics
from preheat.pooling.pooling import Pooling

if TYPE_CHECKING:
    from preheat.frontend.images import Images  # needs Pillow; models without images do without it


@dataclass(frozen=True, kw_only=True)
class FrontendOptions:
    """What a frontend serves, beside text in and text out.

    ``template`` and ``recommended`` (sampling defaults): the model's own unless given. ``max_queued``: most sequences
    that may wait for their first step. ``log_requests``: see :mod:`preheat.frontend.request_log`. ``formats``: how
    answers are read; by default, all text is content. ``max_logprobs``, ``seed`` and ``priorities``: see
    :class:`preheat.frontend.input_processor.InputProcessor`. ``images``: the reader of requests' images, if the model
    sees images. ``pooling``: how the engine makes embeddings; it then generates nothing. ``adapters``: the adapters
    that requests may name. ``embed_size``: the row length of prompts that are embeddings; None: such prompts are
    refused. ``traces``: the receiver of requests' spans. ``receipts``: how answers get receipts. ``answers``: the
    answer cache.
    """

    template: ChatTemplate | None = None
    recommended: Mapping[str, object] | None = None
    max_logprobs: int = 20
    max_queued: int | None = None
    metrics: Metrics | None = None
    seed: int | None = None
    log_requests: bool = False
    images: Images | None = None
    formats: AnswerFormats | None = None
    priorities: bool = False
    pooling: Pooling | None = None
    embed_size: int | None = None
    adapters: Adapters | None = None
    traces: RequestTraces | None = None
    receipts: Receipts | None = None
    answers: AnswerCache | None = None


USUAL = FrontendOptions()
