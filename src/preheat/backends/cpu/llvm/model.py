"""The layers of a model as compiled functions, with the buffers that a step needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from llvmlite import binding, ir
from torch import Tensor

from preheat.backends.base import LayerParts, Linear, Norm
from preheat.backends.cpu.llvm import functions, job
from preheat.backends.cpu.llvm.attention import LlvmAttention
from preheat.backends.cpu.llvm.kinds import COUNTERS, LANES, LAYER_FRAME, PANEL, SPLIT, LayerKind, Product
from preheat.backends.cpu.llvm.layer import PanelLayer, addresses, floats
from preheat.backends.cpu.llvm.machine import Code, compile_code
from preheat.backends.cpu.llvm.memory import zeros
from preheat.backends.cpu.llvm.team import Team
from preheat.errors import ModelError
from preheat.limits import Limits
from preheat.ops.norm import RMSNorm

_FRAME_WORDS = 32


class Functions:
    """The layers of a model, each a front and a back, with ``threads`` threads and room for ``rows`` rows.

    The front goes from the residual stream to the output of attention, the back adds the rest of the layer to the
    stream. All activations are float32. Raises ModelError for a layer that has no function.
    """

    def __init__(
        self, layers: Sequence[LayerParts], final_norm: Norm, head: Linear, limits: Limits, *, threads: int,
        folder: Path | None, rows: int,
    ) -> None:  # fmt: skip
        self._rows, self._kept = rows, list[Tensor]()
        self._kinds = [_kind(layer, limits) for layer in layers]
        panels = [each for layer in layers for each in _panels(layer)]
        panels += [head] if isinstance(head, PanelLayer) else []
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(self._kinds))}
        alone = {how: number for number, how in enumerate(dict.fromkeys(layer.how for layer in panels))}
        assert isinstance(final_norm, RMSNorm)
        self.source = _source(numbers, alone, self._kinds[0].hidden, final_norm.eps)
        self.code = Code(compile_code(self.source, folder)[0])
        self.team = Team(self.code, threads)
        self._fronts = [self.code.address(f"front{numbers[kind]}") for kind in self._kinds]
        self._backs = [self.code.address(f"back{numbers[kind]}") for kind in self._kinds]
        self._norm = self.code.address("norm")
        self._attended = torch.zeros(rows, max(kind.heads * kind.dim for kind in self._kinds))
        self._buffers(rows, threads)
        tables: dict[int, tuple[int, int]] = {}
        self._frames = [self._frame(layer, tables) for layer in layers]
        self._last = zeros(_FRAME_WORDS, np.int64)
        self._last[LAYER_FRAME["norm"]] = self._keep(floats(final_norm.weight))
        self._addresses = [frame.ctypes.data for frame in self._frames]
        for layer in panels:
            layer.run = self._alone(layer, self.code.address(f"alone{alone[layer.how]}"))
        self.attention = LlvmAttention(self._positions, self._tables, limits.max_blocks_per_seq)

    def _buffers(self, rows: int, threads: int) -> None:
        kinds = self._kinds
        self._positions, self._tables = zeros(rows, np.int64), zeros(rows, np.int64)
        sizes = {
            "qkv": rows * max(kind.qkv.outputs for kind in kinds),
            "inner": rows * max(kind.down.inputs for kind in kinds),
            "normed": threads * rows * max(kind.hidden for kind in kinds),
            "scores": threads * SPLIT * max(kind.heads // kind.kv_heads for kind in kinds),
        }
        self._arrays = {name: zeros(size, np.float32) for name, size in sizes.items()}
        for name, array in self._arrays.items():
            self.team.set(name, array.ctypes.data)
        self.team.set("positions", self._positions.ctypes.data)
        self.team.set("tables", self._tables.ctypes.data)

    def _frame(self, layer: LayerParts, tables: dict[int, tuple[int, int]]) -> np.ndarray:
        """Return a layer's frame. ``tables``: the cosines and sines of known tables, by their identity."""
        frame, attention = zeros(_FRAME_WORDS, np.int64), layer.attention
        for name, part in zip(("qkv", "o", "gate_up", "down"), _panels(layer), strict=True):
            frame[LAYER_FRAME[name]], frame[LAYER_FRAME[f"{name}_bias"]] = addresses(part)
        for name, norm in (("norm", layer.input_norm), ("post_norm", layer.post_norm)):
            assert isinstance(norm, RMSNorm)
            frame[LAYER_FRAME[name]] = self._keep(floats(norm.weight))
        if isinstance(attention.qk_norm, RMSNorm):
            for name, head in (("q_norm", 0), ("k_norm", -1)):
                frame[LAYER_FRAME[name]] = self._keep(floats(attention.qk_norm.weight[head].clone()))
        assert attention.rope is not None
        if id(attention.rope) not in tables:
            half, table = attention.head_dim // 2, attention.rope[:, :, 0]
            cos, sin = table[:, 0, :half], table[:, 1, half:]
            tables[id(attention.rope)] = self._keep(floats(cos)), self._keep(floats(sin))
        frame[LAYER_FRAME["cos"]], frame[LAYER_FRAME["sin"]] = tables[id(attention.rope)]
        frame[LAYER_FRAME["window"]] = attention.window or 0
        frame[LAYER_FRAME["cache"]] = attention.cache.data_ptr()
        return frame

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor that a frame points to, and return its address."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _alone(self, layer: PanelLayer, function: int) -> Callable[[Tensor], Tensor]:
        """Return what runs one product by itself."""
        frame = zeros(_FRAME_WORDS, np.int64)
        frame[LAYER_FRAME["qkv"]], frame[LAYER_FRAME["qkv_bias"]] = addresses(layer)
        address, width, outputs = frame.ctypes.data, layer.how.results, layer.value.outputs

        def run(x: Tensor, frame: np.ndarray = frame) -> Tensor:
            out = torch.empty(len(x), width)
            self._run(function, address, x, out)
            return out if layer.how.gated or outputs == width else out[:, :outputs].contiguous()

        return run

    def _run(self, function: int, layer: int, x: Tensor, attended: Tensor) -> None:
        assert len(x) <= self._rows, f"{len(x)} rows, buffers have {self._rows}"
        self.team.point("x", x)
        self.team.point("attended", attended)
        self.team.run(function, layer, len(x))

    def front(self, index: int, residual: Tensor) -> Tensor:
        """Return the output of attention [tokens, heads * dim].

        The output is valid until the next front. ``residual`` [tokens, hidden] is not changed.
        """
        attended = self._attended[: len(residual)]
        self._run(self._fronts[index], self._addresses[index], residual, attended)
        return attended

    def back(self, index: int, attended: Tensor, residual: Tensor) -> None:
        """Add the rest of the layer to ``residual`` [tokens, hidden]."""
        self._run(self._backs[index], self._addresses[index], residual, attended)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the hidden states [tokens, hidden] after the last layer and the final norm."""
        self.back(len(self._frames) - 1, attended, residual)
        hidden = torch.empty_like(residual)
        self._run(self._norm, self._last.ctypes.data, residual, hidden)
        return hidden


def _source(kinds: dict[LayerKind, int], alone: dict[Product, int], hidden: int, eps: float) -> str:
    """Return the functions of a model in LLVM's language."""
    module = ir.Module("preheat")
    module.triple = binding.get_default_triple()
    for kind, number in kinds.items():
        functions.front(module, f"front{number}", kind)
        functions.back(module, f"back{number}", kind)
    for how, number in alone.items():
        functions.alone(module, f"alone{number}", how)
    functions.norms(module, "norm", hidden, eps)
    job.jobs(module, COUNTERS)
    return str(module)


