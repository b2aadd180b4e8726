"""The command line: ``preheat serve``, ``generate``, ``plan``, ``warm``, ``verify``, ``bench``, ``tune``, ``buckets``.

Help and errors never wait for torch; neither do plans and bucket sizes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from preheat import __version__
from preheat.core import SAMPLING_FIELDS, Ready, SamplingParams
from preheat.errors import InvalidRequest, PreheatError, SettingsError
from preheat.frontend.input_processor import check_params
from preheat.metrics import set_up_logging
from preheat.plan import commands as plan_commands
from preheat.plan.policy import policy_named
from preheat.settings import OPTIONS, Settings
from preheat.transport import InlineTransport
from preheat.utils.options import add_flags, did_you_mean
from preheat.verify import command as verify_command
from preheat.verify.command import Asked

if TYPE_CHECKING:
    from preheat.frontend.outputs import RequestOutput

SERVED_MIXED_TOKENS = 512
"""Tokens of a server's mixed steps: about as many as a large GPU computes in the time of a few decoding steps."""

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130

ENGINE_OPTIONS = [opt for opt in OPTIONS.values() if opt.group != "Server"]

# The sampling seed takes the flag --seed here; the engine's own seed is still PREHEAT_SEED or a config file's.
GENERATE_OPTIONS = [opt for opt in ENGINE_OPTIONS if opt.name != "seed"]

TUNE_OPTIONS = "model revision dtype max_num_seqs max_num_batched_tokens cache_dir log_level".split()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for a failure, 2 for a mistake in what was asked."""
    words = [_dashed(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    try:
        if words[:1] == ["bench"]:
            return _bench(words[1:])
        values = _values(words)
        run = values.pop("run")
        return int(run(values))
    except PreheatError as error:
        print(f"preheat: error: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, SettingsError | InvalidRequest) else FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE


def _values(words: Sequence[str]) -> dict[str, Any]:
    """The command's function (``run``) and its arguments."""
    parser = _parser()
    args, unknown = parser.parse_known_args(words)
    if unknown:
        flags = [opt.flag for opt in OPTIONS.values()] + [_flag(name) for name in SAMPLING_FIELDS]
        parser.error(f"unknown argument {unknown[0]}{did_you_mean(unknown[0].split('=')[0], flags)}")
    return vars(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="preheat", description="An LLM inference engine, hot from the first request.")
    parser.add_argument("--version", action="version", version=f"preheat {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model with the OpenAI-compatible API", allow_abbrev=False)
    serve.set_defaults(run=_serve)
    serve.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    add_flags(serve, OPTIONS.values())

    generate = commands.add_parser("generate", help="continue prompts and print the result", allow_abbrev=False)
    generate.set_defaults(run=_generate)
    generate.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    generate.add_argument(
        "--prompts",
        metavar="FILE",
        help='prompts from a file, one a line, as text or as JSON {"prompt": ...}; - is standard input, which is also '
        "read when it is not a terminal and no prompt is given",
    )
    generate.add_argument("--chat", action="store_true", help="send each prompt as a user's message")
    generate.add_argument("--json", action="store_true", help="print one JSON object for each result, one a line")
    _add_sampling_flags(generate)
    add_flags(generate, GENERATE_OPTIONS)
    _add_plan_commands(commands)
    return parser


