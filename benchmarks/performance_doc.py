"""Write the tables of figures in docs/ from benchmarks/results/*.json: ``python -m benchmarks.performance_doc``.

The text between two marks is written here; a figure without a file is a dash, never a number from somewhere else.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.machine import ROOT
from benchmarks.common.report import RESULTS, read_parts
from benchmarks.common.shapes import FORMATS, SHAPES
from benchmarks.common.table import anchor, columns, rows, shown

DOCS = ROOT / "docs"
DOCUMENT = DOCS / "performance.md"
DOCUMENTS = (DOCUMENT, DOCS / "determinism.md", DOCS / "parallel.md", DOCS / "quantization.md")

BLOCK = re.compile(
    r"(<!-- written by benchmarks/performance_doc\.py: ([\w.-]+) ([\w.-]+) -->\n).*?(<!-- end -->\n)", re.DOTALL
)

PLOTTED = ("preheat", "as it comes", "invariant")
COLORS = ("#d9480f", "#868e96", "#ced4da")
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 300, 50, 40


def filled(text: str, results: Path = RESULTS) -> str:
    """Return ``text`` with new text between its marks.

    A mark has a name of ``WRITERS`` and a shape.
    """
    return BLOCK.sub(lambda found: found[1] + WRITERS[found[2]](found[3], results) + found[4], text)


def beside_vllm(shape: str, results: Path) -> str:
    """Return all figures of ``shape`` in one table, and the machine of ours."""
    parts = read_parts(results / f"{shape}.json")
    engines = [each.engine for each in columns(shape, parts)]
    lines = [
        f"\n{taken(parts, shape)}\n",
        f"\n| | {' | '.join(engines)} |\n",
        f"| --- |{' --- |' * len(engines)}\n",
    ]
    lines += [f"| {what} | {' | '.join(map(shown, figures))} |\n" for what, figures in rows(shape, parts)]
    lines += [f"\nNot measured: {what}.\n" for what in left_out(parts)]
    return "".join(lines) + "\n"


FORMAT_FIGURES = (
    *(f"ITL, batch {rows}, ms" for rows in (1, 8, 32, 128, 256)),
    "TTFT of 2,048 tokens, ms", "prefill 32 × 2,048, tokens/s", "nanobench, tokens/s",
)  # fmt: skip


def by_format(shape: str, results: Path) -> str:
    """Return a table of ``shape`` in each measured format.

    The model's dtype comes first. Ours and vLLM's have a line each.
    """
    kinds = ["", *(f"_{name}" for name in FORMATS)]
    names = [f"{shape}{kind}{kv}" for kind in kinds for kv in ("", "_kv_fp8")]
    lines = ["\n| Format | | " + " | ".join(FORMAT_FIGURES) + " |\n", "| --- " * (2 + len(FORMAT_FIGURES)) + "|\n"]
    remarks = []
    for name in names:
        parts = read_parts(results / f"{name}.json")
        found = rows(name, parts)
        what = (
            name.removeprefix(shape).removeprefix("_").replace("_kv_", ", KV cache in ").replace("kv_", "KV cache in ")
        )
        ours, theirs = ({name: figures[place] for name, figures in found} for place in (0, -2))
        for who, figures in (("preheat", ours), (anchor(name)["engine"], theirs)):
            if any(figures.get(figure) is not None for figure in FORMAT_FIGURES):
                shown_figures = " | ".join(shown(figures.get(figure)) for figure in FORMAT_FIGURES)
                lines.append(f"| {what or 'bfloat16'} | {who} | {shown_figures} |\n")
        if parts:
            remarks.append(f"{what or 'bfloat16'}: {taken(parts, name)}")
    return "".join(lines) + "\n" + "\n".join(remarks) + "\n\n"


def taken(parts: dict[str, Any], shape: str) -> str:
    """Return a sentence with the machines, versions and commits of our figures, and of vLLM's of ``shape``."""
    if not parts:
        return "preheat has not been measured here yet."
    found = {_machine(entry["machine"]) for entry in parts.values()}
    return f"preheat: {'; '.join(sorted(found))}. vLLM: {anchor(shape)['machine']}."


def _machine(machine: dict[str, Any]) -> str:
    commit = machine["commit"] or "unknown"
    return f"{machine['gpu'] or machine['cpu']}, torch {machine['versions']['torch']}, commit {commit}"


