"""The commands chat and complete, clients of a running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from preheat.extras import client
from preheat.utils.log import without_controls


def add_client(commands: Any, name: str, run: Callable[[dict[str, Any]], int], text: str) -> argparse.ArgumentParser:
    """Add a command for a client of a running server."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--url", default="http://localhost:8000/v1", help="address of the server [%(default)s]")
    parser.add_argument("--model-name", metavar="NAME", help="the model to ask [the server's first]")
    parser.add_argument("--api-key", metavar="KEY", help="the API key [PREHEAT_API_KEY or OPENAI_API_KEY]")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this, print the answer and leave")
    return parser


def run_chat(values: dict[str, Any]) -> int:
    """Talk with a running server; return the exit status."""
    server = client.Client(values["url"], values["model_name"], values["api_key"])
    client.chat(server, values["system_prompt"], values["quick"], input, _show)
    return 0


def run_complete(values: dict[str, Any]) -> int:
    """Have a running server complete prompts; return the exit status."""
    server = client.Client(values["url"], values["model_name"], values["api_key"])
    client.complete(server, values["max_tokens"], values["quick"], input, _show)
    return 0


def _show(text: str) -> None:
    """Print a part of a model's answer; strip control characters on a terminal."""
    print(without_controls(text) if sys.stdout.isatty() else text, end="", flush=True)
