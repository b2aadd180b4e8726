"""How the text of an answer is to be read: what of it is reasoning, content, or a call of a tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from preheat.core import StructuredOutputsParams
from preheat.errors import InvalidRequest
from preheat.frontend.reasoning import Begins, ReasoningFormat, ReasoningParser
from preheat.frontend.stream_parser import CallArguments, CallStart, Content, Part, Reasoning, StreamParser
from preheat.frontend.tokenizer import Tokenizer
from preheat.frontend.tools import TOOL_PARSERS, NamedParser, RequiredParser, Tool, ToolParser


class AnswerParser:
    """Reads one answer: :meth:`push` takes its text as it arrives, :meth:`finish` says that it has ended."""

    def __init__(self, reasoning: StreamParser | None, tools: StreamParser | None) -> None:
        self._reasoning, self._tools = reasoning, tools

    def push(self, text: str) -> list[Part]:
        """The parts that are certain, given ``text`` more."""
        if not text:
            return []
        return self._read(self._reasoning.push(text) if self._reasoning else [Content(text)])

    def finish(self) -> list[Part]:
        """The parts that were held back."""
        parts = self._read(self._reasoning.finish()) if self._reasoning else []
        return parts + (self._tools.finish() if self._tools else [])

    def _read(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._tools.push(part.text) if isinstance(part, Content) else [part]
        return found


@dataclass
class Block:
    """A stretch of an answer of one kind. The text of a call are its arguments, a JSON object as far as the model wrote
    it; a call also has the id and the name of its tool.
    """

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    id: str = ""
    name: str = ""


class ParsedAnswer:
    """An answer as blocks, in order."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def add(self, part: Part) -> Block:
        """Add the next part: the block that it begins or continues, which is the last one then."""
        match part:
            case CallStart(_, id, name):
                self.blocks.append(Block("call", "", id, name))
            case CallArguments(_, text):
                self.blocks[-1].text += text
            case Content(text) | Reasoning(text):
                if not self.continues(part):
                    self.blocks.append(Block("content" if isinstance(part, Content) else "reasoning"))
                self.blocks[-1].text += text
        return self.blocks[-1]

    def continues(self, part: Part) -> bool:
        """Whether ``part`` continues the last block."""
        last = self.blocks[-1].kind if self.blocks else None
        match part:
            case Content():
                return last == "content"
            case Reasoning():
                return last == "reasoning"
        return isinstance(part, CallArguments)

    def text(self, kind: str) -> str:
        """All text of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]


@dataclass(frozen=True)
class ToolChoice:
    """Which of ``tools`` an answer may call, or must: ``mode`` is "none", "auto", "required" or "named" (then there is
    one tool). ``parallel``: more than one call.
    """

    tools: tuple[Tool, ...] = ()
    mode: str = "none"
    parallel: bool = True

    @property
    def forced(self) -> StructuredOutputsParams | None:
        """What the text of a forced call must be; None if calls are not forced."""
        if self.mode == "named":
            return _arguments(_schema(self.tools[0]))
        if self.mode != "required":
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "parameters": _without_definitions(_schema(tool))},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for tool in self.tools
        ]
        most = {} if self.parallel else {"maxItems": 1}
        schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}} | _definitions(self.tools)
        return _arguments(schema)


def _arguments(schema: dict[str, Any]) -> StructuredOutputsParams:
    """JSON without white space. Arguments that a tool does not name would be of no use to it: clients leave out
    ``additionalProperties``, and expect none.
    """
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=True)


def _schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are always an object."""
    return {"type": "object", **({"properties": {}} if not tool.parameters else {}), **tool.parameters}


_ANY = {"type": "object"}
_DEFINITIONS = {"$defs", "definitions"}


def _without_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in _DEFINITIONS}


