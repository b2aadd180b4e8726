"""Attention over latent vectors (MLA) through the whole engine, against transformers, with one order everywhere."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from preheat import LLM
from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cpu.llvm import layer as compiled
from preheat.backends.cpu.tiles import SPLIT
from preheat.backends.cuda.device.card import HOPPER
from preheat.backends.cuda.facts import FACTS as CUDA
from preheat.backends.cuda.lacking import lacking
from preheat.backends.hpu.facts import FACTS as HPU
from preheat.backends.support import supports
from preheat.errors import ModelError
from preheat.execution import kv_cache
from preheat.model.families import latent as families
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.kv_scales import with_kv_dtype
from preheat.model.latent import Latent
from preheat.model.specs import ModelSpec
from preheat.model.values import caches_of, check_supported
from preheat.ops import moe
from preheat.ops.values import Routing
from tests.controls import fails
from tests.cpu.checkpoints import LATENT, MODELS, save_checkpoint
from tests.cpu.test_family_engines import GREEDY, OPTIONS, differing, error, run
from tests.cpu.test_gpt_oss import Checkpoint, prompts

LAYERS = 2
SETTINGS: dict[str, Any] = OPTIONS | {
    "max_model_len": 512, "skip_warmup": True, "boot_check": "off", "num_threads": 1, "execution_mode": "eager",
}  # fmt: skip
COLD = {"enable_prefix_caching": False, "max_num_batched_tokens": 512}
"""No prefixes, and a prompt in one chunk."""


@pytest.fixture(scope="module", params=["deepseek v3", "deepseek v2 lite"])
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder, (family, changes) = tmp_path_factory.mktemp("latent"), MODELS[request.param]
    changes = {**changes, "max_position_embeddings": 512, "num_hidden_layers": LAYERS}
    return Checkpoint(folder, save_checkpoint((family, changes), folder))


@pytest.fixture(scope="module")
def together(own: Checkpoint) -> tuple[LLM, list[tuple[list[int], Tensor]]]:
    """Return an engine that reads in chunks, and its answers to prompts of two KV splits and of one."""
    llm = LLM(str(own.folder), **SETTINGS)
    return llm, run(llm, prompts())


def test_answers_are_those_of_transformers_however_they_are_computed(own: Checkpoint, together: Any) -> None:
    """In chunks, together, behind a cached prefix, and cold in one chunk."""
    llm, found = together
    for prompt, each in zip(prompts(), found, strict=True):
        assert len(prompt) > SPLIT or len(prompt) < 80
        assert error(each, prompt, own.reference) <= 1e-5
    assert differing(run(llm, prompts()[::-1])[::-1], found) == 0
    assert llm.loop.scheduler.stats().prefix_hits > 0
    cold = LLM(str(own.folder), **SETTINGS | COLD)
    assert differing([run(cold, [prompt])[0] for prompt in prompts()], found) == 0


def test_200_tokens_are_those_of_transformers(own: Checkpoint, together: Any) -> None:
    llm, long = together[0], prompts()[0]
    if spec_of(own).layers[0].attention.latent.q is None:
        pytest.skip("one family is enough for a long answer")
    (answer,) = llm.generate([long], GREEDY, use_tqdm=False)
    tokens = answer.outputs[0].token_ids
    right = own.reference(torch.tensor(long + tokens)).argmax(-1)[len(long) - 1 : -1].tolist()
    assert (len(tokens), tokens) == (200, right)


def test_a_block_holds_one_entry_for_all_heads(own: Checkpoint, together: Any) -> None:
    llm, _ = together
    cache = llm.loop.executor.cache.data
    size = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert cache.shape[0::2] == (LAYERS, 1, 16) and cache.shape[3:] == (1, 16, size)
    assert spec_of(own).kv_bytes_per_token(4) == LAYERS * size * 4


def spec_of(own: Checkpoint) -> ModelSpec:
    return read_spec(read_config(own.folder))


def without_growth(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(families, "_growth", lambda *_: 1.0)


def cache_of_16_bits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_cache, "CACHED", {torch.float32: torch.bfloat16})


@pytest.mark.parametrize("plant", [without_growth, cache_of_16_bits])
def test_faults_of_scale_and_cache_are_seen(own: Checkpoint, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: scores without yarn's factor, and entries of another dtype."""
    plant(monkeypatch)
    short = prompts()[1]
    with fails():
        assert error(run(LLM(str(own.folder), **SETTINGS), [short])[0], short, own.reference) <= 1e-5


