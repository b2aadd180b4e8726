"""Options of the model: its files, chat template, parsers and kind of answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from preheat.options.options import option

BUNDLED = "bundled"
"""The name of the model that comes with preheat."""

_model = partial(option, group="Model")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Options of the group Model."""

    model: str = _model(
        BUNDLED,
        "A directory, a GGUF file, a Hugging Face model id, or `bundled` for the model that comes with preheat.",
        several="models",
    )
    tokenizer: str | None = _model(None, "Directory, id or GGUF file of the tokenizer, if it is not the model's.")
    skip_tokenizer_init: bool = _model(
        False, "Load no tokenizer: prompts are token ids, and answers are token ids without text."
    )
    revision: str | None = _model(None, "Branch, tag or commit of a Hub model.")
    hf_token: str | None = _model(None, "Token for private models of the Hub, instead of `HF_TOKEN`.", secret=True)
    use_tqdm_on_load: bool = _model(True, "Show the progress of a start on a terminal.")
    language_model_only: bool = _model(
        False, "Do not load the image encoder, and refuse images; no effect on a model without one."
    )
    download_dir: str | None = _model(
        None,
        "Folder for models of the Hub.",
        default_text="the Hugging Face library's, see `HF_HOME`",
        path="new folder",
    )
    hf_overrides: dict[str, Any] | None = _model(  # noqa: RUF009 - None is not mutable
        None, "A JSON object of fields that replace fields of the model's `config.json`."
    )
    generation_config: str = _model(
        "auto",
        "Source of sampling defaults: `auto` takes the model's, `vllm` takes none, and a folder takes its "
        "`generation_config.json`.",
        path="folder",
        no_paths=("auto", "vllm"),
    )
    override_generation_config: dict[str, Any] | None = _model(  # noqa: RUF009 - None is not mutable
        None, "A JSON object of sampling defaults that override `generation_config`."
    )
    load_format: str = _model(
        "auto", "Source of the weights; `dummy` draws random ones.", choices=("auto", "safetensors", "dummy")
    )
    dtype: str = _model(
        "auto",
        "Type of weights and activations; `auto` takes the checkpoint's. float16 runs as bfloat16, but in mode llvm.",
        choices=("auto", "bfloat16", "float32", "float16", "half", "float"),
    )
    max_model_len: int | None = _model(
        None,
        "Maximum tokens of prompt and output together; `auto` or -1 is the default.",
        low=1,
        default_text="the model's length",
        unset=("auto", "-1"),
    )
    enable_prompt_embeds: bool = _model(
        False, "Accept embeddings instead of a prompt's tokens, as `prompt_embeds`: see docs/prompt-embeds.md."
    )
    chat_template: str | None = _model(
        None, "A Jinja file, or the template itself, instead of the model's chat template."
    )
    chat_template_content_format: str = _model(
        "auto",
        "Form of a message in the chat template: one text (`string`) or a list of parts (`openai`). `auto` chooses "
        "the list if the model sees images and its template reads lists.",
        choices=("auto", "string", "openai"),
    )
    exclude_tools_when_tool_choice_none: bool = _model(
        False, "Give the chat template no tools if `tool_choice` is none."
    )
    trust_request_chat_template: bool = _model(
        False, "Let chat requests bring a template of their own (`chat_template`); it runs in a sandbox."
    )
    default_chat_template_kwargs: dict[str, Any] | None = _model(  # noqa: RUF009 - None is not mutable
        None,
        "Variables of the chat template, as a JSON object, for each conversation that does not set them itself "
        "(`chat_template_kwargs`, `reasoning_effort`).",
    )
    enable_auto_tool_choice: bool = _model(
        False, "Let the model decide whether to call a tool; needs `tool_call_parser`."
    )
    tool_call_parser: str | None = _model(
        None,
        "Parser for the model's tool calls: see docs/tools.md.",
        choices=(
            "deepseek_v3", "deepseek_v31", "ernie45", "gemma4", "glm45", "glm47", "granite", "granite-20b-fc",
            "granite4", "hermes", "hunyuan_a13b", "internlm", "jamba", "kimi_k2", "llama3_json", "llama4_json",
            "llama4_pythonic", "minimax_m2", "mistral", "olmo3", "openai", "phi4_mini_json", "pythonic",
            "qwen3_coder", "qwen3_xml", "seed_oss", "step3", "xlam",
        ),
    )  # fmt: skip
    reasoning_parser: str | None = _model(
        None,
        "Parser for the model's reasoning before its answer: see docs/tools.md.",
        choices=(
            "deepseek_r1", "deepseek_v3", "ernie45", "gemma4", "glm45", "glm47", "granite", "hunyuan_a13b", "kimi_k2",
            "minimax_m2", "mistral", "olmo3", "openai", "openai_gptoss", "qwen3", "seed_oss", "step3",
        ),
    )  # fmt: skip
    structured_outputs_config: dict[str, Any] | None = _model(  # noqa: RUF009 - None is not mutable
        None,
        "A JSON object: `backend` of grammars (auto, guidance, xgrammar, none), `disable_any_whitespace` and "
        "`disable_additional_properties`, see docs/structured-outputs.md.",
    )
    grammar_compile_timeout_s: float = _model(
        5.0, "Time limit for compiling a request's grammar, in seconds.", low=0.001
    )
    preload_grammars: str | None = _model(
        None,
        "File of grammars to compile before ready; each line is the `structured_outputs` of a request.",
        path="file",
    )
    runner: str = _model(
        "auto",
        "Generate text (`generate`) or make embeddings (`pooling`): see docs/embeddings.md. `auto` pools if the "
        "checkpoint has a `modules.json` of sentence-transformers, or an architecture without an output head.",
        choices=("auto", "generate", "pooling", "draft"),
        later={"draft": "name a draft model in speculative_config: it runs beside its target model"},
    )
    convert: str = _model(
        "auto",
        "`embed` makes embeddings, like `runner` pooling; with `none` only an architecture without an output head "
        "makes them. `classify` asks for an architecture with a head for classes.",
        choices=("auto", "none", "embed", "classify", "reward"),
        later={"reward": "no reward models are run"},
    )
    task: str | None = _model(
        None, "An older name of `runner` and `convert`.", choices=("auto", "generate", "embed", "classify", "score")
    )
    pooler_config: dict[str, Any] | None = _model(  # noqa: RUF009 - None is not mutable
        None,
        "A JSON object that replaces the checkpoint's pooling: `pooling_type` (LAST, MEAN, CLS), `normalize`. "
        "`enable_chunked_processing` with `max_embed_len` takes longer texts: see docs/embeddings.md.",
    )
    override_pooler_config: dict[str, Any] | None = _model(  # noqa: RUF009 - None is not mutable
        None, "An older name of `pooler_config`."
    )
    max_logprobs: int = _model(20, "Maximum `logprobs` and `prompt_logprobs` of a request.", low=0)
