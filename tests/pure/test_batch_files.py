"""A server's files for batches: uploads are read alike however they arrive, and answers are never torn."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import InvalidRequest, NotFound, PreheatError, SettingsError, TooLarge, TooManyBatches
from preheat.server.batches.answers import BatchAnswers
from preheat.server.batches.file_store import FileStore, StoredFile, new_id
from preheat.server.batches.schema import BatchRequest, RequestCounts
from preheat.server.batches.store import BatchStore
from preheat.server.http.upload import FIELD_BYTES, Form
from preheat.settings import Settings


def encoded(data: bytes, fields: dict[str, str]) -> tuple[bytes, str]:
    """Return a form as OpenAI's client sends it."""
    request = httpx.Request("POST", "http://x", data=fields, files={"file": ("ä.jsonl", data)})
    return request.read(), request.headers["content-type"]


@given(st.binary(max_size=200), st.dictionaries(st.sampled_from(["purpose", "a[b]"]), st.text(max_size=20)), st.data())
def test_a_form_is_the_same_however_it_arrives(data, fields, choice):
    body, kind = encoded(data, fields)
    cuts = sorted(choice.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    sink = io.BytesIO()
    form = Form(kind, sink, most=len(data))
    for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        form.feed(body[begin:end])
    form.finish()
    assert (sink.getvalue(), form.size, form.fields, form.filename) == (data, len(data), fields, "ä.jsonl")


@given(st.binary(max_size=200), st.data())
def test_broken_forms_are_refused(data, choice):
    """A form cut off anywhere is refused.

    With one changed byte it is another form, or an error of ours.
    """
    body, kind = encoded(data, {"purpose": "batch"})
    short = body[: choice.draw(st.integers(0, len(body) - len("--\r\n") - 1))]
    with pytest.raises(InvalidRequest):
        whole(short, kind)
    at = choice.draw(st.integers(0, len(body) - 1))
    try:
        whole(body[:at] + choice.draw(st.binary(min_size=1, max_size=1)) + body[at + 1 :], kind)
    except PreheatError:
        pass


def whole(body: bytes, kind: str, most: int = 1000) -> Form:
    form = Form(kind, io.BytesIO(), most)
    form.feed(body)
    form.finish()
    return form


def test_forms_beyond_the_limits_are_refused():
    body, kind = encoded(b"x" * 11, {"purpose": "batch"})
    with pytest.raises(TooLarge, match="--max-batch-file-bytes"):
        whole(body, kind, most=10)
    assert whole(body, kind, most=11).size == 11
    for more in ({"a": "x" * (FIELD_BYTES + 1)}, {str(n): "" for n in range(17)}):
        with pytest.raises(InvalidRequest):
            whole(*encoded(b"", more))
    for wrong in (
        "application/json",
        "multipart/form-data",
        "",
        "multipart/form-data; boundary=",
        f"multipart/form-data; boundary={'x' * 300}",
    ):
        with pytest.raises(InvalidRequest):
            whole(body, wrong)


IDS = [str(number) for number in range(6)]


def line(id: str) -> bytes:
    return json.dumps({"custom_id": id}).encode() + b"\n"


@given(st.lists(st.sampled_from(IDS), unique=True), st.lists(st.sampled_from(IDS), unique=True),
       st.binary(max_size=20).filter(lambda torn: not torn.endswith(b"\n")))  # fmt: skip
def test_answers_go_on_where_another_server_ended(tmp_path_factory, answered, refused, torn):
    refused = [id for id in refused if id not in answered]
    folder: Path = tmp_path_factory.mktemp("answers")
    paths = folder / "answers", folder / "failed"
    for path, ids in zip(paths, (answered, refused), strict=True):
        path.write_bytes(b"".join(map(line, ids)) + torn)
    counts = RequestCounts(total=len(IDS))

    async def go_on() -> None:
        answers = BatchAnswers(*paths, counts)
        assert answers.done == {*answered, *refused}
        left = [id for id in IDS if id not in answers.done]
        await asyncio.gather(*(answers.write({"custom_id": id}, refused=id == "0") for id in left))
        await answers.close()

    asyncio.run(go_on())
    found = [path.read_bytes() for path in paths]
    assert found[0].startswith(b"".join(map(line, answered))) and found[1].startswith(b"".join(map(line, refused)))
    ids = [json.loads(each)["custom_id"] for text in found for each in text.splitlines()]
    assert sorted(ids) == IDS and counts.completed + counts.failed == len(IDS)


def stored(store: FileStore, **more) -> StoredFile:
    file = StoredFile(id=new_id("file-"), bytes=1, created_at=1, filename="x", purpose="batch", **more)
    with store.receive(file.id) as sink:
        sink.write(b"x")
    store.add(file)
    return file


def read(store: FileStore, id: str) -> bytes:
    with store.contents(id) as file:
        return file.read()


def test_files_are_there_when_they_are_described(tmp_path):
    store = FileStore(tmp_path / "files", 3)
    file = stored(store)
    torn = new_id("file-")
    store.receive(torn).close()
    for id in (torn, "file-x", "../files", ""):
        with pytest.raises(NotFound):
            store.contents(id)
    for kept in ([torn], []):
        again = FileStore(tmp_path / "files", 3, kept)
        assert list(again.listed()) == [file.id] and read(again, file.id) == b"x"
        assert (tmp_path / "files" / torn).exists() == bool(kept)


def test_files_expire_unless_they_are_used(tmp_path):
    store = FileStore(tmp_path / "files", 3)
    files = [stored(store, expires_at=1) for _ in range(2)]
    store.used[files[1].id] += 1
    assert list(store.listed()) == [files[1].id] and not (tmp_path / "files" / files[0].id).exists()
    store.used[files[1].id] -= 1
    assert not store.listed() and not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize("name", ["max_batch_file_bytes", "max_batch_files", "max_batches"])
def test_bounds_need_a_folder(name):
    with pytest.raises(SettingsError, match=f"{name} needs batch_dir"):
        Settings(**{name: 5000})
    assert getattr(Settings(batch_dir="x", **{name: 5000}), name) == 5000


def test_batches_that_have_ended_are_forgotten_in_the_end(tmp_path):
    store = BatchStore(str(tmp_path), Settings(batch_dir=str(tmp_path), max_batch_files=3, max_batches=1))
    file = stored(store.files)
    asked = BatchRequest(input_file_id=file.id, endpoint="/v1/completions", completion_window="2d")
    ids = []
    for _ in range(5):
        batch = store.create(asked)
        assert (batch.batch.expires_at or 0) - batch.batch.created_at == 48 * 3600
        with pytest.raises(TooManyBatches) as full:
            store.create(asked)
        assert (full.value.status, full.value.code) == (429, "too_many_batches")
        store.end(batch, "completed")
        ids.append(batch.batch.id)
    assert list(store.listed()) == ids[:1:-1]
    assert len(list((tmp_path / "batches").iterdir())) == 3
    with pytest.raises(SettingsError, match="another server"):
        BatchStore(str(tmp_path), Settings())
    store.close()
    again = BatchStore(str(tmp_path), Settings())
    assert list(again.listed()) == ids[:1:-1]
    again.close()
