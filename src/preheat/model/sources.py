"""Sources of a model's tensors: safetensors files, or a random generator."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor

from preheat.errors import ModelError
from preheat.model.files import indexed_names, weight_files
from preheat.model.formats import FORMATS, LinearFormat, expected_tensors
from preheat.model.gguf.container import GGUF_WEIGHTS
from preheat.model.gguf.tensors import GgufTensors
from preheat.model.kv_scales import STORED
from preheat.model.reading import Piece, Shape
from preheat.model.specs import ModelSpec, Rename, TaskSpec
from preheat.model.task_weights import TaskFile
from preheat.model.tensor_specs import TIED_HEAD
from preheat.utils.files import regular_file
from preheat.utils.text import some

AT_ONCE = 1 << 24
"""Numbers of a GGUF tensor that are filled at once: 64 MB in float32, beside the tensor's own place."""

SCALES = ("_scale", "_scales", "_scale_inv", ".scales", "_zero_point", ".qzeros", ".g_idx")
"""Endings of the names of scales, zero points and group indices."""


def _sum(out: Tensor) -> Tensor | None:
    """Return a sum that shows any NaN or infinity in ``out``.

    None for integers.
    """
    if out.is_floating_point() and out.itemsize > 1:
        return out.sum(dtype=torch.float32)
    if not out.is_floating_point():
        return None
    wrong = out.view(torch.uint8).bitwise_and(0x7F).eq(0x7F).any()  # e4m3fn has no infinity, and one NaN of each sign
    return torch.where(wrong, torch.nan, 0.0)


Part = tuple[int | slice, ...]

Read = Callable[[str, Callable[[], memoryview]], None]
"""Told the name of each stored tensor that is read, with a function that returns all its bytes."""


class _Place(NamedTuple):
    """A ``part`` of the tensor ``stored`` in a safetensors ``file``.

    An empty part is the whole tensor.
    """

    file: Any
    stored: str
    part: Part

    def read(self, piece: Piece | None = None) -> Tensor:
        part = self.part if piece is None else _within(self.part, piece)
        if not part:
            return cast(Tensor, self.file.get_tensor(self.stored))
        return cast(Tensor, self.file.get_slice(self.stored)[part])

    def data(self) -> memoryview:
        """Return the bytes of the whole stored tensor, where the file is mapped."""
        whole = cast(Tensor, self.file.get_tensor(self.stored))
        return whole.reshape(-1).view(torch.uint8).numpy().data


def _within(part: Part, piece: Piece) -> Part:
    """Return the part of a stored tensor for ``piece`` of ``part``."""
    stacked = tuple(place for place in part if isinstance(place, int))
    first = next((place.start for place in part if isinstance(place, slice)), 0)
    rows, *columns = piece.index
    return (*stacked, slice(first + rows.start, first + rows.stop), *columns)


def _parts(stored: str, shape: Shape, renames: Sequence[Rename]) -> Iterator[tuple[str, Shape, Part]]:
    """Yield name, shape and part of each tensor inside ``stored``.

    ``stored`` is a name in the checkpoint.
    """
    for rename in renames:
        if match := re.fullmatch(rename.stored, stored):
            break
    else:
        yield stored, shape, ()
        return
    names = [match.expand(name) for name in rename.names]
    stack: list[Part] = [(index,) for index in range(shape[0])] if "{}" in names[0] else [()]
    inner = shape[len(stack[0]) :]
    rows = inner[0] // len(names)
    for outer in stack:
        for place, name in enumerate(names):
            part = outer if len(names) == 1 else (*outer, slice(place * rows, (place + 1) * rows))
            yield name.format(*outer), (rows, *inner[1:]), part


