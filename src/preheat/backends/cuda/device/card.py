"""The table of cards: the abilities of the GPUs of each compute capability. No torch.

Rules of kernels, ``supports``, `preheat doctor` and the matrix of compiled kernels (``tools.compile_matrix``) read it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Capability = tuple[int, int]
Products = Literal["mma.sync", "wgmma", "tcgen05"]

RESERVED = 7_448
"""Bytes of shared memory that tiles leave to barriers and to changes of layout."""


class Card(NamedTuple):
    """The abilities of the GPUs of one compute capability.

    A program may have ``shared_bytes`` of shared memory, and the card has so many ``processors`` (multiprocessors). The
    device tells both again when it is there. ``products`` is the instruction for large tiles. ``early_launch``: a
    launch may begin before the launch ahead ends (PDL). ``copy_engine``: TMA. ``float8``: the instructions for e4m3.
    ``ran``: kernels ran on such a card; else they were only compiled for it.
    """

    capability: Capability
    names: str
    shared_bytes: int
    processors: int
    products: Products = "mma.sync"
    early_launch: bool = False
    copy_engine: bool = False
    float8: bool = False
    ran: bool = False

    @property
    def room(self) -> int:
        """Bytes of shared memory for the tiles of a program."""
        return self.shared_bytes - RESERVED

    @property
    def is_hopper(self) -> bool:
        """Whether the kernels written for Hopper run."""
        return self.products == "wgmma"

    @property
    def version(self) -> str:
        """The compute capability as text."""
        return text(self.capability)


CARDS = {
    card.capability: card
    for card in (
        Card((8, 0), "A100, A30", 166_912, 108),
        Card((8, 6), "RTX 30, A10, A40, RTX A6000", 101_376, 82),
        Card((8, 9), "RTX 40, L4, L40S, RTX 6000 Ada", 101_376, 128, float8=True),
        Card((9, 0), "H100, H200, GH200", 232_448, 132, "wgmma", True, True, True, True),
        Card((10, 0), "B200, GB200", 232_448, 148, "tcgen05", True, True, True),
        Card((12, 0), "RTX 50, RTX PRO 6000 Blackwell", 101_376, 170, "mma.sync", True, True, True),
    )
}
"""The cards that kernels are compiled for, by compute capability."""

NEEDED = min(CARDS)
"""The least compute capability."""

HOPPER = CARDS[9, 0]

PORTABLE = CARDS[10, 0]
"""A card for choices without a GPU, and for Triton's interpreter: the largest one without Hopper's own kernels."""

NO_MATRIX_UNIT = "Triton has no matrix unit for bfloat16 there"


def text(capability: Capability) -> str:
    """Return ``capability`` as NVIDIA writes it."""
    return "{}.{}".format(*capability)


def card_of(capability: Capability) -> Card | None:
    """Return the card of ``capability``, or of the next lower minor number of its generation.

    Return None for a generation that the table lacks.
    """
    known = [each for each in CARDS if each[0] == capability[0] and each <= capability]
    return CARDS[max(known)] if known else None


def unknown(capability: Capability) -> str | None:
    """Return the reason why no kernel runs on cards of ``capability``, or None."""
    if capability < NEEDED:
        why = f": {NO_MATRIX_UNIT}" if capability >= (7, 0) else ""
        return f"the kernels need {text(NEEDED)} or later{why}"
    if card_of(capability) is None:
        return f"the kernels were compiled for {', '.join(map(text, CARDS))} alone"
    return None


def experience(capability: Capability) -> str:
    """Say whether kernels ran on cards of ``capability``, or were only compiled for them."""
    card = card_of(capability)
    assert card is not None
    if card.capability != capability:
        return f"kernels were neither run nor compiled for {text(capability)}; it is treated as {card.version}"
    return (
        "kernels ran on this kind of card" if card.ran else "kernels were compiled for this card and never ran on one"
    )


def refused(card: Card, what: str) -> str:
    """Return why ``card`` cannot compute ``what`` in e4m3."""
    return (
        f"{what} is not supported on compute capability {card.version}: its instructions for float8 (e4m3) begin with "
        "8.9; int4 and int8 weights and a cache in fp8_e5m2 are supported"
    )
