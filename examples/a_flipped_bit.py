"""An engine finds a flipped bit in its weights: python examples/a_flipped_bit.py

Starts an engine of the bundled model that reads its memory once a second. Flips one bit of a weight, as a faulty
memory does. The next answer may look right; the audit names the tensor and stops the engine, in a minute on two cores.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from preheat import LLM, SamplingParams
from preheat.errors import PreheatError

PROMPT, GREEDY = "class Stack:\n", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def said(llm: LLM) -> str:
    """Return the engine's answer."""
    return str(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].text)


def main() -> int:
    llm = LLM("bundled", num_threads=1, audit_every=1.0, skip_warmup=True, boot_check="off")
    audit: Any = llm.loop.audit
    print("--- the answer, and a pass of the audit")
    print(said(llm))
    while not audit.stats.passes:
        said(llm)
    print(f"--- {audit.stats.slices} slices were read, 0 differ")
    words = audit.memory.slices[0].words
    words[len(words) // 2] ^= 1 << 2
    print("\033[31m--- one bit of a weight is flipped\033[0m")
    began = time.monotonic()
    while time.monotonic() - began < 30:
        try:
            print("the answer is", "the same" if said(llm) else "empty", end="\r")
        except PreheatError as error:
            print(f"\n\033[33m--- found after {time.monotonic() - began:.1f} s:\033[0m {error.message}")
            return 0
    print("--- NOT FOUND")
    return 1


if __name__ == "__main__":
    sys.exit(main())
