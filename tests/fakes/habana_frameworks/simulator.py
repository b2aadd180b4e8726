"""The device of the fake: tensors on the host, and a ledger of a Gaudi's compilations, memory and refusals.

**Compilations.** In lazy mode operations accumulate until ``mark_step``. They form a graph, known by its signature: the
operations in order, with shapes, types and every number that is not in a tensor. A graph with a new signature is
compiled. In eager mode each operation is a graph of its own.

**HPU graphs.** A capture records and computes nothing. A replay executes the recorded operations on the current values
of the static tensors. While capturing, the device refuses the same as a real one: reading a tensor on the host, shapes
that depend on data, and memory beyond the card's.

**Memory.** A tensor on the device is charged at its size. A graph is charged by :class:`Figures`, taken from the boot
log in the documentation of vLLM on Gaudi. No figure says anything of real hardware.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GIB, MIB = 2**30, 2**20
SPARSE = 64 * MIB
"""From this size on, zeros are pages that the system gives when they are touched."""

NO_RESERVE = 0x4000
"""Linux's flag for pages without reserved memory."""

HOST_READS = {"_local_scalar_dense", "item", "equal", "is_nonzero", "allclose"}
PRODUCTS = {"linear", "matmul", "mm", "bmm"}
DYNAMIC = {"nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "bincount", "repeat_interleave"}


class GraphRefused(RuntimeError):
    """An operation that a graph cannot hold."""


@dataclass
class Figures:
    """Charges in bytes.

    ``row`` is charged for each row of a linear layer in a graph, and ``graph`` for each graph. With 125 products to a
    forward pass of Llama-3.1-8B, a token takes 1.439 MiB, as in the log's graphs. ``workspace`` is taken at the first
    launch and kept.
    """

    total: int = round(94.622 * GIB)
    row: float = 1.439 * MIB / 125
    graph: int = 16 * 1024
    workspace: int = 0


@dataclass
class Ledger:
    """Bytes in use, and their peak.

    Raises OutOfMemoryError for more bytes than are free.
    """

    total: int
    used: int = 0
    peak: int = 0

    @property
    def free(self) -> int:
        return self.total - self.used

    def take(self, size: int, what: str) -> None:
        if size > self.free:
            raise torch.OutOfMemoryError(f"{what} needs {size:,} bytes and {self.free:,} of {self.total:,} are free")
        self.used += size
        self.peak = max(self.peak, self.used)

    def give(self, size: int) -> None:
        self.used -= size


@dataclass
class Instruction:
    """A recorded operation.

    ``outs`` number its results, ``dead`` the tensors that no later instruction reads.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    outs: list[int | None]
    dead: tuple[int, ...] = ()


@dataclass(frozen=True)
class Place:
    """A tensor that the graph makes itself."""

    number: int


@dataclass
class Program:
    """A captured graph.

    ``survivors`` are results with a reference outside of the graph: a replay writes into them.
    """

    instructions: list[Instruction]
    places: int
    survivors: list[tuple[int, Tensor]]
    bytes: int
    multiplications: Counter[str]


@dataclass
class Capture:
    """Operations and tensors that a capture has recorded so far."""

    instructions: list[Instruction] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)  # tensors by id
    tensors: list[Tensor] = field(default_factory=list)  # kept, lest an id be used again
    signature: list[Any] = field(default_factory=list)
    rows: int = 0
    made: int = 0
    multiplications: Counter[str] = field(default_factory=Counter)


class Recorder(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.run(func, args, kwargs or {})


class Device:
    """One simulated card.

    With ``dry`` it computes nothing: results are zeros or whatever memory held.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, figures: Figures | None = None, *, dry: bool = False, scale: float = 1.0) -> None:
        """Reset the card to new.

        Tensors allocated before the first request for a peak are the weights: they are charged ``scale`` times.
        """
        self.figures, self.dry, self.scale = figures or Figures(), dry, scale
        self.ledger = Ledger(self.figures.total)
        self.recipes: set[int] = set()
        self.counts: Counter[str] = Counter({"graph_compilation": 0, "cpu_fallback": 0, "graph_capture": 0})
        self.details = {name: deque[str](maxlen=32) for name in self.counts}
        self._pending: list[tuple[Any, bool]] = []  # and whether it is a view
        self._charged, self._depth, self._launched, self.loading = 0, 0, False, True
        self._capture: Capture | None = None
        self._recorder = Recorder(self)

    @property
    def lazy(self) -> bool:
        return os.environ.get("PT_HPU_LAZY_MODE", "1") == "1"

    @property
    def capturing(self) -> bool:
        return self._capture is not None

    # Memory.

    def charge(self, tensor: Tensor) -> Tensor:
        """Charge a tensor on the device until its storage is freed."""
        storage = tensor.untyped_storage()
        if self.figures.workspace and not self.loading and storage.nbytes() < GIB:
            return tensor  # the workspace stands for it
        size = round(storage.nbytes() * (self.scale if self.loading else 1.0))
        ledger = self.ledger
        ledger.take(size, f"a tensor of {tuple(tensor.shape)}")
        weakref.finalize(storage, ledger.give, size)
        return tensor

    def _work_memory(self, tensor: Tensor) -> None:
        """Charge a tensor of a running graph until the graph ends, unless a workspace stands for it."""
        if self.figures.workspace:
            return
        size = tensor.untyped_storage().nbytes()
        self.ledger.take(size, "working memory")
        self._charged += size

    # Running.

    @contextmanager
    def running(self) -> Iterator[None]:
        self._depth += 1
        if not self._launched:
            self._launched = True
            self.ledger.take(self.figures.workspace, "the workspace")
        try:
            if self._depth > 1:
                yield
            else:
                with self._recorder:
                    yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.ledger.give(self._charged)
                self._charged = 0

    def mark_step(self) -> None:
        """Compile the accumulated graph, if it is new.

        A graph of only views launches nothing. Within a capture it only parts one recipe from the next.
        """
        if self._capture is not None:
            self._capture.signature.append("mark_step")
            return
        pending, self._pending = self._pending, []
        if not all(views for _, views in pending):
            self._compile(tuple(signature for signature, _ in pending))

    def _compile(self, signature: tuple[Any, ...]) -> None:
        key = hash(signature)
        if key not in self.recipes:
            self.recipes.add(key)
            self.count("graph_compilation", f"a recipe of {len(signature)} operations, from {signature[0][0]}")

    def count(self, name: str, detail: str) -> None:
        self.counts[name] += 1
        self.details[name].append(detail)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        if name in HOST_READS:
            if self._capture is not None:
                raise GraphRefused(f"{name}: a graph cannot be read by the host while it is captured")
            self.mark_step()  # the host waits for all accumulated operations
            return func(*args, **kwargs)
        if name in DYNAMIC or (name == "index" and _has_mask(args)):
            if self._capture is not None:
                raise GraphRefused(f"{name}: the shape of its result depends on data, a graph's shapes are static")
            self.count("cpu_fallback", name)
            self.mark_step()
            return func(*args, **kwargs)
        leaves, spec = _flat(args, kwargs)
        signature = (str(func), *(_seen(leaf) for leaf in leaves))
        if self._capture is not None:
            return self._record(func, leaves, spec, signature)
        views, writes = _kind(func)
        if self.lazy:
            self._pending.append((signature, views))
        else:
            self._compile((signature,))
        result = _infer(func, leaves, spec) if self.dry else func(*args, **kwargs)
        if not writes:
            for leaf in _tensors(result):
                if leaf._base is None:
                    self._work_memory(leaf)
        return result

    # Graphs.

    def capture_begin(self) -> None:
        self.mark_step()
        self._capture = Capture()
        self._stream = self.running()
        self._stream.__enter__()

    def capture_abort(self) -> None:
        self._capture = None
        self._stream.__exit__(None, None, None)

    def _record(self, func: Any, leaves: list[Any], spec: Any, signature: Any) -> Any:
        capture = self._capture
        assert capture is not None
        capture.signature.append(signature)
        if func.overloadpacket.__name__ in ("linear", "mm", "addmm"):
            first = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() == 2)
            capture.rows += len(first)
        if func.overloadpacket.__name__ in PRODUCTS:
            capture.multiplications[func.overloadpacket.__name__] += _multiplications(func, leaves)
        views, writes = _kind(func)
        inside = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) in capture.known]
        result = _infer(func, leaves, spec)
        outs = _tensors(result)
        if views and not inside and _share(outs, leaves):
            return result  # a part of a static tensor is as static
        numbers: list[int | None] = []
        for out in outs:
            if writes and id(out) not in capture.known:
                numbers.append(None)  # a static tensor was written to
                continue
            if id(out) not in capture.known:
                capture.known[id(out)] = len(capture.tensors)
                capture.tensors.append(out)
                capture.made += 0 if views else out.untyped_storage().nbytes()
            numbers.append(capture.known[id(out)])
        placed = [
            Place(capture.known[id(leaf)]) if isinstance(leaf, Tensor) and id(leaf) in capture.known else leaf
            for leaf in leaves
        ]
        capture.instructions.append(Instruction(func, placed, spec, numbers))
        return result

    def capture_end(self, *, keeps_tensors: bool) -> Program:
        capture, self._capture = self._capture, None
        assert capture is not None
        self._stream.__exit__(None, None, None)
        size = round(capture.rows * self.figures.row) + self.figures.graph + (capture.made if keeps_tensors else 0)
        self.ledger.take(size, "a graph")
        self.count("graph_capture", f"a graph of {len(capture.instructions)} operations")
        self._compile(tuple(capture.signature))
        references = [weakref.ref(tensor) for tensor in capture.tensors]
        places = len(capture.tensors)
        capture.tensors.clear()
        survivors = [(number, alive) for number, ref in enumerate(references) if (alive := ref()) is not None]
        _bury(capture.instructions, {number for number, _ in survivors})
        program = Program(capture.instructions, places, survivors, size, capture.multiplications)
        weakref.finalize(program, self.ledger.give, size)
        return program

    def replay(self, program: Program) -> None:
        """Execute the recorded operations, in order, on the current values of the static tensors."""
        if self.dry:
            return
        found: list[Any] = [None] * program.places
        for instruction in program.instructions:
            leaves = [found[leaf.number] if isinstance(leaf, Place) else leaf for leaf in instruction.leaves]
            args, kwargs = _built(leaves, instruction.spec)
            result = instruction.function(*args, **kwargs)
            outs = _tensors(result)
            for number, out in zip(instruction.outs, outs, strict=True):
                if number is not None:
                    found[number] = out
            for number in instruction.dead:
                found[number] = None
        for number, tensor in program.survivors:
            tensor.copy_(found[number])


