"""Adapters against PEFT, with the same bits alone, together, in any adapter slot, and beside no adapter."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from preheat.backends.cpu.lowrank import SlotTable
from preheat.core import AdapterReport, Delta, LoadAdapter, SamplingParams, UnloadAdapter
from preheat.errors import SettingsError
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.drive import Engine, in_groups
from preheat.verify.prompts import Prompt
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.quantized import quantize_checkpoint
from tests.cpu.test_quantized_checkpoints import KINDS

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "qv": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "r": 8, "lora_alpha": 12, "target_modules": ALL,
        "rank_pattern": {"o_proj": 3, "layers.1.mlp.down_proj": 21}, "alpha_pattern": {"up_proj": 40},
    },
    "rslora": {"r": 20, "lora_alpha": 5, "target_modules": ["k_proj", "gate_proj"], "use_rslora": True},
    "head": {"r": 5, "lora_alpha": 9, "target_modules": ["lm_head", "o_proj"]},
    "table": {"r": 18, "lora_alpha": 9, "target_modules": ["embed_tokens", "v_proj"], "rank_pattern": {"v_proj": 4}},
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 160, "block_size": 16,
    "kv_cache_memory_bytes": 1 << 23, "skip_warmup": True, "contiguous_pa": False, "enable_lora": True,
    "max_lora_rank": 24, "max_loras": 3,
}  # fmt: skip
WITHOUT = {"enable_lora": False, "max_loras": 1, "max_lora_rank": 16}
OUTPUTS = 5
NO_LLVM = pytest.mark.skipif(find_spec("llvmlite") is None, reason="llvmlite is not installed: pip install llvmlite")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning"),  # but parameters
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    save_checkpoint(MODELS["llama"], made / "base")
    for number, (name, config) in enumerate(ADAPTERS.items()):
        save_adapter(made / "base", made / name, config, seed=number)
    return made


def save_adapter(base: Path, folder: Path, config: dict[str, Any], seed: int) -> None:
    import peft  # here: it takes seconds, and most processes of a run need it never
    import transformers

    torch.manual_seed(seed)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(task_type="CAUSAL_LM", **config)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=weight.shape[1] ** -0.5)
    model.save_pretrained(folder, save_embedding_layers=False)


@cache
def reference(base: Path, adapter: Path | None) -> Any:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return (model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)).eval()


@cache
def merged(folder: Path, name: str) -> Any:
    """Return the model with an adapter merged into its weights, in float64."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager").double()
    return peft.PeftModel.from_pretrained(base, folder / name).double().merge_and_unload().eval()


def engine(folder: Path, names: list[str] | None = None, **changes: Any) -> Engine:
    names = list(ADAPTERS) if names is None else names
    given = {"model": str(folder / "base"), "max_cpu_loras": 8} if changes.get("enable_lora", True) else {
        "model": str(folder / "base")}  # fmt: skip
    named = {"lora_modules": tuple(f"{name}={folder / name}" for name in names)} if names else {}
    return Engine(boot_engine, Settings.load({**SETTINGS, **given, **named, **changes}, {}))


def prompts(*names: str, length: int = 21) -> list[Prompt]:
    draw = torch.Generator().manual_seed(3)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=OUTPUTS, ignore_eos=True)
    return [
        Prompt(torch.randint(199, (length + 5 * number,), generator=draw).tolist(), params, lora_name=name)
        for number, name in enumerate(names)
    ]


