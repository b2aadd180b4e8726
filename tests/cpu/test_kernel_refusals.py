"""A kernel that does not compile is replaced by the reference, or ends the boot in one line."""

import logging

import pytest

pytest.importorskip("triton")

import torch
from triton.runtime.errors import OutOfResources

from preheat.backends.cuda.device import compiling
from preheat.backends.cuda.device.card import CARDS
from preheat.backends.cuda.device.compiling import Loading
from preheat.backends.cuda.matmul import prove
from preheat.backends.cuda.matmul.config import Library, LinearShape, Tile, Wide, reference
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.rules import tile_rule
from preheat.backends.cuda.matmul.tables import Entry, Table
from preheat.errors import KernelRefused

SHAPE = LinearShape(6144, 4096)


@pytest.fixture
def broken(monkeypatch):
    """Return the choices that do not compile."""
    found = set()

    def compile_kernels(used):
        if bad := [choice for _, choice in used if choice in found]:
            raise KernelRefused(f"no {bad[0]}")

    monkeypatch.setattr(prove, "compile_kernels", compile_kernels)
    return found


def settled(configs, sizes=(1, 40)):
    prove.settle(configs, [(SHAPE, sizes)])
    return [configs(SHAPE, size) for size in sizes]


def test_a_kernel_that_does_not_compile_is_named_and_replaced_by_the_reference(broken, caplog):
    caplog.set_level(logging.WARNING)
    first, other = settled(KernelConfigs(invariant=False, card=CARDS[8, 6]))
    assert isinstance(first, Tile) and first != reference(SHAPE) and not caplog.records
    broken.add(first)
    assert settled(KernelConfigs(invariant=False, card=CARDS[8, 6])) == [reference(SHAPE), other]
    (said,) = caplog.messages
    assert str(first) in said and "for 1 rows" in said


def test_a_reference_that_does_not_compile_ends_in_one_message(broken):
    broken.add(reference(SHAPE))
    with pytest.raises(KernelRefused, match=r"the only kernel for .* use --device cpu"):
        settled(KernelConfigs(invariant=False, card=CARDS[8, 6]))


@pytest.mark.parametrize("also", [False, True], ids=["", "the replacement, too"])
def test_a_kernel_in_place_of_cublas_is_proven_too(monkeypatch, also):
    """Control: without another comparison its bits would be unknown."""
    deep, narrow, compared = LinearShape(4096, 14336), Wide(64, 128, 6), []

    def differing(shape, chosen):
        compared.extend(chosen)
        return {pair for pair in chosen if pair[1] == Library() or (also and pair[1] == narrow)}

    monkeypatch.setattr(prove, "differing", differing)
    configs = KernelConfigs([Table("", (9, 0), [Entry.of(deep, 256, Library(), 1.0)])], card=CARDS[9, 0])
    assert prove.prove(configs, [deep], [256]) == {(deep, 256): False}
    assert compared == [(256, Library()), (256, narrow)]
    assert configs(deep, 256) == (tile_rule(deep, 256) if also else narrow)


@pytest.mark.parametrize(
    "error", [OutOfResources(120_000, 101_376, "shared memory"), RuntimeError("a\nPassManager failed")]
)
def test_an_error_of_the_compiler_becomes_one_line(monkeypatch, error):
    def build():
        raise error

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(compiling, "card_at", lambda: CARDS[8, 6])
    with pytest.raises(KernelRefused, match=r"does not compile for compute capability 8\.6") as refused:
        Loading._load(build, 0)
    assert "\n" not in refused.value.message and str(error).splitlines()[-1] in refused.value.message


def test_lack_of_memory_is_no_fault_of_a_kernel(monkeypatch):
    """Control: an error of the allocator stays as it is."""

    def build():
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(torch.OutOfMemoryError):
        Loading._load(build, 0)
