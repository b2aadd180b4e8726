"""Launches of every kernel on a simulated card, in the configurations of the rules.

The backend's own host code launches them with tensors of torch's device "meta": see :mod:`tools.oracles.card`. Nothing
runs. Kernels written in Gluon are for Hopper alone, so they are among the launches of 9.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cuda.attention import hopper as attention_hopper
from preheat.backends.cuda.attention import latent, paged
from preheat.backends.cuda.attention.latent_few import few_rows_attention
from preheat.backends.cuda.attention.latent_rotary import turn_and_write
from preheat.backends.cuda.attention.rotary import rope_and_write
from preheat.backends.cuda.attention.values import Latents, Pieces, Places, Rows, Scores, Workspace
from preheat.backends.cuda.device.card import Card as Hardware
from preheat.backends.cuda.lacking import lacking
from preheat.backends.cuda.matmul.heads import HeadsLayer
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.moe.shared import add_shared
from preheat.backends.cuda.pointwise.activation import activate, clip, silu_and_mul
from preheat.backends.cuda.pointwise.digest import digest_rows
from preheat.backends.cuda.pointwise.embedding import embed, sum_rows, take_rows
from preheat.backends.cuda.pointwise.gate import gated
from preheat.backends.cuda.pointwise.norm import CudaNorm, QuantizedInput
from preheat.backends.cuda.pointwise.quantize import quantize_rows, silu_and_quantize
from preheat.backends.cuda.ranks.collective import add_ranks
from preheat.backends.cuda.recurrence.delta import CudaRecurrences
from preheat.backends.cuda.sampling.sampler import CudaSampler
from preheat.core import Level
from preheat.limits import Limits
from preheat.ops.delta import DeltaWeights
from preheat.ops.float8 import DTYPES
from preheat.ops.norm import make_norm
from preheat.ops.values import Cache, Matmul, Recurrence, StateRule, WeightFormat
from tools.oracles.card import META, Launch, Seen, watched
from tools.oracles.layers import SCHEMES, Card, name_of, traces

Work = Callable[[], object]

HEADS = ((32, 8, 128), (14, 2, 64), (8, 4, 256), (16, 2, 512))
"""Query heads, KV heads and numbers of a head."""

CACHES = tuple(DTYPES.values())
"""Types of caches of eight bits."""

STORED = {"bfloat16": torch.bfloat16, "float32": torch.float32, **DTYPES}


def launches(hardware: Hardware, only: str = "") -> dict[str, Launch]:
    """Return the launches that compile to different programs, by name.

    ``only`` is a regular expression for the names of layers and groups.
    """
    found: dict[str, Launch] = {}
    known: set[str] = set()
    for where, each in _all(hardware, lambda name: re.search(only, name) is not None):
        if each.key in known:
            continue
        known.add(each.key)
        name = f"{each.name}, {where}"
        again = sum(other == name or other.startswith(f"{name} #") for other in found)
        found[f"{name} #{again + 1}" if again else name] = each
    return found


def sample(found: Mapping[str, Launch]) -> dict[str, Launch]:
    """Return one launch of each kernel and form of weights: the one with the largest tile and the most stages."""
    chosen: dict[tuple[str, ...], tuple[int, str]] = {}
    for name, each in found.items():
        group, size = _group(each)
        if size > chosen.get(group, (0, ""))[0]:
            chosen[group] = size, name
    return {name: found[name] for _, name in chosen.values()}


def _group(launch: Launch) -> tuple[tuple[str, ...], int]:
    """Return the kernel of ``launch`` with its types and forms, and the size of its tile times its stages."""
    values = {launch.kernel.arg_names[path[0]]: value for path, value in launch.constants.items()}
    forms = [str(getattr(values.get(name), "__name__", values.get(name))) for name in ("PRODUCT", "KIND")]
    kinds = [str(launch.signature.get(name)) for name in ("x", "w", "q", "cache", "logits")]
    size = launch.options.num_stages
    for name in ("CUT", "ROWS", "WIDTH", "DIM", "SIZE", "COLUMNS"):
        size *= prod(_numbers(values.get(name)))
    return (launch.name, *forms, *kinds), size


def _numbers(value: object) -> tuple[int, ...]:
    value = getattr(value, "value", value)
    values = value if isinstance(value, tuple) else (value or 1,)
    return tuple(int(getattr(each, "value", each)) for each in values)


def _all(hardware: Hardware, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Launch]]:
    refused = _refused_schemes(hardware)
    layers = traces(Card(hardware), lambda name: wanted(name) and not any(f", {each}," in name for each in refused))
    for where, seen in layers:
        if broken := [event for event in seen.events if isinstance(event, str) and re.match(r"\w*Error: ", event)]:
            raise RuntimeError(f"{where}: {broken[0]}")
        yield from ((where, each) for each in seen.launches)
    for where, work in (*attention(hardware), *latents(hardware), *rows(hardware), *states(), *sampler()):
        if wanted(where):
            seen = Seen()
            with watched(seen):
                work()
            yield from ((where, each) for each in seen.launches)


def _refused_schemes(hardware: Hardware) -> list[str]:
    """Return the names of schemes that the card refuses."""
    return [name for name, scheme in SCHEMES.items() if scheme and scheme.code == "fp8" and not hardware.float8]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def _whole(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)


def attention(hardware: Hardware) -> Iterator[tuple[str, Work]]:
    """Yield attention of prompts and of decoding rows, and the writing of keys and values."""
    for (heads, kv, dim), (model, stored) in product(
        HEADS, (("bfloat16", "bfloat16"), ("bfloat16", "fp8_e4m3"), ("bfloat16", "fp8_e5m2"), ("float32", "float32"))
    ):
        if lacking(hardware, Cache(head_dim=dim, dtype=stored, model=model)):  # type: ignore[arg-type]
            continue
        cache, dtype = _empty(1024, 2, kv, 64, dim, dtype=STORED[stored]), STORED[model]
        q, out = _empty(2048, heads, dim, dtype=dtype), _empty(2048, heads * dim, dtype=dtype)
        places = cache, out, Places(_whole(2048), _whole(2048), _whole(64, 512)), Pieces(_whole(64, 2), _whole(1))
        value_scale = None if stored == model else 1.0
        scores = Scores(0.1, value_scale=value_scale)
        name = f"heads {heads}/{kv} of {dim}, {model}, cache {stored}"
        for rows_, width in ((1, 1), (64, 1), (8, 4)):
            space = Workspace(64, 2048, heads, dim, META)
            work = partial(paged.decode_attention, q, *places, space, scores, Rows(rows_, width))
            yield f"decode {name}, {rows_} rows of {width}", work
        config = paged.prefill_config(dim, dtype, hardware)
        for window in (None, 4096):
            work = partial(paged.prefill_attention, q, *places, scores._replace(window=window), config=config)
            yield f"prefill {name}, window {window}", work
        work = partial(paged.prefill_attention, q, *places, scores._replace(window=64), config=config, sides=True)
        yield f"prefill {name}, both sides", work
        yield f"rope {name}", lambda c=cache, d=dtype, s=(None if value_scale is None else (1.0, 1.0)), h=(heads, kv, dim): (  # noqa: E501
            _rope(c, d, s, *h))  # fmt: skip
    yield from prompts_on_hopper(hardware)


def prompts_on_hopper(hardware: Hardware) -> Iterator[tuple[str, Work]]:
    """Yield attention of prompts by Hopper's own kernel, which asks for a real device."""
    if not hardware.is_hopper:
        return
    for (heads, kv, dim), stored in product(((32, 8, 128), (14, 2, 64), (64, 8, 64)), (torch.bfloat16, *CACHES)):
        q, cache = _empty(2048, heads, dim), _empty(1024, 2, kv, 64, dim, dtype=stored)
        places = Places(_whole(2048), _whole(2048), _whole(64, 512)), Pieces(_whole(64, 2), _whole(1))
        narrow, sinks = stored != torch.bfloat16, _empty(heads, dtype=torch.float32)
        scores = Scores(0.1, value_scale=1.0 if narrow else None)
        for how, given in (("", scores), (", window", scores._replace(window=4096)), (
            ", sinks", scores._replace(window=128, sinks=sinks))):  # fmt: skip
            work = partial(attention_hopper.prefill_attention, q, cache, _empty(2048, heads * dim), *places, given)
            yield f"prefill on Hopper, heads {heads}/{kv} of {dim}, cache {name_of(stored)}{how}", work


