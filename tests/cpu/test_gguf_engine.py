"""GGUF files through the engine: the bundled model's answers, tokenizer and template, and llama.cpp's greedy text."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat import LLM, SamplingParams
from preheat.cli.main import main
from preheat.errors import ModelError
from preheat.model.files import BUNDLED_PATH, find_model
from preheat.settings import Settings
from tests.gguf_files import tokenizer_fields, write_checkpoint

OPTIONS = {
    "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_threads": 1,
}  # fmt: skip
PROMPTS = ["def fibonacci(n):\n", "import os\n\nclass Reader:\n    def"]
MESSAGES = [{"role": "user", "content": "Write a sort function"}]


def write(folder: Path, kind: str, **fields: object) -> str:
    """Return the bundled model as a GGUF file."""
    given = tokenizer_fields(BUNDLED_PATH) | fields
    return str(write_checkpoint(BUNDLED_PATH, folder / f"{kind}.gguf", "llama", kind, **given))


def answers(model: str, **options: object) -> list[tuple[list[int], list[int], str]]:
    """Return prompts, greedy answers and their texts, of completions and of a conversation."""
    llm = LLM(model, **OPTIONS | options)
    params = SamplingParams(temperature=0, max_tokens=24)
    outputs = [*llm.generate(PROMPTS, params), *llm.chat(MESSAGES, params)]
    return [(each.prompt_token_ids, list(each.outputs[0].token_ids), each.outputs[0].text) for each in outputs]


def test_a_file_answers_as_the_original(tmp_path, monkeypatch):
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "cache"))
    original = answers("bundled")
    assert answers(write(tmp_path, "BF16")) == original
    bare = write(tmp_path, "BF16", **{"tokenizer.ggml.pre": "unheard"})
    with pytest.raises(ModelError, match=r"'unheard' that splits text is not known; .* with --tokenizer"):
        find_model(Settings(model=bare))
    assert answers(bare, tokenizer="bundled") == original
    assert answers("bundled", tokenizer=write(tmp_path, "F32")) == original
    assert answers(write(tmp_path, "Q4_0")) != original  # control: other weights are seen


def test_the_plan_needs_no_more_than_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "cache"))
    file = write(tmp_path, "Q4_0")
    assert main(["plan", "--model", file, "--max-model-len", "128"]) == 0
    assert "tokens" in capsys.readouterr().out
    assert main(["plan", "--model", str(tmp_path / "absent.gguf")]) != 0
    assert "absent.gguf cannot be read: No such file" in capsys.readouterr().err


def test_greedy_text_is_llama_cpp_s(tmp_path, monkeypatch):
    """In F16 and Q8_0, which llama.cpp computes nearly as we do."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "cache"))
    for kind in ("F16", "Q8_0"):
        file = write(tmp_path, kind)
        other = llama_cpp.Llama(file, n_ctx=128, n_threads=1, verbose=False)
        for (prompt, answer, _), text in zip(answers(file), PROMPTS, strict=False):
            assert prompt == other.tokenize(text.encode(), add_bos=True, special=True)
            other.reset()
            found = other.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
            assert answer == [next(found) for _ in answer]
