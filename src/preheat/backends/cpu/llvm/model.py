"""The layers of a model as compiled functions, with the buffers that a step needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import chain
from operator import is_
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from preheat.backends.base.functions import LayerParts
from preheat.backends.base.layers import Linear, Norm
from preheat.backends.cpu.llvm import functions, job, sampler, targets
from preheat.backends.cpu.llvm.adapters import PanelAdapterRows
from preheat.backends.cpu.llvm.attend import queries_at_once, tokens_at_once
from preheat.backends.cpu.llvm.attention import LlvmAttention
from preheat.backends.cpu.llvm.embed import EMBEDS, TableRows, embeds
from preheat.backends.cpu.llvm.job import JOB_WORDS
from preheat.backends.cpu.llvm.kinds import COUNTERS, LAYER_FRAME, SPLIT, LayerKind, Product, RowNorm
from preheat.backends.cpu.llvm.layer import PanelLayer, floats
from preheat.backends.cpu.llvm.layer_kinds import experts_of, kind_of, packed_of, panels_of, routed_sizes
from preheat.backends.cpu.llvm.machine import Code, compile_code, compile_side_by_side
from preheat.backends.cpu.llvm.memory import zeros
from preheat.backends.cpu.llvm.packed import PackedNorm
from preheat.backends.cpu.llvm.team import Team
from preheat.limits import Limits
from preheat.utils.gc import paused

_FRAME_WORDS = 64
_X, _ATTENDED, _ROWS = 2, 3, 4  # words of a listed job
_TAKEN = LAYER_FRAME["taken"]
_WRITTEN: WeakKeyDictionary[PanelLayer, tuple[Any, tuple[str, ...]]] = WeakKeyDictionary()


class Functions:
    """The layers of a model, each a front and a back, with ``threads`` threads and room for ``rows`` rows.

    The linear layers among ``others`` become functions of their own, for any number of rows.
    The front goes from the residual stream to the output of attention, the back adds the rest of the layer to the
    stream. All activations are float32. Raises ModelError for a layer that has no function.
    """

    def __init__(
        self, layers: Sequence[LayerParts], final_norm: Norm, others: Sequence[object], limits: Limits, *,
        threads: int, folder: Path | None, rows: int,
    ) -> None:  # fmt: skip
        self._rows, self._columns, self._kept = rows, limits.max_blocks_per_seq, list[Tensor]()
        self._singles = list[np.ndarray]()  # the frames of products that run by themselves
        self._slots: list[object] = [experts_of(layer).slots for layer in layers if layer.routed is not None]
        self._kinds = [kind_of(layer, limits) for layer in layers]
        single = [each for each in others if isinstance(each, PanelLayer)]
        panels = [*(each for layer in layers for each in panels_of(layer).values()), *single]
        self._slots += [each.slots for each in panels]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(self._kinds))}
        alone = {how: number for number, how in enumerate(dict.fromkeys(layer.how for layer in single))}
        last = self._kinds[-1]
        self._sources = _written(panels[0], numbers, alone, packed_of(final_norm).how, last.heads * last.dim)
        self._names = [[f"{half}{numbers[kind]}" for half in ("front", "back")] for kind in self._kinds]
        self._threads, self._folder, self._draws = threads, folder, bool(single)
        self._adapters = next((layer.slots.rows for layer in panels if layer.slots is not None), PanelAdapterRows(rows))
        self._attended = torch.zeros(rows, max(kind.heads * kind.dim for kind in self._kinds))
        shrunk = [layer.how.shrunk for layer in panels]
        shrunk += [kind.visits * each.shrunk for kind in self._kinds for each in (kind.gate_up, kind.down)]
        self._buffers(rows, threads, max(shrunk))
        tables: dict[int, tuple[int, int]] = {}
        self._frames = [self._frame(layer, tables) for layer in layers]
        self._final(packed_of(final_norm), limits.max_sampled)
        self._jobs, self._ends = _list_of(2 * len(layers)).reshape(-1, 2, JOB_WORDS), _list_of(3)
        self._whole = _list_of(2 * len(layers) + 3)
        self._pointed: tuple[tuple[Tensor, ...], object] = (), None  # the tensors and the head of the whole list
        self._listed, self._ended, self._started = (each.ctypes.data for each in (self._jobs, self._ends, self._whole))
        self._heads, self._alone_names = (
            dict[Linear, tuple[str, int]](),
            [f"alone{number}" for number in alone.values()],
        )
        self._of_attended, self._of_hidden = cache(lambda n: self._attended[:n]), cache(lambda n: self._hidden[1, :n])
        for layer in single:
            layer.run = self._alone(layer, f"alone{alone[layer.how]}")
        causal = all(kind.causal for kind in self._kinds)
        self.attention = LlvmAttention(self._positions, self._tables, None if causal else self._row_ends)

    def _buffers(self, rows: int, threads: int, shrunk: int) -> None:
        kinds = self._kinds
        self._positions, self._tables, self._row_ends = (zeros(rows, np.int64) for _ in range(3))
        sizes = {
            "qkv": rows * max(kind.qkv.results for kind in kinds),
            "inner": rows * max(kind.visits * kind.down.inputs for kind in kinds),
            "normed": threads * rows * max(kind.hidden for kind in kinds),
            "added": rows * max((kind.hidden for kind in kinds if kind.o_norm or kind.down_norm), default=0),
            "scores": threads * SPLIT * max(queries_at_once(kind) * tokens_at_once(kind) for kind in kinds),
            "shrunk": rows * shrunk,
            **{name: rows * size for name, size in routed_sizes(kinds).items()},
        }
        self._arrays = {name: zeros(size, np.float32) for name, size in sizes.items()}
        visits, experts = (
            max(each)
            for each in zip(*((kind.visits, kind.routed.experts if kind.routed else 0) for kind in kinds), strict=True)
        )
        integers = dict.fromkeys(("chosen", "order", "visit_slots"), rows * visits)
        integers |= {"starts": experts + 2, "visited": experts + 1}
        self._arrays |= {name: zeros(size, np.int64) for name, size in integers.items()}
        self._arrays |= {"positions": self._positions, "tables": self._tables, "ends": self._row_ends}

    @cached_property
    def code(self) -> Code:
        """The machine code, compiled or read at its first use."""
        drawing = [sampler.source(targets.here())] if self._draws else []  # the sampler asks for it next
        sources = [*self._sources, *drawing]
        return Code(*compile_side_by_side(sources, self._folder, compile_code)[: len(self._sources)])

    @cached_property
    def _address(self) -> Callable[[str], int]:
        return cache(self.code.address)

    @cached_property
    def team(self) -> Team:
        """The threads that run the functions, and the lists of jobs."""
        kept = self._frames, self._last, self._singles, self._slots, self._arrays
        team = Team(self.code, self._threads, kept)
        for name, array in self._arrays.items():
            team.set(name, array.ctypes.data)
        for names, frame, words in zip(self._names, self._frames, self._jobs, strict=True):
            words[:, 0], words[:, 1] = [self._address(name) for name in names], frame.ctypes.data
        last, (stream, normed) = self._last.ctypes.data, (each.data_ptr() for each in self._hidden)
        self._ends[0] = self._address("take"), last, 0, 0, 0
        self._ends[1] = *self._jobs[-1, 1, :2], stream, self._taken_attended.data_ptr(), 0
        self._ends[2] = self._address("norm"), last, stream, normed, 0
        self._fill_whole()
        return team

    @cached_property
    def embed(self) -> TableRows:
        """The functions that embed tokens."""
        return TableRows(self.code)

    def build(self, function: str, layer: int | None = None) -> str:
        """See :class:`preheat.backends.base.functions.LayerFunctions`."""
        if layer is not None:
            function = self._names[layer][("front", "back").index(function)]
        for name in {"embed": EMBEDS, "alone": self._alone_names}.get(function, (function,)):
            self._address(name)
        return function

    def _final(self, norm: PackedNorm, rows: int) -> None:
        """List the jobs from the last layer's attention to the hidden states of at most ``rows`` sampled tokens."""
        kind, self._last = self._kinds[-1], zeros(_FRAME_WORDS, np.int64)
        attended, self._hidden = torch.zeros(rows, kind.heads * kind.dim), torch.zeros(2, rows, kind.hidden)
        stream = self._hidden[0].data_ptr()
        self._last[LAYER_FRAME["norm"]] = norm.numbers.data_ptr()
        self._last[LAYER_FRAME["taken_x"]], self._last[LAYER_FRAME["taken_attended"]] = stream, attended.data_ptr()
        self._taken_attended = attended  # written by every step

    def _fill_whole(self) -> None:
        """List a step's jobs: all layers, the hidden states of sampled tokens, and a head.

        :meth:`start` sets the words that differ between steps.
        """
        layers = self._jobs.reshape(-1, JOB_WORDS)[:-1]  # the last back goes on with the sampled tokens alone
        self._whole[:-1] = np.concatenate((layers, self._ends))
        self._whole[0, _ATTENDED] = self._attended.data_ptr()
        self._whole[-1, _X] = self._hidden[1].data_ptr()

    def _frame(self, layer: LayerParts, tables: dict[int, tuple[int, int]]) -> np.ndarray:
        """Return a layer's frame. ``tables``: the cosines and sines of known tables, by their identity."""
        frame, attention = zeros(_FRAME_WORDS, np.int64), layer.attention
        fields = [part.fields(name) for name, part in panels_of(layer).items()]
        if layer.routed is not None:
            fields.append(experts_of(layer).fields())
            if layer.routed.shared is not None and layer.routed.shared.gate is not None:
                frame[LAYER_FRAME["shared_gate"]] = layer.routed.shared.gate.data_ptr()
        for name, address in chain(*fields):
            frame[LAYER_FRAME[name]] = address
        norms = {"norm": layer.input_norm, "post_norm": layer.post_norm, "o_norm": layer.o_norm}
        for name, norm in (norms | {"down_norm": layer.down_norm}).items():
            if norm is not None:
                frame[LAYER_FRAME[name]] = packed_of(norm).numbers.data_ptr()
        if attention.qk_norm is not None:
            for name, head in (("q_norm", 0), ("k_norm", -1)):
                frame[LAYER_FRAME[name]] = packed_of(attention.qk_norm).numbers[head].data_ptr()
        for name, norm in zip(("q_norm", "k_norm"), layer.whole_qk_norm or (), strict=False):
            frame[LAYER_FRAME[name]] = packed_of(norm).numbers.data_ptr()
        if attention.growth is not None:
            frame[LAYER_FRAME["growth"]] = self._keep(floats(attention.growth))
        if attention.rope is not None and attention.by_token:
            assert attention.rope.dtype == torch.float32 and attention.rope.is_contiguous(), "functions read float32"
            half, address = attention.head_dim // 2, attention.rope.data_ptr()
            sines = address + 4 * (attention.head_dim + half)
            frame[LAYER_FRAME["cos"]], frame[LAYER_FRAME["sin"]] = address, sines
        elif attention.rope is not None:
            if id(attention.rope) not in tables:
                half, table = attention.head_dim // 2, attention.rope[:, :, 0]
                cos, sin = table[:, 0, :half], table[:, 1, half:]
                tables[id(attention.rope)] = self._keep(floats(cos)), self._keep(floats(sin))
            frame[LAYER_FRAME["cos"]], frame[LAYER_FRAME["sin"]] = tables[id(attention.rope)]
        if attention.alibi is not None:
            frame[LAYER_FRAME["slopes"]] = self._keep(floats(attention.alibi))
        if attention.sinks is not None:
            frame[LAYER_FRAME["sinks"]] = attention.sinks.data_ptr()
        if attention.distances is not None:
            frame[LAYER_FRAME["distances"]] = attention.distances.data_ptr()
        key, value = attention.kv_scales
        frame[LAYER_FRAME["scales"]] = self._keep(torch.tensor([attention.scale * key, key, value]))
        frame[LAYER_FRAME["window"]] = attention.window or 0
        frame[LAYER_FRAME["group"]] = attention.group * self._columns
        frame[LAYER_FRAME["cache"]] = attention.cache.data_ptr()
        return frame

    def tables(self) -> list[Tensor]:
        """See :class:`preheat.backends.base.functions.LayerFunctions`."""
        return self._kept

    def _keep(self, tensor: Tensor) -> int:
        """Keep a table that a frame points to and no step writes, and return its address."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _alone(self, layer: PanelLayer, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function that runs one product by itself."""
        frame = zeros(_FRAME_WORDS, np.int64)
        self._singles.append(frame)
        for field, place in layer.fields("qkv"):
            frame[LAYER_FRAME[field]] = place
        address = frame.ctypes.data
        if layer.slots is None:
            self._heads[layer] = name, address

        def run(x: Tensor, out: Tensor, frame: np.ndarray = frame) -> Tensor:
            if len(x) <= self._rows:
                self._run(self._address(name), address, x, out)
                return out
            for part in (slice(first, first + self._rows) for first in range(0, len(x), self._rows)):
                self._run(self._address(name), address, x[part], out[part])  # an image may have more rows than a step
            return out

        return run

    def _run(self, function: int, layer: int, x: Tensor, attended: Tensor) -> None:
        self._point(x, attended, rows := x.shape[0])
        self.team.run(function, layer, rows)

    def _point(self, x: Tensor, attended: Tensor, rows: int) -> None:
        """Set the tensors of the next jobs."""
        assert rows <= self._rows, f"{rows} rows, buffers have {self._rows}"
        self.team.point("x", x)
        self.team.point("attended", attended)
        self.team.set("adapted", self._adapters.adapted)
        self.team.set("slots", self._adapters.address)

    def layers(self, part: Sequence[int], residual: Tensor, given: Tensor | None = None) -> Tensor:
        """Run consecutive layers on ``residual`` [tokens, hidden]; rows that pad a step are left as they are.

        ``given`` [tokens, inputs] are the inputs of a layer that does not norm the residual stream.
        Return ``residual``, or after the last layer's front its attention [tokens, heads * dim], valid until the next
        call.
        """
        ends = part[-1] == len(self._frames) - 1
        tokens = residual.shape[0]
        attended = self._of_attended(tokens)
        self._point(residual, attended, rows := min(self.attention.rows, tokens))
        if given is not None:
            self.team.point("given", given)
        count = 2 * (part[-1] - part[0]) + (1 if ends else 2)
        self.team.run_all(self._listed + 8 * 2 * JOB_WORDS * part[0], count, rows)
        return attended if ends else residual

    def start(self, residual: Tensor, index: Tensor, head: Linear, logits: Tensor) -> Tensor | None:
        """See :class:`preheat.backends.base.functions.LayerFunctions`."""
        if (found := self._heads.get(head)) is None or self._adapters.adapted:
            return None
        team = self.team
        team.set("adapted", 0)
        team.set("slots", self._adapters.address)
        self._list((residual, index, logits), found)
        self._whole[0, _ROWS], self._last[_TAKEN] = min(self.attention.rows, residual.shape[0]), index.data_ptr()
        team.post(self._started, len(self._whole))
        return self._of_attended(residual.shape[0])

    def _list(self, tensors: tuple[Tensor, Tensor, Tensor], head: tuple[str, int]) -> None:
        """Point the listed jobs of a step to its residual stream, sampled tokens and logits, and to ``head``."""
        residual, index, logits = tensors
        known, of = self._pointed
        if head is of and all(map(is_, tensors, known)):
            return
        self._pointed, whole = (tensors, head), self._whole
        whole[0, _X], whole[-4, _ROWS] = residual.data_ptr(), index.shape[0]
        whole[-1, :2], whole[-1, _ATTENDED] = (self._address(head[0]), head[1]), logits.data_ptr()

    def wait(self) -> None:
        """See :class:`preheat.backends.base.functions.LayerFunctions`."""
        self.team.join()

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the hidden states [tokens, hidden] after the last layer and the final norm."""
        self._listed_job(1, residual, attended)
        hidden = torch.empty_like(residual)
        self._listed_job(2, residual, hidden)
        return hidden

    def _listed_job(self, number: int, x: Tensor, attended: Tensor) -> None:
        """Run a job behind the last attention with other tensors."""
        self._point(x, attended, rows := x.shape[0])
        function, frame = self._ends[number, :2].tolist()
        self.team.run(function, frame, rows)

    def take(self, attended: Tensor, residual: Tensor, index: Tensor) -> Tensor:
        """Return the hidden states [size, hidden] of the tokens ``index``, int32 [size], as :meth:`finish` does.

        They are valid until the next call. The residual stream stays as it is.
        """
        self._point(residual, attended, rows := index.shape[0])
        self._last[_TAKEN] = index.data_ptr()
        self.team.run_all(self._ended, len(self._ends), rows)
        return self._of_hidden(rows)


def _written(model: PanelLayer, *what: Any) -> tuple[str, ...]:
    """Return the functions of a ``model``, named by one of its layers, as :func:`_sources` writes them.

    An engine is built twice, once to be measured.
    """
    if _WRITTEN.get(model, (None, ()))[0] != what:
        _WRITTEN[model] = what, _sources(*what)
    return _WRITTEN[model][1]


def _sources(
    kinds: dict[LayerKind, int], alone: dict[Product, int], final_norm: RowNorm, width: int
) -> tuple[str, ...]:
    """Return the functions of a model in LLVM's language; ``width``: numbers of the last layer's attention.

    Fronts and backs take about the same time to compile, so they are two sources.
    """
    with paused():  # a source is tens of thousands of objects, and drops none before it is written
        fronts, backs = ir.Module("fronts"), ir.Module("backs")
        fronts.triple = backs.triple = targets.here().triple
        for kind, number in kinds.items():
            functions.front(fronts, f"front{number}", kind)
            functions.back(backs, f"back{number}", kind)
        for how, number in alone.items():
            functions.alone(backs, f"alone{number}", how)
        functions.norms(fronts, "norm", final_norm)
        embeds(fronts)
        functions.take(fronts, "take", final_norm.size, width)
        job.jobs(fronts, COUNTERS)
        return str(fronts), str(backs)


def _list_of(jobs: int) -> np.ndarray:
    """Return room for a list of jobs."""
    return zeros(jobs * JOB_WORDS, np.int64).reshape(jobs, JOB_WORDS)
