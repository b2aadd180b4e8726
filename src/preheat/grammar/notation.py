"""Grammars of clients, read to check that each of their rules ends.

There may be a rule that no finite text satisfies. A library follows such a rule until the text has its greatest length,
or fails on the way.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from preheat.grammar.derive import TooComplex, is_empty
from preheat.grammar.nodes import (
    EMPTY,
    EVERYTHING,
    NOTHING,
    Alt,
    Both,
    Node,
    Not,
    Ref,
    Repeat,
    Seq,
    alt,
    both,
    children,
    productive,
    repeat,
    seq,
    text,
    within,
    without,
)
from preheat.grammar.pattern import ECMA, WHOLE, PatternError, parsed
from preheat.grammar.source import refused

MOST_COUNT = 64
"""Most that a client's grammar for xgrammar may count, nested counts multiplied. Masks cost more with each open count.
A single character may be counted up to any number."""

MOST_NESTED = 1000
"""Most that a client's grammar for llguidance may count, nested counts multiplied."""

_LARK = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*)|(?P<string>"(?:\\.|[^"\\\n])*")i?|/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)
    |%(?P<inline>json|regex|lark)\s*(?=\{)|%(?P<directive>\w+)[^\n]*|(?P<token><[^>\n]*>)|@(?P<other>[\w-]+)
    |(?P<name>[A-Za-z_][\w-]*)(?:\.-?\d+)?|\{(?P<count>\s*\d*\s*,?\s*\d*\s*)\}|~\s*(?P<times>\d+(?:\s*\.\.\s*\d+)?)|->\s*\w+
    |(?P<op>::|[|()\[\]*+?:~&!,=.]|%)|(?P<number>\d\w*)""",
    re.VERBOSE,
)
_EBNF = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<string>"(?:\\.|[^"\\])*")|(?P<class>\[(?:\\.|[^\]\\])*\])
    |(?P<name>[A-Za-z_][\w.-]*)|\{(?P<count>\s*\d*\s*,?\s*\d*\s*)\}|(?P<op>::=|[|()*+?=,:!])|(?P<number>-?\d+)""",
    re.VERBOSE,
)
_LARK_RULE = re.compile(r"(?m)^[ \t]*[?!]*([A-Za-z_][\w-]*)(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:(?!:)")
_EBNF_RULE = re.compile(r"(?m)^[ \t]*([A-Za-z_][\w.-]*)[ \t]*::=")
_ESCAPE = re.compile(
    r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\.",
    re.DOTALL,
)
_LITERAL = 0xA0
"""The first character that means itself anywhere in a grammar."""


def readable(grammar: str) -> str:
    """Return a client's grammar with characters in place of their escapes, from U+00A0 on.

    xgrammar reads a pair of surrogates as two characters of no text, and llguidance loses zeros of an escape in EBNF.
    Raises InvalidRequest for half a pair.
    """

    def character(found: re.Match[str]) -> str:
        first, second, short, long = found.groups()
        if first:
            return chr(0x10000 + ((int(first, 16) & 0x3FF) << 10) + (int(second, 16) & 0x3FF))
        code = int(short or long or "0", 16)
        if 0xD800 <= code <= 0xDFFF:
            raise refused("grammar", f"{found[0]} is half a surrogate pair, and that is not a character")
        literal = _LITERAL <= code <= 0x10FFFF and not chr(code).isspace()
        return chr(code) if literal else found[0]

    return _ESCAPE.sub(character, grammar)


def check_once(grammar: str) -> None:
    """Raise InvalidRequest if an EBNF grammar has a rule twice: the last one would replace the others."""
    if twice := next((name for name, count in Counter(_EBNF_RULE.findall(grammar)).items() if count > 1), None):
        raise refused("grammar", f"rule {twice} is defined more than once: write its texts as one rule, with |")


def check_lark(grammar: str) -> None:
    """Raise InvalidRequest, naming the rule, if a grammar of llguidance may not end."""
    if "::" not in grammar:  # rules with parameters are not looked at
        rules = _rules(grammar, _LARK_RULE, _LARK)
        _check(rules, "start")
        _check_counts(rules, MOST_NESTED, nested=True)


def check_ebnf(grammar: str) -> None:
    """Raise InvalidRequest if a grammar, as printed by xgrammar, may not end or counts too much."""
    rules = _rules(grammar, _EBNF_RULE, _EBNF)
    _check(rules, "root")
    _check_counts(rules, MOST_COUNT)


def _check(rules: Mapping[str, Node], start: str) -> None:
    alive, seen, todo = productive(rules), set[str](), [start]
    while todo:
        name = todo.pop()
        if name in seen or name not in rules:
            continue
        seen.add(name)
        if name not in alive:
            raise refused("grammar", f"no finite text satisfies rule {name}")
        for node in within(rules[name]):
            if node == NOTHING:
                raise refused("grammar", f"a part of rule {name} allows no character")
            if isinstance(node, Both | Not):
                _check_terminal(_expanded(node, rules), name)
        todo += [each.name for each in within(rules[name]) if isinstance(each, Ref)]


def _check_terminal(node: Node, name: str) -> None:
    try:
        if is_empty(node):
            raise refused("grammar", f"no text satisfies a part of rule {name}")
    except (TooComplex, TypeError):
        raise refused("grammar", f"rule {name} combines expressions that are too complex to be decided") from None


