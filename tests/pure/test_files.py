"""Named files are opened as regular files below their folder, and never read without an end."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.cli.common import check_folder
from preheat.cli.prompts import given_prompts
from preheat.configs.adapters import path_below
from preheat.configs.structured import read_preloads
from preheat.errors import AdapterError, ModelError, PreheatError, SettingsError
from preheat.frontend.tokenizer import Tokenizer
from preheat.lora.config import AdapterConfig
from preheat.model.files import read_config, weight_files
from preheat.model.inc_files import read_config as read_inc
from preheat.pooling.pooling import pooling_of
from preheat.server.batches.output import answers_to
from preheat.server.http.listener import check_certificates
from preheat.settings import Settings
from preheat.startup import planned
from preheat.utils import files
from preheat.utils.files import open_file, read_file, read_given, read_json, regular_file, write_output, write_whole
from preheat.utils.log_config import log_as
from preheat.verify.golden import read_golden
from preheat.verify.identity import read_proof
from preheat.verify.replay import read_receipts
from preheat.warmup.store import RECORD, Store
from preheat.warmup.traffic import solved

SECRET, PRINT = b"secret", "0" * 32


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Path]:
    """Write a folder with every kind of entry besides files, and a file outside of the folder."""
    folder = tmp_path / "top"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(SECRET)
    (folder / "plain").write_bytes(b"plain")
    (folder / "to-plain").symlink_to("plain")
    (folder / "out").symlink_to(tmp_path / "outside")
    (folder / "up").symlink_to("..")
    (folder / "round").symlink_to("round")
    (folder / "gone").symlink_to("nothing")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        yield folder


@pytest.mark.parametrize("name", ["plain", "to-plain", "inner/../plain", "up/top/plain"])
def test_files_below_a_folder_are_read(name: str, top: Path) -> None:
    assert read_file(top / name, top) == b"plain"
    assert regular_file(top / name, top) == top / "plain"


@pytest.mark.parametrize(
    "name", ["out", "up/outside", "../outside", "../nothing", "/etc/passwd", "round", "gone", "zero", "pipe", "socket",
             "inner", "", "plain/x", "a\0b", "n" * 300, "d/" * 3000, "\ud800"],
)  # fmt: skip
def test_anything_else_is_refused_at_once(name: str, top: Path) -> None:
    begun = time.process_time()
    for read in (read_file, open_file, regular_file):
        with pytest.raises(OSError, match=r"\w") as refused:
            read(top / name, top)
        assert refused.value.strerror
    assert time.process_time() - begun < 1


def test_an_error_tells_nothing_about_files_outside(top: Path) -> None:
    """An error is the same whether or not a file outside exists."""
    told = set()
    for name in ("../outside", "../nothing", "up/outside", "up/nothing"):
        with pytest.raises(OSError, match="outside the folder") as refused:
            read_file(top / name, top)
        told.add(refused.value.strerror)
    assert len(told) == 1


@given(st.binary(max_size=40), st.integers(0, 40))
def test_no_more_is_read_than_the_limit(tmp_path_factory: pytest.TempPathFactory, data: bytes, most: int) -> None:
    path = tmp_path_factory.getbasetemp() / "limited"
    path.write_bytes(data)
    if len(data) <= most:
        assert read_file(path, most=most) == data
    else:
        with pytest.raises(OSError, match="larger than"):
            read_file(path, most=most)


def test_a_file_that_tells_no_size_has_a_limit_too() -> None:
    with pytest.raises(OSError, match="larger than"):
        read_file("/proc/self/maps", most=10)


def test_a_pipe_of_the_shell_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe of the shell is read if only the command line names it.

    It has limits too: of its size, and of the time that it is silent.
    """
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.01)
    for most, fits in ((100, True), (5, False)):
        reading, writing = os.pipe()
        os.write(writing, b"port: 1\n")
        os.close(writing)
        if fits:
            assert read_given(f"/dev/fd/{reading}", most=most) == "port: 1\n"
        else:
            with pytest.raises(OSError, match="larger than"):
                read_given(f"/dev/fd/{reading}", most=most)
        os.close(reading)
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="nothing came through the pipe"):
        read_given(f"/dev/fd/{reading}")
    os.close(reading)
    os.close(writing)


def test_outputs_never_wait_for_a_reader(top: Path) -> None:
    for write in (write_output, lambda path, _: check_folder("--html", str(path))):
        with pytest.raises((OSError, SettingsError), match="pipe"):
            write(top / "pipe", "x")
    with pytest.raises(SettingsError, match="pipe that nobody reads"), answers_to(str(top / "pipe"), ()):
        pass
    with pytest.raises(OSError, match="not a regular file"):
        write_whole(top / "zero", b"x")
    write_output(top / "plain", "xy")
    write_output("/dev/null", "x")
    assert (top / "plain").read_bytes() == b"xy" and (top / "zero").is_char_device()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, "[]", "{", "1" * 5000, "\ud800", "\xff"])
