"""Gemma 4 through the whole engine, against transformers: entries of two sizes, shared keys, inputs of each layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from preheat import LLM
from preheat.backends.cpu import attention
from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cpu.llvm import layer as compiled
from preheat.backends.cpu.tiles import SPLIT
from preheat.backends.cuda.device.card import HOPPER
from preheat.backends.cuda.facts import FACTS as CUDA
from preheat.backends.cuda.lacking import lacking
from preheat.backends.hpu.facts import FACTS as HPU
from preheat.backends.support import supports
from preheat.cache_groups import WHOLE
from preheat.errors import ModelError, SettingsError
from preheat.execution import layer_parts
from preheat.model.families import gemma4, read_spec
from preheat.model.files import read_config
from preheat.model.specs import ModelSpec
from preheat.model.values import check_supported
from preheat.ops.activation import capped
from preheat.ops.values import Cache
from tests.cpu.checkpoints import GEMMA4, LAYER_INPUTS, MODELS, SMALL, save_checkpoint
from tests.cpu.test_family_engines import GREEDY, OPTIONS, differing, error, run
from tests.cpu.test_gpt_oss import Checkpoint, prompts

SETTINGS: dict[str, Any] = OPTIONS | {
    "max_model_len": 512, "skip_warmup": True, "boot_check": "off", "num_threads": 1, "execution_mode": "eager",
}  # fmt: skip
COLD = {"enable_prefix_caching": False, "max_num_batched_tokens": 512}
"""No prefixes, and a prompt in one chunk."""
OFF = {"disable_hybrid_kv_cache_manager": True}
BOUND = 3e-5
"""Scores are not divided by the root of the head's size, so errors of float32 weigh more than elsewhere."""


@pytest.fixture(scope="module", params=["gemma 4", "gemma 4 with experts"])
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder, (family, changes) = tmp_path_factory.mktemp("gemma4"), MODELS[request.param]
    return Checkpoint(folder, save_checkpoint((family, {**changes, "max_position_embeddings": 512}), folder))


@pytest.fixture(scope="module")
def together(own: Checkpoint) -> tuple[LLM, list[tuple[list[int], Tensor]]]:
    """Return an engine that reads in chunks, and its answers to prompts of two KV splits and of one."""
    llm = LLM(str(own.folder), **SETTINGS)
    return llm, run(llm, prompts())


def spec_of(own: Checkpoint) -> ModelSpec:
    return read_spec(read_config(own.folder))


def test_answers_are_those_of_transformers_however_they_are_computed(own: Checkpoint, together: Any) -> None:
    """In chunks, together, behind a cached prefix, cold in one chunk, and with one group for all layers."""
    llm, found = together
    for prompt, each in zip(prompts(), found, strict=True):
        assert len(prompt) > SPLIT or len(prompt) < 80
        assert error(each, prompt, own.reference) <= BOUND
    assert differing(run(llm, prompts()[::-1])[::-1], found) == 0
    assert llm.loop.scheduler.stats().prefix_hits > 0
    for more in (COLD, OFF | {"block_size": SPLIT, "num_gpu_blocks_override": 9, "max_num_batched_tokens": 300}):
        other = LLM(str(own.folder), **SETTINGS | more)
        assert (other.loop.scheduler.limits.groups == WHOLE) == (more is not COLD)
        assert differing([run(other, [prompt])[0] for prompt in prompts()], found) == 0


def test_200_tokens_are_those_of_transformers(own: Checkpoint, together: Any) -> None:
    llm, long = together[0], prompts()[1]
    (answer,) = llm.generate([long], GREEDY, use_tqdm=False)
    tokens = answer.outputs[0].token_ids
    right = own.reference(torch.tensor(long + tokens)).argmax(-1)[len(long) - 1 : -1].tolist()
    assert (len(tokens), tokens) == (200, right)


def test_a_block_has_the_room_of_one_kind_of_layer(own: Checkpoint, together: Any) -> None:
    """Layers that read another layer's keys take no room; blocks that left a window are given back."""
    llm, spec = together[0], spec_of(own)
    groups, cache = llm.loop.scheduler.limits.groups, llm.loop.executor.cache
    owners = [at for at, entry in enumerate(spec.entries) if entry]
    assert sorted(layer for group in groups for layer in group.layers) == owners
    assert len({each.kv.head_dim for each in spec.attentions}) == 2
    assert cache.data.shape[0] == 1 and cache.data[0].shape[1] < 16 * spec.kv_bytes_per_token(4) // 4
    for at, each in enumerate(spec.attentions):
        source = at if each.source is None else each.source
        assert cache.layers[at].data_ptr() == cache.layers[source].data_ptr()
    assert llm.loop.scheduler.pool.num_used == 0


