"""Finding a checkpoint's files and reading the JSON ones.

No torch here: the HTTP process uses it too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preheat.errors import ModelError
from preheat.model.gguf.container import GGUF, GGUF_WEIGHTS
from preheat.settings import Settings
from preheat.utils import files
from preheat.utils.caches import cache_root
from preheat.utils.text import some

BUNDLED = "bundled"
BUNDLED_PATH = Path(__file__).parent.parent / "bundled"

LONGEST_ID = 200
"""More characters than any id on the Hub."""

MODELOPT, GPTQ, AWQ = "hf_quant_config.json", "quantize_config.json", "quant_config.json"
"""Files of ModelOpt, AutoGPTQ and AutoAWQ with the quantization that ``config.json`` lacks."""

_IN_REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+-gguf)(?::([\w.-]+))?", re.IGNORECASE)
"""The name of a repository of GGUF files on the Hub, and of a type of tensors in it."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
"""Files with the config of an image processor: all of the first one, or ``image_processor`` in the second one."""

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model"]
_WEIGHT_FILES = ["*.safetensors"]
_NOT_NEEDED = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*"]
"""Copies of the weights in other formats.

Of all folders only additional_chat_templates is needed; "all but" has to be spelled by letters in these patterns.
"""


def find_model(settings: Settings, *, with_weights: bool = True) -> Path:
    """Return the directory of the settings' model; see :func:`find_checkpoint`.

    A GGUF file has a directory in the cache.
    """
    if (file := _gguf_file(settings, settings.model, settings.revision)) is not None:
        own = settings.tokenizer is None and not settings.skip_tokenizer_init
        return _folder_of_gguf(settings, file, tokenizer=own)
    return find_checkpoint(
        settings.model, settings.revision, with_weights=with_weights, download_dir=settings.download_dir,
        token=settings.hf_token,
    )  # fmt: skip


def find_tokenizer(settings: Settings) -> Path:
    """Return the directory of the settings' tokenizer.

    It is the model's unless the settings name another.
    """
    if settings.tokenizer is None:
        return find_model(settings, with_weights=False)
    if (file := _gguf_file(settings, settings.tokenizer, what="tokenizer")) is not None:
        return _folder_of_gguf(settings, file, tokenizer=True)
    return find_checkpoint(
        settings.tokenizer, with_weights=False, download_dir=settings.download_dir, token=settings.hf_token,
        what="tokenizer",
    )  # fmt: skip


def _gguf_file(settings: Settings, model: str, revision: str | None = None, what: str = "model") -> Path | None:
    """Return the GGUF file that ``model`` names, by its path or on the Hub; None if it names no such file.

    A file on the Hub is downloaded unless it is cached. Raises ModelError if there is not one file of the named type.
    """
    path = Path(model).expanduser()
    if os.path.isdir(path):
        return None
    if model.lower().endswith(GGUF):
        return path
    if (named := _IN_REPOSITORY.fullmatch(model)) is None:
        return None
    repository, kind = named.groups()
    if kind is None:
        raise ModelError(f"{what} {model!r} has files of several types: name one, as in {model}:Q4_K_M", param=what)
    patterns = [f"*{each}{GGUF}" for each in (kind.upper(), kind.lower())]
    folder = _download(
        repository, revision, patterns=patterns, folder=settings.download_dir, token=settings.hf_token, what=what
    )
    ending = re.compile(rf"(.*[-_.])?{re.escape(kind)}\{GGUF}", re.IGNORECASE)
    found = sorted(path for path in folder.glob(f"*{GGUF}") if ending.fullmatch(path.name))
    found = [path for path in found if not path.name.startswith("mmproj")]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ModelError(f"{what} {model!r}: one whole file of type {kind} is needed, and there is {names}", param=what)
    return found[0]


def _folder_of_gguf(settings: Settings, file: Path, *, tokenizer: bool) -> Path:
    from preheat.model.gguf.folder import folder_of

    return folder_of(file, cache_root(settings), tokenizer=tokenizer)


def find_checkpoint(
    model: str,
    revision: str | None = None,
    *,
    with_weights: bool = True,
    download_dir: str | None = None,
    token: str | None = None,
    what: str = "model",
) -> Path:
    """Return the directory of ``model``.

    ``model`` is "bundled", a local directory, or a Hub id. A Hub model is downloaded unless it is cached. ``revision``
    is a branch, tag or commit of a Hub repository; ``token``, or HF_TOKEN, gives access to gated ones. Without
    ``with_weights`` only configuration and tokenizer are fetched. ``download_dir`` replaces the Hub's own cache folder.
    ``what`` is the name of the option for errors; a "model" must have a config.json. Raises ModelError if there is no
    such checkpoint.
    """
    if model == BUNDLED:
        return BUNDLED_PATH
    path = Path(model).expanduser()
    if not os.path.isdir(path):  # also false for a name that is too long
        if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1 or len(model) > LONGEST_ID:
            raise ModelError(
                f"{what} {files.shown(model)!r} is neither a directory nor an organization/name on the Hub", param=what
            )
        patterns = _SMALL_FILES + (_WEIGHT_FILES if with_weights else [])
        path = _download(model, revision, patterns=patterns, folder=download_dir, token=token, what=what)
    if what == "model" and not os.path.lexists(path / "config.json"):
        hint = f", but GGUF files: give the path of one, such as {found}" if (found := _any_gguf(path)) else ""
        raise ModelError(f"model {model!r}: {path} holds no config.json{hint}", param=what)
    return path


