"""A table of embeddings in the panels of a tied head: the same rows, kept once."""

from __future__ import annotations

import pytest
import torch

from preheat import LLM
from preheat.ops import pooling
from preheat.ops.embedding import embed, rows_of
from tests.cpu.checkpoints import save_checkpoint
from tests.cpu.test_family_engines import differing, prompts, run

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from llvmlite import ir

from preheat.backends.base.layers import LayerWeights
from preheat.backends.cpu.llvm import layer, machine, targets
from preheat.backends.cpu.llvm.embed import TableRows, embeds
from preheat.ops.values import Matmul, WeightFormat
from tests.cpu.test_llvm import LLVM, SIZES


def table_of(dtype: str, vocab: int = 72) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table, and the view of it in the panels of a head."""
    plain = torch.randn(vocab, 48, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    value = Matmul(outputs=vocab, inputs=48, weight=WeightFormat(dtype, None))
    found = layer.PanelLayer(value, LayerWeights(plain)).table()
    assert found is not None
    return plain, found


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(layer, "SMALL_TABLE", 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_are_those_of_the_table(dtype):
    plain, table = table_of(dtype)
    tokens = torch.tensor([0, 71, 15, 16, 31, 32, 40, 0])
    assert torch.equal(rows_of(table, tokens), plain[tokens])
    out = torch.empty(8, 48, dtype=plain.dtype)
    assert torch.equal(embed(tokens, table, scale=3.0, out=out), embed(tokens, plain, scale=3.0))
    assert rows_of(table, tokens[:0]).shape == (0, 48)


@pytest.mark.parametrize("token", [-1, 96])
def test_ids_outside_the_panels_are_refused(token):
    with pytest.raises(IndexError):
        rows_of(table_of("bfloat16")[1], torch.tensor([token]))


def test_small_tables_stay_beside_their_panels(monkeypatch):
    monkeypatch.setattr(layer, "SMALL_TABLE", 72 * 48 * 4 + 96 * 48 * 4)
    value = Matmul(outputs=72, inputs=48, weight=WeightFormat("float32", None))
    assert layer.PanelLayer(value, LayerWeights(torch.zeros(72, 48))).table() is None


def test_compiled_sums_have_the_bits_of_numpys():
    module = ir.Module("test")
    module.triple = targets.here().triple
    embeds(module)
    functions = TableRows(machine.Code(machine.compile_code(str(module), None)[0]))
    x, bounds = torch.randn(40, 48), torch.tensor([0, 1, 1, 40], dtype=torch.int32)
    x[0] = -0.0
    right, found = torch.empty(3, 48), torch.empty(3, 48)
    pooling.sum_rows(x, bounds, right)
    assert functions.sum_rows(x, bounds, found)
    assert torch.equal(found.view(torch.int32), right.view(torch.int32))
    assert not functions.sum_rows(x.bfloat16(), bounds, found)
    assert not functions.sum_rows(x[:, :40].contiguous(), bounds, found[:, :40])


def test_an_engine_keeps_one_table_and_its_bits(tmp_path, monkeypatch):
    folders = [tmp_path / "old", tmp_path / "new"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        save_checkpoint(("Llama", SIZES | {"tie_word_embeddings": True}), folder, seed=seed)
    llm, other = (LLM(str(folder), **LLVM) for folder in folders)
    weights = llm.loop.executor.decoder.weights
    assert weights.embedding.data_ptr() == weights.head.panels.data_ptr()
    before, after = run(llm, prompts()), run(other, prompts())
    monkeypatch.setattr(layer, "SMALL_TABLE", 1 << 30)
    assert differing(run(LLM(str(folders[0]), **LLVM), prompts()), before) == 0
    monkeypatch.setattr(layer, "SMALL_TABLE", 0)
    assert differing(before, after) > 0  # control: other weights are seen
    llm.update_weights(str(folders[1]))
    assert weights.embedding.data_ptr() == weights.head.panels.data_ptr()
    assert differing(run(llm, prompts()), after) == 0


def test_rows_in_another_order_are_seen(monkeypatch):
    plain, table = table_of("bfloat16")
    tokens = torch.tensor([1, 16])
    assert not torch.equal(rows_of(table.transpose(1, 2), tokens), plain[tokens])
