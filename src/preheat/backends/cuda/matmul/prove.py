"""Proof that implementations of linear maps give the contract's bits, on this device.

An implementation's result, eager and captured in a graph, is compared with the result of the plain kernel in all rows
and columns, for three sets of data. With quantized weights the plain kernel gets dequantized weights. With float8
activations the reference is one tile of their own kernel. Normal numbers show an error. Numbers of all magnitudes with
exact sums of zero leave nothing but the order of the additions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.backends.cuda.device.compiling import compiling
from preheat.backends.cuda.device.graph import capture
from preheat.backends.cuda.matmul.config import ExpertsShape, KernelConfig, LinearShape, experts_reference, reference
from preheat.backends.cuda.matmul.heads import HeadsLayer
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.linear import apply
from preheat.backends.cuda.matmul.weights import DeviceWeight, PlainWeight, Weight
from preheat.errors import KernelRefused
from preheat.ops import fp4
from preheat.ops.kinds import Code
from preheat.ops.proof import rows_compared, signed_pairs, spread
from preheat.ops.quantization import E4M3_MAX, empty_weight

if TYPE_CHECKING:
    from preheat.backends.cuda.matmul.moe.experts import ExpertsLayer

logger = logging.getLogger(__name__)

SEEDS = 3
BITS = {2: torch.int16, 4: torch.int32}


def settle(
    configs: KernelConfigs,
    layers: Iterable[tuple[LinearShape, Sequence[int]]],
    adapted: Collection[LinearShape] = (),
) -> dict[tuple[LinearShape, int], bool]:
    """Settle the kernels of a model's linear layers at their numbers of rows.

    Layers in ``adapted`` have adapters. Kernels are compiled side by side, then each kernel without the contract's bits
    is rejected; without invariance none is. The answer says of each layer and number of rows whether all kernels that
    may serve it have the bits.
    """
    sizes = _sizes(layers)
    _compile_or_withdraw(configs, sizes, _used(configs, sizes, adapted), adapted)
    proven: dict[tuple[LinearShape, int], bool] = {}
    if configs.invariant:
        for shape, numbers in sizes.items():
            proven |= prove(configs, [shape], list(numbers), adapted=shape in adapted)
    return proven


def launch(
    configs: KernelConfigs,
    layers: Iterable[tuple[LinearShape, Sequence[int]]],
    adapted: Collection[LinearShape] = (),
) -> None:
    """Launch the kernels that :func:`settle` compiles, to compile them with others."""
    _launch(_used(configs, _sizes(layers), adapted))


def _sizes(layers: Iterable[tuple[LinearShape, Sequence[int]]]) -> dict[LinearShape, dict[int, None]]:
    """Return the numbers of rows of each shape, in order."""
    sizes: dict[LinearShape, dict[int, None]] = {}
    for shape, rows in layers:
        sizes.setdefault(shape, {}).update(dict.fromkeys(rows))
    return sizes


def _used(
    configs: KernelConfigs, sizes: Mapping[LinearShape, Iterable[int]], adapted: Collection[LinearShape]
) -> list[tuple[LinearShape, KernelConfig]]:
    """Return the chosen kernels of all shapes, then their references."""
    chosen = [
        (shape, choice)
        for shape, numbers in sizes.items()
        for size in numbers
        for choice in configs.used(shape, size, adapted=shape in adapted)
    ]
    return chosen + [(shape, reference(shape)) for shape in sizes]


def _compile_or_withdraw(
    configs: KernelConfigs,
    sizes: Mapping[LinearShape, Collection[int]],
    used: Sequence[tuple[LinearShape, KernelConfig]],
    adapted: Collection[LinearShape],
) -> None:
    """Compile the kernels ``used``, and serve layers by the reference where the chosen kernel does not compile.

    Raise KernelRefused if a reference does not compile.
    """
    try:
        compile_kernels(used)
        return
    except KernelRefused:
        reasons = {pair: reason for pair in dict.fromkeys(used) if (reason := _refusal(*pair))}
    for (shape, choice), reason in reasons.items():
        if choice == reference(shape):
            raise KernelRefused(f"{reason}; it is the only kernel for {shape}: use --device cpu, or another GPU")
        for size in sizes[shape]:
            if choice in configs.used(shape, size, adapted=shape in adapted):
                logger.warning("%s is not used for %d rows of %s: %s", choice, size, shape, reason)
                configs.withdraw(shape, size)


def _refusal(shape: LinearShape, choice: KernelConfig) -> str | None:
    """Return why the kernel ``choice`` does not compile, or None."""
    try:
        compile_kernels([(shape, choice)])
    except KernelRefused as refused:
        return refused.message
    return None


def compile_kernels(used: Iterable[tuple[LinearShape, KernelConfig]], *, ignore_errors: bool = False) -> None:
    """Compile our kernels among ``used``, side by side, unless they are compiled already."""
    with compiling(os.cpu_count() or 1, ignore_errors=ignore_errors):
        _launch(used)


def _launch(used: Iterable[tuple[LinearShape, KernelConfig]]) -> None:
    """Launch our kernels among ``used``, each once."""
    for shape, choice in dict.fromkeys(used):
        kernel = choice.multiplies
        x, weight, bias, y = _operands(shape, 1 if kernel.kind == "library" else kernel.rows)
        if kernel.kind != "library":
            _by(choice, shape, x, weight, bias, y)
        elif choice.kind == "expanded":
            weight.plain()


def prove(
    configs: KernelConfigs, shapes: Iterable[LinearShape], rows: Sequence[int], *, adapted: bool = False
) -> dict[tuple[LinearShape, int], bool]:
    """Return whether all kernels of ``configs`` for ``shapes`` at ``rows`` have the contract's bits.

    Reject each kernel without them. A kernel that takes its place is proven, too, unless it is a tile of the plain one.
    """
    proven: dict[tuple[LinearShape, int], bool] = {}
    for shape in dict.fromkeys(shapes):
        proven |= {(shape, size): True for size in rows}
        left = list(rows)
        while left:
            chosen = [(size, choice) for size in left for choice in configs.used(shape, size, adapted=adapted)]
            wrong = differing(shape, chosen)
            for size, choice in chosen:
                if (size, choice) in wrong:
                    proven[shape, size] = False
                    configs.reject(shape, size)
                    logger.info(
                        "%s gives other bits than the reference for %d rows of %s: it is not used", choice, size, shape
                    )
            left = [size for size in dict.fromkeys(size for size, _ in wrong) if configs(shape, size).kind == "wide"]
    return proven


def differing(
    shape: LinearShape, chosen: Sequence[tuple[int, KernelConfig]], seeds: int = SEEDS
) -> set[tuple[int, KernelConfig]]:
    """Return each of ``chosen`` that differs anywhere from the plain kernel.

    ``chosen`` are pairs of a number of rows and an implementation. A layer with few outputs is compared in several
    products of few rows.
    """
    x, weight, bias, expected = _operands(shape, max(rows for rows, _ in chosen))
    differs = torch.zeros(2, len(chosen), dtype=torch.int32, device="cuda")

    def compare(found: Tensor) -> None:
        for index, (rows, choice) in enumerate(chosen):
            room = torch.empty_like(expected[:rows]) if shape.splits else None
            for first in range(0, min(rows_compared(shape.outputs, rows), len(x) // rows * rows), rows):
                part = x[first : first + rows].clone() if first else x[:rows]  # a step's rows are aligned, too
                right = expected[first : first + rows]
                found[index] += _bits(_by(choice, shape, part, weight, bias, room)).ne(_bits(right)).any()

    graph = None
    for seed in range(seeds):
        refill(shape, x, weight, seed)
        _by(reference(shape), shape, x, weight, bias, expected)
        compare(differs[0])
        if graph is None:
            graph = capture(partial(compare, differs[1]))
        graph.replay()
    return {pair for pair, count in zip(chosen, differs.sum(0).tolist(), strict=True) if count}


def settle_experts(used: Iterable[tuple[ExpertsLayer, Sequence[int]]], *, invariant: bool) -> None:
    """Compile the kernels of experts at numbers of tokens; replace kernels with other bits than the plain one.

    Experts are proven with their own weights, of one kind the last ones; without ``invariant`` nothing is proven. The
    launches of a step with terms are compared, too; terms add nothing where no step is described.
    """
    for experts, sizes, apart in _kinds_of_experts(used):
        _settle(_Experts(experts, sizes, apart), SEEDS if invariant else 0)


def launch_experts(used: Iterable[tuple[ExpertsLayer, Sequence[int]]]) -> None:
    """Launch the kernels that :func:`settle_experts` compiles, to compile them with others."""
    for experts, sizes, apart in _kinds_of_experts(used):
        each = _Experts(experts, sizes, apart)
        each.right()
        for tokens in sizes:
            each.found(tokens)


def _kinds_of_experts(
    used: Iterable[tuple[ExpertsLayer, Sequence[int]]],
) -> Iterable[tuple[ExpertsLayer, Sequence[int], bool]]:
    """Return the last layer of each kind with its numbers of tokens, and whether its sums stay apart."""
    kinds = {}
    for experts, sizes in used:
        for apart in (False,) if experts.slots is None else (True, False):
            kinds[experts.value.down.order.is_split, experts.shape, apart] = experts, sizes, apart
    return kinds.values()


class _Experts:
    """Experts with room for the most of ``sizes`` tokens; ``apart``: the sums of their parts are not added."""

    def __init__(self, layer: ExpertsLayer, sizes: Sequence[int], apart: bool) -> None:
        self.layer, self.sizes, self._apart = layer, sizes, apart
        self.x, self.logits = _routed(layer.shape, max(sizes))

    def right(self) -> Tensor:
        """Return the contract's outputs."""
        plain, apart = experts_reference(self.layer.shape), self._apart and self.layer.value.down.order.is_split
        return self.layer.local(plain, self.x, self.logits, apart=apart)

    def found(self, tokens: int) -> Tensor:
        """Return the outputs of the first tokens by the chosen kernels."""
        config = self.layer.configs.experts(self.layer.shape, tokens)
        return self.layer.local(config, self.x[:tokens], self.logits[:tokens], apart=self._apart)


