"""Endpoints about the server, its model and its tokenizer."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from msgspec import Struct
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

import preheat
from preheat.core import Outcome, Progress
from preheat.errors import InvalidRequest, ModelNotFound
from preheat.frontend.encoding import counted
from preheat.frontend.frontend import Frontend
from preheat.server.http.body import interpreted, read_request
from preheat.server.http.errors import RETRY
from preheat.server.http.service import Service
from preheat.server.http.turns import in_turn
from preheat.server.openai import answers
from preheat.server.openai.answers import encode
from preheat.server.openai.conversation import Conversation, plain_messages, rendered
from preheat.server.openai.schema import DetokenizeRequest, TokenizeRequest
from preheat.warmup.page import render as record_page
from preheat.warmup.page import render_progress

PATIENCE = 1.0
"""Seconds that a client waits for news from a busy engine."""


_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_ONLY_CHAT = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools", "chat_template")


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _json(body: Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, "application/json")


def _starting(progress: Progress) -> answers.Starting:
    return answers.Starting(progress.done, progress.total, progress.current, progress.eta_s)


async def health(request: Request) -> Response:
    """Return whether requests may be sent here; a sleeping engine is healthy."""
    service = _service(request)
    if progress := service.progress:
        return _json(_starting(progress), 503, RETRY)
    service.check_health()
    if _deep(request):
        await _audited(service)
    return _json(answers.Status("ok"))


def _deep(request: Request) -> bool:
    """Return whether the query asks for a pass of the audit. Raises InvalidRequest for another value than 0 or 1."""
    asked = request.query_params.get("deep", "0")
    if asked not in ("0", "1"):
        raise InvalidRequest(f"deep must be 0 or 1, not {asked!r}", param="deep")
    return asked == "1"


def switched(request: Request, name: str) -> bool:
    """Return whether the query says that ``name`` is true. Raises InvalidRequest for a value that is no truth value."""
    asked = request.query_params.get(name, "false")
    if asked.lower() not in _TRUTH:
        raise InvalidRequest(f"{name} must be true or false, not {asked!r}", param=name)
    return _TRUTH[asked.lower()]


async def _audited(service: Service) -> None:
    """Wait for a pass of the audit. Raises InvalidRequest without one, and EngineDead for a fault."""
    outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def done(told: Outcome) -> None:
        if not outcome.done():  # the client may have left
            outcome.set_result(told)

    service.booted.command("audit", done)
    while not outcome.done():  # a dead engine answers nothing
        await asyncio.wait([outcome], timeout=PATIENCE)
        service.check_health()
    if (error := outcome.result().error) is not None:
        raise error.restore()


async def live(_: Request) -> Response:
    """Return whether the process answers, in any state of the engine."""
    return _json(answers.Status("ok"))


async def ping(request: Request) -> Response:
    """Answer as /health does, for SageMaker."""
    return await health(request)


async def load(request: Request) -> Response:
    """Return the number of requests for completions that are being answered."""
    return _json(answers.ServerLoad(_service(request).load))


async def ready(request: Request) -> Response:
    """Return whether requests are taken."""
    service = _service(request)
    if progress := service.progress:
        return _json(_starting(progress), 503, RETRY)
    if (level := service.booted.state.sleeping) is not None:
        return _json(answers.Asleep(level), 503, RETRY)
    service.check_ready()
    await service.refresh(0)  # does not wait, so its cold events may be as old as the last call
    contract = service.frontend.contract
    body = answers.ReadyStatus(
        **service.live.summary(), contract=contract, contract_id=contract.id, engines=service.engines()
    )
    return _json(body)


async def warmup(request: Request) -> Response:
    """Return the warm-up's outcome or progress, as JSON or as a page."""
    service = _service(request)
    as_page, engine = wants_page(request), _engine(request, service.settings.data_parallel_size)
    headers = {"vary": "accept", "cache-control": "no-cache"}
    if progress := service.progress:
        if as_page:
            return Response(render_progress(progress, service.names[0]), 200, headers, "text/html")
        return _json(answers.WarmingUp(_starting(progress)), 200, headers)
    if service.max_model_len is None:
        _ = service.frontend  # raises the reason why there never will be a record
    await service.refresh(PATIENCE)
    headers["age"] = str(int(service.live.age))
    if as_page:
        page = await asyncio.to_thread(record_page, service.live.record(engine or 0))
        return Response(page, 200, headers, "text/html")
    records, asked = service.live.json, 0 if service.settings.data_parallel_size == 1 else engine
    body = b'{"engines":[%b]}' % b",".join(records) if asked is None else records[asked]
    return Response(body, 200, headers, "application/json")


def _engine(request: Request, engines: int) -> int | None:
    """Return the engine's number in the query, or None. Raises InvalidRequest for an unknown engine."""
    asked = request.query_params.getlist("engine")
    if not asked:
        return None
    if asked[1:] or asked[0] not in map(str, range(engines)):
        raise InvalidRequest(f"engine must be a number from 0 to {engines - 1}, not {', '.join(asked)}", param="engine")
    return int(asked[0])


