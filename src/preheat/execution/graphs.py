"""The keys of forward programs."""

from __future__ import annotations

from typing import NamedTuple

from preheat.plan.buckets import Bucket


class Part(NamedTuple):
    """The program of some ``layers`` of a forward step of ``bucket``. The first part begins with the tokens, any other
    where the one before it ended. ``adapted``: some rows have adapters.
    """

    bucket: Bucket
    layers: range
    adapted: bool = False
