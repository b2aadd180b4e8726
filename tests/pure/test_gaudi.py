"""Gaudi without torch: each documented variable acts or is refused.

The card is found, and the stack is named.
"""

from __future__ import annotations

import re
import sys

import pytest

from preheat.backends.base.facts import NO_BRIDGE
from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.hpu import detect
from preheat.backends.hpu import environment as hpu_environment
from preheat.backends.hpu.facts import FACTS as HPU
from preheat.backends.hpu.facts import SIMULATED
from preheat.backends.registry import ENVIRONMENTS, facts_of
from preheat.errors import SettingsError
from preheat.limits import resolve_limits
from preheat.options import environment
from preheat.plan.buckets import Bucket
from preheat.plan.budget import capture_order, graph_shares, split_memory
from preheat.plan.modes import check_options, resolve, with_defaults
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.settings import OPTIONS, Settings
from preheat.warmup.detail import detail_level
from preheat.warmup.graphs import capture, divide_memory
from preheat.warmup.record import Record
from tests.meta.source import ROOT
from tests.pure import test_graphs as logged

RANGES = {"PROMPT_BS": "2 3 5", "PROMPT_SEQ": "256 384 640", "DECODE_BS": "2 3 5", "DECODE_BLOCK": "8 24 40"}
BUCKETS = {
    f"VLLM_{dimension}_BUCKET_{part}": value
    for dimension, values in RANGES.items()
    for part, value in zip(("MIN", "STEP", "MAX"), values.split(), strict=True)
}  # fmt: skip
LENGTHS = {
    f"VLLM_DECODE_SEQ_BUCKET_{part}": value for part, value in {"MIN": "256", "STEP": "384", "MAX": "640"}.items()
}

PLANNED = BUCKETS | LENGTHS
"""Variables of bucket ranges; each of them moves the plan."""

KEPT = {
    "VLLM_PROFILER_ENABLED": ("true", "tests/cpu/test_hpu.py"),
    "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION": ("true", "tests/cpu/test_hpu.py"),
    "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL": ("true", "tests/cpu/test_step_log.py"),
    "VLLM_HPU_LOG_STEP_CPU_FALLBACKS": ("true", "tests/cpu/test_step_log.py"),
    "VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL": ("true", "tests/cpu/test_hpu.py"),
    "VLLM_SKIP_WARMUP": ("true", "tests/cpu/test_hpu.py"),
    "VLLM_HANDLE_TOPK_DUPLICATES": ("true", "tests/cpu/test_hpu.py"),
    "VLLM_CONFIG_HIDDEN_LAYERS": ("2", "tests/cpu/test_hpu.py"),
    "PT_HPU_ENABLE_LAZY_COLLECTIVES": ("true", "tests/cpu/test_hpu_features.py"),
    "PT_HPUGRAPH_DISABLE_TENSOR_CACHE": ("false", "tests/cpu/test_hpu.py"),
    "PT_HPU_METRICS_GC_DETAILS": ("1", "tests/cpu/test_hpu.py"),
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": ("600", "tests/api/test_faults.py"),
    "VLLM_RPC_TIMEOUT": ("600000", "tests/api/test_faults.py"),
}
"""Variables whose effect needs an engine: the value, and the test that sees it."""

HERE = {"PT_HPU_LAZY_MODE", "VLLM_GRAPH_RESERVED_MEM", "VLLM_GRAPH_PROMPT_RATIO", "VLLM_GRAPH_PROMPT_STRATEGY",
        "VLLM_GRAPH_DECODE_STRATEGY", "QUANT_CONFIG"}  # fmt: skip
"""Variables that tests below ask for."""


@pytest.fixture(autouse=True)
def said(caplog):
    environment.warn.cache_clear()
    return caplog


def planned(env, facts=HPU):
    settings = Settings.load({"max_num_seqs": 8, "max_num_batched_tokens": 1024}, env)
    check_options(settings, facts)
    settings = with_defaults(settings, facts)
    return make_plan(resolve_limits(settings, 8192, 1 << 16), PlanOptions.of(settings, facts))


def test_every_variable_of_the_documentation_is_here():
    """Every variable in docs/gaudi.md is in exactly one of the lists."""
    lists = [set(PLANNED), set(KEPT), HERE]
    assert sum(map(len, lists)) == len(set.union(*lists))
    text = (ROOT / "docs" / "gaudi.md").read_text()
    named = {f"VLLM_{a}_{b}_BUCKET_{c}" for a, b in (("PROMPT", "BS"), ("PROMPT", "SEQ"), ("DECODE", "BS"),
             ("DECODE", "BLOCK"), ("DECODE", "SEQ")) for c in ("MIN", "STEP", "MAX")}  # fmt: skip
    named |= set(re.findall(r"^\| `((?:VLLM|PT_HPU|PT_HPUGRAPH|QUANT)_[A-Z_]+)`", text, re.MULTILINE))
    assert set.union(*lists) <= named
    known = {name for opt in OPTIONS.values() for name in opt.env_names}
    assert set.union(*lists) <= known


