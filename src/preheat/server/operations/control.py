"""Endpoints for the operator: pause, resume, sleep and new weights.

The endpoints exist only with ``--server-dev-mode``.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from preheat.configs.weight_transfer import TIMEOUT, TransferGroup, announced
from preheat.core import EngineState, Outcome
from preheat.errors import InvalidRequest, ModelError, SettingsError
from preheat.frontend.frontend import Frontend
from preheat.server.http.body import interpreted, read_command
from preheat.server.http.service import Service
from preheat.server.openai import answers
from preheat.server.openai.schema import FilePath, ForModel, Name, only
from preheat.server.operations.status import PATIENCE, switched
from preheat.settings import Settings
from preheat.utils.files import folder_below, shown


class UpdateInfo(Struct, forbid_unknown_fields=True):
    """Tensors that a trainer will broadcast, in order, one by one and not packed."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: Annotated[Any, only(False)] = None


class UpdateWeightsRequest(ForModel, kw_only=True):
    """POST /update_weights.

    ``path`` is a folder of safetensors files below ``--weights-root``. ``update_info`` describes the tensors that a
    trainer sends in the group of /init_weight_transfer_engine. A body has one of the two.
    """

    path: FilePath | None = None
    weight_version: Name | None = None
    update_info: UpdateInfo | None = None


class InitInfo(Struct, forbid_unknown_fields=True):
    """The address of the trainer (rank 0), and this engine's place in the group.

    This engine is rank ``rank_offset`` of ``world_size``. ``timeout`` bounds the wait for the trainer, and later for
    each tensor, in seconds.
    """

    master_address: Name
    master_port: int
    rank_offset: int
    world_size: int
    timeout: float = TIMEOUT


class InitWeightTransferRequest(ForModel, kw_only=True):
    """POST /init_weight_transfer_engine."""

    init_info: InitInfo


class StartWeightUpdateRequest(ForModel, kw_only=True):
    """POST /start_weight_update."""

    is_checkpoint_format: Annotated[Any, only(True)] = None


class FinishWeightUpdateRequest(ForModel, kw_only=True):
    """POST /finish_weight_update."""

    weight_version: Name | None = None


def check_settings(settings: Settings) -> None:
    """Raise SettingsError if anyone could act as the operator (no API key)."""
    if settings.server_dev_mode and not settings.api_key:
        raise SettingsError(
            "server_dev_mode lets every client pause the engine and replace its weights: give an api_key",
            param="server_dev_mode",
        )


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _frontend(request: Request) -> Frontend:
    """Return the frontend, also while the engine sleeps."""
    return _service(request).booted


async def _command(request: Request, name: str, **fields: Any) -> EngineState:
    """Have the engine carry out a command, and return its state. Raises the engine's error."""
    outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def done(told: Outcome) -> None:
        if not outcome.done():  # the client may have left
            outcome.set_result(told)

    _frontend(request).command(name, done, **fields)
    told = await outcome
    if told.error is not None:
        error = told.error.restore()
        raise InvalidRequest(error.message, param="path") if isinstance(error, ModelError) else error
    await _service(request).refresh(PATIENCE)  # the record also holds the digest
    return told.state


def _choice(request: Request, name: str, choices: tuple[str, ...]) -> str:
    """Return the query's value of ``name``, by default the first of ``choices``. Raises InvalidRequest for others."""
    found = request.query_params.get(name, choices[0])
    if found not in choices:
        raise InvalidRequest(f"{name} must be {', '.join(choices)}, not {found!r}", param=name)
    return found


def _halting(request: Request) -> str:
    """Return the mode of a pause; vLLM's older ``wait_for_inflight_requests`` is another name of wait."""
    mode = _choice(request, "mode", ("abort", "wait", "keep"))
    if not switched(request, "wait_for_inflight_requests"):
        return mode
    if mode != "wait" and "mode" in request.query_params:
        raise InvalidRequest(
            f"mode is {mode}, so wait_for_inflight_requests cannot be true: leave one out", param="mode"
        )
    return "wait"


def _json(body: Struct) -> Response:
    return Response(answers.encode(body), media_type="application/json")


async def drain(request: Request) -> Response:
    """Take no more requests; with the query's wait=1 answer when the running ones have ended."""
    wait, service = _choice(request, "wait", ("0", "1")), _service(request)
    _ = service.booted  # a server that starts has nothing to drain
    drained = service.drain()
    if wait == "1":
        await asyncio.shield(drained)
    return _json(answers.Status("drained" if wait == "1" else "draining"))


