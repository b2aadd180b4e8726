"""Adapters that clients may name, and the requests to the engine that load and unload them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from preheat.configs.adapters import LoraModule, lora_modules, model_names
from preheat.core import AdapterReport, LoadAdapter, ToEngine, UnloadAdapter
from preheat.errors import AlreadyThere, InvalidRequest, NotFound, PreheatError
from preheat.settings import Settings

OnDone = Callable[[PreheatError | None], None]
"""Called once: with None when the engine has done its task, or with the error that stopped it."""


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for the prompts of ``LLM.generate`` or ``LLM.chat``, as in vLLM.

    ``lora_name`` tells adapters apart. ``lora_int_id``, the number of an adapter in vLLM, must be above 0 and has no
    other effect. ``lora_path`` is the folder that PEFT saved. The folder is read at the first use of the name, and
    again with ``load_inplace``. Raises ValueError if a value cannot be meant.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be above 0, got {self.lora_int_id}")
        for name in ("lora_name", "lora_path"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")


@dataclass(frozen=True)
class _Asked:
    """A pending request to the engine: to serve ``module``, or, without one, to stop serving ``name``."""

    name: str
    module: LoraModule | None
    on_done: OnDone


class Adapters:
    """Adapters that are ``served``, by name.

    They come from ``settings``, or are loaded while the engine runs. ``send`` hands a message to the engine.

    An adapter is served from the engine's report on, until the engine is asked to unload it. The engine then finishes
    the adapter's running requests.
    """

    def __init__(self, send: Callable[[ToEngine], None], settings: Settings | None = None) -> None:
        self.served = {module.name: module for module in lora_modules(settings.lora_modules)} if settings else {}
        self._configured = dict(self.served)
        self._taken = model_names(settings) if settings else ()
        self._enabled = settings is not None and settings.enable_lora
        self._send = send
        self._asked: dict[int, _Asked] = {}
        self._ids = itertools.count(1)

    def load(self, module: LoraModule, on_done: OnDone, *, in_place: bool = False) -> None:
        """Ask the engine to read an adapter.

        ``in_place``: replace the adapter of this name if one is served. Raises AlreadyThere if the name is taken, and
        InvalidRequest if no adapters are served.
        """
        name = module.name
        if not self._enabled:
            raise InvalidRequest("no adapters are served: start with enable_lora", param="lora_name")
        if name in self._taken:
            raise AlreadyThere(f"{name!r} is a name of the model itself", param="lora_name")
        if name in self.served and not in_place:
            raise AlreadyThere(
                f"an adapter named {name!r} is served already: unload it first, or set load_inplace", param="lora_name"
            )
        self._check_idle(name)
        self._ask(_Asked(name, module, on_done), lambda id: LoadAdapter(name, module.path, id, in_place))

    def unload(self, name: str, on_done: OnDone) -> None:
        """Take no more requests for an adapter, and have the engine forget it.

        The engine forgets the adapter when its last request has ended. Raises NotFound if no adapter has this name, and
        AlreadyThere while the adapter is being loaded or unloaded.
        """
        self._check_idle(name)
        if name not in self.served:
            raise NotFound(f"no adapter named {name!r} is served here", param="lora_name")
        del self.served[name]
        self._ask(_Asked(name, None, on_done), lambda id: UnloadAdapter(name, id))

    def handle(self, report: AdapterReport) -> None:
        """Take the engine's answer to a load or an unload."""
        asked = self._asked.pop(report.id, None)
        if asked is None:  # an engine that has started again reads what it lacked
            if report.error is not None:
                self.served.pop(report.name, None)
            return
        if report.error is None and asked.module is not None:
            self.served[asked.name] = asked.module
        asked.on_done(report.error.restore() if report.error else None)

    def again(self) -> list[LoadAdapter]:
        """Return the messages that give a restarted engine the adapters that were loaded while the server ran."""
        modules = (module for name, module in self.served.items() if self._configured.get(name) != module)
        return [LoadAdapter(module.name, module.path, in_place=True) for module in modules]

    def fail_all(self, error: PreheatError) -> None:
        """Fail all pending requests: the engine will answer none of them."""
        asked, self._asked = list(self._asked.values()), {}
        for each in asked:
            each.on_done(error)

    def _check_idle(self, name: str) -> None:
        asked = next((asked for asked in self._asked.values() if asked.name == name), None)
        if asked is not None:
            doing = "loaded" if asked.module else "unloaded"
            raise AlreadyThere(f"the adapter {name!r} is just being {doing}; try again later", param="lora_name")

    def _ask(self, asked: _Asked, message: Callable[[int], ToEngine]) -> None:
        id = next(self._ids)
        self._asked[id] = asked
        self._send(message(id))
