"""`preheat doctor` and `preheat collect-env`: each verdict from its cause, no secret shown."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from preheat.backends.cpu import environment as cpu
from preheat.backends.cuda import environment as cuda
from preheat.cli.main import main
from preheat.extras import doctor
from preheat.settings import Settings

H200 = "NVIDIA H200, 9.0, 580.159.04, 142000, 143771, 1980, 1980, 700.00, 700.00, Enabled, Disabled, Default"


def of(found):
    return {finding.what: finding for finding in found}


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return a fake nvidia-smi that answers with the given lines."""

    def answer(*lines: str, status: int = 0) -> dict:
        script = tmp_path / "nvidia-smi"
        script.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {status}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return of(cuda.findings())

    return answer


def test_a_good_gpu_is_ok(smi):
    found = smi(H200, H200)
    assert {finding.verdict for what, finding in found.items() if what.startswith("GPU")} == {"ok"}
    assert found["GPU 1"].found == "NVIDIA H200, compute capability 9.0, driver 580.159.04"


@pytest.mark.parametrize(
    ("old", "new", "what", "verdict"),
    [
        (" 9.0,", " 7.5,", "GPU 0", "fail"),
        (" 9.0,", " 11.0,", "GPU 0", "fail"),
        (" 9.0,", " 8.6,", "GPU 0 kernels", "note"),
        (" 9.0,", " 12.1,", "GPU 0 kernels", "note"),
        (" 142000,", " 121000,", "GPU 0 memory", "note"),
        ("580.159.04", "535.104.05", "GPU 0", "note"),
        ("700.00, 700.00", "500.00, 700.00", "GPU 0 power", "note"),
        ("Enabled, Disabled", "Disabled, Disabled", "GPU 0 ECC", "note"),
        ("Enabled, Disabled", "Enabled, Enabled", "GPU 0 MIG", "note"),
        ("Default", "Prohibited", "GPU 0 compute mode", "fail"),
    ],
)
def test_faults_of_a_gpu_are_named_with_advice(smi, old, new, what, verdict):
    finding = smi(H200.replace(old, new))[what]
    assert finding.verdict == verdict
    assert finding.advice


def test_a_card_says_whether_kernels_ran_and_what_it_lacks(smi, tmp_path, monkeypatch):
    assert smi(H200)["GPU 0 kernels"].found == "kernels ran on this kind of card"
    ampere = smi(H200.replace(" 9.0,", " 8.6,"))["GPU 0 kernels"].found
    assert "never ran" in ampere and "no W8A8" in ampere
    assert "e4m3" not in smi(H200.replace(" 9.0,", " 8.9,"))["GPU 0 kernels"].found
    assert "treated as 12.0" in smi(H200.replace(" 9.0,", " 12.1,"))["GPU 0 kernels"].found
    assert "no matrix unit" in smi(H200.replace(" 9.0,", " 7.5,"))["GPU 0"].advice
    assert "WSL2" not in smi(H200)
    monkeypatch.setattr(cuda, "KERNEL", tmp_path / "osrelease")
    cuda.KERNEL.write_text("5.15.167.4-microsoft-standard-WSL2\n")
    assert smi(H200)["WSL2"].verdict == "note"


def test_a_failing_driver_is_reported(smi):
    found = smi("Failed to initialize NVML: Driver/library version mismatch", status=18)
    assert found["NVIDIA driver"].verdict == "fail"
    assert "version mismatch" in found["NVIDIA driver"].found


def test_a_port_in_use_and_a_folder_that_cannot_be_written(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings(port=taken.getsockname()[1], cache_dir="/proc/preheat")
        found = of(doctor.findings(settings))
    assert found["port"].verdict == "fail" and "--port" in found["port"].advice
    assert found["store"].verdict == "note" and "--cache-dir" in found["store"].advice
    assert of(doctor.findings(Settings(port=0, cache_dir=str(tmp_path / "new"))))["store"].verdict == "ok"


def test_the_weights_of_a_folder_are_hashed_and_nothing_is_fetched(tmp_path):
    found = [of(doctor.findings(Settings(port=0, **each)))["weights"] for each in (
        {}, {"model": "org/absent"}, {"model": str(tmp_path)}, {"load_format": "dummy"})]  # fmt: skip
    assert found[0].found.startswith("bundled, digest ") and found[1].found.startswith("org/absent is no folder here")
    assert [each.verdict for each in found] == ["ok", "ok", "fail", "ok"]


def test_more_threads_than_cores_and_an_old_torch_are_reported(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4000")
    assert of(cpu.findings())["OMP_NUM_THREADS"].verdict == "note"
    for version, verdict in [("2.10.1", "fail"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("3.0.0", "note")]:
        monkeypatch.setattr(doctor, "version_of", lambda _, version=version: version)
        assert doctor._torch().verdict == verdict


def test_llvm_its_processor_and_its_vectors_are_named(monkeypatch):
    targets = pytest.importorskip("preheat.backends.cpu.llvm.targets", reason="llvmlite is not installed")
    found = of(cpu.findings())["LLVM"]
    bits = targets.here().bits
    assert found.found == f"{targets.version()} for {targets.here().processor}, vectors of {bits} bits"
    monkeypatch.setattr(targets, "here", lambda: targets.TARGETS["sse"])
    slow = of(cpu.findings())["LLVM"]
    assert (slow.verdict, slow.found) == (
        "note", f"{targets.version()} for x86-64-v2, vectors of 128 bits, no fused multiply-add"
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "preheat.backends.cpu.llvm", None)
    assert of(cpu.findings())["LLVM"].advice == "execution mode llvm needs llvmlite: pip install llvmlite"


def test_doctors_exit_status_follows_its_verdicts(capsys):
    assert main(["doctor", "--port=0", "--device=cpu"]) == 0
    assert "none failed" in capsys.readouterr().out
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["doctor", f"--port={taken.getsockname()[1]}", "--json"]) == 1
    assert [finding["what"] for finding in json.loads(capsys.readouterr().out) if finding["verdict"] == "fail"] == [
        "port"
    ]


def test_a_report_names_settings_and_masks_secrets(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("VLLM_API_KEY", "sk-abc")
    monkeypatch.setenv("VLLM_DEFRAG_THRESHOLD", "7")
    assert main(["collect-env", "--max-num-batched-tokens=512"]) == 0
    shown = capsys.readouterr().out
    report = json.loads(shown)
    assert "abc" not in shown
    assert report["environment"]["HF_TOKEN"] == report["settings"]["api_key"] == "(set)"
    assert report["environment"]["VLLM_DEFRAG_THRESHOLD"] == "7"
    assert report["settings"]["max_num_batched_tokens"] == 512


def test_no_torch_is_imported():
    code = (
        "import sys; from preheat.cli.main import main; main(['doctor', '--port=0']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
