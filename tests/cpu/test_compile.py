"""Execution mode compile: the bits of eager, one program for all layers, kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.compile import Regional, check_compiler, region_builder
from preheat.errors import SettingsError
from preheat.model.decoder import Decoder, after_attention, project
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.loader import load_weights
from preheat.ops.activation import ACTIVATIONS, silu_and_mul
from preheat.ops.opaque import register_operations
from preheat.utils.dynamo import compilations, compile_seconds
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.test_model_families import logits_of, open_decoder, random_tokens
from tests.cpu.test_model_paged import WAYS, Steps


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a cache on disk that no other test has filled."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("inductor")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compiled(eager: Decoder) -> Decoder:
    return Decoder(eager.spec, eager.weights, 256, region_builder("compile", None))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", torch.bfloat16),
        ("llama with biases", torch.float32),
        ("gemma 3", torch.float32),
        ("mpt with six heads", torch.bfloat16),
        ("qwen2 moe", torch.float32),
    ],
)
def test_prefill_and_decode_have_the_bits_of_eager(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_checkpoint(MODELS[name], tmp_path)
    eager = open_decoder(tmp_path, dtype)
    other = compiled(eager)
    for way in ("at once", "decode"):
        assert all(map(torch.equal, Steps(other).run(WAYS[way]), Steps(eager).run(WAYS[way])))


def test_the_comparison_of_bits_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: an activation that computes something else in compiled code gives other bits."""
    save_checkpoint(MODELS["llama"], tmp_path)
    other = lambda x: silu_and_mul(x) * (1 + 2**-7 * torch.compiler.is_compiling())  # noqa: E731
    monkeypatch.setitem(ACTIVATIONS, "silu_and_mul", other)  # type: ignore[arg-type]
    eager = open_decoder(tmp_path)
    at_once = WAYS["at once"]  # one shape: a program with arithmetic of its own takes seconds to compile
    assert not all(map(torch.equal, Steps(compiled(eager)).run(at_once), Steps(eager).run(at_once)))