Spec = tuple[tuple[int, ...], tuple[str, ...]]
"""Structure of arguments flattened to leaves.

It holds the length of each list among them, -1 for a value that is no list, and the keywords' names.
"""


def _flat(args: Any, kwargs: Any) -> tuple[list[Any], Spec]:
    """Return the arguments of an operation one after the other, with the items of lists, and their structure."""
    leaves, lengths = list[Any](), list[int]()
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            leaves += value
            lengths.append(len(value))
        else:
            leaves.append(value)
            lengths.append(-1)
    return leaves, (tuple(lengths), tuple(kwargs))


def _built(leaves: list[Any], spec: Spec) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments built from their leaves."""
    values, at = list[Any](), 0
    lengths, names = spec
    for length in lengths:
        if length < 0:
            values.append(leaves[at])
            at += 1
        else:
            values.append(leaves[at : at + length])
            at += length
    split = len(values) - len(names)
    return values[:split], dict(zip(names, values[split:], strict=True))


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [each for each in result if isinstance(each, Tensor)] if isinstance(result, list | tuple) else []


def _share(outs: list[Tensor], leaves: list[Any]) -> bool:
    """Return whether all results lie in the memory of the arguments.

    An operation may return a view or a copy.
    """
    places = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}
    return all(out.untyped_storage()._cdata in places for out in outs)


def _bury(instructions: list[Instruction], kept: set[int]) -> None:
    """Record, for each tensor, the instruction after which it is not needed any more."""
    last: dict[int, int] = {}
    for at, instruction in enumerate(instructions):
        used = [leaf.number for leaf in instruction.leaves if isinstance(leaf, Place)]
        last |= dict.fromkeys([*used, *(number for number in instruction.outs if number is not None)], at)
    for number, at in last.items():
        if number not in kept:
            instructions[at].dead += (number,)


@functools.cache
def _kind(func: Any) -> tuple[bool, bool]:
    """Return whether an operation gives a view, and whether it writes to an argument."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    writes = func._schema.is_mutable
    return any(alias is not None for alias in aliases) and not writes, writes


