"""The audit: flipped bits of weights, tables, adapters and cached blocks are found, and nothing else is."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from preheat import LLM, LoRARequest, SamplingParams
from preheat.core import Command
from preheat.engine.audit import Audit
from preheat.errors import InvalidRequest, MemoryFault
from preheat.execution.memory_audit import AuditedMemory
from tests.adapters import write_adapter

FLIPS = 100
OPTIONS = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 16, "num_gpu_blocks_override": 16, "num_threads": 1,
           "skip_warmup": True, "on_cold": "count", "audit_every": 1000.0, "max_num_batched_tokens": 64}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = {"prompt_token_ids": [(7 * at) % 90 for at in range(36)]}


@pytest.fixture(scope="module")
def adapters(shallow: str, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(f"a{seed}", seed, str(write_adapter(folder / str(seed), seed, model=Path(shallow))))
        for seed in (1, 2, 3)
    ]


@pytest.fixture(scope="module")
def llm(shallow: str) -> LLM:
    """An engine of compiled functions, with adapters and sleep."""
    return LLM(model=shallow, **OPTIONS, enable_lora=True, max_loras=1, enable_sleep_mode=True)


@pytest.fixture(scope="module")
def packed(shallow: str) -> LLM:
    """An engine with oneDNN's copies of weights, which may be replaced."""
    return LLM(model=shallow, **OPTIONS, execution_mode="eager", enable_sleep_mode=True, boot_check="quick")


def audit_of(llm: LLM) -> Audit:
    assert llm.loop.audit is not None
    return llm.loop.audit


def a_pass(llm: LLM) -> None:
    """Run one pass. Raise MemoryFault for a slice that differs."""
    ended = list[bool]()
    audit_of(llm)._asked.clear()  # a fault ends an engine, but not here
    audit_of(llm).ask(lambda: ended.append(True))
    while not ended:
        llm.loop.step()


def addresses(llm: LLM) -> dict[str, list[tuple[int, int]]]:
    """Return address and bytes of everything that is audited, by kind."""
    memory = audit_of(llm).memory
    assert isinstance(memory, AuditedMemory) and memory.blocks is not None
    while memory.take():
        pass
    found: dict[str, list[tuple[int, int]]] = {"weights": [], "tables": [], "adapters": [], "blocks": []}
    for each in memory.slices:
        kind = (
            "tables" if "table of positions" in each.name else "adapters" if "adapter slots" in each.name else "weights"
        )
        found[kind] += [(part.ctypes.data, part.nbytes) for part in (each.ends, each.words) if len(part)]
    pool = llm.loop.scheduler.pool
    for layer in llm.loop.executor.cache.layers:
        rows = layer.view(len(layer), -1)
        size = rows[0].numel() * rows.element_size()
        found["blocks"] += [(rows[pool.find(name)].data_ptr(), size) for name in memory.blocks.digests]
    return found


@contextmanager
def flipped(place: tuple[int, int], rng: random.Random) -> Iterator[None]:
    """Flip one bit of the memory at an address."""
    byte = ctypes.c_uint8.from_address(place[0] + rng.randrange(place[1]))
    bit = 1 << rng.randrange(8)
    byte.value ^= bit
    try:
        yield
    finally:
        byte.value ^= bit


def test_every_flipped_bit_is_found_and_named_within_one_pass(
    llm: LLM, packed: LLM, adapters: list[LoRARequest]
) -> None:
    llm.generate([PROMPT], GREEDY, lora_request=adapters[0])
    packed.generate([PROMPT], GREEDY)
    rng, said = random.Random(0), list[str]()
    for engine, kinds in (
        (llm, ("weights", "tables", "adapters", "blocks")),
        (packed, ("weights", "tables", "blocks")),
    ):
        a_pass(engine)
        places = addresses(engine)
        assert all(places[kind] for kind in kinds)
        for number in range(FLIPS):
            with flipped(rng.choice(places[kinds[number % len(kinds)]]), rng), pytest.raises(MemoryFault) as caught:
                a_pass(engine)
            said.append(str(caught.value))
        a_pass(engine)  # all is well again
    for name in (
        "model.layers.1.",
        "model.embed_tokens",
        "a table of positions",
        "the adapter slots of",
        "the cached block",
    ):
        assert any(name in each for each in said), name