def test_another_order_for_prompts_is_seen(own: Checkpoint, together: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: heads of a prompt's tokens differ in the last bit, as by a form of their own."""
    right = Latent.values

    def values(self: Latent, attended: Tensor) -> Tensor:
        found = right(self, attended)
        return torch.nextafter(found, torch.full_like(found, torch.inf)) if len(attended) > 4 else found

    monkeypatch.setattr(Latent, "values", values)
    cold = LLM(str(own.folder), **SETTINGS | COLD)
    assert differing([run(cold, [prompt])[0] for prompt in prompts()], together[1]) == len(prompts())


def chosen_by_hand(logits: Tensor, how: Routing, correction: Tensor) -> tuple[list[list[int]], Tensor]:
    """Return experts and weights by the formulas, in float64, written without our code."""
    experts, weights = list[list[int]](), []
    for row in logits.double():
        scores = row.sigmoid() if how.scoring == "sigmoid" else row.softmax(-1)
        wanted, size = scores + correction, len(row) // how.groups
        groups = [sorted(wanted[at : at + size].tolist())[::-1] for at in range(0, len(row), size)]
        order = sorted(range(how.groups), key=lambda at: (-sum(groups[at][: how.best]), at))[: how.top_groups]
        allowed = [each for each in range(len(row)) if each // size in order]
        mine = sorted(allowed, key=lambda each: (-float(wanted[each]), each))[: how.top_k]
        own = scores[mine] / (scores[mine].sum() if how.renormalize else 1.0) * how.factor
        experts, weights = [*experts, mine], [*weights, own]
    return experts, torch.stack(weights)


HOW = [
    Routing(3, True, False, "sigmoid", 4, 2, 2, 1.8),
    Routing(3, False, False, "softmax", 4, 2, 1, 2.5),
    Routing(4, True, False, "sigmoid"),
]


@pytest.mark.parametrize("how", HOW)
def test_experts_are_chosen_by_the_formulas_and_ties_by_number(how: Routing) -> None:
    generator = torch.Generator().manual_seed(1)
    few = torch.tensor([0.0, 0.7, 1.1, 1.9])  # many ties, and no sums that are equal by chance
    logits = few[torch.randint(4, (60, 8), generator=generator)]
    correction = torch.zeros(8) if how.scoring == "softmax" else torch.tensor([0.0, 0.05, 0, 0, 0.013, 0, 0, 0.05])
    experts, weights = moe.route(logits, how, correction)
    mine, right = chosen_by_hand(logits, how, correction)
    assert experts.tolist() == mine
    assert torch.allclose(weights.double(), right, rtol=1e-6)


@pytest.mark.parametrize("how", HOW)
def test_ties_by_another_order_are_seen(how: Routing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: of equal experts or groups, the highest number."""
    right = torch.sort

    def sort(x: Tensor, **more: Any) -> Any:
        values, index = right(x.flip(-1), **more)
        return values, x.shape[-1] - 1 - index

    monkeypatch.setattr(moe.torch, "sort", sort)
    with fails():
        test_experts_are_chosen_by_the_formulas_and_ties_by_number(how)


def test_devices_without_kernels_refuse_by_name(own: Checkpoint) -> None:
    reason = "attention over latent vectors is not supported on hpu"
    with pytest.raises(ModelError, match=rf"layers\.0\.attention\.latent\.up: {reason}: "):
        check_supported(spec_of(own), "bfloat16", partial(supports, HPU))
    for facts in (CPU, CUDA):
        check_supported(spec_of(own), "bfloat16", partial(supports, facts))


def test_a_gpu_refuses_latent_vectors_of_eight_bits(own: Checkpoint) -> None:
    caches = [cache for _, cache in caches_of(with_kv_dtype(spec_of(own), "fp8_e4m3", "bfloat16"), "bfloat16")]
    assert {lacking(HOPPER, cache) for cache in caches} == {
        "a cache of latent vectors in fp8_e4m3 has no kernel on a GPU yet: use auto"
    }
    assert lacking(HOPPER, next(cache for _, cache in caches_of(spec_of(own), "bfloat16"))) is None


def test_compiled_functions_refuse_by_name(own: Checkpoint) -> None:
    with pytest.raises(ModelError, match="attention over latent vectors has no function; use --execution-mode eager"):
        check_supported(spec_of(own), "float32", compiled.supports)


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported"),
    ({"n_group": 3}, "8 experts in 3 groups"),
    ({"num_experts_per_tok": 5}, "cannot give 5 experts"),
    ({"attention_bias": True, "q_lora_rank": None}, "attention_bias without q_lora_rank"),
    ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    ({"qk_rope_head_dim": 15}, "qk_rope_head_dim must be even"),
    ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must name 3 layers"),
])  # fmt: skip
def test_configs_of_no_model_are_refused(changes: dict[str, Any], message: str) -> None:
    config = LATENT | {"num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 160, "vocab_size": 199}
    config |= {"num_attention_heads": 4, "architectures": ["DeepseekV3ForCausalLM"], "max_position_embeddings": 64}
    read_spec(config)
    with pytest.raises(ModelError, match=message):
        read_spec(config | changes)


def test_layers_that_predict_ahead_are_skipped(tmp_path: Path) -> None:
    """A released checkpoint has such layers behind the others."""
    save_checkpoint(MODELS["deepseek v3"], tmp_path)
    spec = read_spec(read_config(tmp_path) | {"num_nextn_predict_layers": 1})
    assert spec.ignored == (r"model\.layers\.3\..*",)


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scales of blocks of 128 x 128, and the numbers that they stand for, written without our code."""
    scales = torch.zeros(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    codes, meant = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scales[row, column] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            meant[place] = codes[place].float() * scales[row, column]
    return codes, scales, meant


@pytest.mark.parametrize("fault", [False, True])
def test_maps_stored_in_float8_blocks_are_read_exactly(own: Checkpoint, tmp_path: Path, fault: bool) -> None:
    """The stored module has the bits of a checkpoint of the numbers that it stands for; control: one other scale."""
    tensors = load_file(own.folder / "model.safetensors")
    stored, meant = dict(tensors), dict(tensors)
    for name in [name for name in tensors if "kv_b_proj" in name]:
        stored[name], scales, meant[name] = in_blocks(tensors[name])
        scales[-1, 0] *= 1 + fault
        stored[f"{name}_scale_inv"] = scales
    names = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "mlp", "lm_head")
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    method |= {"modules_to_not_convert": [f"re:.*{name}.*" for name in names]}
    config, found = read_config(own.folder), []
    for kind, weights in (("stored", stored), ("meant", meant)):
        folder = tmp_path / kind
        folder.mkdir()
        more = {"quantization_config": method} if kind == "stored" else {}
        (folder / "config.json").write_text(json.dumps(config | more))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        found.append(run(LLM(str(folder), **SETTINGS), prompts()[1:]))
    assert differing(*found) == fault
