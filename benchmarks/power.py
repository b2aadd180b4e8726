"""The speed, clock and power of a card under its power limit.

    python -m benchmarks power [--shape llama-3.1-8b] [--seconds 6]

Three phases: one prompt of 2,048 tokens after five idle seconds, prompts of 2,048 tokens without a pause, and 256
sequences that decode from 128 tokens on. nvidia-smi reports every tenth of a second; medians are of the second half of
each longer phase. The share is of the operations that the matrix units could do at that clock. Operations are of linear
maps, two for each number of a layer's weights and token. On Hopper.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.common.report import parser, save
from benchmarks.common.shapes import CHOICES, config_of
from benchmarks.suite.offline import Offline, greedy
from preheat.model.families import read_spec
from preheat.plan.cost import ModelSizes

QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "100"]
PROMPT, ROWS, CONTEXT, STEPS = 2048, 256, 128, 100
A_CYCLE = 4096
"""Operations in bfloat16 that the matrix unit of a Hopper multiprocessor does in a cycle."""


class Card:
    """Listens to nvidia-smi: ``seen`` are (time, MHz, W)."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, float]] = []
        self._process = subprocess.Popen(QUERY, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            clock, power = map(float, line.split(","))
            self.seen.append((time.perf_counter(), clock, power))

    def since(self, moment: float) -> dict[str, float]:
        """Return the medians of clock and power since ``moment``."""
        seen = [each for each in self.seen if each[0] >= moment]
        return {
            "mhz": statistics.median(each[1] for each in seen),
            "watts": statistics.median(each[2] for each in seen),
        }

    def close(self) -> None:
        self._process.terminate()


def steadily(work: Callable[[], int], seconds: float, card: Card, numbers: int) -> dict[str, Any]:
    """Repeat ``work``, which returns its number of tokens.

    Returns the figures of the second half.
    """
    half = time.perf_counter() + seconds / 2
    while time.perf_counter() < half:
        work()
    began, tokens = time.perf_counter(), 0
    while time.perf_counter() < half + seconds / 2:
        tokens += work()
    a_second = tokens / (time.perf_counter() - began)
    found = card.since(began)
    peak = torch.cuda.get_device_properties(0).multi_processor_count * A_CYCLE * found["mhz"] * 1e6
    operations = 2 * numbers * a_second
    return {
        "tokens_s": round(a_second),
        "tflop_s": round(operations / 1e12),
        **found,
        "share": round(operations / peak, 3),
    }


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--shape", choices=CHOICES, default="llama-3.1-8b")
    flags.add_argument("--seconds", type=float, default=6.0)
    args = flags.parse_args(words)
    offline = Offline.of_shape(args.shape, {})
    numbers = ModelSizes.of(read_spec(config_of(args.shape))).layer_params

    def read(prompts: int) -> int:
        offline.seconds([offline.prompt(PROMPT) for _ in range(prompts)], greedy(1))
        return prompts * PROMPT

    def decode() -> int:
        offline.seconds([offline.prompt(CONTEXT) for _ in range(ROWS)], greedy(STEPS))
        return ROWS * STEPS

    card = Card()
    read(1)
    time.sleep(5)
    prompt = offline.prompt(PROMPT)
    figures: dict[str, Any] = {"first_prompt_ms": round(offline.seconds([prompt], greedy(1)) * 1e3, 2)}
    for name, work in (("reading", lambda: read(16)), ("decoding", decode)):
        figures[name] = steadily(work, args.seconds, card, numbers)
        print(name, json.dumps(figures[name]), flush=True)
    card.close()
    print(save(f"power_{args.shape}", figures))
