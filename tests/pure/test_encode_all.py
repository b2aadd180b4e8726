"""Prompts that are encoded together have the ids, or the refusals, of prompts that are encoded one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from preheat.core import Ready, SamplingParams
from preheat.errors import InvalidRequest
from preheat.frontend import input_processor
from preheat.frontend.encoding import in_groups
from preheat.frontend.input_processor import InputProcessor
from preheat.frontend.pairs import Pair
from preheat.frontend.tokenizer import Tokenizer
from preheat.pooling.pair_template import PairTemplate
from tests.tokenizers import byte_level

TEMPLATE = PairTemplate("<|im_start|>Q", "<A>{}<B>{}", "yes?", "<|im_start|>")
TEXTS = st.lists(st.sampled_from(["the ", "a", "😀", "x" * 9, "\n", "<s>", "你好", "\ud800"]), max_size=20).map("".join)
PAIRS = st.builds(
    Pair, TEXTS, TEXTS, st.sampled_from([1, 2]), st.sampled_from([None, 3]), st.sampled_from([None, TEMPLATE])
)
PROMPTS = st.lists(st.one_of(TEXTS, PAIRS, st.just([1, 2, 3])), min_size=1, max_size=8)
PARAMS = st.builds(
    SamplingParams,
    truncate_prompt_tokens=st.sampled_from([None, -1, 7, 5000]),
    truncation_side=st.sampled_from([None, "right"]),
)


class Counting(Tokenizer):
    alone = 0

    def encode(self, *args, **more):
        self.alone += 1
        return super().encode(*args, **more)

    def encode_pair(self, *args, **more):
        self.alone += 1
        return super().encode_pair(*args, **more)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    return InputProcessor(Counting(folder), lambda: Ready(64, 10, 16, 0.0), recommended={})


def outcome(processor: InputProcessor, prompt: object, params: SamplingParams, special: bool, **more) -> object:
    try:
        state = processor.prepare(prompt, params, add_special_tokens=special, cap_length=True, **more)  # type: ignore[arg-type]
    except InvalidRequest as error:
        return str(error)
    return state.prompt, state.prompt_ids


@settings(max_examples=60, deadline=None)
@given(prompts=PROMPTS, params=PARAMS, special=st.booleans(), together=st.sampled_from([8, 1 << 19]))
def test_together_as_one_by_one(processor, prompts, params, special, together) -> None:
    tokenizer, each = processor.tokenizer, [params] * len(prompts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_processor, "TOGETHER", together)
        encoded = processor.encode_all(prompts, each, add_special_tokens=special, cap_length=True)
    before = tokenizer.alone
    for prompt, ids in zip(prompts, encoded, strict=True):
        found = outcome(processor, prompt, params, special, encoded=ids)
        alone, before = tokenizer.alone > before, tokenizer.alone
        assert found == outcome(processor, prompt, params, special)
        assert not alone or isinstance(found, str), "a prompt that is served was encoded again"
        before = tokenizer.alone


def test_other_ids_are_taken_as_they_are(processor) -> None:
    """The control: ids of another text would be noticed."""
    (ids,) = processor.encode_all(["the a"], [SamplingParams()])
    assert outcome(processor, "the ", SamplingParams(), True, encoded=ids) != outcome(
        processor, "the ", SamplingParams(), True
    )


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 12), max_size=20))
def test_groups_are_bounded(sizes: list[int]) -> None:
    groups = in_groups(sizes, 10)
    assert [place for group in groups for place in group] == list(range(len(sizes)))
    assert all(len(group) == 1 or sum(sizes[place] for place in group) <= 10 for group in groups)
    assert len(groups) <= 1 + 2 * sum(sizes) / 10
