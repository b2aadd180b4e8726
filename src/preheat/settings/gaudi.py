"""Options of Gaudi alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from preheat.options.options import option

BATCH_SOFTMAX = ("wsum", "amax", "head_amax", "wsum_head_amax")
"""Softmax variants of vLLM on Gaudi that depend on a whole batch."""

_gaudi = partial(option, group="Gaudi")


@dataclass(frozen=True, kw_only=True)
class GaudiSettings:
    """Options of the group Gaudi."""

    lazy_collectives: bool | None = _gaudi(
        None,
        "Collectives within lazy graphs; several cards with HPU Graphs need them.",
        env="PT_HPU_ENABLE_LAZY_COLLECTIVES",
        default_text="the bridge's",
    )
    disable_tensor_cache: bool | None = _gaudi(
        None,
        "Do not keep the intermediate results of graphs; false takes more memory for each graph.",
        env="PT_HPUGRAPH_DISABLE_TENSOR_CACHE",
        default_text="true",
    )
    metrics_gc_details: bool | None = _gaudi(
        None,
        "Name the compiled recipe in cold events.",
        env="PT_HPU_METRICS_GC_DETAILS",
        default_text="the bridge's",
    )
    pa_softmax_impl: str | None = _gaudi(
        None,
        "Softmax of attention over the cache: both choices subtract each row's own maximum.",
        env="VLLM_PA_SOFTMAX_IMPL",
        choices=("index_reduce", "scatter_reduce", *BATCH_SOFTMAX),
        later=dict.fromkeys(
            BATCH_SOFTMAX, "its maximum is taken over rows of other requests, and bits would depend on them"
        ),
        default_text="index_reduce",
    )
    use_fake_hpu: bool = _gaudi(
        False, "Run on a fake Gaudi, for tests; its package must be installed.", env="VLLM_USE_FAKE_HPU"
    )
