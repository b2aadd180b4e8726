"""Run one command of the command line, and report its errors.

Help, errors, plans and bucket sizes do not import torch, since that takes seconds.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from preheat import __version__
from preheat.cli.bench import run_bench
from preheat.cli.client import add_client, run_chat, run_complete
from preheat.cli.common import ENGINE_OPTIONS, FAILURE, add_command, flag_of
from preheat.cli.generate import add_generate
from preheat.cli.prepare import (
    CALIBRATE_OPTIONS,
    TUNE_OPTIONS,
    run_buckets,
    run_calibrate,
    run_collect_env,
    run_doctor,
    run_plan,
    run_tune,
    run_warm,
)
from preheat.cli.serve import add_front, add_run_batch, run_serve
from preheat.cli.verify import add_diff, add_replay, add_verify
from preheat.errors import InvalidRequest, PreheatError, SettingsError
from preheat.options.command_words import dashed, plain_words
from preheat.options.given import instead_of
from preheat.options.vllm_flags import add_flags_of_vllm
from preheat.plan import commands as plan_commands
from preheat.settings import OPTIONS
from preheat.utils.completion import SHELLS, script
from preheat.utils.files import shown, why_unread
from preheat.utils.log import one_line

USAGE_ERROR, INTERRUPTED = 2, 130

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    It is 0, 1 for a failure, or 2 for a usage error.
    """
    words = [dashed(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    try:
        if words[:1] == ["bench"]:
            return run_bench(words[1:])
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
                f"{flag_of(name)} takes all words after it: write the model before it, or as --model MODEL", param=name
            )


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser, and the parsers of the commands by name."""
    parser = argparse.ArgumentParser(prog="preheat", description="An LLM inference engine, hot from the first request.")
    parser.add_argument("--version", action="version", version=f"preheat {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    add_command(commands, "serve", run_serve, OPTIONS.values(), "serve a model with an OpenAI-compatible API")
    add_front(commands)
    add_generate(commands)
    plan = add_command(
        commands, "plan", run_plan, ENGINE_OPTIONS, "print the warm-up plan; needs only the model's config"
    )
    plan.add_argument("--json", action="store_true", help="print a JSON object: items, dropped, padding, estimates")
    plan.add_argument(
        "--from-traffic",
        metavar="FILE",
        help="the record of a server (/warmup?format=json): print a bucket file with the best sizes for its traffic",
    )
    warm = add_command(commands, "warm", run_warm, ENGINE_OPTIONS, "boot, warm up, print the record, exit")
    warm.add_argument("--json", action="store_true", help="print the record as JSON")
    warm.add_argument("--html", metavar="FILE", help="also write the record as a self-contained HTML page")
    add_verify(commands)
    add_replay(commands)
    add_diff(commands)
    add_run_batch(commands)
    add_client(commands, "chat", run_chat, "talk with a running server").add_argument(
        "--system-prompt", metavar="TEXT", help="the first message, with instructions for the model"
    )
    add_client(commands, "complete", run_complete, "have a running server complete prompts").add_argument(
        "--max-tokens", type=int, metavar="INT", help="tokens to generate at most"
    )
    calibrate = add_command(commands, "calibrate", run_calibrate, CALIBRATE_OPTIONS, "measure a model's ranges for FP8")
    calibrate.add_argument(
        "--output",
        metavar="DIR",
        help="folder for INC's files; by default the folder of dump_stats_path in QUANT_CONFIG",
    )
    calibrate.add_argument("--prompts", metavar="FILE", help="read prompts from a file, like generate")
    tune_options = [OPTIONS[name] for name in TUNE_OPTIONS]
    tune = add_command(
        commands, "tune", run_tune, tune_options, "measure the fastest kernels on this GPU for later boots"
    )
    tune.add_argument("--output", metavar="FILE", help="write the tuning table to this file instead of the cache")
    tune.add_argument("--seconds", type=float, help="stop after this time, and keep the measurements so far")

    doctor = add_command(
        commands, "doctor", run_doctor, OPTIONS.values(), "check whether preheat will run on this machine"
    )
    doctor.add_argument("--json", action="store_true", help="print a list of findings as JSON")
    add_command(
        commands,
        "collect-env",
        run_collect_env,
        OPTIONS.values(),
        "print, as JSON, the versions and hardware that a report needs",
    )
    _add_without_model(commands)
    return parser, commands.choices


def _add_without_model(commands: Any) -> None:
    """Add the commands that need no model."""
    completion = commands.add_parser("completion", help="print a script for completion in a shell", allow_abbrev=False)
    completion.set_defaults(run=_completion)
    completion.add_argument("shell", choices=SHELLS)
    commands.add_parser("bench", help="run the benchmarks, compared with vLLM's figures")  # its arguments: run_bench
    buckets = commands.add_parser("buckets", help="print the bucket sizes of one dimension", allow_abbrev=False)
    buckets.set_defaults(run=run_buckets)
    plan_commands.add_bucket_flags(buckets)


def _completion(values: dict[str, Any]) -> int:
    parser, commands = _parser()
    print(script(parser, commands.values(), values["shell"]))
    return 0
