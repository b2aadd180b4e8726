"""Options of logs, receipts, the answer cache and the audit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from preheat.options.options import option

_general = partial(option, group="General")


@dataclass(frozen=True, kw_only=True)
class GeneralSettings:
    """Options of the group General."""

    config: str | None = _general(
        None, "A file of options in YAML or JSON; flags and environment variables override it."
    )
    log_level: str = _general(
        "info",
        "Lowest severity to log.",
        env="VLLM_LOGGING_LEVEL",
        choices=("debug", "info", "warning", "error"),
        parse=str.lower,
    )
    log_config_file: str | None = _general(
        None,
        "A JSON file for Python's `logging.config.dictConfig`, for loggers below `preheat`; entries for `vllm` apply "
        "to `preheat` if it has none.",
        env="VLLM_LOGGING_CONFIG_PATH",
        path="file",
    )
    enable_log_requests: bool = _general(False, "Log each request at its arrival and at its end, without its text.")
    receipts: bool = _general(False, "Give each answer a receipt, as `receipt: true` does: see docs/receipts.md.")
    answer_cache_size: float | None = _general(
        None,
        "Memory for whole answers, in GiB, given again to equal greedy or seeded requests: see docs/answer-cache.md.",
        low=1e-6,
    )
    answer_cache_dir: str | None = _general(
        None,
        "A folder that keeps the answers of the answer cache for later boots: see docs/answer-cache.md.",
        path="new folder",
    )
    answer_cache_dir_size: float = _general(1.0, "Size of `answer_cache_dir` at most, in GiB.", low=1e-6)
    answer_cache_check_every: int = _general(
        100, "One in this many requests with a kept answer is computed again and compared.", low=1
    )
    audit_every: float | None = _general(
        None,
        "Read weights, tables and cached blocks against their digests, once in this many seconds: see docs/audit.md.",
        low=1e-3,
    )
    receipts_log: str | None = _general(
        None,
        "A file for the receipts of all answers that have one, as JSON lines; 8 files of 64 MiB are kept. It holds "
        "prompts and answers as token ids.",
        path="new file",
    )
