"""The part of a model on one stage of a pipeline.

It is a range of layers, as a spec. No torch here. The first stage has the embeddings, the last one the final norm and
the output head. A stage's final norm is the input norm of the next stage's first layer. So a stage hands on the same
state that one engine computes between these layers. The state is the norm of the residual stream, and the stream
itself, both in the model's dtype.
"""

from __future__ import annotations

from dataclasses import replace

from preheat.errors import ModelError
from preheat.model.specs import ModelSpec


def stage_of(spec: ModelSpec, number: int, stages: int) -> ModelSpec:
    """Return the part of ``spec`` on stage ``number`` of ``stages``.

    Earlier stages have one more layer where layers do not divide evenly, so no stage's KV cache is larger than the
    first one's. Raises ModelError for more stages than layers.
    """
    if stages == 1:
        return spec
    if spec.inputs is not None or any(layer.attention.source is not None for layer in spec.layers):
        raise ModelError(
            "a stage has no inputs of each layer, and no keys of layers on another stage: leave "
            "--pipeline-parallel-size out",
            param="pipeline_parallel_size",
        )
    count = len(spec.layers)
    if stages > count:
        raise ModelError(
            f"the model has {count} layers: lower --pipeline-parallel-size to {count} or less",
            param="pipeline_parallel_size",
        )
    first, end = (-(-at * count // stages) for at in (number, number + 1))
    begins, ends = number == 0, number == stages - 1
    return replace(
        spec,
        layers=spec.layers[first:end],
        final_norm=spec.final_norm if ends else spec.layers[end].input_norm,
        positions=spec.positions if begins else None,
        elsewhere=("embedding",) * (not begins and not (ends and spec.tied)) + ("head",) * (not ends),
    )
