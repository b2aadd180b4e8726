"""Make docs/warm-up.webp: boot the bundled model, serve some requests, picture the record's page.

Needs a Chromium on the path: ``python -m tools.warm_up_picture``.
"""

import random
import sys
import tempfile
from pathlib import Path

from preheat import LLM, SamplingParams
from preheat.warmup.page import render
from preheat.warmup.record import Record
from tests.api.browser import find, tab

PICTURE = Path(__file__).parents[1] / "docs" / "warm-up.webp"
HEIGHT = 1500


def served() -> Record:
    """Return the record after a few hundred requests of all kinds."""
    llm = LLM(max_num_seqs=64, max_num_batched_tokens=1024)
    draw = random.Random(7)
    for size in (1, 2, 5, 12, 30, 64, 90):
        prompts = [[draw.randrange(100, 2000) for _ in range(round(2 ** draw.uniform(2, 8)))] for _ in range(size)]
        params = [
            SamplingParams(
                temperature=draw.choice([0, 0, 0.7, 1]), top_k=draw.choice([0, 20]), max_tokens=draw.randrange(1, 24)
            )
            for _ in prompts
        ]
        llm.generate(prompts, params)
    return Record.from_json(llm.loop.listener.report())


def main() -> None:
    path = find()
    if path is None:
        sys.exit("no Chromium on the path (Debian: apt install chromium)")
    with tempfile.TemporaryDirectory() as folder, tab(path) as page:
        file = Path(folder, "record.html")
        file.write_text(render(served()), encoding="utf-8")
        page.open(file.as_uri())
        PICTURE.write_bytes(page.picture(HEIGHT))
    print(f"{PICTURE.name}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
