"""The command line.

Help, errors, plans and bucket sizes do not import torch, since that takes seconds.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import logging
import os
import shlex
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from preheat import __version__, client
from preheat.backends.registry import facts_of
from preheat.core import SAMPLING_FIELDS, Ready, SamplingParams
from preheat.errors import InvalidRequest, PreheatError, SettingsError
from preheat.frontend.input_processor import check_params
from preheat.plan import commands as plan_commands
from preheat.plan.modes import with_defaults
from preheat.plan.policy import policy_of
from preheat.settings import OPTIONS, Settings
from preheat.transport import InlineTransport
from preheat.utils.command_words import dashed, plain_words
from preheat.utils.completion import SHELLS, script
from preheat.utils.files import TABLE_BYTES, read_given, same_file, shown, why_unread
from preheat.utils.given import instead_of
from preheat.utils.log import one_line, printable, set_up_logging, without_controls
from preheat.utils.options import Option, add_flags
from preheat.utils.vllm_flags import add_flags_of_vllm
from preheat.verify import command as verify_command
from preheat.verify.command import Asked

if TYPE_CHECKING:
    from preheat.frontend.outputs import RequestOutput

SERVED_MIXED_TOKENS = 512
"""Tokens in a server's mixed steps.

A large GPU computes about so many in the time of a few decode steps.
"""

ASKED = (
    "prompts",
    "reduced",
    "json",
    "digest",
    "against",
    "golden",
    "write_golden",
    "fuzz",
    "random_models",
    "fuzz_seed",
)

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130

logger = logging.getLogger(__name__)

ENGINE_OPTIONS = [opt for opt in OPTIONS.values() if opt.group != "Server"]

# --seed is the sampling seed here; the engine's own seed can be set by PREHEAT_SEED or in a config file.
GENERATE_OPTIONS = [opt for opt in ENGINE_OPTIONS if opt.name != "seed"]

CALIBRATE_OPTIONS = [
    opt for opt in ENGINE_OPTIONS if opt.group in ("Model", "General") or opt.name in (
        "device", "seed", "num_threads", "cache_dir", "weights_load_device", "gpu_memory_utilization", "block_size",
        "quant_config",
    )
]  # fmt: skip

_NOT_OF_A_FRONT = (
    "models", "model_options", "server_dev_mode", "weight_transfer_config", "weights_root", "load_format", "dtype",
    "max_model_len", "enable_prompt_embeds", "structured_outputs_config", "grammar_compile_timeout_s",
    "preload_grammars", "use_tqdm_on_load", "receipts", "answer_cache_size", "answer_cache_dir",
    "answer_cache_dir_size", "answer_cache_check_every", "audit_every", "receipts_log",
)  # fmt: skip
FRONT_OPTIONS = [
    opt for opt in OPTIONS.values() if (opt.group in ("Server", "Model", "General") and opt.name not in _NOT_OF_A_FRONT)
    or opt.name in (
        "enable_lora", "lora_modules", "max_loras", "max_cpu_loras", "seed", "scheduling_policy", "data_parallel_size",
        "engine_heartbeat_timeout_s", "skip_warmup",
    )
]  # fmt: skip
"""Options of a front: of the server, of texts, and of the names that clients use."""

FRONT_RESTARTS = 1_000_000
"""Times in ten minutes that a front looks for a lost pod again."""

TUNE_OPTIONS = "model revision dtype max_num_seqs max_num_batched_tokens cache_dir log_level".split()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    It is 0, 1 for a failure, or 2 for a usage error.
    """
    words = [dashed(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    try:
        if words[:1] == ["bench"]:
            return _bench(words[1:])
        values = _values(words)
        run = values.pop("run")
        status = int(run(values))
        sys.stdout.flush()
        return status
    except PreheatError as error:
        logger.debug("The command failed", exc_info=True)
        _complain(" ".join(str(error).split()))
        return USAGE_ERROR if isinstance(error, SettingsError | InvalidRequest) else FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has exited
        _drop_output()
        return FAILURE
    except OSError as error:  # an error of a file, an address or standard output
        logger.debug("The command failed", exc_info=True)
        if error.filename is None:
            _drop_output()
        place = f"{shown(error.filename)}: " if error.filename else ""
        _complain(f"{place}{why_unread(error)}")
        return FAILURE


def _complain(message: str) -> None:
    print(f"preheat: error: {one_line(message)}", file=sys.stderr)


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _values(words: Sequence[str]) -> dict[str, Any]:
    """Return the command's function (``run``) and its arguments, by name. Raises SettingsError for unknown words."""
    parser, commands = _parser()
    command = commands.get(words[0] if words else "", parser)
    actions = command._actions
    if any(action.dest == "config" for action in actions):  # the command takes settings
        add_flags_of_vllm(command)
        words = plain_words(words, _switches(actions))
    args, unknown = parser.parse_known_args(words)
    if unknown:
        shown = [action for action in actions if action.help != argparse.SUPPRESS]
        raise SettingsError(_unknown(unknown[0], [flag for action in shown for flag in action.option_strings]))
    values = vars(args)
    if values.get("model_argument", "") is None and "model" not in values:
        _refuse_swallowed(words, values)
    return values


def _switches(actions: Iterable[argparse.Action]) -> set[str]:
    """Return the flags with a negation; they take no value."""
    return {action.option_strings[0] for action in actions if isinstance(action, argparse.BooleanOptionalAction)}


def _unknown(word: str, known: Iterable[str]) -> str:
    """Return advice about ``word``, as none of the ``known`` flags took it."""
    flag = word.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected word {word!r}: the model is named once, as --model {word}, and flags begin with --"
    return f"unknown argument {flag}{instead_of(flag, known) or '; --help lists all'}"


def _refuse_swallowed(words: Sequence[str], values: dict[str, Any]) -> None:
    """Raise SettingsError if a list took the last word, likely meant as the model."""
    for name, value in values.items():
        if isinstance(value, list) and value[-1] == words[-1] and not words[-2].startswith("--"):
            raise SettingsError(
                f"{_flag(name)} takes all words after it: write the model before it, or as --model MODEL", param=name
            )


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser, and the parsers of the commands by name."""
    parser = argparse.ArgumentParser(prog="preheat", description="An LLM inference engine, hot from the first request.")
    parser.add_argument("--version", action="version", version=f"preheat {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    _command(commands, "serve", _serve, OPTIONS.values(), "serve a model with an OpenAI-compatible API")
    _add_front(commands)
    _add_generate(commands)
    plan = _command(commands, "plan", _plan, ENGINE_OPTIONS, "print the warm-up plan; needs only the model's config")
    plan.add_argument("--json", action="store_true", help="print a JSON object: items, dropped, padding, estimates")
    plan.add_argument(
        "--from-traffic",
        metavar="FILE",
        help="the record of a server (/warmup?format=json): print a bucket file with the best sizes for its traffic",
    )
    warm = _command(commands, "warm", _warm, ENGINE_OPTIONS, "boot, warm up, print the record, exit")
    warm.add_argument("--json", action="store_true", help="print the record as JSON")
    warm.add_argument("--html", metavar="FILE", help="also write the record as a self-contained HTML page")
    _add_verify(commands)
    _add_replay(commands)
    _add_diff(commands)
    _add_run_batch(commands)
    _add_client(commands, "chat", _chat, "talk with a running server").add_argument(
        "--system-prompt", metavar="TEXT", help="the first message, with instructions for the model"
    )
    _add_client(commands, "complete", _complete, "have a running server complete prompts").add_argument(
        "--max-tokens", type=int, metavar="INT", help="tokens to generate at most"
    )
    calibrate = _command(commands, "calibrate", _calibrate, CALIBRATE_OPTIONS, "measure a model's ranges for FP8")
    calibrate.add_argument(
        "--output",
        metavar="DIR",
        help="folder for INC's files; by default the folder of dump_stats_path in QUANT_CONFIG",
    )
    calibrate.add_argument("--prompts", metavar="FILE", help="read prompts from a file, like generate")
    tune_options = [OPTIONS[name] for name in TUNE_OPTIONS]
    tune = _command(commands, "tune", _tune, tune_options, "measure the fastest kernels on this GPU for later boots")
    tune.add_argument("--output", metavar="FILE", help="write the tuning table to this file instead of the cache")
    tune.add_argument("--seconds", type=float, help="stop after this time, and keep the measurements so far")

    doctor = _command(commands, "doctor", _doctor, OPTIONS.values(), "check whether preheat will run on this machine")
    doctor.add_argument("--json", action="store_true", help="print a list of findings as JSON")
    _command(
        commands,
        "collect-env",
        _collect_env,
        OPTIONS.values(),
        "print, as JSON, the versions and hardware that a report needs",
    )
    _add_without_model(commands)
    return parser, commands.choices


def _add_front(commands: Any) -> None:
    front = commands.add_parser(
        "front", help="serve through other servers, and move their requests when one is lost", allow_abbrev=False,
        usage="preheat front URL... [--model MODEL] [--flag VALUE ...]",
    )  # fmt: skip
    front.set_defaults(run=_front)
    front.add_argument("pods_argument", nargs="*", metavar="URL", help="a server, or a name of several: --pods")
    add_flags(front, FRONT_OPTIONS)


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate", help="complete prompts and print the results", allow_abbrev=False,
        usage="preheat generate [--model MODEL] [--prompt TEXT] [--flag VALUE ...]",
    )  # fmt: skip
    generate.set_defaults(run=_generate)
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


def _add_verify(commands: Any) -> None:
    verify = _command(commands, "verify", _verify, ENGINE_OPTIONS, "check that results are bit-identical")
    verify.add_argument("--prompts", metavar="FILE", help="read prompts from a file, like generate")
    verify.add_argument("--reduced", action="store_true", help="use few, short prompts: seconds instead of minutes")
    verify.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    verify.add_argument(
        "--digest",
        metavar="FILE",
        help="only compare this boot's digest with the digest in this record of another boot",
    )
    verify.add_argument("--golden", metavar="FILE", help="only compare answers with the file of an earlier boot")
    verify.add_argument("--write-golden", metavar="FILE", help="write that file")
    verify.add_argument("--against", metavar="URL", help="check an OpenAI-compatible server over HTTP instead")
    verify.add_argument(
        "--fuzz",
        type=float,
        metavar="SECONDS",
        help="for this time, compare requests in random loads with each request alone",
    )
    verify.add_argument("--random-models", action="store_true", help="with --fuzz: a random small model each round")
    verify.add_argument("--fuzz-seed", type=int, default=0, metavar="N", help="with --fuzz: the first round's seed [0]")


def _add_replay(commands: Any) -> None:
    replay = _command(commands, "replay", _replay, ENGINE_OPTIONS, "give answers again from their receipts")
    replay.usage = "preheat replay (--receipt FILE | --receipts-log FILE) [MODEL] [--flag VALUE ...]"
    replay.add_argument(
        "--receipt",
        metavar="FILE",
        help="a receipt, a log of receipts, or an answer that has one; without it, all files of --receipts-log",
    )
    replay.add_argument("--at", type=int, metavar="N", help="print the logits of token N, computed alone")
    replay.add_argument("--any-contract", action="store_true", help="compare though the engine has another contract")
    replay.add_argument("--json", action="store_true", help="print JSON objects, one a line; with --at all logits")


def _add_diff(commands: Any) -> None:
    diff = _command(commands, "diff", _diff, ENGINE_OPTIONS, "compare the tokens of two configurations of a model")
    diff.usage = "preheat diff [--other JSON] [--other-adapter NAME] [MODEL] [--flag VALUE ...]"
    diff.add_argument("--other", metavar="JSON", help="options that the other configuration changes")
    diff.add_argument("--adapter", default="", metavar="NAME", help="the adapter of the first configuration")
    diff.add_argument("--other-adapter", default="", metavar="NAME", help="the adapter of the other configuration")
    diff.add_argument("--html", metavar="FILE", help="also write the report as a self-contained HTML page")
    diff.add_argument("--prompts", metavar="FILE", help="read prompts from a file, like generate")
    diff.add_argument("--json", action="store_true", help="print JSON objects, one a prompt")


def _add_run_batch(commands: Any) -> None:
    batch = commands.add_parser(
        "run-batch", help="answer the requests in a file, in OpenAI's batch format", allow_abbrev=False,
        usage="preheat run-batch FILE [--output-file FILE] [--model MODEL] [--flag VALUE ...]",
    )  # fmt: skip
    batch.set_defaults(run=_run_batch)
    batch.add_argument("input_argument", nargs="?", metavar="FILE", help="same as --input-file")
    batch.add_argument(
        "-i", "--input-file", metavar="FILE", help="requests, one JSON object a line; - for standard input"
    )
    batch.add_argument("-o", "--output-file", metavar="FILE", help="file for the answers, instead of standard output")
    batch.add_argument(
        "--resume", action="store_true", help="keep the answers of an unfinished run, and request only the missing ones"
    )
    add_flags(batch, OPTIONS.values())


def _add_without_model(commands: Any) -> None:
    """Add the commands that need no model."""
    completion = commands.add_parser("completion", help="print a script for completion in a shell", allow_abbrev=False)
    completion.set_defaults(run=_completion)
    completion.add_argument("shell", choices=SHELLS)
    commands.add_parser("bench", help="run the benchmarks, compared with vLLM's figures")  # its arguments: see _bench
    buckets = commands.add_parser("buckets", help="print the bucket sizes of one dimension", allow_abbrev=False)
    buckets.set_defaults(run=_buckets)
    plan_commands.add_bucket_flags(buckets)


def _command(
    commands: Any, name: str, run: Callable[[dict[str, Any]], int], options: Iterable[Option], text: str
) -> argparse.ArgumentParser:
    """Add a command with the model as its argument."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, allow_abbrev=False, usage=f"preheat {name} [MODEL] [--flag VALUE ...]"
    )
    parser.set_defaults(run=run)
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="same as --model")
    add_flags(parser, options)
    return parser


