"""A head of EAGLE-3 against plain torch: its logits at every draft, its training, and refusals."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.common.adapter import write_adapter
from preheat import LLM, LoRARequest, SamplingParams
from preheat.backends.registry import FACTS
from preheat.errors import ModelError, SettingsError
from preheat.execution import draft_head
from preheat.execution.features import Features
from preheat.lora.adapter import adapted_modules
from preheat.model.families import read_spec
from preheat.model.traits import check_traits
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.warmup.record import Record
from tests.cpu.eagle_reference import VOCAB, Reference, random_tensors, save_head, save_target

OPTIONS = {
    "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128, "block_size": 16, "dtype": "float32",
    "num_threads": 1,
}  # fmt: skip


class Saved(NamedTuple):
    """Folders of a model and of a head, and the head in plain torch."""

    target: str
    head: str
    reference: Reference


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    folder = tmp_path_factory.mktemp("target")
    target, tensors = save_target(folder), random_tensors()
    return Saved(str(folder), save_head(folder / "head", tensors), Reference(target, tensors))


def speculating(saved: Saved, head: str | None = None, tokens: int | str = 3, **more) -> LLM:
    config = {"method": "eagle3", "model": head or saved.head, "num_speculative_tokens": tokens}
    return LLM(saved.target, **OPTIONS | more, speculative_config=config)


def asked(count: int = 6) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts of up to three steps, some with common beginnings, and their parameters."""
    chance = random.Random(1)
    common = [chance.randrange(VOCAB) for _ in range(50)]
    prompts = [
        common[: 50 * (i % 2)] + [chance.randrange(VOCAB) for _ in range(chance.randint(2, 40))] for i in range(count)
    ]
    return prompts, [SamplingParams(temperature=float(i % 3 > 0), seed=i, max_tokens=12) for i in range(count)]


def heard(llm: LLM) -> list[tuple[list[int], int, Tensor]]:
    """Record the head's drafting.

    A record has the tokens before a draft, the count that the target has computed, and the logits.
    """
    found: list[tuple[list[int], int, Tensor]] = []
    slots, executor = llm.loop.scheduler.slots, llm.loop.scheduler.drafting.proposer.executor

    def watch(logits: Tensor, batch) -> None:
        for row, slot, position in zip(logits, batch.sampled_slots, batch.schedule.sampled()[1], strict=True):
            found.append((slots.tokens[slot, : position + 1].tolist(), int(slots.device_len[slot]), row.clone()))

    executor.watch_logits(watch)
    return found


def agreeing(reference: Reference, found: list[tuple[list[int], int, Tensor]]) -> float:
    """Return the share of the recorded logits that equal the reference's."""
    right = 0
    for tokens, known, logits in found:
        expected = torch.full((VOCAB,), -torch.inf)
        expected[reference.ids] = reference.next_logits(torch.tensor(tokens), known)
        right += torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)
    return right / len(found)


def test_the_heads_logits_equal_plain_torch(saved):
    """The head's logits equal plain torch's at every draft: first and later, behind chunks and cached prefixes."""
    llm = speculating(saved)
    found = heard(llm)
    for _ in range(2):
        llm.generate(*asked(), use_tqdm=False)
    assert llm.loop.scheduler.stats().prefix_hits > 0
    assert {len(tokens) - known for tokens, known, _ in found} == {0, 1, 2}
    assert max(known for _, known, _ in found) > 2 * OPTIONS["max_num_batched_tokens"]
    assert len(found) > 200
    assert agreeing(saved.reference, found) == 1.0


def test_it_drafts_for_rows_with_adapters_too(saved, tmp_path):
    """A head drafts from hidden states that an adapter has changed.

    The tokens stay the same as without drafts.
    """
    modules = adapted_modules(read_spec(json.loads((Path(saved.target) / "config.json").read_text())))
    adapter = LoRARequest("own", 1, str(write_adapter(tmp_path / "own", modules, rank=4, seed=0)))
    whose, found = [adapter, None, adapter] * 2, []
    for llm in (LLM(saved.target, **OPTIONS, enable_lora=True), speculating(saved, enable_lora=True)):
        found.append(
            [output.outputs[0].token_ids for output in llm.generate(*asked(), use_tqdm=False, lora_request=whose)]
        )
    assert found[0] == found[1]
    assert llm.loop.scheduler.stats().draft_tokens > 0


