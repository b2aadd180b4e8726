"""The commands verify, replay and diff."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from preheat.cli.common import ENGINE_OPTIONS, FAILURE, add_command, check_folder, load, say
from preheat.cli.prompts import given_prompts
from preheat.settings import Settings
from preheat.utils.files import write_output
from preheat.utils.log import set_up_logging
from preheat.verify import command as verify_command
from preheat.verify.command import Asked
from preheat.verify.given import check_ids, encoded
from preheat.verify.prompts import REDUCED

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


def add_verify(commands: Any) -> None:
    """Add the command verify."""
    verify = add_command(commands, "verify", run_verify, ENGINE_OPTIONS, "check that results are bit-identical")
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


def add_replay(commands: Any) -> None:
    """Add the command replay."""
    replay = add_command(commands, "replay", run_replay, ENGINE_OPTIONS, "give answers again from their receipts")
    replay.usage = "preheat replay (--receipt FILE | --receipts-log FILE) [MODEL] [--flag VALUE ...]"
    replay.add_argument(
        "--receipt",
        metavar="FILE",
        help="a receipt, a log of receipts, or an answer that has one; without it, all files of --receipts-log",
    )
    replay.add_argument("--at", type=int, metavar="N", help="print the logits of token N, computed alone")
    replay.add_argument("--any-contract", action="store_true", help="compare though the engine has another contract")
    replay.add_argument("--json", action="store_true", help="print JSON objects, one a line; with --at all logits")


def add_diff(commands: Any) -> None:
    """Add the command diff."""
    diff = add_command(
        commands, "diff", run_diff, ENGINE_OPTIONS, "compare the tokens of two configurations of a model"
    )
    diff.usage = "preheat diff [--other JSON] [--other-adapter NAME] [MODEL] [--flag VALUE ...]"
    diff.add_argument("--other", metavar="JSON", help="options that the other configuration changes")
    diff.add_argument("--adapter", default="", metavar="NAME", help="the adapter of the first configuration")
    diff.add_argument("--other-adapter", default="", metavar="NAME", help="the adapter of the other configuration")
    diff.add_argument("--html", metavar="FILE", help="also write the report as a self-contained HTML page")
    diff.add_argument("--prompts", metavar="FILE", help="read prompts from a file, like generate")
    diff.add_argument("--json", action="store_true", help="print JSON objects, one a prompt")


def run_verify(values: dict[str, Any]) -> int:
    """Check that results are bit-identical; return the exit status."""
    asked = Asked(**{name: values.pop(name) for name in ASKED})
    settings = load(values)
    set_up_logging(settings)
    check_folder("--write-golden", asked.write_golden)
    given = _given(settings, asked.prompts, None if asked.against else asked.size.outputs)
    tell = (lambda _: None) if asked.json else say
    if asked.against:
        verdict = verify_command.server(settings, asked, given, tell)
    else:
        from preheat.startup import boot_engine

        if asked.digest:
            return verify_command.digest(boot_engine, settings, asked.digest, say)
        if asked.golden or asked.write_golden:
            return verify_command.golden(boot_engine, settings, asked, given, say)
        if asked.fuzz is not None:
            verdict = verify_command.fuzz(boot_engine, settings, asked, tell)
        else:
            verdict = verify_command.engine(boot_engine, settings, asked, given, tell)
    if asked.json:
        print(msgspec.json.encode(verdict).decode())
    return 0 if verdict.ok else FAILURE


def _given(settings: Settings, path: str | None, outputs: int | None) -> list[list[int]] | None:
    """Return the token ids of the prompts in a file, None without one. Raises SettingsError, before any engine boots.

    ``outputs`` tokens will follow each; None: another server runs them, with a model that is not known here.
    """
    if path is None:
        return None
    found = encoded(settings, list(given_prompts([], path)))
    if outputs is not None:
        check_ids(settings, found, outputs)
    return found


def run_replay(values: dict[str, Any]) -> int:
    """Give answers again from their receipts; return the exit status."""
    path, at = values.pop("receipt"), values.pop("at")
    whatever, as_json = values.pop("any_contract"), values.pop("json")
    settings = load(values)
    set_up_logging(settings)
    from preheat.startup import boot_engine
    from preheat.verify import replay
    from preheat.verify.drive import Engine

    receipts = replay.read_receipts(path) if path is not None else replay.read_log(settings.receipts_log)
    if at is not None:
        for receipt in receipts:
            replay.check_position(receipt, at)
    engine, wrong = Engine(boot_engine, settings), 0
    if len(receipts) > 1 and at is None:
        return _replay_log(receipts, engine, any_contract=whatever, as_json=as_json)
    for receipt in receipts:
        if not whatever:
            replay.check_contract(receipt, engine)
        found = replay.replay(receipt, engine) if at is None else replay.step_at(receipt, engine, at)
        if as_json:
            print(msgspec.json.encode(found).decode())
        else:
            say(str(found) if isinstance(found, replay.Outcome) else "\n".join(found.lines()))
        wrong += not found.equal
    return FAILURE if wrong else 0


def run_diff(values: dict[str, Any]) -> int:
    """Compare the tokens of two configurations; return the exit status."""
    path, text, as_json = values.pop("prompts"), values.pop("other"), values.pop("json")
    adapters, page = (values.pop("adapter"), values.pop("other_adapter")), values.pop("html")
    settings = load(values)
    set_up_logging(settings)
    check_folder("--html", page)
    given = _given(settings, path, REDUCED.outputs)
    from preheat.startup import boot_engine
    from preheat.verify import diff, diff_page

    other = None if text is None else diff.other_settings(values, text)
    both, found = diff.Both(boot_engine, settings, other, adapters), []
    if not as_json:
        say(diff.HEADER)
    for each in both.compare(verify_command.few_prompts(both.one, given)):
        found.append(each)
        if as_json:
            print(msgspec.json.encode(each).decode())
        else:
            say(each.line())
    if not as_json:
        say(diff.summary(found))
    if page is not None:
        names = [f"{settings.model}{f', adapter {name}' if name else ''}" for name in adapters]
        names[1] += f", with {text}" if text else ""
        text = diff_page.render(found, (names[0], names[1]), verify_command.decoder(settings))
        write_output(page, text)
        say(f"The report is in {page}")
    return 0


def _replay_log(receipts: Sequence[Any], engine: Any, *, any_contract: bool, as_json: bool) -> int:
    """Replay a log of receipts: a line for each, and the number of equal answers."""
    from preheat.verify import replay

    equal = 0
    found_each = replay.replay_log(receipts, engine, any_contract=any_contract)
    for number, (receipt, found) in enumerate(zip(receipts, found_each, strict=True), 1):
        equal += found.equal
        if as_json:
            print(msgspec.json.encode(found).decode())
        else:
            say(f"{number:>6} {receipt.chain[:8]} {found}")
    say(f"{equal} of {len(receipts)} answers are equal")
    return 0 if equal == len(receipts) else FAILURE