def _add_client(commands: Any, name: str, run: Callable[[dict[str, Any]], int], text: str) -> argparse.ArgumentParser:
    """Add a command for a client of a running server."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--url", default="http://localhost:8000/v1", help="address of the server [%(default)s]")
    parser.add_argument("--model-name", metavar="NAME", help="the model to ask [the server's first]")
    parser.add_argument("--api-key", metavar="KEY", help="the API key [PREHEAT_API_KEY or OPENAI_API_KEY]")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this, print the answer and leave")
    return parser


def _completion(values: dict[str, Any]) -> int:
    parser, commands = _parser()
    print(script(parser, commands.values(), values["shell"]))
    return 0


def _chat(values: dict[str, Any]) -> int:
    server = client.Client(values["url"], values["model_name"], values["api_key"])
    client.chat(server, values["system_prompt"], values["quick"], input, _show)
    return 0


def _complete(values: dict[str, Any]) -> int:
    server = client.Client(values["url"], values["model_name"], values["api_key"])
    client.complete(server, values["max_tokens"], values["quick"], input, _show)
    return 0


def _show(text: str) -> None:
    """Print a part of a model's answer; strip control characters on a terminal."""
    print(without_controls(text) if sys.stdout.isatty() else text, end="", flush=True)


def _say(text: str) -> None:
    print(printable(text), flush=True)


