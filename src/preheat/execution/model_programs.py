"""The two programs of a step, over static buffers.

``forward(bucket)`` runs all tokens up to the last attention and writes the cache's new keys and values. ``sample(size,
level)`` takes the sampled tokens through the rest and draws. ``forward`` may be cut into parts of a few layers; each
part leaves the input of the next one in static buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.adapters import AdapterStep
from preheat.backends.base.attention import StepInputs
from preheat.backends.base.backend import Backend
from preheat.backends.base.layers import LayerRows
from preheat.backends.base.sampling import Sampler
from preheat.execution.buffers import StepBuffers
from preheat.execution.encoder import Encoder
from preheat.execution.features import Features, FeaturesElsewhere
from preheat.execution.grid_encoder import GridEncoder
from preheat.execution.inference import in_inference_mode
from preheat.execution.kv_cache import BlockCache, KVCache
from preheat.model.adapters import ModelAdapterSlots
from preheat.model.decoder import Attended, Decoder, Deep, Tap
from preheat.plan.buckets import Bucket
from preheat.plan.programs import Part, Program


class ModelPrograms:
    """The programs of one model on one device: they are built, captured and run.

    A graph holds ``layers_per_graph`` layers, or all. ``encoder`` is for models that see images, ``adapters`` for
    models with adapter slots.
    """

    @in_inference_mode  # all tensors of a step too: compiled regions would tell them apart
    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        cache: KVCache,
        sampler: Sampler,
        buffers: StepBuffers,
        *,
        encoder: Encoder | GridEncoder | None = None,
        adapters: ModelAdapterSlots | None = None,
        layers_per_graph: int | None = None,
    ) -> None:
        self.backend, self.decoder, self.cache = backend, decoder, cache
        self.sampler, self.buffers, self.attention = sampler, buffers, buffers.attention
        self.encoder, self._images = encoder, encoder.embeddings if encoder else None
        self._deep = encoder.deep if encoder else None
        self.adapters = adapters
        spec, limits, device = decoder.spec, buffers.limits, backend.device
        tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs, backend.facts.min_tokens)
        self._residual = torch.zeros(tokens, spec.hidden_size, dtype=decoder.dtype, device=device)
        self._normed = torch.zeros_like(self._residual)
        self._logits = torch.zeros(limits.max_sampled, spec.output_size, dtype=decoder.dtype, device=device)
        self._layers = layers = range(len(spec.layers))
        step = layers_per_graph or len(layers)
        self._parts = [layers[first : first + step] for first in layers[::step]]
        self._kinds = list(spec.first_of_kinds)
        self._attended = torch.zeros(tokens, spec.layers[-1].attention.attended, dtype=decoder.dtype, device=device)
        own, self._inputs = spec.inputs, None
        if own is not None:
            self._inputs = torch.zeros(tokens, len(layers), own.size, dtype=decoder.dtype, device=device)
        self._states = self.states  # states of the last step's tokens
        self._first_tokens = functools.cache(self._views)
        self._parts_of = functools.cache(self._cut)
        self._first_logits = functools.cache(lambda size: self._logits[:size])
        self.other_caches: list[BlockCache] = []  # caches of the same blocks: a draft model's
        self.features: Features | FeaturesElsewhere | None = None  # for a head that drafts
        self.forwards = backend.programs(self._forward_part, self.attention)
        self.samples = backend.programs(self._sample)
        self._heads = backend.programs(self._head)  # for prompt logprobs; never captured

    @property
    def states(self) -> Attended:
        """Static buffers with the states of a step's tokens.

        They have room for the largest step.
        """
        return Attended(self._attended, self._residual, None if self._inputs is None else self._inputs[:, -1])

    def keep_features(self, features: Features) -> None:
        """Keep ``features`` of all tokens from now on."""
        self.features = features

    @in_inference_mode
    def compile(self, programs: Iterable[Program[Any]], threads: int, layers: Iterable[LayerRows] = ()) -> None:
        """Build the kernels of ``programs`` and of ``layers``, many at a time."""
        building = self.backend.compiling(threads, layers)
        if building is None:
            return
        with building:
            for program in dict.fromkeys(programs):
                match program.kind:
                    case _ if program.draft:
                        continue  # the draft model's executor builds its kernels
                    case "forward":
                        self._use("tokens", program.adapted)
                        self._forward(program.size, self._kinds)
                    case "sampler" if program.size:
                        self._sample(program)
                    case "encoder" if self.encoder is not None:
                        self.encoder.compile(program)
            self.sampler.compile(self._logits)
        self.sampler.last_token.zero_()  # ranks have copied the result of a kernel that was built and did not run

    def build_function(self, function: str, layer: int | None) -> str:
        """Compile a function of the backend, unless it is there; see :meth:`LayerFunctions.build`.

        Return its name in the code, or nothing where no layer is a function.
        """
        if self.decoder.functions is None:
            return ""
        if function == "draw":
            self.sampler.compile(self._logits)
            return function
        return self.decoder.functions.build(function, layer)

    def is_captured(self, program: Program[Bucket]) -> bool:
        """Whether graphs run ``program``."""
        return all(part in self.forwards for part in self._parts_of(program))

    @in_inference_mode
    def capture(self, program: Program[Any]) -> None:
        """Capture ``program`` as graphs, if there are none.

        Its kernels must have run before.
        """
        match program.kind:
            case "forward":
                self._capture_forward(program)
            case "sampler" if program not in self.samples:
                self._capture_sampler(program)
            case "encoder" if self.encoder is not None and program not in self.encoder.programs:
                self.encoder.programs.capture(program)

    def _capture_forward(self, program: Program[Bucket]) -> None:
        """Capture all parts as graphs, or none."""
        parts = self._parts_of(program)
        try:
            for part in parts:
                self.forwards.capture(part)
        except BaseException:
            for part in parts:
                self.forwards.forget(part)
            raise

    def _capture_sampler(self, program: Program[int]) -> None:
        """Capture a graph, and run it on padding."""
        self.samples.capture(program)
        self.buffers.clear()
        self.sampler.clear()
        if self.adapters is not None:
            self.adapters.describe(0, "sampled", np.empty(0, np.int32))
        self.samples.run(program)

    def _cut(self, program: Program[Bucket]) -> list[Part]:
        """Return the parts of a forward program."""
        if not self.backend.facts.pads_context:
            program = program._replace(size=program.size.without_context())
        return [Part(program, layers) for layers in self._parts]

    def _forward_part(self, part: Part) -> Attended:
        self._use("tokens", part.program.adapted)
        return self._forward(part.program.size, part.layers)

    def _use(self, step: AdapterStep, adapted: bool) -> None:
        """Tell linear layers the kind of their next rows.

        ``adapted``: some rows have adapters.
        """
        if self.adapters is not None:
            self.adapters.use(step if adapted else None)

    def _forward(self, bucket: Bucket, layers: Sequence[int], tap: Tap | None = None) -> Attended:
        """Run ``layers`` of a step.

        They begin with its tokens, or with the states that earlier layers left. Return the states of the tokens; they
        are complete only after the part with the last layer.
        """
        decoder, inputs, begins = self.decoder, self.buffers.inputs(bucket), layers[0] == 0
        tokens = inputs.tokens.shape[0]
        residual, normed, out = self._first_tokens(tokens)
        if begins and decoder.turns is not None and inputs.places is not None:
            decoder.turns.turn(inputs.places)
        before = self._begin(inputs, residual) if begins else normed
        attend, keep = self.attention.attend(inputs, out), self.features.keep if self.features else None
        own, deep = None if self._inputs is None else self._inputs[:tokens], self._adder(inputs)
        after = decoder.layers(
            residual, attend, layers, given=before, inputs=own, eager=tap is not None, tap=tap or keep, deep=deep
        )
        last = None if own is None else own[:, -1]
        if layers[-1] == self._layers[-1]:
            found = Attended(after, residual, last)
            if self.features is not None and tap is None:
                self._store(self.features, found)
            return found
        normed.copy_(after)
        return Attended(out, residual, last)

    def _store(self, features: Features | FeaturesElsewhere, states: Attended) -> None:
        """Store the ``features`` of a step; its ``states`` stay as they are, for the rows that sample."""
        features.store(len(states.out), lambda: self.decoder.finish(states.map(torch.clone)))

    def _adder(self, inputs: StepInputs) -> Deep | None:
        """Return the adder of deep embeddings; None for a step without images.

        Decoding rows have no image. Only a host looks at the tokens: a graph serves all steps.
        """
        if self._deep is None or inputs.width:
            return None
        if self.backend.facts.on_host and not bool((inputs.tokens < -1).any()):
            return None
        return self._deep.adder(inputs.tokens)

    def _views(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the static buffers of the first ``tokens`` tokens: the residual stream, its norm, and attention."""
        return self._residual[:tokens], self._normed[:tokens], self._attended[:tokens]

    def _begin(self, inputs: StepInputs, residual: Tensor) -> Tensor | None:
        """Fill ``residual`` [tokens, hidden] with the input of the residual stream.

        Return the first layer's input, None if it is the norm of ``residual``.
        """
        weights, scale = self.decoder.weights, self.decoder.spec.embedding.scale
        table, last_token = weights.embedding, self.sampler.last_token
        self.backend.embed(
            inputs, last_token, table, residual, scale=scale, positions=weights.positions, images=self._images,
            types=weights.types,
        )  # fmt: skip
        if self.adapters is not None:
            self.adapters.embed(inputs, last_token, residual)
        if weights.inputs is not None and self._inputs is not None and self.decoder.spec.inputs is not None:
            own = self._inputs[: len(residual)]
            rows, scale = own.flatten(1), self.decoder.spec.inputs.table.scale
            self.backend.embed(inputs, last_token, weights.inputs.table, rows, scale=scale)
            weights.inputs(residual, rows)
        return None

    def _sample(self, program: Program[int]) -> Tensor:
        """Draw, and return the logits that were drawn from."""
        assert program.level is not None, f"{program} draws nothing"
        logits = self._head(program)
        self.sampler.sample(program.level, logits)
        return logits

    def _head(self, program: Program[int]) -> Tensor:
        """Return the logits of the first ``program.size`` sampled tokens."""
        hidden = self._hidden(program.size, adapted=program.adapted)
        return self.decoder.weights.head(hidden, out=self._first_logits(program.size))

    def _hidden(self, size: int, tap: Tap | None = None, *, adapted: bool = False) -> Tensor:
        """Return the hidden states of the first ``size`` sampled tokens."""
        self._use("sampled", adapted)
        index, functions = self.buffers.first_sampled(size), self.decoder.functions
        if functions is not None and tap is None:
            return functions.take(self._states.out, self._states.residual, index)
        sampled = self._states.map(lambda states: self.backend.take_rows(states, index))
        return self.decoder.finish(sampled, eager=tap is not None, tap=tap)
