"""The command generate, with the flags of sampling."""

from __future__ import annotations

import argparse
import json
import sys
import types
import typing
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from preheat.cli.common import ENGINE_OPTIONS, flag_of, load
from preheat.cli.prompts import given_prompts
from preheat.core import SAMPLING_FIELDS, SamplingParams
from preheat.errors import SettingsError
from preheat.frontend.params_checker import check_params
from preheat.options.options import add_flags
from preheat.utils.log import set_up_logging
from preheat.verify.given import check_ids, check_texts

if TYPE_CHECKING:
    from preheat.frontend.outputs import RequestOutput

# --seed is the sampling seed here; the engine's own seed can be set by PREHEAT_SEED or in a config file.
GENERATE_OPTIONS = [opt for opt in ENGINE_OPTIONS if opt.name != "seed"]


def add_generate(commands: Any) -> None:
    """Add the command generate."""
    generate = commands.add_parser(
        "generate", help="complete prompts and print the results", allow_abbrev=False,
        usage="preheat generate [--model MODEL] [--prompt TEXT] [--flag VALUE ...]",
    )  # fmt: skip
    generate.set_defaults(run=run_generate)
    generate.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    generate.add_argument(
        "--prompts",
        metavar="FILE",
        help='read prompts from a file, one per line: text, or JSON {"prompt": ...}. Standard input is -, and the '
        "default unless it is a terminal",
    )
    generate.add_argument("--chat", action="store_true", help="send each prompt as a user message")
    generate.add_argument("--json", action="store_true", help="print each result as a JSON object, one per line")
    _add_sampling_flags(generate)
    add_flags(generate, GENERATE_OPTIONS)


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Sampling")
    hints = typing.get_type_hints(SamplingParams)
    for field in msgspec.structs.fields(SamplingParams):
        if field.name not in SAMPLING_FIELDS:
            continue
        shown = "" if field.default in (None, msgspec.NODEFAULT) else f" [{field.default}]"
        more: dict[str, Any] = {"default": argparse.SUPPRESS, "help": SAMPLING_FIELDS[field.name].help + shown}
        kinds = typing.get_args(hints[field.name]) if isinstance(hints[field.name], types.UnionType) else ()
        kind = kinds[0] if kinds else hints[field.name]
        if kind is bool:
            more["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is list:
            (item,) = typing.get_args(kind)
            more |= {"type": item, "action": "extend", "nargs": "+", "metavar": item.__name__.upper()}
        elif typing.get_origin(kind) is dict:
            more |= {"type": _bias, "metavar": "JSON"}
        elif issubclass(kind, msgspec.Struct):
            more |= {"type": partial(_struct, kind), "metavar": "JSON"}
        else:
            more |= {"type": kind, "metavar": kind.__name__.upper()}
        group.add_argument(flag_of(field.name), **more)


def _bias(text: str) -> dict[int, float]:
    """Parse ``{"42": -5}``; argparse reports a ValueError."""
    return {int(token): float(bias) for token, bias in dict(json.loads(text)).items()}


_bias.__name__ = "JSON object of token ids and numbers"  # shown in argparse's errors


def _struct(kind: type[msgspec.Struct], text: str) -> msgspec.Struct:
    """Parse ``{"regex": "yes|no"}``."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_generate(values: dict[str, Any]) -> int:
    """Complete prompts and print the results; return the exit status."""
    as_json, chat = values.pop("json"), values.pop("chat")
    prompts = list(given_prompts(values.pop("prompt"), values.pop("prompts")))
    sampling = {"max_tokens": SamplingParams().max_tokens}
    sampling |= {name: values.pop(name) for name in SAMPLING_FIELDS if name in values}
    check_params(sampling)  # before anything is loaded
    settings = load({**values, "model_argument": None})
    if chat and not all(isinstance(each, str) for each in prompts):
        raise SettingsError("--chat sends texts, and a prompt has token ids: write its text, or leave --chat out")
    check_texts(settings, prompts)
    check_ids(settings, prompts, 1)
    set_up_logging(settings)
    values |= {"model": values["model"][0]} if "model" in values else {}
    from preheat.llm import LLM

    llm = LLM(**values)
    params = llm.frontend.input.params(**sampling)  # fills in the checkpoint's recommendations
    bar = sys.stderr.isatty()
    if chat:
        results = llm.chat([[{"role": "user", "content": p}] for p in prompts], params, use_tqdm=bar)
    else:
        results = llm.generate(prompts, params, use_tqdm=bar)
    _print_json(results) if as_json else _print_text(results)
    return 0


def _print_text(results: Iterable[RequestOutput]) -> None:
    texts = [choice.text for result in results for choice in result.outputs]
    for number, text in enumerate(texts, 1):
        if len(texts) > 1:
            print(f"--- {number} of {len(texts)} ---")
        print(text)


def _print_json(results: Iterable[RequestOutput]) -> None:
    for result in results:
        for choice in result.outputs:
            record: dict[str, Any] = {
                "prompt": result.prompt,
                "choice": choice.index,
                "text": choice.text,
                "token_ids": list(choice.token_ids),
                "finish_reason": choice.finish_reason,
            }
            if choice.receipt is not None:
                record["receipt"] = msgspec.to_builtins(choice.receipt, str_keys=True)
            if choice.logprobs is not None:
                record["logprobs"] = msgspec.to_builtins(choice.logprobs)
            if result.prompt_logprobs is not None:
                record["prompt_logprobs"] = msgspec.to_builtins(result.prompt_logprobs)
            print(msgspec.json.encode(record).decode())
