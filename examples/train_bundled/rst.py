"""Reads just enough reStructuredText to turn Python's documentation into short answers.

It knows the directives that describe objects, section titles, the glossary and the module header. It turns the text
below them into the simple Markdown of a chat answer.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

OBJECT_DIRECTIVE = re.compile(
    r"^(?P<indent> *)\.\. (?P<prefix>c:)?"
    r"(?P<kind>function|method|class|data|exception|attribute|classmethod|staticmethod"
    r"|decorator|decoratormethod|coroutinefunction|coroutinemethod|macro|type|var|member)"
    r":: (?P<signature>.+)$"
)
MODULE_DIRECTIVE = re.compile(r"^\.\. (?:current)?module:: (?P<name>[\w.]+)")
UNDERLINE = re.compile(r"^([=\-~^*#\"'+.])\1{2,}\s*$")
ROLE_WITH_TARGET = re.compile(r":[\w:+-]+:`([^`<]+?)\s*<[^`>]*>`")
NUMBERED_ROLE = re.compile(r":(pep|rfc):`(\d+)`")
ROLE = re.compile(r":[\w:+-]+:`[~!]?([^`]+)`")
LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`__?")


class Entry(NamedTuple):
    """A documented thing: its name, its notation, and its text."""

    name: str
    signature: str
    text: str


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def plain_inline(text: str) -> str:
    """Replace roles, links and literals by the words they show."""
    text = ROLE_WITH_TARGET.sub(r"\1", text)
    text = NUMBERED_ROLE.sub(lambda found: f"{found[1].upper()} {found[2]}", text)
    text = ROLE.sub(r"`\1`", text)
    text = LINK.sub(r"\1", text)
    return text.replace("``", "`").replace("\\ ", "").replace("\\*", "*")


def _blocks(text: str) -> list[str]:
    """Return paragraphs with their indentation."""
    return [block.strip("\n") for block in re.split(r"\n[ \t]*\n", text) if block.strip()]


def _fenced(blocks: list[str]) -> str:
    return "```python\n" + textwrap.dedent("\n\n".join(blocks)).strip("\n") + "\n```"


def _prose(block: str) -> str:
    """Return a paragraph on one line; list items keep a line each."""
    joined = ""
    for line in map(str.strip, block.splitlines()):
        item = re.match(r"[*\-] |\d+\. |#\. ", line)
        joined += ("\n" if item and joined else " " if joined else "") + line
    return plain_inline(joined)


def to_markdown(text: str, limit: int = 1000) -> str:
    """Return the first paragraphs of some reStructuredText, as simple Markdown of about ``limit`` characters.

    Directives are left out with their contents: notes on versions, index entries and cross-references.
    """
    blocks = _blocks(textwrap.dedent(text))
    parts: list[str] = []
    position = 0
    while position < len(blocks) and sum(map(len, parts)) < limit:
        block = blocks[position]
        position += 1
        if block.startswith(".. ") or block == "..":
            position = _skip_indented(blocks, position)
        elif block.lstrip().startswith(">>>"):
            parts.append(_fenced([block]))
        elif block.rstrip().endswith("::"):
            end = _skip_indented(blocks, position)
            parts.append(_prose(block.rstrip()[:-1]))
            if end > position:
                parts.append(_fenced(blocks[position:end]))
            position = end
        elif not re.match(r"[+=|][-=+|]", block):
            parts.append(_prose(block))
    return "\n\n".join(part for part in parts if part.strip(" :"))


def _skip_indented(blocks: list[str], position: int) -> int:
    """Return the first block from ``position`` on that is not indented."""
    while position < len(blocks) and blocks[position].startswith(" "):
        position += 1
    return position


def _body_below(lines: list[str], start: int, indent: int) -> list[str]:
    """Return the lines from ``start`` on that belong to a directive indented by ``indent``."""
    end = start
    while end < len(lines) and (not lines[end].strip() or indent_of(lines[end]) > indent):
        end += 1
    return lines[start:end]


def _without_header(body: list[str]) -> str:
    """Drop the further signatures and options that precede the first blank line."""
    return "\n".join(itertools.dropwhile(str.strip, body))


def object_entries(text: str) -> Iterator[Entry]:
    """Yield every documented function, class, method and so on, named with its module and class."""
    lines = text.expandtabs().splitlines()
    module = ""
    classes: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        if found := MODULE_DIRECTIVE.match(line):
            module = found["name"]
        found = OBJECT_DIRECTIVE.match(line)
        if not found:
            continue
        indent, signature = len(found["indent"]), found["signature"].strip()
        classes = [held for held in classes if held[0] < indent]
        bare = re.split(r"[(\s]", signature.split(" -> ")[0])[0]
        if found["prefix"]:
            called = re.search(r"([\w.]+)\s*(?:\(|$)", signature)
            bare = called[1] if called else bare
        elif classes:
            bare = f"{classes[-1][1]}.{bare.rpartition('.')[2]}"
        if found["kind"] in ("class", "exception"):
            classes.append((indent, bare))
        is_top_level = found["prefix"] or not module or module == "builtins"
        name = bare if is_top_level or bare.startswith(module) else f"{module}.{bare}"
        body = to_markdown(_without_header(_body_below(lines, number + 1, indent)))
        yield Entry(name, plain_inline(signature), body)


def module_entry(text: str) -> Entry | None:
    """Return a module's purpose: its synopsis and the first paragraphs of its page."""
    found = re.search(r"^\.\. module:: ([\w.]+)\n((?:   :.*\n)*)", text, re.MULTILINE)
    if not found:
        return None
    synopsis = re.search(r":synopsis: (.*)", found[2])
    after = [block for block in _blocks(text[found.end() :]) if not _is_header(block)]
    body = to_markdown("\n\n".join(after), limit=600)
    return Entry(found[1], synopsis[1].strip() if synopsis else "", body)


def _is_header(block: str) -> bool:
    """Return whether a block is a rule, or the link to the source."""
    return bool(UNDERLINE.match(block)) or block.startswith("**Source code") or ":source:`" in block


def sections(text: str) -> Iterator[Entry]:
    """Yield every titled section with the text up to the next title."""
    lines = text.expandtabs().splitlines()
    starts = [
        number
        for number in range(len(lines) - 1)
        if lines[number].strip()
        and not lines[number].startswith((" ", ".."))
        and UNDERLINE.match(lines[number + 1])
        and len(lines[number + 1].rstrip()) >= len(lines[number].rstrip()) - 2
    ]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        title = plain_inline(lines[start].strip())
        if not UNDERLINE.match(title):
            yield Entry(title, "", to_markdown("\n".join(lines[start + 2 : end])))


def glossary_entries(text: str) -> Iterator[Entry]:
    """Yield the terms of the glossary page: the lines indented by exactly three."""
    _, found, inside = text.partition(".. glossary::")
    lines = inside.expandtabs().splitlines() if found else []
    for number, line in enumerate(lines):
        if indent_of(line) == 3 and line.strip() and not line.strip().startswith((":", "..")):
            body = to_markdown("\n".join(_body_below(lines, number + 1, 3)))
            yield Entry(line.strip().strip("`"), "", body)
