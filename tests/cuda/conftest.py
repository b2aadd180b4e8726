"""Tests in this folder need an NVIDIA GPU, or two of one host; elsewhere they are skipped, and say so.

``pytest tests/cuda -m two_gpus`` runs all tests of several GPUs.
"""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    if mine:
        import torch

        for item in mine:
            item.add_marker("cuda")
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
            elif item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
                item.add_marker(pytest.mark.skip(reason="needs two NVIDIA GPUs"))
