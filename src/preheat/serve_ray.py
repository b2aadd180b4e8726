"""Ray Serve: replicas that are hot, and bit-equal, before their first request.

``serve run preheat.serve_ray:app model=Qwen/Qwen3-0.6B device=cuda`` builds the application; docs/ray.md says more. A
replica is a server without its port: Ray's proxies pass requests on to the same ASGI application. No torch here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

import preheat
from preheat.backends.registry import facts_of
from preheat.cli.serve import FRONT_RESTARTS, served
from preheat.core import FromEngine, Ready
from preheat.errors import EngineDead, NotReady, PreheatError, SettingsError, WireError
from preheat.server.app import build_app
from preheat.server.http.frontend_warmup import warm_up_server
from preheat.server.http.running import RunningRequests
from preheat.server.http.service import Service
from preheat.server.openai.generate import hello_of, read_sent, relay_state, relayed
from preheat.server.operations import control
from preheat.server.replicas.member import Process
from preheat.server.replicas.pod import Pod, RefusedCall
from preheat.server.replicas.replicas import Replicas
from preheat.server.replicas.supervisor import Supervisor
from preheat.settings import OPTIONS, Settings
from preheat.settings.paths import check_paths
from preheat.utils.gc import collect_seldom

DEPLOYMENT, INGRESS = "preheat", "preheat-ingress"
_TAKEN, _REFUSED = b"\x00", b"\x01"
LISTENING = (
    "host", "port", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "max_header_bytes", "timeout_headers",
    "timeout_keep_alive",
)  # fmt: skip
"""Options of a port, not usable here since Ray's proxies open the port."""

_HEALTH_SECONDS = 2.0  # between checks; Ray replaces a replica after three failures
_LEAVE_SECONDS = 10.0  # for the engine to end, after the last request


def app(args: Mapping[str, Any]) -> serve.Application:
    """Build the application of ``args``. Raises SettingsError.

    ``args`` has the settings of ``preheat serve`` by name, as values or as text, and under ``deployment`` options of
    Ray Serve's deployment. Other settings come from the caller's environment, as in ``preheat serve``.
    """
    settings, options = _asked(args)
    replicas = serve.deployment(Replica).options(name=DEPLOYMENT, **options)
    return replicas.bind(settings, serve.deployment(Digests).options(ray_actor_options={"num_cpus": 0}).bind())


