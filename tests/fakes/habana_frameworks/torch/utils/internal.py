"""The fake of ``habana_frameworks.torch.utils.internal``."""

import os


def is_lazy() -> bool:
    """Return whether the bridge accumulates operations.

    The real bridge reads the variable once, when it is loaded.
    """
    return os.environ.get("PT_HPU_LAZY_MODE", "1") == "1"
