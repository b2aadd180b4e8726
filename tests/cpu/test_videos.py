"""Videos as frames: Qwen3-VL and Qwen3.5 against transformers, the same bits, and the sizes of its video processor."""

from __future__ import annotations

import io
import json
import pickle
import random
from base64 import b64encode
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.errors import InvalidRequest
from preheat.frontend import image_processes
from preheat.frontend.image_parts import IMAGE, take_images
from preheat.frontend.image_processes import make_work
from preheat.frontend.video import Frames, VideoConfig
from preheat.model import grid_vision
from tests.llava import data_url, picture
from tests.qwen_vl import CONFIG, UNIT, save_model_and_tokenizer

STEPS = 4
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": 16,
    "num_gpu_blocks_override": 60, "max_logprobs": 400, "execution_mode": "eager", "num_threads": 1,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=-1)
FRAMES = [picture(number, 24, 16).convert("RGB") for number in range(5)]
BOUNDS = {"shortest_edge": 192, "longest_edge": 8192}


@pytest.fixture(scope="module", params=["Qwen3VL", "Qwen3_5"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("videos")
    model, _, images = save_model_and_tokenizer(folder, family=request.param)
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": BOUNDS}))
    return folder, model, images


@pytest.fixture(scope="module")
def llm(saved: tuple[Path, Any, Any]) -> LLM:
    return LLM(str(saved[0]), **OPTIONS)


def asked(frames: list[Any], **more: Any) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "What happens"}, {"type": "video", "video": frames, **more},
             {"type": "text", "text": "here?"}, {"type": "image_pil", "image_pil": picture(9, 16, 16)}]  # fmt: skip
    return [{"role": "user", "content": parts}]


def said(llm: LLM, frames: list[Any]) -> tuple[list[int], list[int], torch.Tensor]:
    """Return prompt, tokens, and the log-probabilities of the vocabulary before each token."""
    (output,) = llm.chat(asked(frames), PARAMS, use_tqdm=False)
    choice = output.outputs[0]
    found = torch.empty(STEPS, len(choice.logprobs[0]))
    for row, entry in zip(found, choice.logprobs, strict=True):
        row[list(entry)] = torch.tensor([value.logprob for value in entry.values()])
    return list(output.prompt_token_ids), list(choice.token_ids), found


