"""The folder of a GGUF file: its config, tokenizer and template as files, and a link to the weights.

Everything that reads a checkpoint reads a folder. So the description of a file is written once, into the cache, and
boots, the HTTP process and the template's process find it there. The folder's name depends on the file's path, size and
time, so another file gets another folder. Folders may be deleted at any time.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from preheat import __version__
from preheat.errors import ModelError
from preheat.model.gguf.container import GGUF_WEIGHTS
from preheat.model.gguf.description import Description
from preheat.model.gguf.ends import ends_of
from preheat.model.gguf.tokenizer import Vocabulary
from preheat.utils.files import regular_file, shown

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Number of the folder's contents: a change makes folders anew."""


def folder_of(file: Path, cache: Path | None, *, tokenizer: bool) -> Path:
    """Return the folder of the GGUF ``file`` below ``cache``, made if need be.

    Without a ``cache`` it is below the system's temporary folder. ``tokenizer``: write the file's tokenizer, too. Its
    kind must be supported. Raises ModelError for a file that does not run.
    """
    try:
        path = regular_file(file)
        found = os.stat(path)
    except OSError as error:
        raise ModelError(f"{shown(file)} cannot be read: {error.strerror}", param="model") from None
    parts = [_FORMAT, __version__, str(path), found.st_size, found.st_mtime_ns, tokenizer]
    root = _own_folder() if cache is None else cache / "gguf"
    home = root / sha256(json.dumps(parts).encode()).hexdigest()[:32]
    if not home.is_dir():
        contents = _contents(path, tokenizer=tokenizer)
        try:
            _write(home, path, contents)
        except OSError as error:
            raise ModelError(
                f"{home} cannot be written: {error.strerror}; name another folder with --cache-dir", param="cache_dir"
            ) from None
    return home


def _own_folder() -> Path:
    """Return a folder for this user alone, for engines without a cache."""
    folder = Path(tempfile.gettempdir()) / f"preheat-gguf-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ModelError(
            f"{folder} belongs to somebody else or is open to others: remove it, or name a folder with --cache-dir"
        )
    return folder


def _contents(path: Path, *, tokenizer: bool) -> dict[str, Any]:
    """Return the JSON files of the folder by name."""
    model = Description(path)
    contents = {"config.json": model.config | {"eos_token_id": ends_of(model)}}
    if tokenizer:
        vocabulary = Vocabulary(model)
        contents |= {"tokenizer.json": vocabulary.tokenizer(), "tokenizer_config.json": vocabulary.config()}
    return contents


def _write(home: Path, path: Path, contents: dict[str, Any]) -> None:
    """Make the folder ``home`` at once, so that nobody sees a part of it."""
    home.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new.", dir=home.parent))
    try:
        for name, value in contents.items():
            (made / name).write_text(json.dumps(value, ensure_ascii=False), "utf-8")
        (made / GGUF_WEIGHTS).symlink_to(path)
        os.replace(made, home)
    except OSError:
        if not home.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    logger.info("%s is described in %s", shown(path), home)
