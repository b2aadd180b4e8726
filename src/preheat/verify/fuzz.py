"""``preheat verify --fuzz``: rounds of a random load.

Each request is compared with itself alone, bit for bit. A round is drawn from its seed alone: with ``--random-models``
the model, then limits, requests and their arrivals.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from preheat.backends.base.backend import Backend
from preheat.backends.base.facts import Facts
from preheat.backends.registry import pick_backend
from preheat.configs.speculation import WITHOUT
from preheat.errors import PreheatError
from preheat.model.loader import obstacle
from preheat.model.stated import stated_spec
from preheat.plan.modes import instead
from preheat.pooling.encoders import SPARE
from preheat.settings import Settings
from preheat.verify.compare import PathResult, compare
from preheat.verify.drive import Boot, Engine, at_once, in_groups, trickling
from preheat.verify.prompt_sets import names_of
from preheat.verify.prompts import Prompt, as_pooled, with_settings
from preheat.verify.random_engines import Features, random_features
from preheat.verify.random_models import POSITIONS, write_model

OUTPUTS = 20
LENGTHS = (60, 300, 700)
"""The longest prompt of a round: within a few blocks, across one KV split, across two."""

CACHE_BYTES = 1 << 28

ENCODED = 0.15
"""The share of random models that are encoders."""

FAILURES = 3
"""Failed rounds in a row after which the rounds end."""


@dataclass
class Fuzz:
    """Rounds from ``seed`` on until ``seconds`` are over, at least one.

    ``settings`` name the model and the device; limits, blocks and the prefix cache are drawn.
    """

    boot: Boot
    settings: Settings
    random_models: bool
    seed: int = 0
    clock: Callable[[], float] = time.monotonic

    @cached_property
    def _backend(self) -> Backend:
        return pick_backend(self.settings.device)

    def results(self, seconds: float) -> Iterator[PathResult]:
        """Yield each round's result.

        A round with a failing engine has no identical prompts and the error as its note. After ``FAILURES`` such rounds
        in a row the device is taken for lost, and the rounds end.
        """
        end, seed, failures = self.clock() + seconds, self.seed, 0
        while failures < FAILURES and (seed == self.seed or self.clock() < end):
            try:
                yield self.round(seed)
                failures = 0
            except PreheatError as error:
                failures += 1
                yield PathResult(f"seed {seed}", prompts=1, runs=0, identical=0, note=f"an engine failed: {error}")
            seed += 1

    def round(self, seed: int) -> PathResult:
        """Run the round of ``seed``. Raises PreheatError if an engine fails."""
        draw = random.Random(seed)
        gc.collect()  # the engines of the round before, and their processes
        with tempfile.TemporaryDirectory() as folder:
            settings, features, note = self._model(Path(folder), draw, seed)
            plain = replace(settings, **WITHOUT, enable_prefix_caching=False, kv_offloading_size=None)
            alone = Engine(self.boot, plain)
            longest = max(min(draw.choice(LENGTHS), alone.ready.max_model_len - OUTPUTS), 1)
            prompts = random_prompts(draw, alone.vocab_size, longest, names_of(alone))
            prompts = as_pooled(prompts, of_tokens=alone.encodes) if alone.pools else prompts
            expected = alone.run(prompts, in_groups([1] * len(prompts)))
            facts, whole = alone.loop.executor.backend.facts, alone.encodes
            del alone
            load = random_limits(draw, longest + OUTPUTS) | (features.loaded if features else {})
            load["enable_prefix_caching"] |= bool(load.get("kv_offloading_size"))
            load = possible(for_whole_texts(load) if whole else load, facts)
            engine = Engine(self.boot, replace(settings, **load))
            names_of(engine)
            runs = [engine.run(prompts, draw.choice((at_once, trickling(draw)))) for _ in range(2)]
        return compare(f"seed {seed}", expected, runs, ", ".join([*note, *_shown(load, Path(folder))]))

    def _model(self, folder: Path, draw: random.Random, seed: int) -> tuple[Settings, Features | None, list[str]]:
        """Return a round's settings, features and draws.

        The settings are without its limits. The features are of the engine under load, the draws of the model. With a
        given model the features are None: the engine does what its settings ask.
        """
        settings = replace(self.settings, skip_warmup=True, boot_check="off", require_invariance=False, on_cold="off")
        if not self.random_models:
            return settings, None, []
        encodes = random.Random(f"embeds {seed}").random() < ENCODED  # by itself: other seeds keep their models
        config = write_model(folder / "model", draw, encodes=encodes)
        while obstacle(replace(settings, model=str(folder / "model"), load_format="dummy"), self._backend):
            config = write_model(folder / "model", draw)  # the device runs no model of this kind
        dtype = draw.choice(("float32", "bfloat16")) if settings.dtype == "auto" else settings.dtype
        threads = settings.num_threads or draw.choice((1, 2))
        model: dict[str, Any] = {"model": str(folder / "model"), "load_format": "dummy", "skip_tokenizer_init": True}
        model |= {"seed": seed, "dtype": dtype, "num_threads": threads, "kv_cache_memory_bytes": CACHE_BYTES}
        stated = stated_spec(replace(settings, **model), folder / "model").max_position_embeddings
        model["max_model_len"] = min(stated, POSITIONS)  # some families stretch their positions unless told otherwise
        features = random_features(draw, folder, config)
        while obstacle(replace(settings, **model, **features.both), self._backend):
            features = random_features(draw, folder, config)  # the device has no such cache for this model, say
        if (folder / "draft").exists() and (other := instead(self._backend.facts, settings)) is not None:
            features.both["execution_mode"] = other  # a draft that needs the other mode takes its target with it
        shown = [config["architectures"][0], *_sizes(config), dtype, f"{threads} threads"]
        shown += [*["int4"] * ("quantization_config" in config), *_shown(features.both, folder)]
        return replace(settings, **model, **features.both), features, shown


def _sizes(config: dict[str, Any]) -> list[str]:
    """Return the heads and the window of a model as text."""
    if "head_dim" not in config:
        own = "hidden_size" in config
        width, heads = (
            (config["hidden_size"], config["num_attention_heads"]) if own else (config["dim"], config["n_heads"])
        )
        return [f"{heads} heads of {width // heads}", f"window {config.get('local_attention')}"]
    heads = f"{config['num_attention_heads']}/{config['num_key_value_heads']} heads of {config['head_dim']}"
    return [heads, f"window {config.get('sliding_window')}"]


def for_whole_texts(load: dict[str, Any]) -> dict[str, Any]:
    """Return limits with room for the longest text of an encoder in a step, and in the blocks."""
    length, size = load["max_model_len"], load["block_size"]
    tokens = max(load["max_num_batched_tokens"], length)
    blocks = max(load["num_gpu_blocks_override"], -(-(length + SPARE) // size) + 1)
    return load | {"max_num_batched_tokens": tokens, "num_gpu_blocks_override": blocks}


def possible(load: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """Drop options that a device of ``facts`` rejects.

    Ranks are dropped where it has too few cards; other draws stay.
    """
    refused = set(facts.rejected)
    if not facts.on_host and torch.accelerator.device_count() < load.get("tensor_parallel_size", 1):
        refused.add("tensor_parallel_size")
    return {name: value for name, value in load.items() if name not in refused}


def _shown(options: dict[str, Any], folder: Path) -> list[str]:
    """Return ``options`` as text.

    Files are named within ``folder``, which differs in another run.
    """
    return [f"{name}={value}".replace(f"{folder}/", "") for name, value in options.items()]


def random_prompts(draw: random.Random, vocab_size: int, longest: int, names: Sequence[str]) -> list[Prompt]:
    """Return 5 to 25 prompts of up to ``longest`` tokens.

    Some have the beginning of an earlier one. Each has one of the adapters ``names`` or, as often, none.
    """
    found: list[list[int]] = []
    for _ in range(draw.choice((5, 12, 25))):
        length = 1 + int((longest - 1) * draw.random() ** 1.5)
        shared = draw.choice(found)[: draw.randrange(length)] if found and draw.random() < 0.3 else []
        found.append([*shared, *(draw.randrange(vocab_size) for _ in range(length - len(shared)))])
    prompts = with_settings(found, OUTPUTS)
    return [replace(each, lora_name=draw.choice(("", draw.choice(names)))) for each in prompts] if names else prompts


def random_limits(draw: random.Random, length: int) -> dict[str, Any]:
    """Return limits for sequences of ``length`` tokens.

    They are mostly small steps and few blocks, so that requests are chunked, preempted and moved.
    """
    seqs = draw.choice((3, 8, 20, 40))
    contiguous = draw.random() < 0.2
    block_size = 256 if contiguous else draw.choice((16, 32, 64, 128))
    return {
        "max_model_len": length,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(2 * seqs, draw.choice((64, 130, 331, 600, 1024))),
        "block_size": block_size,
        "contiguous_pa": contiguous,
        "num_gpu_blocks_override": -(-length // block_size) + 1 + draw.choice((0, 3, 40)),
        "enable_prefix_caching": draw.random() < 0.8,
        "enable_chunked_prefill": True,
        "defrag_threshold": draw.choice((0, 4, 32)),
        "kv_cache_memory_bytes": None,
    }
