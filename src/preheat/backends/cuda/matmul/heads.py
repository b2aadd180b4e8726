"""Linear layers of heads on CUDA: one launch for all heads, each with its own matrix.

Contract. An output has the bits of the head's matrix as a linear layer of its own
(:mod:`preheat.backends.cuda.matmul.gemm`): a sum of products over the inputs, in order, in one fp32 accumulator, that
is rounded to the dtype once. Numbers behind a head's inputs are copied. Heads, rows and tiles only assign outputs to
programs.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.device.sizes import cdiv, next_power_of_2
from preheat.backends.cuda.matmul.ahead import ask, asked_plain
from preheat.backends.cuda.matmul.config import Tile, shape_of
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.maps import Cut, corner
from preheat.backends.cuda.matmul.products import plain
from preheat.ops.values import Matmul


@triton.jit(do_not_specialize=["rows"])
def gemm_heads(
    x, w, y, x_row, x_head, y_row, y_head, rows, outputs, inputs, REST: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, CUT: tl.constexpr, ASKED: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Compute one tile [CUT.outputs, CUT.rows] of a head a program.

    Rows of x and y are ``x_row`` and ``y_row`` numbers apart, heads ``x_head`` and ``y_head``. The programs of a head's
    first outputs copy its last ``REST`` numbers. ``EVEN``: a tile's depth divides the inputs. ``ASKED`` bytes of an
    output's weights are asked for before the kernel ahead has ended.
    """
    head = tl.program_id(1).to(tl.int64)
    first, row = corner(rows, outputs, CUT)
    out = tl.minimum(first + tl.arange(0, CUT.outputs), outputs - 1)
    if ASKED > 0:
        ask(plain, w, head, out, inputs, outputs, ASKED)
    begin(overlap)
    token = tl.minimum(row + tl.arange(0, CUT.rows), rows - 1).to(tl.int64)
    xs_at, ws_at = x + head * x_head + token[None, :] * x_row, w + (head * outputs + out)[:, None] * inputs
    to = y + head * y_head + token * y_row
    DEEP: tl.constexpr = CUT.inputs
    acc = tl.zeros([out.shape[0], token.shape[0]], tl.float32)
    for k in range(0, inputs, DEEP):
        columns = k + tl.arange(0, DEEP)
        if EVEN:
            xs, ws = tl.load(xs_at + columns[:, None]), tl.load(ws_at + columns[None, :])
        else:
            xs = tl.load(xs_at + columns[:, None], mask=(columns < inputs)[:, None], other=0.0)
            ws = tl.load(ws_at + columns[None, :], mask=(columns < inputs)[None, :], other=0.0)
        acc = tl.dot(ws, xs, acc, input_precision="ieee")
    real = row + tl.arange(0, CUT.rows) < rows
    outs = first + tl.arange(0, CUT.outputs)
    tl.store(to[None, :] + outs[:, None], acc.to(y.dtype.element_ty), mask=(outs < outputs)[:, None] & real[None, :])
    if REST > 0:  # noqa: SIM102 - one is known to the compiler
        if first == 0:
            rest = tl.arange(0, WIDTH)
            own = (rest < REST)[:, None] & real[None, :]
            numbers = tl.load(xs_at + inputs + rest[:, None], mask=own)
            tl.store(to[None, :] + outputs + rest[:, None], numbers, mask=own)


class HeadsLayer:
    """The layer of ``value`` for each head; ``configs`` choose the kernel for a number of rows."""

    def __init__(self, value: Matmul, weight: Tensor, configs: KernelConfigs) -> None:
        self.shape, self.configs, self.weight = shape_of(value), configs, weight

    @property
    def outputs(self) -> int:
        return self.shape.outputs

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See :class:`preheat.backends.base.layers.HeadLayers`."""
        self.by(self.configs.heads(self.shape, len(x), len(self.weight)), x, out)

    def by(self, tile: Tile, x: Tensor, out: Tensor) -> None:
        """Write the outputs of ``x`` to ``out`` by tiles like ``tile``."""
        heads, outputs, inputs = self.weight.shape
        rest = x.shape[2] - inputs
        gemm_heads[(cdiv(outputs, tile.outputs) * cdiv(len(x), tile.rows), heads)](
            x, self.weight, out, *x.stride()[:2], *out.stride()[:2], len(x), outputs, inputs,
            REST=rest, WIDTH=next_power_of_2(rest), EVEN=inputs % tile.inputs == 0,
            CUT=Cut(tile.outputs, tile.rows, tile.inputs, 1), ASKED=asked_plain(tile),
            **options(num_warps=tile.warps, num_stages=tile.stages),
        )  # fmt: skip

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        yield self.weight

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        return ()
