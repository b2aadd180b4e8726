"""`python -m tools.schema_corpus [rounds] [backend]`: 200 schemas of our own, answered by a model with random weights
at temperature 1.5; each answer is validated with `jsonschema`. Exit status 1 if one does not. The backend is guidance,
or xgrammar, which refuses some of them: they are listed.
"""

import sys
import tempfile
from pathlib import Path

from preheat import LLM, InvalidRequest
from tests.cpu.structured import held, problems, random_llm
from tests.schemas import Schema, corpus

MOST = 1000
"""More tokens than any answer has, white space included."""


def main(rounds: int, backend: str) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        config = {"backend": backend}
        llm = random_llm(
            Path(folder), skip_warmup=True, cache_dir="off", on_cold="off", structured_outputs_config=config,
            max_model_len=MOST + 24,
        )  # fmt: skip
        schemas = served(llm, corpus())
        for number in range(rounds):
            found = problems(llm, schemas, seed=number * len(schemas), max_tokens=MOST)
            failed += len(found)
            for name, wrong in found.items():
                print(f"{name}: {wrong}")
    total = rounds * len(schemas)
    print(f"{total - failed:,} of {total:,} answers are what their schema asks for")
    return 1 if failed else 0


def served(llm: LLM, schemas: dict[str, Schema]) -> dict[str, Schema]:
    """Those that are not refused; prints the others."""
    found = dict(schemas)
    for name, schema in schemas.items():
        try:
            llm.loop.grammars.backend.compile(held(json=schema).structured_outputs)
        except InvalidRequest as error:
            print(f"{name} is refused: {error.message}")
            del found[name]
    return found


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(int(arguments[0]) if arguments else 1, arguments[1] if len(arguments) > 1 else "guidance"))
