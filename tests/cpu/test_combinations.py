"""Features together: any set of features changes no bit.

The bits are of an engine with no other feature.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from preheat import LLM, BeamSearchParams, LoRARequest, SamplingParams, StructuredOutputsParams
from preheat.extras.calibration import calibrate
from preheat.model.files import BUNDLED_PATH
from preheat.schedule import prefix
from preheat.settings import Settings
from preheat.settings.combinations import ROWS, TRAITS, Works, traits_of
from tests.adapters import write_adapter
from tests.controls import fails
from tests.cpu.fake_hpu import FAKES, inserted
from tests.cpu.quantized import inputs_of, scheme
from tests.llava import picture, save_llava
from tests.qwen_vl import IMAGE, save_qwen_vl
from tests.tokenizers import byte_level


def cases(name: str) -> list[str]:
    """Return the sets of traits that, by the table, the test ``name`` tries."""
    test = f"tests/cpu/test_combinations.py::{name}"
    return [row.left for row in ROWS if isinstance(row, Works) and row.test == test]


pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the libraries that write the checkpoints

SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32, "eos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "seed": 0, "device": "cpu", "dtype": "float32", "num_threads": 1, "cache_dir": "off",
    "skip_warmup": True, "boot_check": "off", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "block_size": 16, "num_gpu_blocks_override": 24,
}  # fmt: skip
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "w8a8": ("float-quantized", scheme(8, "float", "channel", inputs_of("token"))),
    "w8a16": ("pack-quantized", scheme(8, "int", "channel")),
    "w4a16": ("pack-quantized", scheme(4, "int", "group", group_size=16)),
}
PARTS = ("re:.*self_attn.[qkv]_proj$", "re:.*o_proj$", "re:.*mlp.*")
"""Layers stored by each scheme, where there are several schemes."""
WINDOWED = {
    "architectures": ["MistralForCausalLM"], "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
"""The model of text with a window in one of its layers."""
WARM = {"skip_warmup": False, "boot_check": "quick", "on_cold": "raise", "determinism_warmup_iterations": 0}
"""Options that check a woken engine as a boot is checked."""

NUMERIC = ("w8a8", "w8a16", "w4a16", "inc", "fp8_cache", "images", "any_size", "latents", "entries", "pooling",
           "encoder", "states", "groups", "tensor_parallel", "expert_parallel")  # fmt: skip
"""Traits that decide the bits of an answer."""


def add_marks(folder: Path) -> None:
    """Make the marks of reasoning of two tokens that no prompt has."""
    path = folder / "tokenizer.json"
    text = path.read_text(encoding="utf-8").replace("<tool name>", "<think>").replace("｜é｜", "</think>")
    path.write_text(text, encoding="utf-8")


class Made:
    """Folders of models of text and of images, and of other things that an option names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        backend = byte_level()
        config = json.loads((BUNDLED_PATH / "config.json").read_text()) | SIZES
        self.config = config | {"vocab_size": backend.get_vocab_size() + 4}  # the vocabulary of models with images
        self.text = folder / "text"
        self.text.mkdir()
        (self.text / "config.json").write_text(json.dumps(self.config))
        (self.text / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        backend.save(str(self.text / "tokenizer.json"))
        add_marks(self.text)

    @cache  # noqa: B019 - one object
    def images(self) -> Path:
        save_llava(self.folder / "images")
        add_marks(self.folder / "images")
        return self.folder / "images"

    @cache  # noqa: B019 - one object
    def any_size(self) -> Path:
        save_qwen_vl(self.folder / "any_size", layers=2)
        add_marks(self.folder / "any_size")
        return self.folder / "any_size"

    @cache  # noqa: B019 - one object
    def seeing_states(self) -> Path:
        save_qwen_vl(self.folder / "seeing_states", family="Qwen3_5Moe")
        add_marks(self.folder / "seeing_states")
        return self.folder / "seeing_states"

    @cache  # noqa: B019 - one object
    def encoder(self) -> Path:
        own = {"architectures": ["BertModel"], "max_position_embeddings": 128, "num_attention_heads": 4}
        sizes = {name: self.config[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
        folder = self.folder / "encoder"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(own | sizes | {"num_hidden_layers": 2}))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((self.text / name).read_bytes())
        return folder

    def _beside_text(self, name: str, own: dict[str, Any]) -> Path:
        """Write a model with the tokenizer of the text model, and with ``own`` values in the config."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config | own))
        for path in self.text.iterdir():
            if path.name != "config.json":
                (folder / path.name).write_bytes(path.read_bytes())
        return folder

    @cache  # noqa: B019 - one object
    def experts(self) -> Path:
        """A model of two layers: a dense one, and one with experts."""
        own = {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0], "num_experts": 4,
               "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
               "decoder_sparse_step": 1}  # fmt: skip
        return self._beside_text("experts", own)

    @cache  # noqa: B019 - one object
    def states(self) -> Path:
        own = {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["linear_attention", "full_attention"]}
        sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
                 "linear_num_value_heads": 4}  # fmt: skip
        return self._beside_text("states", own | sizes | {"num_hidden_layers": 2})

    @cache  # noqa: B019 - one object
    def mamba(self) -> Path:
        """A model with the other rule of states; its layers without one do not turn."""
        own = {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba", "attention"]}
        sizes = {"mamba_n_heads": self.config["hidden_size"] // 8, "mamba_d_head": 16, "mamba_d_state": 16,
                 "num_local_experts": 0, "shared_intermediate_size": 64}  # fmt: skip
        return self._beside_text("mamba", own | sizes | {"num_hidden_layers": 2})

    @cache  # noqa: B019 - one object
    def states_and_experts(self) -> Path:
        own = json.loads((self.states() / "config.json").read_text())
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        more = {"architectures": ["Qwen3_5MoeForCausalLM"], "shared_expert_intermediate_size": 64}
        return self._beside_text("states_and_experts", own | experts | more)

    @cache  # noqa: B019 - one object
    def latents(self) -> Path:
        """A model whose linear layers divide into groups of scales, and whose heads four ranks can share."""
        own = {"architectures": ["DeepseekV3ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 4}
        sizes = {"q_lora_rank": 32, "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
                 "v_head_dim": 32, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
                 "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}  # fmt: skip
        return self._beside_text("latents", own | sizes)

    @cache  # noqa: B019 - one object
    def entries(self) -> Path:
        """A model of two layers with experts, one with a window and one with larger heads, and inputs of each layer."""
        own = {"architectures": ["Gemma4ForCausalLM"], "sliding_window": 24, "global_head_dim": 64,
               "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 16,
               "vocab_size_per_layer_input": self.config["vocab_size"], "enable_moe_block": True,
               "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}  # fmt: skip
        return self._beside_text("entries", own)

    def model_for(self, names: list[str]) -> Path:
        """Return the folder of a model with the traits of ``names``."""
        special = (kind for kind in ("any_size", "images", "encoder", "latents", "states", "entries") if kind in names)
        kind = next(special, "experts" if "expert_parallel" in names else None)
        if "states" in names:
            kind = "seeing_states" if "any_size" in names else kind
            kind = "mamba" if kind == "states" and {"w8a8", "w4a16"} & set(names) else kind
            kind = "states_and_experts" if kind == "states" and "expert_parallel" in names else kind
        return getattr(self, kind)() if kind else self.text

    @cache  # noqa: B019 - one object
    def head(self) -> str:
        own = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 200,
               "eagle_aux_hidden_state_layer_ids": [1, 1, 1]}  # fmt: skip
        (self.folder / "head").mkdir()
        (self.folder / "head" / "config.json").write_text(json.dumps(self.config | own))
        return str(self.folder / "head")

    @cache  # noqa: B019 - one object
    def adapter(self, model: Path) -> str:
        return str(write_adapter(self.folder / f"adapter of {model.name}", 1, model=model))

    @cache  # noqa: B019 - one object
    def measured(self) -> str:
        settings = Settings.load({**OPTIONS, "model": str(self.text)}, {})
        calibrate(settings, str(self.folder / "measured"), [list(range(60)), list(range(90, 130))])
        return str(self.folder / "measured" / "maxabs_quant.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("combinations"))


def draft(**config: Any) -> dict[str, Any]:
    return {"speculative_config": {"num_speculative_tokens": 2, **config}}


ASKS: dict[str, Callable[[Made], dict[str, Any]]] = {
    "tensor_parallel": lambda made: {"tensor_parallel_size": 2},
    "expert_parallel": lambda made: {"enable_expert_parallel": True},
    "pipeline": lambda made: {"pipeline_parallel_size": 2},
    "adapters": lambda made: {"enable_lora": True},
    "inc": lambda made: {"quantization": "inc", "quant_config": made.measured()},
    "fp8_cache": lambda made: {"kv_cache_dtype": "fp8"},
    "text_drafts": lambda made: draft(method="ngram"),
    "draft_model": lambda made: draft(model=str(made.text)),
    "eagle3": lambda made: draft(method="eagle3", model=made.head()),
    "mtp": lambda made: draft(method="mtp"),
    "prompt_embeds": lambda made: {"enable_prompt_embeds": True},
    "budget": lambda made: {"reasoning_parser": "qwen3"},
    "pooling": lambda made: {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}},
    "sleep": lambda made: {"enable_sleep_mode": True},
    "operator": lambda made: {"server_dev_mode": True},
    "updates": lambda made: {"weight_transfer_config": {"backend": "gloo"}},
    "offload": lambda made: {"kv_offloading_size": 0.01},
    "events": lambda made: {
        "kv_events_config": {"enable_kv_cache_events": True, "endpoint": f"ipc://{made.folder}/events"}
    },
    "split": lambda made: {"bucketing_policy": "split"},
    "audit": lambda made: {"audit_every": 0.01},
    "groups": lambda made: {"hf_overrides": WINDOWED},
    "receipts": lambda made: {"receipts": True},
    "answer_cache": lambda made: {"answer_cache_size": 0.01},
    **{
        mode: lambda made, mode=mode: {"execution_mode": mode}
        for mode in ("eager", "compile", "graphs", "lazy", "llvm")
    },
}
"""Options that turn a trait on."""


def options_of(made: Made, names: list[str]) -> dict[str, Any]:
    """Return the options of an engine with all of ``names``."""
    model = made.model_for(names)
    found = {**OPTIONS, "model": str(model)}
    for name in names:
        found |= ASKS[name](made) if name in ASKS else {}
    if "entries" in names:  # the model has a window of its own
        found.pop("hf_overrides", None)
        found["disable_hybrid_kv_cache_manager"] = "groups" not in names
    if stored := [name for name in SCHEMES if name in names]:
        found["hf_overrides"] = found.get("hf_overrides", {}) | {"quantization_config": quantized_by(stored)}
    if "encoder" in names:
        found["max_num_batched_tokens"] = 128  # a step holds a whole text
    if "compile" in names:
        found |= {"max_num_seqs": 2, "max_num_batched_tokens": 128 if "encoder" in names else 32}  # few to compile
    return found | (WARM if "sleep" in names else {})


def quantized_by(kinds: list[str]) -> dict[str, Any]:
    """Return a checkpoint's quantization_config.

    All linear layers are of one kind, or parts of each layer are of each of ``kinds``.
    """
    groups = {name: {**group, "format": style} for name, (style, group) in SCHEMES.items() if name in kinds}
    if len(kinds) > 1:
        for group, targets in zip(groups.values(), PARTS, strict=False):
            group["targets"] = [targets]
    style = next(iter(groups.values()))["format"] if len(kinds) == 1 else "mixed-precision"
    left_out = ["lm_head", "re:.*vision.*", "re:.*visual.*", "re:.*projector.*"]
    return {"quant_method": "compressed-tensors", "format": style, "ignore": left_out, "config_groups": groups}


def answers(llm: LLM, made: Made, names: list[str], *, plain: bool = True) -> dict[str, Any]:
    """Return an engine's answers to each kind of request that it supports, all sent at once.

    ``plain``: also to requests with no option and with an image.
    """
    ids = [[(7 * place + start) % 200 + 60 for place in range(length)] for start, length in ((0, 70), (5, 3), (0, 50))]
    if "pooling" in names:
        vectors = llm.encode([{"prompt_token_ids": each} for each in ids], use_tqdm=False)
        return {"pooled": [vector.outputs.data.tobytes() for vector in vectors]}
    params = [
        SamplingParams(temperature=0.8 * (n % 2), seed=n, max_tokens=9, ignore_eos=True, logprobs=2) for n in range(3)
    ]
    asked: list[tuple[str, Any, SamplingParams, LoRARequest | None]] = []
    if plain:
        asked = [("plain", {"prompt_token_ids": each}, some, None) for each, some in zip(ids, params, strict=True)]
    if "adapters" in names:
        model = made.model_for(names)
        asked.append(("adapted", {"prompt_token_ids": ids[0]}, params[1], LoRARequest("own", 1, made.adapter(model))))
    if "structured" in names:
        held = SamplingParams(temperature=1.0, seed=4, max_tokens=20, logprobs=1,
                              structured_outputs=StructuredOutputsParams(regex="[ab]{5,9}"))  # fmt: skip
        asked.append(("structured", {"prompt_token_ids": ids[1]}, held, None))
    if "budget" in names:
        thinks = llm.frontend.tokenizer.token_id("<think>")
        few = SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True, thinking_token_budget=3)
        asked.append(("budget", {"prompt_token_ids": [*ids[2], thinks]}, few, None))
    if "images" in names and plain:
        mark = IMAGE if "any_size" in names else "<image>"
        prompt = {"prompt": f"USER: {mark}\nWhat? ASSISTANT:", "multi_modal_data": {"image": [picture(1)]}}
        asked.append(("image", prompt, params[1], None))
    if "prompt_embeds" in names:
        table = llm.loop.executor.decoder.weights.embedding
        asked.append(("embeds", {"prompt_embeds": table[torch.tensor(ids[0])]}, params[1], None))
    outputs = llm.generate([each[1] for each in asked], [each[2] for each in asked], use_tqdm=False,
                           lora_request=[each[3] for each in asked])  # fmt: skip
    found: dict[str, Any] = {}
    if "receipts" in names:
        assert all(len(each.receipt.bits) == len(each.token_ids) for output in outputs for each in output.outputs)
    for (kind, *_), output in zip(asked, outputs, strict=True):
        found.setdefault(kind, []).append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    if "beam_search" in names:
        (search,) = llm.beam_search([{"prompt_token_ids": ids[2]}], BeamSearchParams(beam_width=2, max_tokens=3))
        found["beams"] = [(each.tokens, each.cum_logprob) for each in search.sequences]
    return found


def close(llm: LLM) -> None:
    if (publisher := llm.loop.kv_publisher) is not None:
        publisher.close()
    if (ranks := getattr(llm.loop.executor, "ranks", None)) is not None:
        ranks.close()


def emptied(llm: LLM, *_: Any) -> None:
    llm.reset_prefix_cache()


def slept(llm: LLM, *_: Any) -> None:
    llm.sleep(1)
    llm.wake_up()


def renewed(llm: LLM, made: Made, names: list[str], right: dict[str, Any]) -> None:
    """Replace a norm, so that every answer changes, and bring it back."""
    norm = llm.loop.executor.decoder.spec.final_norm
    loaded = getattr(llm.loop.executor.decoder.weights.final_norm, "norm", None)  # of an encoder, with its bias
    plain = llm.loop.executor.decoder.weights.final_norm.weight.clone()
    olds = {f"{norm.name}.weight": plain}
    if norm.bias:
        olds[f"{norm.name}.bias"] = loaded.numbers[norm.size :].clone()
    llm.update_weights([(name, old.flip(0)) for name, old in olds.items()])
    assert answers(llm, made, names) != right
    llm.update_weights(list(olds.items()))


COMMANDS: dict[str, Callable[..., None]] = {"operator": emptied, "sleep": slept, "updates": renewed}
"""Commands of an operator, by trait."""

EXPECTED: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Answers of engines by their options' traits: each engine is booted once."""


def expected(made: Made, names: list[str], **device: Any) -> dict[str, Any]:
    """Return the answers of engines with only the traits of ``names`` that decide bits.

    Kinds of requests are asked one after another. A kind that needs an option has an engine of its own.
    """
    numeric = [name for name in NUMERIC if name in names] + ["llvm" if "llvm" in names else "eager"] * (not device)
    kinds = [name for name in ("adapters", "structured", "budget", "beam_search", "prompt_embeds") if name in names]
    groups = [["", *(kind for kind in kinds if kind not in ASKS)], *([kind] for kind in kinds if kind in ASKS)]
    for group in groups:
        keys = [(*device.values(), *numeric, kind) for kind in group]
        if all(key in EXPECTED for key in keys):
            continue
        engine = bare(made, names, [*numeric, *filter(None, group[:1])], **device)
        for kind, key in zip(group, keys, strict=True):
            EXPECTED[key] = answers(engine, made, [*numeric, kind], plain=not kind)
            engine.reset_prefix_cache()
    found: dict[str, Any] = {}
    for kind in ("", *kinds):
        found |= EXPECTED[*device.values(), *numeric, kind]
    return found


def bare(made: Made, names: list[str], own: list[str], **device: Any) -> LLM:
    """Return an engine with the traits ``own``, on one rank and with one cache group."""
    options = options_of(made, own) | device
    options |= {"disable_hybrid_kv_cache_manager": True} if "groups" in names else {}
    options |= {"tensor_parallel_size": 1, "tp_invariant": True} if "tensor_parallel" in names else {}
    return LLM(**options)


def check(made: Made, names: list[str], **device: Any) -> None:
    """Assert that an engine with all of ``names`` gives the expected answers.

    It is asked twice, so that blocks are found again, and after each command.
    """
    right = expected(made, names, **device)
    llm = LLM(**options_of(made, names) | device)
    try:
        assert {name for name in names if TRAITS[name].on} <= traits_of(llm.settings)
        assert len(llm.loop.scheduler.limits.groups) == 1 + ("groups" in names)
        for command in ("", *(name for name in COMMANDS if name in names)):
            COMMANDS.get(command, lambda *_: None)(llm, made, names, right)
            for _ in range(2):
                assert answers(llm, made, names) == right
        assert "answer_cache" not in names or llm.frontend.answers.figures.hits > 0
        if {"text_drafts", "draft_model", "eagle3", "mtp"} & set(names):
            assert llm.loop.scheduler.stats().draft_tokens > 0
    finally:
        close(llm)


@pytest.mark.parametrize("traits", cases("test_together"))
def test_together(made: Made, traits: str) -> None:
    check(made, traits.split())


@pytest.mark.parametrize("traits", cases("test_together_on_a_fake_gaudi"))
def test_together_on_a_fake_gaudi(made: Made, traits: str) -> None:
    names = traits.split()
    made.measured()  # on the host
    policy = "split" if "split" in names else "unified"
    ranks = {"PYTHONPATH": os.pathsep.join([str(FAKES), os.environ.get("PYTHONPATH", "")])}
    with inserted(ranks):
        try:
            check(made, names, device="hpu", use_fake_hpu=True, bucketing_policy=policy, skip_warmup=True)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def test_a_feature_that_changes_another_is_seen(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a prefix cache that ignores adapters, so that a prompt without an adapter finds an adapter's blocks."""
    names = ["eager", "adapters"]
    expected(made, names)
    monkeypatch.setattr(prefix.PrefixCache, "_root", lambda self, sequence: b"")
    with fails(match="adapted"):
        check(made, names)
