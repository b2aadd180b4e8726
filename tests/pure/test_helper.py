"""Processes for work on strangers' data: its cost is bounded, whatever it does."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from preheat.utils.helper import Helper, HelperEnded, Helpers, Kind
from tests.meta.source import ROOT
from tests.waiting import until


def make_work(config: bytes):
    """Return work that follows commands in the child."""
    greeting = config

    def work(job: bytes) -> bytes:
        what, _, rest = job.partition(b" ")
        if what == b"spin":
            sum(1 for _ in iter(int, 1))
        if what == b"spin-in-c":
            return b"a" * 40 + str(int(b"9" * 4000) ** 20000).encode()
        if what == b"grow":
            return pickle.dumps([bytes(int(rest))])
        if what == b"exit":
            os._exit(int(rest))
        if what == b"wait":
            time.sleep(60)
        return greeting + str(os.getpid()).encode() if what == b"who" else greeting + job

    return work


def kind(cpu_seconds: float = 0.3, memory: int = 1 << 26) -> Kind:
    return Kind(f"{__name__}:make_work", b"hello ", cpu_seconds, memory)


@pytest.fixture(scope="module")
def helper() -> Helper:
    return Helper(kind())


def who(helper: Helper) -> int:
    return int(helper.run(b"who").split()[1])


def test_a_job_is_done_and_the_next_by_the_same_process(helper):
    assert helper.run(b"you") == b"hello you"
    assert who(helper) == who(helper) != os.getpid()
    job = os.urandom(1 << 22)
    assert helper.run(job) == b"hello " + job


@pytest.mark.parametrize("job", [b"spin", b"spin-in-c"])
def test_cpu_time_is_bounded_also_where_python_does_not_look(helper, job):
    before = who(helper)
    with pytest.raises(HelperEnded) as ended:
        helper.run(job)
    assert ended.value.reason == "time"
    assert helper.run(b"you") == b"hello you" and who(helper) != before


def test_time_counts_for_a_job_not_for_a_process(helper):
    process = who(helper)
    for _ in range(60):  # each takes a fraction of the bound
        helper.run(b"x" * (1 << 23))
    assert who(helper) == process


def test_memory_is_bounded_and_given_back(helper):
    process = who(helper)
    for _ in range(3):
        assert len(helper.run(b"grow %d" % (1 << 24))) > 1 << 24
    assert who(helper) == process
    status = Path(f"/proc/{process}/status").read_text()
    assert int(status.split("VmRSS:")[1].split()[0]) < 60_000
    for job in (b"grow %d" % (1 << 28), bytes(1 << 27)):  # also one that does not fit itself
        with pytest.raises(HelperEnded) as ended:
            helper.run(job)
        assert ended.value.reason == "memory" and helper.run(b"you") == b"hello you"


def test_one_that_dies_is_replaced(helper):
    with pytest.raises(HelperEnded) as ended:
        helper.run(b"exit 3")
    assert ended.value.reason == "died" and helper.run(b"you") == b"hello you"
    os.kill(who(helper), signal.SIGKILL)  # between two jobs
    assert until(lambda: helper._process.poll() is not None)  # all its threads have ended
    assert helper.run(b"you") == b"hello you"


def test_a_job_is_given_up_from_another_thread(helper):
    helper.give_up()  # there is none
    assert helper.run(b"you") == b"hello you"
    reasons = []

    def run() -> None:
        try:
            helper.run(b"wait")
        except HelperEnded as ended:
            reasons.append(ended.reason)

    thread = threading.Thread(target=run)
    thread.start()
    assert until(lambda: helper.give_up() or reasons)  # nothing is given up before the job has begun
    thread.join()
    assert reasons == ["given up"] and helper.run(b"you") == b"hello you"


def test_each_of_several_is_used_and_the_last_one_first():
    helpers = Helpers(kind(), 2)
    pids = {int(answer.split()[1]) for answer in helpers.run_on_each(b"who")}
    assert len(pids) == 2
    assert len({helpers.run(b"who") for _ in range(3)}) == 1
    with helpers.lend() as first, helpers.lend() as second:
        assert {who(first), who(second)} == pids


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_helper_ends_with_its_parent_in_the_middle_of_a_job():
    code = """
import threading, time
from tests.pure.test_helper import Helper, kind, who

helper = Helper(kind())
print(who(helper), flush=True)
threading.Thread(target=helper.run, args=[b"wait"], daemon=True).start()
time.sleep(60)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    assert until(lambda: gone(child))


@pytest.mark.parametrize("jobs", [0, 1, 2])
def test_a_helper_whose_parent_hangs_up_says_nothing(jobs):
    """A line that closes with an unread answer is reset; one that closes without is at its end."""
    ours, theirs = Pipe()
    given = kind()
    words = [given.entry, str(theirs.fileno()), str(given.cpu_seconds), str(given.memory)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "preheat.utils.helper", *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[theirs.fileno()], env=env
    ) as child:
        theirs.close()
        if jobs:
            ours.send_bytes(given.config)
            for _ in range(jobs):
                ours.send_bytes(b"who")
            assert ours.poll(20)
        ours.close()
        assert child.stderr is not None
        assert (child.stderr.read(), child.wait(20)) == (b"", 0)
