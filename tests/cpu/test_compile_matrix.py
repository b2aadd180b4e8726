"""Kernels compiled for cards that nobody here has: the largest ones for 8.6, and the recorded matrix of all."""

import os
import signal

import pytest

pytest.importorskip("triton")

from preheat.backends.cuda.card import CARDS
from tools import compile_matrix, gen_cards_doc
from tools.compiled.facts import facts, faults, in_child
from tools.compiled.launches import launches, sample
from tools.oracles.card import card as simulated

SMALL, BLACKWELL = CARDS[8, 6], CARDS[10, 0]
LARGEST = [
    (SMALL, r"^split 1, plain, 40 rows$", "gemm", "mma.sync"),
    (SMALL, r"^prefill heads 32/8 of 128, bfloat16, cache bfloat16, window None$", "_prefill", "mma.sync"),
    (SMALL, r"^decode heads 8/4 of 256, bfloat16, cache fp8_e5m2, 1 rows of 1$", "_decode", "mma.sync"),
    (BLACKWELL, r"^gated, int4, 1 rows$", "gemm", "tcgen05.mma"),
]
"""The largest configurations of each family on a card with 99 KB, and codes in the matrix unit of 10.0."""


@pytest.mark.parametrize(("card", "group", "kernel", "instruction"), LARGEST)
def test_the_largest_kernels_compile(card, group, kernel, instruction, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with simulated(card.capability):
        (launch,) = (each for each in sample(launches(card, group)).values() if each.name == kernel)
        found = facts(launch, card.capability)
    assert faults(card, found, 1024) == []
    assert (found["instructions"], found["waits"]) == ([instruction], card.early_launch)


GOOD = {
    "shared": 90_000, "registers": 255, "spills": 0, "instructions": ["mma.sync"], "products": True, "widths": [2],
    "waits": False,
}  # fmt: skip


def test_a_kernel_within_the_limits_has_no_fault():
    assert faults(SMALL, GOOD) == []
    assert faults(CARDS[9, 0], GOOD | {"instructions": ["mma.sync", "wgmma.mma_async"], "waits": True}) == []
    assert faults(SMALL, GOOD | {"spills": 600}, 600) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"error": "RuntimeError: PassManager::run failed"}, "PassManager"),
        ({"shared": 101_377}, "101377 bytes of shared memory"),
        ({"spills": 601}, "601 bytes of registers"),
        ({"instructions": ["wgmma.mma_async"]}, "on a card with mma.sync"),
        ({"instructions": []}, "without a matrix instruction"),
        ({"widths": [2, 4]}, "kWidth"),
        ({"waits": True}, "without early launches"),
    ],
)
def test_each_fault_is_found(change, said):
    (found,) = faults(SMALL, GOOD | change, 600)
    assert said in found


def test_the_compilers_end_is_a_fault_and_not_the_end_of_the_run():
    class Broken:
        def compiled(self, capability):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(Broken(), SMALL.capability) == {"error": "the compiler ended with signal 9"}


def test_the_record_has_no_fault_and_the_page_shows_it():
    stored = compile_matrix.recorded()
    assert "8.6" in stored["targets"] and set(stored["targets"]) <= {card.version for card in CARDS.values()}
    for version, each in stored["targets"].items():
        assert (each["faults"], each["compiled"]) == (0, each["configurations"]), version
    page = gen_cards_doc.PAGE.read_text()
    assert gen_cards_doc.written(page) == page
