"""The tasks of an engine that pools: what an API may ask it for."""

from __future__ import annotations

from preheat.errors import InvalidRequest
from preheat.frontend.embedding import asked_of
from preheat.frontend.params_checker import ParamsChecker
from preheat.frontend.request_state import CheckedParams
from preheat.pooling.pooling import Pooling
from preheat.pooling.sentence_modules import PoolingType

MOST_KEPT = 64
"""Most parameters of texts to pool that are kept: clients choose where a text is cut."""


class PoolingTasks:
    """The tasks of an engine with this ``pooling``; None: it generates."""

    def __init__(self, pooling: Pooling | None, checker: ParamsChecker) -> None:
        self._pooling, self._checker = pooling, checker
        self._kept = dict[tuple[PoolingType, int | None, str | None], CheckedParams]()

    def check_generates(self, what: str) -> None:
        """Raise InvalidRequest if the engine makes embeddings; ``what`` is the API in the message."""
        if self._pooling is not None:
            raise InvalidRequest(f"The model does not support {what}: this engine makes embeddings (--runner pooling)")

    def pooling_of(self, what: str) -> Pooling:
        """Return how texts are pooled. Raises InvalidRequest, naming the API ``what``, if the engine generates."""
        if self._pooling is None:
            raise InvalidRequest(f"The model does not support {what}: start the engine with --runner pooling")
        return self._pooling

    def embedding_of(self, what: str) -> Pooling:
        """Return how embeddings are made. Raises InvalidRequest, naming the API ``what``, if the engine makes none."""
        found = self.pooling_of(what)
        if found.classes:
            raise InvalidRequest(f"The model does not support {what}: it classifies texts, see /classify and /score")
        if found.of_tokens:
            raise InvalidRequest(
                f"The model does not support {what}: each token has a vector, see /score, and /pooling with token_embed"
            )
        return found

    def pooling_for(self, task: str, what: str) -> Pooling:
        """Return how ``task`` pools texts. Raises InvalidRequest, naming the API ``what``, for an unknown one."""
        if task == "classify":
            return self.classes_of(what)
        if task == "token_embed":
            return self.pooling_of(what)
        if task != "embed":
            raise InvalidRequest(
                f"task is {task!r}, but only embed, token_embed and classify are served by {what}", param="task"
            )
        return self.embedding_of(what)

    def classes_of(self, what: str) -> Pooling:
        """Return how texts are classified. Raises InvalidRequest, naming the API ``what``, for another model."""
        if self._pooling is None or not self._pooling.classes:
            raise InvalidRequest(f"The model does not support {what}: it has no head for classes")
        return self._pooling

    def scoring_of(self, what: str) -> Pooling:
        """Return how pairs are scored. Raises InvalidRequest, naming the API ``what``, for several classes."""
        found = self.pooling_of(what)
        if len(found.classes) > 1:
            raise InvalidRequest(
                f"The model does not support {what}: it has {len(found.classes)} classes, and a score is the number of "
                "a single one; see /classify"
            )
        return found

    def asked_of(
        self, pooling: Pooling, truncate: int | None = None, side: str | None = None, *, of_tokens: bool = False
    ) -> CheckedParams:
        """Return the checked parameters of a text to pool; see :func:`preheat.frontend.embedding.asked_of`.

        They are made once, as most texts have the same. Raises InvalidRequest.
        """
        key = "ALL" if of_tokens else pooling.type, truncate, side
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            found = self._kept[key] = self._checker.checked(asked_of(*key))
        return found