def _run_batch(values: dict[str, Any]) -> int:
    named, path, output = values.pop("input_argument"), values.pop("input_file"), values.pop("output_file")
    resume, path = values.pop("resume"), path or named
    if path is None:
        raise SettingsError("name the file of requests: preheat run-batch FILE")
    settings = Settings.load(values)
    from preheat.server.batch_output import answers_to
    from preheat.server.run_batch import read_batch, run_batch

    lines = read_batch(path)
    if output is not None and same_file(path, output):
        raise SettingsError(f"--output-file {output} is the file of requests itself: name another", param="output_file")
    with answers_to(output, {line.custom_id for line in lines}, resume=resume) as answers:
        try:
            run_batch(settings, lines, answers)
        finally:
            print(answers.report, file=sys.stderr)
    return 0 if answers.whole and not answers.refused else FAILURE


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
        group.add_argument(_flag(field.name), **more)


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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _load(values: dict[str, Any]) -> Settings:
    """Return the settings of a command with the model as its argument. Raises SettingsError for several models."""
    settings = _loaded(values)
    if settings.models:
        raise SettingsError("several models are for `preheat serve`: name one, as --model PATH", param="models")
    return settings


def _loaded(values: dict[str, Any]) -> Settings:
    model = values.pop("model_argument")
    if model is not None and values.setdefault("model", [model]) != [model]:
        raise SettingsError(f"the model is given twice, as {model!r} and by --model: leave one out", param="model")
    return Settings.load(values)