def _settle(each: _Experts, seeds: int) -> None:
    shape, configs, sizes = each.layer.shape, each.layer.configs, each.sizes
    with compiling(os.cpu_count() or 1):
        each.right()
    for tokens in _refused(sizes, each.found):
        configs.reject_experts(shape, tokens)
    wrong: set[int] = set()
    for seed in range(seeds):
        fill(each.x, each.logits, seed)
        each.logits.normal_()
        expected = each.right()
        wrong |= {tokens for tokens in sizes if _bits(each.found(tokens)).ne(_bits(expected[:tokens])).any()}
    for tokens in sorted(wrong):
        config = configs.experts(shape, tokens)
        logger.info("%s gives other bits than the contract for %d tokens of %s: it is not used", config, tokens, shape)
        configs.reject_experts(shape, tokens)


def settle_heads(used: Iterable[tuple[HeadsLayer, Sequence[int]]], *, invariant: bool) -> None:
    """Compile the kernels of layers of heads; replace kernels with other bits than each head's own layer.

    Of layers of one kind the last one is proven, with its own weights. Without ``invariant`` nothing is proven.
    """
    for layer, sizes in {(layer.shape, len(layer.weight)): (layer, sizes) for layer, sizes in used}.values():
        _settle_heads(layer, sizes, SEEDS if invariant else 0)


