"""The record's page in a real browser.

It is read from a disk and from a server, with and without scripts, light and dark.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat.warmup.page import render
from preheat.warmup.record import Record
from tests import records
from tests.api.browser import Tab, find, tab
from tests.api.conftest import Server, serving, write_model

BROWSER = find()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path (Debian: apt install chromium)")

CONTRAST = """
(() => {
  const light = (color) => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return color === "rgba(0, 0, 0, 0)" ? behind(element.parentElement) : color;
  };
  const ratio = (element) => {
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const shown = [...document.querySelectorAll("h1, h2, h3, p, dt, dd, li, th, td.name, td.n, .verdict b")];
  return Math.min(...shown.filter((element) => element.textContent.trim()).map(ratio));
})()
"""
"""Least contrast of any text, by the rule of WCAG 2."""


@pytest.fixture(scope="module")
def page() -> Iterator[Tab]:
    assert BROWSER is not None
    with tab(BROWSER) as opened:
        yield opened


@pytest.fixture(scope="module")
def record() -> Record:
    split = {"bucketing_policy": "split", "bucketing_strategy": "linear"}
    return records.troubled(records.make(split))


@pytest.fixture(scope="module")
def file(record: Record, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "record.html"
    path.write_text(render(record), encoding="utf-8")
    return path.as_uri()


def rows(page: Tab) -> int:
    """Return the visible lines of the table."""
    return int(page.value("[...document.querySelectorAll('#items tbody tr')].filter((r) => r.offsetHeight).length"))


def test_the_page_is_one_file_without_requests(page: Tab, file: str, record: Record) -> None:
    page.open(file)
    assert [url for url in page.requests if not url.startswith("data:")] == [file]
    assert page.complaints == []
    assert page.value("document.querySelector('h1').innerText") == "org/model-8b"
    assert page.value("document.querySelector('.verdict').className") == "verdict bad"
    assert page.value("document.querySelectorAll('.cell').length") == len(record.entries)
    assert page.value("document.querySelectorAll('#boot svg rect.touch').length") > 100
    text = page.value("document.body.innerText")
    for said in ("<out> of memory & patience", "(decode, 99)", "allocator", "kv cache", "16 GiB", "f00d"):
        assert said in text


def test_the_browser_notices_requests_and_errors_of_a_page(page: Tab, tmp_path: Path) -> None:
    """Control of the test above: the browser notices a page that asks for an address or fails."""
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/x.png'><script>nothing.there()</script>")
    page.open(bad.as_uri())
    assert "http://127.0.0.1:9/x.png" in page.requests
    assert any("nothing is not defined" in said for said in page.complaints)


def test_the_page_is_complete_without_scripts(page: Tab, file: str, record: Record) -> None:
    page.open(file, scripts=False)
    assert rows(page) == len(record.entries)
    assert page.value("document.querySelectorAll('.cell').length") == len(record.entries)
    assert page.value("document.querySelector('.tools').offsetHeight") == 0


def test_filter_and_sort(page: Tab, file: str, record: Record) -> None:
    page.open(file)
    assert rows(page) == len(record.entries)

    def choose(selector: str, value: str) -> None:
        found = f"document.querySelector('#items {selector}')"
        page.value(f"{found}.value = {value!r}; {found}.dispatchEvent(new Event('input'))")

    choose("select[aria-label=State]", "failed")
    assert rows(page) == 1
    assert "patience" in page.value("document.querySelector('#items tbody tr:not([hidden])').innerText")
    choose("select[aria-label=State]", "")
    choose("select[aria-label=Kind]", "decode")
    decodes = [entry for entry in record.entries if entry.kind == "decode"]
    assert rows(page) == len(decodes)
    choose("input", "decode nowhere")
    assert rows(page) == 0
    choose("input", "")
    header = "document.querySelectorAll('#items th')[6].click()"
    page.value(f"{header}; {header}")
    first = page.value("document.querySelector('#items tbody tr:not([hidden])').cells[6].dataset.value")
    assert int(first) == max(entry.hits for entry in decodes)


def test_a_cell_leads_to_its_line(page: Tab, file: str, record: Record) -> None:
    page.open(file)
    index = next(i for i, entry in enumerate(record.entries) if entry.outcome == "failed")
    title = page.value("document.querySelector('.cell.failed title').textContent")
    assert record.entries[index].name in title and "failed" in title
    target = page.value("document.querySelector(document.querySelector('.cell.failed').getAttribute('href')).innerText")
    assert record.entries[index].name in target


@pytest.mark.parametrize("width", [1240, 420])
def test_nothing_is_wider_than_the_window(page: Tab, file: str, width: int) -> None:
    page.open(file, width=width)
    assert page.value("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read_in_the_light_and_in_the_dark(page: Tab, file: str, dark: bool) -> None:
    page.open(file, dark=dark)
    background = page.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 128) is dark
    assert page.value(CONTRAST) >= 4.5
    page.value("document.body.insertAdjacentHTML('beforeend', '<p style=\"color:#888;background:#999\">x</p>')")
    assert page.value(CONTRAST) < 2  # the control


def test_text_is_never_markup(page: Tab, tmp_path: Path, record: Record) -> None:
    evil = "</script><img src=x onerror=document.title='taken'>{{ 7 * 7 }}"
    hostile = Record.from_json(record.to_json())
    hostile.model = hostile.entries[0].name = hostile.entries[0].reason = hostile.notes[0] = evil
    hostile.misses = hostile.memory = {evil: 1}
    path = tmp_path / "evil.html"
    path.write_text(render(hostile))
    page.open(path.as_uri())
    assert page.value("document.querySelector('h1').innerText") == evil
    assert page.value("document.querySelectorAll('img').length") == 0
    assert page.complaints == []


def wait_for(page: Tab, expression: str, seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while not (found := page.value(expression)):
        assert time.monotonic() < end, expression
        time.sleep(0.05)
    return found


def test_the_served_page_counts_hits(page: Tab, scripted: Server) -> None:
    def served() -> int:
        page.open(f"{scripted.url}/warmup")
        title = page.value("document.querySelector('.cell title').textContent")
        return int(title.split(" hits")[0].split()[-1].replace(",", ""))

    before = served()
    assert scripted.post("/v1/completions", {"prompt": "x", "max_tokens": 5, "ignore_eos": True}).status == 200
    assert served() >= before + 5
    assert page.complaints == []


def test_from_progress_to_record(page: Tab, tmp_path: Path) -> None:
    model = write_model(tmp_path)
    with serving(str(model), engine="tests.api.scripted:run_waiting_engine", wait=False) as server:
        server.wait_until_open()
        page.open(f"{server.url}/warmup")
        wait_for(page, "document.body?.innerText.includes('12 of 40 items')")
        assert page.value("document.querySelector('.meter i').style.width") == "30%"
        (tmp_path / "go").touch()
        wait_for(page, "document.querySelectorAll('.cell').length")  # it has asked for itself again
