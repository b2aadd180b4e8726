"""Qwen3-VL through the whole engine, from images of any size to logits and tokens, against transformers.

All paths give the same bits. Faults are planted and found.
"""

from __future__ import annotations

import base64
import json
import pickle
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import PIL.Image
import pytest
import torch
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.errors import InvalidRequest, ModelError, NotInvariant
from preheat.execution.executor import Executor
from preheat.execution.input_batch import Packer
from preheat.frontend import image_processes
from preheat.frontend.image_processes import make_work
from preheat.model import grid_vision
from preheat.model.families import read_spec
from preheat.parallel.steps import StepWriter
from preheat.plan.step_items import EncoderItem
from preheat.schedule import slots
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.boot import BootCheck
from preheat.verify.check_runner import CheckRunner
from preheat.verify.drive import Engine
from preheat.verify.paths import PathRunner
from preheat.verify.prompts import Size
from preheat.verify.verification import tight
from preheat.warmup.record import Record
from tests.controls import fails
from tests.llava import Reference, data_url, picture
from tests.qwen_vl import IMAGE, save_qwen_vl

STEPS = 4
OPTIONS = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": 16,
    "num_gpu_blocks_override": 60, "max_logprobs": 400,
}  # fmt: skip
WARM = {"skip_warmup": False, "boot_check": "quick", "on_cold": "raise", "determinism_warmup_iterations": 0}
PARAMS = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=-1)
SHAPES = [(24, 24), (8, 40), (200, 3), (45, 33), (33, 45), (9, 9), (64, 64), (100, 31), (16, 96), (7, 120)]
"""Widths and heights: with sides that are multiples of a cell's, too small, too large, wide and tall."""

A, B, C = picture(1), picture(2, 64, 20, "RGBA"), picture(3, 20, 31, "L")
TEXT = "def add(a, b):\n    return a + b\n"
PROMPTS = [
    *((f"USER: {IMAGE}What is it? ASSISTANT:", [picture(number, *shape)]) for number, shape in enumerate(SHAPES)),
    (f"{TEXT}{IMAGE} and {IMAGE}{IMAGE} hello world", [B, A, C]),
    (f"{TEXT}{IMAGE} and {IMAGE}{IMAGE} hello world", [B, C, A]),
    ("hello world hello world hello world, without any", []),
    ("an image at the very end <|image_pad|>", [C]),
]
Found = list[tuple[list[int], Tensor]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("qwen_vl")
    return folder, save_qwen_vl(folder)


def seen(output) -> tuple[list[int], Tensor]:
    """Return the tokens, and the log-probabilities of the vocabulary before each: float32 [steps, vocab]."""
    choice = output.outputs[0]
    found = torch.empty(STEPS, len(choice.logprobs[0]))
    for row, entry in zip(found, choice.logprobs, strict=True):
        row[list(entry)] = torch.tensor([value.logprob for value in entry.values()])
    return choice.token_ids, found


def run(llm: LLM, some=PROMPTS) -> Found:
    given = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in some]
    return [seen(output) for output in llm.generate(given, PARAMS, use_tqdm=False)]


def error(reference: Reference, prompt, found: tuple[list[int], Tensor]) -> float:
    """Return the relative error of the logits, up to a constant of each position."""
    tokens, ours = found
    theirs = reference(*prompt, tokens)[:-1]
    assert theirs.argmax(-1).tolist() == tokens
    ours, theirs = (x - x.mean(-1, keepdim=True) for x in (ours, theirs))
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


@pytest.fixture(scope="module", params=["llvm", "eager"])
def llm(request, model) -> LLM:
    return LLM(str(model[0]), **OPTIONS, execution_mode=request.param)


def test_from_images_of_ten_shapes_to_logits_and_tokens(model, llm):
    """All prompts at once equal transformers, in chunks that end within images."""
    for prompt, found in zip(PROMPTS, run(llm), strict=True):
        assert error(model[1], prompt, found) <= 1e-5


def same(one: Found, other: Found) -> list[bool]:
    return [a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True)]


def test_the_comparison_can_fail(model, llm):
    """Control: other images, and engines without places or deep embeddings, are far outside of the tolerance."""
    text, images = prompt = PROMPTS[10]
    with fails():
        assert error(model[1], (text, [images[1], images[0], images[2]]), run(llm, [prompt])[0]) <= 1e-5
    for where, name, wrong in (slots, "places_of", lambda segments: None), (Executor, "_adder", lambda *_: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, wrong)
            llm.reset_prefix_cache()
            found = run(llm, [prompt])
        llm.reset_prefix_cache()
        with fails():
            assert error(model[1], prompt, found[0]) <= 1e-5


