"""Write docs/settings.md and the options in docs/warm-up.md from the registry: ``python -m tools.gen_settings_doc``."""

from itertools import groupby
from pathlib import Path

from preheat.options.options import Option
from preheat.settings import OPTIONS

HEAD = """# Settings

<!-- Written by tools/gen_settings_doc.py from src/preheat/settings: change it there. -->

Look up every option of `preheat serve`, `preheat generate` and `LLM`. An option can be given in four ways, and the
first one present wins:

1. a flag of `preheat serve` and `preheat generate`, or a keyword of `LLM(...)`: `--max-num-seqs 64`, `max_num_seqs=64`;
2. an environment variable: `PREHEAT_` and the name in capitals, else the variable in the table (the names that vLLM
   and its Gaudi fork use);
3. a key in the YAML file that `--config` names, with dashes or underscores: `max-num-seqs: 64`;
4. the default.

Yes-or-no options are pairs of flags (`--enable-prefix-caching`, `--no-enable-prefix-caching`); elsewhere write
1/0, true/false or yes/no. Lists are `a,b` or a JSON list in the environment, several words after a flag (`--api-key`
takes one, and may be repeated), lists in YAML. Objects are JSON, or mappings in YAML.
An unknown flag, keyword or key is an error; an unknown variable that begins with `VLLM_` or `PREHEAT_` is warned about.
Options that are not implemented yet are listed here too. Any value but the default is rejected with the reason; from a
variable of another engine (`VLLM_…`, `PT_HPU_…`) it is warned about instead.
`HF_TOKEN` and `HF_HOME` are read by the Hugging Face library.
"""


DOCS = Path(__file__).parents[1] / "docs"

SIZES = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_prefill_seqs", "block_size",
    "num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization", "enforce_eager", "batch_invariant",
)  # fmt: skip
"""Options of other groups that decide the contents of the plan."""

GROUPS = ("Buckets", "Warm-up", "Device graphs", "Defragmenter", "Diagnostics")
"""The groups that are about warm-up alone."""

BEGIN, END = "<!-- options: written by tools/gen_settings_doc.py -->\n", "<!-- end of options -->\n"


def with_tables(text: str) -> str:
    """Return ``text``, a document with both marks, with the tables of options between them."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [f"\n### Limits\n\n{_table([OPTIONS[name] for name in SIZES])}"]
    for group, options in groupby(OPTIONS.values(), key=lambda opt: opt.group):
        if group in GROUPS:
            parts.append(f"\n### {group}\n\n{_table(list(options))}")
    return f"{before}{BEGIN}{''.join(parts)}\n{END}{after}"


def render() -> str:
    """Return the text of docs/settings.md."""
    parts = [HEAD]
    for group, options in groupby(OPTIONS.values(), key=lambda opt: opt.group):
        parts.append(f"\n## {group}\n\n{_table(list(options))}")
    return "".join(parts)


def _table(options: list[Option]) -> str:
    reasons = {opt.later if isinstance(opt.later, str) else None for opt in options}
    shared = reasons.pop() if len(reasons) == 1 else None  # all of the group comes later, for one reason
    note = f"_Not yet: {shared}._\n\n" if shared else ""
    rows = "".join(_row(opt, "" if shared else _later(opt)) for opt in options)
    return f"{note}| Flag | Variable | Default | Meaning |\n| --- | --- | --- | --- |\n{rows}"


def _row(opt: Option, later: str) -> str:
    variable = ", ".join(f"`{name}`" for name in (opt.env, opt.later_env) if name)
    choices = f" One of {', '.join(f'`{choice}`' for choice in opt.choices)}." if opt.choices else ""
    return f"| `{opt.flag}` | {variable} | {opt.shown_default} | {opt.help}{choices}{later} |\n"


def _later(opt: Option) -> str:
    if isinstance(opt.later, str):
        return f" _Not yet: {opt.later}._"
    return "".join(f" _`{value}` not yet: {reason}._" for value, reason in (opt.later or {}).items())


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(render(), encoding="utf-8")
    guide = DOCS / "warm-up.md"
    guide.write_text(with_tables(guide.read_text(encoding="utf-8")), encoding="utf-8")
