"""Graph capture at boot.

The logged run comes out line by line, and the twin on a CPU counts.
"""

import logging
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cuda.facts import FACTS as CUDA
from preheat.limits import Limits
from preheat.plan.buckets import Bucket
from preheat.plan.budget import MemorySplit, split_memory
from preheat.plan.cost import Costs, ModelSizes
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.plan.step_items import SamplerItem
from preheat.settings import Settings
from preheat.warmup.graphs import (
    CountedGraphs,
    CountedMemory,
    DeviceGraphs,
    capture,
    divide_memory,
    graph_bytes,
    log_division,
)
from preheat.warmup.record import Record
from tests.specs import LLAMA_8B, llama

GIB, MIB = 2**30, 2**20
FREE, BLOCK = round(79.16 * GIB), 16 * MIB
SIZES = ModelSizes.of(LLAMA_8B)
COSTS = Costs(SIZES, CUDA.machine, 128)
LIMITS = Limits(
    max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=8192, max_num_prefill_seqs=None, block_size=128,
    num_blocks=1519,
)  # fmt: skip
LOGGED = PlanOptions(
    bucketing_policy="split", bucketing_strategy="linear", prompt_bs_bucket_max=4, prompt_seq_bucket_max=1024,
    decode_seq_bucket_min=128, decode_seq_bucket_step=128, decode_seq_bucket_max=2048,
)  # fmt: skip
SETTINGS = Settings(gpu_memory_utilization=0.5, graph_reserved_mem=0.4)
PROMPT_TOKEN = 14.03 * GIB / 9984  # the log: 15 prompt graphs of 9,984 tokens
DECODE_ROW = 161.9 * MIB / 112  # 48 decode graphs of 112 rows


class Logged:
    """The device of the log.

    It has the free memory after the cache, and the memory that its graphs took.
    """

    def __init__(self, free):
        self.now = free

    def capture_one(self, shape):
        used = round(shape.tokens * (PROMPT_TOKEN if shape.phase == "prompt" else DECODE_ROW))
        self.now -= used
        return used

    def free(self):
        return self.now


def boot(ratio, options=LOGGED):
    """Capture as the log does, and return the record and the lines."""
    settings = Settings(gpu_memory_utilization=0.5, graph_reserved_mem=0.4, graph_prompt_ratio=ratio)
    split = divide_memory(settings, "graphs", FREE, BLOCK)
    log_division(settings, "graphs", split, split.num_blocks)
    plan = make_plan(LIMITS, options, COSTS)
    device = Logged(round(55.43 * GIB))
    record = Record.of(plan)
    pool = split.graph_pool(device.now)
    done = capture(plan, record, settings, pool=pool, capture_one=device.capture_one, free=device.free)
    return record, done


def test_the_logged_run_at_its_ratio(caplog):
    with caplog.at_level(logging.INFO):
        record, done = boot(0.3)
    said = caplog.messages
    assert said[0] == (
        "Free device memory: 79.16 GiB, 39.58 GiB usable (gpu_memory_utilization=0.5), 15.83 GiB reserved for graphs "
        "(VLLM_GRAPH_RESERVED_MEM=0.4), 23.75 GiB reserved for KV cache"
    )
    assert said[1] == (
        "Using 15.85 GiB/55.43 GiB of free device memory for graphs, 4.754 GiB for prompt and 11.09 GiB for decode "
        "(VLLM_GRAPH_PROMPT_RATIO=0.3)"
    )
    assert said[2] == "[Warmup][Graph/Prompt][1/24] batch_size:1 seq_len:128 free_mem:55.43 GiB"
    assert len(said) == 2 + 15 + 48 + 2
    assert said[-2].startswith("Graph/Prompt captured:15 (62.5%) used_mem:14.03 GiB buckets:[(1, 128), (1, 256), ")
    assert said[-2].endswith("(2, 512), (2, 640), (4, 128), (4, 256)]")
    assert said[-1].startswith("Graph/Decode captured:48 (100.0%) used_mem:161.9 MiB buckets:[(1, 128), ")
    assert record.memory["graphs"] == sum(phase.used for phase in done.values())
    assert record.memory["graph_pool"] > record.memory["graphs"] > 0


