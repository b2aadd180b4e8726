"""Gaudi behind a fake device: nothing compiles after ready, memory stays in its budget, each option acts.

No test here has run on a Gaudi. tests/fakes/habana_frameworks/simulator.py says how the fake charges and refuses.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
from collections import Counter
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.backends.hpu.attention import GATHERED, IN_PLACE, TILE_ROWS
from preheat.errors import NotFinite, PreheatError, SettingsError
from preheat.plan.buckets import Bucket, StepSize, padded_work
from preheat.server.openai.answers import ReadyStatus
from preheat.utils.contract import Contract
from preheat.warmup.record import Record
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.fake_hpu import OPTIONS, VOCAB, boot, inserted, model, small_model  # noqa: F401 - a fixture
from tests.cpu.test_random_requests import CHOOSING, DRAWS

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def card():
    with inserted() as card:
        yield card


def record_of(llm: LLM) -> Record:
    return Record.from_json(llm.loop.listener.report())


LIMITS = {
    "contiguous_pa": True, "block_size": 128, "max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def warm(small):
    """Return a warm engine, checked at boot, and its card.

    The engine reads the cache in place where it can.
    """
    with inserted() as card:
        llm = boot(small | LIMITS, on_cold="raise", boot_check="full")
        yield llm, card


def test_a_thousand_random_requests_compile_nothing(warm):
    llm, card = warm
    before, used, usable = dict(card.counts), card.ledger.used, record_of(llm).memory["usable"]
    assert requests(llm, 1_000, seed=2) == 1_000
    assert dict(card.counts) == before
    assert before["graph_compilation"] > 50
    record = record_of(llm)
    assert not any(record.cold.values())
    beside = usable / 0.9 - usable  # the memory outside of the budget
    assert card.ledger.peak <= card.ledger.total - beside
    assert card.ledger.used == used  # nothing was kept


def requests(llm: LLM, count: int, seed: int, wave: int = 100) -> int:
    """Run ``count`` short requests in waves, with random sampling parameters, and return the number of answers."""
    chance, answered = random.Random(seed), 0
    longest = llm.loop.scheduler.limits.max_model_len - 8
    for _ in range(count // wave):
        prompts, params = [], []
        for _ in range(wave):
            length = min(int(chance.expovariate(1 / 12)) + 1, longest)
            prompts.append([chance.randrange(VOCAB) for _ in range(length)])
            values = {name: DRAWS[name](chance) for name in CHOOSING if chance.random() < 0.15}
            params.append(SamplingParams(**{"temperature": 0.0, "max_tokens": chance.randint(1, 2), **values}))
        found = llm.generate(prompts, params, use_tqdm=False)
        answered += sum(bool(each.outputs[0].token_ids) for each in found)
    llm.loop.scheduler.check()
    return answered


def test_without_warm_up_the_same_requests_compile(small, caplog, tmp_path, monkeypatch):
    """Control: without warm-up, the first hundred of the requests compile.

    The mode is lazy, since graphs are captured without a warm-up too. The bridge's logs and the profiler report the
    compilations.
    """
    monkeypatch.delenv("PREHEAT_SKIP_WARMUP")
    monkeypatch.chdir(tmp_path)
    env = {
        "VLLM_SKIP_WARMUP": "true", "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION": "true", "PT_HPU_METRICS_GC_DETAILS": "1",
        "VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL": "true", "VLLM_PROFILER_ENABLED": "true",
    }  # fmt: skip
    options = {name: value for name, value in small.items() if name != "skip_warmup"}
    with inserted(env) as card, caplog.at_level(logging.INFO):
        llm = boot(options | LIMITS, on_cold="count", enforce_eager=True)
        before = card.counts["graph_compilation"]
        assert requests(llm, 100, seed=2) == 100
        assert card.counts["graph_compilation"] > before + 20
        record = record_of(llm)
        assert record.cold["recipe"] == card.counts["graph_compilation"] - before
        said = [line for line in caplog.messages if line.startswith("STEP_GRAPH_COMPILATION: ")]
        counted = sum(int(re.match(r"STEP_GRAPH_COMPILATION: (\d+) in", line).group(1)) for line in said)
        assert counted == record.cold["recipe"]
        assert any("a recipe of" in event.detail for event in record.events)  # only GC_DETAILS adds the recipe
        assert "STEP_CPU_FALLBACKS: 0 in 0.000 s, (" in caplog.text
    assert list(tmp_path.glob("preheat_trace_*.json"))


def test_all_reports_say_that_the_card_is_simulated(warm):
    llm, _ = warm
    record = record_of(llm)
    assert record.simulated
    assert record.platform == "hpu (simulated)"
    assert record.proof.digest.startswith("simulated-")
    no_contract = {"contract": Contract(), "contract_id": "", "engines": 1}
    ready = json.loads(msgspec.json.encode(ReadyStatus(**record.summary(), **no_contract)))
    assert ready["simulated"] is True
    assert "simulated" in record.fingerprint or "simulated" in str(record.proof.parts)
    assert "simulated" not in json.loads(msgspec.json.encode(ReadyStatus(**Record().summary(), **no_contract)))


def test_every_path_has_the_same_bits(warm):
    """The whole check at boot passes: chunks, prefix hits, recomputed rows, buckets, graphs against eager."""
    llm, _ = warm
    record = record_of(llm)
    checks = {entry.name: entry.outcome for entry in record.entries if entry.kind == "check"}
    assert len(checks) >= 9
    assert set(checks.values()) == {"ready"}
    assert record.invariant


def test_prefix_hits_are_read_in_place_and_gathered(warm):
    """Both forms of the decoding program run: rows that share a block are gathered."""
    llm, _ = warm
    attention, seen = llm.loop.executor.attention, []
    send = attention.send

    def watch(turn: int, work: Any, inputs: Any) -> None:
        send(turn, work, inputs)
        seen.append((inputs.decode, attention.variant))

    llm.reset_prefix_cache()
    attention.send = watch
    prompt = list(range(130))
    alone = llm.generate([prompt], GREEDY, use_tqdm=False)
    together = llm.generate([prompt, [*prompt, 7], prompt[:129]], GREEDY, use_tqdm=False)
    attention.send = send
    assert {form for decode, form in seen if decode} == {IN_PLACE, GATHERED}
    assert together[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert together[0].num_cached_tokens


@pytest.mark.parametrize(
    ("lazy", "eager", "mode"),
    [("0", False, "compile"), ("0", True, "eager"), ("1", False, "graphs"), ("1", True, "lazy"), (None, True, "lazy")],
)
def test_the_four_modes_of_the_table(small, lazy, eager, mode):
    with inserted({} if lazy is None else {"PT_HPU_LAZY_MODE": lazy}) as card:
        llm = boot(
            small, enforce_eager=eager, on_cold="raise", max_num_seqs=1, max_model_len=16, max_num_batched_tokens=16
        )
        assert record_of(llm).mode == mode
        assert card.lazy is (mode in ("graphs", "lazy"))
        assert (card.counts["graph_capture"] > 0) is (mode == "graphs")
        compiled = card.counts["graph_compilation"]
        tokens = llm.generate(["abc"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert len(tokens) == 8
        assert card.counts["graph_compilation"] == compiled > 0
        TOKENS.setdefault("modes", tokens)
        assert tokens == TOKENS["modes"]


TOKENS: dict[str, Any] = {}


def test_layers_of_a_graph_and_the_tensor_cache(tmp_path):
    """A graph has one layer unless VLLM_CONFIG_HIDDEN_LAYERS says more.

    The tensor cache makes graphs larger.
    """
    options = OPTIONS | {"model": model(tmp_path, num_hidden_layers=2), "max_num_seqs": 1, "max_model_len": 16,
                         "max_num_batched_tokens": 16}  # fmt: skip
    found = {}
    for name, env in {
        "one": {},
        "two": {
            "VLLM_CONFIG_HIDDEN_LAYERS": "2",
            "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true",
            "VLLM_HANDLE_TOPK_DUPLICATES": "true",
        },
        "kept": {"PT_HPUGRAPH_DISABLE_TENSOR_CACHE": "false"},
    }.items():
        with inserted(env) as card:
            llm = boot(options)
            found[name] = card.counts["graph_capture"], record_of(llm).memory["graphs"]
            if name == "two":
                assert os.environ["PT_HPU_ENABLE_LAZY_COLLECTIVES"] == "1"  # where the bridge reads it
                assert llm.loop.executor.sampler._host.handle_topk_duplicates
    assert found["one"][0] == 2 * found["two"][0]
    assert found["kept"][1] > found["one"][1] > found["two"][1]  # a graph has bytes of its own


def test_graphs_that_do_not_fit_are_skipped_and_named(small):
    """In a budget of a few MiB some buckets run without a graph, and nothing is cold."""
    with inserted() as card:
        llm = boot(small, on_cold="raise", graph_reserved_mem=2e-5)
        record = record_of(llm)
        without = [entry for entry in record.entries if "runs without a graph" in entry.reason]
        assert without
        assert record.memory["graphs"] <= record.memory["graph_pool"]
        compiled = card.counts["graph_compilation"]
        llm.generate([[1] * 60, [2] * 30, [3]], GREEDY, use_tqdm=False)
        assert card.counts["graph_compilation"] == compiled


def test_a_graph_multiplies_as_much_as_its_bucket_reports(warm):
    """A captured program multiplies as much as its bucket reports.

    A decoding program multiplies its rows and its blocks, no more. A prompt program multiplies its tokens, each with
    all blocks that a sequence may have.
    """
    llm, _ = warm
    executor, plan = llm.loop.executor, llm.loop.packer.plan
    attention, qkv = executor.attention, executor.decoder.weights.layers[0].attention.qkv.parts[0]
    of_a_block = 2 * TILE_ROWS * attention._kv_heads * attention._dim * attention._size  # keys, then values
    decode, prompt = plan.dispatcher.phases["decode"].buckets, plan.dispatcher.phases["prompt"].buckets
    assert len(decode) >= 5
    for bucket in (*decode, *prompt):
        rows = executor.backend._sizes.of(qkv.shape, bucket.tokens)
        tiles = attention._num_tiles(bucket.tokens, bucket.rows) * attention._most
        blocks = bucket.blocks if bucket.phase == "decode" else tiles
        found = multiplications(llm, bucket)
        assert found["linear"] == rows * qkv.shape.inputs * qkv.shape.outputs
        assert found["matmul"] == blocks * of_a_block
        assert bucket.tokens <= rows <= bucket.tokens + 15
    cheap, dear = (Bucket.decode(16, blocks=blocks) for blocks in (16, 32))
    assert padded_work(dear) - padded_work(cheap) == 16


def test_padding_equals_the_plans_report(warm):
    """The plan reports the padding of both phases, counted in rows and blocks that captured programs multiply."""
    llm, _ = warm
    executor, plan = llm.loop.executor, llm.loop.packer.plan
    attention, qkv = executor.attention, executor.decoder.weights.layers[0].attention.qkv.parts[0]
    of_a_block = 2 * TILE_ROWS * attention._kv_heads * attention._dim * attention._size

    @cache
    def work(bucket: Bucket) -> int:
        found = multiplications(llm, bucket)
        rows = found["linear"] // (qkv.shape.inputs * qkv.shape.outputs)
        rows -= executor.backend._sizes.of(qkv.shape, bucket.tokens) - bucket.tokens  # the proof's, not the bucket's
        return rows + found["matmul"] // of_a_block if bucket.phase == "decode" else rows

    longest, blocks = plan.limits.max_model_len, plan.limits.max_blocks_per_seq
    needs = {  # one prompt, of lengths evenly on a logarithmic scale; any rows, with contexts likewise
        "prompt": [StepSize("prompt", 1, n, n) for n in evenly(16, longest, 2_000)],
        "decode": [
            StepSize("decode", rows, rows, 0, count)
            for rows in range(1, plan.limits.max_num_seqs + 1)
            for count in evenly(rows, rows * blocks, 16)
        ],
    }
    for phase, sizes in needs.items():
        added = [work(plan.dispatcher.peek(need)) / (need.tokens + need.blocks) - 1 for need in sizes]
        assert plan.padding[phase].mean == pytest.approx(sum(added) / len(added))
        assert plan.padding[phase].worst == pytest.approx(max(added)) != 0


def evenly(low: int, high: int, samples: int) -> list[int]:
    return [round(value) for value in np.geomspace(low, high, samples).tolist()]


def multiplications(llm: LLM, bucket: Bucket) -> Counter[str]:
    """Count the multiplications in the graphs of a forward program's gathering form, by operation."""
    forwards = llm.loop.executor.forwards._graphs.items()
    modules = [module for (part, form), module in forwards if part.program.size == bucket and form == GATHERED]
    assert modules, bucket
    return sum((graph._program.multiplications for module in modules for graph in module.hpu_graphs), Counter())


