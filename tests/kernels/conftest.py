"""Tests in this folder run Triton kernels in its interpreter, on the CPU: no GPU is needed.

Triton looks once, when it is imported, whether it shall interpret, and so do the kernels. These tests therefore have
a process to themselves: a run of this folder alone is one, and in any other run tests/meta/test_kernels.py starts one.
"""

import importlib.util
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_configure(config):
    asked = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    if not all(path.is_relative_to(FOLDER) for path in asked):
        return
    os.environ["TRITON_INTERPRET"] = "1"
    # numpy warns of sums that overflow or have no value: as on a device, padding rows compute with leftovers
    config.addinivalue_line(
        "filterwarnings", r"ignore:(overflow|invalid value|divide by zero|All-NaN slice) encountered:RuntimeWarning"
    )
    if importlib.util.find_spec("triton"):
        from tests.kernels.interpreter import mend

        mend()


def pytest_ignore_collect(collection_path):
    return True if os.environ.get("TRITON_INTERPRET") != "1" and collection_path.name.startswith("test_") else None


class Skipped(pytest.Module):
    def collect(self):
        pytest.skip(why_not(), allow_module_level=True)


def why_not():
    """Return why no file of this folder can run in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: it exists for Linux alone"
    if os.environ.get("TRITON_INTERPRET") != "1":  # files named one by one are not ignored
        return "Triton does not interpret beside other tests: run files of tests/kernels alone"
    return None


def pytest_pycollect_makemodule(module_path, parent):
    return Skipped.from_parent(parent, path=module_path) if why_not() else None