def _definitions(tools: Sequence[Tool]) -> dict[str, Any]:
    """What the schemas of ``tools`` refer to by ``#/$defs/NAME``: the whole schema has it at its top. Raises
    InvalidRequest if two tools mean different things by one name.
    """
    found: dict[str, Any] = {}
    for tool in tools:
        for key in _DEFINITIONS & tool.parameters.keys():
            for name, schema in tool.parameters[key].items():
                if found.setdefault(key, {}).setdefault(name, schema) != schema:
                    raise InvalidRequest(
                        f"several tools define {name} in {key}, each in its own way: give them names of their own",
                        param="tools",
                    )
    return found


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to one request are read. ``begins``: whether they begin within the reasoning. ``bindable``: a
    grammar can see the markers of the model's own calls, because they are text.
    """

    choice: ToolChoice = ToolChoice()
    auto: type[ToolParser] | None = None
    reasoning: ReasoningFormat | None = None
    begins: Begins = Begins.OUTSIDE
    bindable: bool = False

    @property
    def plain(self) -> bool:
        """All text is content."""
        return self.reasoning is None and self.choice.mode == "none"

    def constraint(self, asked: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """What the text must be, for calls that are forced, for tools whose schemas are strict, or because the client
        ``asked`` for it; always behind the reasoning.
        """
        found = self.choice.forced or asked or self._strict()
        if found is None or self.reasoning is None or self.begins is Begins.OUTSIDE:
            return found
        return msgspec.structs.replace(found, after_token_id=self.reasoning.end_id)

    def _strict(self) -> StructuredOutputsParams | None:
        """Free text, in which calls have arguments of their tools' schemas; None if nobody asked for that."""
        tools = self.choice.tools
        if self.auto is None or not self.bindable or not any(tool.strict for tool in tools):
            return None
        begin, end = self.auto.STRUCTURE
        structures = [
            {"begin": begin % json.dumps(tool.name), "schema": _schema(tool) if tool.strict else _ANY, "end": end}
            for tool in tools
        ]
        tag = {"type": "structural_tag", "structures": structures, "triggers": [self.auto.TRIGGER]}
        return StructuredOutputsParams(structural_tag=tag)

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        reasoning = ReasoningParser(self.reasoning.marks, self.begins) if self.reasoning else None
        kinds: dict[str, Callable[..., ToolParser] | None] = {
            "none": None, "auto": self.auto, "required": RequiredParser, "named": NamedParser
        }  # fmt: skip
        kind = kinds[self.choice.mode]
        return AnswerParser(reasoning, kind(self.choice.tools, self.choice.parallel) if kind else None)

    def reasoning_tokens(self, ids: Sequence[int]) -> int:
        """How many of the tokens ``ids`` of an answer are reasoning."""
        return self.reasoning.count(ids, self.begins) if self.reasoning else 0


class AnswerFormats:
    """How a model writes, as the options say. Raises ModelError if its tokenizer lacks what that needs."""

    def __init__(
        self, tokenizer: Tokenizer, tool_parser: str | None = None, reasoning_parser: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._auto = TOOL_PARSERS[tool_parser] if tool_parser else None
        self.reasoning = ReasoningFormat(reasoning_parser, tokenizer) if reasoning_parser else None

    def form(self, choice: ToolChoice, prompt: str) -> AnswerFormat:
        """How the answers to ``prompt`` are read. Raises InvalidRequest if the model's own calls are not understood."""
        if choice.mode == "auto" and self._auto is None:
            raise InvalidRequest(
                "tools with tool_choice auto need a server that was started with --enable-auto-tool-choice and "
                "--tool-call-parser; or set tool_choice to none, required or a function",
                param="tool_choice",
            )
        begins = self.reasoning.begins(prompt) if self.reasoning else Begins.OUTSIDE
        if choice.mode != "auto" or self._auto is None:
            return AnswerFormat(choice, None, self.reasoning, begins)
        bindable = bool(self._auto.TRIGGER) and not self._is_special(self._auto.TRIGGER)
        return AnswerFormat(choice, self._auto, self.reasoning, begins, bindable)

    def shows_special_tokens(self, form: AnswerFormat) -> bool:
        """Whether a marker that ``form`` looks for is a special token, so that these must be in the text."""
        marks: tuple[str, ...] = (form.reasoning.marks.start, form.reasoning.marks.end) if form.reasoning else ()
        marks += form.auto.SPECIAL if form.auto else ()
        return any(map(self._is_special, marks))

    def _is_special(self, mark: str) -> bool:
        return self._tokenizer.token_id(mark) in self._tokenizer.special_ids