def served(settings: Settings) -> Settings:
    """Return ``settings`` for a server.

    By default a long prompt must not delay sequences that decode.
    """
    mixes = (
        policy_of(with_defaults(settings, facts_of(settings.device))).mixed_steps and settings.enable_chunked_prefill
    )
    if settings.max_num_mixed_tokens is not None or not mixes:
        return settings
    return replace(settings, max_num_mixed_tokens=SERVED_MIXED_TOKENS)


def _serve(values: dict[str, Any]) -> int:
    settings = served(_loaded(values))
    if settings.pods:
        raise SettingsError("pods are the servers behind a front: write preheat front URL...", param="pods")
    from preheat.server.app import run_server

    def on_ready(opened: Settings) -> None:
        print(f"Ready. Try:\n\n{curl(opened)}\n", file=sys.stderr, flush=True)

    return run_server(settings, on_ready=on_ready)


def _front(values: dict[str, Any]) -> int:
    urls = values.pop("pods_argument")
    if urls and "pods" in values:
        raise SettingsError("the pods are given twice: leave --pods out", param="pods")
    settings = Settings.load(values | ({"pods": tuple(urls)} if urls else {}))
    if not settings.pods:
        raise SettingsError("name the servers behind the front: preheat front http://HOST:PORT ...", param="pods")
    changes: dict[str, Any] = {}
    if settings.data_parallel_size == 1:
        changes["data_parallel_size"] = len(settings.pods)
    if settings.engine_restarts == OPTIONS["engine_restarts"].default:
        changes["engine_restarts"] = FRONT_RESTARTS
    from preheat.server.app import run_server

    return run_server(replace(settings, **changes))


