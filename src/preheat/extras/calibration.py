"""``preheat calibrate``: measures a model's greatest magnitudes, for Intel Neural Compressor's (INC's) files.

It measures the tensors that an FP8 engine rounds: the inputs of every linear layer, its weights, and the keys and
values in the cache. It runs some prompts through a plain engine, observes the linear layers, and reads the cache after
every step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.layers import Linear
from preheat.core import SamplingParams
from preheat.errors import ModelError, PreheatError, SettingsError
from preheat.execution.executor import Executor
from preheat.execution.input_batch import InputBatch
from preheat.execution.launched import LaunchedStep
from preheat.llm import LLM
from preheat.model.dummy_tensors import DummyTensors
from preheat.model.files import find_model
from preheat.model.files import read_config as read_model
from preheat.model.inc import cache_modules, is_blocked, linear_modules
from preheat.model.inc_files import CACHE_TYPE, IncConfig, read_config
from preheat.model.kv_scales import attention_module
from preheat.model.layers import DecoderLayer, DenseMlp, MoeMlp
from preheat.model.mlp_specs import MoeSpec
from preheat.model.reading import TensorSource
from preheat.model.sources import SafetensorsFiles
from preheat.model.specs import ModelSpec
from preheat.model.tensor_specs import LinearSpec
from preheat.model.weights import Weights
from preheat.schedule.blocks import BlockPool
from preheat.settings import Settings
from preheat.utils.files import output_file, write_output

OUTPUT_TOKENS = 32
"""Tokens generated for each prompt."""

SEQUENCES = 8

SAMPLES = (
    "abc", "argparse", "bisect", "calendar", "configparser", "csv", "dataclasses", "datetime", "decimal", "difflib",
    "enum", "fractions", "functools", "gettext", "heapq", "inspect", "ipaddress", "locale", "pathlib", "queue",
    "random", "secrets", "statistics", "string", "tempfile", "textwrap", "threading", "turtle", "types", "uuid",
)  # fmt: skip
SAMPLE_CHARACTERS = 1_500

MEASURE, QUANT, STATS = "maxabs_measure.json", "maxabs_quant.json", "inc_output"
RANK = "_hooks_maxabs_0_1"
"""Suffix of INC's file names for rank 0 of 1."""


def calibrate(settings: Settings, output: str | None, prompts: Sequence[str | list[int]] | None) -> str:
    """Measure the model of ``settings`` over ``prompts``, and write INC's files.

    Return advice for the next step.

    The default prompts are samples of Python's own library. The files go to the folder ``output``, or to the paths in a
    ``quant_config`` of mode MEASURE. The allow and block lists of a ``quant_config`` apply. Raises SettingsError
    for a cache dtype other than auto, for a ``quant_config`` of another mode, or if no output folder is given;
    ModelError for a quantized checkpoint.
    """
    config = read_config(settings.quant_config) if settings.quant_config else None
    if config is not None and config.mode != "MEASURE":
        raise SettingsError(
            f"{config.path} has mode {config.mode}, and calibrate needs mode MEASURE: change it, or leave "
            "quant_config out",
            param="quant_config",
        )
    if output is None and config is None:
        raise SettingsError("calibrate needs --output DIR, or a QUANT_CONFIG that names dump_stats_path")
    if settings.kv_cache_dtype != "auto":
        raise SettingsError(
            "calibrate measures the plain model: leave --kv-cache-dtype at auto", param="kv_cache_dtype"
        )
    _require_unquantized(settings)
    folder = Path(output) if output is not None else None
    config = config or IncConfig(path=Path(QUANT), mode="MEASURE", method="maxabs_hw", stats=Path(STATS))
    stats = (folder / STATS if folder else config.stats).absolute()
    stats.parent.mkdir(parents=True, exist_ok=True)  # before the work, as it may fail
    found = measure(settings, config, samples() if prompts is None else prompts)
    write(stats, found)
    written = stats.parent if folder is None else folder
    experts = any(isinstance(layer.mlp, MoeSpec) for layer in found.spec.layers)
    quant = write_configs(written, stats, config, experts=experts)
    return (
        f"{len(found.nodes)} modules were measured, see {stats}{RANK}.json. To serve with these ranges:\n"
        f"QUANT_CONFIG={quant} preheat serve {settings.model} --quantization inc --kv-cache-dtype fp8_inc"
    )


