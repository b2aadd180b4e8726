"""``weight_transfer_config``: vLLM's WeightTransferConfig, and the requests of a transfer."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import msgspec

from preheat.errors import InvalidRequest, SettingsError

TransferBackend = Literal["nccl", "gloo"]

ITEM_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "int32": 4,
    "int64": 8, "bool": 1,
}  # fmt: skip
"""The types of tensors that may be announced, by torch's names, and the bytes of a number."""

MOST_SIDES, MOST_NUMBERS = 8, 2**48
"""Most sides and most numbers of an announced tensor."""

TIMEOUT = 300.0
"""Default seconds that an engine waits for a trainer, or for its next tensor. Source: vLLM's client."""


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How new weights travel from a trainer."""

    backend: TransferBackend = "nccl"


def transfer_config(given: dict[str, Any] | None) -> TransferConfig | None:
    """Return the config ``given``; None if weights do not travel.

    Raises SettingsError, naming the key, for a value that cannot be used.
    """
    if given is None:
        return None
    try:
        return msgspec.convert(given, TransferConfig)
    except msgspec.ValidationError as error:
        raise SettingsError(f"weight_transfer_config: {error}", param="weight_transfer_config") from None


class TransferGroup(msgspec.Struct, frozen=True):
    """The group of a trainer, rank 0, and engines, ``world_size`` in all.

    The ranks of this engine are ``rank_offset`` and the next ones.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout: float = TIMEOUT

    def check(self, ranks: int = 1) -> None:
        """Raise InvalidRequest if the group has no room for the engine's ``ranks``, or a value is out of range."""
        if self.world_size <= ranks:
            raise InvalidRequest(
                f"world_size must be above {ranks}, not {self.world_size}: it counts the trainer and each rank of the "
                "engine",
                param="world_size",
            )
        for name, low, high in (("master_port", 1, 65535), ("rank_offset", 1, self.world_size - ranks)):
            if not low <= getattr(self, name) <= high:
                raise InvalidRequest(f"{name} must be {low} to {high}, not {getattr(self, name)}", param=name)
        if not 0 < self.timeout <= 3600:
            raise InvalidRequest(f"timeout must be above 0 and at most 3600 s, not {self.timeout}", param="timeout")


class Announced(NamedTuple):
    """A tensor that will be broadcast."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def announced(names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> list[Announced]:
    """Return the announced tensors in order.

    Raises InvalidRequest unless each tensor has a type and a shape, and no name comes twice.
    """
    if not len(names) == len(dtype_names) == len(shapes) > 0:
        raise InvalidRequest(
            f"update_info has {len(names)} names, {len(dtype_names)} dtype_names and {len(shapes)} shapes: give one of "
            "each for every tensor",
            param="update_info",
        )
    if len(set(names)) < len(names):
        raise InvalidRequest("update_info names a tensor twice", param="update_info")
    found = [Announced(name, dtype.removeprefix("torch."), shape) for name, dtype, shape in
             zip(names, dtype_names, shapes, strict=True)]  # fmt: skip
    for each in found:
        if each.dtype not in ITEM_BYTES:
            raise InvalidRequest(
                f"{each.name} is of {each.dtype}; {', '.join(ITEM_BYTES)} are taken", param="update_info"
            )
        if not _is_shape(each.shape):
            raise InvalidRequest(
                f"{each.name} has shape {each.shape[:MOST_SIDES]}: a tensor has at most {MOST_SIDES} dimensions and "
                f"{MOST_NUMBERS:,} numbers",
                param="update_info",
            )
    return found


def _is_shape(shape: list[int]) -> bool:
    """Return whether ``shape`` has few and small sides; only then is their product computed."""
    if len(shape) > MOST_SIDES or not all(0 <= side <= MOST_NUMBERS for side in shape):
        return False
    return math.prod(shape) <= MOST_NUMBERS


def backend_of(config: TransferConfig | None) -> TransferBackend:
    """Return the backend of ``config``. Raises InvalidRequest if weights do not travel."""
    if config is None:
        raise InvalidRequest(
            'Weight transfers need an engine started with --weight-transfer-config, such as {"backend": "nccl"}'
        )
    return config.backend