def _plan(values: dict[str, Any]) -> int:
    as_json, traffic = values.pop("json"), values.pop("from_traffic")
    settings = _load(values)
    if traffic is not None:
        from preheat.warmup.traffic import solved

        print(printable(solved(Path(traffic))))
        return 0
    from preheat.startup import planned

    print(printable(planned(settings, as_json=as_json)))
    return 0


def _doctor(values: dict[str, Any]) -> int:
    as_json = values.pop("json")
    from preheat import doctor

    found = list(doctor.findings(_load(values)))
    print(json.dumps([finding._asdict() for finding in found], indent=2) if as_json else printable(doctor.table(found)))
    return FAILURE if any(finding.verdict == "fail" for finding in found) else 0


def _collect_env(values: dict[str, Any]) -> int:
    from preheat import doctor

    print(json.dumps(doctor.collected(_load(values)), indent=2))
    return 0


def _buckets(values: dict[str, Any]) -> int:
    print(plan_commands.buckets(argparse.Namespace(**values)))
    return 0


def _warm(values: dict[str, Any]) -> int:
    as_json, html = values.pop("json"), values.pop("html")
    settings = _load(values)
    if html is not None and not Path(html).absolute().parent.is_dir():
        raise SettingsError(f"--html {html}: its folder does not exist; create it, or name another file")
    set_up_logging(settings)
    from preheat.engine.progress import ProgressBar
    from preheat.startup import boot_engine
    from preheat.warmup.page import render
    from preheat.warmup.record import Record
    from preheat.warmup.report import describe

    transport = InlineTransport(ProgressBar(settings.use_tqdm_on_load).show)
    boot_engine(settings, transport)
    json_text = next(message.record for message in transport.receive() if isinstance(message, Ready))
    record = Record.from_json(json_text)
    print(json_text.decode() if as_json else printable(describe(record)))
    if html is not None:
        try:
            Path(html).write_text(render(record), encoding="utf-8")
        except OSError as error:
            raise PreheatError(f"cannot write {html}: {error.strerror}") from None
    return FAILURE if record.states["failed"] else 0


