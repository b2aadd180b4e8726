"""A KV cache of eight bits: attention against float64, one answer on every path, and planted faults."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from preheat import LLM, SamplingParams
from preheat.errors import ModelError
from preheat.model.files import BUNDLED_PATH
from preheat.ops.float8 import round_to
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.prompts import Size, make_prompts
from preheat.verify.verification import Verification
from tests.cpu.planted import scales_of_the_first_forward, unrounded_prefill
from tests.cpu.test_attention import KV_HEADS, Pages

pytestmark = pytest.mark.usefixtures("two_layers")

SIZE = Size(prompts=4, runs=2, outputs=4, longest=60)
OPTIONS = {
    "kv_cache_dtype": "fp8", "max_num_seqs": 4, "max_num_batched_tokens": 200, "block_size": 32,
    "num_gpu_blocks_override": 160, "cache_dir": "off",
}  # fmt: skip
SCALES = 0.03, 1.7


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rounding_is_to_the_nearest_ties_to_even(dtype):
    """Rounding is to the nearest, ties to even, against all numbers of the dtype in float64."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    numbers = numbers[numbers.isfinite()].unique()
    ties = (numbers[1:] + numbers[:-1]) / 2
    scale = torch.tensor([0.25])
    x = torch.cat([numbers, ties, torch.randn(4000).double() * 3, torch.tensor([1e30, -1e30])]).float()
    found = round_to(x * scale, scale, dtype)
    distance = (x.double().clamp(-numbers[-1], numbers[-1])[:, None] - numbers).abs()
    assert torch.equal((found.double() - x.double().clamp(-numbers[-1], numbers[-1])).abs(), distance.amin(1))
    even = found[len(numbers) : len(numbers) + len(ties)].view(torch.uint8) % 2
    assert not even.any()
    assert round_to(torch.tensor([torch.nan]), scale, dtype).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_attention_is_close_to_float64_over_stored_values(dtype, stored):
    """Prompts, and decoding from gathered blocks or in place, are right and have the same bits."""
    for block_size, in_place in ((64, False), (256, True)):
        pages = EightBits(block_size, dtype, stored)
        outputs = pages.attend([(row, 0, n) for row, n in enumerate(pages.lengths)], 300)
        for row, out in enumerate(outputs):
            exact = pages.exact(row, 300)
            assert (out.double() - exact).norm() / exact.norm() < (1e-5 if dtype == torch.float32 else 1e-2)
        at = [(0, 0), (1, 63), (2, 599), (2, 256)]
        found, _ = pages.decode(at, 300, in_place=in_place)
        assert [torch.equal(out[0], outputs[row][place]) for (row, place), out in zip(at, found, strict=True)] == [
            True
        ] * 4


class EightBits(Pages):
    """Pages with a cache of eight bits, read without conversion.

    :meth:`exact` uses the stored values.
    """

    def __init__(self, block_size, dtype, stored):
        super().__init__([1, 64, 600], 32, block_size, dtype)
        self.cache = self.cache.to(stored).view(torch.uint8)
        for row, kv in enumerate(self.kv):
            rounded = round_to(kv, torch.tensor(SCALES).view(2, 1, 1), stored)
            self.kv[row] = rounded.double()
            self.store(row, rounded.view(torch.uint8))
        self.cache = self.cache.view(stored)


def verification(**options):
    def prompts(engine):
        return make_prompts(SIZE, engine.vocab_size, engine.ready.max_model_len)

    settings = Settings.load({**OPTIONS, "model": os.environ["PREHEAT_MODEL"], **options}, {})
    return Verification(boot_engine, settings, prompts, SIZE)


def test_every_path_has_one_answer():
    run = verification(dtype="float32", max_model_len=320)
    results = list(run.results())
    assert {result.share for result in results} == {"100.00 %"}
    assert "later runs" in (paths := {result.path for result in results}) and len(paths) == len(results) > 15
    assert not run.blocked_reason
    assert run.proof.digest
    assert run.proof.parts["numerics"]["kv_cache"]["dtype"] == "fp8_e4m3"


def test_the_other_dtype_passes_the_check_at_boot_too():
    run = verification(dtype="bfloat16", max_model_len=130, kv_cache_dtype="fp8_e5m2")
    assert next(run.results()).share == "100.00 %"
    assert not run.blocked_reason
    assert run.proof.parts["numerics"]["kv_cache"]["dtype"] == "fp8_e5m2"


def test_prompts_that_see_unrounded_keys_are_found(monkeypatch):
    """The check at boot and verify find prompts that attend to unrounded keys."""
    unrounded_prefill(monkeypatch)
    run = verification(max_model_len=320, execution_mode="eager")
    assert next(result for result in run.results() if result.first).identical < SIZE.prompts
    assert "decode: " in run.blocked_reason
    assert "fp8 cache: " in run.blocked_reason


def test_scales_of_the_first_forward_are_found(monkeypatch):
    """The check at boot finds scales of the first forward, since the process's first step had other scales.

    A constant error is not found.
    """
    scales_of_the_first_forward(monkeypatch)
    run = verification(max_model_len=130, execution_mode="eager")
    next(run.results())
    assert "the first step of the process gave other logits" in run.blocked_reason


def test_in_place_or_not_changes_no_bits():
    """In place and gathered give the same bits.

    Blocks have a whole KV split; decoding reads and widens them.
    """
    wide = {"block_size": 256, "num_gpu_blocks_override": 24}
    assert logits(**wide, contiguous_pa=True) == logits(**wide, contiguous_pa=False) == logits()
    assert logits(**wide, contiguous_pa=True) != logits(**wide, kv_cache_dtype="auto")


def logits(**options):
    """Return log-probabilities of some tokens after a prompt that shares a block with another one."""
    llm = LLM(**{**OPTIONS, "boot_check": "off", "skip_warmup": True, "on_cold": "off", **options})
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1, ignore_eos=True)
    tokens = [(7 * place) % 4000 + 8 for place in range(300)]
    return [result.outputs[0].logprobs for result in llm.generate([tokens, [*tokens, 9]], params, use_tqdm=False)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Write the bundled model with scales of its KV cache."""
    folder = tmp_path_factory.mktemp("scaled")
    for path in BUNDLED_PATH.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(BUNDLED_PATH / "model.safetensors")
    for layer in range(7):
        for kind, scale in zip("kv", SCALES, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{kind}_proj.output_scale"] = torch.tensor([scale])
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_checkpoints_scales_are_used_and_part_of_the_digest(checkpoint):
    plain, scaled = (logits(model=model) for model in ("bundled", str(checkpoint)))
    assert plain != scaled
    assert logits(model=str(checkpoint), kv_cache_dtype="auto") == logits(kv_cache_dtype="auto")
    llm = LLM(str(checkpoint), **{**OPTIONS, "boot_check": "off", "skip_warmup": True, "on_cold": "off"})
    assert {layer.kv.scales for layer in llm.loop.executor.decoder.spec.layers} == {
        tuple(torch.tensor(SCALES).tolist())
    }


def test_a_scale_of_several_numbers_is_named(checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.3.self_attn.k_proj.output_scale"
    tensors[name] = torch.ones(KV_HEADS, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.3\.self_attn\.k_proj\.output_scale has shape \[2, 1\]"):
        LLM(str(tmp_path), **OPTIONS)
