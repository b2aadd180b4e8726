"""The choice of a device, and the reasons against the other devices."""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from preheat import LLM, SamplingParams, startup
from preheat.backends.base.facts import Facts
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cuda.device import detect as device
from preheat.backends.cuda.device import early
from preheat.backends.registry import FACTS, pick_backend
from preheat.errors import PreheatError, SettingsError
from preheat.plan.modes import check_options
from preheat.settings import OPTIONS, Settings
from preheat.transport import InlineTransport


def check(settings: Settings, facts: Facts) -> None:
    """Check settings as a boot does, before anything is loaded."""
    check_options(settings, facts)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Fake a machine with a Hopper GPU, as far as is asked before the GPU is used."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    return monkeypatch


def test_a_gpu_is_taken_where_it_can_be_used(gpu):
    assert [pick_backend(asked).facts.name for asked in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((torch.version, "cuda", None), "built without CUDA"),
        ((torch.cuda, "is_available", lambda: False), "sees no NVIDIA GPU"),
        ((torch.cuda, "get_device_capability", lambda *_: (7, 5)), r"compute capability 7\.5.*need 8\.0 or later"),
        ((device, "find_spec", lambda _: None), "Triton is not installed"),
    ],
)
def test_cuda_is_rejected_with_the_reason_and_auto_logs_it(gpu, caplog, tmp_path, change, reason):
    gpu.setattr(*change)
    gpu.setattr(device, "DRIVER", tmp_path / "version")
    (tmp_path / "version").touch()
    with pytest.raises(SettingsError, match=f"{reason}.*--device cpu"):
        pick_backend("cuda")
    with caplog.at_level(logging.INFO):
        assert pick_backend("auto").facts.name == "cpu"
    assert "The GPU is not used, and the model runs on the CPU: " in caplog.text
    caplog.clear()
    assert pick_backend("cpu").facts.name == "cpu"
    gpu.setattr(device, "DRIVER", tmp_path / "none")  # a machine without a GPU says nothing of it
    with caplog.at_level(logging.INFO):
        assert pick_backend("auto").facts.name == "cpu"
    assert caplog.text == ""


def test_the_fingerprint_names_device_and_versions(gpu, tmp_path):
    size = SimpleNamespace(name="Some GPU", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30)
    gpu.setattr(torch.cuda, "get_device_properties", lambda *_: size)
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC 13.2.0")
    gpu.setattr(device, "DRIVER", version)
    named = pick_backend("cuda").fingerprint
    expected = "Some GPU, compute capability 9.0, 132 multiprocessors, 140.0 GiB, driver 580.159.04, CUDA 13.0"
    assert named == expected
    gpu.setattr(device, "DRIVER", tmp_path / "none")
    assert "driver of unknown version" in pick_backend("cuda").fingerprint
    assert torch.backends.cpu.get_cpu_capability() in CpuBackend().fingerprint


def test_cublas_is_set_to_keep_one_accumulator():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k
    try:
        matmul.allow_bf16_reduced_precision_reduction = (True, True)
        device.fix_arithmetic()
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_bf16_reduced_precision_reduction_split_k
        assert not matmul.allow_tf32
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def test_working_ahead_is_for_devices_that_run_on():
    for asked in (None, True, False):
        check(Settings(async_scheduling=asked), FACTS["cuda"])
    assert [FACTS[name].asynchronous for name in ("cpu", "cuda")] == [False, True]
    assert [LLM(max_num_seqs=1, async_scheduling=asked).loop.overlap for asked in (None, False)] == [False, False]
    with pytest.raises(SettingsError, match="leave it unset"):
        LLM(async_scheduling=True)


