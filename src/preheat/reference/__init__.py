"""The model as trainers need it: a ``torch.nn.Module`` with gradients whose log-probabilities are the engine's.

    from preheat import reference

    model = reference.load("path/to/checkpoint", dtype="bfloat16")
    model.logprobs(token_ids).sum().backward()

It is the engine's own decoder, over the same specs, weights and operations; docs/trainers.md says what its bits
depend on. On CPUs only.
"""

from __future__ import annotations

from preheat.reference.model import ReferenceModel, load

__all__ = ["ReferenceModel", "load"]