def other_step(patch: pytest.MonkeyPatch) -> None:
    """Plant blocks that lie as closely as the layer's own entries."""
    right = attention.Heads
    patch.setattr(attention, "Heads", lambda *parts, **more: right(*parts, **more | {"apart": 0}))


def other_source(patch: pytest.MonkeyPatch) -> None:
    """Plant layers that read the keys of the first layer of their kind."""
    patch.setattr(gemma4, "max", min, raising=False)


def other_window(patch: pytest.MonkeyPatch) -> None:
    """Plant a window that is off by one."""
    right = layer_parts.AttentionLayer
    patch.setattr(layer_parts, "AttentionLayer",
                  lambda window, **more: right(window=window and window - 1, **more))  # fmt: skip


@pytest.mark.parametrize("plant", [other_step, other_source, other_window])
def test_faults_of_entries_and_windows_are_seen(
    plant: Any, own: Checkpoint, together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plant is other_source and all(each.source is None for each in spec_of(own).attentions):
        pytest.skip("no layer reads another layer's keys")
    plant(monkeypatch)
    assert differing(run(LLM(str(own.folder), **SETTINGS), prompts()), together[1]) > 0


def test_a_number_bent_by_tanh_has_the_same_bits_at_every_place() -> None:
    x = torch.randn(7, 333, generator=torch.Generator().manual_seed(1)) * 40
    found = capped(x, 30.0)
    assert torch.allclose(found.double(), 30 * (x.double() / 30).tanh(), rtol=1e-6, atol=1e-6)
    for at in (1, 2, 5, 331):
        assert torch.equal(capped(x[:, at:].contiguous(), 30.0), found[:, at:])


def test_devices_without_kernels_refuse_by_name(own: Checkpoint) -> None:
    what = "end: layers with a scalar or an input of their own are|mlp\\.experts: a router by softmax, .*"
    with pytest.raises(ModelError, match=rf"layers\.0\.({what}) not supported on hpu: "):
        check_supported(spec_of(own), "bfloat16", partial(supports, HPU))
    for facts in (CPU, CUDA):
        check_supported(spec_of(own), "bfloat16", partial(supports, facts))


def test_a_gpu_refuses_wide_heads_of_float32() -> None:
    wide = Cache(head_dim=512, dtype="float32", model="float32")
    assert "heads of 512 numbers in float32" in (lacking(HOPPER, wide) or "")
    assert lacking(HOPPER, replace(wide, dtype="bfloat16", model="bfloat16")) is None


def test_other_modes_refuse_by_name(own: Checkpoint) -> None:
    with pytest.raises(ModelError, match="use --execution-mode eager"):
        check_supported(spec_of(own), "float32", compiled.supports)
    with pytest.raises((SettingsError, ModelError), match=r"entries of several sizes and|no keys of layers on another"):
        LLM(str(own.folder), **SETTINGS | {"pipeline_parallel_size": 2})


CONFIG = SMALL | GEMMA4 | LAYER_INPUTS | {"architectures": ["Gemma4ForCausalLM"]}


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_kv_shared_layers": 5}, "num_kv_shared_layers 5 must leave one of the 5 layers"),
    ({"num_kv_shared_layers": 4}, "a kind that no layer before them has"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
    ({"vocab_size_per_layer_input": 8}, "has no row for some tokens"),
    ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
    ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
])  # fmt: skip
def test_configs_of_no_model_are_refused(changes: dict[str, Any], message: str) -> None:
    read_spec(CONFIG)
    with pytest.raises(ModelError, match=message):
        read_spec(CONFIG | changes)


def test_the_text_part_of_a_model_with_encoders(tmp_path: Path) -> None:
    """Its names have another beginning, and its encoders are not read."""
    import transformers

    tower = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64}  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=SMALL | GEMMA4 | LAYER_INPUTS, vision_config=tower, audio_config=None, image_token_id=198,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    prompt = [each % 198 for each in prompts()[1]]
    found = run(LLM(str(tmp_path), **SETTINGS | {"max_model_len": 256}), [prompt])[0]
    with torch.inference_mode():
        assert error(found, prompt, lambda tokens: model(tokens[None]).logits[0]) <= BOUND