def test_cached_prefixes_and_other_chunks_change_no_bits(model, llm):
    """The second and third of these prompts differ only in their last two images."""
    llm.reset_prefix_cache()
    some = PROMPTS[9:]
    found, before = run(llm, some), llm.loop.scheduler.stats().prefix_hits
    assert all(same(run(llm, some[::-1]), found[::-1]))
    assert llm.loop.scheduler.stats().prefix_hits > before
    llm.loop.scheduler.check()
    mode = llm.loop.executor.decoder.functions is not None
    other = {"max_num_batched_tokens": 9, "num_gpu_blocks_override": 9, "max_model_len": 120}
    small = LLM(str(model[0]), **OPTIONS | other, execution_mode="llvm" if mode else "eager")
    assert all(same(run(small, some), found))


def without_images(patch: pytest.MonkeyPatch) -> None:
    """Plant steps that tell the other ranks of no images."""
    message = StepWriter.message
    patch.setattr(StepWriter, "message", lambda self, batch: replace(message(self, batch), encode=None))


def test_two_ranks_see_the_same_images(model, monkeypatch):
    """Two ranks have the bits of one, also behind cached images.

    Control: a rank without the images is seen.
    """
    options = OPTIONS | {"execution_mode": "eager", "num_threads": 1}
    right = run(LLM(str(model[0]), **options, tp_invariant=True))
    two = LLM(str(model[0]), **options, tensor_parallel_size=2)
    assert all(same(run(two), right)) and all(same(run(two, PROMPTS[::-1]), right[::-1]))
    assert two.loop.scheduler.stats().prefix_hits > 0
    without_images(monkeypatch)
    two.reset_prefix_cache()
    assert not all(same(run(two, PROMPTS[:1]), right[:1]))
    two.loop.executor.ranks.close()


def test_a_grid_is_part_of_an_image(llm):
    """Images of one color with the same pixels in all have other hashes if their shapes differ."""
    images = llm.frontend.images
    wide, tall = (images.decode(PIL.Image.new("RGB", size, (90, 20, 7))) for size in ((24, 16), (16, 24)))
    assert wide.pixels == tall.pixels and (wide.grid, tall.grid) == ((2, 3), (3, 2))
    assert wide.hash != tall.hash


def test_chat_with_images(llm):
    """Images in a chat come in any order with text, and each takes as many positions as its size asks for."""
    parts = [
        {"type": "text", "text": "First"}, {"type": "image_url", "image_url": {"url": data_url(A)}},
        {"type": "text", "text": "then"}, {"type": "image_pil", "image_pil": B},
    ]  # fmt: skip
    (output,) = llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)
    images, text = llm.frontend.images, f"USER: First {IMAGE}then {IMAGE}ASSISTANT:"
    ids = llm.frontend.tokenizer.encode(text, add_special_tokens=False)
    cells = [images.decode(each).cells for each in (A, B)]
    assert cells[0] != cells[1] and len(output.prompt_token_ids) == len(ids) + sum(cells) - 2
    given = {"prompt_token_ids": ids, "multi_modal_data": {"image": [A, B]}}
    (direct,) = llm.generate(given, PARAMS, use_tqdm=False)
    assert same([seen(output)], [seen(direct)]) == [True]


REFUSED = {
    "far too long": ((201, 1), "more than 200 times as long"),
    "too many cells": ((1600, 9), "takes 75 positions of a prompt, and the image processor allows 32"),
    "too many pixels": ((1 << 13, 4097), "--max-image-pixels"),
}
"""Sizes of images, and what the refusal says."""


@pytest.mark.parametrize("name", REFUSED)
def test_refused(llm, name):
    size, message = REFUSED[name]
    image = PIL.Image.new("RGB", size)
    with pytest.raises(InvalidRequest, match=message):
        llm.generate({"prompt": IMAGE, "multi_modal_data": {"image": image}}, PARAMS, use_tqdm=False)
    assert not llm.frontend.busy


def test_an_image_in_a_process_of_its_own(llm):
    """A server decodes in other processes, with the same pixels and hash."""
    images = llm.frontend.images
    decoded = make_work(pickle.dumps((images.decoder.config, images.decoder.max_pixels, 1 << 20, None)))
    job = image_processes.job_of(base64.b64decode(data_url(A).partition(",")[2]), None)
    found = msgspec.msgpack.decode(decoded(job), type=image_processes._Answer)
    assert found.image == images.decode(A) and found.image.grid == images.decode(A).grid


def test_without_images_the_decoder_has_positions_alone(model):
    llm = LLM(str(model[0]), **OPTIONS, language_model_only=True)
    assert llm.loop.executor.encoder is None and llm.loop.executor.decoder.turns is None
    assert error(model[1], PROMPTS[12], run(llm, PROMPTS[12:13])[0]) <= 1e-5


