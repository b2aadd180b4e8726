"""Codes in compiled functions: the bits of the contract on every processor, and checkpoints beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.errors import ModelError
from preheat.model.quantization import ONLINE
from preheat.ops.fp4 import codes_of
from preheat.ops.kinds import Scheme
from preheat.ops.quantization import QuantizedWeight, dequantize, empty_weight, quantize_weight
from preheat.ops.values import Finish, Matmul, WeightFormat
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.machine_code import undefined
from tests.cpu.quantized import Kind, awq, compressed, fp4, gptq, quantize_checkpoint, scheme, symmetric
from tests.cpu.test_family_engines import differing, error, prompts, run
from tests.cpu.test_gguf_engine import OPTIONS as GGUF
from tests.cpu.test_gguf_engine import PROMPTS, write

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from llvmlite import ir

from preheat.backends.base.layers import LayerWeights
from preheat.backends.cpu.llvm import codes, functions, job, machine, targets
from preheat.backends.cpu.llvm.kinds import COUNTERS, Product, Scales
from preheat.backends.cpu.llvm.layer import PanelLayer, product_of, supports
from preheat.backends.cpu.llvm.targets import TARGETS
from tests.cpu.test_llvm import LLVM, SIZES, Alone
from tests.cpu.test_llvm_targets import GIVEN, HERE

OUTPUTS, INPUTS = 64, 256


def grouped(code: str, group: int, **more: bool) -> Scheme:
    return Scheme(code=code, scales="group" if group else "channel", group=group, **more)


FORMATS: dict[str, tuple[Scheme, torch.dtype]] = {
    "int8 per output": (grouped("int8", 0), torch.float32),
    "int8 in groups of 32, as Q8_0": (grouped("int8", 32), torch.float16),
    "int8 in groups of 64, zero points": (grouped("int8", 64, zeros=True), torch.float16),
    "int8 by a list": (grouped("int8", 32, zeros=True, indexed=True), torch.float16),
    "int4 per output": (grouped("int4", 0), torch.float32),
    "int4 in groups of 32, as Q4_0": (grouped("int4", 32), torch.float16),
    "int4 in groups of 64, zero points": (grouped("int4", 64, zeros=True), torch.float32),
    "int4 in groups of 128": (grouped("int4", 128), torch.bfloat16),
    "int4 in groups of 128, zero points": (grouped("int4", 128, zeros=True), torch.float16),
    "fp4 in blocks of 16": (grouped("fp4", 16), torch.float32),
    "int4 by a list": (grouped("int4", 32, zeros=True, indexed=True), torch.float16),
}


def weight_of(name: str, outputs: int = OUTPUTS) -> QuantizedWeight:
    """Return random codes, with every code and zero point of the format."""
    kind, dtype = FORMATS[name]
    half, out = 1 << kind.bits - 1, empty_weight(kind, outputs, INPUTS, dtype=torch.float32, device="cpu")
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    numbers = torch.randint(-half, half, out.shape, generator=draw)
    out.codes.copy_(codes_of(numbers + half) if kind.code == "fp4" else numbers)
    out.scales.copy_((torch.rand(out.scales.shape, generator=draw) * 0.01 + 0.001).to(dtype))
    if out.zeros is not None:
        out.zeros.copy_(torch.randint(-half, half + 1, out.zeros.shape, generator=draw))
    if out.index is not None:
        out.index.copy_((torch.arange(INPUTS) // kind.group)[torch.randperm(INPUTS, generator=draw)])
    return out


def rows_of(count: int) -> Tensor:
    return torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(count))


def how_of(weight: QuantizedWeight, **more: Any) -> Product:
    outputs, inputs = weight.shape
    value = Matmul(outputs=outputs, inputs=inputs, weight=WeightFormat("float32", weight.scheme))
    return product_of(value, weight)._replace(**more)


def compiled(how: Product, target: targets.Target) -> bytes:
    module = ir.Module("codes")
    module.triple = target.triple
    functions.alone(module, "alone", how)
    job.jobs(module, COUNTERS)
    return machine.compile_code(str(module), None, target)[0]


def function_of(
    how: Product, weight: Tensor | QuantizedWeight, threads: int = 1, target: targets.Target | None = None
) -> Alone:
    return Alone(machine.Code(compiled(how, target or targets.here())), how, weight, threads)


def product(weight: QuantizedWeight, x: Tensor, **more: Any) -> Tensor:
    return function_of(how_of(weight), weight, **more)(x)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c of float32, rounded once: by way of float64, rounded to odd."""
    exact, more = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = exact + more
    mine = total - exact
    rest = (exact - (total - mine)) + (more - mine)
    even = total.view(np.int64) & 1 == 0
    beside = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
    return np.where((rest != 0) & even, beside, total).astype(np.float32)


