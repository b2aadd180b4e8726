"""``preheat diff``: two configurations of a model, compared token by token with the same noise.

Both engines draw with the same seeds at the same positions, so a sampled token differs only if the logits do. Logits
are compared where both engines have read the same tokens: up to the first token that differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from preheat.configs.adapters import lora_modules
from preheat.errors import SettingsError
from preheat.settings import Settings
from preheat.utils.files import shown
from preheat.verify.drive import Boot, Engine
from preheat.verify.given import pools
from preheat.verify.prompts import Prompt


class Compared(msgspec.Struct):
    """The answers to one prompt.

    ``equal`` of ``tokens`` tokens come before the first difference, at position ``first``. ``divergence`` is the mean
    over these positions of ``divergences``: the Kullback-Leibler divergence of the second distribution from the first,
    in nats, without temperature or filters. ``distance`` is the largest difference of a logit. ``one`` and ``other``
    are the answers' tokens.
    """

    prompt: int
    tokens: int
    equal: int
    first: int | None
    divergence: float
    distance: float
    divergences: list[float] = []
    one: list[int] = []
    other: list[int] = []

    def line(self) -> str:
        first = "-" if self.first is None else str(self.first)
        share, numbers = f"{self.equal:>5}/{self.tokens:<5}", f"{self.divergence:>12.3e} {self.distance:>12.3e}"
        return f"{self.prompt:>6} {share} {first:>6} {numbers}"


HEADER = f"{'prompt':>6} {'equal':>11} {'first':>6} {'divergence':>12} {'distance':>12}"


class Both:
    """Two engines: of ``settings``, and of ``settings`` with the options ``other``. Both are in memory at once.

    ``adapters`` are the names of the adapters that the two answer with, empty for the model itself. Without ``other``
    one engine answers with both. Raises SettingsError.
    """

    def __init__(
        self, boot: Boot, settings: Settings, other: Settings | None, adapters: tuple[str, str] = ("", "")
    ) -> None:
        for name, those in zip(adapters, (settings, other or settings), strict=True):
            _check_adapter(name, those)
        if other is None and adapters[0] == adapters[1]:
            raise SettingsError("preheat diff needs two configurations: give --other, --adapter or --other-adapter")
        if pools(settings) or pools(other or settings):
            raise SettingsError("preheat diff compares tokens, and an engine that pools generates none")
        self.adapters = adapters
        self.one = Engine(boot, settings)
        self._other = self.one if other is None else Engine(boot, other)
        if self.one.vocab_size != self._other.vocab_size:
            raise SettingsError(
                f"--other has a vocabulary of {self._other.vocab_size:,} tokens, not {self.one.vocab_size:,}: compare "
                "two configurations of one model"
            )

    def compare(self, prompts: Sequence[Prompt]) -> Iterator[Compared]:
        """Yield the comparison of each prompt; each runs alone."""
        for number, prompt in enumerate(prompts):
            (tokens, logits), (others, changed) = (
                _answer(engine, replace(prompt, lora_name=name))
                for engine, name in zip((self.one, self._other), self.adapters, strict=True)
            )
            count = max(len(tokens), len(others))
            pairs = zip(tokens, others, strict=False)
            equal = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(others)))
            distances = [_distance(*pair) for pair in zip(logits[: equal + 1], changed[: equal + 1], strict=False)]
            yield Compared(
                number, count, equal, None if equal == count else equal,
                sum(each for each, _ in distances) / max(len(distances), 1),
                max((each for _, each in distances), default=0.0), [each for each, _ in distances], tokens, others,
            )  # fmt: skip


def _check_adapter(name: str, settings: Settings) -> None:
    """Raise SettingsError if ``settings`` serve no adapter ``name``."""
    known = [module.name for module in lora_modules(settings.lora_modules)]
    if name and name not in known:
        said = f"but {', '.join(known)} are" if known else "and there is none: give --enable-lora and --lora-modules"
        raise SettingsError(f"the adapter {name!r} is not among --lora-modules, {said}", param="lora_modules")


def _answer(engine: Engine, prompt: Prompt) -> tuple[list[int], list[Tensor]]:
    """Return the tokens of an answer, and the raw logits behind each."""
    with engine.keeping_logits() as kept:
        engine.run([prompt])
    tokens = engine.answers[0].tokens
    return tokens, kept[0][: len(tokens)]


def _distance(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the divergence in float64, and the largest difference of finite logits."""
    first, second = (torch.log_softmax(each.double(), -1) for each in (one, other))
    terms = torch.where(first.isfinite(), first.exp() * (first - second), 0.0)
    both = one.isfinite() & other.isfinite()
    return max(float(terms.sum()), 0.0), float((one - other)[both].abs().max()) if both.any() else 0.0


def summary(found: Sequence[Compared]) -> str:
    """Return one line over all prompts."""
    tokens, equal = sum(each.tokens for each in found), sum(each.equal for each in found)
    same = sum(each.first is None for each in found)
    mean = sum(each.divergence for each in found) / max(len(found), 1)
    return (
        f"{equal / max(tokens, 1):.2%} of {tokens:,} tokens come before the first difference; "
        f"{same:,} of {len(found):,} answers are equal; mean divergence {mean:.3e} nats"
    )


def other_settings(values: dict[str, object], text: str) -> Settings:
    """Return the settings of ``values``, changed by the JSON object ``text``. Raises SettingsError."""
    try:
        changes = json.loads(text)
    except (ValueError, RecursionError):
        changes = None
    if not isinstance(changes, dict) or not changes:
        example = '{"quantization": "int8"}'
        raise SettingsError(f"--other must be a JSON object of options, such as {example}, not {shown(text)}")
    return Settings.load({**values, **changes})