@pytest.mark.parametrize("fails", [False, True])
def test_processes_of_a_boot_end_before_requests_may_come(monkeypatch, fails):
    order: list[str] = []

    class Transport(InlineTransport):
        def put(self, message):
            order.append(type(message).__name__)
            super().put(message)

    def before_ready():
        order.append("before_ready")
        if fails:
            raise RuntimeError("planned")

    monkeypatch.setattr(startup, "wake", lambda device: order.append(f"wake {device}"))
    monkeypatch.setattr(startup, "rest", lambda device: order.append(f"rest {device}"))
    settings = Settings(device="cpu", max_num_seqs=1)
    with pytest.raises(PreheatError, match="planned") if fails else nullcontext():
        startup.boot_engine(settings, Transport(), before_ready)
    told = [each for each in order if not each.startswith(("Progress", "Booting"))]
    assert told == ["wake cpu", "rest cpu", "before_ready", *["Ready"] * (not fails)]


def test_waking_a_gpu_that_is_not_there_fails_in_silence(monkeypatch):
    monkeypatch.setattr(early, "DRIVER", "libnothing-of-this-name.so.1")
    assert early.build_context() is False


def test_waking_stops_at_the_first_call_that_fails(monkeypatch):
    made = []

    def driver(fails):
        def call(name, result):
            return lambda *_: made.append(name) or result

        names = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")
        return SimpleNamespace(**{name: call(name, int(name == fails)) for name in names})

    for fails, count in (("cuInit", 1), ("cuDeviceGet", 2), (None, 3)):
        monkeypatch.setattr(early.ctypes, "CDLL", lambda _, fails=fails: driver(fails))
        assert early.build_context() is (fails is None)
        assert len(made) == count
        made.clear()


def test_an_engine_with_a_seed_gives_the_same_tokens_again():
    def drawn(**options):
        llm = LLM(max_num_seqs=2, max_model_len=64, **options)
        params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
        return [out.outputs[0].token_ids for out in llm.generate([[300], [300]], params, use_tqdm=False)]

    first, unseeded = drawn(seed=3), drawn()
    assert drawn(seed=3) == first
    assert first[0] != first[1]
    assert len({str(tokens) for tokens in (first, drawn(seed=4), unseeded, drawn())}) == 4


@pytest.mark.parametrize("more", [{"bucketing_policy": "split"}, {"enable_chunked_prefill": False}])
def test_a_bound_on_mixed_steps_is_rejected_where_there_are_none(more):
    with pytest.raises(SettingsError, match="max_num_mixed_tokens limits"):
        check(Settings(max_num_mixed_tokens=64, **more), FACTS["cpu"])
    check(Settings(max_num_mixed_tokens=64), FACTS["cpu"])


@pytest.mark.parametrize(
    ("option", "message"),
    [("contiguous_pa", "reads blocks in place"), ("defrag_with_graphs", "swapped operation by operation")],
)
def test_options_without_use_on_a_gpu_are_rejected(option, message):
    with pytest.raises(SettingsError, match=message) as error:
        check(Settings(block_size=256, **{option: True}), FACTS["cuda"])
    assert error.value.param == option
    check(Settings(block_size=256), FACTS["cuda"])


@pytest.mark.parametrize("name", FACTS)
def test_a_backend_accepts_the_defaults_of_rejected_options(name):
    """A backend accepts the default of each rejected option, and each value that means the same."""
    facts = FACTS[name]
    check(Settings(), facts)
    for option, reason in facts.rejected.items():
        default = OPTIONS[option].default
        other = OPTIONS[option].convert("0" if default else "1", option)
        with pytest.raises(SettingsError, match=re.escape(reason)):
            check(Settings(**{option: other}), facts)
        check(Settings(**{option: default}), facts)


def test_a_processor_without_a_product_of_bfloat16_multiplies_in_float32(monkeypatch):
    """Without bfloat16 products, as on AVX2, each row is rounded once.

    Its bits are the same beside any other rows.
    """
    from preheat.backends.cpu import linear

    monkeypatch.setattr(linear, "product_dtype", lambda dtype: torch.float32)
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(shape, generator=generator).bfloat16() for shape in ((48, 96), (48,), (40, 96)))
    layer = linear.packed_product(weight, bias)
    y = layer(x)
    exact = x.double() @ weight.double().T + bias.double()
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).abs().max() <= exact.abs().max() * 2**-8
    assert all(torch.equal(layer(x[n : n + 1])[0], y[n]) for n in (0, 7, 39))
