"""torch's threads beside the threads of compiled functions.

A thread of torch spins for some milliseconds after each operation. The threads of compiled functions would then wait
for a processor, so torch has one thread while functions run.
"""

from __future__ import annotations

import torch

_taken: int | None = None  # torch's threads before :func:`leave_one_thread`


def leave_one_thread() -> None:
    """Leave torch one thread in this process."""
    global _taken  # noqa: PLW0603 - torch's number of threads belongs to the process, too
    if torch.get_num_threads() > 1:
        _taken = torch.get_num_threads()
        torch.set_num_threads(1)


def give_back_threads() -> None:
    """Give torch the threads that :func:`leave_one_thread` took, for an engine without functions."""
    global _taken  # noqa: PLW0603
    if _taken is not None and torch.get_num_threads() == 1:
        torch.set_num_threads(_taken)
    _taken = None
