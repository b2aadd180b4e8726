"""The record as a page and as text, as far as that can be told without a browser."""

import re

import pytest

from preheat.core import Progress
from preheat.warmup.page import MOST_DROPPED, render, render_progress
from preheat.warmup.record import ItemRecord, Record
from preheat.warmup.report import describe
from tests import records


@pytest.fixture(scope="module")
def record():
    return records.troubled(records.make())


def test_the_page_is_one_file(record):
    page = render(record)
    assert page == render(Record.from_json(record.to_json()))  # and a function of only the record
    links = re.findall(r"(?:src|href|url|@import|action)\s*[=(]\s*[\"']?([^\"')\s>]+)", page)
    assert links
    assert [link for link in links if not link.startswith(("#i", "data:,"))] == []


def test_the_check_for_links_can_fail():
    assert re.findall(r"(?:src|href|url|@import|action)\s*[=(]\s*[\"']?([^\"')\s>]+)", "<img src='x.png'>") == ["x.png"]


@pytest.mark.parametrize(
    ("change", "style", "word"),
    [
        ({}, "good", "Hot"),
        ({"misses": {"(decode, 9)": 1}}, "warn", "Hot"),
        ({"cold": {"first run": 2}}, "bad", "Cold"),
        ({"cold": {"first run": 0}}, "good", "Hot"),
    ],
)
def test_the_verdict_is_the_worst_there_is_to_say(change, style, word):
    record = records.warmed(records.make())
    for name, value in change.items():
        setattr(record, name, value)
    assert f'<p class="verdict {style}"><b>{word}</b>' in render(record)


def test_sources_without_events_are_not_named():
    record = records.troubled(records.make())
    record.cold["graph capture"] = 0
    page = render(record)
    assert "allocator <b>1</b>" in page
    assert "graph capture" not in page


def test_pending_and_failed_items_are_no_success():
    record = records.warmed(records.make())
    record.entries[0].outcome = "pending"
    assert '"verdict warn"><b>Not warmed up</b>1 item will' in render(record)
    record.entries[1].outcome = "failed"
    assert '"verdict bad"><b>1 failed</b>' in render(record)


def test_an_empty_record_has_a_page():
    assert "No times were recorded" in render(Record())
    assert describe(Record())


def test_a_table_stays_readable():
    """A table stays readable: it shows few of the dropped candidates, and all other entries."""
    entries = [ItemRecord(f"(decode, {i})", "decode", {"rows": i}, outcome="dropped") for i in range(MOST_DROPPED + 7)]
    record = Record(entries=[*entries, ItemRecord("(decode, 9999)", "decode", {"rows": 9999}, outcome="failed")])
    page = render(record)
    assert page.count("<tr id=") == MOST_DROPPED + 1
    assert "7 more that were dropped" in page
    assert f'<tr id="i{MOST_DROPPED + 7}" class="failed"' in page


def test_progress():
    page = render_progress(Progress(12, 40, "(decode, <8>)", 2.5), "a & b")
    assert '<meta http-equiv="refresh"' in page
    assert "width:30%" in page
    assert "(decode, &lt;8&gt;)" in page and "a &amp; b" in page and "about 2.5 s left" in page
    assert "width:0%" in render_progress(Progress(0, 0, ""), "x")


def test_the_record_as_text(record):
    text = describe(record)
    assert "org/model-8b · cpu · bfloat16 · eager · unified policy · exponential" in text
    assert f"FAILED {record.entries[1].name}: RuntimeError: <out> of memory & patience" in text
    assert "cold: first run, 2 times" in text and "missed: (decode, 99), 12 times" in text
    header = next(line for line in text.splitlines() if line.startswith("kind"))
    decode = next(line for line in text.splitlines() if line.startswith("decode"))
    ready = sum(entry.outcome == "ready" for entry in record.entries if entry.kind == "decode")
    assert decode.split()[header.split().index("ready")] == str(ready)
    assert "FAILED" not in describe(records.warmed(records.make()))