def _require_unquantized(settings: Settings) -> None:
    """Raise ModelError for a quantized checkpoint: its codes, read without their scales, would give wrong ranges."""
    stored = read_model(find_model(settings, with_weights=False), settings.hf_overrides).get("quantization_config")
    if stored is not None:
        method = stored.get("quant_method", "unknown") if isinstance(stored, dict) else stored
        raise ModelError(
            f"the checkpoint {settings.model} is quantized already ({method}), and calibrate measures only "
            "checkpoints that are not: give the checkpoint that it was made from",
            param="model",
        )


def samples() -> list[str]:
    """Return beginnings of files of Python's own library.

    They are prose and code that every machine has.
    """
    library = Path(os.__file__).parent
    found = [path.read_text(encoding="utf-8") for name in SAMPLES if (path := library / f"{name}.py").is_file()]
    if not found:
        raise PreheatError("Python's library has no source files here: give --prompts FILE")
    return [text[:SAMPLE_CHARACTERS] for text in found]


@dataclass
class Ranges:
    """Greatest magnitudes of the inputs and the weights of each module."""

    spec: ModelSpec
    inputs: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def see(self, name: str, x: Tensor) -> None:
        """Update the greatest input magnitude of module ``name`` by ``x`` (perhaps empty)."""
        if x.numel():
            most = x.detach().abs().amax().float()
            self.inputs[name] = torch.maximum(self.inputs[name], most) if name in self.inputs else most

    @property
    def nodes(self) -> dict[str, dict[str, Any]]:
        """The magnitudes by module, in INC's form.

        INC has one list for the tensor and one for its channels.
        """
        found = {}
        for name, most in sorted(self.inputs.items()):
            node: dict[str, Any] = {"inputs": [[[most.item()]]]}
            if name in self.weights:
                node["params"] = {"weight": [[self.weights[name]]]}
            found[name] = node
        return found


def measure(settings: Settings, config: IncConfig, prompts: Sequence[str | list[int]]) -> Ranges:
    """Run ``prompts`` through a plain engine, and return the greatest magnitudes of its tensors."""
    llm = LLM(**_plain(settings))
    executor, scheduler = llm.loop.executor, llm.loop.scheduler
    found = Ranges(executor.decoder.spec)
    watch = Watch(found, config, executor, scheduler.pool)
    llm.loop.executor.decoder.weights = watch.weights(executor.decoder.weights)
    executor.launch = watch.launch  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    llm.generate(list(prompts), params, use_tqdm=False)
    source = _source(settings, llm)
    for _, module, kind, linear in linear_modules(found.spec):
        if not is_blocked(config, module, kind, linear):
            found.weights[module] = _greatest_weight(linear, source, executor.decoder.dtype)
    return found


def _plain(settings: Settings) -> dict[str, Any]:
    """Return options of an engine without graphs, prefix cache and warm-up.

    Such an engine computes each prompt once.
    """
    given = {name: value for name in OPTIONS_KEPT if (value := getattr(settings, name)) is not None}
    return {
        **given, "max_num_seqs": SEQUENCES, "enforce_eager": True, "skip_warmup": True, "boot_check": "off",
        "enable_prefix_caching": False, "on_cold": "off",
        "async_scheduling": False, "disable_hybrid_kv_cache_manager": True,  # each layer has all its keys and values
    }  # fmt: skip


OPTIONS_KEPT = (
    "model", "tokenizer", "revision", "download_dir", "hf_overrides", "load_format", "dtype", "max_model_len", "device",
    "seed", "num_threads", "log_level", "cache_dir", "weights_load_device", "gpu_memory_utilization", "block_size",
    "use_fake_hpu", "hf_token",
)  # fmt: skip
"""Options that decide about the model and the device."""


