"""Tokens a second of several engines on a CPU, in turns.

    python -m benchmarks cpu_engines [--models bundled 0.4b 0.6b] [--engines ...] [--sequences 1 4 16] [--busy]
        [--python llama.cpp=ENVIRONMENT/bin/python --python vllm=ENVIRONMENT/bin/python]

Each engine is a process of its own with the same weights, threads, prompts and number of tokens, greedy. A turn runs
each engine once, and all other engines are stopped meanwhile (SIGSTOP). `--busy` adds a process that takes a core.
Reported are the medians of tokens a second with prompts, and the same of decoding alone: a load of one token, which is
the prompt, is subtracted. Engines other than preheat and transformers live in environments of their own, which
`--python` names; without one the engine is left out, and the result says so.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open

from benchmarks.common.checkpoint import write_checkpoint
from benchmarks.common.report import parser, save
from preheat.model.files import find_checkpoint, read_config, weight_files

CHILD = Path(__file__).parent / "common" / "cpu_engine.py"
OUTPUTS = 64


class Engine(NamedTuple):
    """An engine and its options; ``kind`` names its class in :mod:`benchmarks.common.cpu_engine`."""

    kind: str
    options: Mapping[str, Any]


ENGINES: Mapping[str, Engine] = {
    "preheat bf16": Engine("preheat", {"dtype": "bfloat16"}),
    "preheat fp32": Engine("preheat", {"dtype": "float32"}),
    "preheat int8": Engine("preheat", {"dtype": "bfloat16", "quantization": "int8"}),
    "preheat int4": Engine("preheat", {"dtype": "bfloat16", "quantization": "int4"}),
    "preheat bf16, eager": Engine("preheat", {"dtype": "bfloat16", "execution_mode": "eager"}),
    "preheat bf16, HTTP": Engine("preheat http", {"dtype": "bfloat16"}),
    "llama.cpp F16": Engine("llama.cpp", {"type": "f16"}),
    "llama.cpp BF16": Engine("llama.cpp", {"type": "bf16"}),
    "llama.cpp Q8_0": Engine("llama.cpp", {"type": "q8_0"}),
    "llama.cpp Q4_0": Engine("llama.cpp", {"type": "q4_0"}),
    "transformers bf16": Engine("transformers", {"dtype": "bfloat16"}),
    "transformers fp32": Engine("transformers", {"dtype": "float32"}),
    "transformers fp32, compiled": Engine("transformers", {"dtype": "float32", "compiled": True}),
    "vLLM bf16": Engine("vllm", {"dtype": "bfloat16"}),
    "OpenVINO fp16": Engine("openvino", {"weight_format": "fp16"}),
    "OpenVINO int8": Engine("openvino", {"weight_format": "int8"}),
    "OpenVINO int4": Engine("openvino", {"weight_format": "int4"}),
}
ELSEWHERE = ("llama.cpp", "vllm", "openvino")
"""Kinds of engines that live in environments of their own."""

SHAPES: Mapping[str, Mapping[str, int]] = {
    "0.4b": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 65536},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip
"""Random models of Llama's architecture."""


