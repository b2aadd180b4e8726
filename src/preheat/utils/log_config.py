"""The file of ``--log-config-file``: a JSON object for Python's ``logging.config.dictConfig``."""

from __future__ import annotations

import json
import logging.config
from typing import Any

from preheat.errors import SettingsError
from preheat.utils.files import read_given, why_unread

_NAMES = {"vllm.logging_utils.NewLineFormatter": "preheat.utils.log.LineFormatter"}
"""Classes that files written for vLLM name, and their counterparts here."""


def log_as(path: str) -> None:
    """Log by the file at ``path``. Raises SettingsError if the file cannot be read or used.

    Settings of the logger ``vllm`` count for ours, ``preheat``, if the file does not name ours. Loggers without an
    entry stay as they are. A logger with handlers of its own passes no events on, unless the file says otherwise.
    """
    try:
        config = json.loads(read_given(path))
        logging.config.dictConfig(_ours(config))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"log_config_file {path} cannot be read: {why_unread(error)}", param=_PARAM) from error
    except Exception as error:  # a handler that the file names may raise anything
        cause = error.__cause__ or error
        raise SettingsError(
            f"log_config_file {path} is not a JSON object that logging.config.dictConfig accepts: "
            f"{error}{'' if cause is error else f' ({cause})'}",
            param=_PARAM,
        ) from error


_PARAM = "log_config_file"


def _ours(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with our names."""
    config = {"disable_existing_loggers": False, **config}
    loggers = {name: dict(asked) for name, asked in config.get("loggers", {}).items()}
    for name in [name for name in loggers if name.split(".")[0] == "vllm"]:
        loggers.setdefault(f"preheat{name.removeprefix('vllm')}", loggers.pop(name))
    for asked in loggers.values():
        asked.setdefault("propagate", not asked.get("handlers"))
    parts: dict[str, Any] = {
        part: {name: _named(each) for name, each in config[part].items()}
        for part in ("formatters", "handlers")
        if part in config
    }
    return {**config, **parts, "loggers": loggers}


def _named(asked: dict[str, Any]) -> dict[str, Any]:
    """Return a formatter or a handler with our classes."""
    return {key: _NAMES.get(value, value) if isinstance(value, str) else value for key, value in asked.items()}