# --- the proofs and their planted faults ---


def check(loop) -> BootCheck:
    plan, backend = loop.packer.plan, loop.executor.backend
    record = Record.of(plan, model="qwen_vl", platform="cpu", dtype="float32", mode="eager")
    return BootCheck(CheckRunner(loop.scheduler.pool, loop.packer, loop.executor), record, backend.facts)


def padding_seen(patch) -> None:
    """Plant attention that also sees padding."""
    right = grid_vision.attend_grid
    patch.setattr(grid_vision, "attend_grid", lambda q, k, v, number, scale: right(q, k, v, number + 4, scale))


def begun_again(patch) -> None:
    """Plant places that begin again in each chunk, as if no image were before it."""
    right = Packer._write_places

    def write(self, places, schedule, rows):
        right(self, places, schedule, rows)
        first = int(rows.ends[-1] - schedule.extend[-1])
        if schedule.first[-1] and schedule.num_decode < schedule.rows:
            shift = places[0][first] - int(schedule.first[-1])
            for axis in places:
                axis[first:] -= shift

    patch.setattr(Packer, "_write_places", write)


def test_the_check_at_boot_passes(llm):
    done = check(llm.loop)
    done.run("images")
    assert done._record.proof.compared >= 5


@pytest.mark.parametrize("plant", [padding_seen, begun_again])
def test_the_check_at_boot_finds(llm, plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(NotInvariant, match="images: "):
        check(llm.loop).run("images")


def paths(folder: str) -> dict[str, bool]:
    settings = Settings.load({"model": folder, **OPTIONS, "boot_check": "off", "max_num_batched_tokens": 256})
    engine = Engine(boot_engine, settings)
    taken = PathRunner(Size(0, 1, STEPS, 0), lambda engine: [])
    found = list(taken.on(engine, "asked", ["images"]))
    small = tight(replace(settings, max_num_batched_tokens=48), taken.for_few_blocks)
    found += taken.on(Engine(boot_engine, small), "tight", ["images"])
    return {result.path: result.identical == result.prompts for result in found}


def test_all_paths_of_verify_agree(model):
    names = ("images, together", "images, prefix cache", "images, continued", "images, chunks, few blocks")
    assert paths(str(model[0])) == dict.fromkeys(names, True)


def test_a_planted_fault_is_found_by_its_path(model, monkeypatch):
    begun_again(monkeypatch)
    assert not paths(str(model[0]))["images, chunks, few blocks"]


def test_each_rung_is_an_item_and_nothing_is_cold(model):
    """All rungs are warm before ready, and an image of any shape runs one of them."""
    llm = LLM(str(model[0]), **OPTIONS, **WARM)
    assert [item.cells for item in llm.loop.packer.plan.items if isinstance(item, EncoderItem)] == [32, 24, 16]
    assert error(model[1], PROMPTS[10], run(llm, PROMPTS[10:11])[0]) <= 1e-5


def test_pixels_and_config_that_do_not_fit(model, tmp_path):
    config = json.loads((model[0] / "config.json").read_text())
    vision = config["vision_config"]
    for message, changes in {
        "must be layers of the 4": {"deepstack_visual_indexes": [1, 9]},
        "not the square": {"num_position_embeddings": 35},
        "not the decoder's hidden_size": {"out_hidden_size": 32},
    }.items():
        with pytest.raises(ModelError, match=message):
            read_spec(config | {"vision_config": vision | changes})
    with pytest.raises(ModelError, match="fewest and most pixels"):
        read_spec(config | {"image_processor": {"size": {"shortest_edge": 9, "longest_edge": 3}}})


def test_sizes_and_pixels_are_those_of_transformers(model, llm):
    """All bits of the pixels are equal, and so are the sizes of many shapes."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    processor, images = Qwen2VLImageProcessorPil.from_pretrained(model[0]), llm.frontend.images
    for picture_, size in zip((A, *(each for _, (each,) in PROMPTS[:4])), ((45, 33), *SHAPES[:4]), strict=True):
        right, found = processor([picture_], return_tensors="pt"), images.decode(picture_)
        assert right["image_grid_thw"].tolist() == [[1, *(2 * each for each in found.grid)]], size
        pixels = right["pixel_values"].view(-1, 3, 2, 16)
        assert torch.equal(pixels[:, :, 0], pixels[:, :, 1])
        assert pixels[:, :, 0].numpy().tobytes() == found.pixels, size
    sizes = random.Random(0)
    for width, height in [(sizes.randint(1, 900), sizes.randint(1, 900)) for _ in range(300)]:
        if max(width, height) <= 20 * min(width, height):
            assert images.decoder.config.size_of(width, height)[::-1] == smart_resize(height, width, 8, 192, 2048)