def left_out(parts: dict[str, Any]) -> list[str]:
    return [f"{part}, {what}" for part, entry in parts.items() for what in entry["figures"].get("left_out", [])]


def kernels(shape: str, results: Path) -> str:
    """Return a table of the kinds of kernels in a decoding step.

    There are lines for each number of rows.
    """
    path = results / f"kernels_{shape}.json"
    if not path.exists():
        return "\nNot measured yet.\n\n"
    lines = [
        "\n| rows × context | kind | µs a step | at least, µs | share of the floor |\n",
        "| --- | --- | --- | --- | --- |\n",
    ]
    for found in json.loads(path.read_text(encoding="utf-8"))["figures"]:
        head = f"{found['rows']} × {found['context']:,}"
        for line in found["kernels"]:
            if not line["name"]:
                floor = line["floor_us"]
                share = f"{floor / line['us']:.0%}" if floor else "–"
                lines.append(f"| {head} | {line['kind']} | {shown(line['us'])} | {shown(floor)} | {share} |\n")
        lines.append(f"| {head} | idle | {shown(found['idle_us'])} | 0 | – |\n")
    return "".join(lines) + "\n"


def invariance_cost(shape: str, results: Path) -> str:
    """Return a table of an engine with invariance beside one without, and the cost."""
    path = results / f"invariance_cost_{shape}.json"
    if not path.exists():
        return f"\n{shape}: not measured yet.\n\n"
    found = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        f"\n{shape}, dummy weights. {_machine(found['machine'])}.\n",
        "\n| | invariant | `VLLM_BATCH_INVARIANT=0` | cost |\n| --- | --- | --- | --- |\n",
    ]
    lines += [
        f"| {row['what']} | {shown(row['invariant'])} | {shown(row['varying'])} | {row['cost_percent']:+.1f} % |\n"
        for row in found["figures"]
    ]
    return "".join(lines) + "\n"


def cpu_engines(name: str, results: Path) -> str:
    """Return a table of engines on a CPU: for each load the tokens a second with prompts, decoding, and of prompts."""
    path = results / f"cpu_engines_{name}.json"
    if not path.exists():
        return f"\n{name}: not measured yet.\n\n"
    found = json.loads(path.read_text(encoding="utf-8"))
    cases, threads = found["figures"]["cases"], found["figures"]["threads"]
    engines = dict.fromkeys(engine for case in cases.values() for engine in case)
    lines = [
        f"\n{name}, {threads} threads. {_machine(found['machine'])}.\n",
        f"\n| | {' | '.join(case.replace(' x ', ' × ') for case in cases)} |\n| --- |{' --- |' * len(cases)}\n",
    ]
    for engine in engines:
        cells = [
            " / ".join(f"{case[engine][key]:,.0f}" for key in CPU_FIGURES) if engine in case else "–"
            for case in cases.values()
        ]
        lines.append(f"| {engine} | {' | '.join(cells)} |\n")
    lines += [f"\nLeft out: {', '.join(left)}.\n" for left in [found["figures"]["left_out"]] if left]
    return "".join(lines) + "\n"


LLAMA_CPP = tuple(f"llama.cpp {kind}" for kind in ("F16", "BF16", "Q8_0", "Q4_0"))


class Comparison(NamedTuple):
    """A figure of ``ours`` over the best of its ``peers``.

    It should be at least ``aim`` in loads that begin with ``loads``. Without an aim it should be at least 1.
    """

    what: str
    ours: str
    peers: tuple[str, ...]
    figure: str = "tokens_per_s"
    aim: float | None = None
    loads: str = ""


