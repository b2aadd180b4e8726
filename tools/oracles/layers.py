"""Layers of every kind of the CUDA backend on the simulated card: see :mod:`tools.oracles.card`.

Only this file of the oracles names the backend's parts that make layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.layers import Embedding, ExpertsWeights, LayerContext, LayerWeights
from preheat.backends.cuda.backend import CudaBackend
from preheat.backends.cuda.device import card as hardware
from preheat.backends.cuda.device.card import HOPPER
from preheat.backends.cuda.matmul.config import (
    Expanded,
    ExpertsConfig,
    ExpertsShape,
    KernelConfig,
    Library,
    LinearShape,
    experts_reference,
    reference,
)
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.linear import apply
from preheat.backends.cuda.matmul.lora.slots import CudaAdapters
from preheat.backends.cuda.matmul.moe.experts import experts_forward
from preheat.backends.cuda.matmul.tables import tables_for
from preheat.backends.cuda.matmul.weights import DeviceWeight, PlainWeight
from preheat.backends.cuda.ranks.collective import RankSums
from preheat.backends.cuda.ranks.sharing import CudaSharing
from preheat.ops.kinds import Scheme
from preheat.ops.quantization import QuantizedWeight, empty_weight
from preheat.ops.values import (
    ONE_SUM,
    Experts,
    Finish,
    Groups,
    LowRank,
    Matmul,
    Routing,
    SumOrder,
    WeightFormat,
    WithoutTerms,
)
from tools.oracles.card import CAPABILITY, META, NAME, Seen, watched

ROWS = (1, 16, 40, 256, 2048)
"""Each is another choice of kernels, and 2,048 have long blocks of adapters."""

UNUSED = (16, 2048)
"""Rows of steps without adapters, in layers that have adapters."""

SLOTS, MAX_RANK = 3, 40

SCHEMES: dict[str, Scheme | None] = {
    "plain": None,
    "fp8": Scheme(code="fp8", scales="channel", activations="token"),
    "fp8 static": Scheme(code="fp8", scales="tensor", activations="static"),
    "fp8 block": Scheme(code="fp8", scales="block", group=128, activations="block"),
    "fp8 weights": Scheme(code="fp8", scales="channel"),
    "int4": Scheme(code="int4", scales="group", group=128),
    "int4 zeros": Scheme(code="int4", scales="group", group=32, zeros=True),
    "int4 indexed": Scheme(code="int4", scales="group", group=128, zeros=True, indexed=True),
    "int8": Scheme(code="int8", scales="channel"),
    "mxfp4": Scheme(code="fp4", scales="group", group=32),
    "nvfp4": Scheme(code="fp4", scales="group", group=16),
}


class Card(CudaBackend):
    """The backend on the simulated card, with the tables that come with preheat."""

    fingerprint = "no card"

    def __init__(self, simulated: hardware.Card = HOPPER) -> None:
        self.device = META
        self.adapters = CudaAdapters(META)
        tables = tables_for(NAME, simulated.capability, None)
        self._configs, self.sharing = KernelConfigs(tables, card=simulated), CudaSharing(META)


class Other(RankSums):
    """A rank of several; the other ranks' values are empty tensors."""

    def __init__(self, world: int, seen: Seen) -> None:
        self.rank, self.world, self._seen = 0, world, seen

    def gather(self, x: Tensor) -> Tensor:
        self._seen.events.append(f"gather {x.dtype} {list(x.shape)}".replace("torch.", ""))
        return x.unsqueeze(0) if self.world == 1 else x.new_empty(self.world, *x.shape)


class Made(NamedTuple):
    """A layer: its call with a number of rows.

    ``rows`` are the rows of its adapters, if it has some.
    """

    call: Callable[[int], Any]
    rows: Any = None


