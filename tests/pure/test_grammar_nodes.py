"""Laws of grammars before any library sees them: regular expressions, numbers, JSON strings, rules that end."""

from __future__ import annotations

import json
import re
from datetime import date
from decimal import Decimal
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import InvalidRequest
from preheat.grammar.characters import ANY_CHARACTER, common, others, ranges
from preheat.grammar.derive import Matcher, TooComplex, automaton, check_counts, fits, is_empty
from preheat.grammar.formats import format_node
from preheat.grammar.nodes import (
    EVERYTHING,
    NOTHING,
    Alt,
    Node,
    Ref,
    Repeat,
    Seq,
    alt,
    both,
    nullable,
    productive,
    pruned,
    repeat,
    seq,
    text,
    without,
)
from preheat.grammar.notation import check_ebnf, check_lark
from preheat.grammar.numbers import decimals, integers
from preheat.grammar.pattern import ECMA, WHOLE, PatternError, parsed
from preheat.grammar.quote import quoted
from preheat.utils.exact_json import dumps, exact_number, travels

ATOMS = st.sampled_from(
    [
        r"a",
        r"b",
        r".",
        r"\d",
        r"\w",
        r"\s",
        r"\D",
        r"\W",
        r"\S",
        r"[ab]",
        r"[^a]",
        r"[^\s\d]",
        r"\n",
        r"[a-c\-]",
        r"\.",
        r"\x41",
        r"é",
        "[]a]",
        r"[\w.]",
        r"\t",
        "-",
    ]
)
COUNTS = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}"])).map(
            lambda two: f"({two[0]}){two[1]}"
        ),
    ),
    max_leaves=5,
)
TEXTS = st.text("ab1 \n\r\té.-]A_\u2028", max_size=4)


@given(PATTERNS, TEXTS)
def test_expressions_match_as_in_python(pattern, value):
    assert fits(parsed(pattern, WHOLE), value) == bool(re.fullmatch(pattern, value))


def test_a_dot_that_takes_a_newline_is_noticed():
    """Control of the law above: a dot that takes a newline is seen."""
    assert bool(re.fullmatch("a.b", "a\nb")) != fits(parsed("a(?:.|\\n)b", WHOLE), "a\nb")


@pytest.mark.parametrize(
    ("pattern", "fit", "others"),
    [
        (".", "a\té", "\n\r\u2028\u2029"),
        (r"\d", "09", "\u0661a"),
        (r"\w", "aZ_0", "é-"),
        (r"\s", "\n\u00a0\ufeff", "a"),
        (r"\D", "a\u0661", "0"),
        (r"[^a]", "b\n", "a"),
        (r"\S", "é", " "),
        ("[^]", "\n", ""),
        (r"\cJ|\u{1F600}", "\n😀", "J"),
        (r"\ud83d\ude00", "😀", "x"),
        (r"\p{Lu}|\P{L}", "É1", "é"),
    ],
)
def test_classes_of_schemas_match_as_in_ecmascript(pattern, fit, others):
    node = parsed(f"^(?:{pattern})$", ECMA)
    assert all(fits(node, each) for each in fit) and not any(fits(node, each) for each in others)


def test_texts_that_begin_alike_share_the_work():
    node, matcher = format_node("date"), Matcher()
    texts = [f"20{year:02d}-{month:02d}-{day:02d}" for year in range(99) for month in range(14) for day in (1, 29, 31)]
    assert [matcher.fits(node, each) for each in texts] == [_is_date(each) for each in texts]
    assert len(matcher._seen) < len(texts)


def _is_date(written: str) -> bool:
    try:
        return bool(date.fromisoformat(written))
    except ValueError:
        return False


