"""URLs of images: reads, and refusals before the first byte is read."""

from __future__ import annotations

import base64
import io
import ipaddress
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import PIL.Image
import pytest

from preheat.errors import InvalidRequest
from preheat.frontend import media
from preheat.frontend.images import CLIP_MEAN, CLIP_STD, Images, PixelConfig
from preheat.frontend.media import MediaReader, is_public

LIMIT = 5_000
BODY = b"x" * 100


class Web(BaseHTTPRequestHandler):
    """Server with an answer for each path, as the path asks for."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        kind, _, rest = self.path[1:].partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", base64.urlsafe_b64decode(rest).decode())
            self.end_headers()
        elif kind == "loop":
            self.send_response(307)
            self.send_header("Location", self.path)
            self.end_headers()
        elif kind == "slow":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b"x")
                time.sleep(0.05)
        elif kind == "endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b"x" * 1000)
        else:
            self.send_response(200 if kind == "ok" else 404)
            self.send_header("Content-Length", str(10**9 if rest == "huge" else len(BODY)))
            self.end_headers()
            self.wfile.write(BODY)

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            pass  # the client has gone


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"localhost:{server.server_port}"
    server.shutdown()
    server.server_close()


def reader(web: str, **more) -> MediaReader:
    """Return a reader that may read from ``web``, which is not public, and from two domains elsewhere."""
    options = {"domains": [web, "example.com", "internal.example"], "max_bytes": LIMIT, "timeout": 5.0}
    return MediaReader(**options | {"public": lambda address: True} | more)


def to(target: str) -> str:
    return f"to/{base64.urlsafe_b64encode(target.encode()).decode()}"


def test_allowed_addresses_are_read(web):
    assert reader(web).read(f"http://{web}/ok") == BODY
    assert reader(web).read(f"http://{web}/{to('/ok/more?a=b')}") == BODY
    assert reader(web).read(f"HTTP://{web.upper()}/ok") == BODY
    assert reader(web).read("data:image/png;base64," + base64.b64encode(BODY).decode()) == BODY


REFUSED = {
    "another domain": ("http://example.org/ok", "not among --allowed-media-domains"),
    "a domain that begins alike": ("http://example.com.evil.org/ok", "not among"),
    "a user that looks like a domain": ("http://example.com@{web}/ok", "of the form"),
    "another port": ("http://example.com:22/ok", "not among"),
    "no host": ("http:///ok", "of the form"),
    "no port": ("http://example.com:x/ok", "not valid"),
    "another scheme": ("ftp://example.com/ok", "scheme 'ftp'"),
    "a program": ("javascript:alert(1)", "scheme 'javascript'"),
    "a path": ("/etc/passwd", "scheme"),
    "not found": ("http://{web}/missing", "status 404"),
    "a redirect to another domain": ("http://{web}/" + to("http://127.0.0.1:1/ok"), "not among"),
    "a redirect to a file": ("http://{web}/" + to("file:///etc/passwd"), "of the form"),
    "a redirect to itself": ("http://{web}/loop", "redirected more than"),
    "too large by its header": ("http://{web}/ok/huge", "more than the 5000 bytes"),
    "too large": ("http://{web}/endless", "more than the 5000 bytes"),
    "a line break": ("http://{web}/ok HTTP/1.1\r\nX: y", "."),
    "data that is no image": ("data:text/html;base64,AAAA", "must begin with data:image"),
    "data that is too large": ("data:image/png;base64," + "A" * 8000, "more than the 5000 bytes"),
    "data that is no base64": ("data:image/png;base64,A*A=", "not valid base64"),
    "data without a comma": ("data:image/png;base64", "must begin with"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(web, name):
    url, message = REFUSED[name]
    url = url.replace("{web}", web)
    with pytest.raises(InvalidRequest, match=message) as refused:
        reader(web).read(url)
    assert refused.value.param == "messages"


def test_nothing_is_fetched_unless_a_domain_is_allowed(web):
    Web.asked.clear()
    with pytest.raises(InvalidRequest, match="--allowed-media-domains"):
        reader(web, domains=()).read(f"http://{web}/ok")
    assert Web.asked == []


def test_no_address_that_is_private(web):
    """No private address is read: by name, as a later address of a name, or by a redirect.

    Nothing is sent.
    """
    Web.asked.clear()
    with pytest.raises(InvalidRequest, match="not a public address"):
        reader(web, public=is_public).read(f"http://{web}/ok")
    assert Web.asked == []


def test_a_redirect_is_checked_again(web, monkeypatch):
    """A redirect to an allowed domain is checked again, here one that resolves to a private address."""
    right = socket.getaddrinfo

    def resolve(host, *args, **more):
        found = right("127.0.0.1", *args, **more)
        if host == "internal.example":
            return [*found[:1], (*found[0][:4], ("169.254.169.254", 80))]
        return found

    monkeypatch.setattr(media.socket, "getaddrinfo", resolve)
    allowed = {ipaddress.ip_address("127.0.0.1")}
    here = reader(web, public=lambda address: address in allowed)
    assert here.read(f"http://{web}/ok") == BODY
    Web.asked.clear()
    with pytest.raises(InvalidRequest, match=r"internal\.example is not a public address"):
        here.read(f"http://{web}/{to('http://internal.example/latest/meta-data')}")
    assert len(Web.asked) == 1


def test_the_address_that_was_checked_is_the_one_that_is_used(web, monkeypatch):
    """The checked address is used, even if the name resolves to another one the second time."""
    right, calls = socket.getaddrinfo, []

    def resolve(host, *args, **more):
        if host == "localhost":
            calls.append(host)
            assert len(calls) == 1, "resolved again"
        return right("127.0.0.1", *args, **more)

    monkeypatch.setattr(media.socket, "getaddrinfo", resolve)
    assert reader(web).read(f"http://{web}/ok") == BODY
    assert calls == ["localhost"]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1",
        "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:0:0:0:0:0:1",
    ],
)  # fmt: skip
def test_not_public(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::808:808"])
def test_public(address):
    assert is_public(ipaddress.ip_address(address))


def test_a_server_that_drips_is_left_in_time(web):
    with pytest.raises(InvalidRequest, match=r"did not answer in full within 0\.3 s"):
        reader(web, timeout=0.3).read(f"http://{web}/slow")  # the server drips for as long as a client reads


def test_files_only_below_their_folder(tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(BODY)
    (allowed / "large.png").write_bytes(b"x" * (LIMIT + 1))
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "allowed-too").mkdir()
    (tmp_path / "allowed-too" / "secret").write_bytes(b"secret")
    (allowed / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(allowed / "pipe")
    here = MediaReader(folder=str(allowed), max_bytes=LIMIT, timeout=1)
    assert here.read(f"file://{allowed}/a%20b.png") == BODY
    outside = [f"{tmp_path}/secret", f"{allowed}/../secret", f"{allowed}/%2e%2e/secret", f"{allowed}-too/secret"]
    for path in [*outside, f"{allowed}/link", f"{allowed}/pipe", f"{allowed}", f"{allowed}/none", f"{allowed}/a%00b"]:
        with pytest.raises(InvalidRequest, match="not there, or not below"):
            here.read(f"file://{path}")
    with pytest.raises(InvalidRequest, match="more than the 5000 bytes"):
        here.read(f"file://{allowed}/large.png")
    with pytest.raises(InvalidRequest, match="file:///"):
        here.read(f"file://example.com{allowed}/large.png")
    with pytest.raises(InvalidRequest, match="--allowed-local-media-path"):
        MediaReader(max_bytes=LIMIT, timeout=1).read(f"file://{allowed}/large.png")


# --- files that are no images, or too much of one ---


@pytest.fixture(scope="module")
def images() -> Images:
    config = PixelConfig(
        shortest_edge=28, height=None, width=None, resample=3, crop=(28, 28), rescale=1 / 255, mean=CLIP_MEAN,
        std=CLIP_STD,
    )  # fmt: skip
    return Images(config, MediaReader(max_bytes=1, timeout=1), size=28, tokens=16, token_id=7, max_pixels=10_000)


def png_of(width: int, height: int) -> bytes:
    """Return the header of a PNG, with hardly any data behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def saved(form: str, size: tuple[int, int] = (30, 20)) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", size, (10, 200, 30)).save(file, form)
    return file.getvalue()


