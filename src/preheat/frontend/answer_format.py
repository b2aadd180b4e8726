"""How the text of an answer is read: its reasoning, its content and its tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from preheat.core import StructuredOutputsParams
from preheat.errors import InvalidRequest
from preheat.frontend.marks import Mark, marks_of
from preheat.frontend.reasoning import ReasoningCount, ReasoningFormat, TextReasoningCount
from preheat.frontend.text_marks import Frame, TextMarks, TokenMarks
from preheat.frontend.tokenizer import Tokenizer
from preheat.frontend.tools import TOOL_PARSERS, NamedParser, RequiredParser, Tool, ToolParser, harmony
from preheat.utils.reasoning import Phase, Sign


@dataclass(frozen=True)
class ToolChoice:
    """The ``tools`` that an answer may or must call.

    ``mode`` is "none", "auto", "required" or "named"; with "named" there is one tool. ``parallel``: the answer may make
    more than one call.
    """

    tools: tuple[Tool, ...] = ()
    mode: str = "none"
    parallel: bool = True

    @property
    def forced(self) -> StructuredOutputsParams | None:
        """The constraint on the text of a forced call; None if calls are not forced."""
        try:
            if self.mode == "named":
                return _arguments(_schema(self.tools[0]))
            if self.mode != "required":
                return None
            calls = [_call(tool, _PLACE.format(place)) for place, tool in enumerate(self.tools)]
            most = {} if self.parallel else {"maxItems": 1}
            return _arguments({"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}})
        except RecursionError:
            raise InvalidRequest("tools: a schema is nested too deeply", param="tools") from None


def _arguments(schema: dict[str, Any]) -> StructuredOutputsParams:
    """Return the constraint for a JSON text without white space.

    Properties that ``schema`` does not name are forbidden: a tool cannot use arguments that it does not name. Clients
    leave out ``additionalProperties`` and expect none.
    """
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=True)


def _call(tool: Tool, place: str) -> dict[str, Any]:
    """Return the schema of a call of ``tool``, with the schema of its arguments at ``place``."""
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": _moved(_schema(tool), place)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, always that of an object."""
    return {**({"properties": {}} if not tool.parameters else {}), **tool.parameters, "type": "object"}


def _free(constraint: StructuredOutputsParams) -> bool:
    """Return whether a constrained text may begin with anything.

    No mask then pushes a model into its reasoning.
    """
    return constraint.kind == "structural_tag"


_ANY = {"type": "object"}
_PLACE = "#/items/anyOf/{}/properties/parameters"
"""The place of a tool's schema, by its number, in the schema of forced calls."""

_BY_NAME, _VALUES = (
    ("properties", "patternProperties", "$defs", "definitions"),
    ("const", "enum", "default", "examples"),
)
"""Keywords with schemas by name, and keywords with values in place of schemas."""


def _moved(schema: Any, place: str) -> Any:
    """Return ``schema`` for the ``place`` within another one: its references lead to its own parts there."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict[str, Any]()
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: _moved(each, place) for name, each in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            found[key] = place if value == "#/" else place + value[1:]
        else:
            found[key] = value if key in _VALUES else _moved(value, place)
    return found


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to one request are read.

    ``phase``: how the answers begin. ``constraint``: the grammar of their text behind the reasoning, for forced calls,
    for tools with strict schemas, or because the client asked for it. ``exact``: the client asked for the constraint,
    so content is passed on to the letter. ``marks``: the tokens that parsers look for. ``begun``: the header of a
    message that the prompt has begun.
    """

    choice: ToolChoice = ToolChoice()
    auto: type[ToolParser] | None = None
    reasoning: ReasoningFormat | None = None
    phase: Phase = Phase.NEVER
    constraint: StructuredOutputsParams | None = None
    exact: bool = False
    marks: tuple[Mark, ...] = ()
    begun: str = ""

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return self.reasoning is None and self.choice.mode == "none"

    @property
    def calls_in_reasoning(self) -> bool:
        """Whether a call within the reasoning ends it; False where other text must follow."""
        return self.auto is not None and not self.exact

    def tool_parser(self) -> ToolParser | None:
        """Return a parser for the calls in one answer."""
        kinds: dict[str, type[ToolParser] | None] = {
            "none": None, "auto": self.auto, "required": RequiredParser, "named": NamedParser
        }  # fmt: skip
        kind = kinds[self.choice.mode]
        if kind is None:
            return None
        stands = {mark.text: mark.char for mark in self.marks if mark.text in kind.MARKS}
        return kind(self.choice.tools, self.choice.parallel, stands)

    def reasoning_pieces(self) -> TokenMarks | TextMarks:
        """Return a search for the marks of the reasoning in the text of one answer."""
        if self.reasoning is None:
            return TokenMarks({})
        if self.reasoning.in_text:
            return self.reasoning.text_marks()
        signs = {self.reasoning.start_id: Sign.START, self.reasoning.end_id: Sign.END}
        return TokenMarks({mark.char: signs[mark.id] for mark in self.marks if mark.id in signs})

    def frames(self) -> tuple[Frame, Frame]:
        """Return the frames of the reasoning and of the content, the marks left out."""
        if self.reasoning is None:
            return Frame(""), Frame("")
        return Frame(self.reasoning.marks.label), Frame(*self.reasoning.marks.answer) if not self.exact else Frame("")

    def reasoning_count(self) -> ReasoningCount | None:
        """Return a counter of the tokens of one answer that are reasoning."""
        if self.reasoning is None:
            return None
        kind = TextReasoningCount if self.reasoning.in_text else ReasoningCount
        return kind(self.reasoning, self.phase, self.call_ids)

    @property
    def call_ids(self) -> frozenset[int]:
        """Token ids that may begin a call within the reasoning, and so end the reasoning."""
        if self.reasoning is None or self.auto is None or not self.calls_in_reasoning:
            return frozenset()
        ids = {self.reasoning.token_id(text) for text in self.auto.MARKS}
        return frozenset(id for id in ids if id is not None)


