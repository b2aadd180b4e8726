"""A draft model for the bundled one: much smaller, with its tokenizer, trained on Python's standard library.

It needs no other step and no GPU. The text is the library of the running Python, less the held-out files.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .common import BEGIN, END_OF_TEXT, WorkFolder
from .corpus import HELDOUT_ONE_IN, library_files, path_hash
from .export import CONFIG
from .model import LlamaShape
from .train import TrainOptions, train

BUNDLED = Path(__file__).parents[2] / "src" / "preheat" / "bundled"
SHAPE = LlamaShape(
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)


def encode(work: WorkFolder, stdlib: Path) -> None:
    """Write the library's tokens, by the bundled tokenizer, to the files that training reads."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    count = 0
    for name, path in library_files(stdlib):
        held_out, text = path_hash(name) % HELDOUT_ONE_IN == 0, path.read_text(encoding="utf-8", errors="ignore")
        ids = tokenizer.encode(f"{BEGIN}{text}{END_OF_TEXT}", add_special_tokens=False).ids
        parts[held_out].append(np.array(ids, np.uint16))
        count += len(text.encode()) if held_out else 0
    order = np.random.default_rng(0).permutation(len(parts[False]))
    np.save(work.train_tokens, np.concatenate([parts[False][index] for index in order]))
    np.save(work.heldout_tokens("code"), np.concatenate(parts[True]))
    work.manifest.write_text(json.dumps({"heldout": {"code": {"bytes": count}}}))


def make(work: WorkFolder, stdlib: Path, out: Path, steps: int) -> None:
    """Train a draft, and write its checkpoint folder to ``out``."""
    encode(work, stdlib)
    options = TrainOptions(
        steps=steps, batch=16, context=256, peak_lr=4e-3, warmup=50, dropout=0.0, compile=False, shape=SHAPE
    )
    train(work, out, options)
    (out / "config.json").write_text(json.dumps(CONFIG | asdict(SHAPE), indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(BUNDLED / name, out / name)
