"""The page at / in a real browser: chats, tokens, tools, and answers asked for again beside other requests."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.browser import Tab, find, tab
from tests.api.conftest import Server, serving
from tests.api.test_messages import ALL, TOOL
from tests.api.test_warmup_page import CONTRAST

BROWSER = find()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path (Debian: apt install chromium)")


@pytest.fixture(scope="module")
def page() -> Iterator[Tab]:
    assert BROWSER is not None
    with tab(BROWSER) as opened:
        yield opened


def wait_for(page: Tab, expression: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not page.value(f"!!({expression})"):
        assert time.monotonic() < end, (expression, page.complaints, page.value("document.body.innerText"))
        time.sleep(0.05)


def opened(page: Tab, server: Server, **how: Any) -> None:
    page.open(f"{server.url}/", **how)
    wait_for(page, "$('state').textContent.startsWith('ready')")


def fill(page: Tab, **values: object) -> None:
    for id, value in values.items():
        page.value(f"$({id!r}).value = {json.dumps(value)}")


def ask(page: Tab, text: str, **options: object) -> None:
    """Send ``text`` and wait for the end of the answer."""
    fill(page, text=text, **options)
    answers = page.value("document.querySelectorAll('.answer').length")
    page.value("$('composer').requestSubmit()")
    wait_for(page, f"document.querySelectorAll('.answer[aria-busy=false]').length === {answers + 1}")


def last(page: Tab, selector: str) -> str:
    found = f"[...[...document.querySelectorAll('.answer')].at(-1).querySelectorAll({selector!r})].at(-1)"
    return str(page.value(f"{found}.textContent"))


def test_a_browser_lets_it_call_its_server_only(page: Tab, scripted: Server) -> None:
    policy = scripted.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    opened(page, scripted)
    assert all(url.startswith((scripted.url, "data:")) for url in page.requests)
    assert page.complaints == []
    page.value("document.body.insertAdjacentHTML('beforeend', '<img src=http://127.0.0.1:9/x.png onerror=alert()>')")
    wait_for(page, "true")
    end = time.monotonic() + 10
    while not any("Content Security Policy" in said for said in page.complaints) and time.monotonic() < end:
        page.value("1")
    assert any("Content Security Policy" in said for said in page.complaints)


@pytest.mark.parametrize("width", [1240, 390])
def test_a_chat_and_its_tokens(page: Tab, scripted: Server, width: int) -> None:
    opened(page, scripted, width=width)
    ask(page, "Hi <b>☃</b>", max_tokens="40")
    message = "Hi <b>☃</b>"
    assert page.value("document.querySelector('.said').textContent") == message
    assert message in last(page, ".tokens.content")  # the engine repeats the prompt, and text is never markup
    assert "40 written" in last(page, ".stats") and "tokens/s" in last(page, ".stats")
    spans = page.value("[...document.querySelectorAll('.token')].map((each) => [each.textContent, each.tokens.length])")
    assert ["☃", 3] in spans  # three tokens, one for each byte
    page.value("document.querySelector('.token').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))")
    tip = page.value("$('tip').innerText")
    assert "60.7 %" in tip and "22.3 %" in tip and "logprob -0.5" in tip
    page.value("document.querySelector('.tokens').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.value(
            "document.activeElement.dispatchEvent("
            f"new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true, cancelable: true}}))"
        )
    assert page.value("document.querySelector('.token.on') === document.querySelectorAll('.token')[1]")
    page.value("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}))")
    assert page.value("$('tip').hidden")
    assert page.value("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert page.complaints == []


def test_options_are_fields_of_the_request(page: Tab, scripted: Server) -> None:
    opened(page, scripted)
    fill(page, temperature="0.5", top_p="0.9", seed="7", stops="a\nb", system="Be brief.", schema='{"type": "object"}')
    fill(page, tools=json.dumps([{"type": "function", "function": {"name": "f"}}]), choice="none")
    page.value("messages = [{role: 'user', content: 'x'}]")
    body = json.loads(page.value("JSON.stringify(request())"))
    assert (body["temperature"], body["top_p"], body["seed"], body["stop"]) == (0.5, 0.9, 7, ["a", "b"])
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert body["tools"][0]["function"] == {"name": "f"} and body["tool_choice"] == "none"
    assert "top_k" not in body and "cache_salt" not in body
    ask(page, "x", tools="[")
    assert "The list of tools is not JSON" in last(page, ".error")
    ask(page, "x", tools="", schema="", temperature="-1")
    assert "temperature" in last(page, ".error")  # the server's words


def test_an_image_is_a_part_of_the_message(page: Tab, scripted: Server) -> None:
    opened(page, scripted)
    page.value("images = ['data:image/png;base64,iVBORw0KGgo=']; showThumbs()")
    ask(page, "What is it?")
    parts = page.value("messages[0].content.map((part) => part.type)")
    assert parts == ["image_url", "text"]
    assert "image" in last(page, ".error")  # this model sees none, and says so


def test_reasoning_calls_and_results(page: Tab, talker: Server) -> None:
    opened(page, talker)
    function = {"name": "weather", "parameters": TOOL["input_schema"]}
    ask(page, ALL, tools=json.dumps([{"type": "function", "function": function}]), max_tokens="200")
    assert "Well." in last(page, ".tokens.reasoning") and "see." in last(page, ".tokens.content")
    said = page.value("messages.at(-1)")  # one event may end the reasoning and begin the content
    assert (said["reasoning"], said["content"]) == ("Well.", "Let me see.")
    assert "weather" in last(page, ".tokens.calls")
    assert last(page, ".results pre") == 'weather({"city": "Oslo"})'
    page.value("document.querySelector('.results textarea').value = 'rain'")
    page.value("document.querySelector('.results').requestSubmit()")
    wait_for(page, "document.querySelectorAll('.answer[aria-busy=false]').length === 2")
    assert "rain" in last(page, ".tokens.content")
    roles = page.value("messages.map((message) => message.role)")
    assert roles == ["user", "assistant", "tool", "assistant"]


def test_answers_beside_other_requests_are_the_same(page: Tab, server: Server) -> None:
    opened(page, server)
    ask(page, "Tell me about a lake. " * 100, max_tokens="8", temperature="1")
    page.value("document.querySelector('button.asks').click()")
    wait_for(page, "/good|bad/.test(document.querySelector('.verdict')?.className)", 120)
    assert last(page, ".verdict") == "6 of 6 are the same to the last bit."
    table = "[...document.querySelectorAll('.digests tbody tr')].map((row) => [...row.cells].map((e) => e.textContent))"
    rows = page.value(table)
    cached, digests = [int(row[1]) for row in rows], {tuple(row[4:6]) for row in rows}
    assert len(rows) == 6 and len(digests) == 1
    assert cached[1] > cached[3] > 0 and cached[2] == cached[5] == 0, cached  # all of it, half of it, nothing
    assert page.complaints == []


def test_one_bit_makes_another_digest(page: Tab, scripted: Server) -> None:
    """Control of the test above: one changed bit gives another digest on the page."""
    opened(page, scripted)
    given = {"id": 5, "logprob": -0.5, "top_logprobs": [{"bytes": [65], "logprob": -0.5}]}
    found = {"tokens": [given, given], "wait": 1}
    for change, place in (({"logprob": -0.5000000000000001}, 1), ({"id": 6}, 0), ({"top_logprobs": []}, 1)):
        other = {"tokens": [given, given], "wait": 1}
        other["tokens"][place] = given | change  # type: ignore[index]
        said = page.value(f"line('x', {json.dumps(other)}, {json.dumps(found)})[0].lastChild.textContent")
        assert said == f"no, from token {place + 1} on"
    assert page.value(f"line('x', {json.dumps(found)}, {json.dumps(found)})[1]") is True


def test_its_digests_are_sha_256(page: Tab, scripted: Server) -> None:
    opened(page, scripted)
    for text in ("", "abc", "é" * 27, "x" * 55, "x" * 56, "x" * 64, "y" * 1000):
        assert page.value(f"sha256({json.dumps(text)})") == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read_in_the_light_and_in_the_dark(page: Tab, scripted: Server, dark: bool) -> None:
    opened(page, scripted, dark=dark)
    ask(page, "Hi", max_tokens="8")
    background = page.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 128) is dark
    selector = "h1, h2, p, summary, label, button.main, .said, .tokens"
    assert page.value(CONTRAST.replace("h1, h2, h3, p,", f"{selector},")) >= 4.5


def test_the_key_is_asked_for_once(page: Tab, folder: Path) -> None:
    with serving(str(folder), api_key=["secret"], served_model_name=["m"]) as locked:
        assert locked.get("/").status == 200 and locked.get("/v1/models").status == 401
        page.open(f"{locked.url}/")
        for key in ("wrong", "secret"):
            wait_for(page, "$('ask-key').open")
            page.value(f"$('key').value = {key!r}; document.querySelector('#ask-key form').requestSubmit()")
        wait_for(page, "$('state').textContent.startsWith('ready')")
        ask(page, "Hi", max_tokens="4")
        opened(page, locked)
        assert not page.value("$('ask-key').open") and page.value("localStorage.length") == 0
