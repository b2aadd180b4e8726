"""Write docs/architectures.md from transformers' models and our families: ``python -m tools.gen_architectures_doc``."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from preheat.model.families import FAMILIES
from preheat.model.families.needs import A_ROW, need_of

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"

HEAD = """# Architectures

<!-- Written by tools/gen_architectures_doc.py from transformers, and the folder src/preheat/model/families. -->

Look up whether an architecture runs, or what it needs. The list has every architecture that transformers {version}
generates text with, by its mapping of `AutoModelForCausalLM`. {runs} of {count} run; [models](models.md) says at which
sizes each is compared with transformers. {rows} more need only a line in the table of families. The others need the
named feature; the error that refuses a checkpoint names it too.

| Architecture | Model types | State |
| --- | --- | --- |
"""


def render() -> str:
    """Return the text of docs/architectures.md."""
    types: dict[str, list[str]] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        types.setdefault(name, []).append(model_type)
    states = {name: state_of(name) for name in sorted(types, key=str.lower)}
    lines = [f"| `{name}` | {', '.join(types[name])} | {state} |\n" for name, state in states.items()]
    found = list(states.values())
    return HEAD.format(
        version=transformers.__version__, runs=found.count("runs"), count=len(found), rows=found.count("a row away")
    ) + "".join(lines)


def state_of(name: str) -> str:
    """Return whether the architecture ``name`` runs, is a row away, or needs a feature."""
    if name in FAMILIES:
        return "runs"
    need = need_of(name)
    assert need, f"{name} is in transformers, but families/needs.py does not say what it needs"
    return "a row away" if need == A_ROW else f"needs {need}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