class Watch:
    """Observer of the linear layers and the cache of ``executor``.

    Magnitudes are collected in ``found``.
    """

    def __init__(self, found: Ranges, config: IncConfig, executor: Executor, pool: BlockPool) -> None:
        self._found, self._config, self._executor, self._pool = found, config, executor, pool
        self._launch, self._tokens = executor.launch, 0
        self._modules = {
            path: module
            for path, module, kind, linear in linear_modules(found.spec)
            if not is_blocked(config, module, kind, linear)
        }
        self._caches = [[names[0] for names in cache_modules(attention_module(each))] for each in found.spec.attentions]

    def launch(self, batch: InputBatch) -> LaunchedStep:
        """Run a step, then observe all blocks in use.

        The blocks of the step's rows are among them.
        """
        self._tokens = batch.schedule.tokens
        step = self._launch(batch)
        used = torch.from_numpy(np.flatnonzero(self._pool.refs)).to(self._executor.backend.device)
        for names, layer in zip(self._caches, self._executor.cache.layers, strict=True):
            blocks = layer.index_select(0, used)
            for kind, name in enumerate(names):
                if self._config.takes(name, CACHE_TYPE):
                    self._found.see(name, blocks[:, kind])
        return step

    def weights(self, weights: Weights) -> Weights:
        """Return ``weights`` with observed linear layers."""
        layers = [self._layer(f"layers.{number}", layer) for number, layer in enumerate(weights.layers)]
        return replace(weights, layers=layers, head=self._linear("head", weights.head))

    def _layer(self, path: str, layer: DecoderLayer) -> DecoderLayer:
        at, mlp = layer.attention, layer.mlp
        attention = replace(at, qkv=self._linear(f"{path}.attention.qkv", at.qkv),
                            o=self._linear(f"{path}.attention.o", at.o))  # fmt: skip
        if isinstance(mlp, MoeMlp):
            shared = mlp.shared
            if shared is not None:
                shared = replace(shared, block=self._dense(f"{path}.mlp.shared.block", shared.block))
            watched: Any = replace(mlp, router=self._linear(f"{path}.mlp.router", mlp.router), shared=shared)
        else:
            watched = self._dense(f"{path}.mlp", mlp)
        return replace(layer, attention=attention, mlp=watched)

    def _dense(self, path: str, mlp: DenseMlp) -> DenseMlp:
        gate_up, down = self._linear(f"{path}.gate_up", mlp.gate_up), self._linear(f"{path}.down", mlp.down)
        return DenseMlp(gate_up, down)

    def _linear(self, path: str, linear: Linear) -> Linear:
        module = self._modules.get(path)
        if module is None:
            return linear

        def watched(x: Tensor, out: Tensor | None = None) -> Tensor:
            self._found.see(module, x[: self._tokens])  # the rest is padding
            return linear(x, out)

        return watched


def _source(settings: Settings, llm: LLM) -> TensorSource:
    """Open the checkpoint once more, on the host."""
    if settings.load_format == "dummy":
        return DummyTensors(settings.seed or 0)
    spec = llm.loop.executor.decoder.spec
    return SafetensorsFiles(find_model(settings, with_weights=True), _copy, spec.renames)


def _copy(source: Tensor, out: Tensor) -> None:
    out.copy_(source)


def _greatest_weight(spec: LinearSpec, source: TensorSource, dtype: torch.dtype) -> float:
    most = 0.0
    for name, outputs in spec.parts:
        weight = torch.empty(outputs, spec.inputs, dtype=dtype)
        source.fill(f"{name}.weight", weight)
        most = max(most, weight.abs().max().item())
    return most


def write(stats: Path, found: Ranges) -> None:
    """Write INC's three files.

    They are the ranges as JSON, the same as a pickle in an .npz, and the list of modules.
    """
    base, nodes = f"{stats}{RANK}", found.nodes
    whole = {"GlobalRank": None, "LocalRank": 0, "Mode": "DynamicRange", "Nodes": nodes}
    _write_json(Path(f"{base}.json"), whole)
    _write_json(Path(f"{base}_mod_list.json"), list(nodes))
    arrays = {name: _arrays(node) for name, node in nodes.items()}
    with output_file(f"{base}.npz") as file:
        np.savez(file, np.array({**whole, "Nodes": arrays}, dtype=object))


def _arrays(node: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"inputs": [np.array(each, np.float32) for each in node["inputs"]]}
    if "params" in node:
        found["params"] = {name: np.array(each, np.float32) for name, each in node["params"].items()}
    return found


def write_configs(folder: Path, stats: Path, config: IncConfig, *, experts: bool) -> Path:
    """Write INC's configurations for measuring and for serving.

    Return the path of the second one.
    """
    lists = {
        "allowlist": {"types": list(config.allow.types), "names": list(config.allow.names)},
        "blocklist": {"types": list(config.block.types), "names": [*config.block.names, *(["experts"] * experts)]},
    }
    shared = {"observer": "maxabs", **lists, "dump_stats_path": str(stats)}
    _write_json(folder / MEASURE, {"method": "HOOKS", "mode": "MEASURE", **shared})
    _write_json(folder / QUANT, {"mode": "QUANTIZE", "scale_method": "maxabs_hw", **shared})
    return folder / QUANT


def _write_json(path: Path, value: object) -> None:
    try:
        write_output(path, json.dumps(value, indent=4))
    except OSError as error:
        raise PreheatError(f"cannot write {path}: {error.strerror}") from None