def _verify(values: dict[str, Any]) -> int:
    asked = Asked(**{name: values.pop(name) for name in ASKED})
    settings = _load(values)
    set_up_logging(settings)
    given = list(_prompts([], asked.prompts)) if asked.prompts else None
    say = (lambda _: None) if asked.json else _say
    if asked.against:
        verdict = verify_command.server(settings, asked, given, say)
    else:
        from preheat.startup import boot_engine

        if asked.digest:
            return verify_command.digest(boot_engine, settings, asked.digest, _say)
        if asked.golden or asked.write_golden:
            return verify_command.golden(boot_engine, settings, asked, given, _say)
        if asked.fuzz is not None:
            verdict = verify_command.fuzz(boot_engine, settings, asked, say)
        else:
            verdict = verify_command.engine(boot_engine, settings, asked, given, say)
    if asked.json:
        print(msgspec.json.encode(verdict).decode())
    return 0 if verdict.ok else FAILURE


def _replay(values: dict[str, Any]) -> int:
    path, at = values.pop("receipt"), values.pop("at")
    whatever, as_json = values.pop("any_contract"), values.pop("json")
    settings = _load(values)
    set_up_logging(settings)
    from preheat.startup import boot_engine
    from preheat.verify import replay
    from preheat.verify.drive import Engine

    receipts = replay.read_receipts(path) if path is not None else replay.read_log(settings.receipts_log)
    engine, wrong = Engine(boot_engine, settings), 0
    if len(receipts) > 1 and at is None and not whatever:
        return _replay_log(receipts, engine, as_json=as_json)
    for receipt in receipts:
        if not whatever:
            replay.check_contract(receipt, engine)
        found = replay.replay(receipt, engine) if at is None else replay.step_at(receipt, engine, at)
        if as_json:
            print(msgspec.json.encode(found).decode())
        else:
            _say(str(found) if isinstance(found, replay.Outcome) else "\n".join(found.lines()))
        wrong += not found.equal
    return FAILURE if wrong else 0


def _diff(values: dict[str, Any]) -> int:
    path, text, as_json = values.pop("prompts"), values.pop("other"), values.pop("json")
    adapters, page = (values.pop("adapter"), values.pop("other_adapter")), values.pop("html")
    settings = _load(values)
    set_up_logging(settings)
    from preheat.startup import boot_engine
    from preheat.verify import diff, diff_page

    given = list(_prompts([], path)) if path else None
    other = None if text is None else diff.other_settings(values, text)
    both, found = diff.Both(boot_engine, settings, other, adapters), []
    if not as_json:
        _say(diff.HEADER)
    for each in both.compare(verify_command.few_prompts(settings, both.one, given)):
        found.append(each)
        if as_json:
            print(msgspec.json.encode(each).decode())
        else:
            _say(each.line())
    if not as_json:
        _say(diff.summary(found))
    if page is not None:
        names = [f"{settings.model}{f', adapter {name}' if name else ''}" for name in adapters]
        names[1] += f", with {text}" if text else ""
        text = diff_page.render(found, (names[0], names[1]), verify_command.decoder(settings))
        Path(page).write_text(text, encoding="utf-8")
        _say(f"The report is in {page}")
    return 0


def _replay_log(receipts: Sequence[Any], engine: Any, *, as_json: bool) -> int:
    """Replay a log of receipts: a line for each, and the number of equal answers."""
    from preheat.verify import replay

    equal = 0
    found_each = replay.replay_log(receipts, engine)
    for number, (receipt, found) in enumerate(zip(receipts, found_each, strict=True), 1):
        equal += found.equal
        if as_json:
            print(msgspec.json.encode(found).decode())
        else:
            _say(f"{number:>6} {receipt.chain[:8]} {found}")
    _say(f"{equal} of {len(receipts)} answers are equal")
    return 0 if equal == len(receipts) else FAILURE


def _bench(words: Sequence[str]) -> int:
    """Run the ``benchmarks`` package, found beside ``src`` in a checkout and not installed."""
    root = Path(__file__).parents[2]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise PreheatError(
            "the benchmarks are not installed with preheat: clone its repository and run `scripts/bench` there"
        )
    # The default handler lets it stop the servers that it started.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return int(importlib.import_module("benchmarks.__main__").main(words))