def weight(scheme: Scheme | None, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor | QuantizedWeight:
    if scheme is None:
        return torch.empty(shape, dtype=dtype, device=META)
    return empty_weight(scheme, *shape, dtype=dtype, device=META)


def dense(
    backend: Card, scheme: Scheme | None, adapted: bool, *, outputs: tuple[int, ...] = (4096, 1024, 1024),
    inputs: int = 4096, activation: Any = None, clip: float | None = None, bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Made:  # fmt: skip
    """Return a layer with split rows, or a whole one."""
    given = weight(scheme, sum(outputs), inputs, dtype=dtype)
    biases = torch.empty(sum(outputs), dtype=dtype, device=META) if bias else None
    x = torch.empty(max(ROWS), inputs, dtype=dtype, device=META)
    rows = backend.adapters.rows(max(ROWS), SLOTS) if adapted else None
    finish = Finish(bias, activation, clip)
    value = value_of(scheme, sum(outputs), inputs, dtype, finish=finish, terms=terms(adapted, outputs, dtype))
    layer = backend.layer(value, LayerWeights(given, biases), LayerContext(rows=rows))
    return Made(lambda count: layer(x[:count]), rows)


def name_of(dtype: torch.dtype) -> Any:
    """Return the name of a dtype in values."""
    return str(dtype).removeprefix("torch.")


def terms(adapted: bool, outputs: Sequence[int], dtype: torch.dtype, **more: Any) -> tuple[LowRank, ...]:
    """Return the room for adapters in a layer of ``outputs`` parts."""
    return (LowRank(tuple(outputs), SLOTS, MAX_RANK, name_of(dtype), **more),) if adapted else ()


def value_of(scheme: Scheme | None, outputs: int, inputs: int, dtype: torch.dtype, **more: Any) -> Matmul:
    """Return the value of a layer."""
    read = (scheme.activations if scheme else None) or "plain"
    return Matmul(outputs=outputs, inputs=inputs, weight=WeightFormat(name_of(dtype), scheme), input=read, **more)


def split(
    backend: Card, scheme: Scheme | None, adapted: bool, seen: Seen, *, world: int, among: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Made:  # fmt: skip
    """Return a layer with inputs split over ``world`` ranks.

    ``among``: its adapters' first matrices are split too.
    """
    ranks, inputs, k_splits = Other(world, seen), 8192 // world, 4 // world
    x = torch.empty(max(ROWS), inputs, dtype=dtype, device=META)
    rows = backend.adapters.rows(max(ROWS), SLOTS) if adapted else None
    own = terms(adapted, [4096], dtype, shared="ranks" if among else "inputs")
    value = value_of(scheme, 4096, inputs, dtype, order=SumOrder(4, (0, k_splits)), terms=own)
    layer = backend.layer(value, LayerWeights(weight(scheme, 4096, inputs, dtype=dtype)), LayerContext(ranks, rows))
    return Made(lambda count: layer(x[:count]), rows)


COUNT, HIDDEN, INNER, TOP = 128, 2048, 768, 8
"""Experts of Qwen3-30B-A3B, which are in the shipped table."""


def experts(
    backend: Card, scheme: Scheme | None, adapted: bool, seen: Seen, *, world: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Made:  # fmt: skip
    """Return experts, whole or with inner numbers split over ``world`` ranks."""
    inner = INNER // world if world else INNER
    gate_up = weight(scheme, COUNT, 2 * inner, HIDDEN, dtype=dtype)
    down = weight(scheme, COUNT, HIDDEN, inner, dtype=dtype)
    routing = Routing(TOP, True, False)
    x = torch.empty(max(ROWS), HIDDEN, dtype=dtype, device=META)
    logits = torch.empty(max(ROWS), COUNT, dtype=dtype, device=META)
    rows = backend.adapters.rows(max(ROWS), SLOTS) if adapted else None
    groups, own = Groups(COUNT, TOP), 4 // world if world else 1
    order = SumOrder(4, (0, own)) if world else ONE_SUM
    value = Experts(
        gate_up=value_of(
            scheme,
            2 * inner,
            HIDDEN,
            dtype,
            groups=groups,
            finish=Finish(activation="silu_and_mul"),
            terms=terms(adapted, [inner, inner], dtype),
        ),
        down=value_of(scheme, HIDDEN, inner, dtype, groups=groups, order=order, terms=terms(adapted, [HIDDEN], dtype)),
        routing=routing,
    )
    if isinstance(backend.supports(value), WithoutTerms):
        raise NotImplementedError("refused: these experts have no adapter slots")
    ranks = Other(world, seen) if world else None
    layer = backend.experts(value, ExpertsWeights(gate_up, down), LayerContext(ranks, rows))
    return Made(lambda count: layer(x[:count], logits[:count]), rows)


def embedding(backend: Card) -> Made:
    """Return the adapters of a table of embeddings."""
    rows = backend.adapters.rows(max(ROWS), SLOTS)
    table = torch.empty(4096, 2048, dtype=torch.bfloat16, device=META)
    value = value_of(None, 2048, 4096, torch.bfloat16, terms=terms(True, [2048], torch.bfloat16, source="tokens"))
    layer = cast(Embedding, backend.layer(value, LayerWeights(table), LayerContext(rows=rows)))
    tokens, out = torch.empty(max(ROWS), dtype=torch.int32, device=META), torch.empty(max(ROWS), 2048, device=META)
    out = out.bfloat16()
    return Made(lambda count: layer.add(tokens[:count], tokens[:count], tokens, out[:count]), rows)


def kinds(backend: Card, seen: Seen) -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield every kind of layer: its name, and a function that makes it."""
    for adapted in (False, True):
        more = ", adapters" * adapted
        for name, scheme in SCHEMES.items():
            yield f"dense, {name}{more}", lambda s=scheme, a=adapted: dense(backend, s, a)
            yield f"gated, {name}{more}", lambda s=scheme, a=adapted: dense(
                backend, s, a, outputs=(14336, 14336), activation="silu_and_mul")  # fmt: skip
            for world in (1, 2):
                yield f"split {world}, {name}{more}", lambda s=scheme, a=adapted, w=world: split(
                    backend, s, a, seen, world=w)  # fmt: skip
                if adapted:
                    yield f"split {world}, {name}, divided{more}", lambda s=scheme, w=world: split(
                        backend, s, True, seen, world=w, among=True)  # fmt: skip
            if scheme is not None and scheme.indexed:
                continue
            for world in (0, 1, 2):
                where = f" split {world}" * (world > 0)
                yield f"experts{where}, {name}{more}", lambda s=scheme, a=adapted, w=world: experts(
                    backend, s, a, seen, world=w)  # fmt: skip
        for name, how in FINISHES.items():
            yield f"{name}{more}", lambda h=how, a=adapted: dense(backend, None, a, outputs=(4096,), **h)
        yield f"float32{more}", lambda a=adapted: dense(backend, None, a, dtype=torch.float32)
        yield f"float32, split 2{more}", lambda a=adapted: split(backend, None, a, seen, world=2, dtype=torch.float32)
        yield f"float32, experts{more}", lambda a=adapted: experts(backend, None, a, seen, dtype=torch.float32)
    yield "embedding, adapters", lambda: embedding(backend)


FINISHES: dict[str, dict[str, Any]] = {
    "gelu, bias": {"activation": "gelu_tanh", "bias": True},
    "clipped": {"clip": 8.0},
    "uneven": {"inputs": 1112},
}


def rows_of_tables() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each row of the shipped tables and each reference.

    A row has a kernel of ours. Each comes with a function that runs it.
    """
    for table in tables_for(NAME, CAPABILITY, None):
        for entry in table.entries:
            kernel = entry.choice.choice if isinstance(entry.choice, Expanded) else entry.choice
            if not isinstance(kernel, Library):
                more = ", own" * entry.own + ", not ordered" * (not entry.ordered)
                name = f"row {_of(entry.shape)}, {entry.rows} rows{more}"
                yield name, lambda e=entry: _by(e.choice, e.shape, e.rows)
        for entry in table.experts:
            shape, config = entry.shape, entry.choice
            name = f"row experts {entry.num_experts} x {entry.hidden} x {entry.inner}, {entry.tokens} tokens"
            yield name, lambda s=shape, c=config, t=entry.tokens: _experts_by(c, s, t)
    for dtype in (torch.bfloat16, torch.float32):
        for name, scheme in SCHEMES.items():
            for gated in (False, True):
                shape = LinearShape(4096, 4096, gated, dtype, scheme=scheme)
                yield f"reference {_of(shape)}, {name}", lambda s=shape: _by(reference(s), s, 64)
            if scheme is None or not scheme.indexed:
                experts_shape = ExpertsShape(COUNT, HIDDEN, INNER, TOP, dtype, scheme)
                kind = f"reference experts {str(dtype).removeprefix('torch.')}, {name}"
                yield kind, lambda s=experts_shape: _experts_by(experts_reference(s), s, 64)


def _of(shape: LinearShape) -> str:
    dtype = str(shape.dtype).removeprefix("torch.")
    named = {"gated": "gated", "bias": "bias", "shuffled": "dealt", "bf16_scales": "narrow"}  # as stored cells have it
    more = [name for field, name in named.items() if getattr(shape, field)]
    return ", ".join(
        [f"{shape.outputs} x {shape.inputs}", dtype, shape.scheme.name if shape.scheme else "plain", *more]
    )


def _by(choice: KernelConfig, shape: LinearShape, rows: int) -> object:
    """Run a layer of ``shape`` by the kernel ``choice``."""
    given = weight(shape.scheme, shape.outputs, shape.inputs, dtype=shape.dtype)
    held = PlainWeight(given) if isinstance(given, Tensor) else DeviceWeight.of(given, shuffled=shape.shuffled)
    x = torch.empty(rows, shape.inputs, dtype=shape.dtype, device=META)
    return apply(choice, x, held, None, shape.gated)


def _experts_by(config: ExpertsConfig, shape: ExpertsShape, tokens: int) -> object:
    """Run experts by the kernels of ``config``."""
    sizes = (shape.num_experts, 2 * shape.inner, shape.hidden), (shape.num_experts, shape.hidden, shape.inner)
    given = [weight(shape.scheme, *size, dtype=shape.dtype) for size in sizes]
    held = [PlainWeight(each) if isinstance(each, Tensor) else DeviceWeight.of(each) for each in given]
    x = torch.empty(tokens, shape.hidden, dtype=shape.dtype, device=META)
    logits = torch.empty(tokens, shape.num_experts, dtype=shape.dtype, device=META)
    counts = torch.zeros(shape.num_experts, dtype=torch.int32, device=META)
    return experts_forward(config, x, logits, *held, Routing(shape.top_k, True, False), counts)


def traces(backend: Card, chosen: Callable[[str], bool]) -> Iterator[tuple[str, Seen]]:
    """Yield the trace of each kind and number of rows.

    With adapters also of a step in which no row has one.
    """
    seen = Seen()
    for kind, make in kinds(backend, seen):
        wanted = [f"{kind}, {count} rows" for count in ROWS if chosen(f"{kind}, {count} rows")]
        if not wanted:
            continue
        try:
            made = make()
        except (NotImplementedError, ValueError) as error:
            seen.events = [str(error)]
            yield kind, _taken(seen)
            continue
        for count in ROWS:
            for used in (True, False)[made.rows is None :]:
                name = f"{kind}, {count} rows" + ", unused" * (made.rows is not None and not used)
                if not chosen(name) or (name.endswith("unused") and count not in UNUSED):
                    continue
                if made.rows is not None:
                    made.rows.describe(0, "tokens", np.zeros(count, np.int32))
                    made.rows.use("tokens" if used else None)
                seen.events = []
                try:
                    with watched(seen):
                        made.call(count)
                except Exception as error:
                    seen.events.append(f"{type(error).__name__}: {error}")
                yield name, _taken(seen)


def _taken(seen: Seen) -> Seen:
    """Return a copy of ``seen``."""
    copy = Seen()
    copy.events = list(seen.events)
    return copy