def operations(region: Callable[..., Any], *args: Any) -> list[str]:
    """Return the operations of ``region`` that a compiler sees."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    register_operations()
    with torch.inference_mode():
        torch.compile(region, backend=aot_autograd(fw_compiler=look), fullgraph=True, dynamic=False)(*args)
    return seen


MOVES = ("aten.view", "aten.slice", "aten.reshape", "aten.as_strided", "aten.copy_", "<built-in function getitem>")


def arithmetic(seen: list[str]) -> list[str]:
    """Return the operations that are neither ours nor a mere change of view."""
    ours = ("preheat.", "auto_functionalized")
    return [name for name in seen if not name.startswith(MOVES + ours)]


@pytest.mark.parametrize("name", ["gemma 3", "mpt with six heads", "gpt bigcode", "qwen2 moe"])
def test_inductor_sees_no_arithmetic_of_other_families(name: str, tmp_path: Path) -> None:
    save_checkpoint(MODELS[name], tmp_path)
    decoder = open_decoder(tmp_path)
    layer, attention = decoder.weights.layers[0], decoder.spec.layers[0].attention
    x, residual = torch.ones(2, 4, decoder.spec.hidden_size).unbind()
    assert arithmetic(operations(project, x, layer, attention.head_dim)) == []
    attended = torch.ones(4, attention.num_heads * attention.head_dim)
    assert arithmetic(operations(after_attention, attended, residual, layer, layer.input_norm)) == []


@pytest.mark.parametrize("name", ["llama", "qwen3 moe"])
def test_inductor_sees_no_arithmetic_of_quantized_layers(name: str, tmp_path: Path) -> None:
    save_checkpoint(MODELS[name], tmp_path)
    spec = read_spec(read_config(tmp_path), "fp8")
    layer = load_weights(spec, tmp_path, torch.float32, CpuBackend()).layers[0]
    attention = spec.layers[0].attention
    x, residual = torch.ones(2, 4, spec.hidden_size).unbind()
    assert arithmetic(operations(project, x, layer, attention.head_dim)) == []
    attended = torch.ones(4, attention.num_heads * attention.head_dim)
    assert arithmetic(operations(after_attention, attended, residual, layer, layer.input_norm)) == []


def test_inductor_sees_no_arithmetic_of_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(MODELS["qwen3"], tmp_path)
    decoder = open_decoder(tmp_path)
    layer, spec = decoder.weights.layers[0], decoder.spec
    attention = spec.layers[0].attention
    x, residual = torch.ones(2, 4, spec.hidden_size).unbind()
    before = operations(project, x, layer, attention.head_dim)
    attended = torch.ones(4, attention.num_heads * attention.head_dim)
    after = operations(after_attention, attended, residual, layer, layer.input_norm)
    assert before and arithmetic(before) == []
    assert after and arithmetic(after) == []
    monkeypatch.setitem(ACTIVATIONS, "silu_and_mul", silu_and_mul.__wrapped__)  # type: ignore
    torch._dynamo.reset()
    other = open_decoder(tmp_path).weights.layers[0]  # a layer looks its activation up when it is made
    assert arithmetic(operations(after_attention, attended, residual, other, other.input_norm)) != []


def test_layers_share_a_program_for_each_number_of_tokens(tmp_path: Path) -> None:
    save_checkpoint(MODELS["llama"], tmp_path)
    decoder = compiled(open_decoder(tmp_path))
    assert decoder.spec.num_layers > 2
    for count in (5, 9):
        before, seconds = compilations(), compile_seconds()
        logits_of(decoder, random_tokens(count))
        assert compilations() == before + 2  # before attention and after it
        assert compile_seconds() > seconds
    before, seconds = compilations(), compile_seconds()
    for count in (9, 5):
        logits_of(decoder, random_tokens(count))
    assert (compilations(), compile_seconds()) == (before, seconds)


def test_memory_layout_makes_no_second_program() -> None:
    """A gap between rows makes no second program.

    Attention's kernel may leave such gaps in its result.
    """
    before, wide = compilations(), torch.ones(4, 128)
    run = Regional(silu_and_mul)
    with torch.inference_mode():
        assert torch.equal(run(wide[:, :64]), run(wide[:, :64].contiguous()))
    assert compilations() == before + 1


def test_shapes_may_be_more_than_dynamo_keeps_for_a_function() -> None:
    count = torch._dynamo.config.recompile_limit + 2
    double = Regional(lambda x: x.view(-1))
    before = compilations()
    with torch.inference_mode():
        for _ in range(2):
            for rows in range(2, 2 + count):
                assert len(double(torch.ones(rows, 3))) == rows * 3
    assert compilations() == before + count


def test_the_cache_on_disk_is_used(tmp_path: Path, cache: Path) -> None:
    from torch._dynamo.utils import counters

    save_checkpoint(MODELS["llama"], tmp_path)
    eager, tokens = open_decoder(tmp_path), random_tokens(13)
    logits_of(compiled(eager), tokens)
    before = counters["inductor"]["fxgraph_cache_hit"]
    logits_of(compiled(eager), tokens)
    assert counters["inductor"]["fxgraph_cache_hit"] == before + 2
    assert any(cache.rglob("*"))


def test_compile_mode_without_a_compiler_is_refused() -> None:
    check_compiler()
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(SettingsError, match="C\\+\\+ compiler") as error:
            LLM(execution_mode="compile")
        assert error.value.param == "execution_mode"
        LLM(execution_mode="eager")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_gives_the_same_tokens_and_logprobs(dtype: str) -> None:
    prompts = ["def add(a, b):", "class Stack:", "import os", "for i in range(10):\n    print(i)"]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=6, logprobs=2, ignore_eos=True)
    seen = []
    for mode in ("eager", "compile"):
        before = compilations()
        llm = LLM(execution_mode=mode, dtype=dtype, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128)
        choices = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        seen.append([(choice.token_ids, choice.logprobs) for choice in choices])
        programs = [getattr(region, "_programs", {}) for region in llm.loop.executor.decoder._built]
        assert all(programs) is any(programs) is (mode == "compile")
        assert compilations() == before + sum(map(len, programs))  # behind the last attention there are fewer tokens
    assert seen[0] == seen[1]
