"""The determinism passes, case by case as in their source's tests, and cases that the source leaves open."""

import logging

import pytest

from preheat.errors import SettingsError
from preheat.warmup import determinism as module
from preheat.warmup import get_determinism_warmup_iterations, run_determinism_warmup

INVARIANT, ITERATIONS = "VLLM_BATCH_INVARIANT", "VLLM_DETERMINISM_WARMUP_ITERATIONS"


class Steps:
    """Step that counts its calls; calls with a number in ``failing`` raise."""

    def __init__(self, *failing):
        self.calls, self.failing = 0, failing

    def __call__(self):
        self.calls += 1
        if self.calls in self.failing:
            raise RuntimeError(f"step {self.calls}")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in (INVARIANT, ITERATIONS, "PREHEAT_BATCH_INVARIANT", "PREHEAT_DETERMINISM_WARMUP_ITERATIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({INVARIANT: "1"}, 3),
        ({INVARIANT: "0"}, 0),
        ({INVARIANT: "1", ITERATIONS: "5"}, 5),
        ({INVARIANT: "1", ITERATIONS: "0"}, 0),
        ({ITERATIONS: "-5"}, 0),
        ({ITERATIONS: "invalid"}, 0),
        ({}, 3),  # here invariance is on unless it is turned off
        ({INVARIANT: "0", ITERATIONS: "5"}, 5),  # an explicit number wins; whether it runs is decided later
        ({ITERATIONS: "5", "PREHEAT_DETERMINISM_WARMUP_ITERATIONS": "2"}, 2),
    ],
)
def test_the_environment_says_how_many(env, expected, monkeypatch):
    assert get_determinism_warmup_iterations(env) == expected
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert get_determinism_warmup_iterations() == expected


def test_an_unreadable_invariance_is_an_error():
    with pytest.raises(SettingsError, match=INVARIANT):
        get_determinism_warmup_iterations({INVARIANT: "perhaps"})


def test_as_many_passes_as_asked_for():
    step = Steps()
    assert run_determinism_warmup(step, num_iterations=3) is True
    assert step.calls == 3


def test_none_without_invariance(monkeypatch, caplog):
    step = Steps()
    with caplog.at_level(logging.DEBUG):
        assert run_determinism_warmup(step, num_iterations=3, batch_invariant=False) is False
    assert caplog.messages == ["Skipping determinism warmup: VLLM_BATCH_INVARIANT is not enabled"]
    monkeypatch.setenv(INVARIANT, "0")
    assert run_determinism_warmup(step, num_iterations=3) is False
    assert step.calls == 0
    assert run_determinism_warmup(step, num_iterations=3, batch_invariant=True) is True


@pytest.mark.parametrize("number", [0, -1])
def test_none_when_none_are_asked_for(number, caplog):
    step = Steps()
    with caplog.at_level(logging.DEBUG):
        assert run_determinism_warmup(step, num_iterations=number) is False
    assert step.calls == 0
    assert caplog.messages == []


def test_a_failing_pass_is_logged_and_the_rest_run(caplog):
    step = Steps(1)
    with caplog.at_level(logging.WARNING):
        assert run_determinism_warmup(step, num_iterations=3) is True
    assert step.calls == 3
    assert caplog.messages == ["Determinism warmup iteration 1 failed: step 1. Continuing with remaining iterations."]


def test_an_interrupt_is_no_failing_pass():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_determinism_warmup(interrupted, num_iterations=3)


def test_the_environment_counts_when_no_number_is_given(monkeypatch):
    monkeypatch.setenv(ITERATIONS, "2")
    step = Steps()
    assert run_determinism_warmup(step) is True
    assert step.calls == 2
    monkeypatch.delenv(ITERATIONS)
    assert run_determinism_warmup(step) is True
    assert step.calls == 2 + 3


def test_the_getter_reads_the_environment(monkeypatch):
    monkeypatch.setenv(ITERATIONS, "7")
    assert get_determinism_warmup_iterations() == 7


def test_each_pass_is_waited_for():
    order = []
    run_determinism_warmup(lambda: order.append("step"), 2, synchronize=lambda: order.append("wait"))
    assert order == ["step", "wait"] * 2


def test_a_failure_seen_only_when_waited_for_is_logged(caplog):
    step = Steps()
    waits = Steps(2)
    with caplog.at_level(logging.DEBUG):
        run_determinism_warmup(step, 2, synchronize=waits)
    assert step.calls == waits.calls == 2
    assert caplog.messages == [
        "Running 2 determinism warmup iteration(s) to ensure reproducible output from the first request...",
        "Determinism warmup iteration 1/2 complete",
        "Determinism warmup iteration 2 failed: step 2. Continuing with remaining iterations.",
        "Determinism warmup complete",
    ]


def test_an_accelerator_in_use_is_waited_for(monkeypatch):
    waits = Steps()
    device = type("accelerator", (), {"is_available": lambda: True, "synchronize": waits})
    monkeypatch.setitem(module.sys.modules, "torch", type("torch", (), {"accelerator": device}))
    run_determinism_warmup(Steps(), 2)
    assert waits.calls == 2
    device.is_available = lambda: False
    run_determinism_warmup(Steps(), 2)
    assert waits.calls == 2
