"""Code for every processor: whole models compile, the instructions that decide bits are there, and the bits are one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.errors import PreheatError
from tests.cpu import emulated
from tests.cpu.machine_code import instructions, undefined, written

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from llvmlite import ir

from preheat.backends.cpu.llvm import chunks, emit, functions, job, machine, model, products, targets
from preheat.backends.cpu.llvm.kinds import COUNTERS, FRAME, LAYER_FRAME, LINE, Product
from preheat.backends.cpu.llvm.memory import panels
from preheat.backends.cpu.llvm.targets import TARGETS
from tests.cpu.test_llvm import LLVM, checkpoint, product

HERE = [name for name, target in TARGETS.items() if target.runs_here]
GIVEN = {"sched_yield", "memset", "memcpy", "memmove"}
"""Symbols of the C library that compute nothing."""

WIDE = {512: "%zmm", 256: "%ymm", 128: "%xmm"}
GATED = Product(160, 128, "bfloat16", activation="silu_and_mul")
BUNDLED = {
    "device": "cpu", "dtype": "bfloat16", "execution_mode": "llvm", "skip_warmup": True, "boot_check": "off",
    "on_cold": "off", "max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 16,
    "num_gpu_blocks_override": 30, "max_logprobs": 50,
}  # fmt: skip


X87 = """define void @"x87"(ptr %x) {
  %a = load x86_fp80, ptr %x
  %b = fmul x86_fp80 %a, %a
  store x86_fp80 %b, ptr %x
  ret void
}

"""


PROMPTS = [list(range(20, 60)), list(range(70, 75))]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=50)


class _Seen(PreheatError):
    """The functions of a model, before they are compiled."""


@pytest.fixture(scope="module")
def source_for(tmp_path_factory):
    """Return a function from a target to the functions of a whole model, in LLVM's language, source by source."""
    folder = tmp_path_factory.mktemp("model")
    checkpoint(folder)

    def make(target: targets.Target) -> list[str]:
        written: list[str] = []

        def stop(sources: Sequence[str], folder: Path | None, *rest: object) -> None:
            written.extend(sources)
            raise _Seen("")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(targets, "here", lambda: target)
            patch.setattr(model, "compile_side_by_side", stop)
            with pytest.raises(_Seen):
                LLM(str(folder), **LLVM | {"dtype": "bfloat16"})
        return [source for source in written if '"front0"' in source or '"back0"' in source]

    return make


# --- the code of each processor, read and not run ---


def faults(source: str, target: targets.Target) -> set[str]:
    """Compile ``source`` for ``target``, and return the faults in its code that would change bits."""
    text, code = written(source, target)
    names, needed = instructions(text), undefined(code)
    fused = any(name.startswith("fmla" if target.arm else "vfmadd") for name in names)
    found = set()
    if needed - GIVEN:
        found.add("library")
    if fused != target.fused:
        found.add("multiply-add")
    if not target.arm and any(name.startswith("f") for name in names):
        found.add("x87")
    if text.count("0xfffffffffeffffff" if target.arm else "$-32833") < 2:  # in start and in work
        found.add("denormals")
    if not target.arm and next(bits for bits, register in WIDE.items() if register in text) != target.bits:
        found.add("width")
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_functions_of_a_model_compile_for(name, source_for):
    sources = source_for(TARGETS[name])
    names = {found for source in sources for found in re.findall(r'define .*@"(\w+)"', source)}
    assert {"front0", "back0", "alone0", "norm", "start", "work"} <= names
    for source in sources:  # where threads start, denormals are switched on for all
        assert faults(source, TARGETS[name]) == (set() if '@"work"' in source else {"denormals"})