def wants_page(request: Request) -> bool:
    """Return whether the request asks for a page. Raises InvalidRequest for an unknown format."""
    asked = request.query_params.getlist("format")
    if not asked:
        return "text/html" in request.headers.get("accept", "")
    if asked not in (["json"], ["html"]):
        raise InvalidRequest(f"format must be json or html, not {', '.join(asked)}", param="format")
    return asked == ["html"]


async def version(_: Request) -> Response:
    """Return the version of preheat."""
    return _json(answers.Version(preheat.__version__))


async def metrics(request: Request) -> Response:
    """Return counters and times, for Prometheus."""
    service = _service(request)
    await service.refresh(PATIENCE)
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _models(service: Service) -> list[answers.ModelCard]:
    card = partial(answers.ModelCard, created=service.created, max_model_len=service.max_model_len)
    base, root = service.names[0], service.settings.model
    return [
        *(card(name, root=root) for name in service.names),
        *(card(each.name, root=each.path, parent=each.base_model_name or base) for each in service.adapters),
    ]


async def models(request: Request) -> Response:
    """List the names of the model, and its adapters."""
    return _json(answers.ModelList(_models(_service(request))))


async def model(request: Request) -> Response:
    """Return the model of this name."""
    name = request.path_params["model"]
    found = next((model for model in _models(_service(request)) if model.id == name), None)
    if found is None:
        raise ModelNotFound(f"The model {name!r} is not served here", param="model")
    return _json(found)


async def tokenize(request: Request) -> Response:
    """Encode text to token ids."""
    frontend, body = await read_request(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages", param="prompt")
    if body.messages is None:
        if only_chat := next((name for name in _ONLY_CHAT if getattr(body, name) is not None), None):
            raise InvalidRequest(f"{only_chat} needs messages", param=only_chat)
        text, special = body.prompt or "", body.add_special_tokens is not False
    else:
        messages = await interpreted(request, partial(plain_messages, body.messages))
        talk = Conversation(
            messages, body.tools, body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message is True, template=body.chat_template,
        )  # fmt: skip
        (text, images), special = await rendered(request, frontend, talk), body.add_special_tokens is True
        if images:
            raise InvalidRequest("Images are not tokenized: leave out the parts of type image_url", param="messages")
    return await in_turn(request, len(text), partial(_tokens, frontend, text, special, bool(body.return_token_strs)))


def _tokens(frontend: Frontend, text: str, special: bool, with_strings: bool) -> Response:
    ids = frontend.input.encode_to_count(text, special)
    strings = [frontend.tokenizer.token_name(id) for id in ids] if with_strings else None
    return _json(answers.Tokens(len(ids), frontend.limits().max_model_len, ids, strings))


async def detokenize(request: Request) -> Response:
    """Decode token ids to text."""
    frontend, body = await read_request(request, DetokenizeRequest)
    most = counted(frontend.limits().max_model_len).most
    if len(body.tokens) > most:
        raise InvalidRequest(f"tokens has {len(body.tokens)} ids, but at most {most} are decoded", param="tokens")
    return await interpreted(request, partial(_text, frontend, body.tokens))


def _text(frontend: Frontend, ids: list[int]) -> Response:
    frontend.input.checker.check_vocabulary(ids, "tokens")
    return _json(answers.Text(frontend.tokenizer.decode(ids, skip_special_tokens=False)))


async def tokenizer_info(request: Request) -> Response:
    """Return the tokenizer's configuration."""
    frontend = _service(request).frontend
    if not frontend.tokenizer.speaks:
        raise InvalidRequest("This endpoint needs a tokenizer, and there is none (skip_tokenizer_init)")
    info = {"tokenizer_class": "PreTrainedTokenizerFast"} | _plain(frontend.tokenizer.config)
    if (template := frontend.template.source) is not None:
        info["chat_template"] = template
    return Response(encode(info), media_type="application/json")


def _plain(value: Any) -> Any:
    """Return ``value`` from tokenizer_config.json in plain form, as in vLLM.

    Tokens become text, and file names are dropped.
    """
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "content" in value:
        return value["content"]
    return {name: _plain(item) for name, item in value.items() if name not in {"vocab_file", "merges_file"}}


async def reset_prefix_cache(request: Request) -> Response:
    """Empty the prefix cache, of the device and of the host, also while requests run.

    The query's reset_running_requests and reset_external ask for no more, so they may be true or false.
    """
    for name in ("reset_running_requests", "reset_external"):
        switched(request, name)
    if _service(request).settings.pods:
        raise InvalidRequest("A front has no prefix cache: ask its pods")
    _service(request).frontend.reset_prefix_cache()
    return Response(media_type="text/plain")
