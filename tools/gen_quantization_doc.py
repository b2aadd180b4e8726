"""Write the tables of docs/quantization.md: ``python -m tools.gen_quantization_doc``.

They come from the backends' facts and the last measurement of ``python -m benchmarks quantization``.
"""

import json
from pathlib import Path

from preheat.backends.base.facts import Facts
from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cuda.facts import FACTS as CUDA

ROOT = Path(__file__).parents[1]
DOC = ROOT / "docs" / "quantization.md"
RESULTS = ROOT / "benchmarks" / "results" / "quantization.json"
BEGIN, END = "<!-- tables: written by tools/gen_quantization_doc.py -->\n", "<!-- end of tables -->\n"

W8A8, W8A16, W4A16 = "w8a8", "w8a16", "w4a16"
FORMATS = (
    ("compressed-tensors", "float-quantized: per tensor, channel; activations per token or static", W8A8, ""),
    ("compressed-tensors", "float-quantized: blocks of 128 × 128; activations per 128 numbers", W8A8, ""),
    ("compressed-tensors", "float-quantized, weights only", W8A16, ""),
    ("compressed-tensors", "pack-quantized, 8 bits", W8A16, "int8"),
    ("compressed-tensors", "pack-quantized, 4 bits, symmetric or not, actorder weight", W4A16, "int4-g128"),
    ("compressed-tensors", "mxfp4-pack-quantized, weights only: blocks of 32, e8m0 scales", W4A16, ""),
    ("compressed-tensors", "nvfp4-pack-quantized, weights only: blocks of 16, e4m3 scales and one factor", W4A16, ""),
    ("fp8", "made while loading (`--quantization fp8`): per channel; activations per token", W8A8, "fp8"),
    ("fp8", "per tensor; activations per token or static", W8A8, ""),
    ("fp8", "blocks of 128 × 128 (DeepSeek, Qwen3); activations per 128 numbers", W8A8, "fp8-block"),
    ("modelopt", "FP8: per tensor; activations static", W8A8, ""),
    ("int8", "made while loading (`--quantization int8`): per channel", W8A16, "online-int8"),
    ("int4", "made while loading (`--quantization int4`): groups of 128, or 32", W4A16, "online-int4"),
    ("awq", "gemm, 4 bits", W4A16, ""),
    ("gptq", "files of version 1 and 2, 4 bits, with or without desc_act", W4A16, ""),
    ("gptq", "the same with 8 bits", W8A16, ""),
    ("mxfp4", "stacked experts of gpt-oss: blocks of 32, e8m0 scales", W4A16, ""),
    ("gguf", "Q8_0 of [GGUF files](gguf.md)", W8A16, ""),
    ("gguf", "Q4_0 of GGUF files", W4A16, ""),
)
"""The supported formats of weights.

Each has a quantization method, a format, the kind of computation, and the key of its measurement, if there is one.
"""

INVARIANCE = {
    W8A8: "a row's codes and scales are its own; sums in one order",
    W8A16: "the bits of the dequantized model",
    W4A16: "the bits of the dequantized model",
}
COMPILED = "a group is one sum in order, then its scale"
WHERE = {
    "cpu": "proved in tests and by `preheat verify`",
    "cuda": "proved at boot, and on an H200 by `tests/cuda/test_quantized.py`",
}


def render() -> str:
    """Return the text of the tables."""
    record = json.loads(RESULTS.read_text())["figures"]
    return f"\n{_formats(record['formats'])}\n{_measured(record)}\n{_kernels()}\n"


def _formats(figures: dict) -> str:
    lines = ["| `quant_method` | Format | Computed as | Held-out loss |", "| --- | --- | --- | --- |"]
    for method, what, kind, key in FORMATS:
        loss = f"{figures[key]['percent']:+.2f} %" if key else "not measured"
        lines.append(f"| {method} | {what} | {kind.upper()} | {loss} |")
    return "\n".join(lines) + "\n"


def _measured(record: dict) -> str:
    figures, windows = record["formats"], record["windows"]
    names = {
        "fp8": "float8, channels and tokens", "fp8-block": "float8, blocks", "int8": "int8, channels",
        "int4-g128": "int4, groups of 128", "int4-g32": "int4, groups of 32",
        "online-int8": "int8 made while loading, with the head",
        "online-int4": "int4 made while loading, with the head",
    }  # fmt: skip
    parts = "; ".join(f"{names[key]} {figures[key]['percent']:+.2f} %" for key in names)
    return (
        f"Loss of the bundled model on {windows} windows of 1,024 tokens of held-out code, beside "
        f"{figures['plain']['nats']:.4f} nats in bfloat16: {parts}. Checkpoints are rounded to nearest, without "
        "calibration (`scripts/bench quantization`, on a CPU).\n"
    )


def _kernels() -> str:
    lines = ["| Computed as | Device | Kernel | Bits |", "| --- | --- | --- | --- |"]
    for kind in (W8A8, W8A16, W4A16):
        lines += [_row(kind, facts) for facts in (CPU, CUDA)]
        compiled = CPU.in_mode("llvm").quantized[kind]
        if compiled != CPU.quantized[kind]:
            said = f"{COMPILED}: {WHERE['cpu']}"
            lines.append(f"| {kind.upper()} | cpu, mode llvm | {compiled.kernel} | {said} |")
    return "\n".join(lines)


def _row(kind: str, facts: Facts) -> str:
    found = facts.quantized[kind]
    return f"| {kind.upper()} | {facts.name} | {found.kernel} | {INVARIANCE[kind]}: {WHERE[facts.name]} |"


def with_tables(text: str) -> str:
    """Return ``text``, the document, with the tables between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{render()}{END}{after}"


if __name__ == "__main__":
    DOC.write_text(with_tables(DOC.read_text()))
