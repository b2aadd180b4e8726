"""Names of vLLM's package without a meaning here; see :class:`preheat.utils.refused.Refused`."""

from __future__ import annotations

from preheat.utils.refused import Refused

ModelRegistry = Refused("ModelRegistry", "no code of a model is ever run: see docs/adding.md to add a model family")
initialize_ray_cluster = Refused(
    "initialize_ray_cluster",
    "an engine with distributed_executor_backend='ray' joins its cluster itself, see docs/ray.md",
)
