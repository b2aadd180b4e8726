"""A test leaves as many threads as it found, whatever it or an engine of its own has set."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