def _expanded(node: Node, rules: Mapping[str, Node], depth: int = 50) -> Node:
    """Return ``node`` with terminals in place of their names."""
    match node:
        case Ref(name):
            return _expanded(rules[name], rules, depth - 1) if depth and name in rules else node
        case Seq(parts):
            return seq(*(_expanded(part, rules, depth) for part in parts))
        case Alt(parts):
            return alt(*(_expanded(part, rules, depth) for part in parts))
        case Both(parts):
            return both(*(_expanded(part, rules, depth) for part in parts))
        case Repeat(inner, least, most):
            return repeat(_expanded(inner, rules, depth), least, most)
        case Not(inner):
            return without(_expanded(inner, rules, depth))
    return node


def _check_counts(rules: Mapping[str, Node], most: int, *, nested: bool = False) -> None:
    """Refuse rules that count further than ``most``; ``nested``: a single count may have any size."""
    known = dict[str, tuple[int, int]]()

    def counts(node: Node, above: frozenset[str]) -> tuple[int, int]:
        """Return the depth of nested counts, and their product."""
        if isinstance(node, Ref):
            if node.name in above or node.name not in rules:
                return 0, 1
            if node.name not in known:
                known[node.name] = counts(rules[node.name], above | {node.name})
            return known[node.name]
        found = max((counts(each, above) for each in children(node)), key=lambda each: each[1], default=(0, 1))
        if (
            not isinstance(node, Repeat)
            or (times := max(node.least, node.most or 1)) == 1
            or _simple(node.inner, rules)
        ):
            return found
        return found[0] + 1, found[1] * times

    for name in rules:
        depth, count = counts(Ref(name), frozenset())
        if count > most and depth > nested:
            raise refused("grammar", f"rule {name} counts up to {count:,}, all its counts multiplied; at most {most:,}")


def _simple(node: Node, rules: Mapping[str, Node]) -> bool:
    """Return whether ``node`` is a single class of characters."""
    if isinstance(node, Ref):
        node = rules.get(node.name, node)
    return node == CLASS


CLASS = repeat(text("x"), 1, 1)
"""A substitute for any class of characters that is not empty."""


def _rules(grammar: str, rule: re.Pattern[str], token: re.Pattern[str]) -> dict[str, Node]:
    heads = list(rule.finditer(grammar))
    ends = [head.start() for head in heads[1:]] + [len(grammar)]
    found = dict[str, Node]()
    for head, end in zip(heads, ends, strict=True):
        found[head[1]] = _Reader(list(_tokens(grammar[head.end() : end], token))).alternatives()
    return found


def _tokens(body: str, token: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(body):
        found = token.match(body, at)
        if found is None:
            at += 1  # the library reports the error
            continue
        at = found.end()
        kind = found.lastgroup or ""
        if kind == "flags":
            kind = "regex"
        if kind == "directive":
            return  # a directive concerns all rules and ends this one
        if kind == "inline":
            at = _behind_object(body, at)
        if kind not in ("space", ""):
            yield kind, found[kind]


def _behind_object(body: str, at: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(body, at)[1]
    except ValueError:
        return len(body)


class _Reader:
    """Reader of a rule's body."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._at = tokens, 0

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("", "")

    def _take(self, op: str) -> bool:
        found = self._peek() == ("op", op)
        self._at += found
        return found

    def alternatives(self) -> Node:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return alt(*parts)

    def _sequence(self) -> Node:
        parts = list[Node]()
        while self._peek() not in (("", ""), ("op", "|"), ("op", ")"), ("op", "]")):
            part = self._repeated()
            while self._take("&"):
                part = both(part, self._repeated())
            parts.append(part)
        return seq(*parts)

    def _repeated(self) -> Node:
        if self._take("~"):
            return without(self._repeated())
        node = self._atom()
        while True:
            kind, value = self._peek()
            if kind not in ("count", "times") and (kind, value) not in (("op", "*"), ("op", "+"), ("op", "?")):
                return node
            self._at += 1
            node = repeat(node, *_counts(value))

    def _atom(self) -> Node:
        kind, value = self._peek()
        self._at += 1
        if (kind, value) in (("op", "("), ("op", "[")):
            inner = self.alternatives()
            self._at += 1
            return alt(inner, EMPTY) if value == "[" else inner
        match kind:
            case "string":
                return text(_unquoted(value))
            case "regex":
                return _expression(value)
            case "class":
                return NOTHING if _is_empty_class(value) else CLASS
            case "name":
                return Ref(value)
        return EMPTY


def _unquoted(value: str) -> str:
    try:
        found: str = json.loads(value)
    except ValueError:
        return value[1:-1]
    return found


def _expression(value: str) -> Node:
    try:
        return parsed(value, WHOLE)
    except PatternError:
        return EVERYTHING  # Rust's syntax has more


def _is_empty_class(value: str) -> bool:
    value = re.sub(r"\\U([0-9a-fA-F]{8})", lambda code: f"\\u{{{code[1][2:]}}}", value)
    try:
        return parsed(value, ECMA) == NOTHING or parsed(f"^{value}$", ECMA) == NOTHING
    except PatternError:
        return False


def _counts(value: str) -> tuple[int, int | None]:
    if value in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[value]
    low, comma, high = re.sub(r"\s", "", value).replace("..", ",").partition(",")
    least = int(low or 0)
    return least, (int(high) if high else None) if comma else least