def by_contract(weight: QuantizedWeight, x: Tensor) -> Tensor:
    """Return the product in numpy, one operation after another."""
    inputs, groups = weight.shape[1], weight.scales.shape[1]
    size = inputs // groups
    index = np.arange(inputs) // size if weight.index is None else weight.index.numpy()
    whole = weight.codes.numpy().astype(np.float32)
    if weight.zeros is not None:
        whole = whole - weight.zeros.numpy().astype(np.float32)[:, index]
    rows, scales = x.numpy()[:, :, None], weight.scales.numpy()
    total = np.zeros((len(x), weight.shape[0]), np.float32)
    if weight.index is not None:
        for k in range(inputs):
            total = fma(whole[:, k] * scales[:, index[k]], rows[:, k], total)
        return torch.from_numpy(total)
    for group in range(groups):
        part = np.zeros_like(total)
        for k in range(group * size, (group + 1) * size):
            part = fma(whole[:, k], rows[:, k], part)
        total = fma(part, scales[:, group], total)
    return torch.from_numpy(total)


def in_float64(weight: QuantizedWeight, x: Tensor) -> Tensor:
    index = torch.arange(INPUTS) // (weight.scheme.group or INPUTS) if weight.index is None else weight.index.long()
    whole = weight.codes.double()
    if weight.zeros is not None:
        whole -= weight.zeros.double()[:, index]
    return x.double() @ (whole * weight.scales.double()[:, index]).T


def test_the_emulated_multiply_add_rounds_once():
    """Rounding twice would give another number here."""
    a, b, c = (np.array([each], np.float32) for each in (1 + 2**-12, 1 + 2**-12, 2**-60))
    assert fma(a, b, c)[0] == np.float32(1 + 2**-11 + 2**-23)
    assert np.float32(np.float64(a[0]) * np.float64(b[0]) + np.float64(c[0])) == np.float32(1 + 2**-11)


@pytest.mark.parametrize("name", FORMATS)
def test_products_have_the_bits_of_the_contract_for_any_rows(name):
    weight = weight_of(name)
    alone = function_of(how_of(weight), weight)
    for count in range(1, 7):
        x = rows_of(count)
        found, exact = alone(x), in_float64(weight, x)
        assert torch.equal(found, by_contract(weight, x))
        assert float((found - exact).abs().max() / exact.abs().max()) < 2e-6
    assert torch.equal(product(weight, x, threads=3), found)


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("name", FORMATS)
def test_other_processors_have_the_same_bits(name, target):
    weight, x = weight_of(name), rows_of(6)
    assert torch.equal(product(weight, x, target=TARGETS[target]), by_contract(weight, x))


@pytest.mark.parametrize("target", TARGETS)
def test_code_for_every_processor_needs_no_library(target):
    """Beside the C library's multiply-add where the processor has none.

    A Mac has the code of "neon" in files of its own, so a few formats are enough.
    """
    given = GIVEN | (set() if TARGETS[target].fused else {"fmaf"})
    kinds = [how_of(weight_of(name)) for name in list(FORMATS)[:: 4 if target == "macos" else 1]]
    for how in (*kinds, Product(INPUTS, OUTPUTS, "float16")):
        assert undefined(compiled(how, TARGETS[target])) <= given


