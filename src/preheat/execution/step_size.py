"""What a step needs, in the plan's words."""

from __future__ import annotations

from preheat.core import Schedule
from preheat.plan.buckets import StepSize
from preheat.schedule.slots import Slots


def step_size_of(schedule: Schedule, slots: Slots, policy: str) -> StepSize:
    """The need of ``schedule`` under bucketing ``policy``: a step of decoding rows only, or with prompts in it."""
    rows, tokens = schedule.rows, schedule.tokens
    if schedule.num_decode < rows:
        if policy == "unified":
            return StepSize("mixed", rows, tokens)
        return StepSize("prompt", rows, tokens, longest=int(schedule.extend.max()))
    if policy == "unified":
        return StepSize("decode", rows, tokens)
    longest = int(schedule.ends.max())
    return StepSize("decode", rows, tokens, longest=longest, blocks=int(slots.num_blocks[schedule.slots].sum()))
