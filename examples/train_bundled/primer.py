"""A small hand-written primer: the plain questions that reference text never asks.

The documentation explains ``os.path.join`` but has no greetings and no sums. These examples, written for this project,
add greetings, sums and the simplest functions. They are never part of the held-out text.

``primer.tsv`` holds functions (signature, description, body) and conversation (question, answer), one a line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

LINES = [
    tuple(field.replace("\\n", "\n") for field in line.split("\t"))
    for line in Path(__file__).with_name("primer.tsv").read_text(encoding="utf-8").splitlines()
]
FUNCTIONS = [line for line in LINES if len(line) == 3]
CONVERSATION = [line for line in LINES if len(line) == 2]
CAPITALS = (
    "France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon; England: London; Ireland: Dublin; "
    "Norway: Oslo; Sweden: Stockholm; Finland: Helsinki; Denmark: Copenhagen; Poland: Warsaw; Austria: Vienna; "
    "Greece: Athens; Hungary: Budapest; Japan: Tokyo; China: Beijing; India: New Delhi; Egypt: Cairo; Kenya: Nairobi; "
    "Canada: Ottawa; Australia: Canberra; Brazil: Brasilia; Argentina: Buenos Aires; the Netherlands: Amsterdam; "
    "the United States: Washington, D.C."
)
FACTS = [(pair.split(": ")[0], "The capital of {} is {}.".format(*pair.split(": "))) for pair in CAPITALS.split("; ")]


def plain_documents() -> Iterator[str]:
    """Yield each function with and without a docstring, and the few facts as prose."""
    for signature, description, body in FUNCTIONS:
        sentence, code = f"{description[0].upper()}{description[1:]}.", textwrap.indent(body, "    ")
        yield f"def {signature}:\n{code}\n"
        yield f'def {signature}:\n    """{sentence}"""\n{code}\n'
        yield f"# {sentence}\ndef {signature}:\n{code}\n"
    yield from (f"{fact}\n" for _, fact in FACTS)


def chat_pairs() -> Iterator[tuple[str, ...]]:
    """Yield questions and answers for the chat part."""
    yield from CONVERSATION
    for signature, description, body in FUNCTIONS:
        code = textwrap.indent(body, "    ")
        answer = f"```python\ndef {signature}:\n{code}\n```"
        yield f"Write a function to {description}.", answer
        yield f"Write a Python function to {description}.", answer
        yield f"How do I {description} in Python?", answer
        yield f"Write a function `{signature}`.", answer
    yield from ((f"What is the capital of {country}?", fact) for country, fact in FACTS)
    yield from ((f"What is {a} + {b}?", f"{a} + {b} = {a + b}") for a in range(13) for b in range(13))