@pytest.mark.parametrize("name", PLANNED)
def test_a_range_of_buckets_moves_the_plan(name):
    phase = name.split("_")[1].lower()
    usual, moved = (planned(env).dispatcher.phases[phase] for env in ({}, {name: PLANNED[name]}))
    assert usual.buckets != moved.buckets


@pytest.mark.parametrize("name", KEPT)
def test_a_variable_reaches_its_option(name):
    value, place = KEPT[name]
    (option,) = (opt for opt in OPTIONS.values() if name in opt.env_names)
    assert getattr(Settings.load(env={name: value}), option.name) not in (option.default, None) or name in (
        "VLLM_ENGINE_ITERATION_TIMEOUT_S",  # 600 is the default here
    )
    check_options(Settings.load(env={name: value}), HPU)
    text = (ROOT / place).read_text()
    assert name in text or option.name.removesuffix("_all") in text


def test_graphs_divide_memory_as_their_variables_say():
    def division(env):
        settings = Settings.load(env=env)
        split = split_memory(1 << 36, 1 << 24, reserved=settings.graph_reserved_mem)
        buckets = [Bucket.prompt(4, 128), Bucket.prompt(1, 256), Bucket.prompt(2, 128)]
        orders = [capture_order(buckets, s) for s in (settings.graph_prompt_strategy, settings.graph_decode_strategy)]
        return split.graphs, graph_shares(1000, "prompt", "decode", settings.graph_prompt_ratio), *orders

    usual = division({})
    assert usual[1]["prompt"] == 300
    assert division({"VLLM_GRAPH_RESERVED_MEM": "0.4"})[0] == pytest.approx(4 * usual[0], rel=1e-6)
    assert division({"VLLM_GRAPH_PROMPT_RATIO": "0.2"})[1] == {"prompt": 200, "decode": 800}
    assert division({"VLLM_GRAPH_PROMPT_STRATEGY": "max_bs"})[2] == usual[3]
    assert division({"VLLM_GRAPH_DECODE_STRATEGY": "min_tokens"})[3] == usual[2] != usual[3]


def test_the_graphs_of_both_strategies_in_the_documented_run():
    """Swapped strategies, in the memory of the log: `max_bs` prompts leave out other graphs than `min_tokens`."""

    def captured(prompt, decode):
        settings = Settings(
            gpu_memory_utilization=0.5, graph_reserved_mem=0.4, graph_prompt_strategy=prompt,
            graph_decode_strategy=decode,
        )  # fmt: skip
        plan, device = make_plan(logged.LIMITS, logged.LOGGED, logged.COSTS), logged.Logged(round(55.43 * logged.GIB))
        pool = divide_memory(settings, "graphs", logged.FREE, logged.BLOCK).graph_pool(device.now)
        record = Record.of(plan)
        done = capture(plan, record, settings, pool=pool, capture_one=device.capture_one, free=device.free)
        return {phase: [bucket.dims for bucket in found.captured] for phase, found in done.items()}

    usual, other = captured("min_tokens", "max_bs"), captured("max_bs", "min_tokens")
    assert usual["prompt"] == [
        (1, 128), (2, 128), (1, 256), (1, 384), (4, 128), (2, 256), (1, 512), (1, 640), (2, 384), (1, 768), (1, 896),
        (4, 256), (2, 512), (1, 1024), (2, 640),
    ]  # fmt: skip
    assert usual["decode"] == [(rows, length) for rows in (4, 2, 1) for length in range(128, 2049, 128)]
    assert other["prompt"][:3] == [(4, 128), (4, 256), (4, 384)]
    assert sorted(other["prompt"]) != sorted(usual["prompt"])
    assert other["decode"] == sorted(usual["decode"], key=lambda pair: (pair[0] * pair[1], pair[1], pair[0]))


@pytest.mark.parametrize(
    ("env", "eager", "mode"),
    [({"PT_HPU_LAZY_MODE": "0"}, False, "compile"), ({"PT_HPU_LAZY_MODE": "0"}, True, "eager"),
     ({"PT_HPU_LAZY_MODE": "1"}, False, "graphs"), ({"PT_HPU_LAZY_MODE": "1"}, True, "lazy"),
     ({}, False, "graphs"), ({}, True, "lazy")],
)  # fmt: skip
def test_four_modes_by_the_table(env, eager, mode):
    assert resolve(HPU, Settings.load({"enforce_eager": eager}, env)) == mode