def test_the_logged_interleaving_at_equal_shares(caplog):
    with caplog.at_level(logging.INFO):
        boot(0.5)
    turns = [line.split(" ")[0] for line in caplog.messages[2:-2]]
    prompt = [f"[Warmup][Graph/Prompt][{number}/24]" for number in range(1, 16)]
    decode = [f"[Warmup][Graph/Decode][{number}/48]" for number in range(1, 49)]
    assert turns == prompt[:11] + decode + prompt[11:]
    wanted = {
        "[Warmup][Graph/Prompt][11/24] batch_size:1 seq_len:896": 48.77,
        "[Warmup][Graph/Decode][1/48] batch_size:4 seq_len:128": 47.51,
        "[Warmup][Graph/Decode][48/48] batch_size:1 seq_len:2048": 47.35,
        "[Warmup][Graph/Prompt][12/24] batch_size:4 seq_len:256": 47.35,
        "[Warmup][Graph/Prompt][13/24] batch_size:2 seq_len:512": 45.91,
        "[Warmup][Graph/Prompt][14/24] batch_size:1 seq_len:1024": 44.48,
        "[Warmup][Graph/Prompt][15/24] batch_size:2 seq_len:640": 43.03,
    }
    free = dict(line.split(" free_mem:") for line in caplog.messages if "free_mem:" in line)
    for turn, expected in wanted.items():
        assert float(free[turn].removesuffix(" GiB")) == pytest.approx(expected, abs=0.06)  # one cost a token


def test_the_record_names_items_without_a_graph_and_the_reason():
    record, _ = boot(0.3)
    forward = {entry.name: entry for entry in record.entries if entry.kind in ("prompt", "decode")}
    captured = {name for name, entry in forward.items() if entry.graph}
    assert len(captured) == 15 + 48
    assert all(forward[name].bytes > 0 and not forward[name].reason for name in captured)
    without = {name: entry.reason for name, entry in forward.items() if not entry.graph}
    assert len(without) == 9
    assert all(reason.startswith("runs without a graph: ") for reason in without.values())
    assert "are expected" in without["(prompt, 4, 1024)"]
    (note,) = record.notes
    assert note.startswith("9 of 24 prompt buckets run without a graph: --graph-reserved-mem makes room for more")
    assert [entry for entry in record.entries if entry.graph and entry.kind not in ("prompt", "decode")] == []


def test_the_unified_policy_divides_between_mixed_and_decode():
    settings = Settings(graph_prompt_ratio=0.5, graph_prompt_strategy="max_bs", graph_decode_strategy="min_tokens")
    plan = make_plan(LIMITS, PlanOptions(), COSTS)
    order = []

    def capture_one(shape):
        order.append(shape)
        return 1

    done = capture(plan, Record.of(plan), settings, pool=1 << 60, capture_one=capture_one, free=lambda: 1 << 60)
    assert list(done) == ["mixed", "decode"]
    assert all(phase.complete for phase in done.values())
    mixed = [shape for shape in order if shape.phase == "mixed"]
    decode = [shape for shape in order if shape.phase == "decode"]
    assert [shape.rows for shape in mixed] == sorted((shape.rows for shape in mixed), reverse=True)
    assert [shape.rows for shape in decode] == sorted(shape.rows for shape in decode)


def test_failed_items_are_not_captured_but_skipped_items_are():
    plan = make_plan(LIMITS, LOGGED, COSTS)
    record = Record.of(plan)
    by_name = {entry.name: entry for entry in record.entries}
    by_name["(decode, 4, 128)"].outcome = "failed"
    by_name["(decode, 4, 128)"].reason = "it broke"
    by_name["(decode, 4, 256)"].outcome = "dropped"
    by_name["(decode, 4, 384)"].outcome = "ready"
    done = capture(plan, record, SETTINGS, pool=1 << 60, capture_one=lambda _: 1, free=lambda: 1 << 60)
    assert done["decode"].total == 46
    assert not by_name["(decode, 4, 128)"].graph
    assert by_name["(decode, 4, 128)"].reason == "it broke"
    assert by_name["(decode, 4, 384)"].graph
    assert by_name["(decode, 4, 512)"].graph  # pending: warm-up was skipped


