"""Kernels are compiled by processes beside the boot, into Triton's cache."""

import json
import os
import pickle
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch
import triton

from preheat.backends.cuda.device import builders, compiling, kernel_keys
from preheat.backends.cuda.device.builders import Builders, Crew
from preheat.backends.cuda.device.card import CARDS
from preheat.backends.cuda.device.compiling import Job, compile_job
from preheat.backends.cuda.device.triton_key import TritonKey
from preheat.backends.cuda.pointwise import digest
from preheat.backends.cuda.pointwise.digest import digest_rows
from preheat.errors import KernelRefused
from tests.waiting import until
from tools.compiled.launches import launches
from tools.oracles.card import META, Seen, card, target, watched

HOPPER = (9, 0)


def job_of(launch):
    source = launch.kernel.ASTSource
    return Job(launch.kernel, source, launch.signature, launch.constants, launch.attrs, launch.options, target(HOPPER))


@pytest.fixture(scope="module")
def job():
    seen = Seen()
    with card(HOPPER), watched(seen):
        digest_rows(torch.empty(2, 64, device=META))
        return job_of(seen.launches[0])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def pair(folder):
    made = Builders(2)
    yield made
    made.close()


def test_every_kernel_is_the_same_program_in_another_process():
    """The law: a packed job has the source and the options of the launch, so Triton's cache finds it."""
    with card(HOPPER):
        jobs = [job_of(each) for each in launches(CARDS[HOPPER]).values()]
    assert len(jobs) > 300
    for each in jobs:
        other = Job(*pickle.loads(each.packed()))
        assert other.kernel is each.kernel
        assert other.source_code().hash() == each.source_code().hash()
        assert other.options.hash() == each.options.hash()
    other = jobs[0]._replace(signature=jobs[-1].signature)  # control
    assert other.source_code().hash() != jobs[0].source_code().hash()


ORDER = """
import json, random, sys
from preheat.backends.cuda.device import kernel_keys
if sys.argv[2] == "control":
    kernel_keys.take = kernel_keys._take
from tools.oracles.card import card
from triton.runtime.jit import JITFunction
import gc
with card():
    kernels = [each for each in gc.get_objects() if type(each).__name__ in ("JITFunction", "GluonJITFunction")]
kernels = {f"{each.fn.__module__}.{each.fn.__qualname__}": each for each in kernels}
names = sorted(name for name in kernels if name.startswith("preheat."))
order = random.Random(sys.argv[1]).sample(names, len(names))
print(json.dumps(dict(sorted((name, kernels[name].cache_key) for name in order))))
"""


def keys(seed, how):
    """Return the keys of all functions, taken in the order of ``seed`` in a process of their own."""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ORDER, seed, how], capture_output=True, text=True, check=True
    )
    return json.loads(told.stdout)


def test_the_key_of_a_kernel_does_not_depend_on_the_order_of_launches():
    one, other = keys("one", ""), keys("other", "")
    assert len(one) > 200 and one == other
    assert keys("one", "control") != keys("other", "control")


ANSWERED = """
import sys
from preheat.backends.cuda.device.triton_key import ASKED
ASKED.begin()
ASKED._process.terminate() if sys.argv[1] == "killed" else None
from triton.runtime import build, cache
own = cache.triton_key, build.platform_key
import preheat.backends.cuda.backend
now = cache.triton_key, build.platform_key
print([each() for each in own] == [each() for each in now], own != now)
ASKED.leave()
"""


@pytest.mark.parametrize(("fate", "taken"), [("alive", True), ("killed", False)])
def test_a_process_answers_as_triton_does(fate, taken):
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ANSWERED, fate], capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["True", str(taken)]


def test_another_installation_does_not_answer(monkeypatch):
    monkeypatch.setattr(kernel_keys.cache, "triton_key", kernel_keys.cache.triton_key)
    monkeypatch.setattr(kernel_keys.build, "platform_key", kernel_keys.build.platform_key)
    before = kernel_keys.cache.triton_key, kernel_keys.build.platform_key
    found = TritonKey("/elsewhere/triton/__init__.py", "files", "platform")
    monkeypatch.setattr(kernel_keys.ASKED, "answer", lambda: found)
    kernel_keys.order_keys()
    assert (kernel_keys.cache.triton_key, kernel_keys.build.platform_key) == before
    monkeypatch.setattr(kernel_keys.ASKED, "answer", lambda: found._replace(installation=triton.__file__))  # control
    kernel_keys.order_keys()
    assert (kernel_keys.cache.triton_key(), kernel_keys.build.platform_key()) == ("files", "platform")


