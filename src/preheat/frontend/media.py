"""Read images by URL, with bounds on source, size and time.

A ``data:`` URL is always read. ``http(s)://`` is read only from allowed domains, through a public address: the checked
address is the one that is connected to, and every redirect is checked again. ``file://`` is read only below one folder.
Nothing here imports torch.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from preheat.errors import InvalidRequest
from preheat.utils.base64 import decode_base64
from preheat.utils.files import open_file

MAX_REDIRECTS = 5
PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = ipaddress.ip_network("64:ff9b::/96")
CHUNK = 1 << 16
MOST_HEADER = 1024
"""Most characters of a data URL before its base64."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Return whether ``address`` belongs to the internet.

    False for private, local and reserved addresses, and for addresses that lead to such an address.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.teredo is not None or (inner is not None and not is_public(inner)):
            return False
        if inner is not None:
            return True
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


class MediaReader:
    """Reader of URLs: at most ``max_bytes`` bytes each, within ``timeout`` seconds.

    ``domains`` are hosts, or ``host:port`` where the port is not the scheme's usual one. Files are read only below
    ``folder``. ``public`` decides whether an address may be connected to.
    """

    def __init__(
        self,
        *,
        domains: Collection[str] = (),
        folder: str | None = None,
        max_bytes: int,
        timeout: float,
        public: Callable[[Address], bool] = is_public,
    ) -> None:
        self._domains = {domain.lower().rstrip(".") for domain in domains}
        self._folder = None if folder is None else Path(folder).expanduser().resolve()
        self._max_bytes, self._timeout, self._public = max_bytes, timeout, public

    def read(self, url: str) -> bytes:
        """Return the bytes behind ``url``. Raises InvalidRequest, with the remedy. May wait for the network."""
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return self._from_data(url)
        try:
            if scheme == "file":
                return self._from_file(urlsplit(url))
            if scheme in PORTS:
                return self._from_web(url)
        except ValueError as error:  # of urlsplit, for an invalid host or port
            raise _refused(f"the URL is not valid: {error}") from error
        raise _refused(f"URLs of scheme {scheme[:20]!r} are not read; send a data: URL")

    def _from_data(self, url: str) -> bytes:
        comma = url.find(",", 0, MOST_HEADER)
        kind, *options = url[5 : max(comma, 5)].lower().split(";")
        if not kind.startswith("image/") or "base64" not in options:
            raise _refused("a data URL must begin with data:image/…;base64,")
        if (len(url) - comma - 1) // 4 * 3 > self._max_bytes + 2:
            raise self._too_large()
        try:
            return decode_base64(url, comma + 1)
        except ValueError as error:
            raise _refused(f"the data URL is not valid base64: {error}") from error

    def _from_file(self, url: SplitResult) -> bytes:
        if self._folder is None:
            raise _refused("files are not read; start the server with --allowed-local-media-path, or send a data: URL")
        if url.netloc not in ("", "localhost"):
            raise _refused("a file URL must begin with file:///")
        try:
            with open_file(unquote(url.path), self._folder) as file:
                data = file.read(self._max_bytes + 1)
        except OSError as error:  # one answer for all: it tells nothing about other files
            raise _refused("the file is not there, or not below --allowed-local-media-path") from error
        if len(data) > self._max_bytes:
            raise self._too_large()
        return data

    def _from_web(self, url: str) -> bytes:
        end = time.monotonic() + self._timeout
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._fetch(self._allowed(url), end)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
        raise _refused(f"the URL is redirected more than {MAX_REDIRECTS} times")

    def _allowed(self, url: str) -> SplitResult:
        """Return the parts of ``url``. Raises InvalidRequest unless its domain is allowed."""
        parts = urlsplit(url)
        if parts.scheme not in PORTS or not parts.hostname or "@" in parts.netloc:
            raise _refused("it must be a URL of the form http(s)://host/path, also after a redirect")
        host, port = parts.hostname.rstrip("."), parts.port or PORTS[parts.scheme]
        name = host if port == PORTS[parts.scheme] else f"{host}:{port}"
        if name not in self._domains:
            raise _refused(
                f"{name[:100]!r} is not among --allowed-media-domains; send a data: URL, or start the server with it"
            )
        return parts

    def _fetch(self, url: SplitResult, end: float) -> bytes | str:
        """Return the body, or the target of a redirect."""
        try:
            with self._connected(url, end) as connection:
                target = (url.path or "/") + (f"?{url.query}" if url.query else "")
                connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "preheat"})
                with connection.getresponse() as response:
                    location = response.getheader("Location")
                    if response.status in REDIRECTS and location:
                        return location
                    if response.status != 200:
                        raise _refused(f"{url.hostname} answers with status {response.status}")
                    data = self._body(response, end)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            if time.monotonic() < end:
                raise _refused(f"{url.hostname} cannot be read: {type(error).__name__}") from error
            data = b""
        if time.monotonic() >= end:  # the data read until now may be a part
            raise _refused(f"{url.hostname} did not answer in full within {self._timeout:g} s (--image-fetch-timeout)")
        return data

    def _body(self, response: http.client.HTTPResponse, end: float) -> bytes:
        if response.length is not None and response.length > self._max_bytes:
            raise self._too_large()
        data = bytearray()
        while time.monotonic() < end and (part := response.read1(CHUNK)):
            data += part
            if len(data) > self._max_bytes:
                raise self._too_large()
        return bytes(data)

    @contextmanager
    def _connected(self, url: SplitResult, end: float) -> Iterator[_Pinned]:
        """Yield a connection that is closed at ``end``, whatever its other side does."""
        assert url.hostname is not None
        port = url.port or PORTS[url.scheme]
        connection = _Pinned(url.hostname, port, self._address(url.hostname, port), url.scheme == "https", end)
        watch = threading.Timer(max(end - time.monotonic(), 0.0), connection.abort)
        watch.daemon = True
        watch.start()
        try:
            yield connection
        finally:
            watch.cancel()
            connection.close()

    def _address(self, host: str, port: int) -> str:
        """Return the first address of ``host``. Raises InvalidRequest unless all its addresses are public."""
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        for address in found:
            if not self._public(ipaddress.ip_address(address.partition("%")[0])):
                raise _refused(f"{host} is not a public address")
        return found[0]

    def _too_large(self) -> InvalidRequest:
        return _refused(f"it has more than the {self._max_bytes} bytes that --max-image-bytes allows")


class _Pinned(http.client.HTTPConnection):
    """A connection to ``address``, whatever ``host`` resolves to by now."""

    def __init__(self, host: str, port: int, address: str, tls: bool, end: float) -> None:
        super().__init__(host, port, timeout=max(end - time.monotonic(), 0.001))
        self.default_port = PORTS["https" if tls else "http"]
        self._address, self._tls = address, tls
        self._open: socket.socket | None = None  # outlives `sock`: that is dropped once an answer has begun

    def connect(self) -> None:
        self.sock = self._open = socket.create_connection((self._address, self.port), self.timeout)
        if self._tls:
            context = ssl.create_default_context()
            wrapped = context.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
            self.sock = self._open = wrapped
            wrapped.do_handshake()

    def abort(self) -> None:
        """End the connection from another thread."""
        if self._open is not None:
            with suppress(OSError):
                self._open.shutdown(socket.SHUT_RDWR)


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The image cannot be read: {reason}", param="messages")
