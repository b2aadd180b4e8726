"""The role of an engine that shares blocks with others: ``--role``, or vLLM's KVTransferConfig by its keys."""

from __future__ import annotations

import ipaddress
from typing import Any, Literal, NamedTuple

import msgspec

from preheat.errors import SettingsError

Role = Literal["prefill", "decode", "both"]

_ROLES: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}

ANY = "*"
"""The peer that stands for all."""

LOOPBACK = ("127.0.0.0/8", "::1", "localhost")

_GIB = 2**30


class KvTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's KVTransferConfig.

    Any connector that pulls blocks has the name ``NixlConnector``. ``kv_buffer_size`` are bytes of the host's memory.
    """

    kv_connector: Literal["NixlConnector"] | None = None
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    kv_buffer_size: float | None = None
    kv_load_failure_policy: Literal["recompute"] = "recompute"
    kv_buffer_device: str | None = None
    engine_id: str | None = None
    kv_ip: str | None = None
    kv_port: int | None = None


class KvTransfer(NamedTuple):
    """How an engine shares blocks: its role, its address for peers (port 0: a free one), and the peers to pull from."""

    role: Role
    host: str
    port: int
    key: bytes
    peers: tuple[str, ...]
    seconds: float
    gib: float | None
    engine_id: str | None

    @property
    def sends(self) -> bool:
        return self.role != "decode"

    @property
    def pulls(self) -> bool:
        return self.role != "prefill"

    def pulls_from(self, host: str) -> bool:
        """Return whether blocks may be pulled from ``host``."""
        return any(each in (ANY, host) or _within(host, each) for each in self.peers)


def kv_transfer(settings: Any) -> KvTransfer | None:
    """Return how the engine of ``settings`` shares blocks, None if it does not. Raises SettingsError."""
    config = _config(settings.kv_transfer_config)
    asked = None if config.kv_role is None else _ROLES[config.kv_role]
    role: Role | None = settings.role or asked
    if role is None:
        return None
    if asked not in (None, role):
        raise SettingsError(
            f"role is {role}, and kv_transfer_config says {config.kv_role}: leave one of them out", param="role"
        )
    host = settings.kv_transfer_host if config.kv_ip is None else config.kv_ip
    if not settings.kv_transfer_key and not _is_local(host):
        raise SettingsError(
            f"kv_transfer_key: blocks hold clients' prompts, and {host} can be reached from other machines: give a key "
            "that all engines share (PREHEAT_KV_TRANSFER_KEY), or leave kv_transfer_host at 127.0.0.1",
            param="kv_transfer_key",
        )
    return KvTransfer(
        role, host, settings.kv_transfer_port if config.kv_port is None else config.kv_port,
        (settings.kv_transfer_key or "").encode(), settings.kv_transfer_peers or LOOPBACK,
        settings.kv_transfer_timeout_s, None if config.kv_buffer_size is None else config.kv_buffer_size / _GIB,
        config.engine_id,
    )  # fmt: skip


def _config(given: dict[str, Any] | None) -> KvTransferConfig:
    try:
        config = msgspec.convert(given or {}, KvTransferConfig)
    except msgspec.ValidationError as error:
        raise SettingsError(f"kv_transfer_config: {error}", param="kv_transfer_config") from None
    if given is not None and config.kv_role is None:
        raise SettingsError(
            "kv_transfer_config has no kv_role: give kv_producer, kv_consumer or kv_both", param="kv_transfer_config"
        )
    return config


def _is_local(host: str) -> bool:
    return any(host == each or _within(host, each) for each in LOOPBACK)


def _within(host: str, network: str) -> bool:
    """Return whether ``host`` is an address in ``network``; False if one of them is a name."""
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network)
    except ValueError:
        return False
