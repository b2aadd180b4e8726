"""Qwen3.5 with images: layers with states behind images of any size, against transformers and with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat import LLM
from preheat.errors import NotInvariant, SettingsError
from preheat.execution import mixers
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.mtp import mtp_spec
from preheat.schedule import slots
from tests.controls import fails
from tests.cpu.test_hybrids import a_late_window, changed
from tests.cpu.test_model_families import WITH_STATES
from tests.cpu.test_qwen_vl import OPTIONS, PROMPTS, check, error, run, same
from tests.llava import Reference
from tests.qwen_vl import reference, save_model_and_tokenizer

MORE = OPTIONS | {"execution_mode": "eager", "num_threads": 1}
FAMILIES = ["Qwen3_5", "Qwen3_5Moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A checkpoint, and transformers in float64: in float32 its own error is up to 2e-5, by the processor."""
    folder = tmp_path_factory.mktemp("images")
    theirs, *more = save_model_and_tokenizer(folder, family=request.param)
    return folder, reference(theirs.double(), *more)


@pytest.fixture(scope="module")
def llm(model: tuple[Path, Reference]) -> LLM:
    return LLM(str(model[0]), **MORE)


def test_from_images_to_logits_and_tokens(model, llm, monkeypatch):
    """All prompts at once equal transformers, in chunks that end within images.

    Control: without places on three axes they do not.
    """
    bound = WITH_STATES if "Moe" in (model[0] / "config.json").read_text() else 1e-5
    for prompt, found in zip(PROMPTS, run(llm), strict=True):
        assert error(model[1], prompt, found) <= bound
    monkeypatch.setattr(slots, "places_of", lambda segments: None)
    llm.reset_prefix_cache()
    (found,) = run(llm, PROMPTS[10:11])
    llm.reset_prefix_cache()
    with fails():
        assert error(model[1], PROMPTS[10], found) <= bound


@pytest.mark.parametrize("model", FAMILIES[:1], indirect=True)
def test_states_behind_images_have_the_same_bits(model, llm):
    """The second and third of these prompts differ only in their last two images, so a state must not be shared."""
    llm.reset_prefix_cache()
    some = PROMPTS[9:]
    found, before = run(llm, some), llm.loop.scheduler.stats().prefix_hits
    assert all(same(run(llm, some[::-1]), found[::-1]))
    assert llm.loop.scheduler.stats().prefix_hits > before
    llm.loop.scheduler.check()
    tight = {"max_num_batched_tokens": 9, "num_gpu_blocks_override": 9, "max_model_len": 120}
    assert all(same(run(LLM(str(model[0]), **MORE | tight), some), found))


@pytest.mark.parametrize("model", FAMILIES[:1], indirect=True)
def test_the_check_at_boot_sees_a_fault(llm, monkeypatch):
    """Control: windows restored one token late."""
    done = check(llm.loop)
    done.run("images")
    monkeypatch.setattr(mixers, "delta_rule", changed(a_late_window))
    with pytest.raises(NotInvariant, match="images: "):
        done.run("images")


@pytest.mark.parametrize("model", FAMILIES[:1], indirect=True)
def test_drafts_of_the_own_layer_need_texts_alone(model):
    """The layer is described without the tower, and an engine that sees images refuses it."""
    values = read_config(model[0])
    assert mtp_spec(values, read_spec(values)).decoder.vision is None
    with pytest.raises(SettingsError, match="language_model_only"):
        LLM(str(model[0]), **MORE, speculative_config={"method": "mtp", "num_speculative_tokens": 1})