@pytest.mark.parametrize(
    ("refused", "what"),
    [
        (lambda x: x.nonzero(), "shape"),
        (lambda x: x[x > 0], "shape"),
        (lambda x: x.sum().item(), "read by the host"),
        (lambda x: torch.equal(x, x), "read by the host"),
        (lambda x: torch.repeat_interleave(x, torch.tensor([1, 2, 3])), "shape"),
    ],
)
def test_a_graph_refuses_the_operations_that_a_gaudi_refuses(card, refused, what):
    from habana_frameworks.simulator import GraphRefused
    from habana_frameworks.torch import hpu

    class Refused(torch.nn.Module):
        def forward(self, x):
            return refused(x)

    x = torch.arange(3.0)
    with pytest.raises(GraphRefused, match=what):
        hpu.wrap_in_hpu_graph(Refused())(x)
    assert card.counts["graph_capture"] == 0


def test_a_replay_computes_the_recorded_operations(card):
    """A replay uses its static tensors' current values and writes its first results.

    A new shape is a new graph.
    """
    from habana_frameworks.torch import hpu

    class Sum(torch.nn.Module):
        def forward(self, x):
            y = x * 2
            y += 1
            return y.view(-1)[:3].clone(), state.add_(x.sum())

    state, module = torch.zeros(()), hpu.wrap_in_hpu_graph(Sum())
    x = torch.arange(4.0)
    first, _ = module(x)
    assert first.tolist() == [1, 3, 5]
    assert state.item() == 6
    x += 1
    again, _ = module(x)
    assert again is first
    assert first.tolist() == [3, 5, 7]
    assert state.item() == 16
    assert card.counts["graph_capture"] == 1
    module(torch.arange(6.0))
    assert card.counts["graph_capture"] == 2


