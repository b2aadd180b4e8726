"""Options that name files and folders: each says so in its row, and is checked before anything starts."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from preheat import LLM
from preheat.cli.main import main
from preheat.errors import SettingsError
from preheat.server.app import run_server
from preheat.settings import OPTIONS, Settings
from preheat.settings.paths import check_path

PATHS = [opt for opt in OPTIONS.values() if opt.path]
READ_BY_THEMSELVES = {
    "model": "a name of the Hub, too",
    "tokenizer": "a name of the Hub, too",
    "speculative_model": "a name of the Hub, too",
    "chat_template": "the template itself, too",
    "config": "read while the settings are made",
    "root_path": "a part of URLs",
    "uds": "made by the listener, which refuses what is there",
}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    below = {"below a file": "file/x", "missing": "no/x"}
    return {name: str(tmp_path / below.get(name, name)) for name in ("file", "folder", *below)}


def test_every_option_that_names_a_path_says_so() -> None:
    """An option with the name of a file or a folder has its kind, or a reader of its own."""
    named = {
        opt.name for opt in OPTIONS.values()
        if str in opt.kinds and not opt.choices and re.search(r"\b(file|folder|path|directory|key,|certificate,)",
                                                              opt.help, re.IGNORECASE)
    }  # fmt: skip
    assert {opt.name for opt in PATHS} - {"download_dir"} <= named, "the pattern above misses some"
    assert named - {opt.name for opt in PATHS} <= set(READ_BY_THEMSELVES)


@pytest.mark.parametrize("opt", PATHS, ids=lambda opt: opt.name)
def test_a_wrong_path_is_refused_with_the_remedy(opt, places, monkeypatch) -> None:
    """A file for a folder, a folder for a file, nothing at all, or something that may not be read."""
    what, new = str(opt.path).removeprefix("new "), str(opt.path).startswith("new ")
    for name, path in places.items():
        if name == what or (new and name == "missing"):
            check_path(opt, path)
            continue
        with pytest.raises(SettingsError, match=f"^{opt.name} {re.escape(path)} cannot be .*name (a|another) {what}"):
            check_path(opt, path)
    if not new:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(SettingsError, match="change its permissions"):
            check_path(opt, places[what])


def test_every_path_may_begin_at_the_home_folder(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/homes/own")
    given = {opt.name: "~/a" for opt in PATHS}
    adapters = {"lora_root": given.pop("lora_root")}  # not beside measured ranges
    for paths, more in ((given, {"quantization": "inc"}), (adapters, {"enable_lora": True})):
        settings = Settings(**paths, **more)
        assert {getattr(settings, name) for name in paths} == {"/homes/own/a"}


def test_every_start_checks_the_paths(places, capsys) -> None:
    wrong = {"cache_dir": places["file"]}
    for command in ("plan", "doctor", "verify", "warm", "serve"):
        assert main([command, "--cache-dir", places["file"]]) == 2
        assert "cache_dir" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="cache_dir"):
        LLM("bundled", **wrong)
    with pytest.raises(SettingsError, match=r"weights_root .* it is no folder: name a folder"):
        run_server(Settings(weights_root=places["file"], server_dev_mode=True, api_key=("k",)))


def test_a_plan_is_refused_where_a_server_is(tmp_path, capsys) -> None:
    """Options that a plan does not look at are refused as `preheat serve` refuses them."""
    for words, said in (
        (["--generation-config", str(tmp_path)], "holds no generation_config.json"),
        (["--answer-cache-dir", str(tmp_path)], "give answer_cache_size"),
        (["--quantization", "inc", "--quant-config", str(tmp_path / "no")], "quant_config"),
    ):
        for command in ("plan", "doctor"):
            status = main(
                [command, "--device", "cpu", "--port", "0", *words] if command == "doctor" else [command, *words]
            )
            told = capsys.readouterr()
            assert status and said in told.err + told.out, command