class StoredTensors:
    """The tensors of open ``files``.

    ``shapes`` are the tensors' shapes by name, after ``renames``. ``copy(source, out)`` copies a tensor. ``origin``
    names the source in errors. ``read`` is told of each tensor that fills another.
    """

    def __init__(
        self,
        origin: object,
        files: Iterable[Any],
        copy: Callable[[Tensor, Tensor], object],
        renames: Sequence[Rename] = (),
        read: Read | None = None,
    ) -> None:
        self._copy, self._read = copy, read
        self._places: dict[str, _Place] = {}
        self._sums: dict[str, tuple[Tensor, torch.dtype]] = {}
        self._scales: dict[str, int] = {}
        self.shapes: dict[str, Shape] = {}
        self.stored: set[str] = set()
        for file in files:
            for stored in file.keys():  # noqa: SIM118 - not a mapping
                self.stored.add(stored)
                own = () if isinstance(file, _Below) else renames
                for name, shape, part in _parts(stored, tuple(file.get_slice(stored).get_shape()), own):
                    if name in self.shapes:
                        raise ModelError(f"{origin}: tensor {name} is there more than once")
                    self.shapes[name] = shape
                    self._places[name] = _Place(file, stored, part)

    def fill(self, name: str, out: Tensor, piece: Piece | None = None) -> None:
        if out.dim() != 2 or out.numel() <= AT_ONCE or not isinstance(self._places[name].file, GgufTensors):
            self._fill(name, out, piece)
            return
        whole = piece or Piece(self.shapes[name], (0, len(out)))
        step = max(1, AT_ONCE // out.shape[1])
        for at in range(0, len(out), step):
            part = out[at : at + step]
            first = whole.rows[0] + at
            self._fill(name, part, replace(whole, rows=(first, first + len(part))))

    def _fill(self, name: str, out: Tensor, piece: Piece | None) -> None:
        place = self._places[name]
        if self._read is not None:
            self._read(place.stored, place.data)
        source = place.read(piece)
        if source.numel() == 1:
            source = source.view(out.shape)  # a number may be stored with any number of dimensions
        self._copy(source, out)
        if name.endswith(SCALES):
            data = source.contiguous().view(-1).view(torch.uint8).numpy().data
            self._scales[name] = zlib.crc32(data, self._scales.get(name, 0))
        if (total := _sum(out)) is not None:
            if name in self._sums:  # another piece of the same tensor; a sum with NaN or infinity stays not finite
                total = total + self._sums[name][0]
            self._sums[name] = total, out.dtype

    def read(self, name: str, piece: Piece) -> Tensor:
        """Return a ``piece`` of tensor ``name`` as stored, on the host."""
        return self._places[name].read(piece)

    def place(self, name: str) -> tuple[str, Part]:
        """Return the stored tensor with tensor ``name``, and the part.

        An empty part is all of it.
        """
        return self._places[name].stored, self._places[name].part

    def read_stored(self, name: str) -> Tensor:
        """Return the whole stored tensor that contains tensor ``name``."""
        place = self._places[name]
        return cast(Tensor, place.file.get_tensor(place.stored))

    @property
    def scales_digest(self) -> str | None:
        """Digest of all scales and zero points read so far.

        None if there were none.
        """
        if not self._scales:
            return None
        return sha256(repr(sorted(self._scales.items())).encode()).hexdigest()[:32]

    def check_finite(self) -> None:
        """Raise ModelError if a tensor that was read is not finite.

        The error names the tensor with a NaN or an infinity. Every answer would be nonsense. The sums were made where
        the tensors lie, so that loading does not wait for them.
        """
        if not self._sums:
            return
        finite = torch.isfinite(torch.stack([total for total, _ in self._sums.values()])).tolist()
        for (name, (_, dtype)), good in zip(self._sums.items(), finite, strict=True):
            if good:
                continue
            tensor = self._places[name].read()
            wrong = tensor.numel() - int(torch.isfinite(tensor.to(dtype).float()).sum())
            if wrong:  # else the sum was too large
                raise ModelError(
                    f"tensor {name} of the checkpoint is not finite: {wrong:,} of its {tensor.numel():,} numbers are "
                    f"NaN or infinite in {dtype}; fetch or export the checkpoint again"
                )


class SafetensorsFiles(StoredTensors):
    """The tensors of a checkpoint in ``directory``.

    Its files lie ``below`` that folder if there is one. The tensors of ``folders`` in it are named FOLDER/NAME. The
    weights are those of ``task`` if there is one.
    """

    def __init__(
        self,
        directory: Path,
        copy: Callable[[Tensor, Tensor], object],
        renames: Sequence[Rename] = (),
        *,
        below: str | Path | None = None,
        folders: Sequence[str] = (),
        read: Read | None = None,
        task: TaskSpec | None = None,
    ) -> None:
        files = [open_tensors(path) for path in weight_files(directory, below)]
        files = files if task is None else [TaskFile(file, task) for file in files]
        for each in folders:
            files += [_Below(open_tensors(path), each) for path in weight_files(directory / each, below)]
        super().__init__(directory, files, copy, renames, read)
        if missing := sorted(indexed_names(directory, below) - self.stored):
            raise ModelError(f"{directory}: the index names tensors that no file has: {some(missing)}")


def open_tensors(path: Path) -> Any:
    """Open the safetensors file ``path``, or a link of this name to a GGUF file.

    Raises ModelError for a file that is none.
    """
    if path.name == GGUF_WEIGHTS:
        return GgufTensors(path)
    try:
        return safe_open(regular_file(path), framework="pt")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # the library has no error class of its own
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from None


class _Below:
    """An open safetensors file in a folder beside a model's; its tensors are named FOLDER/NAME."""

    def __init__(self, file: Any, folder: str) -> None:
        self._file, self._folder = file, folder

    def keys(self) -> list[str]:
        return [f"{self._folder}/{name}" for name in self._file.keys()]  # noqa: SIM118 - not a mapping

    def get_tensor(self, name: str) -> Tensor:
        return cast(Tensor, self._file.get_tensor(name.partition("/")[2]))

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(name.partition("/")[2])


class GivenTensors(dict[str, Tensor]):
    """Tensors in memory, in the form of an open safetensors file."""

    def get_tensor(self, name: str) -> Tensor:
        return self[name].detach().cpu()

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self.get_tensor(name))