CPU_PEERS = (
    Comparison("bf16 beside F16", "preheat bf16", LLAMA_CPP[:1], aim=1.5, loads="1 "),
    Comparison("int8 beside Q8_0", "preheat int8", LLAMA_CPP[2:3], aim=1.2),
    Comparison("int4 beside Q4_0", "preheat int4", LLAMA_CPP[3:], aim=0.9),
    Comparison("bf16 beside the best", "preheat bf16", LLAMA_CPP, aim=1.3, loads="16 "),
    Comparison("prompts: bf16 beside F16", "preheat bf16", LLAMA_CPP[:1], "prompt_tokens_per_s", 1.0),
    Comparison("prompts: bf16 beside BF16", "preheat bf16", LLAMA_CPP[1:2], "prompt_tokens_per_s", 0.75),
    Comparison("bf16 beside OpenVINO fp16", "preheat bf16", ("OpenVINO fp16",)),
    Comparison("bf16 beside vLLM", "preheat bf16", ("vLLM bf16",)),
)
BOUND_BY_MEMORY = {"bf16 beside F16": 1.0}
"""Other aims for models whose weights do not lie in a processor's cache."""


def cpu_ratios(name: str, results: Path) -> str:
    """Return a table of our figures of ``cpu_engines`` over llama.cpp's and others'; a missed aim is bold."""
    path = results / f"cpu_engines_{name}.json"
    if not path.exists():
        return f"\n{name}: not measured yet.\n\n"
    cases = json.loads(path.read_text(encoding="utf-8"))["figures"]["cases"]
    lines = [f"\n| | Aim | {' | '.join(case.replace(' x ', ' × ') for case in cases)} |\n| --- | --- |"]
    lines.append(f"{' --- |' * len(cases)}\n")
    for what, ours, peers, figure, stated, loads in CPU_PEERS:
        aim = stated if name.startswith("bundled") else BOUND_BY_MEMORY.get(what, stated)
        cells = list[str]()
        for load, case in cases.items():
            theirs = max((case[peer][figure] for peer in peers if peer in case), default=None)
            ratio = None if theirs is None else case[ours][figure] / theirs
            least = 1.0 if aim is None else aim if load.startswith(loads) else 0.0
            cells.append("–" if ratio is None else f"{ratio:.2f}" if ratio >= least else f"**{ratio:.2f}**")
        if set(cells) != {"–"}:
            told = "–" if aim is None else f"{aim:g} at {loads.strip()}" if loads else f"{aim:g}"
            lines.append(f"| {what} | {told} | {' | '.join(cells)} |\n")
    return "".join(lines) + "\n"


def collective(name: str, results: Path) -> str:
    """Return a table of the ways to add the numbers of all ranks: microseconds by rows."""
    path = results / f"{name}.json"
    if not path.exists():
        return "\nNot measured yet.\n\n"
    found = json.loads(path.read_text(encoding="utf-8"))
    cases = found["figures"]["microseconds"]
    lines = [f"\n{found['figures']['world']} GPUs. {_machine(found['machine'])}.\n"]
    rows = [f"{case['rows']:,}" for case in cases]
    lines += [f"\n| rows | {' | '.join(rows)} |\n| --- |{' --- |' * len(rows)}\n"]
    for way in (way for way in cases[0] if way != "rows"):
        lines.append(f"| {way} | {' | '.join(f'{case[way]:,.1f}' if case[way] else '–' for case in cases)} |\n")
    return "".join(lines) + "\n"


def encoders(name: str, results: Path) -> str:
    """Return a table of engines of embeddings: texts and tokens a second, and the time of a query."""
    paths = [path for kind in ("encoders", "encoders_gpu") if (path := results / f"{kind}.json").exists()]
    some = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    found = next((each for each in some if name in each["figures"]["cases"]), None)
    if found is None:
        return f"\n{name}: not measured yet.\n\n"
    case, figures = found["figures"]["cases"][name], found["figures"]
    remark = f" {figures['note'][:1].upper()}{figures['note'][1:]}." if figures["note"] else ""
    threads = "" if found["machine"]["gpu"] else f"{figures['threads']} threads, "
    lines = [f"\n{name}, {threads}{figures['texts'][name]:,} texts. {_machine(found['machine'])}.{remark}\n"]
    lines.append("\n| | Texts/s | Tokens/s | p50 of a query, ms |\n| --- | --- | --- | --- |\n")
    for engine, each in case.items():
        cells = f"{each['texts_per_s']:,.1f} | {each['tokens_per_s']:,.0f} | {each['query_p50_ms']:,.1f}"
        lines.append(f"| {engine} | {cells} |\n")
    return "".join(lines) + "\n"


