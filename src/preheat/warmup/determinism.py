"""The determinism passes: a few dummy steps, after everything else is warm.

Source: the determinism warm-up of vLLM, whose names, defaults and log lines these are. It found that whatever differs
from run to run differs on the first run. preheat's operations keep their bits on the first run too, so the passes prove
rather than cure; they cost little, and a failing one is told before a client meets the failure.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping

from preheat.errors import SettingsError
from preheat.settings import OPTIONS
from preheat.utils.options import parse_bool

logger = logging.getLogger(__name__)


def get_determinism_warmup_iterations(env: Mapping[str, str] = os.environ) -> int:
    """Passes that the environment asks for: VLLM_DETERMINISM_WARMUP_ITERATIONS, of which negative and unreadable values
    mean none; where it is unset, 3 with batch invariance and none without.
    """
    option = OPTIONS["determinism_warmup_iterations"]
    asked = _asked(option.env_names, env)
    if asked is None:
        return int(option.default) if is_batch_invariant(env) else 0
    return int(option.convert(asked, option.env_names[-1]))


def is_batch_invariant(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment leaves batch invariance on, as it is by default. Raises SettingsError for other than yes
    or no.
    """
    option = OPTIONS["batch_invariant"]
    asked = _asked(option.env_names, env)
    try:
        return bool(option.default) if asked is None else parse_bool(asked)
    except ValueError:
        raise SettingsError(f"{' or '.join(option.env_names)}: {asked!r} is not 1/0, true/false or yes/no") from None


def run_determinism_warmup(
    dummy_run_fn: Callable[[], None],
    num_iterations: int | None = None,
    *,
    batch_invariant: bool | None = None,
    synchronize: Callable[[], None] | None = None,
) -> bool:
    """Call ``dummy_run_fn``, which runs one representative step, ``num_iterations`` times. True if it was called.

    What is None is taken from the environment, ``synchronize`` from the accelerator in use. A pass that fails is logged
    and the rest run. Nothing runs where batch invariance is off.
    """
    if num_iterations is None:
        num_iterations = get_determinism_warmup_iterations()
    if num_iterations <= 0:
        return False
    if not (is_batch_invariant() if batch_invariant is None else batch_invariant):
        logger.debug("Skipping determinism warmup: VLLM_BATCH_INVARIANT is not enabled")
        return False
    logger.info(
        "Running %d determinism warmup iteration(s) to ensure reproducible output from the first request...",
        num_iterations,
    )
    for number in range(1, num_iterations + 1):
        try:
            dummy_run_fn()
            (synchronize or _synchronize)()
            logger.debug("Determinism warmup iteration %d/%d complete", number, num_iterations)
        except Exception as error:
            logger.warning(
                "Determinism warmup iteration %d failed: %s. Continuing with remaining iterations.", number, error
            )
    logger.info("Determinism warmup complete")
    return True


def _asked(names: tuple[str, ...], env: Mapping[str, str]) -> str | None:
    return next((env[name] for name in names if name in env), None)


def _synchronize() -> None:
    """Wait for the accelerator; without torch, or without a device, there is nothing to wait for."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.synchronize()
