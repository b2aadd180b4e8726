"""The commands before serving: plan, warm, tune, calibrate, buckets, doctor and collect-env."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from preheat.cli.common import ENGINE_OPTIONS, FAILURE, check_folder, load
from preheat.cli.prompts import given_prompts
from preheat.core import Ready
from preheat.errors import PreheatError
from preheat.plan import commands as plan_commands
from preheat.settings import OPTIONS
from preheat.transport import InlineTransport
from preheat.utils.files import shown, write_output
from preheat.utils.log import printable, set_up_logging
from preheat.verify.given import check_ids, check_texts

CALIBRATE_OPTIONS = [
    opt for opt in ENGINE_OPTIONS if opt.group in ("Model", "General") or opt.name in (
        "device", "seed", "num_threads", "cache_dir", "weights_load_device", "gpu_memory_utilization", "block_size",
        "quant_config",
    )
]  # fmt: skip

TUNE_OPTIONS = (
    "model revision dtype quantization tensor_parallel_size enable_expert_parallel max_num_seqs max_num_batched_tokens "
    "cache_dir log_level"
).split()


def run_plan(values: dict[str, Any]) -> int:
    """Print the warm-up plan; return the exit status."""
    as_json, traffic = values.pop("json"), values.pop("from_traffic")
    settings = load(values)
    if traffic is not None:
        from preheat.warmup.traffic import solved

        print(printable(solved(Path(traffic))))
        return 0
    from preheat.startup import planned

    print(printable(planned(settings, as_json=as_json)))
    return 0


def run_doctor(values: dict[str, Any]) -> int:
    """Print the findings on this machine; return the exit status."""
    as_json = values.pop("json")
    from preheat.extras import doctor

    found = list(doctor.findings(load(values)))
    print(json.dumps([finding._asdict() for finding in found], indent=2) if as_json else printable(doctor.table(found)))
    return FAILURE if any(finding.verdict == "fail" for finding in found) else 0


def run_collect_env(values: dict[str, Any]) -> int:
    """Print the versions and hardware of this machine; return the exit status."""
    from preheat.extras import doctor

    print(json.dumps(doctor.collected(load(values)), indent=2))
    return 0


def run_buckets(values: dict[str, Any]) -> int:
    """Print the bucket sizes of one dimension; return the exit status."""
    print(plan_commands.buckets(argparse.Namespace(**values)))
    return 0


def run_warm(values: dict[str, Any]) -> int:
    """Boot, warm up and print the record; return the exit status."""
    as_json, html = values.pop("json"), values.pop("html")
    settings = load(values)
    check_folder("--html", html)
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
            write_output(html, render(record))
        except OSError as error:
            raise PreheatError(f"cannot write {shown(html)}: {error.strerror}") from None
    return FAILURE if record.states["failed"] else 0


def run_tune(values: dict[str, Any]) -> int:
    """Measure the fastest kernels of this GPU; return the exit status."""
    output, seconds = values.pop("output"), values.pop("seconds")
    settings = load(values)
    set_up_logging(settings)
    from preheat.warmup.tune import tune_model

    print(tune_model(settings, output, seconds))
    return 0


def run_calibrate(values: dict[str, Any]) -> int:
    """Measure a model's ranges for FP8; return the exit status."""
    output, path = values.pop("output"), values.pop("prompts")
    config = values.pop("quant_config", None) or os.environ.get(OPTIONS["quant_config"].env_names[1])
    settings = load({**values, **({"quantization": "inc", "quant_config": config} if config else {})})
    prompts = list(given_prompts([], path)) if path else None
    if prompts is not None:
        check_texts(settings, prompts)
        check_ids(settings, prompts, 1)
    set_up_logging(settings)
    from preheat.extras.calibration import calibrate

    print(calibrate(settings, output, prompts))
    return 0
