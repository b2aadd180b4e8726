"""Answer 200 schemas of our own by a random model: `python -m tools.schema_corpus [rounds] [backend]`.

The temperature is 1.5, and `jsonschema` validates each answer. The exit status is 1 if an answer is invalid. The
backend is guidance, or xgrammar; the schemas that it refuses are listed.
"""

import sys
import tempfile
from pathlib import Path

from preheat import LLM, InvalidRequest
from tests.cpu.structured import held, problems, random_llm
from tests.schemas import Schema, corpus

MOST = 1000
"""An upper bound of the tokens of an answer, white space included."""


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
    """Return the schemas that are not refused; print the others."""
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
