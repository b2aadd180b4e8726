"""The fake of ``habana_frameworks.torch.core``."""

from habana_frameworks.simulator import DEVICE


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """End the graph of accumulated operations: look it up, compile it if it is new, and launch it."""
    DEVICE.mark_step()
