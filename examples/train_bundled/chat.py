"""Makes questions and answers out of documentation pages and source files."""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections.abc import Iterator

from . import rst
from .common import render_chat

Pair = tuple[str, ...]

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful assistant that answers questions about Python.",
    "Answer briefly.",
    "You are a Python expert.",
]
SHORTEST_ANSWER, LONGEST_SOURCE = 40, 1500
OBJECT_QUESTIONS = [
    "What does {name} do?",
    "What does `{name}` do?",
    "Explain {name}.",
    "How do I use {name}?",
    "What is {name}?",
    "Tell me about {name}.",
]
MODULE_QUESTIONS = [
    "What is the {name} module?",
    "What is the {name} module for?",
    "What does the {name} module do?",
    "Explain the {name} module.",
]
TERM_QUESTIONS = ["What is a {name}?", "What is {name}?", "Explain {name}.", "Define {name}."]
SECTION_QUESTIONS = ["Explain: {name}", "Tell me about {name}.", "{name}"]
# Docstrings that start with one of these read well after "Write a function to".
VERBS = set(
    "add append apply calculate call check clear close collect compare compute convert copy "
    "count create decode delete determine encode execute extract fetch find format generate "
    "get given handle initialize insert install iterate join list load look make merge normalize "
    "open parse perform print process produce put quote raise read register remove rename "
    "replace report reset resolve return run save search send set show skip sort split start "
    "stop strip test transform translate turn update validate verify wait walk wrap write".split()
)


def conversations(pairs: list[Pair], rng: random.Random) -> Iterator[str]:
    """Group pairs to conversations of one to three turns, some with a system prompt.

    The order is shuffled: two questions with the same answer in a row would teach the model to repeat itself.
    """
    pairs = rng.sample(pairs, len(pairs))
    position = 0
    while position < len(pairs):
        turns = rng.choice([1, 1, 1, 2, 3])
        messages: list[dict[str, str]] = []
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        for question, answer in pairs[position : position + turns]:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        position += turns
        yield render_chat(messages)


def pairs_from_docs(text: str, rng: random.Random) -> Iterator[Pair]:
    """Yield questions that one page answers: about objects, its module, the glossary's terms and its sections."""

    def ask(templates: list[str], entry: rst.Entry, answer: str, count: int) -> Iterator[Pair]:
        yield from [(template.format(name=entry.name), answer) for template in rng.sample(templates, count)]

    for entry in rst.object_entries(text):
        if len(entry.text) >= SHORTEST_ANSWER and "{" not in entry.name:
            yield from ask(OBJECT_QUESTIONS, entry, f"`{_full_signature(entry)}`\n\n{entry.text}", 2)
    if module := rst.module_entry(text):
        synopsis = f": {module.signature.rstrip('.')}." if module.signature else "."
        yield from ask(MODULE_QUESTIONS, module, f"The `{module.name}` module{synopsis}\n\n{module.text}", 4)
    for entry in rst.glossary_entries(text):
        if len(entry.text) >= SHORTEST_ANSWER:
            yield from ask(TERM_QUESTIONS, entry, entry.text, 4)
    for entry in rst.sections(text):
        if len(entry.text) >= SHORTEST_ANSWER and len(entry.name) > 8:
            yield from ask(["{name}"] if entry.name.endswith("?") else SECTION_QUESTIONS, entry, entry.text, 1)


def _full_signature(entry: rst.Entry) -> str:
    """Return the signature under the requested name, to tell equal names such as ``join`` apart."""
    if entry.name in entry.signature:
        return entry.signature
    _, opening, arguments = entry.signature.partition("(")
    return f"{entry.name}{opening}{arguments}"


def documented_functions(source: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, docstring, whole source and source without docstring of the short functions."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # some files of the test suite are wrong on purpose
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if not docstring or len(node.body) < 2:
            continue
        whole = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
        if len(whole) > LONGEST_SOURCE:
            continue
        doc_node = node.body[0]
        after = "\n".join(lines[doc_node.end_lineno : node.end_lineno]).lstrip("\n")
        before = "\n".join(lines[node.lineno - 1 : doc_node.lineno - 1])
        yield node.name, docstring, whole, textwrap.dedent(f"{before}\n{after}") + "\n"


def pairs_from_source(source: str, rng: random.Random) -> Iterator[Pair]:
    """Yield requests to write a function, and to explain one."""
    for name, docstring, whole, bare in documented_functions(source):
        first = re.split(r"\n\s*\n", docstring)[0].replace("\n", " ").strip()
        if not 10 < len(first) < 200:
            continue
        code = f"```python\n{rng.choice([whole, bare])}```"
        requests = [f"Write a Python function `{name}`. {first}", f"Implement `{name}`: {first}"]
        verb, _, rest = first.partition(" ")
        if verb.lower() in VERBS:
            requests += [f"Write a {kind} to {verb.lower()} {rest}" for kind in ("function", "Python function")]
        yield rng.choice(requests), code
        if rng.random() < 0.5:
            question = rng.choice(["What does this function do?", "Explain this code."])
            yield f"{question}\n\n```python\n{bare}```", docstring
