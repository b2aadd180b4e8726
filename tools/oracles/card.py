"""A simulated GPU, by default of the Hopper generation.

Its kernels are bound, compiled if asked for, and never run. No GPU is needed. Inside :func:`watched` the CUDA backend's
layers are called with tensors of torch's device "meta". Each launch and each new tensor is noted in order.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from preheat.backends.cuda.device.card import CARDS, Capability

META = torch.device("meta")
CAPABILITY, NAME = (9, 0), "NVIDIA H200"
VIEWS = ("view", "unsqueeze", "squeeze", "slice", "select", "transpose", "permute", "split", "unbind", "expand", "t",
         "detach", "as_strided", "alias", "chunk")  # fmt: skip
"""Operations that take no memory and compute nothing."""


class Launch(NamedTuple):
    """A kernel and everything that its program depends on.

    ``constants`` are values of compiled-in arguments.
    """

    kernel: Any
    grid: tuple[int, ...]
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: Any

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def text(self) -> str:
        """The launch in a line.

        It has the name, the grid, launch options, constants, and types of arguments except whole numbers.
        """
        names = self.kernel.arg_names
        values = {names[path[0]] + "".join(f".{at}" for at in path[1:]): _shown(self.constants[path])
                  for path in sorted(self.constants)}  # fmt: skip
        how = self.options
        parts = [f"{self.name} {self.grid}", f"warps={how.num_warps} stages={how.num_stages}"]
        parts += ["pdl"] * bool(how.launch_pdl) + [f"maxnreg={how.maxnreg}"] * bool(how.maxnreg)
        parts += ["unfused"] * (not how.enable_fp_fusion) + [f"{name}={value}" for name, value in values.items()]
        types = {name: kind for name, kind in self.signature.items() if kind not in ("constexpr", "i32")}
        parts += [f"{name}:{_shown(kind)}" for name, kind in types.items()]
        return " ".join(parts)

    @property
    def key(self) -> str:
        """Everything that the compiled program depends on: the launch without its grid."""
        return f"{self.text} {sorted(map(str, self.attrs.items()))}".replace(str(self.grid), "", 1)

    def compiled(self, capability: Capability = CAPABILITY) -> Any:
        """Compile and return the program for ``capability``."""
        source = self.kernel.ASTSource(self.kernel, self.signature, self.constants, self.attrs)
        return triton.compile(source, target=target(capability), options=self.options.__dict__)


class Seen:
    """The launches and new tensors of a call, in order."""

    def __init__(self) -> None:
        self.events: list[Launch | str] = []

    @property
    def launches(self) -> list[Launch]:
        return [each for each in self.events if isinstance(each, Launch)]

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.events]


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Note the launches and allocations of the block in ``seen``."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
        seen.events.append(_bound(kernel, args, grid, more))

    with mock.patch.object(triton.JITFunction, "run", run), _Tensors(seen):
        yield


def _bound(kernel: Any, args: tuple[Any, ...], grid: Any, more: dict[str, Any]) -> Launch:
    """Bind a launch as ``triton.JITFunction.run`` does."""
    more = {"debug": False, "instrumentation_mode": "", **more}
    *_, backend, binder = kernel.device_caches[driver.active.get_current_device()]
    bound, specialization, options = binder(*args, **more)
    packed, signature, constants, attrs = kernel._pack_args(backend, more, bound, specialization, options)
    grid = grid(bound) if callable(grid) else grid
    return Launch(kernel, tuple(map(int, grid)), signature, constants, attrs, packed)


class _Tensors(TorchDispatchMode):
    """Notes the operations of torch that make or change tensors on the card."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        to = (kwargs or {}).get("out")  # torch 2.11 cannot simulate a product in another dtype
        found = to if isinstance(to, torch.Tensor) and to.device == META else func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = found if isinstance(found, torch.Tensor) else None
        if made is not None and made.device == META and name not in VIEWS and not name.endswith("view"):
            self._seen.events.append(f"{name} {str(made.dtype).removeprefix('torch.')} {list(made.shape)}")
        return found


def target(capability: Capability) -> GPUTarget:
    """Return Triton's name of ``capability``."""
    return GPUTarget("cuda", capability[0] * 10 + capability[1], 32)


@contextmanager
def card(capability: Capability = CAPABILITY) -> Iterator[None]:
    """Simulate a GPU of ``capability`` on the device "meta" for the whole process."""
    from preheat.backends import cuda
    from preheat.backends.cuda.device import detect as device
    from preheat.backends.cuda.device import hopper, launch

    for each in pkgutil.walk_packages(cuda.__path__, f"{cuda.__name__}."):
        importlib.import_module(each.name)  # all of them are patched
    simulated = CARDS[capability]
    active = SimpleNamespace(
        get_current_device=lambda: simulated.capability[0] * 10 + simulated.capability[1],  # kernels keep a binder each
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target(capability),
        get_device_capability=lambda device: capability,
        set_current_device=lambda device: None,
    )
    properties = SimpleNamespace(multi_processor_count=simulated.processors, name=NAME)
    with ExitStack() as stack:
        before = driver._active
        driver.set_active(active)
        stack.callback(driver.set_active, before)
        for owner, name, value in (
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch, "equal", lambda one, other: True),  # scales are numbers of sixteen bits
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        _everywhere(stack, hopper.is_hopper, lambda device=None: simulated.is_hopper)
        _everywhere(stack, launch.processors, lambda device: simulated.processors)
        _everywhere(stack, launch.overlap, lambda: simulated.early_launch)
        _everywhere(stack, device.card_at, lambda device=None: simulated)
        yield


def _everywhere(stack: ExitStack, old: Any, new: Any) -> None:
    """Let ``new`` stand for the function ``old`` in all modules of the backend."""
    for module in [each for name, each in sys.modules.items() if name.startswith("preheat.backends.cuda.")]:
        for name, value in list(vars(module).items()):
            if value is old:
                stack.enter_context(mock.patch.object(module, name, new))


def _shown(value: Any) -> str:
    if hasattr(value, "value"):  # a constexpr
        value = value.value
    if isinstance(value, tuple):
        return "(" + ",".join(map(_shown, value)) + ")"
    return getattr(value, "__name__", None) or str(value).replace(" ", "")