def _settle_heads(layer: HeadsLayer, sizes: Sequence[int], seeds: int) -> None:
    shape, (heads, outputs, inputs), plain = layer.shape, layer.weight.shape, reference(layer.shape)
    x = layer.weight.new_empty(max(sizes), heads, inputs)
    y, expected = x.new_empty(2, max(sizes), heads, outputs)

    def found(rows: int) -> None:
        layer(x[:rows], y[:rows])

    for rows in _refused(sizes, found):
        layer.configs.reject_heads(shape, rows, heads)
    wrong: set[int] = set()
    for seed in range(seeds):
        _fill(x, 1.0, seed, torch.Generator(x.device).manual_seed(seed))
        for head, weight in enumerate(layer.weight):
            expected[:, head] = apply(plain, x[:, head].contiguous(), PlainWeight(weight), None, False)
        for rows in sizes:
            found(rows)
            if _bits(y[:rows]).ne(_bits(expected[:rows])).any():
                wrong.add(rows)
    for rows in sorted(wrong):
        tile = layer.configs.heads(shape, rows, heads)
        logger.info("%s gives other bits than the contract for %d rows of heads of %s: not used", tile, rows, shape)
        layer.configs.reject_heads(shape, rows, heads)


def _refused(sizes: Sequence[int], found: Callable[[int], object]) -> Iterator[int]:
    """Compile the kernels that ``found`` launches, and yield the numbers of tokens with a refused kernel."""

    def refusal(some: Sequence[int]) -> str | None:
        try:
            with compiling(os.cpu_count() or 1):
                for tokens in some:
                    found(tokens)
        except KernelRefused as refused:
            return refused.message
        return None

    for tokens in sizes if refusal(sizes) else ():
        if reason := refusal([tokens]):
            logger.warning("The reference serves %d tokens of experts: %s", tokens, reason)
            yield tokens


