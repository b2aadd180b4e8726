"""Adapters against PEFT, and bit for bit against themselves: alone, together, in any place, and beside none."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from preheat.core import SamplingParams
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.drive import Engine
from preheat.verify.prompts import Prompt
from tests.cpu.checkpoints import MODELS, save_checkpoint

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "qv": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "r": 8, "lora_alpha": 12, "target_modules": ALL,
        "rank_pattern": {"o_proj": 3, "layers.1.mlp.down_proj": 21}, "alpha_pattern": {"up_proj": 40},
    },
    "rslora": {"r": 20, "lora_alpha": 5, "target_modules": ["k_proj", "gate_proj"], "use_rslora": True},
    "head": {"r": 5, "lora_alpha": 9, "target_modules": ["lm_head", "o_proj"]},
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 160, "block_size": 16,
    "kv_cache_memory_bytes": 1 << 23, "skip_warmup": True, "contiguous_pa": False, "enable_lora": True,
    "max_lora_rank": 24, "max_loras": 3,
}  # fmt: skip
OUTPUTS = 5

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    save_checkpoint(MODELS["llama"], made / "base")
    for number, (name, config) in enumerate(ADAPTERS.items()):
        save_adapter(made / "base", made / name, config, seed=number)
    return made


def save_adapter(base: Path, folder: Path, config: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(task_type="CAUSAL_LM", **config)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=weight.shape[1] ** -0.5)
    model.save_pretrained(folder, save_embedding_layers=False)


@cache
def reference(base: Path, adapter: Path | None, merged: bool = False) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    if adapter is None:
        return model.eval()
    adapted = peft.PeftModel.from_pretrained(model, adapter)
    return (adapted.merge_and_unload() if merged else adapted).eval()


def engine(folder: Path, names: list[str] | None = None, **changes: Any) -> Engine:
    names = list(ADAPTERS) if names is None else names
    given = {"model": str(folder / "base"), "max_cpu_loras": 8} if changes.get("enable_lora", True) else {
        "model": str(folder / "base")}  # fmt: skip
    named = {"lora_modules": tuple(f"{name}={folder / name}" for name in names)} if names else {}
    return Engine(boot_engine, Settings.load({**SETTINGS, **given, **named, **changes}, {}))


def prompts(*names: str, length: int = 21) -> list[Prompt]:
    draw = torch.Generator().manual_seed(3)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=OUTPUTS, ignore_eos=True)
    return [
        Prompt(torch.randint(199, (length + 5 * number,), generator=draw).tolist(), params, lora_name=name)
        for number, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def shared(folder) -> Engine:
    return engine(folder)


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("merged", [False, True], ids=["peft", "merged"])
def test_logits_are_those_of_peft(shared, folder, name, merged):
    (prompt,) = prompts(name)
    with shared.keeping_logits() as kept:
        shared.run([prompt])
    (answer,) = shared.answers
    with torch.inference_mode():
        tokens = torch.tensor([prompt.tokens + answer.tokens[:-1]])
        expected = reference(folder / "base", folder / name, merged)(tokens).logits[0, len(prompt.tokens) - 1 :]
        plain = reference(folder / "base", None)(tokens).logits[0, len(prompt.tokens) - 1 :]
    found = torch.stack(kept[0])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert (found - plain).abs().max() > 0.05