@torch.inference_mode()
def expected(saved: tuple[Path, Any, Any], ids: list[int], tokens: list[int], frames: list[Any]) -> torch.Tensor:
    """Return the reference's logits before each token, for a prompt with a video and then an image."""
    _, model, images = saved
    given = images([*frames, picture(9, 16, 16)], return_tensors="pt")
    patches = given["pixel_values"].split(given["image_grid_thw"].prod(-1).tolist())
    pairs = [torch.stack([each.view(-1, 3, 2, 16)[:, :, 0] for each in patches[at : at + 2]], 2)
             for at in range(0, len(frames), 2)]  # fmt: skip
    count = 4 * (24 // UNIT) * (16 // UNIT) * len(pairs) // 4
    every, seen = torch.tensor([[*ids, *tokens]]), 0
    kinds = torch.zeros_like(every)
    for place, token in enumerate(ids):
        if token == model.config.image_token_id:
            kinds[0, place], seen = (2 if seen < count else 1), seen + 1
    every[kinds == 2] = model.config.video_token_id
    model.model.rope_deltas = None
    grid = torch.tensor([[len(pairs), 2 * 16 // UNIT, 2 * 24 // UNIT]])
    found: torch.Tensor = model(
        input_ids=every, pixel_values=patches[-1], image_grid_thw=given["image_grid_thw"][-1:],
        pixel_values_videos=torch.cat(pairs).flatten(1), video_grid_thw=grid, mm_token_type_ids=kinds.int(),
    ).logits[0, len(ids) - 1 : -1]  # fmt: skip
    return found


def error(saved: tuple[Path, Any, Any], frames: list[Any], found: tuple[list[int], list[int], torch.Tensor]) -> float:
    ids, tokens, ours = found
    theirs = expected(saved, ids, tokens, frames)
    ours, theirs = (x - x.mean(-1, keepdim=True) for x in (ours, theirs))
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


def test_from_frames_to_logits_and_the_same_bits_again(saved, llm, monkeypatch):
    """A video in chunks that end within frames equals transformers, and so does its hit.

    Control: other frames behind the first of each two, and frames in another order, are seen.
    """
    found = said(llm, FRAMES[:4])
    assert error(saved, FRAMES[:4], found) <= 2e-5
    hits = llm.loop.scheduler.stats().prefix_hits
    again = said(llm, FRAMES[:4])
    assert again[:2] == found[:2] and torch.equal(again[2], found[2])
    assert llm.loop.scheduler.stats().prefix_hits > hits
    swapped = [FRAMES[0], FRAMES[2], FRAMES[1], FRAMES[3]]
    assert error(saved, FRAMES[:4], said(llm, swapped)) > 1e-3
    assert error(saved, swapped, said(llm, swapped)) <= 2e-5
    right = grid_vision.GridTower._embedded
    monkeypatch.setattr(grid_vision.GridTower, "_embedded", lambda self, image: right(
        self, image._replace(pixels=image.pixels[:1].expand(2, -1, -1))))  # fmt: skip
    llm.reset_prefix_cache()
    assert error(saved, FRAMES[:4], said(llm, FRAMES[:4])) > 1e-3
    llm.reset_prefix_cache()
    llm.loop.scheduler.images.forget()


def jpeg(image: PIL.Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "JPEG")
    return b64encode(file.getvalue()).decode()


def test_a_data_url_of_frames_is_a_list_of_images():
    """vLLM's data URL of frames, with the times of each two frames; the last of five stands twice."""
    frames = [jpeg(each) for each in FRAMES]
    url = {"url": "data:video/jpeg;base64," + ",".join(frames), "fps": 4}
    messages, sources = take_images([{"role": "user", "content": [{"type": "video_url", "video_url": url}]}])
    urls = [f"data:image/jpeg;base64,{each}" for each in frames]
    assert sources == [Frames(*urls[:2], 5), Frames(*urls[2:4], 5), Frames(urls[4], urls[4], 5)]
    times = [{"type": "text", "text": f"<{time} seconds>"} for time in (0.1, 0.6, 1.0)]
    assert messages[0]["content"] == [part for time in times for part in (time, IMAGE)]
    listed, same = take_images(asked(urls, fps=4))
    assert same[:3] == sources and listed[0]["content"][1:7] == messages[0]["content"]


REFUSED = {
    "a file": (
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        "send its frames: data:video",
    ),
    "a page": ({"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}, "video files are not decoded"),
    "one frame": ({"type": "video", "video": [FRAMES[0]]}, "2 to 768 frames, and this one has 1"),
    "no list": ({"type": "video", "video": "x"}, "a list of frames"),
    "far too many": ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + "," * 800}}, "at most 768"),
    "no rate": ({"type": "video", "video": FRAMES[:2], "fps": -1.0}, "fps of a video"),
    "no frame a second": ({"type": "video", "video": FRAMES[:2], "fps": 0}, "fps of a video"),
    "endless times": ({"type": "video", "video": FRAMES[:2], "fps": 1e-300}, "fps of a video"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    part, message = REFUSED[name]
    with pytest.raises(InvalidRequest, match=message):
        take_images([{"role": "user", "content": [part]}])


def test_two_frames_in_a_process_of_their_own(llm):
    """A server decodes in other processes, with the same pixels and hash; frames of two sizes are refused."""
    images = llm.frontend.images
    config = pickle.dumps((images.decoder.config, images.decoder.max_pixels, 1 << 20, images.decoder.video))
    files = [io.BytesIO() for _ in range(2)]
    for file, frame in zip(files, FRAMES, strict=False):
        frame.save(file, "PNG")
    frames = Frames(*(file.getvalue() for file in files), 4)

    class Here:
        @staticmethod
        def run(data: bytes) -> bytes:
            return make_work(config)(data)

    found = image_processes.decode(Here, frames)
    assert found == images.decode(Frames(*FRAMES[:2], 4)) and found.grid == (2, 3)
    assert len(found.pixels) == 2 * len(images.decode(FRAMES[0]).pixels)
    with pytest.raises(InvalidRequest, match="differ in size"):
        images.decode(Frames(FRAMES[0], picture(1, 16, 24), 4))
    images.decoder.video, kept = None, images.decoder.video
    with pytest.raises(InvalidRequest, match="sees no videos"):
        images.decode(frames)
    images.decoder.video = kept
    assert data_url(FRAMES[0]).startswith("data:image/")


def test_sizes_are_those_of_transformers():
    """Sizes of many frames are those of the reference, within the bound of a frame."""
    source = Path(__import__("transformers").__file__).parent / "models/qwen3_vl/video_processing_qwen3_vl.py"
    text = source.read_text()
    scope: dict[str, Any] = {"math": __import__("math")}
    exec(text[text.index("def smart_resize") : text.index("@auto_docstring\nclass Qwen3VLVideoProcessor")], scope)
    config, draw = VideoConfig(least=4096, most=400_000, unit=32, frame=1 << 30), random.Random(0)
    for _ in range(300):
        width, height, count = draw.randint(1, 900), draw.randint(1, 900), draw.randint(2, 60)
        if max(width, height, 32) > 20 * min(width, height):
            continue
        right = scope["smart_resize"](
            num_frames=count, height=height, width=width, factor=32, min_pixels=4096, max_pixels=400_000
        )
        assert config.size_of(width, height, count) == right[::-1]
    least = VideoConfig(least=4096, most=1 << 30, unit=32, frame=CONFIG["image_processor"]["max_pixels"])
    assert least.size_of(64, 64, 4) == (32, 32)
