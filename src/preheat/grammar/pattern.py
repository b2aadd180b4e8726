r"""Regular expressions as nodes: the syntax that ECMA 262, Python and Rust share.

There are two dialects. The dialect of JSON Schema is ECMA 262: classes such as ``\d`` are ASCII, ``.`` takes no line
terminator, and a pattern may be found anywhere in the text. The dialect of whole texts has Unicode's classes, and its
``.`` takes no newline. Other syntax raises :class:`PatternError`, with the position.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from preheat.grammar import characters
from preheat.grammar.characters import Ranges
from preheat.grammar.nodes import EMPTY, EVERYTHING, NOTHING, Alt, Node, Repeat, Seq, alt, chars, repeat, seq

MOST_COUNT = 10**6
"""The largest count of a repetition."""


class PatternError(ValueError):
    """An error in a regular expression; the message has the position ``at``."""

    def __init__(self, why: str, at: int) -> None:
        super().__init__(f"{why} at position {at}")


@dataclass(frozen=True, eq=False)
class _Anchor(Node):
    """An anchor for the beginning of the text, or its ``end``, ``at`` a position of the expression."""

    end: bool
    at: int


@dataclass(frozen=True)
class Dialect:
    r"""A syntax of regular expressions.

    ``dot``: the characters of the dot. ``classes``: the set of ``\d``, ``\s`` or ``\w``. ``search``: the expression may
    be found anywhere in the text.
    """

    dot: Ranges
    classes: Callable[[str], Ranges]
    search: bool


ECMA = Dialect(
    characters.others(characters.of("\n\r\u2028\u2029")),
    {"d": characters.DIGITS, "s": characters.SPACE, "w": characters.WORD}.__getitem__,
    search=True,
)
WHOLE = Dialect(characters.others(characters.of("\n")), characters.unicode_class, search=False)


def parsed(pattern: str, dialect: Dialect) -> Node:
    """Return the texts that fit ``pattern``. Raises PatternError."""
    return _Anchored(dialect.search).node(_Parser(pattern, dialect).whole())


_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "v": "\v", "f": "\f", "0": "\0"}
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}", re.ASCII)
_CODE = re.compile(r"x\{([0-9a-fA-F]{1,6})\}|u\{([0-9a-fA-F]{1,6})\}|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})")
_PAIR = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_NAME = re.compile(r"\?(?:P?<[A-Za-z_$][\w$]*>|:)")
_CATEGORY = re.compile(r"([pP])(?:\{(?:General_Category=|gc=)?(\w{1,2})\}|([A-Z]))")


class _Parser:
    """Parser of ``pattern`` by recursive descent."""

    def __init__(self, pattern: str, dialect: Dialect) -> None:
        self._text, self._dialect, self._at = pattern, dialect, 0

    def whole(self) -> Node:
        found = self._alternatives()
        if self._at < len(self._text):
            raise self._wrong("unopened group")
        return found

    def _wrong(self, why: str, back: int = 0) -> PatternError:
        return PatternError(why, self._at - back)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, token: str) -> bool:
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        return True

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self._text, self._at)
        if found:
            self._at = found.end()
        return found

    def _alternatives(self) -> Node:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return alt(*parts)

    def _sequence(self) -> Node:
        parts = list[Node]()
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return seq(*parts)

    def _repeated(self, node: Node) -> Node:
        while (least_most := self._quantifier()) is not None:
            if isinstance(node, _Anchor):
                raise self._wrong("nothing to repeat", 1)
            if self._take("+"):
                raise self._wrong("possessive quantifiers are not supported", 1)
            self._take("?")  # a lazy quantifier holds the same texts
            node = repeat(node, *least_most)
        return node

    def _quantifier(self) -> tuple[int, int | None] | None:
        for token, counts in _QUANTIFIERS:
            if self._take(token):
                return counts
        start, found = self._at, self._match(_COUNT)
        if not found or not (found[1] or found[3]):
            self._at = start
            return None
        most = found[3] if found[2] else found[1]
        if max(len(found[1]), len(most)) > len(str(MOST_COUNT)):
            raise PatternError(f"a count above {MOST_COUNT:,}", start)
        counts = int(found[1] or 0), int(most) if most else None
        if max(counts[0], counts[1] or 0) > MOST_COUNT:
            raise PatternError(f"a count above {MOST_COUNT:,}", start)
        if counts[1] is not None and counts[0] > counts[1]:
            raise PatternError("a repetition with a minimum above its maximum", start)
        return counts

    def _atom(self) -> Node:
        start = self._at
        if self._take("("):
            return self._group(start)
        if self._take("["):
            return self._class(start)
        if self._take("."):
            return chars(self._dialect.dot)
        if self._take("^"):
            return _Anchor(False, start)
        if self._take("$"):
            return _Anchor(True, start)
        if self._take("\\"):
            if self._peek() in tuple("AzZ") and not self._dialect.search:
                self._at += 1
                return _Anchor(self._text[self._at - 1] != "A", start)
            return chars(self._escape(start, within=False))
        if self._peek() in tuple("*+?"):
            raise self._wrong("nothing to repeat")
        self._at += 1
        return chars(_single(ord(self._text[start]), start))

    def _group(self, start: int) -> Node:
        if self._peek() == "?" and not self._match(_NAME):
            kinds = "look-around, flags and other extensions of groups"
            raise PatternError(f"{kinds} are not supported: {self._text[start : start + 3]}", start)
        found = self._alternatives()
        if not self._take(")"):
            raise PatternError("unclosed group", start)
        return found

    def _escape(self, start: int, *, within: bool) -> Ranges:
        """Return the characters of an escape, behind its backslash."""
        letter = self._peek()
        if not letter:
            raise PatternError("a backslash at the end", start)
        if found := self._match(_CODE):
            return _single(self._code(next(filter(None, found.groups()))), start)
        if found := self._match(_CATEGORY):
            known = characters.category(found[2] or found[3])
            if not known:
                raise PatternError(f"{found[0]} is not supported: only general categories of Unicode are", start)
            return known if found[1] == "p" else characters.others(known)
        self._at += 1
        if letter in "dswDSW":
            known = self._dialect.classes(letter.lower())
            return known if letter.islower() else characters.others(known)
        if letter in _SIMPLE and not (letter == "0" and self._peek().isdigit()):
            return characters.of(_SIMPLE[letter])
        if letter == "b" and within:
            return characters.of("\b")
        if letter == "c" and self._peek().isascii() and self._peek().isalpha():
            self._at += 1
            return characters.of(chr(ord(self._text[self._at - 1]) % 32))
        if letter.isascii() and letter.isalnum():
            raise PatternError(f"\\{letter} is not supported", start)
        return _single(ord(letter), start)

    def _code(self, digits: str) -> int:
        """Return the code point of ``digits``; two escapes of surrogates make one code point."""
        code = int(digits, 16)
        if 0xD800 <= code < 0xDC00 and (low := self._match(_PAIR)):
            return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        return code

    def _class(self, start: int) -> Node:
        """Return the class of characters behind its bracket."""
        negated, found, first = self._take("^"), Ranges(), self._at
        while self._at == first or self._peek() != "]":
            if self._peek() == "]" and self._dialect.search:
                break  # in ECMA 262 an empty class holds nothing
            low = self._member(start)
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                low = _span(low, self._member(start), start)
            found = characters.union(found, low)
        self._at += 1
        return chars(characters.others(found) if negated else found)

    def _member(self, start: int) -> Ranges:
        at = self._at
        if self._take("\\"):
            return self._escape(at, within=True)
        if not self._peek():
            raise PatternError("unclosed class of characters", start)
        if not self._dialect.search and self._text[at : at + 2] in ("[:", "&&", "--", "~~", "[^"):
            raise PatternError("sets within a class of characters are not supported", at)
        self._at += 1
        return _single(ord(self._text[at]), at)


_QUANTIFIERS: tuple[tuple[str, tuple[int, int | None]], ...] = (("*", (0, None)), ("+", (1, None)), ("?", (0, 1)))


def _single(code: int, at: int) -> Ranges:
    if found := characters.common(((code, code),), characters.ANY_CHARACTER):
        return found
    raise PatternError(f"{code:x} is not a character", at)


def _span(low: Ranges, high: Ranges, at: int) -> Ranges:
    """Return the range from one character to another."""
    if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
        raise PatternError("a range of classes", at)
    if low[0][0] > high[0][0]:
        raise PatternError("a range that ends before it begins", at)
    return characters.ranges((low[0][0], high[0][0]))


class _Anchored:
    """Removal of anchors; they may stand at the edges of the expression and of its alternatives."""

    def __init__(self, search: bool) -> None:
        self._around = EVERYTHING if search else EMPTY

    def node(self, whole: Node) -> Node:
        return alt(*(self._edges(list(parts)) for parts in _spread(whole)))

    def _edges(self, parts: list[Node]) -> Node:
        begins = ends = False
        while parts and isinstance(parts[0], _Anchor) and not parts[0].end:
            begins = bool(parts.pop(0))
        while parts and isinstance(parts[-1], _Anchor) and parts[-1].end:
            ends = bool(parts.pop())
        inner = seq(*parts)
        if len(ways := _spread(inner)) > 1:
            first, last = [_Anchor(False, 0)] * begins, [_Anchor(True, 0)] * ends
            return alt(*(self._edges([*first, *way, *last]) for way in ways))
        if (anchor := _first_anchor(inner)) is not None:
            raise PatternError("an anchor that is not at the edge of the expression", anchor.at)
        return seq(EMPTY if begins else self._around, inner, EMPTY if ends else self._around)


def _spread(node: Node) -> list[tuple[Node, ...]]:
    """Return ``node`` as alternatives of sequences.

    An anchor at the edge of a group is then at the edge of a sequence.
    """
    if isinstance(node, Alt):
        return [each for part in node.parts for each in _spread(part)]
    if not isinstance(node, Seq) or _first_anchor(node) is None:
        return [(node,)] if node != NOTHING else []
    first, last = node.parts[0], node.parts[-1]
    if isinstance(first, Alt) and _first_anchor(first) is not None:
        return [each for part in first.parts for each in _spread(seq(part, *node.parts[1:]))]
    if isinstance(last, Alt) and _first_anchor(last) is not None:
        return [each for part in last.parts for each in _spread(seq(*node.parts[:-1], part))]
    return [node.parts]


def _first_anchor(node: Node) -> _Anchor | None:
    """Return the first anchor within ``node``, if there is one."""
    match node:
        case _Anchor():
            return node
        case Seq(parts) | Alt(parts):
            return next(filter(None, map(_first_anchor, parts)), None)
        case Repeat(inner):
            return _first_anchor(inner)
    return None