def test_a_digest_that_skips_a_slice_misses_its_flip(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    memory = audit_of(llm).memory
    skipped = next(each for each in memory.slices if len(each.words))
    check = AuditedMemory.check
    monkeypatch.setattr(AuditedMemory, "check", lambda self, at: self.slices[at : at + 1] == [] and check(self, at))
    with flipped((skipped.words.ctypes.data, skipped.words.nbytes), random.Random(1)):
        a_pass(llm)
        monkeypatch.setattr(AuditedMemory, "check", check)
        with pytest.raises(MemoryFault):
            a_pass(llm)


def test_a_check_between_requests_leaves_nothing_behind(shallow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check puts embeddings where the scheduler keeps those of prompts. The control forgets nothing."""
    more = {
        "enable_prompt_embeds": True,
        "enable_prefix_caching": False,
        "boot_check": "quick",
        "skip_warmup": False,
        "max_model_len": 128,
    }
    llm = LLM(model=shallow, **OPTIONS | more)
    rows = torch.randn(24, llm.loop.executor.decoder.spec.hidden_size, generator=torch.Generator().manual_seed(1))

    def answer() -> list[int]:
        return list(llm.generate({"prompt_embeds": rows}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)

    names = llm.loop.packer.plan.checks
    check, right = audit_of(llm)._rows[names.index("embeds")], answer()
    check()
    assert answer() == right
    monkeypatch.setattr(type(llm.loop.scheduler), "forget_inputs", lambda self: None)
    check()
    assert answer() != right


def test_load_adapters_and_sleep_give_no_false_alarm(llm: LLM, adapters: list[LoRARequest]) -> None:
    audit, before = audit_of(llm), audit_of(llm).stats.passes
    audit._every = 1e-6  # a slice in every turn
    try:
        for turn in range(4):
            for adapter in (*adapters, None):
                llm.generate([PROMPT, {"prompt_token_ids": [turn, 5, 6]}], GREEDY, lora_request=adapter)
            if turn % 2:
                llm.sleep(1)
                with pytest.raises(InvalidRequest, match="paused or sleeps"):
                    llm.loop.control._begin(Command(1, "audit"))
                llm.wake_up()
            a_pass(llm)
    finally:
        audit._every = 1000.0
    assert audit.stats.passes >= before + 4 and audit.stats.slowest > 0


def test_updates_replace_the_digests(packed: LLM, shallow: str) -> None:
    tensors = load_file(Path(shallow) / "model.safetensors")
    for factor in (1.25, 1.0):
        packed.update_weights([(name, each * factor) for name, each in tensors.items()])
        a_pass(packed)
        packed.generate([PROMPT], GREEDY)
        a_pass(packed)
    places = addresses(packed)["weights"]
    with flipped(places[-1], random.Random(2)), pytest.raises(MemoryFault):
        a_pass(packed)


def test_checks_of_the_boot_run_in_turn_and_see_another_computation(
    packed: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = audit_of(packed)
    said = packed.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    before = audit.stats.checks
    for _ in range(len(audit._rows) + 1):
        a_pass(packed)
    assert audit.stats.checks == before + len(audit._rows) + 1
    assert packed.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == said
    pool = packed.loop.scheduler.pool
    pool.check(pool.refs * 0)
    norm = packed.loop.executor.decoder.weights.final_norm
    call = type(norm).__call__
    monkeypatch.setattr(type(norm), "__call__", lambda self, x: call(self, x) * 1.5)
    with pytest.raises(MemoryFault, match="logits of the boot check"):
        a_pass(packed)


def test_an_engine_without_digests_says_how_to_get_them(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.loop, "audit", None)
    with pytest.raises(InvalidRequest, match="--audit-every"):
        llm.loop.control._begin(Command(1, "audit"))
