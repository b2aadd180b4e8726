"""`python -m tools.schema_corpus [rounds]`: 200 schemas of our own, answered by a model with random weights at
temperature 1.5; each answer is validated with `jsonschema`. Exit status 1 if one does not.
"""

import sys
import tempfile
from pathlib import Path

from tests.cpu.structured import problems, random_llm
from tests.schemas import corpus


def main(rounds: int) -> int:
    schemas, failed = corpus(), 0
    with tempfile.TemporaryDirectory() as folder:
        llm = random_llm(Path(folder), skip_warmup=True, cache_dir="off", on_cold="off")
        for number in range(rounds):
            found = problems(llm, schemas, seed=number * len(schemas))
            failed += len(found)
            for name, wrong in found.items():
                print(f"{name}: {wrong}")
    total = rounds * len(schemas)
    print(f"{total - failed:,} of {total:,} answers are what their schema asks for")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 1))