def test_a_pattern_of_a_schema_may_be_anywhere():
    for pattern, value in product(
        ["b", "^b", "b$", "^b$", "^a|c$", "(^a|b)c", "a(b|c$)"], ["b", "abc", "bc", "ab", "ac", "\nb"]
    ):
        right = re.search(pattern.replace("$", r"\Z"), value)
        assert fits(parsed(pattern, ECMA), value) == bool(right), (pattern, value)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a(b", "unclosed group at position 1"),
        ("a)", "unopened group at position 1"),
        ("[a", "unclosed class .* 0"),
        ("*a", "nothing to repeat at position 0"),
        ("a{3,1}", "minimum above its maximum at position 1"),
        ("a^b", "anchor .* at position 1"),
        ("(?=a)", r"look-around.* at position 0"),
        (r"(a)\1", "not supported at position 3"),
        (r"\bx", "not supported at position 0"),
        ("[z-a]", "range .* position 0"),
        ("\\", "backslash at the end at position 0"),
        ("a{9999999}", "a count above 1,000,000 at position 1"),
        (r"\p{Klingon}", "position 0"),
        ("a++", "position 2"),
    ],
)
def test_wrong_expressions_name_the_position(pattern, why):
    with pytest.raises(PatternError, match=why):
        parsed(pattern, ECMA)


@given(PATTERNS, PATTERNS, TEXTS)
def test_both_and_without(one, other, value):
    left, right = parsed(one, WHOLE), parsed(other, WHOLE)
    assert fits(both(left, without(right)), value) == (fits(left, value) and not fits(right, value))


@given(PATTERNS, PATTERNS)
def test_emptiness_agrees_with_the_automaton(one, other):
    node = both(parsed(one, WHOLE), without(parsed(other, WHOLE)))
    assert is_empty(node) == (not automaton(node))
    assert all(nullable(state) or edges for state, edges in automaton(node).items())


def test_expressions_without_a_text_are_empty():
    for pattern in (r"[^\s\S]", r"a[^\s\S]+", "[]"):
        assert is_empty(parsed(pattern, ECMA))
    assert not is_empty(parsed(r"[^\s\S]*", WHOLE))


def test_work_is_bounded():
    for pattern in ("((a{1,1000}){1,1000}){1,1000}", "((a|b){1,300}c?){1,300}"):
        with pytest.raises(TooComplex):
            check_counts(parsed(pattern, WHOLE))
    check_counts(parsed("(a{1,30}b){1,60}", WHOLE))


NUMBERS = st.decimals(min_value=-2000, max_value=2000, places=2) | st.integers(-(10**20), 10**20).map(Decimal)


@given(st.none() | NUMBERS, st.none() | NUMBERS, st.booleans(), st.booleans(), NUMBERS)
def test_numbers_within_bounds(low, high, low_itself, high_itself, value):
    """Numbers within bounds are not rounded, and may have zeros behind them."""
    node = decimals(None if low is None else (low, low_itself), None if high is None else (high, high_itself))
    for each in {value, low, high} - {None}:
        right = (low is None or each > low or (each == low and low_itself)) and (
            high is None or each < high or (each == high and high_itself)
        )
        plain = format(each or abs(each), "f")
        short = plain.rstrip("0").rstrip(".") if "." in plain else plain
        for written in {plain, short, short + ("0" if "." in short else ".00")}:
            assert fits(node, written) == right, written


@given(st.none() | st.integers(), st.none() | st.integers(), st.integers(), st.sampled_from([0, 1, -1]))
def test_integers_within_bounds(low, high, value, step):
    node = integers(low, high)
    for each in (value, (low or 0) + step, (high or 0) + step, 2**53 + 1 + step):
        assert fits(node, str(each)) == ((low is None or each >= low) and (high is None or each <= high))


@given(st.text(max_size=4), st.data())
def test_every_spelling_of_a_string(value, data):
    """Every spelling of RFC 8259, section 7, is allowed.

    There are characters as they are, short escapes, four hexadecimal digits, and pairs of them.
    """
    spelled = '"'
    for each in value:
        units = each.encode("utf-16-be")
        escapes = ["".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))]
        escapes += [escapes[0].upper().replace("\\U", "\\u")]
        escapes += [each] if each >= " " and each not in '"\\' else []
        escapes += ["\\" + short for short, meant in zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True) if each == meant]
        spelled += data.draw(st.sampled_from(escapes))
    spelled += '"'
    assert json.loads(spelled) == value
    assert fits(quoted(EVERYTHING), spelled) and fits(quoted(text(value)), spelled)
    assert not fits(quoted(without(text(value))), spelled)


