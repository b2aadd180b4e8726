"""LLaVA through the whole engine, from images to logits and tokens, against transformers.

All paths give the same bits. Faults that other engines have had are planted and found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from preheat import LLM, LoRARequest, SamplingParams
from preheat.backends.cpu.backend import CpuBackend
from preheat.errors import ContextTooLong, InvalidRequest, ModelError, NotInvariant
from preheat.frontend.images import Images, PixelConfig
from preheat.frontend.outputs import RequestOutput
from preheat.frontend.room import Room
from preheat.model import vision
from preheat.model.families import read_spec
from preheat.model.loader import load_weights
from preheat.model.vision import VisionTower
from preheat.schedule import prefix
from preheat.schedule.images import EncoderCache
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.verify.boot import BootCheck
from preheat.verify.check_runner import CheckRunner
from preheat.verify.drive import Engine
from preheat.verify.paths import PathRunner
from preheat.verify.prompts import Size
from preheat.verify.verification import tight
from preheat.warmup.record import Record
from tests.controls import fails
from tests.llava import SIZE, TOKENS, Reference, as_modules, data_url, edit_json, picture, save_adapter, save_llava

STEPS = 5
OPTIONS = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": 16,
    "num_gpu_blocks_override": 60, "max_logprobs": 400,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=-1)
A, B, C = picture(1), picture(2, 64, 20, "RGBA"), picture(3, 20, 31, "L")
PROMPTS = [
    ("USER: <image>\nWhat is it? ASSISTANT:", [A]),
    ("def add(a, b):\n    return a + b\n<image> and <image><image> hello world", [B, A, C]),
    ("def add(a, b):\n    return a + b\n<image> and <image><image> hello world", [B, C, A]),
    ("hello world hello world hello world, without any", []),
    ("an image at the very end <image>", [C]),
]
Found = list[tuple[list[int], Tensor]]

ANY = Room(1 << 20, lambda positions: ContextTooLong(f"{positions} positions"))
"""Room for all images of a test."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("llava")
    return folder, save_llava(folder)


@pytest.fixture(scope="module")
def folder(model) -> str:
    return str(model[0])


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, **OPTIONS)


def seen(output: RequestOutput) -> tuple[list[int], Tensor]:
    """Return the tokens, and the log-probabilities of the vocabulary before each: float32 [steps, vocab]."""
    choice = output.outputs[0]
    assert choice.logprobs is not None
    found = torch.empty(STEPS, len(choice.logprobs[0]))
    for row, entry in zip(found, choice.logprobs, strict=True):
        row[list(entry)] = torch.tensor([value.logprob for value in entry.values()])
    return choice.token_ids, found


def run(llm: LLM, some=PROMPTS) -> Found:
    given = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in some]
    return [seen(output) for output in llm.generate(given, PARAMS, use_tqdm=False)]


def same(one: Found, other: Found) -> list[bool]:
    return [a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True)]


def error(reference: Reference, prompt, found: tuple[list[int], Tensor]) -> float:
    """Return the relative error of the logits, up to a constant of each position."""
    tokens, ours = found
    theirs = reference(*prompt, tokens)[:-1]
    assert theirs.argmax(-1).tolist() == tokens
    ours, theirs = (x - x.mean(-1, keepdim=True) for x in (ours, theirs))
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


@pytest.fixture(scope="module")
def together(llm) -> Found:
    return run(llm)


def test_from_images_to_logits_and_tokens(model, together):
    """All prompts at once equal transformers, in chunks that end within images."""
    for prompt, found in zip(PROMPTS, together, strict=True):
        assert error(model[1], prompt, found) <= 1e-5