@pytest.mark.parametrize(
    "name", ["int8 in groups of 32, as Q8_0", "int4 in groups of 64, zero points", "int4 by a list"]
)
def test_gates_lie_beside_their_ups(name):
    weight, x = weight_of(name, 128), rows_of(5)
    found = function_of(how_of(weight, activation="silu_and_mul"), weight)(x)
    gates, ups = in_float64(weight, x).chunk(2, dim=-1)
    exact = gates * torch.sigmoid(gates) * ups
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["int8 per output", "int4 in groups of 128, zero points"])
def test_outputs_fill_their_last_panel(name):
    weight, x = weight_of(name, 40), rows_of(3)
    assert torch.equal(product(weight, x), by_contract(weight, x))


@pytest.mark.parametrize("target", HERE)
def test_float16_is_widened_exactly_whatever_the_number(target):
    """Every finite number counts. A processor without F16C calls a function of ours."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = numbers[numbers.isfinite()].view(-1, 32, 64)
    how = Product(64, 32, "float16")
    code = machine.Code(compiled(how, TARGETS[target]))
    for weight in numbers:
        assert torch.equal(Alone(code, how, weight)(torch.eye(64)).T, weight.float())


# --- what is planted is seen ---


@pytest.mark.parametrize("name", ["int8 in groups of 32, as Q8_0", "int4 in groups of 64, zero points"])
def test_a_scale_of_another_group_is_seen(name, monkeypatch):
    right = codes.Codes.read_scales
    monkeypatch.setattr(codes.Codes, "read_scales", lambda self, group: right(self, self.e.i(0)))
    weight, x = weight_of(name), rows_of(3)
    assert not torch.equal(product(weight, x), by_contract(weight, x))


@pytest.mark.parametrize("name", ["int8 per output", "int4 in groups of 128"])
def test_a_scale_before_the_sum_is_seen(name, monkeypatch):
    """A weight times its scale is rounded: another number, within the error of float32."""

    def scaled_first(e, read, x, totals):
        size = read.scales.group
        with e.loop(0, read.how.inputs // size) as group:
            scales = read.read_scales(group)
            with e.loop(0, size, codes.AT_ONCE) as k:
                for place, each in enumerate(read.read(group, k, read.read_zeros(group))):
                    weights = [e.b.fmul(*pair) for pair in zip(each, scales, strict=True)]
                    codes._add(e, weights, x, e.add(e.mul(group, size), k, place), totals)

    monkeypatch.setattr(codes, "_add_groups", scaled_first)
    weight, x = weight_of(name), rows_of(3)
    found = product(weight, x)
    assert torch.allclose(found.double(), in_float64(weight, x), atol=1e-4)
    assert not torch.equal(found, by_contract(weight, x))


def test_a_zero_point_of_another_sign_is_seen(monkeypatch):
    right = codes.Codes.read_zeros
    monkeypatch.setattr(codes.Codes, "read_zeros", lambda self, group: [self.e.b.fneg(z) for z in right(self, group)])
    weight, x = weight_of("int4 in groups of 64, zero points"), rows_of(3)
    assert not torch.equal(product(weight, x), by_contract(weight, x))


# --- layers ---


def layer_of(weight: QuantizedWeight, **more: Any) -> PanelLayer:
    outputs, inputs = weight.shape
    value = Matmul(outputs=outputs, inputs=inputs, weight=WeightFormat("bfloat16", weight.scheme), **more)
    return PanelLayer(value, LayerWeights(weight, torch.zeros(outputs) if more else None))


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_holds_codes_and_no_more_bytes_than_planned(name):
    weight = weight_of(name)
    size = sum(each.numel() * each.element_size() for each in layer_of(weight).weights())
    least = OUTPUTS * INPUTS * weight.scheme.bits // 8
    assert least < size <= weight.scheme.bytes(OUTPUTS, INPUTS)


def test_a_bias_follows_the_scaled_sum():
    assert len(list(layer_of(weight_of("int8 per output"), finish=Finish(bias=True)).weights())) == 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Scheme(code="fp8", scales="channel"), "weights in float8"),
        (Scheme(code="fp8", scales="channel", activations="token"), "round their inputs"),
        (Scheme(code="int4", scales="group", group=20), "groups of 20 of 256 inputs"),
    ],
)
def test_schemes_without_a_function_are_refused(kind, reason):
    value = Matmul(
        outputs=OUTPUTS, inputs=INPUTS, weight=WeightFormat("bfloat16", kind), input=kind.activations or "plain"
    )
    assert reason in supports(value).reason


# --- engines ---

CHECKPOINTS: dict[str, Kind] = {
    "compressed-tensors, nvfp4": fp4("nvfp4-pack-quantized"),
    "awq": awq(),
    "gptq": gptq(),
    "gptq with desc_act": gptq(desc_act=True),
    "gptq of 8 bits": gptq(8, version=2),
    "gptq, symmetric, a scale for each output": symmetric(4, 7, group_size=-1),
    "compressed-tensors, int8 per output": compressed("pack-quantized", scheme(8, "int", "channel")),
    "compressed-tensors, int4 with zero points": compressed(
        "pack-quantized", scheme(4, "int", "group", group_size=32, symmetric=False)
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_are_close_to_transformers_and_invariant(name, tmp_path):
    reference, some = save_checkpoint(("Llama", SIZES), tmp_path), prompts()
    quantize_checkpoint(tmp_path, CHECKPOINTS[name], tmp_path / "quantized")
    reference = reference_of(tmp_path)
    llm = LLM(str(tmp_path / "quantized"), **LLVM)
    together = run(llm, some)
    for prompt, found in zip(some, together, strict=True):
        assert error(found, prompt, reference) <= 1e-5
    assert differing([run(llm, [prompt])[0] for prompt in some], together) == 0


def reference_of(folder: Path):
    """Return the logits of transformers for the plain checkpoint in ``folder``."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)

    def logits(tokens: Tensor) -> Tensor:
        with torch.inference_mode():
            found: Tensor = model.eval()(tokens[None]).logits[0]
        return found

    return logits