def _panels(layer: LayerParts) -> list[PanelLayer]:
    """Return the linear layers of a dense layer, in the order of their work."""
    return [each for each in (layer.qkv, layer.o, layer.gate_up, layer.down) if isinstance(each, PanelLayer)]


def _kind(layer: LayerParts, limits: Limits) -> LayerKind:
    """Return the kind of a layer. Raises ModelError, with the reason, if it has no function."""
    reason = next(_missing(layer, limits), None)
    if reason is not None:
        raise ModelError(f"execution mode llvm: {reason}; use --execution-mode eager")
    qkv, o, gate_up, down = (each.how for each in _panels(layer))
    attention, norm = layer.attention, layer.input_norm
    return LayerKind(
        hidden=qkv.inputs,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        dim=attention.head_dim,
        scale=attention.scale,
        eps=norm.eps if isinstance(norm, RMSNorm) else 0.0,
        qk_norm=attention.qk_norm.eps if isinstance(attention.qk_norm, RMSNorm) else None,
        cached="bfloat16" if attention.cache.dtype == torch.bfloat16 else "float32",
        block_size=limits.block_size,
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
    )


def _missing(layer: LayerParts, limits: Limits) -> Iterator[str]:
    """Yield the reasons why a layer has no function."""
    attention = layer.attention
    norms = [layer.input_norm, layer.post_norm, attention.qk_norm]
    if any(norm is not None and getattr(norm, "kind", None) != "rms" for norm in norms):
        yield "norms other than RMS have no function"
    if getattr(layer.input_norm, "eps", None) != getattr(layer.post_norm, "eps", None):
        yield "norms of one layer with an eps each have no function"
    if layer.out_norms:
        yield "norms of a block's output have no function"
    if attention.rope is None or attention.alibi is not None:
        yield "attention without rotary positions has no function"
    if attention.head_dim % (2 * LANES):
        yield f"heads of {attention.head_dim} numbers have no function, only multiples of {2 * LANES}"
    if attention.cache.dtype not in (torch.float32, torch.bfloat16):
        yield "a KV cache of 8 bits has no function"
    if limits.block_size % LANES:
        yield f"blocks of {limits.block_size} tokens have no function, only multiples of {LANES}"
    if not isinstance(layer.gate_up, PanelLayer) or not layer.gate_up.how.gated:
        yield "feed-forward blocks other than SwiGLU have no function"
    if any(part.value.outputs % PANEL for part in _panels(layer)):
        yield f"a hidden size that is no multiple of {PANEL} has no function"
