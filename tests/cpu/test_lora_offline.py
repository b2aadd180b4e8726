"""``LoRARequest``: adapters of prompts, offline."""

from __future__ import annotations

import shutil

import pytest

from preheat import LLM, BeamSearchParams, InvalidRequest, LoRARequest, SamplingParams
from preheat.errors import AdapterError
from tests.adapters import write_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = ["def add(a, b):", "import os", "for i in range(", "class A"]
OPTIONS = {"max_model_len": 128, "max_num_seqs": 4, "num_threads": 1, "dtype": "float32", "skip_warmup": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        write_adapter(made / name, seed)
    write_adapter(made / "wide", 4, rank=32)
    return made


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(enable_lora=True, max_loras=2, lora_modules=(f"first={folder / 'one'}",), **OPTIONS)


def texts(llm, lora_request=None, prompts=PROMPTS):
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora_request)
    return [output.outputs[0].text for output in outputs]


def test_prompts_with_adapters_beside_prompts_without(llm, folder):
    plain = LLM(**OPTIONS)
    one, two = (LoRARequest(name, number, str(folder / name)) for number, name in ((1, "one"), (2, "two")))
    base, first, second = texts(llm), texts(llm, one), texts(llm, two)
    assert base == texts(plain)
    assert all(len({*answers}) == 3 for answers in zip(base, first, second, strict=True))
    mixed = texts(llm, [one, None, two, one])
    assert mixed == [first[0], base[1], second[2], first[3]]
    assert texts(llm, LoRARequest("first", 3, str(folder / "one"))) == first
    assert texts(plain) == base


def test_chats(llm, folder):
    talk = [[{"role": "user", "content": text}] for text in PROMPTS[:2]]
    one = LoRARequest("one", 1, str(folder / "one"))
    plain, tuned, mixed = (
        [output.outputs[0].text for output in llm.chat(talk, GREEDY, use_tqdm=False, lora_request=request)]
        for request in (None, one, [None, one])
    )
    assert plain != tuned and mixed == [plain[0], tuned[1]]


def test_a_search_has_its_adapter_in_all_rounds(llm, folder):
    """A beam of width 1 equals greedy decoding with its adapter.

    Wider searches equal the same searches alone.
    """
    one, two = (LoRARequest(name, number, str(folder / name)) for number, name in ((1, "one"), (2, "two")))
    adapters, params = [one, None, two, one], BeamSearchParams(1, 8, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = [output.sequences[0].tokens for output in llm.beam_search(PROMPTS, params, adapters)]
    right = llm.generate(PROMPTS, greedy, use_tqdm=False, lora_request=adapters)
    assert found == [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in right]
    wide = BeamSearchParams(3, 6)
    alone = [llm.beam_search(PROMPTS[:1], wide, request)[0] for request in (one, None, two)]
    assert len({tuple(output.sequences[0].tokens) for output in alone}) == 3
    assert llm.beam_search(PROMPTS[:1] * 3, wide, [one, None, two]) == alone


def test_more_adapters_than_slots_take_turns(llm, folder):
    requests = [LoRARequest(name, 1, str(folder / name)) for name in ("one", "two", "three")]
    alone = [texts(llm, request, PROMPTS[:1])[0] for request in requests]
    assert texts(llm, [*requests, None], PROMPTS[:1] * 4)[:3] == alone and len({*alone}) == 3


def test_a_name_means_one_adapter_until_its_reload(llm, folder, tmp_path):
    copy = shutil.copytree(folder / "two", tmp_path / "copy")
    before = texts(llm, LoRARequest("changing", 1, str(copy)))
    with pytest.raises(InvalidRequest, match=r"give the adapter in .* another name, or set load_inplace"):
        texts(llm, LoRARequest("changing", 2, str(folder / "three")))
    shutil.rmtree(copy)
    shutil.copytree(folder / "three", copy)
    again = texts(llm, LoRARequest("changing", 1, str(copy), load_inplace=True))
    assert again == texts(llm, LoRARequest("three", 3, str(folder / "three"))) != before


def test_refusals(llm, folder):
    with pytest.raises(AdapterError, match=r"rank 32, but at most 16 is served \(--max-lora-rank\)"):
        texts(llm, LoRARequest("wide", 1, str(folder / "wide")))
    with pytest.raises(AdapterError, match=r"holds no adapter_config\.json"):
        texts(llm, LoRARequest("none", 1, str(folder / "none")))
    with pytest.raises(InvalidRequest, match="4 prompts but 1 lora_requests"):
        texts(llm, [None])
    with pytest.raises(InvalidRequest, match="two lora_requests are named 'one'"):
        texts(llm, [LoRARequest("one", 1, str(folder / "one")), None, None, LoRARequest("one", 1, str(folder / "two"))])
    with pytest.raises(ValueError, match="lora_int_id must be above 0"):
        LoRARequest("a", 0, "b")
    with pytest.raises(ValueError, match="lora_path must not be empty"):
        LoRARequest("a", 1, "")
    assert texts(llm) and not llm.frontend.busy


def test_without_enable_lora(folder):
    with pytest.raises(InvalidRequest, match="enable_lora"):
        texts(LLM(**OPTIONS), LoRARequest("one", 1, str(folder / "one")))
