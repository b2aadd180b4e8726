"""The bodies of Ollama's API: its shapes, as far as supported.

See :mod:`preheat.server.openai.schema`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from preheat.server.openai.schema import ForModel, Spelled, only, rejected

Images = list[str]
"""Images in base64."""

SAMPLING_OPTIONS = {
    "num_predict": "max_tokens", "seed": "seed", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p",
    "min_p": "min_p", "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "stop": "stop",
}  # fmt: skip
"""The options that are sampling fields, and the names of the fields."""


class OllamaFunction(Struct, forbid_unknown_fields=True):
    """The function of a call. Answers add ``index``."""

    name: str
    arguments: dict[str, Any]
    index: int | None = None


class OllamaToolCall(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A call that the model made."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(Struct, forbid_unknown_fields=True):
    """A message. ``tool_name`` names the tool of a result."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(ForModel, kw_only=True):
    """Fields common to all bodies.

    ``options`` has the sampling fields, under Ollama's names. ``keep_alive`` is ignored, since models stay loaded.
    """

    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OllamaGenerating(OllamaRequest, kw_only=True):
    """Fields common to requests for a text.

    The answer is streamed unless ``stream`` is false. ``format`` is "json", or a JSON schema.
    """

    spelled: ClassVar[Spelled] = {
        **{field: (f"options.{name}",) for name, field in SAMPLING_OPTIONS.items()},
        "structured_outputs": ("format",),
        "chat_template_kwargs": ("think",),
    }

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    truncate: Annotated[Any, only(False)] = None
    shift: Annotated[Any, only(False)] = None
    logprobs: Annotated[Any, only(False)] = None
    top_logprobs: Annotated[Any, only(0)] = None


class OllamaChatRequest(OllamaGenerating, kw_only=True):
    """POST /api/chat."""

    spelled: ClassVar[Spelled] = {
        **OllamaGenerating.spelled, "prompt": ("messages",), "structured_outputs": ("format", "tools")
    }  # fmt: skip

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


@rejected("width height steps")
class OllamaGenerateRequest(OllamaGenerating, kw_only=True):
    """POST /api/generate. With ``raw`` the prompt is used without the chat template."""

    spelled: ClassVar[Spelled] = {**OllamaGenerating.spelled, "messages": ("images", "prompt")}

    prompt: str | None = None
    template: Annotated[Any, only("")] = None
    system: str | None = None
    images: Images | None = None
    raw: bool | None = None
    suffix: Annotated[Any, only("")] = None
    context: Annotated[Any, only([])] = None


class OllamaEmbedRequest(OllamaRequest, kw_only=True):
    """POST /api/embed."""

    input: str | list[str]
    dimensions: int | None = None
    truncate: bool | None = None


class OllamaShowRequest(ForModel, kw_only=True):
    """POST /api/show. ``name`` is an older name of ``model``."""

    name: str | None = None
    verbose: bool | None = None


class OllamaDone(Struct, omit_defaults=True, kw_only=True):
    """The last fields of an answer, times in nanoseconds."""

    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaAnswerMessage(Struct):
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"


class OllamaChatAnswer(OllamaDone, kw_only=True):
    """A whole answer, or a line of one."""

    model: str
    created_at: str
    message: OllamaAnswerMessage
    done: bool


class OllamaGenerateAnswer(OllamaDone, kw_only=True):
    """A whole answer, or a line of one."""

    model: str
    created_at: str
    response: str
    done: bool
    thinking: str | UnsetType = UNSET


class OllamaEmbedAnswer(Struct, kw_only=True):
    model: str
    embeddings: list[Any]
    total_duration: int
    prompt_eval_count: int
    load_duration: int = 0


class OllamaDetails(Struct):
    """Details of a model; unknown ones are empty."""

    format: str = "safetensors"
    family: str = ""
    families: list[str] = []
    parent_model: str = ""
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Struct, kw_only=True):
    """A served name. ``digest`` tells models apart; ``size`` is not known to the server."""

    name: str
    model: str
    modified_at: str
    digest: str
    details: OllamaDetails
    size: int = 0
    context_length: int | UnsetType = UNSET


class OllamaModels(Struct):
    models: list[OllamaModel]


class OllamaShown(Struct, kw_only=True):
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    modelfile: str = ""
    parameters: str = ""


class OllamaVersion(Struct):
    version: str
