"""The commands serve, front and run-batch."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from typing import Any

from preheat.backends.registry import facts_of
from preheat.cli.common import FAILURE, loaded
from preheat.errors import SettingsError
from preheat.options.options import add_flags
from preheat.plan.modes import with_defaults
from preheat.plan.policy import policy_of
from preheat.settings import OPTIONS, Settings
from preheat.utils.files import same_file

SERVED_MIXED_TOKENS = 512
"""Tokens in a server's mixed steps.

A large GPU computes about so many in the time of a few decode steps.
"""

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


def add_front(commands: Any) -> None:
    """Add the command front."""
    front = commands.add_parser(
        "front", help="serve through other servers, and move their requests when one is lost", allow_abbrev=False,
        usage="preheat front URL... [--model MODEL] [--flag VALUE ...]",
    )  # fmt: skip
    front.set_defaults(run=run_front)
    front.add_argument("pods_argument", nargs="*", metavar="URL", help="a server, or a name of several: --pods")
    add_flags(front, FRONT_OPTIONS)


def add_run_batch(commands: Any) -> None:
    """Add the command run-batch."""
    batch = commands.add_parser(
        "run-batch", help="answer the requests in a file, in OpenAI's batch format", allow_abbrev=False,
        usage="preheat run-batch FILE [--output-file FILE] [--model MODEL] [--flag VALUE ...]",
    )  # fmt: skip
    batch.set_defaults(run=run_batch_file)
    batch.add_argument("input_argument", nargs="?", metavar="FILE", help="same as --input-file")
    batch.add_argument(
        "-i", "--input-file", metavar="FILE", help="requests, one JSON object a line; - for standard input"
    )
    batch.add_argument("-o", "--output-file", metavar="FILE", help="file for the answers, instead of standard output")
    batch.add_argument(
        "--resume", action="store_true", help="keep the answers of an unfinished run, and request only the missing ones"
    )
    add_flags(batch, OPTIONS.values())


def run_batch_file(values: dict[str, Any]) -> int:
    """Answer the requests in a file; return the exit status."""
    named, path, output = values.pop("input_argument"), values.pop("input_file"), values.pop("output_file")
    resume, path = values.pop("resume"), path or named
    if path is None:
        raise SettingsError("name the file of requests: preheat run-batch FILE")
    settings = Settings.load(values)
    from preheat.server.batches.output import answers_to
    from preheat.server.batches.run_batch import read_batch, run_batch

    lines = read_batch(path)
    if output is not None and same_file(path, output):
        raise SettingsError(f"--output-file {output} is the file of requests itself: name another", param="output_file")
    with answers_to(output, {line.custom_id for line in lines}, resume=resume) as answers:
        try:
            run_batch(settings, lines, answers)
        finally:
            print(answers.report, file=sys.stderr)
    return 0 if answers.whole and not answers.refused else FAILURE


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


def run_serve(values: dict[str, Any]) -> int:
    """Serve a model; return the exit status."""
    settings = served(loaded(values))
    if settings.pods:
        raise SettingsError("pods are the servers behind a front: write preheat front URL...", param="pods")
    from preheat.server.app import run_server

    def on_ready(opened: Settings) -> None:
        print(f"Ready. Try:\n\n{curl(opened)}\n", file=sys.stderr, flush=True)

    return run_server(settings, on_ready=on_ready)


def run_front(values: dict[str, Any]) -> int:
    """Serve through other servers; return the exit status."""
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