def _rope(cache: Tensor, dtype: torch.dtype, scales: tuple[float, float] | None, heads: int, kv: int, dim: int) -> None:
    qkv, table = _empty(2048, heads + 2 * kv, dim, dtype=dtype), _empty(8192, 2, dim, dtype=dtype)
    norm = make_norm(_empty(heads + kv, dim, dtype=dtype), 1e-6)
    places = Places(_whole(2048), _whole(2048), _whole(64, 512))
    rope_and_write(qkv, cache, places, table, norm, scales=scales)


def latents(hardware: Hardware) -> Iterator[tuple[str, Work]]:
    """Yield attention over latent vectors, and the writing of entries."""
    for heads, dtype in product((16, 20, 128), (torch.bfloat16, torch.float32)):
        cache, made = _empty(1024, 1, 1, 64, 576, dtype=dtype), _empty(2048, heads + 1, 576, dtype=dtype)
        places, pieces = Places(_whole(2048), _whole(2048), _whole(64, 512)), Pieces(_whole(64, 2), _whole(1))
        space = Workspace(64, 2048, heads, 512, META, scores=64 * heads * 512)
        rope = _empty(8192, 2, 1, 64, dtype=dtype)
        name = f"latents of {heads} heads, {str(dtype).removeprefix('torch.')}"
        for mode, rows_, width in ((latent.DECODE, 64, 1), (latent.VERIFY, 8, 4), (latent.PROMPT, 0, 1)):
            given = made[:, :-1], cache, made, places, pieces, space, Latents(0.1, 512), Rows(rows_, width)
            work = partial(latent.latent_attention, *given, mode=mode)
            yield f"attention {name}, {rows_} rows of {width}", work
        few = partial(few_rows_attention, made[:2, :-1], cache, made, places, pieces, space, Latents(0.1, 512))
        yield f"attention {name}, few rows", few
        yield f"rope {name}", lambda m=made, r=rope, p=places, c=cache: turn_and_write(m, r, *p, c, 512)
        norm, to = CudaNorm(_empty(512, dtype=dtype), 1e-6), made[:, -1]
        yield f"norm of {name}", lambda n=norm, m=made[:, 0], t=to: n.insert(m, t)
        for (what, outputs, inputs), count in product((("keys", 512, 192), ("values", 256, 512)), (1, 32, 2048)):
            yield f"{what} of {name}, {count} rows", partial(_heads, hardware, made[:count, :-1], outputs, inputs)


