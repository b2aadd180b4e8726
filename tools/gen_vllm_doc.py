"""Write docs/vllm-flags.md from the tables of flags and variables of vLLM: ``python -m tools.gen_vllm_doc``."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

from preheat.options import vllm_variables
from preheat.options.vllm_flags import FOREIGN, INSTEAD, SHORT, Foreign

DOC = Path(__file__).parents[1] / "docs" / "vllm-flags.md"

HEAD = """# Flags and variables of vLLM

<!-- Written by tools/gen_vllm_doc.py from vllm_flags.py and vllm_variables.py in src/preheat/options: change them.
-->

Look up a flag or a variable of vLLM that is no setting of preheat. Flags of `vllm serve` with a meaning here are
[settings](settings.md), and [Coming from vLLM](from-vllm.md) has their differences. All others are below. They count
wherever options are named: as a flag, in a file of options, as a keyword of `LLM`.

They may be written as vLLM has them: `--flag value` and `--flag=value`, underscores for dashes, `--switch`,
`--no-switch` and `--switch true`, whole numbers as `8k` (8,000), `8K` (8,192) or `1.5m`, and an object as JSON or by
its keys, `--speculative-config.method ngram`, with a plus to add to a list: `--object.key+ value`.
"""

_VARIABLES = """
## Variables without an effect

They are warned about once, with the reason; an unknown one by its name. There is no warning about {quiet}: they ask for
the usual behavior, or were set by Kubernetes.
"""


def render() -> str:
    """Return the text of docs/vllm-flags.md."""
    rows = {verdict: list(found) for verdict, found in groupby(FOREIGN.values(), key=lambda row: row.verdict)}
    variables = vllm_variables.UNUSED.items()
    quiet = ", ".join(f"`{name}{'*' * name.endswith('_')}`" for name in vllm_variables.ALWAYS.split())
    return "".join(
        (
            HEAD,
            _section("Short names", ("Flag", "Stands for"), _pairs(SHORT)),
            _section("Taken: they set an option", ("Flag", "Sets"), _by_reason(rows["sets"], "`{}`")),
            _section("Taken: they ask for the usual behavior", ("Flag", "Behavior"), _by_reason(rows["always"])),
            _section("Taken with a warning: nothing depends on them", ("Flag", "Why"), _by_reason(rows["unused"])),
            _section("Refused", ("Flag", "Reason and remedy"), _by_reason(rows["refused"])),
            "\nA value in brackets is taken: it asks for what is done anyway. So is the negation of a switch.\n",
            _section("Of others, or misremembered", ("Flag", "Write"), _pairs(INSTEAD)),
            _VARIABLES.format(quiet=quiet),
            _table(("Variable", "Why"), ((_names(names.split(), "*"), reason) for reason, names in variables)),
        )
    )


def _section(title: str, head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    return f"\n## {title}\n{_table(head, rows)}"


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"| {first} | {second} |\n" for first, second in rows)
    return f"\n| {head[0]} | {head[1]} |\n| --- | --- |\n{lines}"


def _pairs(table: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    return ((f"`{name}`", f"`{flag}`") for name, flag in table.items())


def _by_reason(rows: list[Foreign], form: str = "{}") -> Iterable[tuple[str, str]]:
    for says, found in groupby(rows, key=lambda row: row.says):
        yield ", ".join(map(_shown, found)), form.format(says)


def _shown(row: Foreign) -> str:
    taken = f" (`{'`, `'.join(row.accepted)}`)" if row.accepted else ""
    return f"`{row.flag}`{taken}"


def _names(names: list[str], rest: str) -> str:
    return ", ".join(f"`{name}{rest if name.endswith('_') else ''}`" for name in names)


if __name__ == "__main__":
    DOC.write_text(render(), encoding="utf-8")
