"""Kernels compiled for cards that nobody here has: the largest ones for 8.6, and the recorded matrix of all."""

import os
import signal

import pytest
import torch

pytest.importorskip("triton")

from preheat.backends.base.layers import LayerWeights
from preheat.backends.cuda.device.card import CARDS, HOPPER
from preheat.backends.cuda.matmul.heads import HeadsLayer
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.heads import EachHead
from preheat.model.latent import Latent
from tests import layers
from tools import compile_matrix, gen_cards_doc
from tools.compiled.facts import facts, faults, in_child
from tools.compiled.launches import launches, sample
from tools.oracles.card import META as DEVICE
from tools.oracles.card import Seen, watched
from tools.oracles.card import card as simulated
from tools.oracles.layers import Card

META = torch.empty(0, dtype=torch.bfloat16, device=DEVICE)
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


def test_hoppers_own_kernels_are_launched_on_hopper_alone():
    only = r"^dense, int4, 16 rows$|^prefill on Hopper, heads 14/2"
    with simulated(HOPPER.capability):
        found = {each.name for each in launches(HOPPER, only).values()}
    with simulated(BLACKWELL.capability):
        others = {each.name for each in launches(BLACKWELL, only).values()}
    own = {"_small_m_codes", "_prefill", "_prefill_narrow"}
    assert own <= found and not own & others


@pytest.mark.parametrize("of", [HeadsLayer, EachHead])
def test_all_heads_over_latent_vectors_are_one_launch(of):
    """Control: with a layer for each head, there are more launches for more heads."""
    made = []
    with simulated():
        backend = Card()
        for heads in (4, 20):
            sizes = (512, 192), (256, 512), (256 * heads, 768)
            key, val, q = (layers.value_of(META.new_empty(*size)) for size in sizes)
            weights = (META.new_empty(heads, each.outputs, each.inputs) for each in (key, val))
            maps = [
                HeadsLayer(value, weight, KernelConfigs()) if of is HeadsLayer else EachHead(backend, value, weight)
                for value, weight in zip((key, val), weights, strict=True)
            ]
            norms = [backend.norm(META.new_empty(size), 1e-6) for size in (512, 768)]
            layer = backend.layer(q, LayerWeights(META.new_empty(q.outputs, q.inputs)))
            latent = Latent(*maps, heads, 512, 64, norms[0], layer, norms[1])
            with watched(seen := Seen()):
                latent.project(META.new_empty(1, 768 + 576))
                latent.values(META.new_empty(1, heads * 576))
            made.append([each.split()[0] for each in seen.texts if not each.startswith("new_empty")])
    if of is EachHead:
        assert [len(each) for each in made] == [4 * 4 + 4, 4 * 20 + 4]
    else:
        assert made[0] == made[1] == ["_inserted_norm", "gemm", "gemm_heads", "_inserted_norm", "gemm_heads"]


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