class AnswerFormats:
    """How a model writes, by the options. Raises ModelError if the tokenizer lacks a mark."""

    def __init__(
        self, tokenizer: Tokenizer, tool_parser: str | None = None, reasoning_parser: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._auto = TOOL_PARSERS[tool_parser] if tool_parser else None
        reasoning = reasoning_parser or (self._auto.REASONING if self._auto else "")
        self.reasoning = ReasoningFormat(reasoning, tokenizer) if reasoning else None

    def form(
        self,
        choice: ToolChoice,
        prompt: str,
        asked: StructuredOutputsParams | None = None,
        *,
        skip_special_tokens: bool = True,
        continued: str = "",
        template: str | None = None,
    ) -> AnswerFormat:
        """Return how the answers to ``prompt`` are read.

        ``asked``: the constraint that the client wants. ``continued``: the model's own last message, continued by the
        answer. ``template``: the chat template's text; None: unknown. Raises InvalidRequest if the server has no
        parser for the model's own calls.
        """
        if choice.mode == "auto" and self._auto is None:
            raise InvalidRequest(
                "tools with tool_choice auto need a server that was started with --enable-auto-tool-choice and "
                "--tool-call-parser; or set tool_choice to none, required or a function",
                param="tool_choice",
            )
        auto = self._auto if choice.mode == "auto" else None
        phase = self.reasoning.phase_behind(prompt, continued) if self.reasoning else Phase.NEVER
        forced = choice.forced
        strict = self._strict(choice.tools, auto) if forced is None and asked is None else None
        constraint = forced or asked or strict
        if constraint is not None and self.reasoning is not None:
            if self.reasoning.in_text:
                phase = self._without_reasoning(phase)
            elif phase is Phase.UNKNOWN and not _free(constraint) and template is not None:
                phase = phase if self.reasoning.named_in(template, prompt) else Phase.NEVER
        return AnswerFormat(
            choice, auto, self.reasoning, phase,
            constraint=self._behind_reasoning(constraint, phase, auto if strict else None),
            exact=constraint is not None and constraint is asked,
            marks=self._marks(auto, skip_special_tokens),
            begun=harmony.begun(prompt) if self.reasoning and self.reasoning.marks.channel else "",
        )  # fmt: skip

    def _behind_reasoning(
        self, constraint: StructuredOutputsParams | None, phase: Phase, auto: type[ToolParser] | None
    ) -> StructuredOutputsParams | None:
        """Return ``constraint`` for the text behind the reasoning.

        ``phase``: how the answer begins. A call of ``auto`` ends the reasoning too.
        """
        if constraint is None or self.reasoning is None or phase.is_content:
            return constraint
        call = self._tokenizer.token_id(auto.TRIGGER) if auto else None
        marks = self.reasoning.marks
        return msgspec.structs.replace(
            constraint,
            after_token_id=self.reasoning.end_id,
            after_header=(self.reasoning.start_id, marks.channel) if marks.channel else None,
            start_token_id=self.reasoning.start_id if phase is Phase.UNKNOWN else None,
            call_token_ids=() if call is None else (call,),
        )

    def _without_reasoning(self, phase: Phase) -> Phase:
        """Return how a constrained answer begins where the reasoning's marks are text.

        A grammar goes by tokens and cannot see the end of the reasoning. So the grammar begins at once, and the answer
        has no reasoning. Raises InvalidRequest if the prompt has begun the reasoning.
        """
        if phase is not Phase.WITHIN:
            return Phase.NEVER if phase is Phase.UNKNOWN else phase
        assert self.reasoning is not None
        raise InvalidRequest(
            f"--reasoning-parser {self.reasoning.name} marks reasoning by text instead of tokens, so structured "
            "outputs and forced calls need an answer without reasoning: turn the reasoning off in chat_template_kwargs",
            param="structured_outputs",
        )

    def _strict(self, tools: Sequence[Tool], auto: type[ToolParser] | None) -> StructuredOutputsParams | None:
        """Return a constraint: free text, but calls follow their tools' schemas.

        None if no tool is strict, or if the trigger of calls is a special token: a grammar cannot see special tokens.
        """
        if auto is None or not auto.TRIGGER or self._is_special(auto.TRIGGER) or not any(t.strict for t in tools):
            return None
        begin, end = auto.STRUCTURE
        structures = [
            {"begin": begin % json.dumps(tool.name), "schema": _schema(tool) if tool.strict else _ANY, "end": end}
            for tool in tools
        ]
        tag = {"type": "structural_tag", "structures": structures, "triggers": [auto.TRIGGER]}
        return StructuredOutputsParams(structural_tag=tag)

    def _marks(self, auto: type[ToolParser] | None, skip_special_tokens: bool) -> tuple[Mark, ...]:
        """Return the tokens that are told from text.

        The marks of the reasoning are among them, because grammars go by tokens. So are the marks of calls that the
        text would leave out.
        """
        marks = self.reasoning.marks if self.reasoning and not self.reasoning.in_text else None
        if marks and marks.channel:
            return marks_of(self._tokenizer, harmony.HarmonyParser.MARKS, skip_special_tokens)
        texts = [marks.start, marks.end] if marks else []
        if auto is not None and skip_special_tokens:
            texts += filter(self._is_special, auto.MARKS)
        return marks_of(self._tokenizer, texts, skip_special_tokens)

    def _is_special(self, mark: str) -> bool:
        return self._tokenizer.token_id(mark) in self._tokenizer.special_ids
