"""Routed experts in execution mode llvm: right against transformers, and one answer in any company."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat import LLM
from tests.cpu.checkpoints import Model, save_checkpoint
from tests.cpu.test_family_engines import differing, error, prompts, run
from tests.cpu.test_llvm import LLVM, SIZES

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from preheat.backends.cpu.llvm import routed, targets

FAMILIES: dict[str, Model] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3 moe with dense layers": (
        "Qwen3Moe",
        {"num_experts": 35, "num_experts_per_tok": 4, "moe_intermediate_size": 56, "mlp_only_layers": [1],
         "norm_topk_prob": True},
    ),
    "qwen2 moe": (
        "Qwen2Moe",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 96},
    ),
}  # fmt: skip


def checkpoint(name: str, folder: Path):
    kind, changes = FAMILIES[name]
    return save_checkpoint((kind, SIZES | changes), folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_in_chunks_and_behind_prefixes(name, tmp_path):
    reference, some = checkpoint(name, tmp_path), prompts()
    llm = LLM(str(tmp_path), **LLVM)
    together = run(llm, some)
    for prompt, found in zip(some, together, strict=True):
        assert error(found, prompt, reference) <= 1e-5
    assert differing([run(llm, [prompt])[0] for prompt in some], together) == 0
    cold = LLM(
        str(tmp_path), **LLVM | {"enable_prefix_caching": False, "max_num_batched_tokens": 256, "num_threads": 3}
    )
    assert differing([run(cold, [prompt])[0] for prompt in some], together) == 0


def test_another_processor_has_the_same_bits(tmp_path, monkeypatch):
    checkpoint("qwen2 moe", tmp_path)
    here = run(LLM(str(tmp_path), **LLVM), prompts())
    monkeypatch.setattr(targets, "here", lambda: targets.TARGETS["avx2"])
    assert differing(run(LLM(str(tmp_path), **LLVM), prompts()), here) == 0


# --- what is planted is seen ---


def differing_alone(folder: Path) -> int:
    """Return how many prompts have other bits alone than together."""
    llm = LLM(str(folder), **LLVM | {"enable_prefix_caching": False})
    return differing([run(llm, [prompt])[0] for prompt in prompts()], run(llm, prompts()))


def test_a_sum_over_experts_in_the_order_of_arrival_is_seen(tmp_path, monkeypatch):
    checkpoint("qwen3 moe with dense layers", tmp_path)
    right = routed._combine

    def by_arrival(e, how, block, row, finish):
        for rows, step in (("==", 1), ("!=", -1)):
            monkeypatch.setattr(routed, "slots", lambda block, step=step: range(block.top_k)[::step])
            with e.when(e.b.icmp_signed(rows, e.rows, e.i(1))):
                right(e, how, block, row, finish)

    monkeypatch.setattr(routed, "_combine", by_arrival)
    assert differing_alone(tmp_path) > 0


def test_a_row_in_the_group_of_another_expert_is_seen(tmp_path, monkeypatch):
    checkpoint("mixtral", tmp_path)
    right = routed._group

    def moved(e, block):
        right(e, block)
        starts, first = e.pointer("starts"), e.field(e.pointer("visited"), 1)
        end = e.field(starts, e.add(first, 1))
        alone = e.b.icmp_signed("==", e.rows, e.i(1))
        e.store(e.choose(alone, end, e.sub(end, 1)), starts, e.add(first, 1), routed.LONG, align=8)

    monkeypatch.setattr(routed, "_group", moved)
    assert differing_alone(tmp_path) > 0
