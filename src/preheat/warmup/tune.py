"""``preheat tune``: measure the fastest kernel for each layer.

Linear layers and experts are measured, without weights; of several ranks those of the first one, on one device. Boots
and requests measure nothing: they read the table that tuning leaves.
"""

from __future__ import annotations

import math

from preheat.backends.base.backend import TuneRequest
from preheat.backends.registry import pick_backend
from preheat.model.config import resolve_dtype
from preheat.model.first_rank import spec_of_first_rank
from preheat.model.values import values_of
from preheat.ops.values import Experts, Matmul
from preheat.plan.modes import resolve, step_limits
from preheat.plan.of_model import for_model
from preheat.settings import Settings
from preheat.utils.caches import cache_root


def tune_model(settings: Settings, output: str | None, seconds: float | None) -> str:
    """Measure the layers of ``settings.model``.

    Returns where the table is: in ``output``, or in the boots' folder. Ends after about ``seconds`` with the results so
    far. Raises SettingsError where there is nothing to choose from, or no place for the table.
    """
    backend, folder = pick_backend(settings.device), cache_root(settings)
    backend.prepare(settings, resolve(backend.facts, settings), folder)
    spec = spec_of_first_rank(settings, backend.facts)
    dtype, _ = resolve_dtype(settings.dtype, spec.dtype, backend.supports_bfloat16())
    values = [value for path, value in values_of(spec, dtype) if not path.startswith("vision.")]
    *layers, head = (value for value in values if isinstance(value, Matmul))
    sequences, tokens = step_limits(for_model(settings, backend.facts, spec), backend.facts)
    return backend.tune(
        TuneRequest(
            layers=layers,
            experts=[value for value in values if isinstance(value, Experts)],
            head=head,
            max_rows=tokens,
            max_head_rows=sequences,
            seconds=math.inf if seconds is None else seconds,
            output=output,
            folder=folder,
        )
    )
