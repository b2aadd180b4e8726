"""Steps of compiled functions: embeddings, the tokens that go on behind the last attention, and torch's part: none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from preheat import LLM, SamplingParams

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")

from preheat.backends.cpu.llvm.embed import TABLES
from preheat.ops.embedding import embed

OPTIONS: dict[str, Any] = {
    "execution_mode": "llvm", "num_threads": 2, "skip_warmup": True, "boot_check": "off", "on_cold": "off",
    "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", **OPTIONS)


# --- embeddings ---


@pytest.mark.parametrize("stored", TABLES)
def test_embeddings_are_rows_of_the_table(llm, stored):
    compiled, table = llm.loop.executor.decoder.functions.embed, torch.randn(7, 48).to(getattr(torch, stored))
    tokens, out = torch.tensor([6, 0, 3, 3], dtype=torch.int32), torch.empty(4, 48)
    assert compiled.takes(table, out)
    compiled(tokens, table, out)
    assert torch.equal(out, table[tokens].float())
    assert not compiled.takes(torch.randn(7, 40), torch.empty(4, 40))


def test_rows_of_types_and_positions_are_added_in_this_order(llm):
    """A sum has the bits of the reference; a type or a position outside its table is an error."""
    compiled, chance = llm.loop.executor.decoder.functions.embed, torch.Generator().manual_seed(0)
    table, types, positions = (torch.randn(size, 48, generator=chance) for size in (7, 3, 9))
    tokens, at = torch.tensor([6, 7, 20, 13], dtype=torch.int32), torch.tensor([0, 8, 3, 3], dtype=torch.int32)
    added, out = [(types, tokens, 7), (positions, at, 1)], torch.empty(4, 48)
    assert compiled.takes(table, out, added)
    compiled(tokens, table, out, types=3, added=added)
    assert torch.equal(out, embed(tokens, table, types=types, positions=positions, at=at))
    compiled(tokens, table, out, types=3, added=added[::-1])
    assert not torch.equal(out, embed(tokens, table, types=types, positions=positions, at=at))
    for ids, places, rows in ((tokens + 1, at, 7), (tokens, at + 1, 9), (tokens, at - 1, 9)):
        with pytest.raises(IndexError, match=f"outside of the table's {rows} rows"):
            compiled(ids, table, out, types=3, added=[(types, tokens, 7), (positions, places, 1)])
    assert not compiled.takes(table.bfloat16(), out, added)


@pytest.mark.parametrize("token", [7, -1])
def test_a_token_outside_of_the_table_is_an_error(llm, token):
    tokens = torch.tensor([1, token], dtype=torch.int32)
    with pytest.raises(IndexError, match="1 of 2 tokens are outside of the table's 7 rows"):
        llm.loop.executor.decoder.functions.embed(tokens, torch.randn(7, 48), torch.empty(2, 48))


# --- behind the last attention ---


def test_tokens_that_go_on_have_the_bits_that_they_have_among_all(llm):
    executor = llm.loop.executor
    functions, states = executor.decoder.functions, executor.states
    attended, residual = (torch.randn(6, each.shape[1]) for each in states[:2])
    before, index = residual.clone(), torch.tensor([4, 0, 5], dtype=torch.int32)
    all_ = functions.finish(attended, residual.clone())
    taken = functions.take(attended, residual, index).clone()
    assert torch.equal(taken, all_[index])
    assert torch.equal(residual, before)
    assert not torch.equal(functions.take(attended, residual, index.flip(0)), taken)


# --- steps that go on ---


def logits_of(llm: LLM, goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the logits of all steps of two requests; the steps may go on after their launch, or not."""
    found, executor = list[Tensor](), llm.loop.executor
    monkeypatch.setattr(executor, "goes_on", goes_on)
    executor.watch_logits(lambda logits, batch: found.append(logits.clone()))
    params = [SamplingParams(temperature=heat, seed=1, max_tokens=6, ignore_eos=True, logprobs=1) for heat in (0, 1)]
    llm.generate(["Once upon", "a time"], params, use_tqdm=False)
    executor.watch_logits(None)
    return found


def test_steps_that_go_on_have_the_bits_of_others(llm, monkeypatch):
    others, found = (logits_of(llm, goes_on, monkeypatch) for goes_on in (False, True))
    assert len(found) == len(others) > 0
    assert all(map(torch.equal, found, others))


def test_a_step_without_its_last_layer_is_seen(llm, monkeypatch):
    others, functions = logits_of(llm, False, monkeypatch), llm.loop.executor.decoder.functions
    right = functions._whole[-5].copy()
    functions._whole[-5] = functions._whole[0]
    found = logits_of(llm, True, monkeypatch)
    functions._whole[-5] = right
    assert not any(map(torch.equal, found, others))


def test_results_reach_the_frontend_while_the_next_step_runs(llm, monkeypatch):
    """Each step is launched before its predecessor's tokens are sent, and after they are known."""
    loop, seen = llm.loop, list[str]()
    for owner, name in ((loop.scheduler, "process_results"), (loop.executor, "launch"), (loop.transport, "put")):
        right = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *of, right=right, name=name: (seen.append(name), right(*of))[1])
    llm.generate("Once", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert seen == ["launch", *["process_results", "launch", "put"] * 2, "process_results", "put"]


def test_a_canceled_request_leaves_its_step_alone(llm):
    """The step goes on beside the cancellation, and the next request has the answer of a request alone."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (alone,) = llm.generate("a time", params, use_tqdm=False)
    engine = llm.llm_engine
    engine.add_request("canceled", "Once upon", params)
    engine.step()
    assert llm.loop._in_flight
    engine.abort_request(["canceled"])
    (again,) = llm.generate("a time", params, use_tqdm=False)
    assert again.outputs[0].token_ids == alone.outputs[0].token_ids


# --- torch's part of a step ---


class Operations(TorchDispatchMode):
    """Names of torch's operations that run in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def operations(llm: LLM, **params: Any) -> list[str]:
    """Return torch's operations in a decoding step that is not the first one."""
    llm.enqueue(["Once upon", "a time"], SamplingParams(max_tokens=8, ignore_eos=True, **params))
    for _ in range(3):
        llm.advance()
    with Operations() as found:
        llm.advance()
    llm.wait_for_completion(use_tqdm=False)
    return found.names


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_p": 0.9, "top_k": 30}], ids=str)
def test_a_decoding_step_runs_no_operation_of_torch(llm, params):
    """An operation takes some 30 us: its code and data leave the caches while the functions run."""
    assert operations(llm, **params) == []


def test_an_operation_of_torch_is_seen(llm):
    assert any("log_softmax" in name for name in operations(llm, temperature=0, logprobs=1))