def test_memory_beyond_the_card_is_refused(card):
    """Memory beyond the card is refused.

    The card here is small enough for the host's memory.
    """
    from habana_frameworks.simulator import GIB, HERE

    card.ledger.total = 3 * GIB
    kept = torch.zeros(2 * GIB, dtype=torch.uint8, device=HERE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(2 * GIB, dtype=torch.uint8, device=HERE)
    del kept
    assert torch.zeros(2 * GIB, dtype=torch.uint8, device=HERE).shape == (2 * GIB,)


def test_a_fake_is_never_taken_unasked(small, monkeypatch):
    from preheat.backends import registry
    from preheat.backends.hpu import detect

    with inserted():
        assert not detect.detected()
        assert registry.pick_backend("auto").facts.name != "hpu (simulated)"
        with pytest.raises(SettingsError, match="is a fake"):
            boot(small, use_fake_hpu=False)
        with pytest.raises(SettingsError, match="the fake device is a Gaudi"):
            boot(small, device="cpu")
    monkeypatch.setattr(detect, "frameworks", lambda: None)
    with pytest.raises(PreheatError, match="is not installed"):
        boot(small)


def test_softmax_variants_are_served_or_refused(small, caplog):
    with inserted({"VLLM_PA_SOFTMAX_IMPL": "scatter_reduce"}), caplog.at_level(logging.INFO):
        boot(small, skip_warmup=True, max_num_seqs=1, max_model_len=16)
    assert "Softmax of attention (scatter_reduce): each row by its own maximum" in caplog.text
    with inserted({"VLLM_PA_SOFTMAX_IMPL": "wsum"}), pytest.raises(SettingsError, match="rows of other requests"):
        boot(small)


@pytest.mark.parametrize("name", ["mpt with six heads", "mistral with window", "qwen3 moe"])
def test_alibi_windows_and_experts_have_the_answers_of_the_cpu(name, tmp_path):
    """Families in chunks and after a cached prefix, and experts in graphs, give the CPU's answers."""
    save_checkpoint(MODELS[name], tmp_path)
    options = {
        "model": str(tmp_path), "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 96, "max_num_seqs": 2,
        "max_num_batched_tokens": 48, "block_size": 16, "boot_check": "off", "cache_dir": "off",
    }  # fmt: skip
    chance = random.Random(4)
    first = [chance.randrange(199) for _ in range(60)]
    asked, params = (
        [first, [*first[:40], 1, 2]],
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3),
    )
    with inserted() as card:
        lazy = name != "qwen3 moe"
        ours = boot(options, device="hpu", use_fake_hpu=True, skip_warmup=True, enforce_eager=lazy)
        ours = ours.generate(asked, params, use_tqdm=False)
        assert bool(card.counts["graph_capture"]) is not lazy
    theirs = boot(options, device="cpu").generate(asked, params, use_tqdm=False)
    for one, other in zip(ours, theirs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)


