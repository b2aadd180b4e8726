"""An end for children of benchmarks: they are stopped while others run, and would stay so without their parent."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Linux' number of the call that asks for a signal at the end of the parent."""


def end_with_parent() -> None:
    """Have Linux kill this process, stopped or not, when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
