"""Receipts of a GPU: another boot gives each answer again, and each digest is the digest of the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from preheat import LLM
from preheat.core import SamplingParams, StructuredOutputsParams
from preheat.frontend.receipt import Receipt, chain_of
from preheat.ops.digest import row_digests
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify import replay
from preheat.verify.drive import Engine

OPTIONS: dict[str, Any] = {
    "model": "bundled", "device": "cuda", "max_num_seqs": 8, "max_model_len": 256, "num_gpu_blocks_override": 400,
    "boot_check": "off", "skip_warmup": False, "on_cold": "raise",
}  # fmt: skip
PLAIN = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, receipt=True)
KINDS = [
    PLAIN,
    replace(PLAIN, temperature=1.0, seed=2**64 - 5, n=2, top_p=0.9),
    replace(PLAIN, temperature=1.0, seed=3, presence_penalty=1.0, logit_bias={7: 2.5}, logprobs=2),
    replace(PLAIN, temperature=1.0, seed=4, receipt=False),  # a neighbor without a receipt
    replace(PLAIN, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="[ab]{2,6}")),
]  # fmt: skip


@pytest.fixture(scope="module")
def receipts() -> list[Receipt]:
    """Return the receipts of an engine that runs requests together, by graphs, and nothing is cold."""
    llm = LLM(**OPTIONS)
    prompts = [{"prompt_token_ids": [(5 * at + number) % 90 for at in range(20)]} for number in range(len(KINDS))]
    outputs = llm.generate(prompts, KINDS, use_tqdm=False)
    given = [choice.receipt for output in outputs for choice in output.outputs]
    assert [each is None for each in given] == [False] * 4 + [True, False]
    return [each for each in given if each is not None]


@pytest.fixture(scope="module")
def engine(receipts: list[Receipt]) -> Engine:
    """Return another boot, when the first engine is gone; what reads its logits is in no plan."""
    return Engine(boot_engine, Settings.load(OPTIONS | {"on_cold": "off"}))


def test_another_boot_gives_every_answer_again(engine: Engine, receipts: list[Receipt]) -> None:
    found = list(replay.replay_log(receipts, engine))
    assert [str(each) for each in found if not each.equal] == []
    assert [each.positions for each in found] == [len(each.tokens) for each in receipts]
    # control: another token at one place
    wrong = replace(receipts[0], tokens=[*receipts[0].tokens[:5], receipts[0].tokens[5] ^ 1, *receipts[0].tokens[6:]])
    (outcome,) = replay.replay_log([wrong], engine)
    assert outcome.position == 5


def test_digests_are_of_the_logits_of_a_step_alone(engine: Engine, receipts: list[Receipt]) -> None:
    for receipt in receipts:
        assert chain_of(receipt.tokens, receipt.bits) == receipt.chain and len(set(receipt.bits)) > 1
        step = replay.step_at(receipt, engine, len(receipt.tokens) - 1)
        assert step.equal and row_digests(torch.tensor([step.logits])).tolist() == [step.expected]
