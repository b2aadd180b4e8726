"""Adapters in the settings: ``--lora-modules`` and the options that go with it, and where adapters may lie."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from preheat.errors import AdapterError, SettingsError
from preheat.utils.files import folder_below, shown

if TYPE_CHECKING:
    from preheat.settings import Settings

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""The files that an adapter is read from."""


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that is served from the start: the ``name`` that clients use, and the folder ``path``.
    ``base_model_name`` is what ``/v1/models`` gives as its parent.
    """

    name: str
    path: str
    base_model_name: str | None = None


def lora_modules(given: Sequence[str]) -> tuple[LoraModule, ...]:
    """``name=path`` or a JSON object, each. Raises SettingsError for what is neither, and for a name given twice."""
    modules = tuple(map(_module, given))
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(
                f"lora_modules: two adapters have the name {name!r}; rename one of them", param="lora_modules"
            )
    return modules


def model_names(settings: Settings) -> tuple[str, ...]:
    """The names under which clients find the model itself, and no adapter."""
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


def check_names(settings: Settings) -> None:
    """Raise SettingsError for an adapter that has a name of the model itself."""
    for module in lora_modules(settings.lora_modules):
        if module.name in model_names(settings):
            raise SettingsError(
                f"lora_modules: {module.name!r} is a name of the model itself; rename the adapter", param="lora_modules"
            )


def path_below(root: str | None, path: str) -> str:
    """The folder ``path`` of an adapter, which a client names: absolute, or below ``root``, without symbolic links.

    Raises AdapterError unless the folder and the files that are read lie below ``root`` (``--lora-root``).
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
