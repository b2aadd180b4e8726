"""Loading: strict in both directions, every tensor in its place, dummy weights that are worth computing with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from preheat.backends.base.layers import LayerWeights, Linear
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cuda.device.upload import Upload
from preheat.errors import ModelError
from preheat.model.decoder import Decoder
from preheat.model.dummy_tensors import DummyTensors
from preheat.model.families import read_spec
from preheat.model.formats import FORMATS, Plain, expected_tensors
from preheat.model.loader import Reading, load_model, load_weights
from preheat.model.reading import Shape
from preheat.model.sources import SafetensorsFiles, check_tensors
from preheat.model.specs import LayerSpec, ModelSpec, without_head
from preheat.model.tensor_specs import LinearSpec
from preheat.model.ties import with_stored_head
from preheat.model.weight_loader import WeightLoader
from preheat.settings import Settings
from tests.cpu.test_model_families import dense_attention, logits_of, random_tokens, turn

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SPEC = read_spec(CONFIG)
CPU = CpuBackend()
TIED = read_spec(CONFIG | {"tie_word_embeddings": True})


def copy(tensor: Tensor, out: Tensor) -> None:
    out.copy_(tensor)


def write(folder: Path, spec: ModelSpec = SPEC, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = expected_tensors(spec).items()
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def load_error(folder: Path, tensors: dict[str, Tensor], spec: ModelSpec = SPEC) -> str:
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as error:
        load_weights(spec, folder, torch.float32, CPU)
    return str(error.value)


def test_parts_are_joined_in_order(tmp_path):
    tensors, weights = write(tmp_path), load_weights(SPEC, tmp_path, torch.float32, CPU)
    x, at = torch.randn(3, 64), "model.layers.1.self_attn"
    with torch.inference_mode():
        joined = weights.layers[1].attention.qkv(x)
        parts = [x @ tensors[f"{at}.{n}_proj.weight"].T + tensors[f"{at}.{n}_proj.bias"] for n in "qkv"]
    torch.testing.assert_close(joined, torch.cat(parts, dim=1))
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path):
    tensors = write(tmp_path)
    norm = "model.layers.0.input_layernorm.weight"
    assert f"missing tensors: {norm}" in load_error(tmp_path, {k: v for k, v in tensors.items() if k != norm})
    assert "unknown tensors: extra.weight" in load_error(tmp_path, tensors | {"extra.weight": torch.ones(2)})
    wrong = load_error(tmp_path, tensors | {"model.norm.weight": torch.ones(65)})
    assert "model.norm.weight has shape [65], needs [64]" in wrong
    assert "and 13 more" in load_error(
        tmp_path, {k: v for k, v in tensors.items() if ".0." not in k} | {f"t{i}": torch.ones(1) for i in range(21)}
    )


def test_harmless_tensors_are_passed_over(tmp_path):
    tensors = write(tmp_path, TIED)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(TIED, tmp_path, torch.float32, CPU)
    assert "missing tensors: lm_head.weight" in load_error(tmp_path, {k: v for k, v in tensors.items() if k[0] != "l"})


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
ROUNDING = 1e-3
"""Bound on the difference between the head's product and the plain product, as these add in other orders."""


def head_of(folder: Path, tensors: dict[str, Tensor], dtype: str = "float32") -> tuple[ModelSpec, Tensor]:
    """Return the spec of a tied config with these tensors, and the head's logits less the table's.

    The hidden state is random.
    """
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True, "dtype": dtype}))
    model = load_model(Settings.load({"model": str(folder), "dtype": "float32"}), CPU)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model.spec, model.weights.head(x) - x @ model.weights.embedding.T


def test_a_stored_head_is_used_even_if_the_config_ties_it(tmp_path):
    """A head that differs in a single number, even in the last row, is used.

    An equal head is the table itself.
    """
    tensors = write(tmp_path, TIED)
    table = tensors[TABLE]
    spec, difference = head_of(tmp_path, tensors | {HEAD: table.clone()})
    assert spec.tied
    assert difference.abs().max() < ROUNDING
    other = table.clone()
    other[-1, -1] += 1
    spec, difference = head_of(tmp_path, tensors | {HEAD: other})
    assert not spec.tied
    assert difference.abs().max(0).values.gt(ROUNDING).nonzero().flatten().tolist() == [len(table) - 1]
    spec, difference = head_of(tmp_path, tensors | {HEAD: table.flip(0)})
    assert not spec.tied
    assert difference.abs().max() > 1


