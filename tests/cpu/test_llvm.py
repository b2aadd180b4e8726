"""Execution mode llvm: right against transformers, one answer in every way, and the same bits from every processor."""

from __future__ import annotations

import gc
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat import LLM
from preheat.errors import SettingsError
from preheat.ops.values import Matmul, Refused, SumOrder, WeightFormat
from tests.cpu.checkpoints import save_checkpoint
from tests.cpu.test_family_engines import OPTIONS, differing, prompts, run
from tests.waiting import until

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from llvmlite import ir

from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.llvm import chunks, emit, functions, job, layer, machine, products, targets, team
from preheat.backends.cpu.llvm.kinds import COUNTERS, LAYER_FRAME, Product
from preheat.backends.cpu.llvm.memory import panels, zeros

LLVM = {**OPTIONS, "execution_mode": "llvm", "num_threads": 1}
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def checkpoint(folder: Path) -> None:
    save_checkpoint(("Llama", SIZES), folder)


def test_weights_in_bfloat16_have_the_bits_of_the_same_weights_in_float32():
    """A product widens its weight exactly."""
    half, whole = (Product(96, 64, stored) for stored in ("bfloat16", "float32"))
    weight = torch.randn(64, 96).bfloat16()
    x = torch.randn(5, 96)
    assert torch.equal(product(half, weight, x), product(whole, weight.float(), x))


# --- single functions ---


def loaded(how: Product) -> machine.Code:
    module = ir.Module("test")
    module.triple = targets.here().triple
    functions.alone(module, "alone", how)
    job.jobs(module, COUNTERS)
    return machine.Code(machine.compile_code(str(module), None)[0])


class Alone:
    """One product as a function, with threads."""

    def __init__(self, code: machine.Code, how: Product, weight: Tensor, threads: int = 1) -> None:
        self.how, self.weight, self.team = how, panels(how, weight), team.Team(code, threads)
        self.frame = zeros(32, np.int64)
        self.frame[LAYER_FRAME["qkv"]] = self.weight.data_ptr()
        self.address = code.address("alone")

    def __call__(self, x: Tensor, margin: int = 0) -> Tensor:
        out = torch.full((len(x) + margin, self.how.results), 7.0)
        self.team.point("x", x)
        self.team.point("attended", out)
        self.team.run(self.address, self.frame.ctypes.data, len(x))
        return out


def product(how: Product, weight: Tensor, x: Tensor) -> Tensor:
    return Alone(loaded(how), how, weight)(x)


def test_a_gated_product_is_right():
    how = Product(160, 128, "bfloat16", activation="silu_and_mul")
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(128, 160, generator=draw).bfloat16(), torch.randn(6, 160, generator=draw)
    here = product(how, weight, x)
    whole = (x.double() @ weight.double().T).chunk(2, dim=-1)
    exact = whole[0] * torch.sigmoid(whole[0]) * whole[1]
    assert float((here - exact).abs().max() / exact.abs().max()) < 1e-6


def test_denormal_numbers_count_whatever_the_caller_set():
    how, weight, x = Product(16, 32, "float32"), torch.full((32, 16), 1e-30), torch.full((1, 16), 1e-10)
    expected = product(how, weight, x)
    assert 0 < float(expected.min()) < 2e-38
    torch.set_flush_denormal(True)
    try:
        found = product(how, weight, x)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))  # floats would compare as zeros here
        assert float((x * 1e-30).max()) == 0.0
    finally:
        torch.set_flush_denormal(False)


def test_rows_have_the_bits_of_a_row_alone_in_groups_of_any_size():
    """Rows that lack in a group are computed from others, and not written."""
    how = Product(64, 128, "float32")
    alone, x = Alone(loaded(how), how, torch.randn(128, 64)), torch.randn(19, 64)
    ones = torch.cat([alone(row[None]) for row in x])
    for rows in range(1, len(x) + 1):
        found = alone(x[:rows], margin=8)
        assert torch.equal(found[:rows], ones[:rows])
        assert bool((found[rows:] == 7.0).all())


def test_jobs_of_different_rows_in_turns_keep_their_bits():
    """Threads that are late find nothing to do: more threads than processors, and jobs that are short."""
    how = Product(64, 128, "float32")
    alone = Alone(loaded(how), how, torch.randn(128, 64), threads=5)
    some = {rows: torch.randn(rows, 64) for rows in (1, 64, 2, 33, 3)}
    first = {rows: alone(x, margin=8) for rows, x in some.items()}
    for _ in range(2000):
        for rows, x in some.items():
            assert torch.equal(alone(x, margin=8), first[rows])
    assert all(bool((out[rows:] == 7.0).all()) for rows, out in first.items())


