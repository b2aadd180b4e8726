"""``kv_events_config``: vLLM's KVEventsConfig, by its keys."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from preheat.errors import SettingsError


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's KVEventsConfig.

    Batches are published at ``endpoint``, under ``topic``; at most ``hwm`` wait for a slow subscriber. The last
    ``buffer_steps`` batches may be asked for again at ``replay_endpoint``, if there is one.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def kv_events_config(given: dict[str, Any] | None) -> KvEventsConfig:
    """Return the config ``given``. Raises SettingsError, naming the key, for a value that cannot be used."""
    try:
        config = msgspec.convert(given or {}, KvEventsConfig)
    except msgspec.ValidationError as error:
        raise SettingsError(f"kv_events_config: {error}", param="kv_events_config") from None
    if not all(1 <= size < 2**31 for size in (config.buffer_steps, config.hwm, config.max_queue_size)):
        raise SettingsError(
            "kv_events_config: buffer_steps, hwm and max_queue_size must be between 1 and 2147483647",
            param="kv_events_config",
        )
    return config
