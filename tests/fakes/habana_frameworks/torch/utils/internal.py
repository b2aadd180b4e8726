"""The fake of ``habana_frameworks.torch.utils.internal``."""

import os


def is_lazy() -> bool:
    """Whether the bridge accumulates operations. The real one reads the variable once, when it is loaded."""
    return os.environ.get("PT_HPU_LAZY_MODE", "1") == "1"
