"""Tokens in the form of Text Embeddings Inference: /tokenize with ``inputs``, and /decode."""

from __future__ import annotations

from functools import partial

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from preheat.errors import InvalidRequest
from preheat.frontend.encoding import counted
from preheat.frontend.frontend import Frontend
from preheat.server.http.body import interpreted, peeked, read_request
from preheat.server.http.turns import in_turn
from preheat.server.openai.schema import MAX_PROMPTS
from preheat.server.operations import status
from preheat.server.pooling.tei import prompted
from preheat.server.pooling.tei_schema import DecodeRequest, TokenizeTextsRequest, TokenPiece


class _Named(Struct):
    """The field that tells TEI's body from vLLM's."""

    inputs: Raw | UnsetType = UNSET


async def tokenize(request: Request) -> ASGIApp:
    """Encode text to token ids, in vLLM's form, or texts in TEI's."""
    asked = await peeked(request, _Named)
    return await (status.tokenize if asked is None or asked.inputs is UNSET else _tokenize_texts)(request)


async def _tokenize_texts(request: Request) -> ASGIApp:
    """List the tokens of texts."""
    frontend, body = await read_request(request, TokenizeTextsRequest)
    given = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise InvalidRequest(f"inputs must hold 1 to {MAX_PROMPTS} texts, got {len(given)}", param="inputs")
    if body.prompt_name is not None:
        own = frontend.tasks.pooling_of("Tokenize API with prompt_name")
        given = [str(text) for text in prompted(own, given, body.prompt_name)]
    special = body.add_special_tokens is not False
    return await in_turn(request, sum(map(len, given)), partial(_listed, frontend, given, special))


def _listed(frontend: Frontend, texts: list[str], special: bool) -> Response:
    frontend.input.checker.check_text("inputs", "give prompts of token ids elsewhere")
    bound, found = counted(frontend.limits().max_model_len), []
    for text in texts:
        bound.encode(frontend.tokenizer, text, special)  # refuses a text that is far too long
        found.append([TokenPiece(*each) for each in frontend.tokenizer.pieces(text, special)])
    return Response(msgspec.json.encode(found), media_type="application/json")


async def decode(request: Request) -> ASGIApp:
    """Decode the token ids of texts."""
    frontend, body = await read_request(request, DecodeRequest)
    texts = [each for each in body.ids if isinstance(each, list)]
    plain = [each for each in body.ids if isinstance(each, int)]
    if texts and plain:
        raise InvalidRequest("ids must hold ids, or lists of ids, not both", param="ids")
    texts = texts or [plain]
    most, total = counted(frontend.limits().max_model_len).most, sum(map(len, texts))
    if total > most:
        raise InvalidRequest(f"ids has {total} ids, but at most {most} are decoded", param="ids")
    return await interpreted(request, partial(_texts, frontend, texts, body.skip_special_tokens is not False))


def _texts(frontend: Frontend, texts: list[list[int]], skip: bool) -> Response:
    for ids in texts:
        frontend.input.checker.check_vocabulary(ids, "ids")
    found = [frontend.tokenizer.decode(ids, skip_special_tokens=skip) for ids in texts]
    return Response(msgspec.json.encode(found), media_type="application/json")
