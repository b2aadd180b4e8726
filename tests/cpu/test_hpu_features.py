"""Quantization, drafts, images and several cards on the fake Gaudi: the CPU's answers, and nothing cold."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from preheat import LLM, SamplingParams
from preheat.backends.hpu.bridge import Bridge
from preheat.backends.hpu.sharing import Group
from preheat.backends.rendezvous import OneNode
from preheat.errors import RankDied, SettingsError
from preheat.extras.calibration import calibrate
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.prompts import Size, make_prompts
from preheat.verify.verification import Verification
from preheat.warmup.record import Record
from tests.cpu import quantized, test_llava
from tests.cpu.checkpoints import save_checkpoint
from tests.cpu.fake_hpu import FAKES, OPTIONS, boot, inserted, model
from tests.llava import save_llava

CONTIGUOUS = {"block_size": 128, "max_model_len": 256, "max_num_batched_tokens": 128, "contiguous_pa": True}
LAYERS = {"num_hidden_layers": 2, "vocab_size": 336}
LOGPROBS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
PROMPT = [(7 * place) % 300 + 8 for place in range(135)]
PROMPTS = [PROMPT, [*PROMPT[:130], 3, 4], [5, 6, 7]]


def record_of(llm: LLM) -> Record:
    return Record.from_json(llm.loop.listener.report())


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[tuple[list[int], Any]]:
    found = llm.generate(prompts, LOGPROBS, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]


def numbers(found: list[tuple[list[int], Any]]) -> list[float]:
    return [next(iter(step.values())).logprob for _, steps in found for step in steps]


def test_incs_ranges_are_measured_and_served(tmp_path, monkeypatch):
    """INC's ranges are measured on the fake and served there in graphs with an eight-bit cache.

    The cache is read in place and by shared prefixes. Each layer has scales of its own, and all layers one recipe. The
    answers equal the CPU's, and differ from the plain model's.
    """
    options = OPTIONS | CONTIGUOUS | {"model": model(tmp_path, **LAYERS)}
    with inserted():
        said = calibrate(Settings.load(options | {"contiguous_pa": None}, {}), str(tmp_path / "ranges"), [PROMPT])
    assert "12 modules were measured" in said
    monkeypatch.setenv("QUANT_CONFIG", str(tmp_path / "ranges" / "maxabs_quant.json"))
    rounded = {"quantization": "inc", "kv_cache_dtype": "fp8_inc", "weights_load_device": "cpu"}
    with inserted() as card:
        llm = boot(options, on_cold="raise", boot_check="quick", **rounded)
        before = dict(card.counts)
        ours = answers(llm)
        assert answers(llm) == ours  # by cached prefixes
        assert dict(card.counts) == before
        spec, cache = llm.loop.executor.decoder.spec, llm.loop.executor.cache
        assert len({layer.kv.scales for layer in spec.layers}) > 1
        assert cache.data.dtype == torch.float8_e4m3fn
        assert llm.loop.executor.decoder.weights.layers[1].mlp.down.value.input == "rounded"
        assert record_of(llm).invariant
    on_cpu = {"device": "cpu", "use_fake_hpu": False, "block_size": None, "contiguous_pa": None, "skip_warmup": True}
    theirs, plain = (answers(boot(options | on_cpu, **more)) for more in (rounded, {}))
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    assert numbers(ours) == pytest.approx(numbers(theirs), abs=1e-3)
    assert numbers(ours) != pytest.approx(numbers(plain), abs=1e-3)


def test_drafts_are_checked_and_change_nothing(tmp_path):
    """Drafts change nothing in mixed steps.

    The default policy has no mixed steps, and refuses with advice.
    """
    options = OPTIONS | {"model": model(tmp_path), "bucketing_policy": "unified"}
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    prompts = [[1, 2, 3] * 5, [7, 8] * 6, [9] * 10]
    with inserted() as card:
        plain = answers(boot(options), prompts)
        llm = boot(options, speculative_config=drafts, on_cold="raise", boot_check="quick")
        before = dict(card.counts)
        assert answers(llm, prompts) == plain
        assert dict(card.counts) == before
        assert llm.loop.scheduler.stats().accepted_tokens > 0
        with pytest.raises(SettingsError, match="use --bucketing-policy unified"):
            boot(options | {"bucketing_policy": None}, speculative_config=drafts)


def test_awq_has_the_bits_of_its_dequantized_model(tmp_path):
    save_checkpoint(("Llama", {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 2}), tmp_path / "plain")
    quantized.quantize_checkpoint(tmp_path / "plain", quantized.awq(), tmp_path / "quantized")
    options = {name: value for name, value in OPTIONS.items() if name != "load_format"} | {
        "skip_tokenizer_init": True, "skip_warmup": True,
    }  # fmt: skip
    prompts = [[token % 199 for token in prompt[:40]] for prompt in PROMPTS]
    with inserted():
        one, other = (answers(boot(options, model=str(tmp_path / name)), prompts) for name in ("plain", "quantized"))
    assert one == other


def test_images_are_seen(tmp_path):
    """LLaVA equals transformers with the same bits beside any other rows, and nothing is cold.

    vLLM's page for LLaVA asks for the tensor cache.
    """
    reference = save_llava(tmp_path)
    options = test_llava.OPTIONS | {
        "model": str(tmp_path), "device": "hpu", "use_fake_hpu": True, "max_model_len": 112, "boot_check": "off",
        "cache_dir": "off", "skip_warmup": False, "on_cold": "raise", "max_num_seqs": 1,
    }  # fmt: skip
    with inserted({"PT_HPUGRAPH_DISABLE_TENSOR_CACHE": "false"}) as card:
        llm = boot(options)
        before = dict(card.counts)
        some = test_llava.PROMPTS[1:3]
        found = test_llava.run(llm, some)
        assert dict(card.counts) == before
        alone = [test_llava.run(llm, [prompt])[0] for prompt in some]
    assert all(test_llava.error(reference, prompt, each) <= 1e-5 for prompt, each in zip(some, found, strict=True))
    assert all(test_llava.same(alone, found))


SHARED = ("Qwen2Moe", {
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 1, "hidden_size": 64, "head_dim": 16,
})  # fmt: skip


@pytest.fixture
def _group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_two_cards_have_the_bits_of_one(tmp_path):
    """Two cards have the bits of one, and a card that dies is noticed.

    Graphs hold HCCL's collectives by name: for attention, experts, and a shared expert.
    """
    save_checkpoint(SHARED, tmp_path)
    options = {
        "model": str(tmp_path), "device": "hpu", "use_fake_hpu": True, "dtype": "float32", "skip_tokenizer_init": True,
        "max_num_seqs": 2, "max_model_len": 48, "max_num_batched_tokens": 16, "block_size": 16, "boot_check": "quick",
        "skip_warmup": False, "on_cold": "raise", "cache_dir": "off", "num_threads": 1,
        "determinism_warmup_iterations": 0,
    }  # fmt: skip
    prompts = [[place * 5 % 199 for place in range(30)], [8, 9]]
    env = {"PYTHONPATH": os.pathsep.join([str(FAKES), os.environ.get("PYTHONPATH", "")])}
    with inserted(env):
        one = boot(options, tp_invariant=True)
        alone, digest = answers(one, prompts), record_of(one).proof.digest
    with inserted(env) as card:
        two = boot(options, tensor_parallel_size=2)
        assert os.environ["PT_HPU_ENABLE_LAZY_COLLECTIVES"] == "1"
        assert dist.get_backend() == "hccl"
        assert card.counts["graph_capture"] > 0
        assert record_of(two).proof.digest == digest
        assert record_of(two).proof.parts["ranks"] == 2
        before = dict(card.counts)
        assert answers(two, prompts) == alone
        assert dict(card.counts) == before
        assert not any(record_of(two).cold.values())
        two.loop.executor.ranks.processes[0].kill()
        with pytest.raises(RankDied):
            answers(two, prompts)


def test_collectives_that_graphs_cannot_hold_are_refused(tmp_path):
    with inserted({"PT_HPU_LAZY_MODE": "1"}):
        settings = Settings(device="hpu", tensor_parallel_size=2, lazy_collectives=False)
        with pytest.raises(SettingsError, match="PT_HPU_ENABLE_LAZY_COLLECTIVES"):
            Group(Bridge(settings), OneNode(tmp_path, 0, 2), lambda: None)


TINY = Size(prompts=6, runs=2, outputs=6, longest=150)


def test_verify_with_prefix_caching_and_contiguous_attention(tmp_path):
    """All paths of `preheat verify` give every bit of all logits."""
    options = OPTIONS | CONTIGUOUS | {"model": model(tmp_path), "enable_prefix_caching": True, "max_num_seqs": 4}

    def prompts(engine: Any) -> Any:
        return make_prompts(TINY, engine.vocab_size, engine.ready.max_model_len)

    with inserted():
        run = Verification(boot_engine, Settings.load(options, {}), prompts, TINY)
        results = list(run.results())
    assert run.verdict(results).ok
    assert {result.share for result in results} == {"100.00 %"}
    assert len(results) >= 8


def test_layers_share_recipes_in_lazy_mode(tmp_path):
    """A warm-up of one layer of each kind makes the recipes of all layers in lazy mode.

    The recipes also serve the parts of a graph when they run without one.
    """
    options = OPTIONS | {
        "model": model(tmp_path, num_hidden_layers=3),
        "on_cold": "raise",
        "max_num_seqs": 2,
        "max_model_len": 32,
    }
    chance = random.Random(1)
    prompts = [[chance.randrange(300) for _ in range(chance.randint(1, 25))] for _ in range(8)]
    for more in ({"enforce_eager": True}, {"graph_reserved_mem": 1e-5}):
        with inserted() as card:
            llm = boot(options, **more)
            before = dict(card.counts)
            answers(llm, prompts)
            assert dict(card.counts) == before
