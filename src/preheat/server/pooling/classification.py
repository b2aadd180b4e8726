"""POST /classify: the classes of texts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from preheat.server.http.body import read_request
from preheat.server.pooling.embeddings import PooledWriter, embedded_states
from preheat.server.pooling.embeddings_schema import Classification, ClassificationList, ClassifyRequest


async def classify(request: Request) -> ASGIApp:
    """Classify texts."""
    frontend, body = await read_request(request, ClassifyRequest)
    frontend.tasks.classes_of("Classification API")
    return _ClassWriter(request, body, await embedded_states(request, frontend, body, body.input))


class _ClassWriter(PooledWriter):
    prefix = "classify"

    def whole(self) -> ClassificationList:
        assert isinstance(self._body, ClassifyRequest)
        data = []
        for place, numbers in enumerate(self.numbers(self._body.activates)):
            label = self._pooling.classes[int(numbers.argmax())]
            data.append(Classification(place, label, numbers.tolist(), len(numbers)))
        return ClassificationList(**self._fields, data=data, usage=self.usage())