@pytest.fixture(scope="module", params=["eager", pytest.param("llvm", marks=NO_LLVM)])
def mode(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def shared(folder, mode) -> Engine:
    return engine(folder, execution_mode=mode, num_threads=2)


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_equal_peft(shared, folder, name):
    """Logits are near those of PEFT, and nearer to those of a merge in float64."""
    (prompt,) = prompts(name)
    with shared.keeping_logits() as kept:
        shared.run([prompt])
    (answer,) = shared.answers
    tokens = torch.tensor([prompt.tokens + answer.tokens[:-1]])
    with torch.inference_mode():
        expected, exact, plain = (
            made(tokens).logits[0, len(prompt.tokens) - 1 :]
            for made in (
                reference(folder / "base", folder / name), merged(folder, name), reference(folder / "base", None)
            )
        )  # fmt: skip
    found = torch.stack(kept[0])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert float((found - exact).norm() / exact.norm()) <= 1e-5
    assert (found - plain).abs().max() > 0.05


NAMES = ("all", "", "table", "qv", "", "all", "rslora", "head")


def alone(engine: Engine, asked: list[Prompt]) -> list[Any]:
    """Return the results of each prompt by itself, without the blocks of other prompts."""
    seen = []
    for prompt in asked:
        engine.forget_prefixes()
        seen += engine.run([prompt])
    engine.forget_prefixes()
    return seen


def test_rows_of_several_adapters_and_of_none_have_the_bits_they_have_alone(shared):
    asked = prompts(*NAMES)
    seen = alone(shared, asked)
    assert shared.run(asked) == seen
    shared.forget_prefixes()
    assert shared.run(asked, in_groups([3, 1, 4])) == seen
    assert shared.run(asked) == seen  # from the prefix cache


def test_rows_without_an_adapter_have_the_bits_of_an_engine_without_any(shared, folder, mode):
    asked = prompts(*NAMES)
    plain = [replace(prompt, lora_name="") for prompt in asked]
    expected = engine(folder, [], execution_mode=mode, **WITHOUT).run(plain)
    beside = shared.run([*asked[::2], *plain[1::2], *asked[1::2]])
    assert beside[4:8] == expected[1::2]
    assert shared.run(plain) == expected


def test_bits_depend_neither_on_the_slot_nor_on_the_largest_rank_nor_on_eviction(shared, folder, mode):
    asked = prompts("all", "qv", "rslora", "all", "qv")
    expected = alone(shared, asked)
    narrow = {"max_loras": 1, "max_lora_rank": 70, "max_cpu_loras": 3, "execution_mode": mode}
    other = engine(folder, ["rslora", "qv", "all"], **narrow)
    loaded = counted_loads(other)
    assert other.run(asked) == expected
    other.forget_prefixes()
    assert other.run(asked[::-1], in_groups([1] * 5))[::-1] == expected
    assert len(loaded) >= 8 and {place for place, _ in loaded} == {0}
    assert other.loop.scheduler.adapters.held == {}


def counted_loads(engine: Engine) -> list[tuple[int, str]]:
    adapter_slots, found = engine.loop.executor.adapters, list[tuple[int, str]]()
    right = engine.loop.executor.load_adapters

    def load(loads):
        found.extend((place, adapter.name) for place, adapter in loads)
        right(loads)

    assert adapter_slots is not None
    engine.loop.executor.load_adapters = load
    return found


@NO_LLVM
def test_a_term_of_the_neighboring_slot_is_seen(folder, monkeypatch):
    from preheat.backends.cpu.llvm import terms

    asked, right = prompts(*NAMES), terms.pair
    monkeypatch.setattr(terms, "pair", lambda e, how, slot, part: right(e, how, e.rem(e.add(slot, 1), 3), part))
    wrong = engine(folder, execution_mode="llvm")
    assert alone(wrong, asked) != wrong.run(asked)


def test_a_preempted_sequence_finds_its_adapter_again(folder, shared, mode):
    longer = SamplingParams(temperature=0.0, seed=0, max_tokens=30, ignore_eos=True)
    asked = [replace(prompt, params=longer) for prompt in prompts("all", "qv", "rslora", "", "all", length=40)]
    expected = alone(shared, asked)
    tight = engine(folder, ["all", "qv", "rslora"], max_loras=2, max_cpu_loras=3, num_gpu_blocks_override=12,
                   max_num_batched_tokens=48, execution_mode=mode)  # fmt: skip
    assert tight.run(asked) == expected
    assert tight.stats.preemptions


def test_equal_prompts_of_different_adapters_share_no_blocks_and_equal_adapters_do(shared, folder):
    (prompt,) = prompts("all", length=60)
    shared.forget_prefixes()
    cached = []
    for name in ("all", "", "qv", "all", ""):
        shared.run([replace(prompt, lora_name=name)])
        cached.append(shared.answers[0].cached)
    assert cached == [0, 0, 0, 48, 48]
    send(shared, LoadAdapter("twin", str(folder / "all"), 1))
    shared.run([replace(prompt, lora_name="twin")])
    assert shared.answers[0].cached == 48
    send(shared, UnloadAdapter("twin", 2))


def send(engine: Engine, *messages: Any) -> list[AdapterReport]:
    """Send messages and step until each has its report."""
    transport, reports = engine.loop.transport, list[AdapterReport]()
    for message in messages:
        transport.send(message)
    for _ in range(10_000):
        engine.loop.take(0)
        engine.loop.step()
        reports += [each for each in transport.receive() if isinstance(each, AdapterReport)]
        if len(reports) == len(messages):
            return reports
    raise AssertionError(f"{len(messages)} messages have {reports}")


def said(report: AdapterReport) -> tuple[str, str] | None:
    return report.error and (report.error.name, report.error.message)


def test_adapters_come_and_go(folder, shared, mode):
    own = engine(folder, [], max_loras=1, max_cpu_loras=1, execution_mode=mode)
    asked = prompts("qv", "all")
    seen = alone(shared, asked)
    (loaded,) = send(own, LoadAdapter("qv", str(folder / "qv"), 7))
    assert loaded == AdapterReport("qv", 7)
    (again,) = send(own, LoadAdapter("qv", str(folder / "all"), 8))
    assert said(again) == ("AlreadyThere", "there is an adapter 'qv' already: unload it, or replace it in place")
    (missing,) = send(own, LoadAdapter("x", str(folder / "nothing")))
    assert missing.error and missing.error.name == "AdapterError"
    assert own.run(asked[:1]) == seen[:1]
    assert said(send(own, LoadAdapter("all", str(folder / "all")))[0]) is None
    assert own.run(asked) == seen  # the host keeps one: the other is read again
    (replaced,) = send(own, LoadAdapter("qv", str(folder / "all"), 9, in_place=True))
    assert replaced.error is None
    assert own.run([replace(asked[1], lora_name="qv")]) == seen[1:]
    assert said(send(own, UnloadAdapter("qv"))[0]) is None
    assert said(send(own, UnloadAdapter("qv"))[0]) == ("NotFound", "there is no adapter 'qv'")
    own.loop.transport.send(asked[0].request(99))
    own.loop.take(0)
    (delta,) = [each for each in own.loop.transport.receive() if isinstance(each, Delta) and each.finished]
    error = delta.finished[99].error
    assert error is not None and (error.name, error.param) == ("ModelNotFound", "model")


def test_unloading_waits_for_the_requests_of_the_adapter_and_others_go_on(folder):
    own = engine(folder, ["qv"], max_loras=1)
    transport, loop = own.loop.transport, own.loop
    asked = prompts("qv", "")
    for number, prompt in enumerate(asked):
        transport.send(prompt.request(number + 1))
    loop.take(0)
    loop.step()
    transport.send(UnloadAdapter("qv", 5))
    messages = []
    while not any(isinstance(each, AdapterReport) for each in messages):
        loop.take(0)
        loop.step()
        messages += transport.receive()
    ended = [each for each in messages if isinstance(each, Delta) and 1 in each.finished]
    assert ended and messages.index(ended[0]) < next(
        place for place, each in enumerate(messages) if isinstance(each, AdapterReport)
    )
    assert ended[0].finished[1].reason == "length"


def test_every_step_with_adapters_is_planned_and_loading_is_not_cold(folder):
    own = engine(folder, ["qv"], skip_warmup=False, on_cold="raise", max_num_seqs=4, max_num_batched_tokens=32,
                 boot_check="off", max_loras=2)  # fmt: skip
    send(own, LoadAdapter("all", str(folder / "all")), LoadAdapter("head", str(folder / "head")))
    asked = prompts("qv", "", "all", "head", "all", "")
    params = SamplingParams(temperature=1.0, seed=4, prompt_logprobs=1, logprobs=2, max_tokens=OUTPUTS)
    asked += [replace(prompt, params=params) for prompt in asked]
    planned = {item.program for item in own.loop.packer.plan.items if item.kind == "lora"}
    assert planned
    assert own.run(asked) == own.run(asked, in_groups([1, 2, 4, 3, 2]))  # a cold step would fail its requests


def test_adapters_are_packed_by_the_thread_that_reads_them(folder, monkeypatch):
    own = engine(folder, [], max_loras=1, execution_mode="eager")
    threads, right = list[str](), SlotTable.pack

    def pack(self, parts):
        threads.append(threading.current_thread().name)
        return right(self, parts)

    monkeypatch.setattr(SlotTable, "pack", pack)
    send(own, LoadAdapter("all", str(folder / "all")))
    assert threads and all(name.startswith("adapters") for name in threads)
    threads.clear()
    own.run(prompts("all"))
    assert not threads


def test_prompt_logprobs_are_computed_with_the_adapter(shared):
    params = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0, max_tokens=1)
    asked = [replace(prompt, params=params) for prompt in prompts("head", "", "all", length=30)]
    alone(shared, [])
    expected = []
    for prompt in asked:
        shared.run([prompt])
        expected.append(shared.answers[0].prompt_logprobs)
    shared.run(asked)
    assert [answer.prompt_logprobs for answer in shared.answers] == expected
    shared.run([replace(asked[0], lora_name="")])
    assert shared.answers[0].prompt_logprobs != expected[0]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"fully_sharded_loras": True}, "fully_sharded_loras"),
        ({"execution_mode": "compile"}, "execution_mode"),
    ],
)
def test_options_that_exclude_adapters_are_refused(folder, changes, param):
    with pytest.raises(SettingsError) as error:
        engine(folder, [], **changes)
    assert error.value.param == param


