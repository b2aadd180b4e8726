"""A tiny model with random weights that speaks any text, and its answers to schemas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
from tokenizers import AddedToken, Tokenizer

from preheat import LLM, SamplingParams, StructuredOutputsParams
from preheat.model.files import BUNDLED_PATH
from tests.schemas import Schema
from tests.tokenizers import byte_level

MOST = 400
"""Maximum of tokens, more than any text of the corpus has."""


def write_model(folder: Path) -> Path:
    """Write a config and a tokenizer."""
    backend = byte_level()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16,
             "vocab_size": backend.get_vocab_size() + 5, "eos_token_id": 1}  # fmt: skip
    config = json.loads((BUNDLED_PATH / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    backend.save(str(folder / "tokenizer.json"))
    return folder


def write_thinker(folder: Path) -> Path:
    """Write a tiny model with the marks of reasoning in its tokenizer."""
    write_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def random_llm(folder: Path, **options: Any) -> LLM:
    usual = {"load_format": "dummy", "device": "cpu", "max_model_len": 512, "max_num_seqs": 32, "seed": 0}
    return LLM(str(write_model(folder)), **usual | options)


def held(temperature: float = 1.5, seed: int = 0, max_tokens: int = MOST, **asked: Any) -> SamplingParams:
    """Return sampling parameters with a grammar."""
    params = StructuredOutputsParams(**asked)
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, structured_outputs=params)


def texts(llm: LLM, params: Iterable[SamplingParams], prompt: str = "x") -> list[tuple[str, str | None]]:
    """Return text and finish reason of each request, all run at once."""
    listed = list(params)
    found = llm.generate([prompt] * len(listed), listed, use_tqdm=False)
    return [(each.outputs[0].text, each.outputs[0].finish_reason) for each in found]


def problem(schema: Schema, text: str, reason: str | None) -> str:
    """Return the error of an answer, or "" if it is right."""
    if reason != "stop":
        return f"it ended by {reason}"
    try:
        kind = jsonschema.Draft202012Validator
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)
    return ""


def problems(llm: LLM, schemas: Mapping[str, Schema], seed: int = 0, max_tokens: int = MOST) -> dict[str, str]:
    """Return the schemas, by name, that their answers break, with the errors.

    The answers have seeds from ``seed``.
    """
    params = [held(seed=at, max_tokens=max_tokens, json=schema) for at, schema in enumerate(schemas.values(), seed)]
    answers = zip(schemas.items(), texts(llm, params), strict=True)
    found = {name: (problem(schema, *answer), answer) for (name, schema), answer in answers}
    return {name: f"{wrong}: {answer}" for name, (wrong, answer) in found.items() if wrong}
