"""Messages from the frontend to the engine, besides requests."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from preheat.configs.weight_transfer import Announced, TransferGroup
from preheat.core.requests import Request


class Cancel(msgspec.Struct, tag="cancel"):
    """Stop this sequence and free its blocks.

    The client disconnected, or a stop string was found.
    """

    id: int


class Drain(msgspec.Struct, tag="drain"):
    """Finish the running requests, then exit; with ``now`` exit at once."""

    now: bool = False


class Wake(msgspec.Struct, tag="wake"):
    """End the engine's wait for messages: a thread of the engine has work for the loop."""


class Ask(msgspec.Struct, tag="ask"):
    """Request a Report from the engine."""


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Forget the contents of the prefix cache."""


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Load an adapter and serve it as ``name``; AdapterReport answers, with the same ``id``.

    With ``in_place`` a taken name means the new adapter from now on; earlier requests keep theirs.
    """

    name: str
    path: str
    id: int = 0
    in_place: bool = False


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Serve ``name`` no longer. AdapterReport answers, with the same ``id``, when its last request has ended."""

    name: str
    id: int = 0


class Command(msgspec.Struct, tag="command"):
    """An operator's command to the whole engine.

    It is carried out between two steps, in order with the requests.

    An :class:`Outcome` with the same ``id`` answers it.

    - ``mode``: before a pause or sleep, running requests end with reason "abort", are waited for, or are kept.
    - ``level``: the level of a sleep.
    - ``tags``: the memory that wakes up; none means all.
    - ``path``: a folder of safetensors files with new weights, all below the folder ``root`` if one is given.
    - ``version``: the name of the new weights.
    - ``tensors``: the new weights by name, if both ends are one process.
    - ``announced``: the tensors that a trainer will send in the joined ``group``.
    """

    id: int
    name: Literal[
        "pause", "resume", "update_weights", "sleep", "wake_up",
        "init_weight_transfer_engine", "start_weight_update", "finish_weight_update", "audit",
    ]  # fmt: skip
    mode: Literal["abort", "wait", "keep"] = "abort"
    level: int = 1
    tags: list[str] = []
    path: str = ""
    root: str = ""
    version: str = ""
    tensors: Any = None
    group: TransferGroup | None = None
    announced: list[Announced] = []


ToEngine = Request | Cancel | Drain | Wake | Ask | ResetPrefixCache | LoadAdapter | UnloadAdapter | Command