def _multiplications(func: Any, leaves: list[Any]) -> int:
    """Return a matrix product's multiplications: rows and inputs of the first matrix, times the outputs."""
    first, second = leaves[:2]
    outputs = second.shape[0] if func.overloadpacket.__name__ == "linear" else second.shape[-1]
    return int(first.numel() * outputs)


def _seen(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, int | float | bool | str | None) else str(leaf)


def _has_mask(args: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


INFERRED: dict[Any, tuple[bool, list[Any]] | None] = {}
"""Sizes, strides and type of each result of an operation, by arguments.

A view has None.
"""


def _infer(func: Any, leaves: list[Any], spec: Any) -> Any:
    """Return the result of an operation that is not executed: new memory of its shape.

    Views are taken, and nothing is written.
    """
    views, writes = _kind(func)
    args, kwargs = _built(leaves, spec)
    if writes:
        return _written(func, args, kwargs)
    key = (
        func,
        spec,
        *((leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
    )
    if key not in INFERRED:
        like = [_meta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = _built(like, spec)
        result = func(*args, **(kwargs | {"device": "meta"} if "device" in kwargs else kwargs))
        outs = _tensors(result)
        viewed = views and _share(outs, like)
        sizes = [(out.size(), out.stride(), out.dtype) for out in outs]
        INFERRED[key] = None if viewed else (isinstance(result, Tensor), sizes)
    known = INFERRED[key]
    if known is None:
        args, kwargs = _built(leaves, spec)
        return func(*args, **kwargs)
    one, sizes = known
    made = [REAL["empty_strided"](size, stride, dtype=dtype) for size, stride, dtype in sizes]
    return made[0] if one else tuple(made)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments that an operation writes to."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    found = [
        given[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return found[0] if len(found) == 1 else tuple(found)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


DEVICE = Device()
HERE = torch.device("cpu", 0)
"""The device's name among tensors: the host's, with a number.

The host's own code never gives a number.
"""

REAL: dict[str, Callable[..., Any]] = {name: getattr(torch, name) for name in ("empty", "zeros", "empty_strided")}


def _allocating(name: str) -> Callable[..., Any]:
    real = REAL[name]

    @functools.wraps(real)
    def allocate(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if not (isinstance(device, torch.device) and device == HERE):
            return real(*args, **kwargs)
        sizes = args[0] if len(args) == 1 and isinstance(args[0], tuple | list | torch.Size) else args
        dtype = kwargs.get("dtype") or torch.float32
        if (count := math.prod(sizes)) * dtype.itemsize < SPARSE:
            return DEVICE.charge(real(*args, **kwargs))
        pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        return DEVICE.charge(torch.frombuffer(pages, dtype=dtype).view(tuple(sizes)))

    return allocate


@contextmanager
def plugged_in(figures: Figures | None = None, *, dry: bool = False, scale: float = 1.0) -> Iterator[Device]:
    """Put a new device into the machine, and bring the old one back afterwards."""
    before = dict(vars(DEVICE))
    DEVICE.reset(figures, dry=dry, scale=scale)
    try:
        yield DEVICE
    finally:
        vars(DEVICE).update(before)


def plug_in() -> None:
    """Charge all tensors allocated on the device from now on."""
    for name in ("empty", "zeros"):
        setattr(torch, name, _allocating(name))