def test_a_head_stands_for_the_table_that_is_not_there(tmp_path):
    tensors = write(tmp_path, TIED)
    spec, difference = head_of(tmp_path, {HEAD if name == TABLE else name: t for name, t in tensors.items()})
    assert spec.tied
    assert difference.abs().max() < ROUNDING
    save_file({name: t for name, t in tensors.items() if name != TABLE}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"missing tensors: {TABLE}"):
        load_model(Settings.load({"model": str(tmp_path), "dtype": "float32"}), CPU)


def test_heads_are_compared_in_the_dtype_that_is_computed_in(tmp_path):
    """Two heads that are equal after rounding to the computed dtype are one head."""
    tensors = write(tmp_path, TIED, torch.bfloat16)
    near = tensors[TABLE].float() * (1 + 2**-12)
    save_file(tensors | {HEAD: near}, tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path, copy)
    assert with_stored_head(TIED, files, torch.bfloat16).tied
    assert not with_stored_head(TIED, files, torch.float32).tied


def test_a_head_that_pooling_does_not_need_is_passed_over(tmp_path):
    tensors = write(tmp_path, TIED)
    save_file(tensors | {HEAD: tensors[TABLE].flip(0)}, tmp_path / "model.safetensors")
    load_weights(without_head(TIED), tmp_path, torch.float32, CPU)


class Transposed:
    """Weights as [inputs, outputs], as GPT-2 stored them; biases as usual."""

    def tensors(self, spec: LinearSpec) -> Mapping[str, Shape]:
        return {name: shape[::-1] for name, shape in Plain().tensors(spec).items()}

    def load(self, spec: LinearSpec, loader: WeightLoader) -> Linear:
        weight = loader.empty(spec.outputs, spec.inputs)
        bias = torch.cat([loader.tensor(f"{name}.bias", size) for name, size in spec.parts]) if spec.bias else None
        for (name, _), rows in zip(spec.parts, weight.split([size for _, size in spec.parts]), strict=True):
            loader.source.fill(f"{name}.weight", rows.t())
        return loader.layer_of(spec, LayerWeights(weight, bias))


def stored_as(name: str, layer: LayerSpec) -> LayerSpec:
    def change(linear: LinearSpec) -> LinearSpec:
        return replace(linear, format=name)

    attention, mlp = layer.attention, layer.mlp
    return replace(
        layer,
        attention=replace(attention, qkv=change(attention.qkv), o=change(attention.o)),
        mlp=replace(mlp, gate_up=change(mlp.gate_up), down=change(mlp.down)),
    )


def test_another_linear_format(tmp_path):
    """A model with layers stored transposed, and the head as usual, gives the same logits bit for bit."""
    tensors = write(tmp_path)
    plain = Decoder(SPEC, load_weights(SPEC, tmp_path, torch.float32, CPU), 256)
    spec = replace(SPEC, layers=tuple(stored_as("transposed", layer) for layer in SPEC.layers))
    formats = {**FORMATS, "transposed": Transposed()}
    turned = [name for path, linear in spec.linears() if path != "head" for name in Transposed().tensors(linear)]
    save_file({**tensors, **{name: tensors[name].t().contiguous() for name in turned}}, tmp_path / "model.safetensors")
    other = Decoder(spec, load_weights(spec, tmp_path, torch.float32, CPU, formats=formats), 256)
    assert torch.equal(logits_of(other, random_tokens()), logits_of(plain, random_tokens()))
    with pytest.raises(ModelError, match=r"gate_proj\.weight has shape \[64, 96\], needs \[96, 64\]"):
        load_weights(SPEC, tmp_path, torch.float32, CPU)


