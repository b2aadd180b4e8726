"""Structural tags in llguidance's notation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preheat.grammar.json_rules import ROOT
from preheat.grammar.source import literal, refused
from preheat.grammar.structural import PART, Format


class Lark:
    """Writer of a tree of formats in llguidance's notation.

    ``schema`` makes the rules of a JSON schema with a prefix for their names; the first rule is the rule of a whole
    text.
    """

    def __init__(self, schema: Callable[[Any, str], list[str]]) -> None:
        self._schema, self._rules = schema, list[str]()

    def text(self, tree: Format) -> str:
        """Return the grammar of ``tree``."""
        start = self._last(tree)
        return "\n".join(["%llguidance {}", f"start: {start}", r"TAG_TEXT: /(.|\n)*/", *self._rules])

    def _last(self, tree: Format) -> str:
        """Return the expression of a format at the end of a text; free text may be there."""
        match tree["type"]:
            case "any_text":
                self._no_excludes(tree)
                return self._rule("TAG_TEXT")
            case "triggered_tags":
                return self._triggered(tree)
            case "sequence":
                *before, last = tree["elements"]
                return " ".join([*map(self._inner, before), self._last(last)])
            case _:
                return self._inner(tree)

    def _inner(self, tree: Format) -> str:
        """Return the expression of a format that more text may follow."""
        match tree["type"]:
            case "const_string":
                return literal(tree["value"])
            case "json_schema":
                prefix = f"json_{len(self._rules)}_"
                self._rules += self._schema(tree["json_schema"], prefix)
                return f"{prefix}{ROOT}"
            case "regex":
                return "/" + str(tree["pattern"]).replace("/", r"\/").replace("\n", r"\n") + "/"
            case "sequence":
                return self._rule(" ".join(map(self._inner, tree["elements"])))
            case "or":
                return f"({' | '.join(map(self._inner, tree['elements']))})"
            case "optional" | "plus" | "star" as kind:
                return f"({self._inner(tree['content'])}){_TIMES[kind]}"
            case "tag":
                return self._rule(f"{literal(tree['begin'])} {self._content(tree)}")
            case "tags_with_separator":
                return self._separated(tree)
            case kind:
                raise refused(
                    PART, f"format {kind} is not supported in the middle of a text: put it last, or use xgrammar"
                )

    def _content(self, tag: Format) -> str:
        """Return the expression of a tag behind its beginning.

        Free text in the tag goes up to the first end.
        """
        ends = [tag["end"]] if isinstance(tag["end"], str) else tag["end"]
        end = f"({' | '.join(map(literal, ends))})" if len(ends) > 1 else _literal(ends[0])
        if tag["content"]["type"] == "any_text":
            self._no_excludes(tag["content"])
            if not all(ends):
                raise refused(PART, "a tag of format any_text needs an end")
            return self._rule(f"TAG_TEXT {end}", "[lazy]")
        return f"{self._inner(tag['content'])} {end}"

    def _triggered(self, tree: Format) -> str:
        """Return the expression of free text where triggers begin the tags.

        With ``at_least_one``, a tag begins the text.
        """
        self._no_excludes(tree)
        tags = []
        for tag in tree["tags"]:
            trigger = next(each for each in tree["triggers"] if tag["begin"].startswith(each))
            begin = self._rule(f"TAG_TEXT {literal(trigger)}", "[lazy]")
            tags.append(self._rule(f"{begin} {_literal(tag['begin'].removeprefix(trigger))} {self._content(tag)}"))
        some, end = f"({' | '.join(tags)})", self._rule("TAG_TEXT")
        first = f"({' | '.join(map(self._inner, tree['tags']))})" if tree.get("at_least_one") else ""
        if tree.get("stop_after_first"):
            return first or f"({some} | {end})"
        return f"{first} {some}* {end}"

    def _separated(self, tree: Format) -> str:
        tag = f"({' | '.join(map(self._inner, tree['tags']))})"
        more = "" if tree.get("stop_after_first") else f" ({_literal(tree['separator'])} {tag})*"
        return f"({tag}{more}){'' if tree.get('at_least_one') else '?'}"

    def _no_excludes(self, tree: Format) -> None:
        if tree.get("excludes"):
            raise refused(PART, f"excludes of format {tree['type']} needs backend xgrammar")

    def _rule(self, text: str, attributes: str = "") -> str:
        name = f"tag_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {text}")
        return name


_TIMES = {"optional": "?", "plus": "+", "star": "*"}


def _literal(text: str) -> str:
    """Return a literal; nothing for an empty text, since the notation has no empty literal."""
    return literal(text) if text else ""
