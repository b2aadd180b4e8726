"""The fake of the module that registers ``hpu_backend`` with torch.compile.

Each graph given to it is a recipe.
"""

from typing import Any

import torch
from torch._dynamo import register_backend

from habana_frameworks.simulator import DEVICE


@register_backend(name="hpu_backend")
def hpu_backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Run the traced operations one by one."""
    DEVICE.count("graph_compilation", f"a region of {len(graph.graph.nodes)} operations")
    return graph.forward
