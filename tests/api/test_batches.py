"""Files and batches through OpenAI's own client: each line is answered once, whatever happens to the server."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import Server, serving

PACED = "tests.api.scripted:run_paced_engine"


def line(id: str, url: str = "/v1/completions", **body: object) -> str:
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": body})


def lines(count: int, **body: object) -> bytes:
    return "\n".join(line(str(n), prompt=[5, 6, 7 + n % 50], max_tokens=5, **body) for n in range(count)).encode()


CLIENTS: list[openai.OpenAI] = []


def client_of(server: Server) -> openai.OpenAI:
    CLIENTS.append(openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0))
    return CLIENTS[-1]


@pytest.fixture(scope="module", autouse=True)
def closing() -> Iterator[None]:
    yield
    while CLIENTS:
        CLIENTS.pop().close()


def begin(client: openai.OpenAI, data: bytes, endpoint: Any = "/v1/completions", **more: Any) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=more.pop("window", "24h"), **more
    )


def ended(client: openai.OpenAI, id: str, seconds: float = 60) -> openai.types.Batch:
    end = time.monotonic() + seconds
    while (batch := client.batches.retrieve(id)).status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < end, batch
        time.sleep(0.05)
    return batch


def answers(client: openai.OpenAI, id: str | None) -> list[dict[str, Any]]:
    assert id is not None
    return [json.loads(text) for text in client.files.content(id).text.splitlines()]


@pytest.fixture(scope="module")
def kept(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {"batch_dir": str(tmp_path_factory.mktemp("batches") / "new"), "max_batch_file_bytes": 100_000}
    notes = tmp_path_factory.mktemp("notes") / "loop"
    with serving(str(folder), served_model_name=["tiny"], watch=notes, **options) as server:
        yield server
    assert not set(notes.read_text().splitlines())  # the event loop has not worked on files


@pytest.fixture(scope="module")
def client(kept: Server) -> openai.OpenAI:
    return client_of(kept)


def test_files_come_and_go(client: openai.OpenAI) -> None:
    data = bytes(range(256)) * 300
    file = client.files.create(file=("Anhang Ä.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(data), "Anhang Ä.jsonl", "batch", "processed")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == data
    later = client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert later.expires_at == later.created_at + 3600
    assert [each.id for each in client.files.list(purpose="batch", limit=1)][:2] == [later.id, file.id]
    assert [each.id for each in client.files.list(order="asc")][-2:] == [file.id, later.id]
    assert client.files.delete(file.id).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(file.id)


def test_a_batch_is_answered(client: openai.OpenAI) -> None:
    data = b"\xef\xbb\xbf" + lines(40) + b"\n\n" + line("bad", prompt="x", max_tokens=-1).encode()
    batch = begin(client, data, metadata={"of": "me"})
    assert batch.status == "validating" and batch.metadata == {"of": "me"} and batch.output_file_id is None
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = ended(client, batch.id)
    assert batch.status == "completed" and batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 41, "completed": 40, "failed": 1}
    found = {answer["custom_id"]: answer for answer in answers(client, batch.output_file_id)}
    assert found.keys() == {str(n) for n in range(40)}
    for answer in found.values():
        assert answer["response"]["status_code"] == 200 and answer["error"] is None
        assert answer["id"] == f"batch_req_{answer['response']['request_id']}"
        assert answer["response"]["body"]["usage"]["completion_tokens"] == 5
    (refused,) = answers(client, batch.error_file_id)
    assert refused["custom_id"] == "bad" and refused["response"]["status_code"] == 400
    assert "max_tokens" in refused["response"]["body"]["error"]["message"]
    assert client.files.retrieve(batch.output_file_id or "").purpose == "batch_output"
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.batches.cancel(batch.id)


def test_batches_are_listed(client: openai.OpenAI) -> None:
    ids = [begin(client, lines(1)).id for _ in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == ids[::-1]
    for id in ids:
        ended(client, id)


@pytest.mark.parametrize(
    ("data", "code", "at"),
    [
        (b"", "empty_file", None), (b"{", "invalid_json_line", 1), (b"[1]", "invalid_request", 1),
        ("\n".join([line("1"), "", line("1")]).encode(), "duplicate_custom_id", 3),
        (line("1", "/v1/chat/completions").encode(), "invalid_url", 1),
        (line("1", stream=True).encode(), "invalid_request", 1),
        (line("1").replace("POST", "GET").encode(), "invalid_method", 1),
        (line("1", prompt=[10**600] * 150).encode(), "invalid_request", 1),
    ],
)  # fmt: skip
def test_an_input_that_is_wrong_is_said(client: openai.OpenAI, data: bytes, code: str, at: int | None) -> None:
    batch = ended(client, begin(client, data).id)
    assert batch.status == "failed" and batch.failed_at and batch.errors and batch.errors.data
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, at)]
    assert batch.output_file_id is None and batch.error_file_id is None


def test_invalid_batches_are_refused(client: openai.OpenAI, kept: Server) -> None:
    file = client.files.create(file=lines(1), purpose="batch")
    for more, param in (({"endpoint": "/v1/audio"}, "endpoint"), ({"completion_window": "soon"}, "completion_window")):
        body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **more}
        answer = kept.post("/v1/batches", body)
        assert answer.status == 400 and param in answer.body.decode()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.batches.create(input_file_id="file-../x", endpoint="/v1/completions", completion_window="24h")
    assert unknown.value.param == "input_file_id"
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="user_data")
    with pytest.raises(openai.APIStatusError, match="--max-batch-file-bytes") as error:
        client.files.create(file=b"x" * 100_001, purpose="batch")
    assert error.value.status_code == 413
    for body in (b"", b"--x\r\n", b"--y"):
        answer = kept.post("/v1/files", body, **{"Content-Type": "multipart/form-data; boundary=x"})
        assert answer.status == 400, answer.body
    assert kept.post("/v1/files", {"purpose": "batch"}).status == 400
    assert client.files.retrieve(file.id).id == file.id


def test_a_server_without_a_folder_says_so(scripted: Server) -> None:
    client = client_of(scripted)
    for ask in (client.files.list, client.batches.list, lambda: client.files.create(file=b"x", purpose="batch")):
        with pytest.raises(openai.NotFoundError, match="--batch-dir"):
            ask()


def test_bounds(folder: Path, tmp_path: Path) -> None:
    """The numbers of batches and of files are bounded, and a file in use stays."""
    options = {"batch_dir": str(tmp_path), "max_batches": 1, "max_batch_files": 6}
    with serving(str(folder), engine=PACED, **options) as server:
        client = client_of(server)
        batch = begin(client, lines(3, min_tokens=400).replace(b'"max_tokens": 5', b'"max_tokens": 400'))
        with pytest.raises(openai.RateLimitError, match="--max-batches"):
            begin(client, lines(1))
        with pytest.raises(openai.BadRequestError, match="cancel it first"):
            client.files.delete(batch.input_file_id)
        batch = client.batches.cancel(batch.id)
        assert batch.status in ("cancelling", "cancelled") and batch.cancelling_at
        batch = ended(client, batch.id)
        assert batch.status == "cancelled" and batch.cancelled_at and batch.output_file_id is None
        client.files.delete(batch.input_file_id)
        while len(list(client.files.list())) < 6:
            client.files.create(file=lines(1), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="--max-batch-files"):
            client.files.create(file=lines(1), purpose="batch")
        (file, *_) = client.files.list()
        with pytest.raises(openai.RateLimitError, match="--max-batch-files"):
            client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def test_one_folder_has_one_server(folder: Path, kept: Server, client: openai.OpenAI, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(str(folder), batch_dir=kept.settings["batch_dir"], wait=False, log=log) as second:
        assert second.process.wait(30) != 0
    assert "another server uses it" in log.read_text()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_goes_on_where_another_ended(folder: Path, tmp_path: Path, how: signal.Signals) -> None:
    """A new server answers every line once, and asks for no written line again."""
    place, count = tmp_path / "kept", 400
    options = {"batch_dir": str(place), "shutdown_timeout": 0.2}
    with serving(str(folder), engine="tests.api.scripted:run_stopping_engine", **options) as server:
        batch = begin(client_of(server), lines(count))
        while (counts := client_of(server).batches.retrieve(batch.id).request_counts) is None or not counts.completed:
            time.sleep(0.02)
        server.process.send_signal(how)
        server.process.wait()
    (partial,) = [path for path in (place / "files").iterdir() if path.suffix == "" and path.name != batch.input_file_id
                  and path.stat().st_size]  # fmt: skip
    before = partial.read_bytes()
    written = {json.loads(text)["custom_id"]: text for text in before.splitlines(keepends=True) if text.endswith(b"\n")}
    assert 0 < len(written) < count
    partial.write_bytes(before + b'{"custom_id": "399", "resp')  # the server was killed in the middle of a line
    with serving(str(folder), **options) as server:
        client = client_of(server)
        batch = ended(client, batch.id)
        assert batch.status == "completed" and batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": count, "completed": count, "failed": 0}
        text = client.files.content(batch.output_file_id or "").read()
    ids = [json.loads(each)["custom_id"] for each in text.splitlines()]
    assert sorted(ids, key=int) == [str(n) for n in range(count)]
    assert text.startswith(b"".join(written.values()))


def test_a_batch_that_ends_servers_is_given_up(folder: Path, tmp_path: Path) -> None:
    options = {"batch_dir": str(tmp_path), "engine": "tests.api.scripted:run_paced_engine"}
    id = ""
    for number in range(3):
        with serving(str(folder), **options) as server:
            id = id or begin(client_of(server), lines(2).replace(b'"max_tokens": 5', b'"max_tokens": 900')).id
            stored = tmp_path / "batches" / f"{id}.json"
            while json.loads(stored.read_text())["tries"] <= number:
                time.sleep(0.02)
    with serving(str(folder), **options) as server:
        batch = ended(client_of(server), id)
        assert batch.status == "failed" and batch.errors and batch.errors.data
        assert batch.errors.data[0].code == "server_ended"


def test_an_expired_batch_says_so_of_each_line(folder: Path, tmp_path: Path) -> None:
    with serving(str(folder), engine=PACED, batch_dir=str(tmp_path)) as server:
        batch = begin(client_of(server), lines(5, min_tokens=900).replace(b'"max_tokens": 5', b'"max_tokens": 900'))
        while client_of(server).batches.retrieve(batch.id).status != "in_progress":
            time.sleep(0.02)
        server.process.kill()
        server.process.wait()
    stored = tmp_path / "batches" / f"{batch.id}.json"
    record = json.loads(stored.read_text())
    record["batch"]["expires_at"] = int(time.time()) - 1
    stored.write_text(json.dumps(record))
    with serving(str(folder), batch_dir=str(tmp_path)) as server:
        client = client_of(server)
        batch = ended(client, batch.id)
        assert batch.status == "expired" and batch.expired_at and batch.output_file_id is None
        late = answers(client, batch.error_file_id)
        assert sorted(each["custom_id"] for each in late) == [str(n) for n in range(5)]
        assert {each["error"]["code"] for each in late} == {"batch_expired"}


def test_clients_come_before_a_batch(tmp_path: Path) -> None:
    """A client's request comes before a batch that has taken all the slots of the real engine."""
    options = {"batch_dir": str(tmp_path), "num_threads": 1, "max_num_seqs": 2, "max_model_len": 2048}
    with serving("bundled", engine=None, skip_warmup=True, boot_check="off", **options) as server:
        client = client_of(server)
        body = {"ignore_eos": True, "temperature": 0, "max_tokens": 1500}
        data = "\n".join(line(str(n), prompt=f"def f{n}(x):", **body) for n in range(4)).encode()
        batch = begin(client, data)
        end = time.monotonic() + 60
        while server.metric("num_requests_running") < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        asked = {"model": "bundled", "prompt": "import", "max_tokens": 8, "temperature": 0}
        first = client.completions.create(**asked)  # type: ignore[call-overload]
        assert first.usage.completion_tokens == 8
        now = client.batches.retrieve(batch.id)
        assert now.status == "in_progress" and now.request_counts is not None and now.request_counts.completed == 0
        assert server.metric("num_preemptions_total") >= 1
        with contextlib.suppress(openai.BadRequestError):
            client.batches.cancel(batch.id)
