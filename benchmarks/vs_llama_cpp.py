"""Tokens a second against llama.cpp.

    python -m benchmarks vs_llama_cpp [--runs 3] [--threads 2] [--type f16] [--environment FOLDER]

Both have the same weights, in GGUF for llama.cpp, and the same threads, prompts and greedy outputs. llama.cpp's Python
wheel is built from its sources in an environment of its own, the first time, with a compiler and in some minutes; it is
no part of preheat's. There is no aim: the figures are reported whatever they say. The two take turns by load, not by
run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from benchmarks.common.report import parser, save
from benchmarks.vs_transformers import TokenLoad, make_loads, make_preheat, seconds
from preheat.model.files import find_checkpoint, read_config, weight_files

PACKAGES = ("llama-cpp-python", "gguf")
LOADS = ("batch_1", "32_equal", "32_ragged")
CHILD = Path(__file__).parent / "common" / "llama_cpp_run.py"


def environment(folder: Path) -> Path:
    """Return the Python of an environment with llama.cpp.

    It is made in ``folder`` unless it is there.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", "import llama_cpp, gguf"], capture_output=True, check=False).returncode:
        subprocess.run([python, "-m", "pip", "install", *PACKAGES], check=True)
    return python


def write_weights(folder: Path, out: Path) -> None:
    """Write all tensors of a checkpoint in ``folder`` as float32, for :data:`CHILD`."""
    tensors: dict[str, np.ndarray] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118
    np.savez(out, **tensors)  # type: ignore[arg-type]  # numpy's own stub


def theirs(
    python: Path, folder: Path, config: Mapping[str, Any], load: TokenLoad, *, threads: int, runs: int, kind: str
) -> list[float]:
    """Return the seconds of each run of ``load`` by llama.cpp."""
    task = {
        "weights": str(folder / "weights.npz"), "gguf": str(folder / f"{kind}.gguf"), "type": kind, "config": config,
        "threads": threads, "runs": runs, "prompts": load.prompts, "outputs": load.outputs,
    }  # fmt: skip
    done = subprocess.run([python, CHILD], input=json.dumps(task), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"llama.cpp failed:\n{done.stderr[-3000:]}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--runs", type=int, default=3)
    flags.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"), help="preheat's")
    flags.add_argument("--execution-mode", default="auto", choices=("auto", "eager", "llvm"), help="preheat's")
    flags.add_argument("--type", default="f16", choices=("f16", "bf16", "f32"), help="llama.cpp's weights")
    flags.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags.add_argument("--environment", type=Path, default=Path.home() / ".cache" / "preheat-llama-cpp")
    args = flags.parse_args(words)
    folder = find_checkpoint("bundled", None)
    config = read_config(folder)
    python = environment(args.environment)
    ours = make_preheat("bundled", args.dtype, args.threads, {"execution_mode": args.execution_mode})
    torch.set_num_threads(args.threads)
    figures: dict[str, object] = {name: str(value) for name, value in vars(args).items() if name != "environment"}
    with tempfile.TemporaryDirectory() as temporary:
        write_weights(folder, Path(temporary) / "weights.npz")
        for name, load in make_loads(config["vocab_size"]).items():
            if name not in LOADS:
                continue
            other = theirs(
                python, Path(temporary), config, load, threads=args.threads, runs=args.runs, kind=args.type
            )  # fmt: skip
            seconds(ours, load)
            mine = [seconds(ours, load)[0] for _ in range(args.runs)]
            a, b = (load.tokens / statistics.median(times) for times in (mine, other))
            figures[name] = result = {
                "preheat_tokens_per_s": round(a, 1), "llama_cpp_tokens_per_s": round(b, 1), "ratio": round(a / b, 2),
            }  # fmt: skip
            print(name, json.dumps(result))
    print(save(f"vs_llama_cpp_{args.dtype}_{args.type}", figures))
