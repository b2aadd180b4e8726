"""The model for trainers: a ``torch.nn.Module`` with gradients and the engine's log-probabilities.

    from preheat import reference

    model = reference.load("path/to/checkpoint", dtype="bfloat16")
    model.logprobs(token_ids).sum().backward()

It is the engine's own decoder, over the same specs, weights and operations. It runs on CPUs only. docs/trainers.md
lists everything that its bits depend on.
"""

from __future__ import annotations

from preheat.reference.model import ReferenceModel, load

__all__ = ["ReferenceModel", "load"]
