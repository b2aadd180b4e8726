"""Adapters of experts on a GPU: a row's bits depend on the row and its adapter alone.

Rows without an adapter have the bits of an engine without any, plain or quantized. Some adapters adapt experts alone,
some adapt no experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.adapter import write_adapter
from preheat import LLM, LoRARequest, SamplingParams
from preheat.backends.cuda.backend import CudaBackend
from preheat.backends.cuda.device.detect import card_at
from preheat.backends.cuda.matmul.config import ExpertsShape
from preheat.backends.cuda.matmul.moe.experts import experts_forward
from preheat.backends.cuda.matmul.moe.tuner import Bench
from preheat.backends.cuda.matmul.rules import experts_rule
from preheat.lora.adapter import adapted_modules, expert_modules
from preheat.model.families import read_spec
from preheat.ops.kinds import Scheme
from preheat.settings import Settings
from preheat.warmup.record import Record
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cuda.test_engine import CONFIG, TIGHT
from tests.cuda.test_lora import COUNT, FEW_BLOCKS, WITH, Adapters, Bits, answers, load, made

EXPERTS = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 192, "num_experts": 8,
    "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "use_sliding_window": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("experts")
    (folder / "config.json").write_text(json.dumps(EXPERTS))
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path) -> Adapters:
    """Return None, then adapters of several ranks."""
    spec = read_spec(EXPERTS)
    experts, others = expert_modules(spec), adapted_modules(spec)
    found: Adapters = [None]
    for number in range(1, COUNT + 1):
        chosen = experts if number == 2 else others if number == COUNT else experts | others
        path = write_adapter(model / str(number), chosen, rank=8 * number, seed=number)
        found.append(LoRARequest(f"a{number}", number, str(path)))
    return found


@pytest.fixture(scope="module")
def roomy(model: Path) -> LLM:
    return made(model, **WITH, max_loras=COUNT, skip_warmup=False, on_cold="raise", boot_check="full")


@pytest.fixture(scope="module")
def expected(roomy: LLM, adapters: Adapters) -> Bits:
    return answers(roomy, adapters)


def test_mixed_is_each_alone_by_graphs_and_nothing_is_cold(roomy: LLM, adapters: Adapters, expected: Bits) -> None:
    for at in (0, 1, 2, 3, 4, 5, 14, 25, 36, 47):
        assert answers(roomy, adapters, [at]) == [expected[at]]
    assert answers(roomy, adapters, range(47, -1, -1))[::-1] == expected
    record = Record.from_json(roomy.loop.listener.report())
    assert not any(record.cold.values()), record.events
    assert record.by_name()["(check, adapters)"].outcome in ("ready", "reused")


def test_rows_without_an_adapter_have_the_bits_of_an_engine_without_any(
    model: Path, roomy: LLM, expected: Bits
) -> None:
    found = answers(roomy, [None])  # before another engine in this process captures its graphs
    right, whose = answers(made(model), [None]), load()[2]
    assert found == right
    assert [expected[at] == right[at] for at in range(len(whose))] == [not each for each in whose]


def test_loads_and_evictions_meanwhile_change_no_bit(model: Path, adapters: Adapters, expected: Bits) -> None:
    tight = made(model, **TIGHT | WITH | FEW_BLOCKS, max_loras=2, async_scheduling=True)
    assert answers(tight, adapters) == expected
    assert tight.loop.scheduler.stats().preemptions


def test_eager_steps_change_no_bit(model: Path, adapters: Adapters, expected: Bits) -> None:
    eager = made(model, **WITH, max_loras=3, enforce_eager=True, block_size=256, bucketing_policy="split")
    assert answers(eager, adapters) == expected


def test_beside_experts_in_float8_mixed_is_each_alone(model: Path, adapters: Adapters) -> None:
    online = WITH | {"quantization": "fp8"}
    float8 = made(model, **online, max_loras=COUNT, skip_warmup=False, on_cold="raise")
    found, base = answers(float8, adapters), answers(float8, [None])
    for at in (0, 1, 5, 14, 47):
        assert answers(float8, adapters, [at]) == [found[at]]
    assert answers(made(model, **online, max_loras=3, enforce_eager=True), adapters) == found
    assert base == answers(made(model, quantization="fp8"), [None])
    assert [found[at] == base[at] for at in range(len(base))] == [not each for each in load()[2]]


SCHEMES = [
    None, Scheme(code="fp8", scales="channel", activations="token"), Scheme(code="fp8", scales="channel"),
    Scheme(code="fp8", scales="block", group=128, activations="block"), Scheme(code="int4", scales="group", group=128),
]  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name if scheme else "plain")
def test_the_stages_that_adapters_add_to_give_the_bits_of_fused_layers(scheme: Scheme | None) -> None:
    CudaBackend().prepare(Settings(), "eager", None)
    shape = ExpertsShape(8, 512, 384, 2, torch.bfloat16, scheme)
    bench = Bench(shape, 1500)
    for tokens in (1, 2, 7, 32, 100, 300, 1500):
        given = (
            experts_rule(shape, tokens, card=card_at()),
            bench.x[:tokens],
            bench.logits[0][:tokens],
            bench.gate_up,
            bench.down,
        )
        found = experts_forward(*given, bench.routing, bench.counts, lambda y, *_: y)
        assert torch.equal(found, experts_forward(*given, bench.routing, bench.counts)), tokens
        assert found.isfinite().all() and found.any()


def test_with_the_sums_of_ranks_mixed_is_each_alone(model: Path, adapters: Adapters) -> None:
    """On one GPU; tests/cuda/test_tensor_parallel.py covers two."""
    split = made(model, **WITH, max_loras=COUNT, tp_invariant=True, skip_warmup=False, on_cold="raise")
    found, base = answers(split, adapters), answers(split, [None])
    for at in (0, 1, 5, 14, 47):
        assert answers(split, adapters, [at]) == [found[at]]
    assert base == answers(made(model, tp_invariant=True), [None])
    assert [found[at] == base[at] for at in range(len(base))] == [not each for each in load()[2]]


@pytest.mark.parametrize("family", ["qwen3 moe", "mixtral", "qwen2 moe"])
def test_in_fp32_probabilities_equal_the_probabilities_of_a_cpu(family: str, tmp_path: Path) -> None:
    """Compare the next token of prompts of several lengths; a CPU agrees with PEFT (tests/cpu/test_lora.py)."""
    save_checkpoint(MODELS[family], tmp_path / "base")
    spec = read_spec(json.loads((tmp_path / "base" / "config.json").read_text()))
    path = write_adapter(tmp_path / "own", expert_modules(spec) | adapted_modules(spec), rank=12, seed=1)
    adapters = [None, LoRARequest("own", 1, str(path))]
    prompts = [{"prompt_token_ids": [(7 * at + length) % 199 for at in range(length)]} for length in (3, 17, 90)]
    found = []
    for device in ("cuda", "cpu"):
        llm = made(
            tmp_path / "base", **WITH, device=device, dtype="float32", load_format="auto", enforce_eager=True,
            max_model_len=128,
        )  # fmt: skip
        outputs: list[Any] = llm.generate(
            prompts * 2, SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False),
            use_tqdm=False, lora_request=[each for each in adapters for _ in prompts],
        )  # fmt: skip
        found.append([{token: one.logprob for token, one in each.outputs[0].logprobs[0].items()} for each in outputs])
    for gpu, cpu in zip(*found, strict=True):
        assert gpu == pytest.approx(cpu, abs=1e-3)
    assert all(found[0][at] != found[0][at + len(prompts)] for at in range(len(prompts)))