def turns(name: str, results: Path) -> str:
    """Return a table of a benchmark on two commits in turns. Of prompts of several lengths it has the worst."""
    path = results / f"turns_{name}.json"
    if not path.exists():
        return "\nNot measured yet.\n\n"
    found = json.loads(path.read_text(encoding="utf-8"))
    figures = found["figures"]
    slower = {each: percent for each, percent in figures["slower_percent"].items() if TIMED.search(each)}
    lengths = {each: percent for each, percent in slower.items() if "_by_length" in each}
    worst = max(lengths, key=lambda each: lengths[each], default=None)
    commit, count = figures["old_commit"], f"{figures['turns']} turn" + "s" * (figures["turns"] > 1)
    command = f"`scripts/bench turns {commit} {' '.join(figures['command'])}`"
    lines = [
        f"\n{command}, {count}. {_machine(found['machine'])}.\n",
        f"\n| | {commit} | now | slower by |\n| --- | --- | --- | --- |\n",
    ]
    for each, percent in slower.items():
        if each not in lengths or each == worst:
            old, new = (shown(figures[which][each]) for which in ("old", "new"))
            lines.append(f"| {each} | {old} | {new} | {percent:+.1f} % |\n")
    return "".join(lines) + "\n"


TIMED = re.compile(r"(^| )(\w*_(ms|s)|prefill_tok_s_by_length)( |$)")
"""Figures of time and speed, among counts and bytes."""

CPU_FIGURES = ("tokens_per_s", "decode_tokens_per_s", "prompt_tokens_per_s")


def plot(shape: str, results: Path) -> str:
    """Return the picture of the time between tokens, if there is one."""
    ours = read_parts(results / f"{shape}.json").get("latency", {}).get("figures", {}).get("itl_ms")
    return f'\n<img src="itl-{shape}.svg" alt="Time between tokens by batch size" width="720">\n\n' if ours else "\n"


def svg(shape: str, results: Path) -> str | None:
    """Return the picture of :func:`plot`: bars for our and vLLM's figures.

    Returns None without ours.
    """
    ours = read_parts(results / f"{shape}.json").get("latency", {}).get("figures", {}).get("itl_ms")
    if not ours:
        return None
    theirs = anchor(shape)
    series = [ours, *(theirs.get(kind, {}).get("itl_ms", {}) for kind in ("default", "invariant"))]
    top = max(value for each in series for value in each.values())
    step = (WIDTH - LEFT) / len(ours)
    parts = ['<rect width="100%" height="100%" fill="white"/>']  # readers may have a dark page
    parts.append(f'<text x="4" y="16">ms between tokens, by batch size ({shape})</text>')
    labels = []  # above all bars
    for place, batch in enumerate(ours):
        left = LEFT + place * step
        parts.append(f'<text x="{left + step / 2 - 12:.0f}" y="{HEIGHT - 18}">{batch}</text>')
        for number, (each, color) in enumerate(zip(series, COLORS, strict=True)):
            if batch in each:
                height = (HEIGHT - BOTTOM - 50) * each[batch] / top
                x, y = left + number * step / 4, HEIGHT - BOTTOM - height
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{step / 5:.1f}" height="{height:.1f}" fill="{color}"/>'
                )
                at = f'x="{x + step / 10:.1f}" y="{y - 4:.1f}"'
                labels.append(f'<text {at} font-size="8.5" text-anchor="middle">{each[batch]:g}</text>')
    parts += labels
    for number, (name, color) in enumerate(zip(PLOTTED, COLORS, strict=True)):
        label = name if number == 0 else f"{theirs['engine']} {name}"
        x = LEFT + number * 200
        parts.append(
            f'<rect x="{x}" y="26" width="10" height="10" fill="{color}"/><text x="{x + 16}" y="36">{label}</text>'
        )
    style = 'font-family="sans-serif" font-size="13"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


WRITERS = {
    "beside_vllm": beside_vllm,
    "by_format": by_format,
    "collective": collective,
    "cpu_engines": cpu_engines,
    "cpu_ratios": cpu_ratios,
    "encoders": encoders,
    "invariance_cost": invariance_cost,
    "kernels": kernels,
    "plot": plot,
    "turns": turns,
}


def main() -> None:
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
    for shape in SHAPES:
        picture = svg(shape, RESULTS)
        if picture is not None:
            (DOCUMENT.parent / f"itl-{shape}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
