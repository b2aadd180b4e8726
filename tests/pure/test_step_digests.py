"""Digests of steps: proofs get them many steps together, each in the order of its sequence's tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from preheat.core import Request, SamplingParams
from preheat.frontend.receipt import TOGETHER, Proof, StepDigests, packed, unpacked
from preheat.utils.contract import Contract

IDS = range(5)


def proofs_of(ids: range) -> dict[int, Proof]:
    return {id: Proof(Request(id, [1], SamplingParams(), 0, 4), Contract()) for id in ids}


@given(
    st.lists(st.tuples(st.lists(st.sampled_from(IDS), max_size=6), st.integers(1, 3), st.none() | st.sampled_from(IDS)))
)
def test_proofs_get_what_appends_would_give(runs: list[tuple[list[int], int, int | None]]) -> None:
    proofs, number = proofs_of(IDS[:-1]), 0  # the last sequence wants no receipt
    expected = {id: list[int]() for id in proofs}
    live = dict(proofs)
    steps = StepDigests(live.get)
    for ids, count, ended in runs:
        for _ in range(count):
            steps.add([*ids], packed(range(number, number + len(ids))))
            for at, id in enumerate(ids, number):
                if id in live:
                    expected[id].append(at)
            number += len(ids)
        if ended in live:
            steps.give()
            del live[ended]
    steps.give()
    assert {id: [*unpacked(bytes(proof.digests))] for id, proof in proofs.items()} == expected


def test_steps_wait_for_others_but_not_for_ever() -> None:
    proofs = proofs_of(IDS)
    steps = StepDigests(proofs.get)
    for number in range(TOGETHER):
        steps.add([1, 3], packed([number, -number]))
    assert not proofs[3].digests
    steps.add([1, 3], packed([7, 8]))
    assert unpacked(bytes(proofs[3].digests)) == tuple(range(0, -TOGETHER, -1))
    steps.give()
    assert proofs[1].digests_of([0] * TOGETHER) == packed(range(TOGETHER))  # the answer ended within the last step
    assert len(proofs[1].digests) == 8 * TOGETHER + 8