@pytest.mark.parametrize(
    ("written", "name", "find", "put", "fault"),
    [
        ("avx2", "avx2", "", "", None),
        ("sse", "sse", "", "", None),
        ("sse", "avx2", "", "", "multiply-add"),
        ("avx2", "sse", "", "", "library"),  # fmaf of the C library
        ("avx2", "avx2", '@"llvm.roundeven.', '@"llvm.exp.', "library"),
        ("neon", "neon", '@"llvm.roundeven.', '@"llvm.exp.', "library"),
        ("sse", "sse", "-32833", "-1", "denormals"),
        ("neon", "neon", "-16777217", "-1", "denormals"),
        ("avx2", "avx2", 'define i64 @"work"', f'{X87}define i64 @"work"', "x87"),
    ],
)
def test_a_fault_planted_in_code_is_seen(written, name, find, put, fault, monkeypatch):
    """Code is ``written`` for one processor, and compiled for another or with another text."""
    monkeypatch.setattr(targets, "here", lambda: TARGETS[written])
    module = ir.Module("test")
    module.triple = TARGETS[written].triple
    functions.alone(module, "alone", GATED)
    job.jobs(module, COUNTERS)
    source = str(module)
    assert find in source
    assert faults(source.replace(find, put), TARGETS[name]) == ({fault} if fault else set())


@pytest.mark.parametrize("name", TARGETS)
def test_sums_fit_into_the_registers_of(name):
    """Either the weights of an input wait in registers while rows pass, or a number of each row while weights pass."""
    count, bits = TARGETS[name].registers
    groups = chunks.GROUPS.get((count, bits), ())
    for rows, vectors, _ in {*products.TILES[count, bits].many, *products.TILES[count, bits].few, *groups}:
        weights = vectors * 32 * emit.LANES // bits
        assert rows == 1 or rows * weights + min(rows, weights) + 1 <= count


@pytest.mark.parametrize(("name", "asks"), [("avx2", True), ("avx512", True), ("sse", False), ("neon", False)])
def test_weights_are_read_ahead_with_avx(name, asks, monkeypatch):
    monkeypatch.setattr(targets, "here", lambda: TARGETS[name])
    module, how = ir.Module("test"), Product(3072, 768, "float32")
    functions.alone(module, "alone", how)
    assert ('call void @"llvm.prefetch' in str(module)) == asks


@pytest.mark.parametrize(("name", "vectors"), [("avx2", 2), ("avx512", 4)])
def test_units_of_many_rows_are_narrow_with_avx2_alone(name, vectors, monkeypatch):
    """They are read ahead. Rows that read a weight once do not ask: their unit is the widest one."""
    monkeypatch.setattr(targets, "here", lambda: TARGETS[name])
    how = Product(3072, 768, "float32")
    many, few = products.tiles(how)
    assert [products.widest(how, tile) for tile in (many[0], few[-1])] == [vectors, 8]


# --- one digest ---