def test_threads_end_with_their_team():
    how, others = Product(16, 32, "float32"), set(threading.enumerate())  # engines of other tests may still be there
    alone = Alone(loaded(how), how, torch.ones(32, 16), threads=3)
    alone(torch.ones(1, 16))
    mine = [each for each in threading.enumerate() if each not in others and each.name.startswith("llvm-")]
    assert len(mine) >= 2
    del alone
    gc.collect()
    assert until(lambda: not any(thread.is_alive() for thread in mine))


# --- what is planted is seen ---


def test_a_sum_that_follows_the_number_of_rows_is_seen(tmp_path, monkeypatch):
    checkpoint(tmp_path)
    right = products.sums

    def cut(e, how, weight, unit, x, *more):
        found = right(e, how, weight, unit, x, *more)
        if len(x) == 1:
            return found
        return [[e.b.fmul(each, e.v(1 + 2**-20)) for each in line] for line in found]

    monkeypatch.setattr(products, "sums", cut)
    llm = LLM(str(tmp_path), **LLVM)
    assert differing([run(llm, [prompt])[0] for prompt in prompts()], run(llm, prompts())) > 0


@pytest.mark.parametrize("rows", [5, 8, 9, 13, 31, chunks.MOST, chunks.MOST + 1])
@pytest.mark.parametrize("inputs", [96, chunks.CHUNK, 300])
def test_chunks_of_inputs_change_no_bits(rows, inputs):
    """Rows up to a bound pass over chunks; all others are multiplied in one pass."""
    for how in (Product(inputs, 96, "float32"), Product(inputs, 128, "bfloat16", activation="silu_and_mul")):
        weight, x = torch.randn(how.outputs, inputs).to(getattr(torch, how.stored)), torch.randn(rows, inputs)
        many = Alone(loaded(how), how, weight, threads=2)
        assert torch.equal(many(x, margin=3)[:rows], torch.cat([many(row[None]) for row in x]))
        assert (many(x, margin=3)[rows:] == 7.0).all()


def test_a_sum_that_begins_anew_with_each_chunk_is_seen(monkeypatch):
    if not chunks.serves(how := Product(300, 96, "float32")):
        pytest.skip("this processor multiplies no rows in chunks")
    weight, x = torch.randn(96, 300), torch.randn(8, 300)
    right, add_up = product(how, weight, x), chunks.add_up

    def wrong(e, how, weights, row_at, rows, room):
        with monkeypatch.context() as patch:
            patch.setattr(e.b, "select", lambda condition, zero, kept: zero)
            add_up(e, how, weights, row_at, rows, room)

    monkeypatch.setattr(chunks, "add_up", wrong)
    assert not torch.equal(product(how, weight, x), right)


def test_an_exponential_of_the_machines_library_is_seen(monkeypatch):
    how, weight, x = Product(160, 128, "float32", activation="silu_and_mul"), torch.randn(128, 160), torch.randn(6, 160)
    own = product(how, weight, x)
    monkeypatch.setattr(emit.Function, "exp", lambda e, value: e.intrinsic("exp", value))
    assert not torch.equal(product(how, weight, x), own)


def test_a_flag_that_allows_other_orders_is_seen(monkeypatch):
    """Fast math lets LLVM cut a sum for the processor."""
    how, weight, x = Product(160, 64, "float32"), torch.randn(64, 160), torch.randn(6, 160)
    plain = product(how, weight, x)
    monkeypatch.setattr(emit.Function, "fma", lambda e, a, b, c: e.b.fadd(e.b.fmul(a, b), c, flags=["fast"]))
    assert not torch.equal(product(how, weight, x), plain)


def test_a_late_compilation_is_a_cold_event():
    watched = CpuBackend().cold_sources()["llvm"]
    with ExitStack() as undo:
        assert watched.make is not None
        source = watched.make(undo)
        assert source.new_events() == ()
        machine._MADE.clear()
        loaded(Product(16, 96, "float32"))
        assert len(source.new_events()) >= 1
        assert source.new_events() == ()


def test_a_second_boot_compiles_nothing(tmp_path):
    checkpoint(tmp_path)
    options = LLVM | {"cache_dir": str(tmp_path / "cache")}
    LLM(str(tmp_path), **options)
    machine._MADE.clear()
    before = machine.compilations
    LLM(str(tmp_path), **options)
    assert machine.compilations == before


def test_a_layer_without_a_function_is_refused_with_the_reason():
    found = layer.supports(Matmul(outputs=32, inputs=32, weight=WeightFormat("float32"), order=SumOrder(2)))
    assert isinstance(found, Refused)
    assert "layers that ranks share have no function" in found.reason


def test_features_without_functions_are_refused():
    with pytest.raises(SettingsError, match="do not work together"):
        LLM(execution_mode="llvm", tensor_parallel_size=2)