class _Slice(NamedTuple):
    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, part: Any) -> Any:
        return self.tensor[part]


def check_tensors(spec: ModelSpec, shapes: Mapping[str, Shape], formats: Mapping[str, LinearFormat] = FORMATS) -> None:
    """Raise ModelError unless ``shapes`` are the tensors of ``spec``.

    Harmless tensors may be there too.
    """
    check_shapes(spec.architecture, expected_tensors(spec, formats), shapes, lambda name: is_harmless(name, spec))


def check_shapes(
    what: str,
    expected: Mapping[str, Shape],
    shapes: Mapping[str, Shape],
    harmless: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raise ModelError unless ``shapes`` are the ``expected`` ones, apart from ``harmless`` tensors.

    ``what`` names the model in the error.
    """
    problems = []
    if missing := sorted(expected.keys() - shapes.keys()):
        problems.append(f"missing tensors: {some(missing)}")
    if unknown := sorted(name for name in shapes.keys() - expected.keys() if not harmless(name)):
        problems.append(f"unknown tensors: {some(unknown)}")
    wrong = [
        f"{name} has shape {list(shapes[name])}, needs {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape and not math.prod(shapes[name]) == 1 == math.prod(shape)
    ]
    if wrong:
        problems.append(some(wrong))
    if problems:
        raise ModelError(f"the checkpoint does not fit {what}: {'; '.join(problems)}")


BUFFERS = (r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",)
"""Harmless tensors of old exporters, in any family.

The config has their numbers too. A family has more of them in ``ModelSpec.ignored``.
"""


def is_harmless(name: str, spec: ModelSpec) -> bool:
    """Whether the model needs no tensor ``name``.

    Such a tensor is a buffer, a scale of the KV cache (read elsewhere), or the head of a model with tied embeddings
    (:mod:`preheat.model.ties` compares the two).
    """
    if (spec.tied and name == f"{TIED_HEAD}.weight") or STORED.fullmatch(name):
        return True
    return any(re.fullmatch(pattern, name) for pattern in (*BUFFERS, *spec.ignored))
