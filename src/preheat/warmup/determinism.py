"""The determinism passes: a few dummy steps after everything else is warm.

Source: the determinism warm-up of vLLM, with its names, defaults and log lines. In vLLM, results that vary between runs
vary on the first run. preheat's operations keep their bits on the first run too, so here the passes are a check: a step
that fails is logged before a client meets the failure.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping

from preheat.errors import SettingsError
from preheat.options.options import parse_bool
from preheat.settings import OPTIONS

logger = logging.getLogger(__name__)


def get_determinism_warmup_iterations(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of passes in VLLM_DETERMINISM_WARMUP_ITERATIONS.

    Negative and unreadable values mean none. The default is 3 with batch invariance and 0 without.
    """
    option = OPTIONS["determinism_warmup_iterations"]
    asked = _asked(option.env_names, env)
    if asked is None:
        return int(option.default) if is_batch_invariant(env) else 0
    return int(option.convert(asked, option.env_names[-1]))


def is_batch_invariant(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment leaves batch invariance on, the default.

    Raises SettingsError for a value that is neither yes nor no.
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
    """Call ``dummy_run_fn`` ``num_iterations`` times; return whether it was called.

    The function runs one representative step. Arguments that are None are taken from the environment, ``synchronize``
    from the accelerator in use. A failing pass is logged and the rest run. Nothing runs if batch invariance is off.
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
    """Wait for the accelerator, if there is one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.synchronize()
