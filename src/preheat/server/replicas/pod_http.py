"""Calls to pods over HTTP, and the addresses of the pods.

A URL's host may be the name of a headless service: each of its addresses is a pod. Names are asked again while a place
waits for a pod, so a pod that comes later gets the place of one that has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import msgspec

from preheat.errors import SettingsError, WireError
from preheat.server.replicas.pod import Pod, RefusedCall
from preheat.server.replicas.relay_wire import GENERATE, MEDIA, MEMBER
from preheat.settings import Settings

CONNECT_SECONDS, HELLO_SECONDS = 3.0, 3.0
"""Seconds to open a connection, and to answer the question for limits and contract."""

_CHUNK = 1 << 16
_MOST_ERROR = 1 << 20


class Address(NamedTuple):
    """A pod: the address to connect to, and the host's name."""

    host: str
    port: int
    name: str
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def parsed(url: str) -> Address:
    """Return the address in a pod's URL; its host may be a name. Raises SettingsError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"pods: {url!r} is no URL: {error}", param="pods") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise SettingsError(
            f"pods: {url!r} must be http://HOST:PORT or https://HOST:PORT, without a path", param="pods"
        )
    tls = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if tls else 80), parts.hostname, tls)


class Addresses:
    """The addresses behind ``urls``; each is claimed by one place."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._named = [parsed(url) for url in urls]
        self._claimed = set[Address]()

    async def claim(self) -> Address:
        """Return an address that nobody has claimed. Raises OSError if there is none now."""
        for named in self._named:
            for host in await _resolved(named):
                address = named._replace(host=host)
                if address not in self._claimed:
                    self._claimed.add(address)
                    return address
        raise OSError("no pod is left for this place")

    def release(self, address: Address) -> None:
        """Let others claim ``address``."""
        self._claimed.discard(address)


async def _resolved(named: Address) -> list[str]:
    """Return the addresses of a host, sorted; none while its name is unknown."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(named.host, named.port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return sorted({str(sockaddr[0]) for *_, sockaddr in found})


class HttpCalls:
    """Calls to one pod of ``addresses``, with the API key ``key`` if there is one."""

    many = False

    def __init__(self, addresses: Addresses, key: str | None) -> None:
        self._addresses, self._key = addresses, key
        self._address: Address | None = None
        self._last = "(none yet)"

    def __str__(self) -> str:
        return self._last

    async def hello(self) -> bytes:
        """Return the pod's Hello."""
        if self._address is None:
            self._address = await self._addresses.claim()
            self._last = str(self._address)
        async with asyncio.timeout(HELLO_SECONDS):
            return b"".join([part async for part in self._call("GET", MEMBER, b"")])

    async def generate(self, body: bytes) -> AsyncGenerator[bytes]:
        """Yield the parts of the answer to a request."""
        async for part in self._call("POST", GENERATE, body):
            yield part

    def release(self) -> None:
        """Let go of the pod."""
        if self._address is not None:
            self._addresses.release(self._address)
            self._address = None

    async def _call(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes]:
        address = self._address
        if address is None:
            raise OSError("the pod was let go")
        tls: dict[str, Any] = {}
        if address.tls:
            tls = {"ssl": ssl.create_default_context(), "server_hostname": address.name}
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(address.host, address.port, **tls)
        try:
            key = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
            head = f"{method} {path} HTTP/1.1\r\nHost: {address.name}\r\nConnection: close\r\n{key}"
            writer.write(f"{head}Content-Type: {MEDIA}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = _Answer()
            while not answer.complete:
                data = await reader.read(_CHUNK)
                if not data:
                    raise ConnectionResetError("the connection was closed")
                answer.feed(data)
                if (ok := answer.taken()) and answer.status == 200:
                    yield ok
            if answer.status != 200:
                raise RefusedCall(answer.status, _error(answer))
        finally:
            writer.transport.abort()


class _Answer:
    """An answer as it arrives."""

    def __init__(self) -> None:
        self.complete, self.body = False, bytearray()
        self._parser = httptools.HttpResponseParser(self)

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def feed(self, data: bytes) -> None:
        """Take bytes of the connection. Raises OSError if they are no HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionAbortedError(f"the answer is no HTTP: {error}") from None

    def taken(self) -> bytes:
        """Return the new part of the body; an error's body is kept instead."""
        if self.status != 200:
            if len(self.body) > _MOST_ERROR:
                raise ConnectionAbortedError(f"an error has more than {_MOST_ERROR} bytes")
            return b""
        part, self.body = bytes(self.body), bytearray()
        return part

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


class _ErrorFields(msgspec.Struct):
    message: str = ""
    type: str = ""
    code: str | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


def _error(answer: _Answer) -> WireError:
    """Return the error in a pod's answer."""
    fields = _ErrorFields(f"the pod answered with status {answer.status}")
    with contextlib.suppress(msgspec.MsgspecError):
        fields = msgspec.json.decode(bytes(answer.body), type=_ErrorBody).error
    return WireError.answered(answer.status, fields.code, fields.message, fields.param)


def pods(settings: Settings) -> list[Callable[[], Pod]]:
    """Return functions that find the pods of a front, one for each place. Raises SettingsError for a bad URL."""
    addresses = Addresses(settings.pods)
    key = settings.api_key[0] if settings.api_key else None

    def found() -> Pod:
        return Pod(HttpCalls(addresses, key))

    return [found] * settings.data_parallel_size
