"""Single bits that are flipped behind receipts: in weights, scales, adapters, prompts and seeds.

A bit of weights, scales or an adapter is flipped in a copy of the files, and an engine boots from the copy. A bit of a
prompt or a seed is flipped in the receipt. ``found`` counts the bits that ``preheat replay`` reports. ``by_answer``
counts the bits that tokens and logits alone show: a bit that no answer has used shows in no answer.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common.adapter import write_adapter
from benchmarks.common.quantized_checkpoint import quantize_checkpoint
from preheat import LLM, SamplingParams
from preheat.errors import PreheatError, SettingsError
from preheat.frontend.adapters import LoRARequest
from preheat.frontend.receipt import Receipt
from preheat.lora.adapter import adapted_modules
from preheat.model.families import read_spec
from preheat.model.files import BUNDLED_PATH, read_config
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify import replay
from preheat.verify.drive import Engine

OPTIONS: dict[str, Any] = {
    "num_threads": 1, "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 8, "max_model_len": 128, "skip_warmup": True,
    "boot_check": "off", "on_cold": "off", "log_level": "error",
}  # fmt: skip
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
ANSWERS, TOKENS = 8, 16


def planted(count: int, seed: int) -> dict[str, Any]:
    """Return how many of ``count`` flipped bits of each kind are found."""
    draw, found = random.Random(seed), dict[str, Any]()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        plain = shutil.copytree(BUNDLED_PATH, folder / "plain")
        rounded = quantize_checkpoint(BUNDLED_PATH, "int8", folder / "int8")
        modules = adapted_modules(read_spec(read_config(BUNDLED_PATH)))
        adapter = write_adapter(folder / "adapter", modules, rank=4)
        adapted = {"model": str(plain), "enable_lora": True, "lora_modules": [f"one={adapter}"]}
        files: dict[str, tuple[dict[str, Any], Path, Callable[[str], bool]]] = {
            "weights": ({"model": str(plain)}, plain / WEIGHTS, lambda name: True),
            "scales": ({"model": str(rounded)}, rounded / WEIGHTS, lambda name: name.endswith("weight_scale")),
            "adapter": (adapted, adapter / ADAPTER, lambda name: True),
        }
        for kind, (options, path, counts) in files.items():
            receipts = answers(options, "one" if kind == "adapter" else "")
            found[kind] = _in_files(receipts, options, path, partial(_flip, path, counts, draw), count)
            print(kind, found[kind], flush=True)
        receipts = answers({"model": str(plain)})
        engine = Engine(boot_engine, Settings.load(OPTIONS | {"model": str(plain)}))
        for kind, change in (("prompt", _other_prompt), ("seed", _other_seed)):
            found[kind] = _in_receipts(receipts, engine, partial(change, draw=draw), folder / "receipt.json", count)
            print(kind, found[kind], flush=True)
    return found


def answers(options: dict[str, Any], adapter: str = "") -> list[Receipt]:
    """Return the receipts of a few answers, the odd ones drawn with a seed."""
    llm = LLM(**OPTIONS | options)
    prompts: list[Any] = [
        {"prompt_token_ids": [5 + (37 * row + at) % 200 for at in range(24)]} for row in range(ANSWERS)
    ]
    params = [
        SamplingParams(temperature=row % 2, seed=2**40 + row, max_tokens=TOKENS, ignore_eos=True, receipt=True)
        for row in range(ANSWERS)
    ]
    request = LoRARequest(adapter, 1, str(options["lora_modules"][0].partition("=")[2])) if adapter else None
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=request)
    return [choice.receipt for output in outputs for choice in output.outputs if choice.receipt is not None]


def _flip(path: Path, counts: Callable[[str], bool], draw: random.Random) -> str:
    """Flip one bit of a tensor in the file; return the tensor's name."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {
        name: each for name, each in json.loads(data[8:start]).items() if name != "__metadata__" and counts(name)
    }
    name: str = draw.choice(sorted(tensors))
    first, end = tensors[name]["data_offsets"]
    data[start + draw.randrange(first, end)] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return name


def _in_files(
    receipts: Sequence[Receipt], options: dict[str, Any], path: Path, flip: Callable[[], str], count: int
) -> dict[str, Any]:
    """Return how many bits of the file are found by an engine that reads it. The first engine reads the right file."""
    right, found, by_answer, missed = path.read_bytes(), 0, 0, list[str]()
    for number in range(1 + count):
        name = flip() if number else ""
        engine = Engine(boot_engine, Settings.load(OPTIONS | options))
        refused = [_refused(each, engine) for each in receipts]
        differing = [_differs(each, engine) for each in receipts]
        path.write_bytes(right)
        if not number:
            assert not any(refused) and not any(differing), "the right file must give every answer again"
            continue
        found, by_answer = found + all(refused), by_answer + any(differing)
        missed += [name] * (not all(refused))
    return {"planted": count, "found": found, "by_answer": by_answer, "missed": missed}


def _in_receipts(
    receipts: Sequence[Receipt], engine: Engine, change: Callable[[Receipt], Receipt], path: Path, count: int
) -> dict[str, Any]:
    """Return how many changed receipts are found, at reading, and by giving their answers again."""
    found, by_answer, missed = 0, 0, list[str]()
    for number in range(count):
        receipt = receipts[2 * number % len(receipts) + 1]  # drawn with a seed
        assert _read(receipt, path) and not _differs(receipt, engine), "the right receipt must be equal"
        changed = change(receipt)
        by_answer += (differs := _differs(changed, engine))
        refused = not _read(changed, path)
        found += refused or differs
        missed += [str(number)] * (not (refused or differs))
    return {"planted": count, "found": found, "by_answer": by_answer, "missed": missed}


def _read(receipt: Receipt, path: Path) -> bool:
    """Return whether the command takes the receipt from a file."""
    path.write_bytes(msgspec.json.encode(receipt))
    try:
        return len(replay.read_receipts(str(path))) == 1
    except SettingsError:
        return False


def _refused(receipt: Receipt, engine: Engine) -> bool:
    """Return whether the command reports the receipt, with its contract or its answer."""
    try:
        replay.check_contract(receipt, engine)
    except PreheatError:
        return True
    return _differs(receipt, engine)


def _differs(receipt: Receipt, engine: Engine) -> bool:
    """Return whether the answer differs, or cannot be given."""
    try:
        return not replay.replay(receipt, engine).equal
    except PreheatError:
        return True


def _other_prompt(receipt: Receipt, *, draw: random.Random) -> Receipt:
    """Return the receipt with one bit of its prompt flipped."""
    prompt = [*receipt.request.prompt]
    prompt[draw.randrange(len(prompt))] ^= 1 << draw.randrange(12)
    return _asked(receipt, prompt=prompt)


def _other_seed(receipt: Receipt, *, draw: random.Random) -> Receipt:
    """Return the receipt with one bit of its seed flipped."""
    return _asked(receipt, seed=receipt.request.seed ^ 1 << draw.randrange(64))


def _asked(receipt: Receipt, **fields: object) -> Receipt:
    return msgspec.structs.replace(receipt, request=msgspec.structs.replace(receipt.request, **fields))