def test_the_file_of_inc_is_served_with_inc_and_warned_about_without(said):
    """INC's file is used only with quantization inc.

    tests/cpu/test_hpu_features.py tests the serving.
    """
    assert Settings.load({"quantization": "inc"}, {"QUANT_CONFIG": "x.json"}).quant_config == "x.json"
    assert not said.messages
    assert Settings.load(env={"QUANT_CONFIG": "x.json"}).quant_config is None
    assert said.messages == ["QUANT_CONFIG has no effect: quantization is not inc"]


def test_defaults_equal_the_documentation_of_gaudi():
    settings = with_defaults(Settings(), HPU)
    assert (settings.bucketing_policy, settings.block_size, settings.config_hidden_layers) == ("split", 128, 1)
    assert (settings.graph_reserved_mem, settings.graph_prompt_ratio) == (0.1, 0.3)
    assert (settings.graph_prompt_strategy, settings.graph_decode_strategy) == ("min_tokens", "max_bs")
    plan = planned({})
    ranges = {
        (phase.phase, axis.label): (axis.low, axis.step, axis.high) for phase in plan.phases for axis in phase.axes
    }
    assert ranges == {
        ("prompt", "bs"): (1, 8, 8), ("prompt", "seq"): (128, 128, 1024), ("decode", "bs"): (1, 8, 8),
        ("decode", "block"): (128, 128, 512),
    }  # fmt: skip
    assert with_defaults(Settings(), CPU).bucketing_policy == "unified"
    assert detail_level(Settings(), HPU) == 20  # a line for each bucket


def test_options_of_the_bridge_have_no_effect_elsewhere_and_say_so(said):
    check_options(Settings.load(env={"PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"}), CPU)
    assert said.messages == ["PT_HPU_ENABLE_LAZY_COLLECTIVES has no effect: it is only for Gaudi"]
    assert set(NO_BRIDGE) == set(CPU.ignored)
    with pytest.raises(SettingsError, match="the fake device is a Gaudi"):
        check_options(Settings.load(env={"VLLM_USE_FAKE_HPU": "1"}), CPU)


def test_a_card_is_detected_by_software_and_device(monkeypatch, tmp_path):
    """A card is found by both software and device, without torch.

    A fake never is.
    """
    node, real, fake = tmp_path / "accel0", tmp_path / "real", tmp_path / "fake"
    for folder in (real, fake):
        (folder / "habana_frameworks").mkdir(parents=True)
        (folder / "habana_frameworks" / "__init__.py").write_text("")
    (fake / "habana_frameworks" / detect.FAKE_ONLY).write_text("")
    for name in [name for name in sys.modules if name.startswith("habana_frameworks")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(detect, "NODES", (str(tmp_path / "accel[0-9]*"),))
    assert "is not installed" in detect.obstacle()
    monkeypatch.syspath_prepend(str(real))
    assert not detect.detected()
    assert "there is no Gaudi" in detect.obstacle()
    node.touch()
    assert detect.detected()
    assert detect.obstacle() is None
    assert facts_of("auto") is HPU
    monkeypatch.syspath_prepend(str(fake))
    assert detect.is_simulated()
    assert not detect.detected()
    assert facts_of("auto") is CPU
    assert SIMULATED.simulated and not HPU.simulated


def test_the_doctor_names_the_stack_and_the_remedy(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith(detect.FRAMEWORKS)]:  # another test's fake
        monkeypatch.delitem(sys.modules, name)
    (nothing,) = hpu_environment.findings()
    assert (nothing.what, nothing.verdict) == ("Gaudi", "note")
    (tmp_path / "accel0").touch()
    monkeypatch.setattr(detect, "NODES", (str(tmp_path / "accel[0-9]*"),))
    found = {finding.what: finding for finding in hpu_environment.findings()}
    assert [*found] == [
        "Gaudi devices",
        "hl-smi",
        *hpu_environment.SYSTEM,
        *hpu_environment.PYTHON,
        hpu_environment.FP8,
    ]
    assert found["Gaudi devices"] == ("Gaudi devices", str(tmp_path / "accel0"), "ok", "")
    assert found["habana-torch-plugin"].verdict == "fail"
    assert all(finding.advice for finding in found.values() if finding.verdict != "ok")
    monkeypatch.setattr(hpu_environment, "version_of", lambda name: "1.19.0")
    assert {f.what: f for f in hpu_environment.findings()}["habana-torch-plugin"].verdict == "ok"
    assert ENVIRONMENTS[HPU.name] is hpu_environment.findings
