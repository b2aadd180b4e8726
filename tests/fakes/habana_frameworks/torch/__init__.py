"""The fake of the PyTorch bridge: the part of its interface that preheat uses."""

from habana_frameworks.simulator import plug_in
from habana_frameworks.torch import core, hpu, utils

__all__ = ["core", "hpu", "utils"]

plug_in()