def test_steps_beyond_the_ladders_are_not_captured():
    """Steps beyond the ladders have a shape, but no graph.

    The source runs them as they come.
    """
    plan = make_plan(LIMITS, PlanOptions(**{**vars(LOGGED), "decode_seq_bucket_max": 1024}), COSTS)
    record = Record.of(plan)
    done = capture(plan, record, SETTINGS, pool=1 << 60, capture_one=lambda _: 1, free=lambda: 1 << 60)
    beyond = [entry for entry in record.entries if entry.fallback]
    assert [entry.name for entry in beyond] == ["(mixed, 8192, 4)", "(decode, 4, 2048)"]
    assert not any(entry.graph for entry in beyond)
    assert all("beyond the bucket sizes" in entry.reason for entry in beyond)
    assert done["decode"].total == 24


def test_out_of_memory_is_written_down_and_the_rest_go_on():
    plan = make_plan(LIMITS, LOGGED, COSTS)
    record = Record.of(plan)

    def capture_one(shape):
        if shape == Bucket.decode(4, longest=128):
            raise MemoryError("no room")
        return 1

    done = capture(plan, record, SETTINGS, pool=1 << 60, capture_one=capture_one, free=lambda: 1 << 60)
    entry = next(entry for entry in record.entries if entry.name == "(decode, 4, 128)")
    assert entry.reason == "runs without a graph: out of memory: no room"
    assert len(done["decode"].captured) == 47
    assert record.notes[0].startswith("1 of 48 decode buckets")


def test_a_share_that_is_exceeded_is_in_the_notes():
    plan = make_plan(LIMITS, LOGGED)  # nothing is estimated
    record = Record.of(plan)
    capture(plan, record, SETTINGS, pool=1000, capture_one=lambda _: 900, free=lambda: 1000)
    assert any("over the share" in note for note in record.notes)


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_other_modes_reserve_nothing(mode, caplog):
    settings = Settings(gpu_memory_utilization=0.5)
    split = divide_memory(settings, mode, FREE, BLOCK)
    assert split.graphs == 0
    assert split.cache == split.usable == split_memory(FREE, BLOCK, utilization=0.5, reserved=0.4).usable
    with caplog.at_level(logging.INFO):
        log_division(settings, mode, split, 64)
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert line.getMessage() == (
        "Free device memory: 79.16 GiB, 39.58 GiB usable (gpu_memory_utilization=0.5), 0 B reserved for graphs "
        f"(VLLM_GRAPH_RESERVED_MEM=0.1; execution mode {mode} captures none), 1 GiB reserved for KV cache"
    )
    with caplog.at_level(logging.WARNING):
        log_division(SETTINGS, mode, split, 64)
    assert f"Execution mode {mode} captures no graphs and ignores --graph-reserved-mem" in caplog.text


def test_layers_in_a_graph_without_graphs(caplog):
    settings = Settings(config_hidden_layers=2)
    with caplog.at_level(logging.WARNING):
        split = divide_memory(settings, "eager", FREE, BLOCK)
        log_division(settings, "eager", split, split.num_blocks)
        plan = make_plan(LIMITS, PlanOptions(), COSTS)
        CountedGraphs(SimpleNamespace(plan=plan), Record.of(plan), settings, split, SIZES).capture()
        CountedGraphs(SimpleNamespace(plan=plan), Record.of(plan), Settings(), split, SIZES).capture()
    ignored, without = caplog.messages
    assert ignored.endswith("ignores --config-hidden-layers")
    assert without.endswith("--config-hidden-layers has no effect")


