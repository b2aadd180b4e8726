"""Parts of compiled layers by themselves: activations, norms and narrow numbers, with the bits of every processor."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CFUNCTYPE, c_void_p

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.ops.float8 import round_to

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from llvmlite import ir

from preheat.backends.cpu.llvm import job, machine, norms, targets
from preheat.backends.cpu.llvm.activations import ACTIVATIONS, kept_between
from preheat.backends.cpu.llvm.emit import LANES, POINTER, Function, Value
from preheat.backends.cpu.llvm.kinds import COUNTERS, RowNorm
from preheat.backends.cpu.llvm.narrow import NARROW, Narrow

HERE = targets.here()
OTHERS = [targets.TARGETS[name] for name in ("avx2", "sse") if targets.TARGETS[name].runs_here]
TARGETS = [HERE, *OTHERS]
Body = Callable[[Function, Value, Value], None]


def called(body: Body, x: Tensor, out: Tensor, target: targets.Target = HERE) -> Tensor:
    """Run ``body(e, x, out)`` with the addresses of two tensors; return ``out``."""
    module = ir.Module("test")
    module.triple = target.triple
    e = Function(module, "body", [POINTER, POINTER])
    body(e, *e.args)
    e.close()
    job.jobs(module, COUNTERS)
    code = machine.Code(machine.compile_code(str(module), None, target)[0])
    CFUNCTYPE(None, c_void_p, c_void_p)(code.address("body"))(x.data_ptr(), out.data_ptr())
    return out


def each(count: int, change: Callable[[Function, Value], Value]) -> Body:
    """Return a body that changes ``count`` floats."""

    def body(e: Function, x: Value, out: Value) -> None:
        with e.loop(0, count, LANES) as at:
            e.put(change(e, e.vector(x, at)), out, at)

    return body


# --- activations ---

EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": F.silu,
    "gelu_tanh_and_mul": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
    "clamped_silu_and_mul": lambda x: x.clamp(max=7) * torch.sigmoid(1.702 * x.clamp(max=7)),
}
POINTS = torch.cat((torch.linspace(-12, 12, 60_000), torch.randn(5_000) * 1e-3, torch.tensor([0.0, -0.0, 1e4, -1e4]),
                    torch.randn(60_000)))[: 7_500 * LANES].contiguous()  # fmt: skip


def worst(name: str) -> float:
    """Return the greatest error of an activation, relative to numbers above 1 and absolute below."""
    emit = ACTIVATIONS[name]  # type: ignore[index]
    found = [called(each(len(POINTS), emit), POINTS, torch.empty_like(POINTS), target) for target in TARGETS]
    assert all(torch.equal(found[0], other) for other in found[1:])
    exact = EXACT[name](POINTS.double())
    return float(((found[0] - exact).abs() / exact.abs().clamp(min=1)).max())


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"gelu_tanh_and_mul", "gelu_and_mul"}))
def test_activations_are_right_to_a_float32_on_every_processor(name):
    assert worst(name) <= 1.5e-7
    assert ACTIVATIONS["gelu_tanh_and_mul"] is ACTIVATIONS["gelu_tanh"]
    assert ACTIVATIONS["gelu_and_mul"] is ACTIVATIONS["gelu"]


def test_a_term_too_few_is_seen(monkeypatch):
    monkeypatch.setattr("preheat.backends.cpu.llvm.activations._TAIL", (0.0, 0.0, -0.0005879599))
    assert worst("gelu") > 1e-3


def test_numbers_that_are_not_known_stay_so():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.7, -0.9] + [0.25] * 11)
    for emit in ACTIVATIONS.values():
        assert called(each(LANES, emit), x, torch.empty_like(x)).isnan()[0]
    kept = called(each(LANES, lambda e, value: kept_between(e, value, 0.5)), x, torch.empty_like(x))
    assert kept[0].isnan() and torch.equal(kept[1:], x[1:].clamp(-0.5, 0.5))


# --- norms ---


def normed(how: RowNorm, x: Tensor, factors: Tensor, target: targets.Target = HERE, *, add: bool = False) -> Tensor:
    """Return the norm of each row, or its sum with ones; there are numbers of others behind each row."""
    rows, wide = len(x), how.size + 5
    given = torch.full((rows, wide), 1e30)
    given[:, : how.size] = x

    def body(e: Function, at: Value, out: Value) -> None:
        weight = e.at(at, rows * wide)
        with e.loop(0, rows) as row:
            base = e.mul(row, wide)
            norms.norm_row(e, how, e.at(at, base), weight, e.at(out, base), add=add)

    out = torch.full((rows, wide), 1.0)
    called(body, torch.cat((given.view(-1), factors)), out, target)
    assert bool((out[:, how.size :] == 1).all())
    return out[:, : how.size]


@pytest.mark.parametrize("kind", ["rms", "rms_plus_one", "layer"])
@pytest.mark.parametrize(("size", "bias"), [(7, False), (16, True), (60, True), (96, False)])
def test_norms_of_any_size_are_right_on_every_processor(kind, size, bias):
    how = RowNorm(kind, size, 1e-3, bias)
    x, factors = torch.randn(3, size) * 3 + 1, torch.randn((1 + bias) * size)
    found = normed(how, x, factors)
    assert all(torch.equal(normed(how, x, factors, target), found) for target in OTHERS)
    assert torch.equal(normed(how, x, factors, add=True), 1 + found)
    wide = x.double()
    wide = wide - wide.mean(-1, keepdim=True) if kind == "layer" else wide
    exact = wide * (wide.square().mean(-1, keepdim=True) + how.eps).rsqrt() * factors[:size]
    exact = exact + factors[size:] if bias else exact
    assert float((found - exact).abs().max()) <= 2e-6


def test_lanes_beyond_a_row_that_count_are_seen(monkeypatch):
    """Control: the last vector of a row reads its neighbor."""
    how, x, factors = RowNorm("rms", 7, 1e-6), torch.randn(3, 7), torch.randn(7)
    right, load = normed(how, x, factors), Function.vector
    monkeypatch.setattr(Function, "vector", lambda e, pointer, index=0, mask=None: load(e, pointer, index))
    assert not torch.equal(normed(how, x, factors), right)


# --- narrow numbers ---

FORMATS = sorted(NARROW)


def codes_of(x: Tensor, name: str, target: targets.Target = HERE, how: Narrow | None = None) -> Tensor:
    """Return the codes of floats, as integers."""
    how = how or NARROW[name]
    out = torch.zeros(len(x), dtype=getattr(torch, name)).view(torch.uint8 if how.bits == 8 else torch.int16)

    def body(e: Function, at: Value, to: Value) -> None:
        with e.loop(0, len(x), LANES) as place:
            codes = how.narrowed(e, e.vector(at, place))
            e.store(codes, e.at(to, place, how.kind), 0, codes.type, align=1)

    return called(body, x, out, target)


def floats_of(codes: Tensor, name: str, target: targets.Target = HERE) -> Tensor:
    """Return the floats of codes."""
    how = NARROW[name]

    def body(e: Function, at: Value, to: Value) -> None:
        with e.loop(0, len(codes), LANES) as place:
            given = e.b.load(e.at(at, place, how.kind), typ=ir.VectorType(how.kind, LANES), align=1)
            e.put(how.widened(e, given), to, place)

    return called(body, codes, torch.empty(len(codes)), target)


@pytest.mark.parametrize("name", FORMATS)
def test_every_narrow_number_is_widened_exactly(name):
    bits = NARROW[name].bits
    codes = torch.arange(1 << bits).to(torch.uint8 if bits == 8 else torch.int16)
    exact = codes.view(getattr(torch, name)).float()
    for target in TARGETS:
        found = floats_of(codes, name, target)
        assert torch.equal(found[exact.isfinite()].view(torch.int32), exact[exact.isfinite()].view(torch.int32))
    assert floats_of(codes_of(torch.full((LANES,), torch.nan), name), name).isnan().all()


def numbers(name: str) -> Tensor:
    """Return all finite numbers of a format, their ties, and floats of every size."""
    bits = NARROW[name].bits
    codes = torch.arange(1 << bits).to(torch.uint8 if bits == 8 else torch.int16)
    known = codes.view(getattr(torch, name)).double()
    known = known[known.isfinite()].unique()
    some = torch.cat(
        (known, (known[1:] + known[:-1]) / 2, torch.randn(999).double() * 10.0 ** torch.randint(-9, 5, (999,)))
    )
    beyond = torch.tensor([1e-45, -1e-45, 1e30, -1e30]).double()
    x = torch.cat((some, beyond)).float()
    return F.pad(x, (0, -len(x) % LANES))


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_that_of_the_engine(name):
    x, dtype = numbers(name), getattr(torch, name)
    expected = x.to(dtype) if name == "bfloat16" else round_to(x, torch.ones(1), dtype)
    for target in TARGETS:
        assert torch.equal(
            codes_of(x, name, target),
            expected.view(torch.uint8 if NARROW[name].bits == 8 else torch.int16),
        )


def test_rounding_away_from_even_is_seen():
    how = NARROW["float16"]._replace(mantissa=9)
    x = numbers("float16")
    assert not torch.equal(codes_of(x, "float16", how=how), codes_of(x, "float16"))
