"""Names of vLLM's package without a meaning here; see :class:`preheat.utils.refused.Refused`."""

from __future__ import annotations

from preheat.utils.refused import Refused

ModelRegistry = Refused("ModelRegistry", "no code of a model is ever run: docs/adding.md says how a family is added")
initialize_ray_cluster = Refused(
    "initialize_ray_cluster", "an engine with distributed_executor_backend='ray' joins its cluster itself: docs/ray.md"
)