def _add_plan_commands(commands: Any) -> None:
    """What may run, what became of it, and the bucket sizes that it comes from."""
    plan = commands.add_parser("plan", help="print what may run; reads the model's config alone", allow_abbrev=False)
    plan.set_defaults(run=_plan)
    plan.add_argument("--json", action="store_true", help="print one JSON object: items, dropped, padding, estimates")

    warm = commands.add_parser("warm", help="boot, warm up, print what became of the plan, exit", allow_abbrev=False)
    warm.set_defaults(run=_warm)
    warm.add_argument("--json", action="store_true", help="print the record as JSON")
    warm.add_argument("--html", metavar="FILE", help="also write the record as a page, one file with all in it")
    verify = commands.add_parser("verify", help="prove that bits do not change, or find where", allow_abbrev=False)
    verify.set_defaults(run=_verify)
    verify.add_argument("--prompts", metavar="FILE", help="prompts from a file, as of generate, in place of made ones")
    verify.add_argument("--reduced", action="store_true", help="few and short prompts: seconds in place of minutes")
    verify.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    verify.add_argument("--digest", metavar="FILE", help="boot, and compare the digest with that of another boot")
    verify.add_argument("--against", metavar="URL", help="test an OpenAI-compatible server over HTTP instead")
    for parser in (plan, warm, verify):
        parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
        add_flags(parser, ENGINE_OPTIONS)

    tune = commands.add_parser("tune", help="measure what is fastest on this GPU, for later boots", allow_abbrev=False)
    tune.set_defaults(run=_tune)
    tune.add_argument("--output", metavar="FILE", help="write the table there, in place of where boots look for it")
    tune.add_argument("--seconds", type=float, help="end after so many seconds with what is measured by then")
    tune.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    add_flags(tune, [OPTIONS[name] for name in TUNE_OPTIONS])

    commands.add_parser("bench", help="measure this engine, beside vLLM's figures")  # its arguments: see _bench

    buckets = commands.add_parser("buckets", help="print the bucket sizes of one dimension", allow_abbrev=False)
    buckets.set_defaults(run=_buckets)
    plan_commands.add_bucket_flags(buckets)


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Sampling")
    hints = typing.get_type_hints(SamplingParams)
    for field in msgspec.structs.fields(SamplingParams):
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
        else:
            more |= {"type": kind, "metavar": kind.__name__.upper()}
        group.add_argument(_flag(field.name), **more)


def _bias(text: str) -> dict[int, float]:
    """``{"42": -5}``; argparse reports a ValueError."""
    return {int(token): float(bias) for token, bias in dict(json.loads(text)).items()}


_bias.__name__ = "JSON object of token ids and numbers"  # what argparse calls it


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _dashed(arg: str) -> str:
    """A flag's name with dashes, which may also be written with underscores."""
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if arg.startswith("--") else arg


def _load(values: dict[str, Any]) -> Settings:
    """The settings of a command that takes the model as its argument as well."""
    model = values.pop("model_argument")
    if model is not None:
        values.setdefault("model", model)
    return Settings.load(values)


def served(settings: Settings) -> Settings:
    """``settings`` for a server: by default, reading a long prompt must not hold up the sequences that decode."""
    mixes = policy_named(settings.bucketing_policy).mixed_steps and settings.enable_chunked_prefill
    if settings.max_num_mixed_tokens is not None or not mixes:
        return settings
    return replace(settings, max_num_mixed_tokens=SERVED_MIXED_TOKENS)


def _serve(values: dict[str, Any]) -> int:
    settings = served(_load(values))
    from preheat.server.app import run_server

    def on_ready(opened: Settings) -> None:
        print(f"Ready. Try:\n\n{curl(opened)}\n", file=sys.stderr, flush=True)

    return run_server(settings, on_ready=on_ready)


def _plan(values: dict[str, Any]) -> int:
    as_json = values.pop("json")
    settings = _load(values)
    from preheat.startup import planned

    print(planned(settings, as_json=as_json))
    return 0


def _buckets(values: dict[str, Any]) -> int:
    print(plan_commands.buckets(argparse.Namespace(**values)))
    return 0


def _warm(values: dict[str, Any]) -> int:
    as_json, html = values.pop("json"), values.pop("html")
    settings = _load(values)
    if html is not None and not Path(html).absolute().parent.is_dir():
        raise SettingsError(f"--html {html}: there is no such folder")
    set_up_logging(settings.log_level)
    from preheat.engine.progress import ProgressBar
    from preheat.startup import boot_engine
    from preheat.warmup.page import render
    from preheat.warmup.record import Record
    from preheat.warmup.report import describe

    transport = InlineTransport(ProgressBar().show)
    boot_engine(settings, transport)
    json_text = next(message.record for message in transport.receive() if isinstance(message, Ready))
    record = Record.from_json(json_text)
    print(json_text.decode() if as_json else describe(record))
    if html is not None:
        try:
            Path(html).write_text(render(record), encoding="utf-8")
        except OSError as error:
            raise PreheatError(f"cannot write {html}: {error.strerror}") from None
    return FAILURE if record.states["failed"] else 0


