"""Adapters run by the real engine give the same answers over HTTP as offline."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from preheat import LLM, LoRARequest, SamplingParams
from tests.adapters import write_adapter
from tests.api.conftest import Server, serving
from tests.api.test_adapters import LOAD, UNLOAD

PROMPTS = ["def add(a, b):", "import os", "for i in range("]
OPTIONS: dict[str, Any] = {
    "max_model_len": 128, "max_num_seqs": 4, "num_threads": 1, "dtype": "float32", "skip_warmup": True,
    "enable_lora": True, "max_loras": 2, "max_cpu_loras": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        write_adapter(made / name, seed)
    write_adapter(made / "wide", 2, rank=32)
    write_adapter(made / "dora", 3, use_dora=True)
    return made


@pytest.fixture(scope="module")
def adapted(root: Path) -> Iterator[Server]:
    with serving(
        "bundled", engine=None, lora_modules=[f"one={root / 'one'}"], allow_runtime_lora_updating=True,
        lora_root=str(root), **OPTIONS,
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def offline(root: Path) -> dict[str, list[str]]:
    """Return the offline answers of the model itself and of two adapters."""
    llm, params = LLM(**OPTIONS), SamplingParams(temperature=0, max_tokens=8)
    named = {name: LoRARequest(name, 1, str(root / name)) for name in ("one", "two")}
    return {
        name: [
            output.outputs[0].text
            for output in llm.generate(PROMPTS, params, use_tqdm=False, lora_request=named.get(name))
        ]
        for name in ("bundled", "one", "two")
    }


def said(server: Server, model: str, prompt: str) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    return client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=8).choices[0].text


def test_served_answers_equal_offline_answers(adapted: Server, root: Path, offline: dict[str, list[str]]) -> None:
    """The answers of adapters equal the offline ones.

    That holds for an adapter loaded meanwhile, and for all models in one batch.
    """
    assert adapted.post(LOAD, {"lora_name": "two", "lora_path": "two"}).status == 200
    asked = [(name, prompt) for name in ("one", "bundled", "two") for prompt in PROMPTS]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda each: said(adapted, *each), asked))
    assert found == offline["one"] + offline["bundled"] + offline["two"]
    assert len({found[0], found[3], found[6]}) == 3
    client = openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none")
    assert [(card.id, card.parent) for card in client.models.list()] == [  # type: ignore[attr-defined]
        ("bundled", None), ("one", "bundled"), ("two", "bundled"),
    ]  # fmt: skip
    assert adapted.post(UNLOAD, {"lora_name": "two"}).status == 200
    assert adapted.post("/v1/completions", {"model": "two", "prompt": "x"}).status == 404


def test_a_search_is_the_adapters(adapted: Server) -> None:
    """A beam of width 1 is the adapter's greedy answer."""
    body = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    for model in ("one", "bundled"):
        greedy, search = (adapted.post("/v1/completions", {**body, "model": model, "use_beam_search": use}).json
                          for use in (False, True))  # fmt: skip
        assert search["choices"][0]["text"] == greedy["choices"][0]["text"]


def test_a_name_that_changes_its_adapter_answers_anew(adapted: Server, offline: dict[str, list[str]]) -> None:
    """A name that changes its adapter answers from the new adapter.

    No block that the prefix cache holds of the old adapter is used.
    """
    for name in ("one", "two", "one"):
        assert adapted.post(LOAD, {"lora_name": "turning", "lora_path": name, "load_inplace": True}).status == 200
        assert said(adapted, "turning", PROMPTS[0]) == offline[name][0]
    assert adapted.post(UNLOAD, {"lora_name": "turning"}).status == 200


def test_adapters_that_cannot_be_served_are_refused(adapted: Server) -> None:
    for path, why in (("wide", "--max-lora-rank"), ("dora", "use_dora"), ("none", "cannot be read")):
        answer = adapted.post(LOAD, {"lora_name": "refused", "lora_path": path})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_adapter", "lora_path")
        assert why in answer.error["message"]
    assert adapted.post("/v1/completions", {"model": "refused", "prompt": "x"}).status == 404
    assert adapted.post(LOAD, {"lora_name": "one", "lora_path": "two"}).status == 409
