"""LLaVA on a GPU against transformers, from images to logits and tokens, and the bits of all its paths.

transformers computes on the host, in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from preheat import LLM
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.prompts import REDUCED, make_prompts
from preheat.verify.verification import Verification
from tests import llava
from tests.cpu.test_llava import PARAMS, PROMPTS, Found, error, seen
from tests.llava import Reference, save_llava

WIDE = {
    "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
"""Sizes beside the sizes of the tests on a CPU; the heads there are too small for a matrix unit."""
OPTIONS = {
    "device": "cuda", "max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": 16, "num_gpu_blocks_override": 80,
    "max_logprobs": 400,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("llava")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llava, "TEXT", llava.TEXT | WIDE)
        return folder, save_llava(folder)


RGB = [(text, [image.convert("RGB") for image in images]) for text, images in PROMPTS]
"""Versions of transformers differ in their handling of transparency; the tests on a CPU cover it."""


def run(llm: LLM) -> Found:
    given = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in RGB]
    return [seen(output) for output in llm.generate(given, PARAMS, use_tqdm=False)]


def test_from_images_to_logits_and_tokens(model):
    """Compare all prompts at once, in chunks that end within images."""
    folder, reference = model
    for prompt, found in zip(RGB, run(LLM(str(folder), dtype="float32", **OPTIONS)), strict=True):
        assert error(reference, prompt, found) <= 1e-5


def test_bits_are_the_same_alone_among_others_and_from_the_cache(model):
    """Compare in bfloat16."""
    llm = LLM(str(model[0]), dtype="bfloat16", **OPTIONS)
    together, again = run(llm), run(llm)
    llm.reset_prefix_cache()
    alone: Found = []
    for text, images in RGB:
        given = [{"prompt": text, "multi_modal_data": {"image": images}}]
        alone.append(seen(llm.generate(given, PARAMS, use_tqdm=False)[0]))
        llm.reset_prefix_cache()
    for one, two, three in zip(together, again, alone, strict=True):
        assert one[0] == two[0] == three[0]
        assert torch.equal(one[1], two[1]) and torch.equal(one[1], three[1])


def test_verify_finds_nothing(model):
    settings = Settings.load({**OPTIONS, "model": str(model[0]), "dtype": "bfloat16", "num_gpu_blocks_override": 400})

    def prompts(engine):
        return make_prompts(REDUCED, engine.vocab_size, engine.ready.max_model_len)

    asked = Verification(boot_engine, settings, prompts, REDUCED)
    results = list(asked.results())
    assert any("images" in result.path for result in results)
    assert asked.verdict(results).ok, [str(result.first) for result in results]