def _heads(hardware: Hardware, x: Tensor, outputs: int, inputs: int) -> None:
    value = Matmul(outputs=outputs, inputs=inputs, weight=WeightFormat(name_of(x.dtype)))
    layer = HeadsLayer(value, _empty(x.shape[1], outputs, inputs, dtype=x.dtype), KernelConfigs(card=hardware))
    layer(x[..., : inputs + 64], x.new_empty(*x.shape[:2], outputs + 64))


def rows(hardware: Hardware) -> Iterator[tuple[str, Work]]:
    """Yield kernels that work on rows."""
    for size in (1024, 4096, 8192):
        x = _empty(8, size)
        for kind in ("rms", "rms_plus_one", "layer"):
            norm = CudaNorm(_empty(size), 1e-6, kind, _empty(size) if kind == "layer" else None)  # type: ignore[arg-type]
            yield f"norm {kind} {size}", lambda n=norm, x=x: (n(x), n.add(x, x))
        if hardware.float8:
            norm = CudaNorm(_empty(size), 1e-6)
            for how in ("token", "block"):
                yield f"norm {size}, codes for each {how}", lambda n=norm, x=x, h=how: n.quantized(
                    x, x, QuantizedInput(h, None))  # fmt: skip
        yield f"shared experts {size}", lambda x=x, s=size: add_shared(x, x, _empty(1, s), x)
    yield "embedding", lambda: embed(_whole(8), _whole(8), _whole(9), _empty(1000, 4096), _empty(8, 4096), scale=2.0)
    yield "sums of rows", lambda: sum_rows(_empty(8, 4096), _whole(4), _empty(3, 4096, dtype=torch.float32))
    yield "chosen rows", lambda: take_rows(_empty(8, 4096), _whole(4))
    for activation in ("gelu_tanh_and_mul", "gelu", "gelu_tanh", "quick_gelu"):
        yield f"activation {activation}", lambda a=activation: activate(_empty(8, 8192), a)
    yield "activation silu_and_mul", lambda: silu_and_mul(_empty(8, 8192))
    yield "clip", lambda: clip(_empty(8, 4096), 1.0)
    if hardware.float8:
        for how in ("token", "block"):
            yield f"codes for each {how}", lambda h=how: quantize_rows(_empty(8, 4096), h, None)
        yield "activation and codes", lambda: silu_and_quantize(_empty(8, 24576), "token", None)
    yield "digest", lambda: digest_rows(_empty(8, 151936, dtype=torch.float32))
    for world in (2, 4):
        yield f"sum of {world} ranks", lambda w=world: add_ranks(
            _empty(w, 8, 4096, dtype=torch.float32), None, torch.bfloat16)  # fmt: skip