def digest(target: targets.Target, threads: int, folder: str = "bundled", **options) -> str:
    """Boot an engine whose functions are for ``target``, and return the digest of its logprobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "here", lambda: target)
        llm = LLM(folder, **BUNDLED | {"num_threads": threads} | options)
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    bits = blake2b(digest_size=8)
    for output in found:
        for entry in output.outputs[0].logprobs:
            bits.update(np.array([(token, value.logprob) for token, value in entry.items()]).tobytes())
    return bits.hexdigest()


def test_the_bundled_model_has_one_digest():
    """Over threads, and over the processors whose code this machine runs."""
    ways = [(targets.here(), 1), (targets.here(), 4), *((TARGETS[name], 2) for name in HERE)]
    assert len({digest(*way) for way in ways}) == 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    checkpoint(folder)
    return str(folder)


def tiny_digests(ways: Iterable[tuple[targets.Target, int]], folder: str) -> set[str]:
    machine._MADE.clear()
    return {digest(*way, folder, dtype="float32", skip_tokenizer_init=True) for way in ways}


def test_a_sum_that_threads_split_is_seen(tiny, monkeypatch):
    right, threads = products.sums, [(targets.here(), count) for count in (1, 2, 4)]
    assert len(tiny_digests(threads, tiny)) == 1

    def split(e, how, *rest):
        """Add two sums of half the inputs, if there is more than one thread."""
        cut = e.choose(e.less(1, e.field(e.frame, FRAME["threads"])), how.inputs // 2, how.inputs)
        loop, parts = e.loop, []
        for first, last in ((0, cut), (cut, how.inputs)):
            e.loop = lambda *_, first=first, last=last: loop(first, last)
            parts.append(right(e, how, *rest))
        del e.loop
        return [[e.b.fadd(*pair) for pair in zip(*lines, strict=True)] for lines in zip(*parts, strict=True)]

    monkeypatch.setattr(products, "sums", split)
    assert len(tiny_digests(threads, tiny)) == 2


@pytest.mark.skipif("sse" not in HERE, reason="needs two widths of vectors: a processor of x86-64")
def test_a_sum_in_the_vectors_of_the_machine_is_seen(tiny, monkeypatch):
    ways = [(TARGETS["sse"], 1), (targets.here(), 1)]
    assert len(tiny_digests(ways, tiny)) == 1

    def tree(e, x, join):
        """Join the registers of the machine from the first to the last, then the lanes of one."""
        lanes = targets.here().bits // 32
        each = [e.b.extract_element(x, ir.Constant(emit.INT, lane)) for lane in range(emit.LANES)]
        while len(each) > lanes:
            each = [join(*pair) for pair in zip(each[:lanes], each[lanes : 2 * lanes], strict=True)] + each[2 * lanes :]
        while len(each) > 1:
            half = len(each) // 2
            each = [join(*pair) for pair in zip(each[:half], each[half:], strict=True)]
        return each[0]

    monkeypatch.setattr(emit.Function, "tree", tree)
    assert len(tiny_digests(ways, tiny)) == 2


def test_denormals_that_are_flushed_are_seen(monkeypatch):
    how, weight, x = Product(16, 32, "float32"), torch.full((32, 16), 1e-30), torch.full((1, 16), 1e-10)
    expected = product(how, weight, x).view(torch.int32)
    monkeypatch.setattr(emit, "_X86_FLUSHES", 0)
    monkeypatch.setattr(emit, "_ARM_FLUSHES", 0)
    torch.set_flush_denormal(True)
    try:
        assert not torch.equal(product(how, weight, x).view(torch.int32), expected)
    finally:
        torch.set_flush_denormal(False)


# --- Arm, under an emulator ---


@pytest.mark.skipif(not (emulated.EMULATOR and emulated.LINKER), reason=emulated.MISSING)
@pytest.mark.parametrize("planted", [False, True])
def test_an_emulated_arm_has_the_same_bits(planted, tmp_path, monkeypatch):
    """A gated product: multiply-adds, exponentials, divisions. Control: another exponential."""
    chance = torch.Generator().manual_seed(5)
    weight, x = (torch.randn(*size, generator=chance) for size in ((128, 160), (6, 160)))
    here = product(GATED, weight.bfloat16(), x)
    memory = emulated.Memory()
    places = {"x": memory.put(x.numpy()), "counters": memory.put(np.zeros(COUNTERS * LINE, np.int64))}
    packed = memory.put(panels(GATED, weight.bfloat16()).view(torch.int16).numpy())
    places["attended"] = memory.put(np.zeros(here.shape, np.float32))
    frame = {FRAME[name]: -1 - place for name, place in places.items()} | {FRAME["rows"]: 6, FRAME["threads"]: 1}
    if planted:
        monkeypatch.setattr(emit, "_EXP", tuple(term * (1 + 1e-6) for term in emit._EXP))
    module = ir.Module("test")
    module.triple = TARGETS["neon"].triple
    functions.alone(module, "alone", GATED)
    job.jobs(module, COUNTERS)
    module = re.sub(r'declare i32 @"sched_yield"\(\)\n', "", str(module))
    source = module + emulated.program("alone", memory, frame, {LAYER_FRAME["qkv"]: -1 - packed})
    after = emulated.run(machine.compile_code(source, None, TARGETS["neon"])[0], memory, tmp_path)
    found = np.frombuffer(after, np.float32, here.numel(), places["attended"]).reshape(here.shape)
    assert np.array_equal(found, here.numpy()) != planted
