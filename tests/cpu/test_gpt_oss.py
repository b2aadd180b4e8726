"""gpt-oss through the whole engine, against transformers: sinks, windows, experts with biases, plain and of MXFP4."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.common.arithmetic import EAGER_STEPS, touched_by_step
from benchmarks.common.decoding import DecodingRows
from preheat import LLM
from preheat.backends.base.collective import Collective
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.decode_attention import DecodeAttention
from preheat.backends.cpu.paged_attention import PagedAttention
from preheat.backends.cpu.tiles import SPLIT
from preheat.errors import ModelError, SettingsError
from preheat.model.decoder import Decoder
from preheat.model.families import deal_experts, read_spec
from preheat.model.files import read_config
from preheat.model.loader import load_weights
from preheat.model.shard import shard
from preheat.model.tensor_specs import VectorSpec
from preheat.model.weight_loader import WeightLoader
from tests.controls import fails
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.test_family_engines import OPTIONS, VOCAB, differing, error, run
from tests.cpu.test_model_families import logits_of
from tests.cpu.test_tensor_parallel import on_ranks

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from preheat.backends.cpu.llvm import attend

LENGTH, EXPERTS = SPLIT + 40, 6
MODES = pytest.mark.parametrize("mode", ["eager", "llvm"])
KINDS = pytest.mark.parametrize("kind", ["plain", "mxfp4"])
SETTINGS: dict[str, Any] = OPTIONS | {
    "max_model_len": 384, "num_gpu_blocks_override": 60, "skip_warmup": True, "boot_check": "off", "num_threads": 1,
}  # fmt: skip


@dataclass
class Checkpoint:
    folder: Path
    reference: Callable[[Tensor], Tensor]


def prompts() -> list[list[int]]:
    """Return a prompt of two KV splits, and one that shares its beginning."""
    chance = random.Random(3)
    first = [chance.randrange(VOCAB) for _ in range(LENGTH)]
    return [first, first[:64] + first[:9]]


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round ``weight`` [experts, inputs, outputs] to MXFP4, written without our code: blocks and scales."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = groups / torch.exp2(exponents)[..., None]
    number = (scaled.abs()[..., None] - sizes).abs().argmin(-1) | (scaled < 0).long() << 3
    return (number[..., ::2] | number[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def with_packed_experts(plain: Path, folder: Path) -> None:
    """Write the checkpoint in ``plain`` with experts of MXFP4; ``plain`` gets the numbers that transformers reads."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(plain / "model.safetensors")
    stored, meant = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = packed(stored.pop(name))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales.clone(), dtype=torch.float32).contiguous()
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    import transformers

    folder, (family, changes) = tmp_path_factory.mktemp("gpt-oss"), MODELS["gpt-oss"]
    changes = {**changes, "max_position_embeddings": 512, "num_hidden_layers": 2, "num_local_experts": EXPERTS}
    found = {"plain": Checkpoint(folder / "plain", save_checkpoint((family, changes), folder / "plain"))}
    save_checkpoint((family, changes), folder / "meant")
    with_packed_experts(folder / "meant", folder / "mxfp4")
    model = transformers.GptOssForCausalLM.from_pretrained(
        folder / "meant", attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )

    @torch.inference_mode()
    def logits(tokens: Tensor) -> Tensor:
        return model.eval()(tokens[None]).logits[0]

    return found | {"mxfp4": Checkpoint(folder / "mxfp4", logits)}


@MODES
@KINDS
def test_logits_are_those_of_transformers_however_they_are_computed(
    kind: str, mode: str, checkpoints: dict[str, Checkpoint]
) -> None:
    """In chunks, together, behind a cached prefix, and cold in one chunk."""
    own, options = checkpoints[kind], SETTINGS | {"execution_mode": mode}
    llm = LLM(str(own.folder), **options)
    together = run(llm, prompts())
    for prompt, found in zip(prompts(), together, strict=True):
        assert error(found, prompt, own.reference) <= 1e-5
    assert differing(run(llm, prompts()[::-1])[::-1], together) == 0
    assert llm.loop.scheduler.stats().prefix_hits > 0
    touched = touched_by_step(llm, DecodingRows(llm, VOCAB, 2, 20, EAGER_STEPS, temperature=0.0))
    top_k = MODELS["gpt-oss"][1]["num_experts_per_tok"]
    assert touched is None if mode == "llvm" else touched is not None and top_k <= touched <= EXPERTS
    cold = LLM(str(own.folder), **options | {"enable_prefix_caching": False, "max_num_batched_tokens": 384})
    assert differing([run(cold, [prompt])[0] for prompt in prompts()], together) == 0


