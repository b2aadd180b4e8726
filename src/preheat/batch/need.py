"""What a step needs, in the plan's words."""

from __future__ import annotations

from preheat.core import Schedule
from preheat.plan.shape import Need
from preheat.schedule.slots import Slots


def need_of(schedule: Schedule, slots: Slots, policy: str) -> Need:
    """The need of ``schedule`` under bucketing ``policy``: a step of decoding rows only, or with prompts in it."""
    rows, tokens = schedule.rows, schedule.tokens
    if schedule.num_decode < rows:
        if policy == "unified":
            return Need("mixed", rows, tokens)
        return Need("prompt", rows, tokens, longest=int(schedule.extend.max()))
    if policy == "unified":
        return Need("decode", rows, tokens)
    longest = int(schedule.ends.max())
    return Need("decode", rows, tokens, longest=longest, blocks=int(slots.num_blocks[schedule.slots].sum()))
