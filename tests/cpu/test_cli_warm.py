"""``preheat warm``: boots, prints the record, writes the page."""

import pytest

from preheat.cli.main import main
from preheat.core import Ready
from preheat.warmup.page import render
from preheat.warmup.record import Record
from tests import records

SMALL = "--no-skip-warmup --max-num-seqs 4 --max-num-batched-tokens 64 --max-model-len 256 --num-threads 1".split()


def test_the_record_as_json_and_as_a_page(tmp_path, capsys):
    page = tmp_path / "record.html"
    status = main(["warm", "bundled", *SMALL, "--json", "--html", str(page)])
    record = Record.from_json(capsys.readouterr().out.encode())
    assert status == 0
    assert record.model == "bundled"
    assert set(record.states) <= {"ready", "dropped"}
    assert {"mixed", "decode", "sampler"} <= {entry.kind for entry in record.entries}
    assert page.read_text() == render(record)


def play(monkeypatch, record):
    """Run the command alone, as if its engine had left ``record``."""

    def boot(settings, transport):
        transport.put(Ready(256, 8, 64, 0.0, record.to_json()))

    monkeypatch.setattr("preheat.startup.boot_engine", boot)


def test_a_failed_item_is_a_failed_command(monkeypatch, capsys):
    play(monkeypatch, records.warmed(records.make()))
    assert main(["warm"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    play(monkeypatch, records.troubled(records.make()))
    assert main(["warm"]) == 1
    assert "FAILED (mixed" in capsys.readouterr().out


def test_a_page_that_cannot_be_written(monkeypatch, capsys, tmp_path):
    play(monkeypatch, records.warmed(records.make()))
    assert main(["warm", "--html", "/dev/full"]) == 1
    shown = capsys.readouterr()
    assert "items, warmed up" in shown.out  # the record is printed, although the page failed
    assert "preheat: error: cannot write /dev/full" in shown.err
    assert main(["warm", "--html", str(tmp_path)]) == 2  # a folder is refused before the boot
    shown = capsys.readouterr()
    assert not shown.out and str(tmp_path) in shown.err


@pytest.mark.parametrize("command", ["warm", "plan"])
def test_the_model_may_be_an_argument(command, capsys):
    assert main([command, "no/such/folder"]) == 1
    assert "no/such/folder" in capsys.readouterr().err