def sinks_of_splits(patch: pytest.MonkeyPatch) -> None:
    """Plant a sink in each split's sum, instead of once behind the last split."""
    for kind in (PagedAttention, DecodeAttention):
        right = kind._merge

        def merge(self: Any, part: Tensor, lse: Tensor, sinks: Tensor | None, right: Any = right) -> Tensor:
            assert sinks is not None
            width = lse.numel() // len(sinks) if lse.dim() == 1 else 0
            own = sinks.repeat(width) if width else sinks.view(1, self.kv_heads, -1).expand(len(lse), -1, -1)
            if not width:
                own = own.repeat_interleave(self.width, 2)
                own = torch.nn.functional.pad(own, (0, lse.shape[2] - own.shape[2]))
            joined = torch.logaddexp(lse, own)
            return right(self, part * torch.exp(lse - joined).view(*part.shape[:-1] or (-1,), 1), joined, None)

        patch.setattr(kind, "_merge", merge)
    weights = attend.Attend._weights

    def with_sink(self: Any, *given: Any) -> Any:
        self.number = getattr(self, "number", -1) + 1
        e, sink = self.e, self.sinks[self.number % len(self.sinks)]
        return e.b.fadd(weights(self, *given), self._exp(e.b.fsub(sink, given[1])))

    patch.setattr(attend.Attend, "_weights", with_sink)
    patch.setattr(attend.Attend, "_whole", lambda self, number, top, mass: (self.e.splat(self.e.get(mass)), None))


@MODES
def test_sinks_of_each_split_are_seen(
    mode: str, checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: in one split the result is as good as right, behind two it is not."""
    own, (long, short) = checkpoints["plain"], prompts()
    sinks_of_splits(monkeypatch)
    llm = LLM(str(own.folder), **SETTINGS | {"execution_mode": mode, "enable_prefix_caching": False})
    assert error(run(llm, [short])[0], short, own.reference) <= 1e-5
    with fails():
        assert error(run(llm, [long])[0], long, own.reference) <= 1e-5


@KINDS
def test_two_ranks_have_whole_experts_and_the_bits_of_one(kind: str, checkpoints: dict[str, Checkpoint]) -> None:
    """Each rank has the sinks of its heads, and half of the experts with their biases."""
    own, options = checkpoints[kind], SETTINGS | {"execution_mode": "eager", "enable_expert_parallel": True}
    found = [
        run(LLM(str(own.folder), **options | ranks), prompts())
        for ranks in ({"tp_invariant": True}, {"tensor_parallel_size": 2})
    ]
    assert differing(*found) == 0
    for prompt, each in zip(prompts(), found[1], strict=True):
        assert error(each, prompt, own.reference) <= 1e-5


def test_sinks_of_another_rank_are_seen(
    checkpoints: dict[str, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the second rank has the sinks of the first rank's heads."""
    model = checkpoints["plain"].folder
    spec = deal_experts(read_spec(read_config(model)))

    def logits(ranks: Collective) -> Tensor:
        weights = load_weights(spec, model, torch.float32, CpuBackend(), collective=ranks)
        mine = shard(spec, ranks.rank, ranks.world)
        return logits_of(Decoder(mine, weights, 256), torch.arange(VOCAB)[:40])

    def of_first_heads(self: WeightLoader, spec: VectorSpec) -> Tensor:
        assert spec.kept is not None
        first, last = spec.kept
        return self.tensor(f"{spec.name}.weight", *spec.shape)[: last - first]

    one, right = (on_ranks(world, tmp_path / str(world), logits)[0] for world in (1, 2))
    assert torch.equal(one, right)
    monkeypatch.setattr(WeightLoader, "sinks", of_first_heads)
    assert not torch.equal(right, on_ranks(2, tmp_path / "wrong", logits)[0])


@pytest.mark.parametrize(("options", "message"), [
    ({"tensor_parallel_size": 2}, "experts with biases yet: add --enable-expert-parallel"),
    ({"quantization": "int4"}, "stacked experts are plain or of MXFP4"),
])  # fmt: skip
def test_missing_features_are_refused(
    options: dict[str, Any], message: str, checkpoints: dict[str, Checkpoint]
) -> None:
    with pytest.raises((ModelError, SettingsError), match=message):
        LLM(str(checkpoints["plain"].folder), **SETTINGS | {"execution_mode": "eager"} | options)