def _tune(values: dict[str, Any]) -> int:
    output, seconds = values.pop("output"), values.pop("seconds")
    settings = _load(values)
    set_up_logging(settings)
    from preheat.warmup.tune import tune_model

    print(tune_model(settings, output, seconds))
    return 0


def _calibrate(values: dict[str, Any]) -> int:
    output, path = values.pop("output"), values.pop("prompts")
    config = values.pop("quant_config", None) or os.environ.get(OPTIONS["quant_config"].env_names[1])
    settings = _load({**values, **({"quantization": "inc", "quant_config": config} if config else {})})
    prompts = list(_prompts([], path)) if path else None
    set_up_logging(settings)
    from preheat.calibration import calibrate

    print(calibrate(settings, output, prompts))
    return 0


def curl(settings: Settings) -> str:
    """Return a shell command that requests a completion from the server of these settings."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if settings.ssl_certfile else "http"
    key = ' -H "Authorization: Bearer $PREHEAT_API_KEY"' if settings.api_key else ""
    body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 32, "temperature": 0})
    where = f"{scheme}://{host}:{settings.port}"
    if settings.uds is not None:
        where = f"--unix-socket {shlex.quote(settings.uds)} {scheme}://localhost"
    return f"curl {where}/v1/completions{key} -H 'Content-Type: application/json' \\\n    -d '{body}'"


def _generate(values: dict[str, Any]) -> int:
    as_json, chat = values.pop("json"), values.pop("chat")
    prompts = list(_prompts(values.pop("prompt"), values.pop("prompts")))
    sampling = {"max_tokens": SamplingParams().max_tokens}
    sampling |= {name: values.pop(name) for name in SAMPLING_FIELDS if name in values}
    check_params(sampling)  # before anything is loaded
    set_up_logging(_load({**values, "model_argument": None}))
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


def _prompts(given: list[str], path: str | None) -> Iterator[str | list[int]]:
    """Yield the prompts of the flags, then of the file.

    Without either, yield the prompts of standard input.
    """
    yield from given
    if path is None and not given:
        if sys.stdin.isatty():
            raise SettingsError("no prompt: give --prompt TEXT or --prompts FILE, or pipe prompts in, one a line")
        path = "-"
    if path == "-":
        yield from _read_prompts(sys.stdin, "standard input")
    elif path is not None:
        try:
            text = read_given(path, most=TABLE_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"cannot read the prompts in {shown(path)}: {why_unread(error)}") from None
        yield from _read_prompts(io.StringIO(text), path)


def _read_prompts(lines: TextIO, name: str) -> Iterator[str | list[int]]:
    """Yield one prompt per nonempty line.

    The prompt of a JSON object is its ``prompt`` (text or token ids).
    """
    found = False
    for number, line in enumerate(_plain(lines), 1):
        found = found or bool(line)
        try:
            if line.startswith("{"):
                yield msgspec.json.decode(line, type=_JsonPrompt).prompt
            elif line:
                yield line
        except msgspec.ValidationError as error:
            expected = '{"prompt": "text"} or {"prompt": [token ids]}'
            raise SettingsError(f"{name}, line {number}: expected {expected}: {error}") from None
        except msgspec.DecodeError:  # a text that begins with a brace
            yield line
    if not found:
        raise SettingsError(f"no prompt in {name}: write one a line")


def _plain(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines without their ends and without the byte-order mark.

    Editors on Windows begin a file with that mark (BOM).
    """
    for number, line in enumerate(lines):
        yield (line if number else line.removeprefix("\ufeff")).rstrip("\r\n")


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
            if choice.receipt is not None:
                record["receipt"] = msgspec.to_builtins(choice.receipt, str_keys=True)
            if choice.logprobs is not None:
                record["logprobs"] = msgspec.to_builtins(choice.logprobs)
            if result.prompt_logprobs is not None:
                record["prompt_logprobs"] = msgspec.to_builtins(result.prompt_logprobs)
            print(msgspec.json.encode(record).decode())
