"""Warm-up of the plan through the serving path.

It records the outcomes, and watches later steps.
"""

from preheat.warmup.determinism import get_determinism_warmup_iterations, run_determinism_warmup

__all__ = ["get_determinism_warmup_iterations", "run_determinism_warmup"]