@pytest.mark.parametrize("wrong", ['"\\x"', '"\\ud83d"', '"\\ude00\\ud83d"', '"\n"', '"\\u12g4"', '"', '"\\"', '"a"b"'])
def test_wrong_json_strings_do_not_fit(wrong):
    assert not fits(quoted(EVERYTHING), wrong)


NAMES = "abc"
RULES = st.fixed_dictionaries(
    {
        name: st.recursive(
            st.sampled_from([text("x"), NOTHING, *map(Ref, NAMES)]),
            lambda inner: st.one_of(
                st.lists(inner, max_size=3).map(lambda parts: seq(*parts)),
                st.lists(inner, max_size=3).map(lambda parts: alt(*parts)),
                st.tuples(inner, st.sampled_from([(0, None), (1, None), (0, 1), (2, 3)])).map(
                    lambda two: repeat(two[0], *two[1])
                ),
            ),
            max_leaves=4,
        )
        for name in NAMES
    }
)


@given(RULES)
def test_rules_that_end_can_be_written_out(rules):
    """Rules that end are rules that can be written out.

    A shortest text uses none of three rules within itself.
    """

    def ends(node: Node, depth: int) -> bool:
        match node:
            case Ref(name):
                return depth > 0 and ends(rules[name], depth - 1)
            case Seq(parts):
                return all(ends(part, depth) for part in parts)
            case Alt(parts):
                return any(ends(part, depth) for part in parts)
            case Repeat(inner, least, _):
                return not least or ends(inner, depth)
        return True

    alive = productive(rules)
    for name in NAMES:
        assert ends(Ref(name), 3) == (name in alive)
        assert (pruned(rules[name], alive) != NOTHING) == (name in alive)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: start",
        'start: "a" start',
        'start: "a" | b\nb: "c" b',
        'start: x y\nx: "a"\ny: y "b" | z\nz: z',
        'start: "a" A\nA: /[^\\s\\S]/',
        "start: A\nA: /a/ & /b/",
        'start: "a" [b]\nb: b',
        'start: x{1,90}\nx: y{1,90}\ny: "a" | "b"',
    ],
)
def test_grammars_that_do_not_end_are_refused(grammar):
    with pytest.raises(InvalidRequest, match=r"^structured_outputs\.grammar: .*rule"):
        check_lark(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start | "b"',
        'start: ("a" start)?',
        "start: x*\nx: x x | /a+/",
        'start: %json {"start": {"b": 1}} end\nend: "."',
        '// start: start\n?start: A~2..3 -> x\nA: "\\"" /[^"]/ & /[a-z]/',
        'start[lazy]: /.*/ "x"\n%ignore / /',
        'start: "a b: c" <eos>',
    ],
)
def test_grammars_that_end_are_not(grammar):
    check_lark(grammar)


def test_repetition_counts_for_xgrammar_are_bounded():
    check_ebnf('root ::= (("a" x{2, 5}) | ([^a]{1, 900}))\nx ::= (("b"))\n')
    for grammar in (
        'root ::= ((x{1, 30}){1, 30})\nx ::= (("a"))',
        'root ::= ((y{1, 30}))\ny ::= ((x{1, 30}))\nx ::= (("a"))',
    ):
        with pytest.raises(InvalidRequest, match="rule root counts up to 900"):
            check_ebnf(grammar)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
def test_json_is_written_as_it_was(value):
    assert json.loads(dumps(value)) == value


def test_digits_are_kept():
    assert exact_number("0.1") == 0.1 and isinstance(exact_number("1e5"), float)
    long = exact_number("0.12345678901234567890123")
    assert dumps([long, 2**80]) == f"[0.12345678901234567890123, {2**80}]"
    with pytest.raises(ValueError, match="Number out of range"):
        exact_number("1e" + "9" * 30)
    assert travels({"a": [1, 0.5, 2**64 - 1]}) and not travels([2**64]) and not travels({"a": long})


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=5))
def test_sets_of_characters(pairs):
    found = ranges(*((min(pair), max(pair)) for pair in pairs))
    held = {code for low, high in found for code in range(low, high + 1)}
    assert held == {code for low, high in map(sorted, pairs) for code in range(low, high + 1)}
    assert not common(found, others(found)) and ranges(*found, *others(found)) == ANY_CHARACTER