def test_json_that_is_no_object_is_an_error_of_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1" if text == "\xff" else "utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    write_whole(tmp_path / "x", b"one")
    write_whole(tmp_path / "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"two" and os.listdir(tmp_path) == ["x"]


def _proof(path: Path) -> object:
    return read_proof(str(path))


def _index(path: Path) -> object:
    return weight_files(path.parent)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a model's config": ("config.json", lambda path: read_config(path.parent)),
    "an index": ("model.safetensors.index.json", _index),
    "weights": ("model.safetensors", _index),
    "one of many weights": ("model-00001.safetensors", _index),
    "a tokenizer": ("tokenizer.json", lambda path: Tokenizer(path.parent)),
    "a tokenizer's model": ("tokenizer.model", lambda path: Tokenizer(path.parent)),
    "a tokenizer's config": ("tokenizer_config.json", lambda path: Tokenizer(path.parent)),
    "an adapter's config": ("adapter_config.json", lambda path: AdapterConfig.read(path.parent)),
    "modules": ("modules.json", lambda path: pooling_of(Settings(), path.parent, {})),
    "grammars": ("grammars", lambda path: read_preloads(str(path))),
    "scales": ("quant.json", lambda path: read_inc(str(path))),
    "traffic": ("record.json", solved),
    "a digest": ("record.json", _proof),
    "options": ("options.yaml", lambda path: Settings.load({"config": str(path)})),
    "a log's settings": ("log.json", lambda path: log_as(str(path))),
    "prompts": ("prompts.txt", lambda path: list(given_prompts([], str(path)))),
    "receipts": ("receipts.jsonl", lambda path: read_receipts(str(path))),
    "answers of an earlier boot": ("golden.json", lambda path: read_golden(str(path))),
    "scales of a plan": ("quant.json", lambda path: planned(Settings(quantization="inc", quant_config=str(path)))),
}


KINDS = ("pipe", "zero", "socket", "round", "inner")
PLACES = [(what, kind) for what in READERS for kind in KINDS]
PLACES.remove(("a tokenizer's model", "inner"))  # transformers opens no folder


@pytest.mark.parametrize(("what", "kind"), PLACES)
def test_reading_any_entry_of_a_folder_ends(what: str, kind: str, top: Path) -> None:
    """Reading any entry of a folder ends at once, with an error that names the file."""
    name, read = READERS[what]
    place = top / kind
    renamed = top.parent / name
    place.rename(renamed) if kind != "round" else renamed.symlink_to(name)
    begun = time.process_time()
    with pytest.raises(PreheatError) as refused:
        read(renamed)
    assert name in str(refused.value)
    assert time.process_time() - begun < 2 or what == "a tokenizer's model"  # transformers is imported


@pytest.mark.parametrize("option", ["ssl_keyfile", "ssl_certfile", "ssl_ca_certs"])
@pytest.mark.parametrize("kind", ["pipe", "zero", "inner", "gone"])
def test_certificates_are_files(option: str, kind: str, top: Path) -> None:
    paths = dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"), str(top / "plain"))
    check_certificates(Settings(**paths))
    with pytest.raises(SettingsError, match=f"{option} .*cannot be read"):
        check_certificates(Settings(**paths | {option: str(top / kind)}))


@pytest.mark.parametrize("kind", ["pipe", "zero", "inner"])
def test_a_stored_record_never_stops_a_boot(kind: str, top: Path) -> None:
    (top / PRINT).mkdir()
    (top / kind).rename(top / PRINT / RECORD)
    assert Store(top, PRINT).last is None and Store(top, PRINT).costs() == {}


@pytest.mark.parametrize(
    "names", [{"a": "../outside"}, {"a": "/etc/passwd"}, {"a": "inner/x"}, {"a": ".."}, {"a": 3}, ["a"], {"a": "a\0b"}]
)
def test_an_index_names_files_beside_it(names: object, top: Path) -> None:
    (top / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"index\.json"):
        weight_files(top)


@pytest.mark.parametrize("name", ["out", "up/outside", "pipe", "zero", "gone", "round"])
def test_weights_below_a_folder(name: str, top: Path) -> None:
    """Links out of a checkpoint are followed, as in the Hub's cache, unless a root is given."""
    folder = top / "new"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(top / name)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        weight_files(folder, top)
    if name in ("out", "up/outside"):
        assert weight_files(folder) == weight_files(folder, top.parent) == [folder / "model.safetensors"]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("target", ["out", "pipe", "zero", "round"])
def test_an_adapter_below_a_folder(name: str, target: str, top: Path) -> None:
    folder = top / "adapter"
    folder.mkdir()
    (folder / name).symlink_to(top / target)
    with pytest.raises(AdapterError, match="--lora-root"):
        path_below(str(top), "adapter")


def test_readers_take_proper_files(top: Path) -> None:
    """Control: proper files cause none of the errors above."""
    path = top / "grammars"
    path.write_text('\ufeff{"regex": "a|b", "name": "x"}\n\n{"regex": "\u2028"}\n')
    assert list(read_preloads(str(path))) == ["x", "line 3"]
    (top / "model.safetensors").write_bytes(b"")
    assert weight_files(top, top) == [top / "model.safetensors"]