def test_the_comparison_can_fail(model, together):
    text, images = PROMPTS[1]
    with fails():
        assert error(model[1], (text, [images[1], images[0], images[2]]), together[1]) <= 1e-5


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
def test_adapters_beside_images(model, folder, tmp_path):
    """Adapters leave the vision tower alone.

    Rows without an adapter keep the bits of an engine without adapters.
    """
    right = save_adapter(model[0], tmp_path / "own")
    llm, asked = LLM(folder, **OPTIONS, enable_lora=True), LoRARequest("own", 1, str(tmp_path / "own"))
    given = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in PROMPTS]
    found = [seen(output) for output in llm.generate(given, PARAMS, use_tqdm=False, lora_request=asked)]
    for prompt, each in zip(PROMPTS, found, strict=True):
        assert error(right, prompt, each) <= 1e-5
    mixed = llm.generate(given, PARAMS, use_tqdm=False, lora_request=[asked, None] * 2 + [asked])
    plain = run(LLM(folder, **OPTIONS))
    assert same([seen(output) for output in mixed], [found[0], plain[1], found[2], plain[3], found[4]]) == [True] * 5


def test_two_ranks_see_the_same_images(folder):
    options = OPTIONS | {"execution_mode": "eager", "num_threads": 1}
    right = run(LLM(folder, **options, tp_invariant=True))
    two = LLM(folder, **options, tensor_parallel_size=2)
    for _ in range(2):
        assert all(same(run(two), right))
    assert two.loop.scheduler.stats().prefix_hits > 0
    two.loop.executor.ranks.close()


def test_cached_prefixes_keep_images_apart(llm, together):
    """Cached prefixes keep images apart: the second and third prompt differ only in their last two images."""
    llm.reset_prefix_cache()
    before = llm.loop.scheduler.stats().prefix_hits
    assert all(same(run(llm, PROMPTS[1:2]) + run(llm, PROMPTS[2:3]), together[1:3]))
    shared = llm.loop.scheduler.stats().prefix_hits - before
    tokens = llm.frontend.tokenizer.encode(PROMPTS[1][0])
    _, segments = llm.frontend.images.place(tokens, llm.frontend.images.load(PROMPTS[1][1], ANY))
    assert shared == segments[1].start // 16 * 16 > 0  # in whole blocks
    assert all(same(run(llm), together))


def test_images_are_hashed_by_their_pixels(llm):
    """Equal pixels have one hash, however they are stored.

    Other pixels have another hash.
    """
    images = llm.frontend.images
    again = A.copy()
    again.info["comment"] = b"another image"
    assert images.decode(again).hash == images.decode(A).hash == images.load([data_url(A)], ANY)[0].hash
    assert images.load([data_url(A, "JPEG")], ANY)[0].hash != images.decode(A).hash
    moved = A.copy()
    moved.putpixel((20, 16), (0, 0, 0))
    assert images.decode(moved).hash != images.decode(A).hash


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"max_num_batched_tokens": 128, "enable_chunked_prefill": False, "enable_prefix_caching": False},
        {"max_model_len": 112, "num_gpu_blocks_override": 9},
        {"bucketing_policy": "split", "dtype": "float32"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_bits_depend_on_nothing_else(folder, together, options):
    llm = LLM(folder, **OPTIONS | options)
    assert all(same(run(llm), together))
    llm.loop.scheduler.check()
    if "max_model_len" in options:
        assert llm.loop.scheduler.stats().preemptions > 0


def test_chat_with_images(llm, together):
    """Images in a chat come in any order with text, by URL or as objects."""
    parts = [
        {"type": "text", "text": "First"}, {"type": "image_url", "image_url": {"url": data_url(A)}},
        {"type": "text", "text": "then"}, {"type": "image_pil", "image_pil": B},
    ]  # fmt: skip
    (output,) = llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)
    text = "USER: First <image>\nthen <image>\nASSISTANT:"
    assert output.prompt == text
    ids = llm.frontend.tokenizer.encode(text, add_special_tokens=False)
    assert len(output.prompt_token_ids) == len(ids) + 2 * (TOKENS - 1)
    given = {"prompt_token_ids": ids, "multi_modal_data": {"image": [A, B]}}
    (direct,) = llm.generate(given, PARAMS, use_tqdm=False)
    assert same([seen(output)], [seen(direct)]) == [True]
    (plain,) = llm.chat([{"role": "user", "content": "hi"}], PARAMS, use_tqdm=False)
    assert plain.prompt == "USER: hi ASSISTANT:"


