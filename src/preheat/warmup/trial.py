"""A trial engine: the whole engine around a cache of two blocks, before memory is divided.

Its static buffers are those of the engine that serves. Nothing of it stays but the kernels that it compiled.
"""

from __future__ import annotations

import gc
import os

from preheat.backends.base.backend import Backend
from preheat.configs.structured import why_none
from preheat.execution.build import Assembly, Build, layer_rows
from preheat.execution.executor import Executor
from preheat.execution.input_batch import Packer
from preheat.model.loader import LoadedModel
from preheat.plan.plan import Plan
from preheat.schedule.slots import Slots
from preheat.settings import Settings

CACHE_BLOCKS = 2
"""A dummy step reads and writes the pad block alone."""


def trial_engine(
    settings: Settings, backend: Backend, model: LoadedModel, plan: Plan, build: Build
) -> tuple[Packer, Executor]:
    """Return packer and executor for ``plan`` without most of its cache.

    Rows may have a grammar if the settings allow grammars: the tokenizer may still be read.
    """
    limits = plan.limits
    how = Assembly("eager", num_blocks=CACHE_BLOCKS, masked=not why_none(settings))
    slots = Slots(limits.max_num_seqs, limits.max_model_len, limits.block_size, len(limits.groups))
    return build(settings, backend, model, plan, slots, how=how)


def compile_kernels(settings: Settings, backend: Backend, model: LoadedModel, plan: Plan, build: Build) -> None:
    """Compile the kernels of all programs of ``plan`` in one go, and those that its layers are proven by."""
    programs = (plan.program_of(item.program) for item in plan.items if item.program)
    trial_engine(settings, backend, model, plan, build)[1].compile(
        programs, os.cpu_count() or 1, layer_rows(model, plan)
    )
    gc.collect()  # the engine's parts refer to each other
