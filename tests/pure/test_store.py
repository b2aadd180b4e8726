"""The store: the same boot finds its records, another does not.

None of its contents can stop a boot.
"""

import dataclasses
import logging
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.limits import Limits
from preheat.model.files import BUNDLED_PATH, weight_files
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.settings import Settings
from preheat.utils.caches import cache_root
from preheat.warmup import store as store_module
from preheat.warmup.record import ItemRecord, Record
from preheat.warmup.store import RECORD, DevicePart, ModelPart, Store, boot_parts, file_part, fingerprint

LIMITS = Limits(
    max_model_len=256, max_num_seqs=8, max_num_batched_tokens=128, max_num_prefill_seqs=None, block_size=64,
    num_blocks=33,
)  # fmt: skip
MODEL = ModelPart(BUNDLED_PATH, weight_files(BUNDLED_PATH), "bfloat16")
DEVICE = DevicePart(("cpu", "AVX512"), 2, "eager")
PLAIN = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text())


def plan(limits=LIMITS, **options):
    return make_plan(limits, PlanOptions(**options))


def parts(made=None, folder=BUNDLED_PATH, **changes):
    model, device = MODEL._replace(folder=folder, weights=weight_files(folder)), DEVICE
    model = model._replace(**{name: value for name, value in changes.items() if name in ModelPart._fields})
    device = device._replace(**{name: value for name, value in changes.items() if name in DevicePart._fields})
    return boot_parts(model, device, made or plan())


def record(seconds=1.0):
    spent = {"compile_seconds": seconds, "touch_seconds": 0.25}
    done = ItemRecord("(decode, 8)", "decode", {"rows": 8}, outcome="ready", **spent)
    warm = ItemRecord("(decode, 4)", "decode", {"rows": 4}, outcome="reused", touch_seconds=0.5)
    bad = ItemRecord("(decode, 2)", "decode", {"rows": 2}, outcome="failed", reason="no", touch_seconds=9.0)
    return Record(model="m", entries=[done, warm, bad], created=1.0)


@given(st.dictionaries(st.text(), PLAIN, min_size=1))
def test_the_order_of_parts_is_no_part_and_every_value_is(given_parts):
    assert fingerprint(dict(reversed(given_parts.items()))) == fingerprint(given_parts)
    key = next(iter(given_parts))
    assert fingerprint({**given_parts, key: [given_parts[key]]}) != fingerprint(given_parts)
    assert fingerprint({k: v for k, v in given_parts.items() if k != key}) != fingerprint(given_parts)


def test_parts_that_are_no_data_are_refused():
    with pytest.raises(TypeError):
        fingerprint({"device": object()})


def test_the_same_boot_has_the_same_fingerprint():
    assert fingerprint(parts()) == fingerprint(parts())
    assert len(fingerprint(parts())) == 32


CHANGES = {
    "dtype": lambda: parts(dtype="float32"),
    "device": lambda: parts(platform=("cuda", "AVX512")),
    "instruction set": lambda: parts(platform=("cpu", "AVX2")),
    "threads": lambda: parts(threads=1),
    "mode": lambda: parts(mode="compile"),
    "plan": lambda: parts(plan(bucketing_strategy="linear")),
    "options": lambda: parts(plan(enable_prefix_caching=False)),
    "limits": lambda: parts(plan(dataclasses.replace(LIMITS, max_model_len=192))),
    "determinism passes": lambda: parts(plan(determinism_warmup_iterations=4)),
    "overrides of the config": lambda: parts(overrides={"rope_theta": 5e5}),
    "dummy weights": lambda: parts(weights=[]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_any_change_is_another_boot(what, tmp_path):
    Store(tmp_path, fingerprint(parts())).save(record())
    assert Store(tmp_path, fingerprint(parts())).last is not None
    assert Store(tmp_path, fingerprint(CHANGES[what]())).last is None


@pytest.mark.parametrize("name", ["preheat", "python", "torch"])
def test_another_version_is_another_boot(name, monkeypatch):
    before = fingerprint(parts())
    found = store_module.versions()
    assert found[name]
    monkeypatch.setattr(store_module, "versions", lambda: {**found, name: "0.0.0"})
    assert fingerprint(parts()) != before


def test_free_memory_alone_changes_nothing():
    """Free memory alone changes no fingerprint.

    Items that depend on the number of blocks have other names. The number of blocks follows the free memory from boot
    to boot.
    """
    more = dataclasses.replace(LIMITS, num_blocks=40)
    assert fingerprint(parts(plan(more))) == fingerprint(parts())
    split = {"bucketing_policy": "split"}
    few = dataclasses.replace(LIMITS, num_blocks=5)  # four rows at most
    assert fingerprint(parts(plan(few, **split))) != fingerprint(parts(plan(**split)))


def checkpoint(folder, *, numbers=bytes(1 << 20), header=b'{"a": 1}', name="model.safetensors", config="{}"):
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + numbers)
    return folder


@pytest.mark.parametrize(
    "other",
    [
        {"config": '{"rope_theta": 1}'},
        {"header": b'{"b": 1}'},
        {"name": "other.safetensors"},
        {"numbers": bytes((1 << 20) + 1)},
        {"numbers": bytes([7]) * (1 << 20)},
        {"numbers": bytes((1 << 20) - 1) + b"x"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_model_is_another_boot(other, tmp_path):
    one, same = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "same")
    assert fingerprint(parts(folder=one)) == fingerprint(parts(folder=same))  # wherever it lies
    assert fingerprint(parts(folder=checkpoint(tmp_path / "other", **other))) != fingerprint(parts(folder=one))


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 2**60) + b"{}"])
def test_a_file_that_is_no_checkpoint_has_a_fingerprint_too(content, tmp_path):
    path = tmp_path / "odd.safetensors"
    path.write_bytes(content)
    assert file_part(path)[:2] == ["odd.safetensors", len(content)]