def logprobs(output: Any) -> list[float]:
    return [max(entry.logprob for entry in step.values()) for step in output.outputs[0].logprobs]


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_a_row_that_is_not_finite_ends_alone(cache, tmp_path):
    """A row that is not finite ends alone.

    It changes neither the next owner of its blocks nor a request with its cached prefix.
    """
    save_checkpoint(MODELS["llama"], tmp_path)
    options = {
        "model": str(tmp_path), "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 96, "max_num_seqs": 2,
        "max_num_batched_tokens": 48, "block_size": 16, "boot_check": "off", "cache_dir": "off", "enforce_eager": True,
        "num_gpu_blocks_override": 14, "kv_cache_dtype": cache,
    }  # fmt: skip
    prompt, loud = [token % 150 + 20 for token in range(0, 600, 7)][:40], 7

    def tokens(asked: list[int], salt: str, **params: Any) -> list[int]:
        given = {"prompt_token_ids": asked, "cache_salt": salt}
        wanted = SamplingParams(max_tokens=5, ignore_eos=True, **params)
        return list(llm.generate([given], wanted, use_tqdm=False)[0].outputs[0].token_ids)

    with inserted():
        llm = boot(options, device="hpu", use_fake_hpu=True, skip_warmup=True)
        llm.loop.executor.decoder.weights.embedding[loud] = torch.inf
        for params in ({"temperature": 0}, {"temperature": 0.9, "seed": 1}, {"temperature": 0, "prompt_logprobs": 1}):
            right = tokens(prompt, "alone", **params)
            with pytest.raises(NotFinite, match="the model"):
                tokens([*prompt[:20], loud, *prompt], "shared", **params)
            assert tokens(prompt, "shared", **params) == right
        assert llm.loop.scheduler.stats().corrupted_requests == 3
