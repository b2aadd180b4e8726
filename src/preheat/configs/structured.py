"""Structured outputs in the settings: ``--structured-outputs-config``, and the grammars compiled at boot.

The names are vLLM's. The boot compiles its grammars before the first request.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import msgspec

from preheat.core import StructuredOutputsParams
from preheat.errors import SettingsError
from preheat.utils.files import read_text, shown, why_unread
from preheat.utils.versions import version_of

BACKENDS: Mapping[str, str] = MappingProxyType(
    {"auto": "llguidance", "guidance": "llguidance", "xgrammar": "xgrammar", "none": ""}
)
"""The libraries behind the backends' names."""

_OTHERS = ("outlines", "lm-format-enforcer")


class StructuredOutputsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's config of structured outputs.

    ``backend`` serves all requests: ``guidance`` and ``auto`` are llguidance, ``none`` refuses them. The other fields
    are fields of requests. Both ``disable_`` fields hold for all requests, ``whitespace_pattern`` for requests that say
    nothing about white space.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


def structured_config(given: Mapping[str, Any] | None) -> StructuredOutputsConfig:
    """Return the option as a struct. Raises SettingsError if a value cannot be used."""
    name = "structured_outputs_config"
    try:
        config = msgspec.convert(given or {}, StructuredOutputsConfig)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{name}: {error}", param=name) from None
    if config.backend in _OTHERS:
        raise SettingsError(
            f"{name}: backend {config.backend} is not implemented; guidance (llguidance) and xgrammar are, see "
            "docs/structured-outputs.md",
            param=name,
        )
    if config.disable_any_whitespace and config.whitespace_pattern is not None:
        raise SettingsError(f"{name}: disable_any_whitespace leaves no use for whitespace_pattern", param=name)
    if config.backend not in BACKENDS:
        raise SettingsError(f"{name}: backend {config.backend!r} is not one of {', '.join(BACKENDS)}", param=name)
    return config


def library_of(settings: Any) -> str:
    """Return the library of grammars; "" for none. Raises SettingsError if it is not installed."""
    library = BACKENDS[structured_config(settings.structured_outputs_config).backend]
    if library and find_spec(library) is None:
        raise SettingsError(
            f"structured_outputs_config: backend {library} is not installed: pip install 'preheat[{library}]'",
            param="structured_outputs_config",
        )
    return library


def library_version(settings: Any) -> str:
    """Return the library and its version; in another version, the same grammar may allow other tokens."""
    library = library_of(settings)
    return f"{library} {version_of(library)}"


def with_config(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> StructuredOutputsParams:
    """Return ``params`` with the server's own ``config``."""
    about_json = params.kind in ("json", "json_object", "structural_tag")
    closed = config.disable_additional_properties and params.kind in ("json", "structural_tag")
    if about_json and config.disable_any_whitespace:
        params = msgspec.structs.replace(params, disable_any_whitespace=True, whitespace_pattern=None)
    elif about_json and not params.disable_any_whitespace and params.whitespace_pattern is None:
        params = msgspec.structs.replace(params, whitespace_pattern=config.whitespace_pattern)
    return msgspec.structs.replace(params, disable_additional_properties=True) if closed else params


JSON_OBJECT: Mapping[str, StructuredOutputsParams] = MappingProxyType(
    {"json_object": StructuredOutputsParams(json_object=True)}
)


class _Line(StructuredOutputsParams, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """``structured_outputs`` of a request, and the name of the grammar in the log and the plan."""

    name: str = ""


@cache
def read_preloads(path: str | None) -> Mapping[str, StructuredOutputsParams]:
    """Return the grammars of ``--preload-grammars`` by name.

    Each line of the file is the ``structured_outputs`` of a request as a JSON object, with a ``name`` beside. Raises
    SettingsError, naming the line.
    """
    if path is None:
        return MappingProxyType({})
    try:
        lines = [line.strip() for line in read_text(path).split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        text = f"cannot read the grammars in {shown(path)}: {why_unread(error)}"
        raise SettingsError(text, param="preload_grammars") from None
    found: dict[str, StructuredOutputsParams] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            given = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError as error:
            raise SettingsError(f"{path}, line {number}: {error}", param="preload_grammars") from None
        name = given.name or f"line {number}"
        if name in found or name in JSON_OBJECT:
            raise SettingsError(f"{path}, line {number}: there are two grammars named {name}", param="preload_grammars")
        fields = {field: getattr(given, field) for field in StructuredOutputsParams.__struct_fields__}
        found[name] = StructuredOutputsParams(**fields)
    return MappingProxyType(found)


def preloads_of(settings: Any) -> Mapping[str, StructuredOutputsParams]:
    """Return the grammars that a boot with these settings compiles, by name; none without structured outputs."""
    if why_none(settings):
        return MappingProxyType({})
    return MappingProxyType({**JSON_OBJECT, **read_preloads(settings.preload_grammars)})


def why_none(settings: Any) -> str:
    """Return the reason why a boot with these settings has no structured outputs; "" if it has."""
    if settings.skip_tokenizer_init:
        return "there is no tokenizer (--skip-tokenizer-init)"
    if structured_config(settings.structured_outputs_config).backend == "none":
        return 'the server was started with --structured-outputs-config \'{"backend": "none"}\''
    return ""
