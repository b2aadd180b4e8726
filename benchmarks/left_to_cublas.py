"""The negative control: `preheat verify` on an engine left to cuBLAS.

    python -m benchmarks left_to_cublas [--layers 2] [--prompts 300]

The engine has the 8B shape and leaves its linear maps to cuBLAS, on a GPU. cuBLAS may cut the inputs of a map into
parts, as torch lets it by default, and does so for a few rows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.report import parser
from benchmarks.common.shapes import SHAPES
from preheat.backends.cuda.matmul.config import Library
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.compare import header, line
from preheat.verify.drive import Engine
from preheat.verify.prompts import Prompt, Size, make_prompts
from preheat.verify.verification import Verification

OPTIONS = {
    "device": "cuda", "load_format": "dummy", "skip_tokenizer_init": True, "batch_invariant": False,
    "max_model_len": 1024, "kv_cache_memory_bytes": 8 << 30, "log_level": "error",
}  # fmt: skip


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--layers", type=int, default=2)
    flags.add_argument("--prompts", type=int, default=300)
    args = flags.parse_args(words)
    size = Size(prompts=args.prompts, runs=2, outputs=24, longest=700)

    def prompts(engine: Engine) -> list[Prompt]:
        return make_prompts(size, engine.vocab_size, engine.ready.max_model_len)

    KernelConfigs._find = lambda *_: Library(split=True)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        config = SHAPES["llama-3.1-8b"] | {"num_hidden_layers": args.layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        settings = Settings.load(OPTIONS | {"model": folder})
        print(header())
        for result in Verification(boot_engine, settings, prompts, size).results():
            print(line(result), flush=True)
