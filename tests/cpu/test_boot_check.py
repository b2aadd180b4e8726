"""The cross-check at boot compares every path, leaves nothing behind, and finds planted faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from preheat import LLM, SamplingParams
from preheat.backends.cpu.backend import CpuBackend
from preheat.core import Ready
from preheat.errors import NotInvariant, PreheatError, SettingsError
from preheat.plan import plan
from preheat.plan.step_items import SamplerItem
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.verify.identity import differences, read_proof
from preheat.warmup.record import Record
from tests.cpu.planted import PLANTS, first_run

SMALL = {
    "max_num_seqs": 4, "max_num_batched_tokens": 96, "max_model_len": 64, "block_size": 16, "skip_warmup": False,
    "determinism_warmup_iterations": 0, "dtype": "float32",
}  # fmt: skip
LARGE = SMALL | {"max_num_batched_tokens": 620, "max_model_len": 400, "num_threads": 1}
"""Options with contexts that cross a KV split."""


pytestmark = pytest.mark.usefixtures("two_layers", "eager")


@pytest.fixture(autouse=True, scope="module")
def few_items():
    """Leave out warm-up items that these tests do not need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "KINDS", tuple(kind for kind in plan.KINDS if kind is not SamplerItem))
        yield


def boot(**options) -> tuple[Ready, Record, object]:
    transport = InlineTransport()
    loop = boot_engine(Settings.load(SMALL | options), transport)
    ready = next(message for message in transport.receive() if isinstance(message, Ready))
    return ready, Record.from_json(ready.record), loop


def checks(record: Record) -> dict[str, tuple[str, str]]:
    return {str(e.shape["name"]): (e.outcome, e.reason) for e in record.entries if e.kind == "check"}


@pytest.fixture(scope="module")
def booted():
    return boot(**LARGE)


def test_every_path_is_an_item_with_a_row(booted):
    ready, record, loop = booted
    paths = ["finite", "later run", "co-batched", "next bucket", "chunked", "prefix hit", "decode", "poisoned",
             "resumed", "full step", "sampler", "logprobs", "grammar", "compaction"]  # fmt: skip
    assert list(checks(record)) == paths
    assert set(checks(record).values()) == {("ready", "")}
    assert [item.name for item in loop.packer.plan.items[-len(paths) :]] == [f"(check, {path})" for path in paths]
    assert record.proof.compared > 20
    assert len(record.proof.digest) == 32
    assert record.summary()["digest"] == record.proof.digest
    assert not ready.blocked_reason


def test_nothing_stays_behind(booted):
    _, record, loop = booted
    scheduler = loop.scheduler
    scheduler.check()
    scheduler.pool.check(scheduler.pool.refs * 0)
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    assert scheduler.slots.num_free == SMALL["max_num_seqs"]
    assert not scheduler.slots.block_table.any()
    assert scheduler.stats().prefix_hits == 0
    assert sum(record.misses.values()) == sum(entry.fallback for entry in record.entries)  # warm-up's own


def test_a_first_run_that_differs_is_seen(monkeypatch):
    """The check sees a different first run, although all of warm-up comes between the run and the check."""
    first_run(monkeypatch)
    ready, record, _ = boot()
    assert checks(record)["later run"][0] == "failed"
    assert "later run: " in ready.blocked_reason


@pytest.mark.parametrize("policy", ["unified", "split"])
def test_full_tries_every_bucket(policy):
    _, record, loop = boot(boot_check="full", bucketing_policy=policy)
    found = checks(record)
    assert found["every bucket"] == ("ready", "")
    assert "next bucket" not in found
    assert set(found.values()) == {("ready", "")}
    assert record.proof.compared > len(loop.packer.plan.dispatcher.buckets)


def test_compiled_regions_are_checked_against_eager_ones(monkeypatch):
    """Compiled regions are checked against eager ones.

    Without a compiler, a slightly wrong region stands in.
    """
    from preheat.backends.cpu import compile as compiling

    def wrong(region):
        return lambda x, *more: region(x, *more) * (1 + 2**-7)

    monkeypatch.setattr(compiling, "Regional", wrong)
    monkeypatch.setattr(compiling, "check_compiler", lambda: None)
    ready, record, _ = boot(execution_mode="compile")
    assert checks(record)["eager"][0] == "failed"
    assert "the difference is in the program" in ready.blocked_reason
    assert {state for name, (state, _) in checks(record).items() if name != "eager"} == {"ready"}


def test_off_checks_nothing():
    _, record, _ = boot(boot_check="off")
    assert checks(record) == {}
    assert record.proof.digest == ""