@pytest.fixture
def launched(folder, monkeypatch):
    """Return a function that launches a kernel twice in a block, and the kernels that threads were asked for."""
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(triton.compiler.compiler.CompiledKernel, "run", True)
    monkeypatch.setattr(compiling, "_build_elsewhere", lambda job: asked.append(job.kernel))

    def launch(**more):
        with compiling.compiling(1, **more):
            for rows in (2, 3):
                digest_rows(torch.empty(rows, 64, device=META))

    with card(HOPPER):
        for each in (digest._add_digests,):
            each.device_caches.clear()
        yield launch, asked


def test_a_kernel_that_is_launched_twice_is_asked_for_once(launched):
    launch, asked = launched
    launch()
    launch()
    assert asked == [digest._add_digests]


def test_a_kernel_that_did_not_compile_is_asked_for_again(launched, monkeypatch):
    launch, asked = launched
    build = compiling.Loading._load

    def fail(*_):
        raise KernelRefused("no")

    monkeypatch.setattr(compiling.Loading, "_load", fail)
    with pytest.raises(KernelRefused):
        launch()
    launch(ignore_errors=True)
    monkeypatch.setattr(compiling.Loading, "_load", staticmethod(build))
    assert not asked
    launch()
    assert asked == [digest._add_digests]


def test_a_builder_compiles_into_the_cache_and_goes_on_after_a_failure(pair, job, monkeypatch):
    broken = job._replace(options=job.options.__class__(**job.options.__dict__ | {"num_ctas": 3}))
    for _ in range(2):  # of each builder
        pair.build(broken.packed())
        pair.build(b"no job at all")
    assert not job.is_cached()
    pair.build(job.packed())
    assert job.is_cached()
    assert hits(job, monkeypatch) == [True]


def hits(job, monkeypatch):
    """Compile ``job`` here, and return whether Triton found it in its cache."""
    found = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **told: found.append(told["cache_hit"]))
    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    compile_job(job.packed())
    return found


def test_without_a_builder_the_cache_lacks_the_kernel(folder, job, monkeypatch):
    """Control."""
    assert hits(job, monkeypatch) == [False]


def test_a_killed_builder_leaves_its_work_to_the_others_and_then_to_the_boot(pair, job):
    pair.build(b"")  # both have begun
    pair.build(b"")
    os.killpg(pair._process.pid, signal.SIGKILL)
    for _ in range(4):
        pair.build(job.packed())  # returns, and nothing is built
    assert not job.is_cached()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_builders_end_with_their_boot(folder, how):
    script = (
        "import time; from preheat.backends.cuda.device.builders import Builders; made = Builders(3); made.build(b''); "
        "print(made._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as boot:
        group = int(boot.stdout.readline())
        assert has_processes(group)  # control
        boot.send_signal(how)
    assert until(lambda: not has_processes(group))


def has_processes(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_few_cores_have_no_builders(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(builders.FEWEST - 1))
    assert Crew().start() is None


@pytest.mark.parametrize(("file", "interpreted", "starts"), [("", "0", True), ("kernel", "0", False), ("", "1", False)])
def test_builders_start_before_torch_only_where_nothing_is_compiled(folder, monkeypatch, file, interpreted, starts):
    if file:
        (folder / file).touch()
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    crew, started = Crew(), []
    monkeypatch.setattr(crew, "start", lambda: started.append(True))
    crew.start_if_cold()  # the boot has failed already
    assert not started
    crew.join()
    crew.start_if_cold()
    assert bool(started) is starts


def test_builders_stay_until_the_last_boot_leaves(monkeypatch):
    ended = []
    monkeypatch.setattr(builders, "Builders", lambda count: SimpleNamespace(close=lambda: ended.append(count)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(99))
    crew = Crew()
    for _ in range(2):
        crew.join()
    assert crew.start() is crew.start()
    crew.leave()
    assert not ended
    crew.leave()
    assert ended == [builders.MOST]


def test_a_machine_without_room_for_processes_compiles_by_threads(monkeypatch, caplog):
    def fail(count):
        raise BlockingIOError("resource temporarily unavailable")

    monkeypatch.setattr(builders, "Builders", fail)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    crew = Crew()
    assert crew.start() is crew.start() is None
    assert caplog.text.count("Threads compile the kernels") == 1


def test_a_folder_that_is_not_there_is_cold(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    crew, started = Crew(), []
    monkeypatch.setattr(crew, "start", lambda: started.append(True))
    crew.join()
    crew.start_if_cold()
    assert started