STATES = Recurrence(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4)
"""A layer of Qwen3-Next and Qwen3.5-35B-A3B."""

MAMBA = StateRule(unit=False, delta=False, betas=False, skip=True, bias=True, gate_first=True)
LAYERS = {
    **{f"states of {size}": replace(STATES, key_dim=size) for size in (128, 256)},
    **{
        f"states of Mamba 2, {heads} heads of {size}": Recurrence(
            key_heads=1, value_heads=heads, key_dim=128, value_dim=size, taps=4, rule=MAMBA._replace(normed=heads)
        )
        for heads, size in ((48, 32), (48, 64), (128, 64))
    },
}
"""Layers with states; those of Mamba 2 are of Granite 4 H 350M, Tiny and Small."""


def states() -> Iterator[tuple[str, Work]]:
    """Yield layers with states, in steps with prompts and in steps of decoding rows, and attention's gates."""
    limits = Limits(
        max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=2048, max_num_prefill_seqs=None, block_size=64,
        num_blocks=9, states=256,
    )  # fmt: skip
    device: Any = SimpleNamespace(device=META, host_copy=lambda tensor: tensor)
    for (name, dtype), width, (what, value) in product(
        (("bfloat16", torch.bfloat16), ("float32", torch.float32)), (0, 1), LAYERS.items()
    ):
        made, x = CudaRecurrences(limits, device), _empty(256, value.inputs, dtype=dtype)
        inputs: Any = SimpleNamespace(positions=_whole(256), slots=_whole(256), rows=256, width=width)
        out = _empty(256, value.value_size, dtype=dtype)
        yield (
            f"{what}, {name}, {'decode' if width else 'prompts'}",
            partial(made.run, inputs, x, _weights(value), made.states(value, 513, dtype), out),
        )
    yield "gates", lambda: gated(_empty(8, 4096), _empty(8, 4096))


def _weights(value: Recurrence) -> DeltaWeights:
    """Return the weights of a layer of ``value``."""
    wide, heads, rule = partial(_empty, dtype=torch.float32), value.value_heads, value.rule
    return DeltaWeights(
        value=value, taps=wide(value.channels, value.taps), rate=wide(heads), bias=wide(heads),
        norm=wide(heads, value.value_dim) if rule.normed > 1 else wide(value.value_dim), eps=1e-6,
        conv_bias=wide(value.channels) if rule.bias else None, skip=wide(heads) if rule.skip else None,
    )  # fmt: skip


def sampler() -> Iterator[tuple[str, Work]]:
    """Yield the kernels that draw tokens; their tensors lie on the host."""
    made = CudaSampler(4, 151936, CpuBackend(), 8, False, max_logprobs=20, masked=True)
    for dtype in (torch.bfloat16, torch.float32):
        logits, name = torch.empty(8, 151936, dtype=dtype), str(dtype).removeprefix("torch.")
        for level in Level:
            yield f"draw {level.name.lower()}, {name}", lambda lv=level, lg=logits: made.sample(lv, lg)
        yield f"report, {name}", lambda lg=logits: made.compile(lg)
