"""Constraints on a request's text, and repetition that ends it; names and meanings are vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec

from preheat.utils.exact_json import dumps, travels

INT32_MAX = 2**31 - 1

MAX_PATTERN = 2048
"""Most tokens of a repeated pattern; the default limit of vLLM."""


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A constraint on the text of a request; names and meanings are vLLM's. Exactly one of the first six is given.

    - ``json``: a JSON schema, as an object or as its text.
    - ``regex``: a regular expression for the whole text.
    - ``choice``: texts; the whole text is one of them.
    - ``grammar``: a context-free grammar, in Lark's notation or in EBNF (GBNF).
    - ``json_object``: any JSON object.
    - ``structural_tag``: free text, where JSON follows certain beginnings; see docs/structured-outputs.md.
    - ``disable_any_whitespace``: JSON has no white space; by default it is bounded.
    - ``whitespace_pattern``: a regular expression for the white space between any two parts of JSON.
    - ``disable_additional_properties``: objects have only the properties in the schema, unless it says otherwise
      itself.
    - ``after_token_id``: the text is free up to this token, such as the end of reasoning; the constraint applies after
      it.
    - ``start_token_id``: the text is free only if it begins with this token, white space aside; otherwise the
      constraint applies from the first token on.
    - ``call_token_ids``: each of these tokens ends free text too, and is itself the first constrained token.
    - ``after_header``: a token and a word; ``after_token_id`` counts only if the word comes first after the last such
      token.

    A schema with numbers that msgpack would change is stored as text. Raises ValueError for a meaningless combination.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    after_token_id: int | None = None
    start_token_id: int | None = None
    call_token_ids: tuple[int, ...] = ()
    after_header: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            said = " and ".join(given) or "none"
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(_CONSTRAINTS)}; it has {said}")
        if self.choice is not None and not all(self.choice):
            raise ValueError("structured_outputs.choice must not hold an empty text")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError("disable_any_whitespace leaves no use for whitespace_pattern: give one of them")
        about_json = self.disable_any_whitespace or self.whitespace_pattern is not None
        if about_json and given[0] not in ("json", "json_object", "structural_tag"):
            raise ValueError(
                f"options of white space are about JSON: they have no meaning for structured_outputs.{given[0]}"
            )
        if self.disable_additional_properties and given[0] not in ("json", "structural_tag"):
            raise ValueError(f"disable_additional_properties has no meaning for structured_outputs.{given[0]}")
        if self.after_token_id is None and (
            self.start_token_id is not None or self.call_token_ids or self.after_header is not None
        ):
            raise ValueError(
                "start_token_id, call_token_ids and after_header say how free text ends: give after_token_id too"
            )
        for name in ("json", "structural_tag"):
            if not travels(value := getattr(self, name)):
                msgspec.structs.force_setattr(self, name, dumps(value))

    @property
    def kind(self) -> str:
        """The name of the given constraint, one of six."""
        return next(name for name in _CONSTRAINTS if getattr(self, name) not in (None, False))


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class RepetitionDetectionParams(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Repetition that ends a text; names and meanings are vLLM's.

    The text ends once its last tokens are ``min_count`` times the same pattern. The pattern has ``min_pattern_size``
    (0: 1) to ``max_pattern_size`` tokens; with ``max_pattern_size`` 0 the text never ends so. Raises ValueError for
    meaningless sizes.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN:
            raise ValueError(
                f"repetition_detection needs 0 <= min_pattern_size <= max_pattern_size <= {MAX_PATTERN}, got "
                f"{self.min_pattern_size} and {self.max_pattern_size}"
            )
        if self.max_pattern_size and not 2 <= self.min_count <= INT32_MAX:
            raise ValueError(f"repetition_detection.min_count must be at least 2, got {self.min_count}")
