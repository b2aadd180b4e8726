"""The models behind one port (``--model NAME=PATH``, repeated): their settings and engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from preheat.configs.adapters import lora_modules
from preheat.configs.bucketing import with_bucketing_policy
from preheat.core import FromEngine, Ready, ToEngine
from preheat.errors import EngineDead, PreheatError, SettingsError
from preheat.frontend.frontend import Frontend
from preheat.options.given import given_options
from preheat.server.http.service import Service
from preheat.server.replicas.pod_http import pods
from preheat.server.replicas.replicas import Replicas
from preheat.server.replicas.supervisor import Supervisor
from preheat.settings import OPTIONS, Settings

_OF_THE_SERVER = ("Server", "General")


def each_model(settings: Settings) -> list[Settings]:
    """Return the settings of each model's engine; without ``models``, the given settings alone.

    Each engine gets a share of ``gpu_memory_utilization``. Engines start one after the other and measure free memory.
    So the first of n models may use 1/n of it, the next 1/(n - 1) of the rest, and so on. Raises SettingsError if names
    or options conflict.
    """
    if not settings.models:
        return [settings]
    if settings.served_model_name is not None:
        raise SettingsError(
            "served_model_name names one model, and models have names of their own: leave it out",
            param="served_model_name",
        )
    if settings.engine_restarts not in (0, OPTIONS["engine_restarts"].default):
        raise SettingsError(
            "engine_restarts: several models share a device, and an engine that starts again would find the memory "
            "of the others taken: leave it out; a dead engine ends the server",
            param="engine_restarts",
        )
    named = dict(map(_named, settings.models))
    if len(named) < len(settings.models):
        raise SettingsError("models: two models have the same name; rename one of them", param="models")
    options = settings.model_options or {}
    if unknown := sorted(options.keys() - named):
        raise SettingsError(f"model_options: {unknown[0]!r} is not one of {', '.join(named)}", param="model_options")
    found = []
    for place, (name, path) in enumerate(named.items()):
        share = settings.gpu_memory_utilization / (len(named) - place)
        own: dict[str, Any] = {"model": path, "served_model_name": (name,), "gpu_memory_utilization": share}
        own["engine_restarts"] = 0
        found.append(replace(settings, **own | {"model_options": None} | _options(name, options.get(name, {}))))
    _check_names(found)
    return found


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name.strip() and equals and path.strip()):
        raise SettingsError(
            f"models: {text!r} is not NAME=PATH: several models need names, as in --model chat=PATH --model embed=PATH",
            param="models",
        )
    return name.strip(), path.strip()


def _options(name: str, given: Any) -> dict[str, Any]:
    """Return the options of one model. Raises SettingsError for options of the server."""
    where = f"model_options of {name}"
    if not isinstance(given, dict):
        raise SettingsError(f"{where}: {given!r} is not an object of options", param="model_options")
    found = given_options(given, OPTIONS, where)
    for each in found:
        if OPTIONS[each].group in _OF_THE_SERVER or each in ("model", "models"):
            raise SettingsError(
                f"{where}: {each} is an option of the whole server: give it outside of model_options",
                param="model_options",
            )
    return with_bucketing_policy(found)


def _check_names(models: list[Settings]) -> None:
    """Raise SettingsError if two models or adapters share a name.

    No request could tell them apart.
    """
    names = Counter(name for each in models for name in each.served_model_name or ())
    names.update(adapter.name for each in models for adapter in lora_modules(each.lora_modules))
    if twice := [name for name, count in names.items() if count > 1]:
        raise SettingsError(
            f"{twice[0]!r} is the name of two models or adapters: name the adapters of each model in model_options",
            param="models",
        )


class Models:
    """The models of ``settings``, usually one.

    Each model is a service with its own engine process, running ``entry``. The engines boot one after the other, so
    that each measures the memory that the engines before it left free.
    """

    def __init__(self, settings: Settings, entry: str) -> None:
        self._entry = entry
        self._each = each_model(settings)
        self._replicas: list[Replicas] = []
        self._supervisors: list[Supervisor] = []
        self._failed: PreheatError | None = None
        self.services = [Service(each, partial(self._send, place)) for place, each in enumerate(self._each)]
        for service in self.services[1:]:
            service.responses = self.services[0].responses
        self._begin()

    def _send(self, place: int, message: ToEngine) -> None:
        self._replicas[place].send(message)

    def _begin(self) -> None:
        """Start the process of the next engine."""
        settings = self._each[len(self._replicas)]
        self._replicas.append(Replicas(settings, self._entry, pods(settings) if settings.pods else None))

    async def boot(
        self,
        warm_up: Callable[..., None] | None,
        on_message: Callable[[FromEngine], None],
        on_dead: Callable[[], None],
    ) -> None:
        """Boot, hear and watch the engines until cancelled.

        ``warm_up`` is called with the settings and the frontend of each model. ``on_message`` gets the messages of the
        engines, and Ready once all are ready. ``on_dead`` is called when one is dead.
        """
        async with asyncio.TaskGroup() as group:
            for place, service in enumerate(self.services):
                try:
                    if place:
                        self._begin()
                except Exception as error:  # no caller would see the exception
                    reason = f"The engine of {service.names[0]} cannot start: {error}"
                    self._failed, service.dead = PreheatError(reason), reason
                    on_dead()
                    return
                ready = asyncio.Event()
                heard = partial(self._heard, ready=ready, last=place + 1 == len(self.services), on_message=on_message)
                supervisor = Supervisor(service, self._replicas[place], on_message=heard, on_dead=on_dead)
                self._supervisors.append(supervisor)
                own: Callable[[Frontend], None] | None = warm_up and partial(_warm, warm_up, service.settings)
                group.create_task(supervisor.run(own))
                await ready.wait()

    @staticmethod
    def _heard(
        message: FromEngine, *, ready: asyncio.Event, last: bool, on_message: Callable[[FromEngine], None]
    ) -> None:
        if isinstance(message, Ready):
            ready.set()
            if not last and not message.blocked_reason:
                return
        on_message(message)

    @property
    def take_requests(self) -> bool:
        """Whether requests for every one of the models would be accepted now."""
        return all(service.takes_requests for service in self.services)

    @property
    def dead(self) -> str | None:
        """The reason why the server must exit, if any."""
        return next((service.dead for service in self.services if service.dead is not None), None)

    @property
    def boot_error(self) -> PreheatError | None:
        """The error that kept the server from becoming ready, if any."""
        errors = [each.boot_error for each in self._supervisors]
        return next((error for error in errors if error is not None), self._failed)

    def end_all(self) -> None:
        """End the requests of all engines after one has died.

        The other engines are about to stop.
        """
        reason = self.dead or ""
        for service in self.services:
            if service.dead is None:
                service.dead = reason
                service.end_all(EngineDead(reason))

    async def stop(self, now: bool) -> None:
        """Stop the engines: after their requests, or at once if ``now``."""
        now = now or self.dead is not None
        for service in self.services:
            service.draining = True
        begun = [supervisor.stop(now) for supervisor in self._supervisors]
        rest = [replicas.stop(now) for replicas in self._replicas[len(self._supervisors) :]]
        await asyncio.gather(*begun, *rest)


def _warm(warm_up: Callable[..., None], settings: Settings, frontend: Frontend) -> None:
    warm_up(settings, frontend=frontend)
