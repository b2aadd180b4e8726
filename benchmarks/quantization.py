"""The cost of weight formats in loss and bytes.

    python -m benchmarks quantization [--windows 24] [--write KIND FOLDER]

The loss is the bundled model's on held-out text, through the whole engine. The text is the code of this Python's
library that training left out (one file in 64, by a hash of its path). It is cut into windows of 1,024 tokens that know
nothing of each other. Checkpoints are rounded to nearest, without calibration. ``--write`` only leaves such a
checkpoint of the bundled model in FOLDER.
"""

from __future__ import annotations

import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.quantized_checkpoint import KINDS, quantize_checkpoint
from benchmarks.common.report import parser, save
from examples.train_bundled.corpus import HELDOUT_ONE_IN, library_files, path_hash
from preheat import LLM, SamplingParams
from preheat.backends.registry import facts_of
from preheat.model.families import read_spec
from preheat.model.files import BUNDLED_PATH, read_config
from preheat.model.quantization import bytes_by_scheme

WINDOW = 1024


def heldout(llm: LLM, windows: int) -> list[list[int]]:
    """Return the first ``windows`` windows of the held-out code, as token ids."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = (path for name, path in library_files(stdlib) if path_hash(name) % HELDOUT_ONE_IN == 0)
    found: list[list[int]] = []
    for path in files:
        ids = llm.frontend.tokenizer.encode(path.read_text(encoding="utf-8"))
        found += [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)]
    return found[:windows]


def loss_of(windows: int, **options: Any) -> float:
    """Return the loss in nats per token."""
    llm = LLM(max_model_len=WINDOW + 1, skip_warmup=True, boot_check="off", cache_dir="off", on_cold="off", **options)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for window in heldout(llm, windows):
        (answer,) = llm.generate([window], params, use_tqdm=False)
        told = answer.prompt_logprobs or []
        for token, entry in zip(window[1:], told[1:], strict=True):
            assert entry is not None
            total, count = total - entry[token].logprob, count + 1
    return total / count


def sizes_of(folder: Path, method: str | None) -> dict[str, int]:
    """Return the bytes of the weights on a GPU, by scheme."""
    return bytes_by_scheme(read_spec(read_config(folder), method), facts_of("cuda"), 2)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser(__doc__, __name__)
    args.add_argument("--windows", type=int, default=24, help="windows of 1,024 tokens")
    args.add_argument("--write", nargs=2, metavar=("KIND", "FOLDER"), help=f"kinds: {', '.join(KINDS)}")
    given = args.parse_args(argv)
    if given.write:
        print(quantize_checkpoint(BUNDLED_PATH, given.write[0], Path(given.write[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        models: dict[str, tuple[Path, str | None]] = {"plain": (BUNDLED_PATH, None), "fp8": (BUNDLED_PATH, "fp8")}
        models |= {f"online-{method}": (BUNDLED_PATH, method) for method in ("int8", "int4")}
        models |= {kind: (quantize_checkpoint(BUNDLED_PATH, kind, Path(folder) / kind), None) for kind in KINDS}
        figures: dict[str, Any] = {}
        for name, (path, method) in models.items():
            loss = loss_of(given.windows, model=str(path), quantization=method, device="cpu")
            before = figures["plain"]["nats"] if figures else round(loss, 5)
            figures[name] = {
                "nats": round(loss, 5), "percent": round(100 * (loss / before - 1), 2), "bytes": sizes_of(path, method)
            }  # fmt: skip
            print(f"{name:<12} {loss:.5f} nats per token, {100 * (loss / before - 1):+.2f} %", flush=True)
    print(save("quantization", {"windows": given.windows, "formats": figures}))


if __name__ == "__main__":
    main()
