"""``preheat verify`` for the command line.

Torch is imported only where an engine is booted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from preheat.core import Ready
from preheat.errors import SettingsError
from preheat.frontend.tokenizer import Tokenizer
from preheat.model.files import find_tokenizer
from preheat.settings import Settings
from preheat.transport import InlineTransport
from preheat.verify.against import verify_server
from preheat.verify.compare import PathResult, Verdict, header, line, summary
from preheat.verify.identity import differences, read_proof
from preheat.verify.prompts import FULL, REDUCED, Prompt, Size, make_prompts, with_settings
from preheat.warmup.record import Record

if TYPE_CHECKING:
    from preheat.verify.drive import Boot, Engine, Prompts

Say = Callable[[str], None]
Given = list[list[int]] | None
"""The user's prompts, as token ids."""

_NO_DIGEST = "this boot has no digest: it needs the warm-up and --boot-check quick or full"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command's own flags."""

    prompts: str | None
    reduced: bool
    json: bool
    digest: str | None
    against: str | None
    golden: str | None = None
    write_golden: str | None = None
    fuzz: float | None = None
    random_models: bool = False
    fuzz_seed: int = 0

    def __post_init__(self) -> None:
        if self.digest and (self.against or self.prompts or self.reduced or self.json):
            raise SettingsError("--digest compares two boots and runs no prompts: give it without the other flags")
        if self.golden and self.write_golden:
            raise SettingsError("--golden compares with a file, and --write-golden writes one: give one of them")
        if (self.golden or self.write_golden) and (self.digest or self.against or self.json or self.fuzz is not None):
            raise SettingsError("--golden and --write-golden run prompts here: give only --prompts or --reduced beside")
        if self.fuzz is None and (self.random_models or self.fuzz_seed):
            raise SettingsError("--random-models and --fuzz-seed belong to --fuzz SECONDS")
        if self.fuzz is not None and (self.digest or self.against or self.prompts or self.reduced):
            raise SettingsError("--fuzz draws its own requests: give it without --prompts, --reduced and the like")
        if self.fuzz is not None and not 0 <= self.fuzz < math.inf:
            raise SettingsError(f"--fuzz must be a number of seconds, 0 for one round, not {self.fuzz}")
        if self.against and not self.against.startswith(("http://", "https://")):
            raise SettingsError(f"--against {self.against!r} must begin with http:// or https://")

    @property
    def size(self) -> Size:
        return REDUCED if self.reduced else FULL


def engine(boot: Boot, settings: Settings, asked: Asked, given: Given, say: Say) -> Verdict:
    """Verify the engine of ``settings`` and print each path's result as it is done."""
    from preheat.verify.verification import Verification

    verification = Verification(boot, settings, _maker(asked, given), asked.size)
    verdict = verification.verdict(_printed(verification.results(), say))
    say(summary(verdict))
    return verdict


def _maker(asked: Asked, given: Given) -> Prompts:
    """Return the maker of the prompts that were asked for."""

    def prompts(engine: Engine) -> list[Prompt]:
        if given is None:
            return make_prompts(asked.size, engine.vocab_size, engine.ready.max_model_len)
        return with_settings(given, asked.size.outputs)

    return prompts


def few_prompts(engine: Engine, given: Given) -> list[Prompt]:
    """Return the prompts ``given``, or the few of ``--reduced``."""
    if given is None:
        return make_prompts(REDUCED, engine.vocab_size, engine.ready.max_model_len)
    return with_settings(given, REDUCED.outputs)


def golden(boot: Boot, settings: Settings, asked: Asked, given: Given, say: Say) -> int:
    """Compare answers with a golden file, or write one. Returns the exit status, 0 if no answer differs."""
    from preheat.verify.drive import Engine
    from preheat.verify.golden import check_same_prompts, differences, golden_of, read_golden, write_golden

    stored = read_golden(asked.golden) if asked.golden else None
    engine = Engine(boot, settings)
    prompts = _maker(asked, given)(engine)
    if stored is not None and asked.golden is not None:
        check_same_prompts(stored, prompts, asked.golden)
    now = golden_of(engine, prompts)
    if stored is None or asked.golden is None:
        write_golden(now, asked.write_golden or "")
        say(f"{len(now.answers):,} answers are in {asked.write_golden}, with the contract {now.contract.id}")
        return 0
    for difference in differences(stored, now):
        say(difference)
    equal = stored.answers == now.answers
    say(f"{len(now.answers):,} answers are {'equal' if equal else 'not all equal'} bit for bit")
    return 0 if equal else 1


def fuzz(boot: Boot, settings: Settings, asked: Asked, say: Say) -> Verdict:
    """Run rounds of random loads.

    Print the command that repeats a round if it differs.
    """
    from preheat.verify.fuzz import Fuzz

    rounds = Fuzz(boot, settings, asked.random_models, asked.fuzz_seed)
    verdict = Verdict(_printed(rounds.results(asked.fuzz or 0.0), say))
    failed = [result for result in verdict.paths if result.identical < result.prompts]
    for result in failed:
        flags = f"--fuzz 0 --fuzz-seed {result.path.split()[-1]}{' --random-models' * asked.random_models}"
        say(f"{result.path} again: preheat verify {flags}, and the other flags as they were; it had {result.note}")
    say(f"{len(verdict.paths):,} rounds, {len(failed):,} of them with a difference")
    return verdict


def server(settings: Settings, asked: Asked, given: Given, say: Say) -> Verdict:
    """Verify the server at ``asked.against``."""
    assert asked.against is not None
    prompts = None if given is None else with_settings(given, asked.size.outputs)
    key = next(iter(settings.api_key), None)
    return Verdict(_printed(verify_server(asked.against, asked.size, prompts, key), say))


def digest(boot: Boot, settings: Settings, path: str, say: Say) -> int:
    """Compare this boot's digest with the one stored in ``path``.

    Returns the exit status, 0 if the bits are equal.
    """
    stored = read_proof(path)
    if settings.skip_warmup or settings.boot_check == "off":
        raise SettingsError(_NO_DIGEST)
    transport = InlineTransport()
    boot(settings, transport)
    ready = next(message for message in transport.receive() if isinstance(message, Ready))
    now = Record.from_json(ready.record).proof
    if not now.digest:
        raise SettingsError(_NO_DIGEST)
    for difference in differences(stored, now):
        say(difference)
    equal = stored.digest == now.digest
    say(f"The bits are {'equal' if equal else 'not equal'}: digest {now.digest}")
    if ready.blocked_reason:
        say(ready.blocked_reason)
    return 0 if equal and not ready.blocked_reason else 1


def _printed(results: Iterable[PathResult], say: Say) -> list[PathResult]:
    """Return all results, each printed as it arrives."""
    say(header())
    found = []
    for result in results:
        found.append(result)
        say(line(result))
    return found


def decoder(settings: Settings) -> Callable[[list[int]], str]:
    """Return a function from token ids to their text, special tokens included."""
    return partial(Tokenizer(find_tokenizer(settings)).decode, skip_special_tokens=False)
