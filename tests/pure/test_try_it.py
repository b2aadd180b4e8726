"""The page at / is one file that needs nothing else.

It is there unless the server is told otherwise.
"""

import asyncio
import re

import pytest

from preheat.server.app import build_app
from preheat.server.http.service import Service
from preheat.server.operations.try_it import _FILE, _hash
from preheat.settings import Settings


def get(path: str, **options: object) -> tuple[int, dict[str, str]]:
    """Return status and headers of an answer, before the engine is there."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b""}

    service = Service(Settings.load({"model": "bundled", **options}), lambda message: None)
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "http_version": "1.1"}
    asyncio.run(build_app(service)(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def test_the_page_is_served_at_once_and_without_a_key():
    status, headers = get("/", api_key=["secret"])
    assert status == 200 and headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", policy[kind]) for kind in ("script-src", "style-src"))


def test_no_ui_removes_the_page():
    assert get("/", ui=False)[0] == 405  # texts may still be posted there
    assert get("/live", ui=False)[0] == 200


def test_the_page_loads_no_other_file():
    page = _FILE.read_text()
    assert re.findall(r"""(?:src|href)=["']([^"']*)""", page) == [
        "data:,",
        "warmup?format=html",
        "metrics",
        "openapi.json",
    ]
    assert not re.search(r"https?:|@import|url\(|\sstyle=|\son\w+=\"", page)


def test_its_hash_is_that_of_one_element():
    assert _hash(b"<style>a</style>", b"style") == "'sha256-ypeBEsobvcr6wjGzmiPcTaeG7/gUfE5yuYB3ha/uSLs='"
    with pytest.raises(ValueError, match="unpack"):
        _hash(b"<style>a</style><style>b</style>", b"style")
