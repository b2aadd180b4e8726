"""Adapters in the settings: ``--lora-modules``, the options beside it, and the folders of adapters."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Protocol

import msgspec

from preheat.errors import AdapterError, SettingsError
from preheat.utils.files import folder_below, shown

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter."""


class Named(Protocol):
    """Settings with the names of a model and of its adapters."""

    @property
    def model(self) -> str: ...

    @property
    def served_model_name(self) -> tuple[str, ...] | None: ...

    @property
    def lora_modules(self) -> tuple[str, ...]: ...


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that is served from the start.

    ``name`` is its name for clients, ``path`` its folder, without a ``~``: a shell leaves it in ``name=~/folder``.
    ``base_model_name`` is its parent in ``/v1/models``.
    """

    name: str
    path: str
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "path", os.path.expanduser(self.path))


def lora_modules(given: Sequence[str]) -> tuple[LoraModule, ...]:
    """Return the modules of ``given`` texts: ``name=path`` or a JSON object, each.

    Raises SettingsError for any other text, and for a name given twice.
    """
    modules = tuple(map(_module, given))
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(
                f"lora_modules: two adapters have the name {name!r}; rename one of them", param="lora_modules"
            )
    return modules


def model_names(settings: Named) -> tuple[str, ...]:
    """Return the names of the model itself; no adapter has them."""
    return settings.served_model_name or (settings.model,)


def _module(text: str) -> LoraModule:
    if text.lstrip().startswith("{"):
        try:
            module = msgspec.json.decode(text, type=LoraModule)
        except msgspec.MsgspecError as error:
            raise SettingsError(f"lora_modules: {text}: {error}", param="lora_modules") from None
    else:
        name, _, path = text.partition("=")
        module = LoraModule(name.strip(), path.strip())
    if not module.name or not module.path:
        raise SettingsError(
            f"lora_modules: {text!r} is neither name=path nor {json.dumps({'name': 'sql', 'path': 'adapters/sql'})}",
            param="lora_modules",
        )
    return module


def check_names(settings: Named) -> None:
    """Raise SettingsError for an adapter that has a name of the model itself."""
    for module in lora_modules(settings.lora_modules):
        if module.name in model_names(settings):
            raise SettingsError(
                f"lora_modules: {module.name!r} is a name of the model itself; rename the adapter", param="lora_modules"
            )


def path_below(root: str | None, path: str) -> str:
    """Return a client's folder ``path`` of an adapter, without symbolic links.

    ``path`` is absolute, or relative to ``root`` (``--lora-root``). Raises AdapterError unless the folder and its files
    lie below ``root``.
    """
    if root is None:
        raise AdapterError(
            "loading an adapter by its path needs a server that was started with --lora-root, the folder for adapters",
            param="lora_path",
        )
    try:
        _, folder = folder_below(root, path, ADAPTER_CONFIG, ADAPTER_TENSORS)
    except OSError as error:
        text = f"{shown(path)} cannot be read (--lora-root): {error.strerror}"
        raise AdapterError(text, param="lora_path") from None
    return str(folder)
