"""The fake of ``habana_frameworks.torch.core``."""

from habana_frameworks.simulator import DEVICE


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """End the graph that operations have accumulated: it is looked up, compiled if it is new, and launched."""
    DEVICE.mark_step()