async def pause(request: Request) -> Response:
    """Run no step until /resume; the query's mode is abort, wait or keep. With clear_cache empty the prefix cache."""
    mode, clears = _halting(request), switched(request, "clear_cache")
    await _command(request, "pause", mode=mode)
    if clears:
        _frontend(request).reset_prefix_cache()
    return _json(answers.Status("paused"))


async def resume(request: Request) -> Response:
    """Run steps again."""
    await _command(request, "resume")
    return _json(answers.Status("resumed"))


async def is_paused(request: Request) -> Response:
    """Return whether steps are paused."""
    return _json(answers.Paused(_frontend(request).state.paused))


async def sleep(request: Request) -> Response:
    """Release memory until /wake_up, at the query's level and mode."""
    level = int(_choice(request, "level", ("1", "0", "2")))
    await _command(request, "sleep", level=level, mode=_choice(request, "mode", ("abort", "wait", "keep")))
    return _json(answers.Status("asleep"))


async def wake_up(request: Request) -> Response:
    """Take memory again: all of it, or only the query's tags (weights, kv_cache)."""
    state = await _command(request, "wake_up", tags=request.query_params.getlist("tags"))
    return _json(answers.Status("awake" if state.sleeping is None else "asleep"))


async def is_sleeping(request: Request) -> Response:
    """Return whether the engine sleeps."""
    return _json(answers.Sleeping(_frontend(request).state.sleeping is not None))


async def update_weights(request: Request) -> Response:
    """Replace weights in place, from a folder or from a trainer's broadcast."""
    body = await read_command(request, UpdateWeightsRequest)
    if (body.path is None) == (body.update_info is None):
        raise InvalidRequest(
            "give either path, a folder of files, or update_info, the tensors that a trainer sends", param="path"
        )
    fields: dict[str, Any] = {"version": body.weight_version or ""}
    if body.path is not None:
        root = _service(request).settings.weights_root
        fields["path"], fields["root"] = await asyncio.to_thread(allowed_paths, root, body.path)
    if body.update_info is not None:
        info = body.update_info
        fields["announced"] = await interpreted(request, partial(announced, info.names, info.dtype_names, info.shapes))
    return _weights(await _command(request, "update_weights", **fields))


async def init_weight_transfer_engine(request: Request) -> Response:
    """Join the group of a trainer; the trainer waits for this engine."""
    info = (await read_command(request, InitWeightTransferRequest)).init_info
    group = TransferGroup(*(getattr(info, name) for name in info.__struct_fields__))
    await _command(request, "init_weight_transfer_engine", group=group)
    return _json(answers.Status("joined"))


async def start_weight_update(request: Request) -> Response:
    """Collect a trainer's tensors until /finish_weight_update."""
    await read_command(request, StartWeightUpdateRequest)
    await _command(request, "start_weight_update")
    return _json(answers.Status("started"))


async def finish_weight_update(request: Request) -> Response:
    """Replace weights in place by the tensors sent since /start_weight_update."""
    body = await read_command(request, FinishWeightUpdateRequest)
    return _weights(await _command(request, "finish_weight_update", version=body.weight_version or ""))


async def get_world_size(request: Request) -> Response:
    """Return the number of ranks that this engine has in a trainer's group.

    The query's include_dp changes nothing, as an operator's engine has no replicas.
    """
    switched(request, "include_dp")
    settings = _service(request).settings
    return _json(answers.WorldSize(settings.tensor_parallel_size * settings.pipeline_parallel_size))


async def weight_info(request: Request) -> Response:
    """Return the weights' version, and the digest of the check's logits."""
    return _weights(_frontend(request).state)


def _weights(state: EngineState) -> Response:
    return _json(answers.WeightInfo(state.weight_version, state.digest))


def allowed_paths(root: str | None, path: str) -> tuple[str, str]:
    """Return ``path`` and ``root`` with links resolved.

    Raises InvalidRequest unless ``path`` is a folder below ``root``.
    """
    if root is None:
        raise InvalidRequest(
            "path needs a server that was started with --weights-root, the folder for new weights",
            param="path",
        )
    try:
        top, folder = folder_below(root, path)
    except OSError as error:
        raise InvalidRequest(f"{shown(path)} cannot be read (--weights-root): {error.strerror}", param="path") from None
    return str(folder), str(top)