def test_a_config_may_say_other_layers_and_another_residual(saved, tmp_path):
    """Ids in ``eagle_config`` name the layers behind which the residual stream is read."""
    tensors = random_tensors(2, aux=2)
    own = {"norm_before_residual": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3]}}
    llm = speculating(saved, save_head(tmp_path / "head", tensors, **own))
    found = heard(llm)
    llm.generate(*asked(2), use_tqdm=False)
    target = saved.reference.target
    assert agreeing(Reference(target, tensors, (1, 4), norm_before_residual=True), found) == 1.0
    assert agreeing(Reference(target, tensors, (1, 4)), found) == 0.0
    assert agreeing(Reference(target, tensors, (0, 3), norm_before_residual=True), found) == 0.0


def shifted(patch) -> None:
    """Plant features that are read one position too early."""
    right = draft_head.token_places

    def places(slots, schedule):
        found = right(slots, schedule)
        return np.maximum(found - 1, 0)

    patch.setattr(draft_head, "token_places", places)


def first_chunk_lost(patch) -> None:
    """Plant features of prompt steps that go to the pad block."""
    right = Features.place

    def place(self, turn, schedule, tokens):
        right(self, turn, schedule, tokens)
        if schedule.num_decode < schedule.rows and not schedule.num_drafted:
            self._places.rows.zero_()

    patch.setattr(Features, "place", place)


def drafts_kept(patch) -> None:
    """Plant accepted drafts that keep the head's own features."""

    def take_back(self, slots, rows):
        self._known[rows] = np.minimum(self._computed[rows], slots.device_len[rows] - 2)
        draft_head.DraftModel._take_back(self, slots, rows)

    patch.setattr(draft_head.HeadDrafter, "_take_back", take_back)


@pytest.mark.parametrize(("plant", "most"), [(shifted, 0.0), (first_chunk_lost, 0.5), (drafts_kept, 0.9)])
def test_control_the_comparison_notices(saved, plant, most, monkeypatch):
    plant(monkeypatch)
    llm = speculating(saved)
    found = heard(llm)
    llm.generate(*asked(), use_tqdm=False)
    assert llm.loop.scheduler.stats().accepted_tokens > 0
    assert agreeing(saved.reference, found) <= most


def proven(saved: Saved, *, speculates: bool) -> tuple[str, set[str]]:
    """Return the digest of a boot, and the outcomes of its items."""
    config = {"method": "eagle3", "model": saved.head, "num_speculative_tokens": 2} if speculates else None
    options = {"speculative_config": config, "boot_check": "full", "skip_warmup": False, "cache_dir": "off"}
    loop = boot_engine(Settings.load({"model": saved.target, **OPTIONS, **options}), InlineTransport())
    record = Record.from_json(loop.listener.report())
    return record.proof.digest, {entry.outcome for entry in record.entries}


def test_keeping_features_changes_no_bit_of_the_model(saved, monkeypatch):
    alone, _ = proven(saved, speculates=False)
    assert proven(saved, speculates=True) == (alone, {"ready"})
    right = Features.keep
    monkeypatch.setattr(Features, "keep", lambda self, layer, residual: right(self, layer, residual.mul_(1.01)))
    wrong, outcomes = proven(saved, speculates=True)
    assert wrong != alone or "failed" in outcomes


