"""Images through a real server of a tiny LLaVA, by the official client, and refusals with their reasons."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator

import PIL.Image
import pytest
from openai import BadRequestError, OpenAI

from preheat.frontend.images import Images, PixelConfig
from preheat.frontend.media import MediaReader
from preheat.warmup import dummy_requests
from tests.api.conftest import Server, serving
from tests.llava import SIZE, TOKENS, data_url, picture, save_llava

A, B = picture(1), picture(2, 64, 20, "RGBA")
TEXT = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[tuple[Server, object]]:
    folder, files = tmp_path_factory.mktemp("llava"), tmp_path_factory.mktemp("files")
    reference = save_llava(folder)
    A.save(files / "a.png")
    options = {
        "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16,
        "num_gpu_blocks_override": 80, "num_threads": 1, "skip_warmup": False, "on_cold": "raise",
        "allowed_local_media_path": str(files), "limit_mm_per_prompt": {"image": 3}, "served_model_name": ["llava"],
    }  # fmt: skip
    with serving(str(folder), engine=None, **options) as server:
        server.files = files  # type: ignore[attr-defined]
        yield server, reference


@pytest.fixture(scope="module")
def client(model):
    with OpenAI(base_url=model[0].url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(client: OpenAI, *parts, **options):
    messages = [{"role": "user", "content": list(parts)}]
    options = {"temperature": 0, "max_completion_tokens": 6, "extra_body": {"ignore_eos": True}} | options
    return client.chat.completions.create(model="llava", messages=messages, **options)


def test_a_data_url(model, client):
    """A warm engine's first image request meets nothing cold.

    Its tokens are transformers' own.
    """
    server, reference = model
    answer = ask(
        client, image(data_url(A)), TEXT, logprobs=True, extra_body={"return_token_ids": True, "ignore_eos": True}
    )
    text = "USER: <image>\nWhat is it? ASSISTANT:"
    ids = answer.choices[0].token_ids
    theirs = reference(text, [A], ids, special=False)[:-1]
    assert theirs.argmax(-1).tolist() == ids
    assert answer.prompt_token_ids.count(max(answer.prompt_token_ids)) == TOKENS
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    record = server.get("/warmup").json
    assert [(e["name"], e["outcome"]) for e in record["entries"] if e["kind"] == "encoder"] == [
        ("(encoder, 4)", "ready"), ("(encoder, 2)", "ready"), ("(encoder, 1)", "ready")
    ]  # fmt: skip
    assert {e["outcome"] for e in record["entries"] if e["name"] == "(check, images)"} == {"ready"}
    assert not record["cold"]


def test_several_in_any_order(client):
    first = ask(client, image(data_url(A)), TEXT, image(data_url(B)), TEXT, logprobs=True)
    second = ask(client, image(data_url(B)), TEXT, image(data_url(A)), TEXT, logprobs=True)
    again = ask(client, image(data_url(A)), TEXT, image(data_url(B)), TEXT, logprobs=True)
    assert first.choices[0].logprobs == again.choices[0].logprobs != second.choices[0].logprobs
    assert first.usage.prompt_tokens == second.usage.prompt_tokens


def test_a_stream_and_several_choices(client):
    whole = ask(client, image(data_url(A)), TEXT, n=2, seed=3, temperature=1)
    texts = ["", ""]
    for event in ask(client, image(data_url(A)), TEXT, n=2, seed=3, temperature=1, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_file_below_the_folder(model, client):
    files = model[0].files
    found = ask(client, image(f"file://{files}/a.png"), TEXT, logprobs=True)
    assert found.choices[0].logprobs == ask(client, image(data_url(A)), TEXT, logprobs=True).choices[0].logprobs


def scans(count: int) -> str:
    """Return a photograph that repeats its last scan ``count`` times."""
    file = io.BytesIO()
    PIL.Image.new("L", (4000, 3000), 90).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return "data:image/jpeg;base64," + base64.b64encode(data[:last] + data[last:-2] * count + data[-2:]).decode()


NOT_AN_IMAGE = "data:image/png;base64," + base64.b64encode(b"not an image").decode()

REFUSED = {
    "another file": ([image("file:///etc/passwd"), TEXT], "not below --allowed-local-media-path"),
    "the web": ([image("http://169.254.169.254/latest"), TEXT], "--allowed-media-domains"),
    "no image": ([image(NOT_AN_IMAGE), TEXT], "cannot be decoded: it is no PNG"),
    "thousands of scans": ([image(scans(3000)), TEXT], "more than 64 scans"),
    "too many": ([image(data_url(A))] * 4, "at most 3 are allowed"),
    "a token of its own": ([{"type": "text", "text": "<image>"}], "1 image tokens .* 0 images"),
    "no URL": ([{"type": "image_url"}], "needs image_url.url"),
    "detail": ([{"type": "image_url", "image_url": {"url": "x", "detail": "high"}}], "detail"),
    "a video": ([{"type": "video", "video": [data_url(A), data_url(A)]}, TEXT], "The model sees no videos"),
    "a video file": ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], "send its frames"),
    "sound": ([{"type": "input_audio", "input_audio": {"data": ""}}], "input_audio"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(client, name):
    parts, message = REFUSED[name]
    with pytest.raises(BadRequestError, match=message) as refused:
        ask(client, *parts)
    assert refused.value.body["param"].startswith(("messages", "prompt"))


def test_images_are_not_tokenized(model):
    server, _ = model
    body = {"messages": [{"role": "user", "content": [image(data_url(A))]}]}
    assert "Images are not tokenized" in server.post("/tokenize", body).error["message"]
    assert server.post("/tokenize", {"prompt": "hello"}).status == 200


def test_a_model_without_a_tower_refuses_images(scripted):
    body = {"messages": [{"role": "user", "content": [image(data_url(A)), TEXT]}]}
    answer = scripted.post("/v1/chat/completions", body)
    assert answer.status == 400 and answer.error["param"] == "messages"
    assert answer.error["message"].startswith("The model sees no images")


def test_the_dummy_image_can_be_decoded(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": SIZE, "crop_size": SIZE}))
    config = PixelConfig.read(tmp_path)
    assert config is not None
    images = Images(config, MediaReader(max_bytes=1000, timeout=1), size=SIZE, tokens=1, token_id=0, max_pixels=9999)
    assert len(images.decode(images.read(dummy_requests.PIXEL)).pixels) == 4 * 3 * SIZE * SIZE
