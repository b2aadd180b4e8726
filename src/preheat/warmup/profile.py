"""The profiling run: the largest step, through the real model.

It runs before memory is divided between the cache and graphs. Source: vLLM on Gaudi, which runs a forward pass on dummy
data for the same purpose. Here a trial engine runs, so that its static buffers are measured too, and nothing of it
stays.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.core import Level
from preheat.errors import SettingsError
from preheat.execution.build import Build, build
from preheat.model.loader import LoadedModel
from preheat.plan.cache_items import SwapItem
from preheat.plan.plan import Plan
from preheat.plan.programs import Program
from preheat.plan.sampler_settings import SAMPLER_SETTINGS
from preheat.plan.step_items import EncoderItem
from preheat.settings import Settings
from preheat.warmup.dummy_steps import DummySteps
from preheat.warmup.run import OUT_OF_MEMORY
from preheat.warmup.trial import trial_engine

ALL_AT_ONCE = "everything"
"""The sampler setting with everything that a request can ask for."""


def profile_run(  # noqa: PLR0917 - what an engine is built of
    settings: Settings,
    backend: Backend,
    model: LoadedModel,
    plan: Plan,
    first: Callable[[Tensor], None],
    build: Build = build,
) -> int:
    """Return the most bytes that a step of ``plan`` needs.

    They are the engine's buffers and the most working memory of a step, without the weights and the cache. The steps
    are the largest forward step, sampling the most rows, swapping the most blocks and encoding the most images. Nothing
    is captured or compiled whole, since that would need no more. ``first`` is called with the logits of the process's
    first step (:meth:`DummySteps.logits`). Raises SettingsError if a step does not fit.
    """
    try:
        return backend.peak_memory(lambda: _run(settings, backend, model, plan, first, build))
    except OUT_OF_MEMORY as error:
        raise SettingsError(
            f"memory ran out in the profiling run, a step of {plan.largest}: lower --max-num-batched-tokens or "
            f"--max-num-seqs, or free memory on the device ({error})",
            param="max_num_batched_tokens",
        ) from None


def _run(  # noqa: PLR0917 - as profile_run
    settings: Settings, backend: Backend, model: LoadedModel, plan: Plan, first: Callable[[Tensor], None], build: Build
) -> None:
    first(_steps(settings, backend, model, plan, build))
    gc.collect()  # the engine's parts refer to each other


def _steps(settings: Settings, backend: Backend, model: LoadedModel, plan: Plan, build: Build) -> Tensor:
    packer, executor = trial_engine(settings, backend, model, plan, build)
    rows = plan.sampler_sizes[-1]
    params = SAMPLER_SETTINGS[ALL_AT_ONCE]
    largest = next((item for item in plan.items if isinstance(item, EncoderItem)), None)  # they come largest first
    adapted = (False,) if executor.adapters is None else (False, True)
    steps = DummySteps(plan, packer, executor)
    first = steps.logits()
    for each in adapted:
        steps.run(Program("forward", plan.largest, adapted=each), executor.execute)
        steps.sample(Program("sampler", rows, Level.of(params), each), params, 1)
    pairs = max((item.pairs for item in plan.items if isinstance(item, SwapItem)), default=0)
    if pairs:
        steps.swap(pairs)
    if largest:
        steps.encode(largest.images, largest.cells)
    backend.synchronize()
    return first
