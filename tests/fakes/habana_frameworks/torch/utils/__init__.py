"""The fake of ``habana_frameworks.torch.utils``."""

from habana_frameworks.torch.utils import internal

__all__ = ["internal"]
