"""Adapters as they are on the host."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from preheat.errors import InvalidRequest
from preheat.model.specs import ModelSpec

PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class Factors:
    """Of one module: ``a`` [rank, in] and ``b`` [out, rank], and what multiplies ``x a^T``."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class Adapter:
    """``factors`` by the base model's modules; ``rank`` is the largest of theirs, ``digest`` that of all bytes."""

    name: str
    path: str
    rank: int
    factors: Mapping[str, Factors]
    digest: str


def read_adapter(name: str, path: str, spec: ModelSpec, max_rank: int, dtype: torch.dtype) -> Adapter:
    """The adapter in the folder ``path``. Raises InvalidRequest for one that cannot be served."""
    folder = Path(path)
    try:
        text = (folder / "adapter_config.json").read_bytes()
        tensors = load_file(folder / "adapter_model.safetensors")
    except OSError as error:
        raise InvalidRequest(f"the adapter {name!r} cannot be read: {error}") from None
    config, digest = json.loads(text), hashlib.blake2b(text, digest_size=16)
    factors = {}
    for key in sorted(tensors):
        digest.update(key.encode() + tensors[key].contiguous().view(torch.uint8).numpy().tobytes())
        if not key.endswith(A):
            continue
        module = key.removeprefix(PREFIX).removesuffix(A)
        a, b = tensors[key].to(dtype), tensors[key.removesuffix(A) + B].to(dtype)
        alpha = next(
            (value for at, value in (config.get("alpha_pattern") or {}).items() if module.endswith(at)),
            config["lora_alpha"],
        )
        factors[module] = Factors(a, b, alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a)))
    rank = max((len(each.a) for each in factors.values()), default=0)
    if rank > max_rank:
        raise InvalidRequest(f"the adapter {name!r} has rank {rank}, and max_lora_rank is {max_rank}: raise it")
    return Adapter(name, path, rank, factors, digest.hexdigest())