def _routed(shape: ExpertsShape, tokens: int) -> tuple[Tensor, Tensor]:
    """Return room for x and logits of ``tokens`` tokens."""
    x = torch.empty(tokens, shape.hidden, device="cuda", dtype=shape.dtype)
    return x, torch.empty(tokens, shape.num_experts, device="cuda", dtype=shape.dtype)


def _by(
    choice: KernelConfig, shape: LinearShape, x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    """Return the layer's outputs for ``x`` by the kernel ``choice``, in ``out`` if it is given."""
    return apply(choice, x, weight, bias, shape.gated, out)


def _operands(shape: LinearShape, rows: int) -> tuple[Tensor, Weight, Tensor | None, Tensor]:
    """Return x, W, b (zeros) and y of ``rows`` rows; y is fp32 sums if the layer's inputs are cut."""
    x = torch.empty(rows, shape.inputs, device="cuda", dtype=shape.dtype)
    weight: Weight
    if shape.scheme is None:
        plain = torch.empty(shape.outputs, shape.inputs, device="cuda", dtype=shape.dtype)
        weight = PlainWeight(plain, max(shape.splits, 1))
    else:
        weight = random_weight(shape, x.device, 0)
    bias = torch.zeros(shape.outputs, device="cuda", dtype=shape.dtype) if shape.bias else None
    y = torch.empty(rows, shape.columns, device="cuda", dtype=torch.float32 if shape.splits else shape.dtype)
    return x, weight, bias, y


def refill(shape: LinearShape, x: Tensor, weight: Weight, seed: int) -> None:
    """Write new numbers into ``x`` and a weight of ``shape`` in place, see :func:`fill`."""
    if weight.form == "plain":
        fill(x, weight.tensor, seed)
        return
    _fill(x, 1.0, seed, torch.Generator(x.device).manual_seed(seed))
    new = random_weight(shape, x.device, seed)
    for tensor, numbers in zip(weight.tensors, new.tensors, strict=True):
        tensor.copy_(numbers)


def fill(x: Tensor, weight: Tensor, seed: int) -> None:
    """Write new numbers in place.

    With ``seed`` 0 they are normal; else they have all magnitudes, and products that sum to zero exactly.
    """
    random = torch.Generator(x.device).manual_seed(seed)
    _fill(x, 1.0, seed, random)
    _fill(weight, -1.0, seed, random)


def _fill(tensor: Tensor, sign: float, seed: int, random: torch.Generator) -> None:
    tensor.normal_(generator=random)
    if seed:
        signed_pairs(spread(tensor, 6.0, random), sign)


_ROUNDED: Mapping[Code, tuple[float, Callable[[Tensor], Tensor]]] = {
    "fp8": (E4M3_MAX, lambda numbers: numbers),
    "fp4": (fp4.MOST, fp4.nearest),
    "int4": (7.0, torch.round),
    "int8": (127.0, torch.round),
}
"""The greatest code of each kind, and how numbers become codes."""


def random_weight(shape: LinearShape, device: torch.device, seed: int) -> DeviceWeight:
    """Return a random quantized weight.

    With ``seed`` 0 it has codes of all sizes and random scales; else one scale, no zero points, and codes in pairs that
    cancel.
    """
    assert shape.scheme is not None
    random = torch.Generator(device).manual_seed(seed)
    weight = empty_weight(shape.scheme, shape.outputs, shape.inputs, dtype=shape.dtype, device=device)
    numbers = torch.empty(weight.shape, device=device)
    _fill(numbers, -1.0, seed, random)
    top, nearest = _ROUNDED[shape.scheme.code]
    numbers.mul_(top / 4).clamp_(-top, top)
    weight.codes.copy_(nearest(numbers))
    weight.scales.uniform_(0.5, 2, generator=random).mul_(2.0**-10)
    if weight.scheme.powers:
        weight.scales.log2_().round_().exp2_()
    if weight.zeros is not None:
        weight.zeros.random_(-7, 9, generator=random)
    if weight.index is not None:
        groups = torch.arange(shape.inputs, device=device) // shape.scheme.group
        weight.index.copy_(groups[torch.randperm(shape.inputs, generator=random, device=device)])
    if weight.static is not None:
        weight.static.fill_(2.0**-5)
    if seed:
        weight.scales.fill_(2.0**-10)
        if weight.zeros is not None:
            weight.zeros.zero_()
    if shape.shuffled:
        weight.scales.copy_(weight.scales.to(torch.bfloat16 if shape.bf16_scales else torch.float16))
    return DeviceWeight.of(weight, shuffled=shape.shuffled, splits=max(shape.splits, 1))


def _bits(y: Tensor) -> Tensor:
    return y.view(BITS[y.dtype.itemsize])