FAMILIES = {
    "phi4 mini": {"r": 6, "lora_alpha": 9, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]},
    "llama tied": {"r": 6, "lora_alpha": 9, "target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "gemma 3": {"r": 6, "lora_alpha": 9, "target_modules": ["v_proj", "embed_tokens"]},
    "qwen2": {"r": 6, "lora_alpha": 9, "target_modules": ALL},
    "mixtral": {"r": 6, "lora_alpha": 9, "target_modules": ["q_proj", "o_proj"]},
    "qwen2 moe": {"r": 6, "lora_alpha": 9, "target_modules": ["k_proj", "v_proj", "shared_expert.down_proj"]},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_of_other_families(family, tmp_path):
    """Adapters of special modules have PEFT's logits.

    Phi-4 rotates a part of each head, and the rows of its fused projection are loaded in another order. Gemma
    multiplies embeddings by a number, and a head may be the table of embeddings, adapted by itself. Models of experts
    have attention and a shared expert that are adapted, while the experts are left alone.
    """
    save_checkpoint(MODELS[family], tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "own", FAMILIES[family], seed=1)
    as_peft_says(engine(tmp_path, ["own"]), tmp_path)


def as_peft_says(own: Engine, folder: Path) -> None:
    """Assert that the next token's logits with the adapter "own" are PEFT's, and differ without it."""
    (prompt,) = prompts("own")
    with own.keeping_logits() as kept:
        own.run([prompt])
    with torch.inference_mode():
        tokens = torch.tensor([prompt.tokens])
        expected = reference(folder / "base", folder / "own")(tokens).logits[0, -1]
        plain = reference(folder / "base", None)(tokens).logits[0, -1]
    torch.testing.assert_close(kept[0][0], expected, atol=2e-4, rtol=1e-4)
    assert (expected - plain).abs().max() > 0.01


STACKED = ["experts.gate_up_proj", "experts.down_proj"]
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "with shared": (
        "qwen2 moe",
        {"r": 5, "target_modules": ["q_proj", "shared_expert.down_proj"], "target_parameters": STACKED},
    ),
    "qwen3": ("qwen3 moe", {"r": 5, "lora_alpha": 9, "target_modules": ["q_proj"], "target_parameters": STACKED}),
    "dense": ("qwen3 moe with dense layers", {"r": 18, "target_modules": [], "target_parameters": STACKED}),
    "down": ("qwen2 moe", {"r": 3, "target_modules": ["o_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
    "mixtral": (
        "mixtral",
        {"r": 4, "target_modules": ["k_proj"], "target_parameters": STACKED, "rank_pattern": {"experts.down_proj": 2},
         "alpha_pattern": {"experts.gate_up_proj": 40}},
    ),
    "old names": ("mixtral", {"r": 4, "lora_alpha": 8, "target_modules": ["w1", "w2", "w3"]}),
}  # fmt: skip


def of_experts(case: str, folder: Path, **changes: Any) -> Engine:
    """Return an engine with the adapter of a case, "own", and an adapter of only attention, "qv"."""
    family, config = EXPERTS[case]
    save_checkpoint(MODELS[family], folder / "base")
    save_adapter(folder / "base", folder / "own", config, seed=1)
    save_adapter(folder / "base", folder / "qv", ADAPTERS["qv"], seed=2)
    return engine(folder, ["own", "qv"], **changes)


@pytest.mark.parametrize("case", [name for name in EXPERTS if name != "with shared"])
def test_adapters_of_experts_have_the_logits_of_peft(case, tmp_path):
    as_peft_says(of_experts(case, tmp_path), tmp_path)


@pytest.mark.parametrize(("case", "chosen"), [("qwen3", "eager"), pytest.param("with shared", "llvm", marks=NO_LLVM)])
def test_adapted_experts_change_only_their_own_rows(case, chosen, tmp_path):
    own = of_experts(case, tmp_path, execution_mode=chosen)
    as_peft_says(own, tmp_path)
    asked = prompts("own", "", "qv", "own", "", "own")
    seen = alone(own, asked)
    assert own.run(asked) == seen
    own.forget_prefixes()
    assert own.run(asked, in_groups([3, 1, 2])) == seen
    plain = [replace(prompt, lora_name="") for prompt in asked]
    expected = engine(tmp_path, [], execution_mode=chosen, **WITHOUT).run(plain)
    assert seen[1] == expected[1] and seen[4] == expected[4] and seen[0] != expected[0]
    other = engine(tmp_path, ["qv", "own"], max_loras=1, max_lora_rank=70, execution_mode=chosen)
    assert other.run(asked) == seen


def test_experts_one_by_one_have_the_bits_of_a_stack(tmp_path):
    """Adapters with a module for each expert, as PEFT once saved them, have the bits of a stack."""
    own = of_experts("qwen3", tmp_path)
    (tmp_path / "each").mkdir()
    config = json.loads((tmp_path / "own" / "adapter_config.json").read_text())
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    changed = config | {"target_parameters": None, "target_modules": names}
    (tmp_path / "each" / "adapter_config.json").write_text(json.dumps(changed))
    tensors = load_file(tmp_path / "own" / "adapter_model.safetensors")
    for name in [name for name in tensors if ".experts." in name and "lora_A" in name]:
        a, b = tensors.pop(name), tensors.pop(name.replace("lora_A", "lora_B"))
        at, gated = name.partition(".experts.")[0] + ".experts", ".base_layer." in name
        parts = ("gate_proj", "up_proj") if gated else ("down_proj",)
        for expert in range(7):
            rows = b.unflatten(1, (-1, 7))[:, :, expert].chunk(len(parts))
            for part, up in zip(parts, rows, strict=True):
                tensors[f"{at}.{expert}.{part}.lora_A.weight"] = a.chunk(7)[expert].clone()
                tensors[f"{at}.{expert}.{part}.lora_B.weight"] = up.contiguous()
    save_file(tensors, tmp_path / "each" / "adapter_model.safetensors")
    assert engine(tmp_path, ["each"]).run(prompts("each")) == own.run(prompts("own"))


def test_adapted_float8_experts_change_only_their_own_rows(tmp_path):
    """With float8 weights, a row has the bits that it has alone.

    A row without adapter has the bits of an engine without any.
    """
    of_experts("qwen3", tmp_path)
    asked, online = prompts("own", "", "qv", "own"), engine(tmp_path, ["own", "qv"], quantization="fp8")
    seen = alone(online, asked)
    assert online.run(asked) == seen
    without = engine(tmp_path, [], quantization="fp8", **WITHOUT)
    right = without.run([replace(prompt, lora_name="") for prompt in asked])
    assert [found == expected for found, expected in zip(seen, right, strict=True)] == [False, True, False, False]


def test_rows_beside_quantized_weights_have_the_bits_of_the_dequantized_model(tmp_path):
    """Rows beside four-bit weights have the bits of the plain checkpoint with the dequantized weights."""
    save_checkpoint(MODELS["llama"], tmp_path / "plain" / "base")
    (tmp_path / "codes").mkdir()
    quantize_checkpoint(tmp_path / "plain" / "base", KINDS["mxfp4"], tmp_path / "codes" / "base")
    for folder in (tmp_path / "plain", tmp_path / "codes"):
        save_adapter(tmp_path / "plain" / "base", folder / "all", ADAPTERS["all"], seed=0)
    asked = prompts("all", "", "all")
    found, right = (engine(tmp_path / name, ["all"], execution_mode="eager").run(asked) for name in ("codes", "plain"))
    assert found == right


def test_rows_beside_float8_weights_have_the_bits_they_have_alone(folder):
    asked, online = prompts(*NAMES), engine(folder, quantization="fp8")
    seen = alone(online, asked)
    assert online.run(asked) == seen
    plain = [replace(prompt, lora_name="") for prompt in asked]
    without = engine(folder, [], quantization="fp8", **WITHOUT).run(plain)
    assert online.run(plain) == without
    assert seen[1] == without[1] and seen[0] != without[0]


def test_a_draft_model_drafts_for_rows_with_adapters_too(folder, shared, mode):
    """A draft model without adapters drafts for rows with adapters.

    It drafts the answers without an adapter.
    """
    asked = prompts(*NAMES)
    drafts = {"model": str(folder / "base"), "num_speculative_tokens": 3}
    drafting = engine(folder, speculative_config=drafts, execution_mode=mode)
    assert drafting.run(asked) == alone(shared, asked)
    assert drafting.run(asked, in_groups([3, 1, 4])) == drafting.run(asked)
    stats = drafting.loop.scheduler.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens
