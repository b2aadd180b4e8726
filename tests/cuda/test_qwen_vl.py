"""Qwen3-VL and Qwen3.5 on a GPU against transformers, from images to logits and tokens, and the bits of all paths.

transformers computes on the host, in float32, and Qwen3.5 in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from preheat import LLM
from preheat.plan.step_items import EncoderItem
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.prompts import REDUCED, make_prompts
from preheat.verify.verification import Verification
from tests import qwen_vl
from tests.cpu.test_model_families import WITH_STATES
from tests.cpu.test_qwen_vl import PARAMS, PROMPTS, Found, error, same, seen
from tests.llava import Reference
from tests.qwen_vl import reference, save_model_and_tokenizer

WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "head_dim": 64,
    "rope_parameters": qwen_vl.TEXT["rope_parameters"] | {"mrope_section": [12, 10, 10]},
}  # fmt: skip
"""Sizes beside the sizes of the tests on a CPU; the heads there are too small for a matrix unit."""
STATES: dict[str, Any] = {
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "rope_parameters": WIDE["rope_parameters"] | {"mrope_section": [6, 5, 5], "partial_rotary_factor": 0.5},
}  # fmt: skip
"""The same of layers with states."""

OPTIONS: dict[str, Any] = {
    "device": "cuda", "max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": 16, "num_gpu_blocks_override": 80,
    "max_logprobs": 400,
}  # fmt: skip
RGB = [(text, [image.convert("RGB") for image in images]) for text, images in PROMPTS]
"""Versions of transformers differ in their handling of transparency; the tests on a CPU cover it."""


def widen(patch: pytest.MonkeyPatch) -> None:
    """Make models of :mod:`tests.qwen_vl` wide enough for a GPU."""
    patch.setattr(qwen_vl, "TEXT", qwen_vl.TEXT | WIDE)
    patch.setattr(qwen_vl, "HYBRID", qwen_vl.HYBRID | STATES)
    patch.setattr(qwen_vl, "VISION", qwen_vl.VISION | {"out_hidden_size": WIDE["hidden_size"]})


class Saved(NamedTuple):
    folder: Path
    reference: Reference
    bound: float


@pytest.fixture(scope="module", params=["Qwen3VL", "Qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("qwen_vl")
    with pytest.MonkeyPatch.context() as patch:
        widen(patch)
        theirs, *more = save_model_and_tokenizer(folder, family=request.param)
    if request.param == "Qwen3VL":
        return Saved(folder, reference(theirs, *more), 1e-5)
    return Saved(folder, reference(theirs.double(), *more), WITH_STATES)


def run(llm: LLM, some: Any = RGB) -> Found:
    given = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in some]
    return [seen(output) for output in llm.generate(given, PARAMS, use_tqdm=False)]


def test_from_images_of_ten_shapes_to_logits_and_tokens(model):
    """Compare all prompts at once, in chunks that end within images."""
    for prompt, found in zip(RGB, run(LLM(str(model.folder), dtype="float32", **OPTIONS)), strict=True):
        assert error(model.reference, prompt, found) <= model.bound


def test_bits_are_the_same_alone_among_others_and_from_the_cache(model):
    """Compare in bfloat16, in graphs and eager; every rung is warm."""
    warm = {"skip_warmup": False, "boot_check": "quick", "on_cold": "raise"}
    llm = LLM(str(model.folder), dtype="bfloat16", **OPTIONS, **warm)
    assert [item for item in llm.loop.packer.plan.items if isinstance(item, EncoderItem)]
    together, again = run(llm), run(llm)
    for _ in range(2):
        assert all(same(run(llm, RGB[10:12]), together[10:12]))
    assert llm.loop.scheduler.stats().prefix_hits > 0
    alone: Found = []
    for each in RGB:
        llm.reset_prefix_cache()
        alone += run(llm, [each])
    eager = run(LLM(str(model.folder), dtype="bfloat16", enforce_eager=True, **OPTIONS))
    assert all(same(together, again)) and all(same(together, alone)) and all(same(together, eager))
    assert not torch.equal(together[10][1], together[11][1])  # control: two images in another order


def test_verify_finds_nothing(model):
    settings = Settings.load(
        {**OPTIONS, "model": str(model.folder), "dtype": "bfloat16", "num_gpu_blocks_override": 400}
    )

    def prompts(engine):
        return make_prompts(REDUCED, engine.vocab_size, engine.ready.max_model_len)

    asked = Verification(boot_engine, settings, prompts, REDUCED)
    results = list(asked.results())
    assert any("images" in result.path for result in results)
    assert asked.verdict(results).ok, [str(result.first) for result in results]