def _asked(args: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Return the settings of the engines, and the options of their deployment. Raises SettingsError."""
    given = {name: value for name, value in args.items() if name != "deployment"}
    settings = served(Settings.load(given))
    control.check_settings(settings)
    if listening := [name for name in LISTENING if getattr(settings, name) != OPTIONS[name].default]:
        raise SettingsError(
            f"{listening[0]} configures a port, and Ray Serve opens the port: use Ray Serve's http_options instead"
        )
    if settings.device == "auto":
        raise SettingsError(
            "device: Ray reserves a device for each replica and must know its kind: set cpu or cuda", param="device"
        )
    if settings.boot_check == "off":
        raise SettingsError("replicas are compared by the digest of the check at boot: leave boot_check on")
    if settings.skip_warmup:
        raise SettingsError("a replica is ready when it is warm: drop skip_warmup", param="skip_warmup")
    if settings.data_parallel_size > 1:
        raise SettingsError(
            "data_parallel_size: Ray Serve runs the replicas: say how many in deployment", param="data_parallel_size"
        )
    if settings.distributed_executor_backend == "ray":
        raise SettingsError(
            "distributed_executor_backend: a replica runs its ranks on the resources that it has reserved: leave it "
            "out",
            param="distributed_executor_backend",
        )
    if settings.engine_restarts not in (0, OPTIONS["engine_restarts"].default):
        raise SettingsError(
            "engine_restarts: Ray Serve replaces a replica with a dead engine: leave it out", param="engine_restarts"
        )
    settings = dataclasses.replace(settings, engine_restarts=0)
    options = deployment_options(settings) | dict(args.get("deployment") or {})
    if "num_replicas" in options:
        options.pop("autoscaling_config")
    return settings, options


def front(args: Mapping[str, Any]) -> serve.Application:
    """Build the application of ``args`` with an ingress that moves requests. Raises SettingsError.

    ``args`` are those of :func:`app`; ``deployment`` has options of the engines' deployment, and ``ingress`` those of
    the ingress.
    """
    ingress = dict(args.get("ingress") or {})
    settings, options = _asked({name: value for name, value in args.items() if name != "ingress"})
    engines = serve.deployment(Engine).options(name=DEPLOYMENT, **options)
    digests = serve.deployment(Digests).options(ray_actor_options={"num_cpus": 0}).bind()
    own = {"name": INGRESS, "max_ongoing_requests": settings.max_concurrent_requests, **ingress}
    return serve.deployment(Ingress).options(**own).bind(settings, engines.bind(settings, digests))


def deployment_options(settings: Settings) -> dict[str, Any]:
    """Return the deployment's default options.

    They allow one to four replicas, as many as the running requests fill. A stopping replica has the time to finish its
    requests.
    """
    facts, world = facts_of(settings.device), settings.tensor_parallel_size
    rows = settings.max_num_seqs or facts.max_num_seqs
    return {
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": rows},
        "max_ongoing_requests": settings.max_concurrent_requests,
        "ray_actor_options": {"num_cpus" if facts.on_host else "num_gpus": world},
        "health_check_period_s": _HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": settings.shutdown_timeout + _LEAVE_SECONDS,
    }


def numerics_key(settings: Settings) -> str:
    """Return a key of the facts that decide about a replica's bits.

    They are all settings except the server's, and the version.
    """
    kept = {name: value for name, value in dataclasses.asdict(settings).items() if OPTIONS[name].group != "Server"}
    data = msgspec.json.encode({"preheat": preheat.__version__} | kept, order="deterministic")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Digests:
    """The digest of the first replica of each :func:`numerics_key`.

    It is kept while the application runs.
    """

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def admit(self, key: str, digest: str) -> str:
        """Return the required digest of replicas of ``key``; the first replica sets it."""
        return self._first.setdefault(key, digest)


class _Server:
    """A server without its port. ``spawns`` makes its members, by default an engine's process.

    Raises the error that prevents it from becoming hot.
    """

    _supervising: asyncio.Task[None] | None = None

    async def _begin(self, settings: Settings, spawns: Sequence[Callable[[], Process]] | None = None) -> None:
        check_paths(settings)  # here, as the caller may be another host
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        loop = asyncio.get_running_loop()
        replicas = Replicas(settings, spawns=spawns)
        self._service = Service(settings, replicas.send)
        self._hot: asyncio.Future[None] = loop.create_future()
        self._supervisor = Supervisor(self._service, replicas, on_message=self._heard, on_dead=self._died)
        warm_up = partial(warm_up_server, settings, build_app, loop)
        self._supervising = loop.create_task(self._supervisor.run(warm_up))

    async def check_health(self) -> None:
        """Raise EngineDead or StepTimeout if the engine is unhealthy; Ray calls this."""
        self._service.check_health()

    async def __del__(self) -> None:
        if self._supervising is not None and not self._supervising.done():  # unless the constructor has stopped it
            await self._stop(now=False)

    def _heard(self, message: FromEngine) -> None:
        if isinstance(message, Ready) and not self._hot.done():
            collect_seldom()
            if message.blocked_reason:
                self._hot.set_exception(PreheatError(message.blocked_reason))
            else:
                self._hot.set_result(None)

    def _died(self) -> None:
        if not self._hot.done():
            self._hot.set_exception(self._supervisor.boot_error or EngineDead(self._service.dead or ""))

    async def _stop(self, now: bool) -> None:
        assert self._supervising is not None
        self._supervising.cancel()
        await asyncio.wait([self._supervising])
        await self._supervisor.stop(now)


class Engine(_Server):
    """An engine, and the frontend that checks requests.

    The constructor ends when the engine is warm and its digest equals the other replicas'. Raises the error that
    prevents it. An :class:`Ingress` calls :meth:`hello` and :meth:`generate`.
    """

    async def __init__(self, settings: Settings, digests: DeploymentHandle) -> None:  # type: ignore[misc]
        await self._begin(settings)
        try:
            await self._hot
            await self._compare(numerics_key(settings), digests)
        except BaseException:
            await self._stop(now=True)
            raise

    async def _compare(self, key: str, digests: DeploymentHandle) -> None:
        if not (mine := self._service.live.record(0).proof.digest):
            raise PreheatError("The check at boot gave no digest, so this replica cannot be compared with others")
        first = await digests.admit.remote(key, mine)
        if mine != first:
            raise PreheatError(
                f"This replica computes other bits than the first one: its digest is {mine}, the first one's {first}, "
                "so it gets no requests. Replicas need the same weights, versions and kind of device; if weights were "
                "replaced on purpose, delete the application and run it again"
            )

    async def hello(self) -> bytes:
        """Return limits and contract; all replicas share them."""
        return msgspec.msgpack.encode(hello_of(self._service, ""))

    async def generate(self, body: bytes) -> AsyncGenerator[bytes]:
        """Yield the answer to an ingress: a byte 0, then frames; or a byte 1 and the error with its status."""
        self._service.load += 1
        try:
            state = relay_state(self._service, read_sent(body), "")
            async with RunningRequests(self._service.frontend, [state], _never) as running:
                yield _TAKEN
                async with contextlib.aclosing(relayed(running, state)) as parts:
                    async for part in parts:
                        yield part
        except PreheatError as error:
            yield _REFUSED + msgspec.msgpack.encode((error.status, WireError.of(error)))
        finally:
            self._service.load -= 1


@serve.ingress()
class Replica(Engine):
    """An engine and the application in front of it."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _with_lifespan(build_app(self._service))


@serve.ingress()
class Ingress(_Server):
    """The application in front of replicas. It keeps the journal, and a stream goes on when its replica dies."""

    async def check_health(self) -> None:
        """Raise EngineDead if the ingress is; it waits for replicas that Ray starts."""
        if self._service.dead is not None:
            raise EngineDead(self._service.dead)

    async def __init__(self, settings: Settings, engines: DeploymentHandle) -> None:  # type: ignore[misc]
        def found() -> Pod:
            return Pod(RayCalls(engines, settings.engine_heartbeat_timeout_s))

        settings = dataclasses.replace(settings, pods=("ray",), engine_restarts=FRONT_RESTARTS)
        await self._begin(settings, [found])
        try:
            await self._hot
        except BaseException:
            await self._stop(now=True)
            raise

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _with_lifespan(build_app(self._service))


class RayCalls:
    """Calls to the replicas behind ``handle``. A replica without a sign of life for ``silent`` seconds is given up."""

    many = True

    def __init__(self, handle: DeploymentHandle, silent: float) -> None:
        self._handle, self._silent = handle, silent
        self._stream = handle.options(method_name="generate", stream=True)

    def __str__(self) -> str:
        return "of Ray Serve"

    async def hello(self) -> bytes:
        """Return the limits and the contract of a replica. Raises TimeoutError if none answers now."""
        try:
            async with asyncio.timeout(self._silent):
                return bytes(await self._handle.hello.remote())
        except (RayError, RayServeException) as error:
            raise TimeoutError(f"no replica answers: {error}") from error

    async def generate(self, body: bytes) -> AsyncGenerator[bytes]:
        """Yield the parts of the answer of a replica that Ray's router chooses. Raises RefusedCall, OSError."""
        answer = self._stream.remote(body)
        try:
            first = await self._first(answer)
            if first[:1] == _REFUSED:
                status, error = msgspec.msgpack.decode(first[1:], type=tuple[int, WireError])
                raise RefusedCall(status, error)
            while True:
                yield await self._next(answer)
        except StopAsyncIteration:
            return
        except (RayError, RayServeException) as error:
            raise OSError(f"the replica is lost: {type(error).__name__}") from error
        finally:
            answer.cancel()

    async def _first(self, answer: Any) -> bytes:
        """Return the first part. Raises RefusedCall if no replica takes the request now."""
        try:
            return await self._next(answer)
        except (RayError, RayServeException, TimeoutError, StopAsyncIteration) as error:
            said = f"no replica of Ray Serve takes the request: {type(error).__name__}"
            raise RefusedCall(NotReady.status, WireError.of(NotReady(said))) from error

    async def _next(self, answer: Any) -> bytes:
        async with asyncio.timeout(self._silent):
            return bytes(await anext(answer))

    def release(self) -> None:
        """Let go of nothing: Ray knows the replicas."""


async def _never() -> Any:
    await asyncio.Event().wait()


def _with_lifespan(inner: ASGIApp) -> ASGIApp:
    """Wrap ``inner`` for a server that insists on ASGI's lifespan messages.

    ``inner`` starts and stops by other means.
    """

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await inner(scope, receive, send)
            return
        for _ in ("startup", "shutdown"):
            await send({"type": f"{(await receive())['type']}.complete"})

    return outer
