"""Options of LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from preheat.options.options import option

_lora = partial(option, group="LoRA")


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Options of the group LoRA."""

    enable_lora: bool = _lora(False, "Serve LoRA adapters.")
    lora_modules: tuple[str, ...] = _lora(
        (), 'Adapters to load at the start, as `name=path` or `{"name": ..., "path": ..., "base_model_name": ...}`.'
    )
    max_loras: int = _lora(
        1, "Maximum adapters in one step: the number of adapter slots on the device.", low=1, high=64
    )
    max_lora_rank: int = _lora(16, "Largest rank of an adapter.", low=1, high=512)
    max_cpu_loras: int | None = _lora(None, "Maximum adapters kept on the host.", low=1, default_text="`max_loras`")
    lora_dtype: str = _lora(
        "auto", "Type of the adapters' matrices; `auto` is the model's type.", choices=("auto", "bfloat16", "float32")
    )
    lora_root: str | None = _lora(
        None,
        "Folder for adapters that may be loaded while the server runs, subfolders included; without it only "
        "`lora_modules` are served.",
        path="folder",
    )
    allow_runtime_lora_updating: bool = _lora(
        False,
        "Let clients with a key load and unload adapters while the server runs; needs `enable_lora`.",
        env="VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    )
    fully_sharded_loras: bool = _lora(
        False,
        "In layers divided by rows, divide the adapters' first matrix among devices too, in tiles of 16 adapter ranks.",
    )