@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 1}, {"max_num_batched_tokens": 8}, {"max_model_len": 16}, {"num_gpu_blocks_override": 7}],
)
def test_tight_limits_leave_out_impossible_checks(options):
    ready, record, loop = boot(**options)
    assert not ready.blocked_reason
    assert set(checks(record)) >= {"later run"}
    assert {outcome for outcome, _ in checks(record).values()} == {"ready"}
    loop.scheduler.check()


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_kernel_is_named(plant, monkeypatch, caplog):
    PLANTS[plant](monkeypatch)
    ready, record, _ = boot(**LARGE)
    failed = {name: reason for name, (outcome, reason) in checks(record).items() if outcome == "failed"}
    assert "chunked" in failed
    assert "300 tokens in (mixed, " in failed["chunked"]
    assert [name for name, reason in failed.items() if "the first layer that differs is layer 0" not in reason] == []
    assert failed["chunked"] in ready.blocked_reason
    assert failed["chunked"] in caplog.text


def test_no_request_is_taken(monkeypatch):
    PLANTS["threshold"](monkeypatch, rows=32)
    with pytest.raises(NotInvariant, match="chunked"):
        LLM(**SMALL)
    with pytest.raises(NotInvariant, match="require_invariance"):
        boot(require_invariance=True)


def test_require_invariance_needs_a_boot_check():
    with pytest.raises(SettingsError, match=r"--boot-check off .*--skip-warmup true") as refused:
        boot(require_invariance=True, skip_warmup=True, boot_check="off")
    assert refused.value.param == "require_invariance"
    ready, _, _ = boot(require_invariance=True)
    assert not ready.blocked_reason


def test_without_invariance_nothing_is_promised(monkeypatch, caplog):
    """Without invariance a boot promises nothing, on a device with faster implementations.

    A CPU has none.
    """
    monkeypatch.setattr(CpuBackend, "facts", replace(CpuBackend.facts, rejected={}))
    PLANTS["threshold"](monkeypatch, rows=32)
    varying = {"batch_invariant": False, "determinism_warmup_iterations": 3}
    ready, record, _ = boot(boot_check="full", **varying)
    assert not ready.blocked_reason
    assert record.invariant is record.summary()["invariant"] is False
    assert checks(record) == {"finite": ("ready", ""), "later run": ("ready", "")}
    assert not [entry for entry in record.entries if entry.kind == "determinism"]
    assert "may depend on the other requests in its batch" in caplog.text
    with pytest.raises(SettingsError, match=r"--batch-invariant false lets bits depend"):
        boot(require_invariance=True, **varying)


def test_a_cpu_is_always_invariant(booted):
    assert booted[1].invariant
    with pytest.raises(SettingsError, match="cannot be turned off on cpu") as refused:
        boot(batch_invariant=False)
    assert refused.value.param == "batch_invariant"


def test_a_check_that_breaks_holds_the_engine_back(monkeypatch):
    from preheat.verify import check_runner as lab

    monkeypatch.setattr(lab.CheckRunner, "move", lambda *_: 1 / 0)
    with pytest.raises(PreheatError, match="ZeroDivisionError"):
        LLM(**SMALL)


def test_two_processes_have_one_digest(booted, tmp_path):
    code = "import sys; from preheat.cli.main import main; sys.exit(main(sys.argv[1:]))"
    flags = [part for name, value in LARGE.items() if name != "skip_warmup"
             for part in ("--" + name.replace("_", "-"), str(value))]  # fmt: skip
    env = os.environ | {"PREHEAT_SKIP_WARMUP": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, "warm", "--json", *flags], check=True, capture_output=True, text=True, env=env
    )
    path = tmp_path / "record.json"
    path.write_text(done.stdout)
    assert read_proof(str(path)).digest == booted[1].proof.digest
    assert [line.split(":")[0] for line in differences(read_proof(str(path)), booted[1].proof)] == ["plan"]
    changed = json.loads(done.stdout)
    changed["proof"]["digest"] = "0" * 32
    changed["proof"]["parts"]["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(changed))
    found = differences(read_proof(str(path)), booted[1].proof)
    assert [line.split(":")[0] for line in found] == ["versions.torch", "plan", "bits"]
    for wrong in ({"digest": "yes"}, {"digest": ""}):
        path.write_text(json.dumps(changed | {"proof": changed["proof"] | wrong}))
        with pytest.raises(SettingsError, match="digest"):
            read_proof(str(path))
    check = next(entry for entry in changed["entries"] if entry["kind"] == "check")
    check |= {"outcome": "failed", "reason": "rows differ"}
    path.write_text(json.dumps(changed))
    with pytest.raises(SettingsError, match="failed a check: 'rows differ'"):
        read_proof(str(path))


def test_the_engine_serves_after_the_check():
    llm = LLM(**SMALL)
    out = llm.generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=12))
    assert out[0].outputs[0].text.strip().startswith("return a + b")
