"""Finding a checkpoint's files and reading the JSON ones. No torch here: the HTTP process uses it too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from preheat.errors import ModelError

BUNDLED = "bundled"
BUNDLED_PATH = Path(__file__).parent.parent / "bundled"

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model"]
_WEIGHT_FILES = ["*.safetensors"]
_NOT_NEEDED = ["*/*", "consolidated*"]  # copies of the weights in other formats


def find_checkpoint(model: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """The directory of ``model``: "bundled", a local directory, or a Hub id, which is downloaded unless it is cached.

    ``revision`` is a branch, tag or commit of a Hub repository; HF_TOKEN gives access to gated ones. Without
    ``with_weights`` only configuration and tokenizer are fetched. Raises ModelError if there is no such model.
    """
    if model == BUNDLED:
        return _with_config(BUNDLED_PATH, model)
    path = Path(model).expanduser()
    if path.is_dir():
        return _with_config(path, model)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelError(f"model {model!r} is neither a directory nor an organisation/name on the Hub", param="model")
    return _with_config(_download(model, revision, with_weights), model)


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """A JSON file of a checkpoint; an absent one is empty. Raises ModelError if it is not a JSON object."""
    path = directory / name
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json``, for :func:`preheat.model.families.read_spec`."""
    return read_json(directory, "config.json")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in name order: those of its index if it has one, else all of them."""
    index = read_json(directory, "model.safetensors.index.json").get("weight_map")
    if index is not None:
        files = sorted({directory / name for name in index.values()})
    elif (single := directory / "model.safetensors").exists():
        files = [single]
    else:
        files = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if missing := [path.name for path in files if not path.exists()]:
        raise ModelError(f"{directory} lacks {', '.join(missing)}, which its index names")
    if not files:
        raise ModelError(f"{directory} holds no *.safetensors file; convert the checkpoint, or use --load-format dummy")
    return files


def indexed_names(directory: Path) -> set[str]:
    """The tensor names in a sharded checkpoint's index; empty without an index."""
    return set(read_json(directory, "model.safetensors.index.json").get("weight_map", ()))


def _with_config(directory: Path, model: str) -> Path:
    if not (directory / "config.json").exists():
        raise ModelError(f"model {model!r}: {directory} holds no config.json", param="model")
    return directory


def _download(model: str, revision: str | None, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = _SMALL_FILES + (_WEIGHT_FILES if with_weights else [])
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=_NOT_NEEDED))
    except Exception as error:  # the Hub's client raises errors of many libraries
        at = f" at revision {revision}" if revision else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot get model {model!r}{at} from the Hub: {reason}", param="model") from error
