"""The size of a scheduled step, in the plan's terms."""

from __future__ import annotations

from preheat.core import Schedule
from preheat.plan.buckets import StepSize
from preheat.plan.plan import Plan
from preheat.schedule.slots import Slots


def step_size_of(schedule: Schedule, slots: Slots, plan: Plan) -> StepSize:
    """Return the size of ``schedule`` under the ``plan``'s policy.

    A step has decoding rows only, some of them with drafts, or it has prompts.
    """
    rows, tokens, policy = schedule.rows, schedule.tokens, plan.policy
    if schedule.verifies and plan.verifies:
        return StepSize("verify", rows, tokens, longest=int(schedule.extend.max()))
    decodes = schedule.num_decode == rows
    if not policy.pads_length:
        return policy.step_size(rows, tokens, decodes=decodes)
    longest = int((schedule.ends if decodes else schedule.extend).max())
    blocks = int(slots.num_blocks[schedule.slots].sum())
    return policy.step_size(rows, tokens, decodes=decodes, longest=longest, blocks=blocks)
