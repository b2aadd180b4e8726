"""The command of the suite.

It picks the benchmarks, their processes and their time. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import arithmetic, table
from benchmarks.common.process import flags
from benchmarks.common.report import Clock, PartReport, read_parts
from benchmarks.common.shapes import (
    CHOICES,
    FORMATS,
    FULL,
    TINY,
    WEIGHTS,
    Sizes,
    engine_options,
    long_length,
    named,
    vocabulary,
    with_weights,
)
from benchmarks.registry import ALL, SUITE, listing
from benchmarks.suite.serve import serve
from benchmarks.suite.startup import caches, startup
from preheat.errors import PreheatError, SettingsError
from preheat.model.files import BUNDLED
from preheat.options.options import add_flags
from preheat.settings import OPTIONS
from preheat.utils.text import did_you_mean

TOGETHER = (("startup",), ("first", "latency", "throughput"), ("serve",), ("long",))
"""Benchmarks that share a process, in the order in which they run."""

OWN = ("parts", "shape", "format", "weights", "output", "seconds", "tiny", "checkpoint", "caches")
"""The arguments that are not options of the engine."""


def arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``OWN``, and the given options of the engine."""
    parser = argparse.ArgumentParser(
        "preheat bench",
        description="Measure this engine, and print the figures beside vLLM's.",
        epilog=listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("parts", nargs="+", metavar="NAME", choices=(*SUITE, ALL), help="as listed below")
    parser.add_argument("--shape", choices=CHOICES, default="llama-3.1-8b", help="sizes of the model [%(default)s]")
    parser.add_argument("--format", choices=FORMATS, help="of the weights [the shape's own]")
    parser.add_argument("--weights", choices=WEIGHTS, default="normal", help="dummies; vLLM's are narrow [%(default)s]")
    parser.add_argument("--output", metavar="DIR", default=".", help="where SHAPE_FORMAT.json is written [%(default)s]")
    parser.add_argument("--seconds", type=float, default=3600.0, help="what does not fit is left out [%(default)g]")
    parser.add_argument("--tiny", action="store_true", help="a smoke test, whose figures mean nothing")
    parser.add_argument("--checkpoint", action="store_true", help="startup from files of the right size, written first")
    parser.add_argument("--caches", metavar="DIR", help="empty folder for what startup's boots keep [temporary]")
    engine = [opt for opt in OPTIONS.values() if opt.group != "Server"]
    add_flags(parser, engine)
    values, unknown = parser.parse_known_args(words)
    if unknown:
        known = [f"--{name}" for name in OWN[1:]] + [opt.flag for opt in engine]
        parser.error(f"unknown argument {unknown[0]}{did_you_mean(unknown[0].split('=')[0], known)}")
    return vars(values)


def main(words: Sequence[str]) -> int:
    """Run the benchmarks of ``words``; return 1 if one failed.

    All figures of the file are printed beside vLLM's. Raises SettingsError for arguments that do not go together.
    """
    values = arguments(words)
    own = argparse.Namespace(**{name: values.pop(name) for name in OWN})
    own.name = named(own.shape, own.format, values, own.weights)
    if own.shape == BUNDLED and own.format not in {None, "fp8"}:
        raise SettingsError(f"--format {own.format} is a checkpoint's: take a shape that is not the bundled model's")
    if "model" in values:
        raise SettingsError("bench takes --shape in place of --model", param="model")
    if own.weights != "normal" and (alone := _refusal_of_weights(own, values)) is not None:
        raise SettingsError(f"--weights {own.weights} is for {alone}")
    if own.checkpoint and (own.parts != ["startup"] or own.shape == BUNDLED):
        raise SettingsError("--checkpoint is for startup alone, and not for the bundled model: drop it")
    if own.caches and Path(own.caches).is_dir() and any(Path(own.caches).iterdir()):
        raise SettingsError(f"--caches {own.caches}: startup begins with an empty folder; name another")
    clock = Clock(own.seconds)
    wanted = set(SUITE if ALL in own.parts else own.parts)
    groups = [tuple(part for part in group if part in wanted) for group in TOGETHER]
    groups = [group for group in groups if group]
    if len(groups) == 1:
        _measure(groups[0], own, values, clock)
        failed = False
    else:
        failed = _spread(groups, own, flags(values), clock)
    parts = read_parts(_path(own))
    print(table.render(own.name, parts) + arithmetic.render(parts))
    return int(failed)


def _refusal_of_weights(own: argparse.Namespace, values: dict[str, Any]) -> str | None:
    """Return the runs that dummy weights other than normal ones are for, or None if this is one of them."""
    if own.shape == BUNDLED or own.checkpoint:
        return "models without a checkpoint: drop it, or take another --shape"
    if int(values.get("tensor_parallel_size", 1)) > 1:
        return "one rank: drop --tensor-parallel-size"
    if not set(own.parts) <= {"first", "latency", "throughput", "long"}:
        return "first, latency, throughput and long, whose engine runs in this process"
    return None


def _spread(groups: list[tuple[str, ...]], own: argparse.Namespace, engine: list[str], clock: Clock) -> bool:
    """Run each group in a process of its own.

    It is ended when the time is over. Returns whether one failed. All of them keep their compiled code in one folder.
    """
    failed = False
    with _folder(own.caches) as folder:
        shared = [f"--shape={own.shape}", f"--output={own.output}", *(["--tiny"] if own.tiny else []), *engine]
        shared += [f"--format={own.format}"] if own.format else []
        shared += [f"--weights={own.weights}"]
        for group in groups:
            command = [sys.executable, "-m", "benchmarks", *group, *shared]
            command += [f"--seconds={max(clock.left - 5, 0):.0f}"]
            command += [f"--caches={folder}"] if group == ("startup",) else []
            try:
                done = subprocess.run(
                    command, env=caches(folder), timeout=max(clock.left, 1), check=False, stdout=subprocess.DEVNULL
                )
                failed |= done.returncode != 0
            except subprocess.TimeoutExpired:
                failed = True
    return failed


@contextlib.contextmanager
def _folder(given: str | None) -> Iterator[Path]:
    """Yield ``given``, or a temporary folder."""
    if given is not None:
        yield Path(given)
        return
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as folder:
        yield Path(folder)


def _measure(group: tuple[str, ...], own: argparse.Namespace, given: dict[str, Any], clock: Clock) -> None:
    sizes = TINY if own.tiny else FULL
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as folder:
        options = engine_options(own.shape, given, Path(folder), tiny=own.tiny, number_format=own.format)
        if group == ("startup",):
            name = "startup from files" if own.checkpoint else "startup"
            options = with_weights(options) if own.checkpoint else options
            with _folder(own.caches) as kept:
                startup(_report(name, own, options), options, kept, clock)
        elif group == ("serve",):
            serve(_report("serve", own, options), options, sizes, vocabulary(own.shape, tiny=own.tiny), clock)
        else:
            if group == ("long",):
                options |= {"max_model_len": long_length(sizes)}
            _offline(group, own, options, sizes, clock)


def _offline(
    group: tuple[str, ...], own: argparse.Namespace, options: dict[str, Any], sizes: Sizes, clock: Clock
) -> None:
    from benchmarks.common.dummies import dummy_weights
    from benchmarks.suite.offline import Offline
    from preheat.llm import LLM

    with dummy_weights(own.weights):
        llm = LLM(**options)
    offline = Offline(llm, sizes, vocabulary(own.shape, tiny=own.tiny), clock)
    for part in group:
        getattr(offline, part)(_report(part, own, options))


def _path(own: argparse.Namespace) -> Path:
    return Path(own.output) / f"{own.name}.json"


def _report(part: str, own: argparse.Namespace, options: dict[str, Any]) -> PartReport:
    shown = {name: value for name, value in options.items() if name != "model"}
    try:
        return PartReport(_path(own), part, shown)
    except OSError as error:
        raise PreheatError(f"cannot write {_path(own)}: {error.strerror}") from None
