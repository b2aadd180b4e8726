"""Read a tensor's file of ``torch.save``, without torch.

Nothing in the file is run. The file is a zip, uncompressed: ``data.pkl`` describes the tensor, ``data/0`` has its
bytes. The pickle is followed step by step here, as far as a plain tensor needs it. Its calls are only looked at, and
any other instruction is an error. Source: ``torch/serialization.py``, the format since 1.6.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from typing import Any, NamedTuple

DTYPES = {"FloatStorage": "float32", "BFloat16Storage": "bfloat16", "HalfStorage": "float16"}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

MAX_PICKLE = 1 << 12
"""Most bytes of ``data.pkl``, the description of one tensor: torch writes a few hundred."""

MAX_ENTRIES = 16
"""Most files in the zip: torch writes six."""

MAX_PARTS = 64
"""Most values in the pickle's result, each counted as often as it occurs: a tensor of three dimensions has about 20."""

INTEGER_BITS = 63
"""Most bits of a number in the pickle: torch's shapes, strides and offsets are 64-bit integers."""

_FEW = "it is not a file of torch.save: such a file has few parts, and none are compressed"
_LARGE = "its description is larger than that of one plain tensor"
_ENTRY = b"PK\1\2"  # the beginning of each entry of a zip's directory

_CALLS = ("torch._utils _rebuild_tensor_v2", "collections OrderedDict")
_PUSHED = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "GLOBAL"}
_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


class TorchTensor(NamedTuple):
    """A tensor; ``data`` are its numbers in order, little-endian, of type ``dtype``, a name of torch."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Called(NamedTuple):
    """A call in the pickle, and its arguments; it is never made."""

    function: str
    args: Any


class _Stored(NamedTuple):
    """A tuple that names another part of the file."""

    parts: Any


def read_tensor(file: bytes) -> TorchTensor:
    """Return the tensor in ``file``. Raises ValueError, with the reason, if there is none."""
    if file.count(_ENTRY) > MAX_ENTRIES:  # before the directory is read: many entries take long
        raise ValueError(_FEW)
    try:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            return _tensor(archive)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OverflowError) as error:
        raise ValueError(f"it is not a file of torch.save ({error})") from error


def _tensor(archive: zipfile.ZipFile) -> TorchTensor:
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
        raise ValueError(_FEW)
    if "data.pkl" not in members or members["data.pkl"].file_size > MAX_PICKLE:
        raise ValueError("it is not a file of torch.save with one tensor")
    if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
        raise ValueError("its bytes are not little-endian")
    dtype, key, offset, shape = _described(_followed(archive.read(members["data.pkl"])))
    if f"data/{key}" not in members:
        raise ValueError("the tensor's numbers are missing")
    size = ITEM_BYTES[dtype]
    first, last = offset * size, (offset + math.prod(shape)) * size
    data = archive.read(members[f"data/{key}"])
    if last > len(data):
        raise ValueError(f"the tensor has shape {list(shape)}, but the file has fewer numbers")
    return TorchTensor(dtype, shape, data[first:last])


def _described(found: object) -> tuple[str, str, int, tuple[int, ...]]:
    """Return type, name of the numbers' file, offset of the first number, and shape."""
    match found:
        case _Called("torch._utils _rebuild_tensor_v2", (_Stored(parts), int(offset), tuple(shape), tuple(stride), *_)):
            pass
        case _:
            raise ValueError("it holds something other than one plain tensor")
    match parts:
        case ("storage", str(kind), str(key), str(), int()) if kind.startswith("torch "):
            dtype = DTYPES.get(kind.removeprefix("torch "))
        case _:
            raise ValueError("it holds something other than one plain tensor")
    if dtype is None:
        raise ValueError(f"its numbers are of torch.{parts[1].removeprefix('torch ').removesuffix('Storage').lower()};"
                         f" {', '.join(ITEM_BYTES)} are taken")  # fmt: skip
    if offset < 0 or not all(type(side) is int and side > 0 for side in shape):
        raise ValueError(f"its shape {list(shape)} must be numbers above 0")
    if stride != tuple(math.prod(shape[at + 1 :]) for at in range(len(shape))):
        raise ValueError("its numbers are not in order: call contiguous() before it is saved")
    return dtype, key, offset, shape


def _parts(value: object) -> int:
    """Return the number of values in ``value``, itself included."""
    return 1 + sum(map(_parts, value)) if isinstance(value, tuple) else 1


def _small(value: Any) -> Any:
    """Return ``value``. Raises ValueError if it has many parts.

    A tuple of a tuple twice, made again and again, would double its parts each time.
    """
    if _parts(value) > MAX_PARTS or (isinstance(value, int) and value.bit_length() > INTEGER_BITS):
        raise ValueError(_LARGE)
    return value


def _followed(pickle: bytes) -> object:
    """Return the result that the pickle describes; nothing in it is called.

    Each value on the stack is small, and so is the stack.
    """
    stack: list[Any] = []
    memo: dict[object, Any] = {}
    try:
        for code, arg, _ in pickletools.genops(pickle):
            name = code.name
            if len(stack) > MAX_PARTS:
                raise ValueError(_LARGE)
            if name in _PUSHED:
                stack.append(_small(arg))
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name == "MARK":
                stack.append(_MARK)
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[arg] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[arg])
            elif name in _TUPLES:
                stack[-_TUPLES[name] :] = [_small(tuple(stack[-_TUPLES[name] :]))]
            elif name == "TUPLE":
                at = len(stack) - 1 - stack[::-1].index(_MARK)
                stack[at:] = [_small(tuple(stack[at + 1 :]))]
            elif name == "BINPERSID":
                stack.append(_small(_Stored(stack.pop())))
            elif name == "REDUCE":
                args, function = stack.pop(), stack.pop()
                if function not in _CALLS:
                    raise ValueError(f"it would call {str(function)[:80]}, and nothing of a file is called")
                stack.append(_small(_Called(function, args)))
            elif name not in ("PROTO", "STOP"):
                raise ValueError(f"it holds something other than one plain tensor ({name})")
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError("its description is broken") from error
    if len(stack) != 1:
        raise ValueError("its description is broken")
    return stack[0]