BAD = {
    "nothing": (b"", "cannot be decoded"),
    "text": (b"not an image", "it is no PNG, JPEG"),
    "a format that is not decoded": (saved("TIFF"), "it is no PNG"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is no PNG"),
    "a bomb": (png_of(30_000, 2_000), "30000 x 2000 pixels"),
    "a larger bomb": (png_of(60_000, 60_000), "cannot be decoded: DecompressionBomb"),
    "a long line": (saved("PNG", (1_000, 1)), "resized to 28000 x 28"),
    "half of one": (saved("PNG")[:-30], "cannot be decoded"),
    "half of a photograph": (saved("JPEG")[:-100], "cannot be decoded"),
}


@pytest.mark.parametrize("name", BAD)
def test_undecodable(images, name):
    data, message = BAD[name]
    with pytest.raises(InvalidRequest, match=message) as refused:
        images.decode(data)
    assert refused.value.status == 400


def test_a_turned_photograph_is_turned_back(images):
    file = io.BytesIO()
    picture = PIL.Image.new("RGB", (40, 28))
    picture.paste((255, 0, 0), (0, 0, 20, 28))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # a quarter
    picture.save(file, "PNG", exif=exif)
    upright = picture.transpose(PIL.Image.Transpose.ROTATE_270)
    assert images.decode(file.getvalue()).hash == images.decode(upright).hash != images.decode(picture).hash


def test_an_id_in_the_metadata_of_an_image_is_ignored(images):
    """An id in the EXIF data is ignored.

    vLLM takes it for the image, so that a sender could claim another's.
    """
    found = set()
    for color in (0, 255):
        file, exif = io.BytesIO(), PIL.Image.Exif()
        exif[0xA420] = "00000000000000000000000000000001"  # ImageID
        PIL.Image.new("RGB", (28, 28), (color,) * 3).save(file, "PNG", exif=exif)
        found.add(images.decode(file.getvalue()).hash)
    assert len(found) == 2