def _any_gguf(directory: Path) -> Path | None:
    return next(iter(sorted(directory.glob(f"*{GGUF}"))), None)


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Return a JSON file of a checkpoint; an absent one is empty.

    Raises ModelError if it is no JSON object.
    """
    return files.read_json(directory / name)


def read_config(directory: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return ``config.json`` with the fields of ``overrides`` (``--hf-overrides``).

    :func:`preheat.model.families.read_spec` takes the result. Without a ``quantization_config``, a
    ``compression_config`` takes its place, or the quantization recorded in another file of the directory. A config with
    a ``vision_config`` gets the image processor's as ``image_processor``: it decides how many tokens an image takes.
    """
    found = read_json(directory, "config.json")
    if found.get("quantization_config") is None:
        stored = found.pop("compression_config", None) or _stored_quantization(directory)
        if stored:
            found["quantization_config"] = stored
    if "vision_config" in found and (processor := processor_config(directory)):
        found["image_processor"] = processor
    return {**found, **(overrides or {})}


def processor_config(directory: Path) -> dict[str, Any]:
    """Return the config of a checkpoint's image processor; empty if there is none."""
    values = read_json(directory, PREPROCESSOR) or read_json(directory, PROCESSOR).get("image_processor") or {}
    if not isinstance(values, dict):
        raise ModelError(f"{directory / PROCESSOR}: image_processor must be an object, got {values!r}")
    return values


def _stored_quantization(directory: Path) -> dict[str, Any] | None:
    """Return the ``quantization_config`` in a file of its own, with its method.

    AutoGPTQ's file names no method, and models of AutoAWQ may be exported with the same file name.
    """
    if stored := read_json(directory, MODELOPT).get("quantization"):
        if not isinstance(stored, dict):
            raise ModelError(f"{directory / MODELOPT}: quantization must be an object, got {stored!r}")
        return {"quant_method": "modelopt", **stored}
    if stored := read_json(directory, AWQ):
        return {"quant_method": "awq", **stored}
    if stored := read_json(directory, GPTQ):
        return {"quant_method": "awq" if "w_bit" in stored else "gptq", **stored}
    return None


def weight_files(directory: Path, below: str | Path | None = None) -> list[Path]:
    """Return the files with a checkpoint's weights, in name order.

    They are safetensors files, or the one GGUF file. An index names the files; without one all count. Each file must
    lead to a regular file, through links too, within the folder ``below`` if it is given.
    """
    index = _weight_map(directory, below)
    if index is not None:
        names = sorted(set(index.values()))
    elif os.path.lexists(directory / GGUF_WEIGHTS):
        names = [GGUF_WEIGHTS]
    elif os.path.lexists(directory / SINGLE):
        names = [SINGLE]
    else:
        found = (path.name for path in directory.glob("*.safetensors"))
        names = sorted(name for name in found if not name.startswith("consolidated"))
    if missing := [name for name in names if not os.path.lexists(directory / name)]:
        raise ModelError(f"{directory} lacks {some(missing)}, though its index names it: fetch the checkpoint again")
    if not names:
        raise ModelError(f"{directory} holds no *.safetensors file; convert the checkpoint, or use --load-format dummy")
    for name in names:
        try:
            files.regular_file(directory / name, below)
        except OSError as error:
            raise ModelError(f"{directory / name} cannot be read: {error.strerror}") from None
    return [directory / name for name in names]


def indexed_names(directory: Path, below: str | Path | None = None) -> set[str]:
    """Return the tensor names in a checkpoint's index.

    Empty without an index.
    """
    return set(_weight_map(directory, below) or ())


def _weight_map(directory: Path, below: str | Path | None) -> dict[str, str] | None:
    """Return the file of each tensor, always in ``directory``.

    None without an index.
    """
    path = directory / INDEX
    found = files.read_json(path, below, most=files.TABLE_BYTES).get("weight_map")
    if found is None:
        return None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ModelError(f"{path}: weight_map must be an object that names a file for each tensor")
    for name in set(found.values()):
        if Path(name).name != name or name == ".." or "\0" in name:
            raise ModelError(f"{path}: {files.shown(name)!r} is not the name of a file beside it")
    return found


def _download(
    model: str, revision: str | None, *, patterns: list[str], folder: str | None, token: str | None, what: str
) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=folder,
                token=token,
                allow_patterns=patterns,
                ignore_patterns=_NOT_NEEDED,
            )
        )
    except Exception as error:  # the Hub's client raises errors of many libraries
        at = f" at revision {revision}" if revision else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot get {what} {model!r}{at} from the Hub: {reason}", param=what) from error