def test_the_pool_is_the_reserved_share_and_never_above_the_rest():
    split = split_memory(FREE, BLOCK, utilization=0.5, reserved=0.4)
    after_cache = FREE - split.num_blocks * BLOCK
    assert split.graph_pool(after_cache) == split.graphs + split.cache - split.num_blocks * BLOCK
    assert split.graph_pool(FREE) - split.graphs < BLOCK  # a small cache makes no larger share
    assert split.graph_pool(after_cache - GIB) == split.graph_pool(after_cache) - GIB
    assert split.graph_pool(0) == 0
    assert MemorySplit(100, 50, 0, 50, 10).graph_pool(50) == 0


def test_the_twin_counts_a_graphs_bytes():
    tiny = ModelSizes.of(llama(hidden=4, inner=8, layers=2, heads=2, kv_heads=1, head_dim=2, vocab=10))
    # 3 tokens: id, position, a key's and a value's row, 8 bytes each; a hidden state of 8 bytes; the layer's 64 bytes:
    # 2 * 4 of residual and input, the MLP's 3 * 8, 2 bytes each. 3 rows: 5 blocks of 4 bytes, an index, 10 logits.
    assert graph_bytes(Bucket.decode(3), tiny, 5) == 3 * (32 + 8 + 64) + 3 * (20 + 8 + 40)
    assert graph_bytes(Bucket.mixed(12, 3), tiny, 5) == 12 * (32 + 8 + 64) + 3 * (20 + 8 + 40)
    assert graph_bytes(Bucket.decode(2, blocks=5), tiny, 9) == 2 * (32 + 8 + 64) + 2 * (12 + 8 + 40)
    twin = CountedMemory(tiny, 5, 1000)
    assert twin.capture_one(Bucket.decode(3)) == 516
    assert twin.free() == 484
    with pytest.raises(MemoryError, match=r"\(decode, 3\) needs 516 bytes and 484 are free"):
        twin.capture_one(Bucket.decode(3))


@given(st.integers(0, 40 * MIB), st.floats(0, 1))
def test_the_twin_accounts_for_every_shape(pool, ratio):
    settings = Settings(graph_prompt_ratio=ratio)
    sizes = ModelSizes.of(llama(hidden=256, inner=768, layers=4, heads=4, kv_heads=2, head_dim=64, vocab=4096))
    plan = make_plan(LIMITS, LOGGED, Costs(sizes, CPU.machine, 128))
    record = Record.of(plan)
    twin = CountedMemory(sizes, LIMITS.max_blocks_per_seq, pool)
    done = capture(plan, record, settings, pool=pool, capture_one=twin.capture_one, free=twin.free)
    forward = [entry for entry in record.entries if entry.kind in ("prompt", "decode")]
    assert all(entry.graph != bool(entry.reason) for entry in forward)
    assert sum(entry.bytes for entry in forward) == record.memory["graphs"] == pool - twin.free()
    assert twin.free() >= 0
    assert record.memory["graphs"] == sum(graph_bytes(s, sizes, 16) for phase in done.values() for s in phase.captured)


@pytest.mark.parametrize("early", [0, 3 * MIB])
def test_earlier_graphs_of_the_sampler_count_against_the_pool(early):
    """The sampler's graphs take four mebibytes, and its items have taken ``early`` of them.

    All others take nothing.
    """
    split = divide_memory(SETTINGS, "graphs", FREE, BLOCK)
    plan = make_plan(LIMITS, LOGGED, COSTS)
    record, free, captured = Record.of(plan), [round(55.43 * GIB)], []
    reserved = split.graph_pool(free[0])
    items = [item for item in plan.items if isinstance(item, SamplerItem) and item.rows]
    entries = {entry.name: entry for entry in record.entries}
    for entry in record.entries:
        entry.outcome = "ready"
    entries[items[0].name].bytes = early
    free[0] -= early

    def capture_program(program):
        if not captured:
            free[0] -= 4 * MIB - early
        captured.append(program)

    executor = SimpleNamespace(
        is_captured=lambda shape: True, capture=capture_program, sampler=SimpleNamespace(forget=lambda: None)
    )
    steps = SimpleNamespace(plan=plan, executor=executor)
    DeviceGraphs(steps, record, SETTINGS, split, lambda: free[0]).capture()
    assert len(captured) == len(items)
    assert record.memory["graph_pool"] == reserved - 4 * MIB