def test_a_checkpoint_in_float16_keeps_its_weights(tmp_path):
    """The bound is the rounding of the cache in bfloat16."""
    save_checkpoint(("Llama", SIZES), tmp_path)
    tensors = {name: each.half().contiguous() for name, each in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    reference, some = reference_of(tmp_path), prompts()
    llm = LLM(str(tmp_path), **LLVM | {"dtype": "auto"})
    together = run(llm, some)
    for prompt, found in zip(some, together, strict=True):
        assert error(found, prompt, reference) <= 1e-2
    assert differing([run(llm, [prompt])[0] for prompt in some], together) == 0
    layer = llm.loop.executor.decoder.weights.layers[0]
    assert layer.attention.o.panels.dtype == torch.float16


@pytest.mark.parametrize(("kind", "stored"), [("Q8_0", "int8"), ("Q4_0", "int4")])
def test_a_gguf_file_keeps_its_codes(kind, stored, tmp_path, monkeypatch):
    """Its greedy answers are those of dequantized weights."""
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "cache"))
    file = write(tmp_path, kind)
    llm = LLM(file, **GGUF | {"execution_mode": "llvm"})
    layer = llm.loop.executor.decoder.weights.layers[0]
    assert layer.attention.qkv.how.stored == layer.mlp.down.how.stored == stored
    head = llm.loop.executor.decoder.weights.head
    assert layer.attention.qkv.how.scales == head.how.scales == Scales(32, "float16")
    assert head.how.stored == stored
    params = SamplingParams(temperature=0, max_tokens=24)
    eager = LLM(file, **GGUF | {"execution_mode": "eager"})
    found, expected = (each.generate(PROMPTS, params, use_tqdm=False) for each in (llm, eager))
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize(("mode", "tied"), [("eager", False), ("llvm", True)])
def test_codes_made_while_loading_are_those_of_the_rule(method, mode, tied, tmp_path):
    """The head has codes of 8 bits by both methods, beside the table of embeddings where it is the table."""
    save_checkpoint(("Llama", SIZES | {"tie_word_embeddings": tied}), tmp_path)

    def module(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {"weight": weight}, rounded(weight.numpy(), method)

    quantize_checkpoint(tmp_path, Kind({}, module), tmp_path / "plain", config={"use_cache": True})
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    tensors["lm_head.weight"] = rounded(head.float().numpy(), "int8")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    reference, some = reference_of(tmp_path), prompts()
    llm = LLM(str(tmp_path / "plain"), **LLVM | {"execution_mode": mode, "quantization": method})
    for prompt, found in zip(some, run(llm, some), strict=True):
        assert error(found, prompt, reference) <= 1e-5
    if mode == "llvm":
        assert llm.loop.executor.decoder.weights.head.how.stored == "int8"


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("mixtral", {}), ("qwen2 moe", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96})],
)
def test_experts_are_those_of_dequantized_weights(name, sizes, method, tmp_path):
    family, changes = MODELS[name]
    save_checkpoint((family, changes | sizes), tmp_path)
    some, options = prompts(), LLVM | {"quantization": method}
    eager, llvm = (LLM(str(tmp_path), **options | {"execution_mode": mode}) for mode in ("eager", "llvm"))
    expected, found = run(eager, some), run(llvm, some)
    for (tokens, logprobs), (others, theirs) in zip(found, expected, strict=True):
        assert tokens == others
        assert float((logprobs - theirs).abs().max()) < 2e-5
    assert differing([run(llvm, [prompt])[0] for prompt in some], found) == 0
    assert all(each.dtype == torch.uint8 for each in llvm.loop.executor.decoder.weights.layers[0].mlp.experts.weights())


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_an_update_replaces_codes_and_scales(method, tmp_path):
    folders = [tmp_path / "old", tmp_path / "new"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        save_checkpoint(("Llama", SIZES), folder, seed=seed)
    old, new = (LLM(str(folder), **LLVM | {"quantization": method}) for folder in folders)
    before, after = (run(llm, prompts()) for llm in (old, new))
    assert differing(before, after) > 0
    old.update_weights(str(folders[1]))
    assert differing(run(old, prompts()), after) == 0


def rounded(weight: np.ndarray, method: str) -> Tensor:
    """Return the numbers that the codes of ``weight`` stand for, by the rule, in numpy."""
    size = weight.shape[1] if method == "int8" else 128 if weight.shape[1] % 128 == 0 else 32
    found = np.empty_like(weight)
    for row, out in zip(weight, found, strict=True):
        for start in range(0, len(row), size):
            group = row[start : start + size]
            most = group[np.abs(group).argmax()]
            scale = np.abs(most) / np.float32(127) if method == "int8" else most / np.float32(-8)
            if method == "int4":
                scale = torch.tensor(scale).half().float().numpy()
            low, high = (-127, 127) if method == "int8" else (-8, 7)
            out[start : start + size] = np.clip(np.rint(group / scale), low, high) * scale
    return torch.from_numpy(found)


def test_int4_takes_groups_that_divide_the_inputs():
    assert [ONLINE["int4"].fitted(inputs).scheme.group for inputs in (256, 160, 100)] == [128, 32, 128]
    assert ONLINE["int8"].fitted(100).scheme == Scheme(code="int8", scales="channel")


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_rows_of_zeros_stay_zeros(method):
    out = empty_weight(ONLINE[method].scheme, 2, 128, dtype=torch.float32, device="cpu")
    quantize_weight(torch.zeros(2, 128), out)
    assert torch.equal(dequantize(out), torch.zeros(2, 128))


def test_inputs_without_whole_groups_are_refused(tmp_path):
    save_checkpoint(("Llama", SIZES | {"intermediate_size": 176}), tmp_path)
    with pytest.raises(ModelError, match="176 inputs are not a multiple of the group size"):
        LLM(str(tmp_path), **LLVM | {"quantization": "int4"})
