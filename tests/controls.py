"""Controls: a law whose test must fail, because a fault is planted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

OF_CI = ("CI", "BUILD_NUMBER")
"""Variables by which pytest knows that it runs for CI."""


@contextmanager
def fails(match: str | None = None) -> Iterator[None]:
    """Expect a failed assertion; ``match`` is a pattern of its message.

    For CI, pytest writes the difference of two lists in full. It took half a minute for 60 lists of 8 numbers, and
    nobody reads the message of a failure that is expected.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in OF_CI:
            patch.delenv(name, raising=False)
        with pytest.raises(AssertionError, match=match):
            yield