REFUSED = {
    "an image too many": ({"prompt": "x", "multi_modal_data": {"image": A}}, "0 image tokens .* 1 images"),
    "an image too few": ("x <image>", "1 image tokens .* 0 images"),
    "video": ({"prompt": "x", "multi_modal_data": {"video": A}}, "only 'image'"),
    "no image": ({"prompt": "<image>", "multi_modal_data": {"image": 3}}, "a PIL.Image, not int"),
    "too many": ({"prompt": "<image>" * 41, "multi_modal_data": {"image": [A] * 41}}, "41 images of 16 tokens"),
    "too unequal": ({"prompt": "<image>", "multi_modal_data": {"image": A.resize((1 << 16, 1))}}, "max-image-pixels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(llm, name):
    prompt, message = REFUSED[name]
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompt, PARAMS, use_tqdm=False)
    assert not llm.frontend.busy


def test_truncating_never_cuts_an_image(llm):
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=8)
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens cannot cut"):
        llm.generate({"prompt": "a <image>", "multi_modal_data": {"image": A}}, params, use_tqdm=False)


# --- weights and configs ---


def test_both_layouts_of_a_checkpoint(model, tmp_path):
    folder, _ = model
    as_modules(folder, tmp_path / "modules")
    assert set(_names(folder)).isdisjoint(name for name in _names(tmp_path / "modules") if "weight" in name)
    pixels = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    spec = read_spec(json.loads((folder / "config.json").read_text()))
    found = []
    for each in (folder, tmp_path / "modules"):
        weights = load_weights(spec, each, torch.float32, CpuBackend())
        with torch.inference_mode():
            found.append((VisionTower(spec.vision, weights.vision)(pixels), weights.embedding))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def _names(folder: Path) -> Iterator[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        yield from file.keys()


def test_another_tensor_is_refused(model, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, _ = model
    as_modules(folder, tmp_path / "more")
    path = tmp_path / "more" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.vision_tower.extra.weight"] = tensors.pop("model.vision_tower.encoder.layers.1.mlp.fc1.bias")
    save_file(tensors, path, {"format": "pt"})
    spec = read_spec(json.loads((folder / "config.json").read_text()))
    with pytest.raises(
        ModelError, match=r"missing tensors: vision_tower.*fc1\.bias; unknown tensors: vision_tower\.extra"
    ):
        load_weights(spec, path.parent, torch.float32, CpuBackend())


def test_whole_features_have_the_class_embedding_too(tmp_path):
    reference = save_llava(tmp_path, vision_feature_select_strategy="full", vision_feature_layer=-1)
    llm = LLM(str(tmp_path), **OPTIONS)
    assert llm.loop.scheduler.limits.image_tokens == TOKENS + 1
    (found,) = run(llm, PROMPTS[:1])
    assert error(reference, PROMPTS[0], found) <= 1e-5


def test_a_processor_that_counts_other_positions_is_refused(model, tmp_path):
    as_modules(model[0], tmp_path / "old")
    edit_json(tmp_path / "old" / "processor_config.json", num_additional_image_tokens=0)
    with pytest.raises(ModelError, match="an image has 15 positions, but the model has 16"):
        LLM(str(tmp_path / "old"), **OPTIONS)


# --- pixels ---

MODES = ("RGB", "L", "RGBA", "LA", "P", "1", "CMYK", "I;16")


@pytest.mark.parametrize("edge", [SIZE, 20, 37])
def test_pixels_equal_transformers(edge, tmp_path):
    """Pixels equal transformers', for wide, high and small images, and in every mode."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    theirs = CLIPImageProcessorPil(size={"shortest_edge": edge}, crop_size={"height": SIZE, "width": SIZE})
    theirs.save_pretrained(tmp_path)
    config = PixelConfig.read(tmp_path)
    assert config is not None
    ours = Images(config, None, size=SIZE, tokens=TOKENS, token_id=0, max_pixels=1 << 20)
    for number, (width, height) in enumerate([(90, 40), (17, 91), (SIZE, SIZE), (3, 5)]):
        for mode in MODES:
            image = picture(number, width, height, "RGBA" if mode in ("RGBA", "LA") else "RGB")
            image = image.convert("L").convert("I").convert(mode) if mode == "I;16" else image.convert(mode)
            right = torch.tensor(theirs(image, return_tensors="np")["pixel_values"][0])
            found = torch.frombuffer(bytearray(ours.decode(image).pixels), dtype=torch.float32).view(3, SIZE, SIZE)
            assert torch.equal(found, right), (mode, width, height)


# --- the proofs and their planted faults ---


@pytest.fixture(scope="module")
def loop(folder):
    return boot_engine(Settings.load({"model": folder, **OPTIONS}), InlineTransport())


def check(loop) -> BootCheck:
    plan, backend = loop.packer.plan, loop.executor.backend
    record = Record.of(plan, model="llava", platform="cpu", dtype="float32", mode="eager")
    return BootCheck(CheckRunner(loop.scheduler.pool, loop.packer, loop.executor), record, backend.facts)


def mixed_up(patch) -> None:
    """Plant attention that also sees a little of its batch's first image."""
    right = vision.attend_images

    def attend(qkv, num_heads, positions, scale):
        return right(qkv + 1e-3 * qkv[:positions].repeat(len(qkv) // positions, 1), num_heads, positions, scale)

    patch.setattr(vision, "attend_images", attend)


def begun_again(patch) -> None:
    """Plant a chunk that begins within an image with the image's first embeddings."""
    right = EncoderCache.attach

    def attach(self, schedule, slots):
        right(self, schedule, slots)
        if schedule.images:
            spans = [span._replace(source=span.source // self._tokens * self._tokens) for span in schedule.images.spans]
            schedule.images.spans = spans

    patch.setattr(EncoderCache, "attach", attach)


def test_the_check_at_boot_passes(loop):
    done = check(loop)
    done.run("images")
    assert done._record.proof.compared > 20
    loop.scheduler.check()


@pytest.mark.parametrize("plant", [mixed_up, begun_again])
def test_the_check_at_boot_finds(loop, plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(NotInvariant, match="images: "):
        check(loop).run("images")


def paths(folder: str) -> dict[str, bool]:
    settings = Settings.load({"model": folder, **OPTIONS, "boot_check": "off", "max_num_batched_tokens": 256})
    engine = Engine(boot_engine, settings)
    taken = PathRunner(Size(0, 1, STEPS, 0), lambda engine: [])
    found = list(taken.on(engine, "asked", ["images"]))
    assert len(taken.for_few_blocks) == 7
    small = tight(replace(settings, max_num_batched_tokens=48), taken.for_few_blocks)
    found += taken.on(Engine(boot_engine, small), "tight", ["images"])
    return {result.path: result.identical == result.prompts for result in found}


def no_pixels(patch) -> None:
    """Plant block hashes without the image."""
    patch.setattr(prefix, "_images", lambda *_: b"")


PLANTED = {
    "images, prefix cache": no_pixels,
    "images, together": mixed_up,
    "images, chunks, few blocks": begun_again,
}


def test_all_paths_of_verify_agree(folder):
    assert paths(folder) == dict.fromkeys(
        ("images, together", "images, prefix cache", "images, continued", "images, chunks, few blocks"), True
    )


@pytest.mark.parametrize("path", PLANTED)
def test_each_planted_fault_is_found_by_its_path(folder, path, monkeypatch):
    PLANTED[path](monkeypatch)
    assert not paths(folder)[path]