class Child:
    """The process of an engine, stopped unless it runs a load."""

    def __init__(self, name: str, task: Mapping[str, Any], python: str, log: Path, program: Path = CHILD) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self.process = subprocess.Popen(
            [python, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
            start_new_session=True, env=environment,
        )  # fmt: skip
        self.name, self._log = name, log
        self.ready = float(self._ask(task)["ready"])
        self._signal(signal.SIGSTOP)

    def run(self, load: Mapping[str, Any]) -> float:
        """Return the seconds of ``load``."""
        return float(self.ask(load)["seconds"])

    def ask(self, load: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to ``load``."""
        self._signal(signal.SIGCONT)
        time.sleep(0.05)
        try:
            return self._ask(load)
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _ask(self, said: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(said) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.name} has ended: {self._log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


def folder_of(model: str, root: Path) -> Path:
    """Return the checkpoint of ``model``, written below ``root`` if it is a random one."""
    if model not in SHAPES:
        return find_checkpoint(model, None)
    folder = root / model
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, **SHAPES[model],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((find_checkpoint("bundled", None) / name).read_bytes())
    write_checkpoint(config, folder)
    return folder


def write_weights(folder: Path, out: Path) -> None:
    """Write all tensors of a checkpoint in ``folder`` as float32, for :mod:`benchmarks.common.llama_cpp_engine`."""
    tensors: dict[str, np.ndarray] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118
    np.savez(out, **tensors)  # type: ignore[arg-type]  # numpy's own stub


@contextmanager
def children(model: str, names: Sequence[str], pythons: Mapping[str, str], threads: int) -> Iterator[list[Child]]:
    """Start the engines one after the other."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder_of(model, root)
        if any(ENGINES[name].kind == "llama.cpp" for name in names):
            write_weights(folder, root / "weights.npz")
        started = []
        for number, name in enumerate(names):
            kind, options = ENGINES[name]
            task = {
                "engine": kind, "model": "bundled" if model == "bundled" else str(folder), "folder": str(folder),
                "options": options, "threads": threads, "config": read_config(folder), "type": options.get("type"),
                "weights": str(root / "weights.npz"), "gguf": str(root / f"{options.get('type')}.gguf"),
            }  # fmt: skip
            try:
                child = Child(name, task, pythons.get(kind, sys.executable), root / f"{number}.log")
            except RuntimeError as error:
                print(error)
                continue
            stack.callback(child.close)
            started.append(child)
            print(f"{model}: {name} is ready after {child.ready:.1f} s", flush=True)
        yield started


def measure(some: Sequence[Child], load: Mapping[str, Any], runs: int) -> dict[str, dict[str, float]]:
    """Return each engine's tokens a second for ``load``: with its prompts, and of decoding alone."""
    prompts = {"prompts": load["prompts"], "outputs": [1] * len(load["outputs"])}
    tokens, times = sum(load["outputs"]), dict[str, list[tuple[float, float]]]()
    for turn in range(runs + 1):
        for child in some:
            pair = child.run(prompts), child.run(load)
            if turn:  # the first turn warms up
                times.setdefault(child.name, []).append(pair)
    found = {}
    for name, pairs in times.items():
        prompt, whole = (statistics.median(column) for column in zip(*pairs, strict=True))
        found[name] = {
            "tokens_per_s": round(tokens / whole, 1),
            "decode_tokens_per_s": round((tokens - len(load["outputs"])) / (whole - prompt), 1),
            "prompt_tokens_per_s": round(sum(map(len, load["prompts"])) / prompt, 1),
            "fastest_s": round(min(each for _, each in pairs), 4),
            "slowest_s": round(max(each for _, each in pairs), 4),
        }
    return found


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--models", nargs="+", default=["bundled", "0.4b", "0.6b"])
    flags.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="NAME")
    flags.add_argument("--sequences", nargs="+", type=int, default=[1, 4, 16])
    flags.add_argument("--prompts", nargs="+", type=int, default=[128, 512], help="tokens of each prompt")
    flags.add_argument("--runs", type=int, default=5)
    flags.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags.add_argument("--busy", action="store_true", help="beside a process that takes a whole core")
    flags.add_argument("--python", action="append", default=[], metavar="KIND=PATH", help="an engine's environment")
    flags.add_argument("--name", default="", help="added to the name of the result's file")
    args = flags.parse_args(words)
    pythons = dict(each.split("=", 1) for each in args.python)
    without = [
        name
        for name in args.engines
        if (kind := ENGINES[name].kind) in ("llama.cpp", "vllm", "openvino") and kind not in pythons
    ]
    names = [name for name in args.engines if name not in without]
    facts = {"threads": args.threads, "runs": args.runs, "busy": args.busy, "left_out": without}
    with ExitStack() as stack:
        if args.busy:
            hog = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(hog.kill)
        for model in args.models:
            with children(model, names, pythons, args.threads) as some:
                cases = dict(measured(some, args.sequences, args.prompts, args.runs))
            print(save(f"cpu_engines_{model}{args.name}", facts | {"cases": cases}))


def measured(
    some: Sequence[Child], sequences: Sequence[int], prompts: Sequence[int], runs: int
) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """Yield the name and the figures of each load: so many sequences, with prompts of so many tokens."""
    draw = random.Random(0)
    for count, length in itertools.product(sequences, prompts):
        asked = [[draw.randrange(10, 4000) for _ in range(length)] for _ in range(count)]
        found = measure(some, {"prompts": asked, "outputs": [OUTPUTS] * count}, runs)
        print(f"{count} x {length}", *(f"\n  {name:30} {json.dumps(each)}" for name, each in found.items()), flush=True)
        yield f"{count} x {length}", found