def test_layers_have_the_paths_of_their_specs(tmp_path):
    weights = load_weights(TIED, tmp_path, torch.float32, CPU, Reading("dummy"))
    sizes = {path: (linear.inputs, linear.outputs // (1 + linear.gated)) for path, linear in TIED.linears()}
    with torch.inference_mode():
        found = {path: linear(torch.ones(2, sizes[path][0])).shape[1] for path, linear in weights.linears()}
    assert found == {path: outputs for path, (_, outputs) in sizes.items()}


def shard(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write two files with an index, and return the index's map."""
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return places


def test_shards_and_their_index_must_agree(tmp_path):
    tensors = write(tmp_path)
    whole = load_weights(SPEC, tmp_path, torch.float32, CPU)
    (tmp_path / "model.safetensors").unlink()
    places = shard(tmp_path, tensors)
    assert torch.equal(load_weights(SPEC, tmp_path, torch.float32, CPU).embedding, whole.embedding)
    index = {"weight_map": places | {"promised.weight": "part-0.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"no file has: promised\.weight"):
        load_weights(SPEC, tmp_path, torch.float32, CPU)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(load_file(tmp_path / "part-0.safetensors"), tmp_path / "part-2.safetensors")
    with pytest.raises(ModelError, match="is there more than once"):
        load_weights(SPEC, tmp_path, torch.float32, CPU)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threads", [1, 5])
def test_pieces_by_several_threads_are_the_whole(stored, threads, tmp_path):
    """The upload in pieces gives the whole tensor.

    There are many pieces, a shorter last one, and tensors below a piece. It is the way to a GPU, used here with the
    host as the target.
    """
    write(tmp_path, dtype=stored)
    serial, parts = {}, {}
    with Upload(torch.device("cpu"), threads, piece_bytes=1000) as upload:
        files = SafetensorsFiles(tmp_path, copy), SafetensorsFiles(tmp_path, upload.copy)
        for name, shape in expected_tensors(SPEC).items():
            for source, found in zip(files, (serial, parts), strict=True):
                found[name] = torch.full(shape, float("nan"), dtype=torch.bfloat16)
                source.fill(name, found[name])
    assert all(torch.equal(serial[name], parts[name]) for name in serial)
    assert len(serial) > 10


def test_a_failing_piece_is_reported(tmp_path):
    with Upload(torch.device("cpu")) as upload, pytest.raises(ValueError, match="zip"):
        upload.copy(torch.ones(8 << 20), torch.ones(1))


def test_the_files_are_not_read_into_memory_twice(tmp_path):
    """A tensor of a file is a view of its pages.

    So the uploaded pieces are the only copy.
    """
    write(tmp_path)
    (file,) = {id(p.file): p.file for p in SafetensorsFiles(tmp_path, copy)._places.values()}.values()
    at = file.get_tensor("model.norm.weight").data_ptr()
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "safetensors" in line]
    bounds = [tuple(int(end, 16) for end in ends.split("-")) for ends in ranges]
    assert any(start <= at < end for start, end in bounds)


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable"):
        load_weights(SPEC, tmp_path, torch.float32, CPU)
    with pytest.raises(ModelError, match="load format 'pt'"):
        load_weights(SPEC, tmp_path, torch.float32, CPU, Reading("pt"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_is_not_finite_is_named(value, dtype, tmp_path):
    tensors = {"good": torch.full((40, 50), 3e38, dtype=dtype), "bad": torch.ones(40, 50, dtype=dtype)}
    tensors["bad"][39, 49] = value
    save_file(tensors, tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path, lambda source, out: out.copy_(source))
    files.fill("good", out := torch.empty(40, 50))
    assert out[0, 0] == tensors["good"][0, 0].float()
    files.check_finite()
    files.fill("bad", out)
    with pytest.raises(ModelError, match=r"tensor bad .* is not finite: 1 of its 2,000 numbers"):
        files.check_finite()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_converted_once(stored, tmp_path):
    tensors = write(tmp_path, dtype=stored)
    weights = load_weights(SPEC, tmp_path, torch.bfloat16, CPU)
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"].to(torch.bfloat16))


@given(st.sets(st.sampled_from(sorted(expected_tensors(SPEC)))), st.sets(st.text(min_size=1), max_size=3))
def test_exactly_the_expected_tensors_pass(dropped, added):
    expected = expected_tensors(SPEC)
    added -= expected.keys()
    shapes = {name: shape for name, shape in expected.items() if name not in dropped} | dict.fromkeys(added, (1,))
    if dropped or added:
        with pytest.raises(ModelError):
            check_tensors(SPEC, shapes)
    else:
        check_tensors(SPEC, shapes)


def dummy(name: str, *shape: int, seed: int = 0) -> Tensor:
    out = torch.empty(shape)
    DummyTensors(seed).fill(name, out)
    return out


def test_dummy_tensors_depend_on_name_and_seed_alone():
    assert torch.equal(dummy("a.weight", 8, 8), dummy("a.weight", 8, 8))
    assert not torch.equal(dummy("a.weight", 8, 8), dummy("b.weight", 8, 8))
    assert not torch.equal(dummy("a.weight", 8, 8), dummy("a.weight", 8, 8, seed=1))
    assert dummy("a.weight", 400, 100).std() == pytest.approx(0.1, rel=0.02)
    norm = dummy("norm.weight", 4000)
    assert (float(norm.mean()), float(norm.std())) == (pytest.approx(1, abs=0.01), pytest.approx(0.1, rel=0.1))


def behaviour(decoder: Decoder) -> tuple[float, float, float]:
    """Return attention's entropy (share of the uniform one), the logits' spread, and the share of distinct choices."""
    entropies, dense, spec = [], dense_attention(decoder), decoder.spec.layers[0].attention

    def attend(layer: int, qkv: Tensor) -> Tensor:
        turned = qkv.clone()
        turn(decoder, layer, turned)
        q, k = turned[-1, : spec.num_heads], turned[:, spec.num_heads : spec.num_heads + spec.num_kv_heads]
        scores = torch.einsum("hd,thd->ht", q, k.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1))
        weight = (scores * spec.scale).softmax(-1)
        entropies.append(-(weight * weight.clamp(min=1e-30).log()).sum(-1).mean())
        return dense(layer, qkv)

    tokens = torch.randint(decoder.spec.vocab_size, (200,), generator=torch.Generator().manual_seed(1))
    logits = logits_of(decoder, tokens, attend)
    entropy = float(torch.stack(entropies).mean() / torch.tensor(200.0).log())
    return entropy, float(logits.std(dim=-1).mean()), len(logits.argmax(-1).unique()) / 200


def test_dummy_models_are_not_degenerate():
    """Dummy models have varied attention and choices, and logits with about the spread of a trained model."""
    for spec in (SPEC, TIED, read_spec(CONFIG | {"architectures": ["Qwen3ForCausalLM"]})):
        decoder = Decoder(spec, load_weights(spec, Path(), torch.float32, CPU, Reading("dummy")), 256)
        entropy, spread, distinct = behaviour(decoder)
        assert 0.5 < entropy < 0.98
        assert 0.5 < spread < 3
        assert distinct > 0.2


def test_the_check_for_degeneracy_can_fail():
    """Control: a model of tiny noise, the usual dummy weights, fails the check."""

    class Tiny:
        def fill(self, name: str, out: Tensor) -> None:
            DummyTensors(0).fill(name, out)
            out.mul_(1e-3)

    decoder = Decoder(SPEC, WeightLoader(Tiny(), torch.float32, CPU).model(SPEC), 256)
    entropy, spread, _ = behaviour(decoder)
    assert entropy > 0.99
    assert spread < 0.01


def test_each_layer_turns_by_its_own_rope():
    """Each layer rotates by its own rope, as Gemma's local layers have another base."""
    weights = load_weights(SPEC, Path(), torch.float32, CPU, Reading("dummy"))
    layer = SPEC.layers[1]
    local = replace(layer, attention=replace(layer.attention, rope=replace(layer.attention.rope, theta=100.0)))
    same, mixed = Decoder(SPEC, weights, 256), Decoder(replace(SPEC, layers=(SPEC.layers[0], local)), weights, 256)
    assert same.ropes[0] is same.ropes[1]
    assert torch.equal(mixed.ropes[0], same.ropes[0])
    assert not torch.equal(mixed.ropes[1], same.ropes[1])
    assert not torch.equal(logits_of(mixed, random_tokens()), logits_of(same, random_tokens()))