def trained(saved: Saved, answers: list[list[int]], steps: int = 150) -> dict[str, Tensor]:
    """Return the tensors of a head trained on the tokens of these texts that its draft vocabulary has."""
    tensors = {name: each.clone().requires_grad_(each.is_floating_point()) for name, each in random_tensors().items()}
    student = Reference(saved.reference.target, tensors)
    weights = [each for each in tensors.values() if each.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=1e-2)
    places = torch.full((VOCAB,), -100)
    places[student.ids] = torch.arange(len(student.ids))
    texts = [torch.tensor(text) for text in answers]
    for step in range(steps):
        text = texts[step % len(texts)]
        logits, _ = student.forward(student.features(text[:-1])[:-1], text[1:-1])
        loss = torch.nn.functional.cross_entropy(logits, places[text[2:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return tensors


def accepted(llm: LLM, prompts, params, answers) -> float:
    found = [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]
    assert found == answers
    stats = llm.loop.scheduler.stats()
    return stats.accepted_tokens / stats.draft_tokens


def test_a_head_that_was_trained_is_right_more_often(saved, tmp_path):
    """A few hundred steps of training on the model's greedy answers raise the share of accepted drafts."""
    prompts, params = asked(4)[0], SamplingParams(temperature=0.0, max_tokens=24)
    answers = [
        each.outputs[0].token_ids for each in LLM(saved.target, **OPTIONS).generate(prompts, params, use_tqdm=False)
    ]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    head = save_head(tmp_path / "head", trained(saved, texts))
    share = accepted(speculating(saved, head), prompts, params, answers)
    assert accepted(speculating(saved), prompts, params, answers) < 0.1
    assert share > 0.3


REFUSED = [
    ({}, {"fc.weight": None}, ModelError, "missing tensors: fc.weight"),
    ({}, {"fc.bias": torch.zeros(32)}, ModelError, "unknown tensors: fc.bias"),
    ({}, {"midlayer.self_attn.q_proj.weight": torch.zeros(32, 32)}, ModelError, "q_proj.weight has shape [32, 32]"),
    ({}, {"d2t": torch.zeros(128, dtype=torch.int64)}, ModelError, "d2t and t2d of the head contradict"),
    ({"vocab_size": 400}, {}, SettingsError, "vocabulary of 400 tokens, and this model has 320"),
    ({"target_hidden_size": 64}, {}, SettingsError, "hidden size of 64, and this model has 32"),
    ({"hidden_size": 64, "target_hidden_size": 32}, {}, ModelError, "has shape"),
    ({"architectures": ["LlamaForCausalLM"]}, {}, ModelError, "a head of LlamaForCausalLMEagle3"),
    ({"num_hidden_layers": 2}, {}, ModelError, "one layer, and num_hidden_layers is 2"),
    ({"norm_output": True}, {}, ModelError, "norm_output True is not supported"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}, {}, ModelError, "3, 6], and the model has 6"),
    ({"quantization_config": {"quant_method": "awq"}}, {}, ModelError, "quantization_config of one part"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "error", "message"), REFUSED)
def test_a_head_that_does_not_fit_is_refused(saved, tmp_path, config, tensors, error, message):
    changed = {name: each for name, each in (random_tensors() | tensors).items() if each is not None}
    with pytest.raises(error, match=re.escape(message)):
        speculating(saved, save_head(tmp_path / "head", changed, **config))


def test_a_head_may_have_embeddings_and_number_its_layer(saved, tmp_path):
    """A head that has embeddings and numbers its layer gives plain torch's logits too."""
    tensors = {name.replace("midlayer.", "layers.0."): each for name, each in random_tensors().items()}
    own = saved.reference.target.model.embed_tokens.weight.clone()
    llm = speculating(saved, save_head(tmp_path / "head", tensors | {"embed_tokens.weight": own}))
    found = heard(llm)
    llm.generate(*asked(2), use_tqdm=False)
    assert agreeing(saved.reference, found) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"execution_mode": "compile"}, "mode compile"), ({"pipeline_parallel_size": 2}, "pipeline_parallel_size")],
)
def test_options_that_exclude_eagle_are_named(saved, options, message):
    with pytest.raises(SettingsError, match=message):
        speculating(saved, **options)


def test_a_device_on_which_no_head_ever_ran_is_named(saved):
    asked = {"speculative_config": {"method": "eagle3", "model": saved.head, "num_speculative_tokens": 2}}
    settings, facts = Settings.load({"model": saved.target, **asked, "bucketing_policy": "unified"}), FACTS["hpu"]
    with pytest.raises(SettingsError, match=r"EAGLE-3 .*cannot be used on hpu"):
        check_traits(settings, facts)


def test_a_head_that_is_asked_for_as_a_model_is_named(saved):
    with pytest.raises(SettingsError, match='write "method": "eagle3"'):
        LLM(saved.target, **OPTIONS, speculative_model=saved.head, num_speculative_tokens=2)
