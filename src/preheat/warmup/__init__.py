"""Warm-up: runs the plan through the serving path, records what became of it, and watches what runs afterwards."""

from preheat.warmup.determinism import get_determinism_warmup_iterations, run_determinism_warmup

__all__ = ["get_determinism_warmup_iterations", "run_determinism_warmup"]