def test_a_second_boot_reuses_items_that_ran(tmp_path):
    first = Store(tmp_path, "f")
    assert first.last is None
    assert first.costs() == {}
    first.save(record())
    second = Store(tmp_path, "f")
    kept = second.last
    assert kept == msgspec.structs.replace(record(), fingerprint="f")
    assert second.costs() == {"(decode, 8)": 1.25, "(decode, 4)": 0.5}
    second.save(record(2.0))
    assert Store(tmp_path, "f").costs()["(decode, 8)"] == 2.25
    assert second.folder == tmp_path / "f"


def torn(path):
    path.write_bytes(path.read_bytes()[:-20])


def foreign(path):
    path.write_bytes(path.read_bytes().replace(b'"fingerprint":"f"', b'"fingerprint":"g"'))


def other_json(path):
    path.write_text('{"entries": 3}')


def without_owner(path):
    path.write_text("{}")


def unreadable(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [torn, foreign, other_json, without_owner, unreadable])
def test_a_torn_or_foreign_record_is_ignored_with_a_warning(harm, tmp_path, caplog):
    Store(tmp_path, "f").save(record())
    path = tmp_path / "f" / RECORD
    harm(path)
    again = Store(tmp_path, "f")
    with caplog.at_level(logging.WARNING):
        assert again.last is None
        assert again.costs() == {}
    (warning,) = caplog.records
    assert str(path) in warning.getMessage()
    assert "ignored" in warning.getMessage()
    if harm is not unreadable:
        again.save(record())
        assert Store(tmp_path, "f").last is not None


def test_a_folder_that_cannot_be_written_costs_a_warning_and_nothing_else(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        store = Store(tmp_path / "file" / "cache", "f")
        store.save(record())
        assert store.last is None
    assert store.folder is None
    assert "--cache-dir" in caplog.records[0].getMessage()


def test_a_read_only_store_is_still_read(tmp_path, caplog, monkeypatch):
    Store(tmp_path, "f").save(record())
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    store = Store(tmp_path, "f")
    assert store.folder is None
    assert len(store.costs()) == 2
    before = (tmp_path / "f" / RECORD).read_bytes()
    store.save(record(5.0))
    assert (tmp_path / "f" / RECORD).read_bytes() == before


def test_a_full_disk_keeps_the_old_record_and_leaves_no_rest(tmp_path, caplog, monkeypatch):
    store = Store(tmp_path, "f")
    store.save(record())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        store.save(record(5.0))
    assert "No space left" in caplog.text
    assert [path.name for path in store.folder.iterdir()] == [RECORD]
    assert Store(tmp_path, "f").costs()["(decode, 8)"] == 1.25


SAVER = """
import sys
from pathlib import Path
from preheat.warmup.record import ItemRecord, Record
from preheat.warmup.store import Store
me = int(sys.argv[2])
entries = [ItemRecord(f"item {i}", "swap", {"size": me}, outcome="ready", touch_seconds=me) for i in range(300)]
for _ in range(40):
    store = Store(Path(sys.argv[1]), "f")
    last = store.last
    assert last is None or len({entry.shape["size"] for entry in last.entries}) == 1
    store.save(Record(entries=entries))
"""


def test_processes_that_start_at_once_see_whole_records_only(tmp_path):
    def start(me):
        command = [sys.executable, "-W", "error", "-c", SAVER, str(tmp_path), str(me)]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    with ThreadPoolExecutor() as pool:
        done = list(pool.map(start, (1, 2)))
    assert [(run.returncode, run.stderr) for run in done] == [(0, "")] * 2
    assert [path.name for path in (tmp_path / "f").iterdir()] == [RECORD]
    assert len(Store(tmp_path, "f").last.entries) == 300


def test_a_store_that_is_off_keeps_nothing_and_says_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        store = Store(cache_root(Settings(cache_dir="off")), "f")
        store.save(record())
    assert (store.folder, store.last, store.costs()) == (None, None, {})
    assert caplog.records == []


def test_where_the_store_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root(Settings(cache_dir=str(tmp_path / "asked"))) == tmp_path / "asked"
    assert cache_root(Settings(cache_dir="~/asked")) == tmp_path / "asked"
    assert cache_root(Settings.load(env={"PREHEAT_CACHE_DIR": "there"})) == type(tmp_path)("there")
    assert cache_root(Settings()) == tmp_path / "xdg" / "preheat"
    for none in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert cache_root(Settings()) == tmp_path / ".cache" / "preheat"


def test_the_store_needs_no_torch():
    code = "import sys, preheat.warmup.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