def _verify(values: dict[str, Any]) -> int:
    asked = Asked(**{name: values.pop(name) for name in ("prompts", "reduced", "json", "digest", "against")})
    settings = _load(values)
    set_up_logging(settings.log_level)
    given = list(_prompts([], asked.prompts)) if asked.prompts else None
    say = (lambda _: None) if asked.json else partial(print, flush=True)
    if asked.against:
        verdict = verify_command.server(settings, asked, given, say)
    else:
        from preheat.startup import boot_engine

        if asked.digest:
            return verify_command.digest(boot_engine, settings, asked.digest, print)
        verdict = verify_command.engine(boot_engine, settings, asked, given, say)
    if asked.json:
        print(msgspec.json.encode(verdict).decode())
    return 0 if verdict.ok else FAILURE


def _bench(words: Sequence[str]) -> int:
    """Run the ``benchmarks`` package, which lies beside ``src`` in a checkout and is not installed."""
    root = Path(__file__).parents[2]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise PreheatError(
            "the benchmarks are not installed with preheat: clone its repository and run `scripts/bench` there"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return int(importlib.import_module("benchmarks.__main__").main(words))


def _tune(values: dict[str, Any]) -> int:
    output, seconds = values.pop("output"), values.pop("seconds")
    settings = _load(values)
    set_up_logging(settings.log_level)
    from preheat.warmup.tune import tune_model

    print(tune_model(settings, output, seconds))
    return 0


def curl(settings: Settings) -> str:
    """A command that asks the server of these settings for a completion, to paste into a shell."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if settings.ssl_certfile else "http"
    key = ' -H "Authorization: Bearer $PREHEAT_API_KEY"' if settings.api_key else ""
    body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 32, "temperature": 0})
    return (
        f"curl {scheme}://{host}:{settings.port}/v1/completions{key} "
        f"-H 'Content-Type: application/json' \\\n    -d '{body}'"
    )


def _generate(values: dict[str, Any]) -> int:
    as_json, chat = values.pop("json"), values.pop("chat")
    prompts = list(_prompts(values.pop("prompt"), values.pop("prompts")))
    sampling = {"max_tokens": SamplingParams().max_tokens}
    sampling |= {name: values.pop(name) for name in SAMPLING_FIELDS if name in values}
    check_params(sampling)  # before anything is loaded
    set_up_logging(Settings.load(values).log_level)
    from preheat.llm import LLM

    llm = LLM(**values)
    params = llm.frontend.input.params(**sampling)  # what is not given, the checkpoint may recommend
    bar = sys.stderr.isatty()
    if chat:
        results = llm.chat([[{"role": "user", "content": p}] for p in prompts], params, use_tqdm=bar)
    else:
        results = llm.generate(prompts, params, use_tqdm=bar)
    _print_json(results) if as_json else _print_text(results)
    return 0


def _prompts(given: list[str], path: str | None) -> Iterator[str | list[int]]:
    """The prompts of the flags, then of the file; of standard input where there are none and it is not a terminal."""
    yield from given
    if path is None and not given:
        if sys.stdin.isatty():
            raise SettingsError("no prompt: give --prompt TEXT or --prompts FILE, or pipe prompts in, one a line")
        path = "-"
    if path == "-":
        yield from _read_prompts(sys.stdin, "standard input")
    elif path is not None:
        try:
            with open(path, encoding="utf-8") as file:
                yield from _read_prompts(file, path)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"cannot read the prompts in {path}: {error}") from None


def _read_prompts(lines: TextIO, name: str) -> Iterator[str | list[int]]:
    """One prompt a line, empty lines left out; a line that is a JSON object gives its ``prompt``, text or token ids."""
    found = False
    for number, raw in enumerate(lines, 1):
        line = raw.rstrip("\r\n")
        if line:
            found = True
            yield _json_prompt(line, f"{name}, line {number}") if line.startswith("{") else line
    if not found:
        raise SettingsError(f"no prompt in {name}: write one a line")


def _json_prompt(line: str, where: str) -> str | list[int]:
    try:
        return msgspec.json.decode(line, type=_JsonPrompt).prompt
    except msgspec.ValidationError as error:
        raise SettingsError(f'{where}: expected {{"prompt": "text"}} or {{"prompt": [token ids]}}: {error}') from None
    except msgspec.DecodeError:  # a line of text that begins with a brace
        return line


class _JsonPrompt(msgspec.Struct):
    prompt: str | list[int]


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
            if choice.logprobs is not None:
                record["logprobs"] = msgspec.to_builtins(choice.logprobs)
            if result.prompt_logprobs is not None:
                record["prompt_logprobs"] = msgspec.to_builtins(result.prompt_logprobs)
            print(msgspec.json.encode(record).decode())
