"""The memory budget against the logged run that documents it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import SettingsError
from preheat.plan import lines
from preheat.plan.buckets import Bucket
from preheat.plan.budget import capture_graphs, capture_order, graph_shares, split_memory

GIB, MIB = 2**30, 2**20
PROMPTS = [Bucket.prompt(rows, seq) for rows in (1, 2, 4) for seq in range(128, 1025, 128)]
DECODES = [Bucket.decode(rows, longest=seq) for rows in (1, 2, 4) for seq in range(128, 2049, 128)]
QUEUES = {"prompt": capture_order(PROMPTS, "min_tokens"), "decode": capture_order(DECODES, "max_bs")}
POOL = int(15.85 * GIB)

# Fitted to the log: 15 prompt graphs of 9,984 tokens took 14.03 GiB; 48 decode graphs of 112 rows took 161.9 MiB.
PROMPT_TOKEN = 14.03 * GIB / 9984
DECODE_ROW = 161.9 * MIB / sum(shape.rows for shape in DECODES)

CAPTURED = [
    (1, 128), (1, 256), (1, 384), (1, 512), (1, 640), (1, 768), (1, 896), (1, 1024), (2, 128), (2, 256), (2, 384),
    (2, 512), (2, 640), (4, 128), (4, 256),
]  # fmt: skip


def true_bytes(phase, shape):
    return round(shape.tokens * PROMPT_TOKEN if phase == "prompt" else shape.rows * DECODE_ROW)


def run(pool, queues=QUEUES, cost=true_bytes, expected=None, **more):
    order = []

    def capture(phase, shape, number):
        order.append((phase, number, shape))
        return cost(phase, shape)

    expected = expected or {shape: cost(phase, shape) for phase, queue in queues.items() for shape in queue}
    return capture_graphs(pool, queues, capture, expected=expected, **more), order


def test_free_memory_is_divided_as_logged():
    free = round(79.16 * GIB)
    split = split_memory(free, 16 * MIB, utilization=0.5, reserved=0.4)
    assert lines.free_memory(split, split.cache, 0.5, 0.4) == (
        "Free device memory: 79.16 GiB, 39.58 GiB usable (gpu_memory_utilization=0.5), 15.83 GiB reserved for graphs "
        "(VLLM_GRAPH_RESERVED_MEM=0.4), 23.75 GiB reserved for KV cache"
    )
    assert split.num_blocks == 1519
    assert lines.format_bytes(split.num_blocks * 16 * MIB) == "23.73 GiB"  # the cache that fits, not the share
    assert split.num_blocks == 1519


def test_a_split_without_room_for_a_cache_is_refused():
    with pytest.raises(SettingsError, match="raise --gpu-memory-utilization"):
        split_memory(GIB, 600 * MIB)


@pytest.mark.parametrize("ratio", [0.3, 0.5])
def test_the_logged_sets_are_captured(ratio):
    done, _ = run(POOL, prompt_ratio=ratio)
    prompt, decode = done["prompt"], done["decode"]
    assert sorted(shape.dims for shape in prompt.captured) == CAPTURED
    assert decode.complete
    assert lines.captured("prompt", list(prompt.captured), prompt.total, prompt.used) == (
        f"Graph/Prompt captured:15 (62.5%) used_mem:14.03 GiB buckets:{CAPTURED}"
    )
    everything = [shape.dims for shape in DECODES]
    assert lines.captured("decode", list(decode.captured), decode.total, decode.used) == (
        f"Graph/Decode captured:48 (100.0%) used_mem:161.9 MiB buckets:{everything}"
    )
    assert lines.finished(49.2, prompt.used + decode.used) == (
        "Warmup finished in 49 secs, allocated 14.19 GiB of device memory"
    )
    assert not prompt.notes
    assert [skipped.bucket for skipped in prompt.skipped] == QUEUES["prompt"][15:]
    assert "are expected" in prompt.skipped[0].reason


def test_equal_shares_interleave_as_logged():
    """Equal shares interleave as logged: 11 prompts, all of decode, then the 12th prompt."""
    _, order = run(POOL, prompt_ratio=0.5)
    assert [phase for phase, _, _ in order] == ["prompt"] * 11 + ["decode"] * 48 + ["prompt"] * 4
    text = [
        lines.running(phase, shape, number, 24 if phase == "prompt" else 48, 0, graph=True)
        for phase, number, shape in order
    ]
    assert text[0] == "[Warmup][Graph/Prompt][1/24] batch_size:1 seq_len:128 free_mem:0 B"
    assert text[10] == "[Warmup][Graph/Prompt][11/24] batch_size:1 seq_len:896 free_mem:0 B"
    assert text[11] == "[Warmup][Graph/Decode][1/48] batch_size:4 seq_len:128 free_mem:0 B"
    assert text[58] == "[Warmup][Graph/Decode][48/48] batch_size:1 seq_len:2048 free_mem:0 B"
    assert [line.partition(" free")[0] for line in text[59:]] == [
        "[Warmup][Graph/Prompt][12/24] batch_size:4 seq_len:256",
        "[Warmup][Graph/Prompt][13/24] batch_size:2 seq_len:512",
        "[Warmup][Graph/Prompt][14/24] batch_size:1 seq_len:1024",
        "[Warmup][Graph/Prompt][15/24] batch_size:2 seq_len:640",
    ]


def test_shares_are_logged():
    shares = graph_shares(POOL, "prompt", "decode", 0.3)
    assert lines.graph_shares(POOL, round(55.43 * GIB), shares, 0.3) == (
        "Using 15.85 GiB/55.43 GiB of free device memory for graphs, 4.755 GiB for prompt and 11.09 GiB for decode "
        "(VLLM_GRAPH_PROMPT_RATIO=0.3)"
    )


def test_orders():
    shapes = [Bucket.decode(rows, longest=seq) for rows in (1, 32, 64) for seq in (256, 128)]
    assert [shape.dims for shape in capture_order(shapes, "max_bs")] == [
        (64, 128), (64, 256), (32, 128), (32, 256), (1, 128), (1, 256)
    ]  # fmt: skip
    assert [shape.dims for shape in capture_order(shapes, "min_tokens")] == [
        (1, 128), (1, 256), (32, 128), (64, 128), (32, 256), (64, 256)
    ]  # fmt: skip
    flat = [Bucket.mixed(64, 16), Bucket.mixed(8, 4), Bucket.mixed(64, 4)]
    assert [shape.dims for shape in capture_order(flat, "min_tokens")] == [(8, 4), (64, 4), (64, 16)]


def test_the_first_estimate_is_the_plans():
    """The first estimate is the plan's.

    The original has none, so its first graph may take more than is free.
    """
    done, order = run(100, expected=dict.fromkeys((*PROMPTS, *DECODES), 101))
    assert order == []
    assert len(done["prompt"].skipped) == 24


def test_a_graph_that_fits_exactly_is_captured():
    done, _ = run(100, cost=lambda *_: 30, expected=dict.fromkeys((*PROMPTS, *DECODES), 30), prompt_ratio=0.3)
    assert len(done["prompt"].captured) == 1


def test_an_exceeded_share_is_reported():
    done, order = run(1000, cost=lambda *_: 400, expected=dict.fromkeys((*PROMPTS, *DECODES), 1))
    assert done["prompt"].notes == ["(prompt, 1, 128) took 400 bytes where 1 were expected: 100 over the share"]
    assert [phase for phase, _, _ in order].count("prompt") == 1


def test_no_pool_captures_nothing():
    done, order = run(0)
    assert order == []
    assert not done["prompt"].notes


def test_out_of_memory_passes_one_over_and_is_not_tried_again():
    def cost(phase, shape):
        if shape == Bucket.prompt(2, 128):
            raise MemoryError("no 2 GiB in one piece")
        return true_bytes(phase, shape)

    expected = {shape: true_bytes(phase, shape) for phase, queue in QUEUES.items() for shape in queue}
    done, order = run(60 * GIB, cost=cost, expected=expected, prompt_ratio=0.9)
    assert [shape for _, _, shape in order].count(Bucket.prompt(2, 128)) == 1
    assert [(skipped.bucket.dims, skipped.reason) for skipped in done["prompt"].skipped if skipped.failed] == [
        ((2, 128), "out of memory: no 2 GiB in one piece")
    ]
    assert done["decode"].complete
    assert done["prompt"].complete


@given(
    st.integers(0, 2000), st.floats(0, 1), st.lists(st.integers(0, 300), min_size=24, max_size=24), st.integers(1, 40)
)
def test_every_shape_is_captured_or_skipped_once_and_overshoot_is_reported(pool, ratio, prompt_bytes, decode_bytes):
    costs = dict(zip(PROMPTS, prompt_bytes, strict=True))
    done, order = run(pool, cost=lambda phase, shape: costs.get(shape, decode_bytes), prompt_ratio=ratio)
    assert len(order) == len({shape for _, _, shape in order})
    for phase, queue in QUEUES.items():
        part = done[phase]
        assert sorted([*part.captured, *(skipped.bucket for skipped in part.skipped)]) == sorted(queue)
    total = done["prompt"].used + done["decode"].used
    assert total <= pool or done["prompt"].notes or done["decode"].notes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (-252 * 1024, "-252 KiB"), (504 * MIB, "504 MiB"), (round(180.9 * MIB), "180.9 MiB"),
        (round(-1.238 * MIB), "-1.238 MiB"), (round(14.97 * GIB), "14.97 GiB"), (1007 * GIB, "1007 GiB"),
        (round(475.2 * GIB), "475.2 GiB"), (round(39.2 * GIB), "39.2 GiB"),
    ],
)  # fmt: skip
def test_bytes_are_written_as_logged(size, text):
    assert lines.format_bytes(size) == text


def test_a_device_in_the_hosts_memory_is_named_once():
    host = (1000 * 1024, 2 * GIB, 8 * GIB)
    assert lines.memory_step("Model profiling run", None, host) == (
        "Model profiling run took 1000 KiB of host memory (2 GiB/8 GiB used)"
    )
    assert (
        lines.finished(2, 1000 * 1024, place="host") == "Warmup finished in 2 secs, allocated 1000 KiB of host memory"
    )


def test_a_step_of_the_boot_as_logged():
    device = (round(14.97 * GIB), round(14.97 * GIB), round(94.62 * GIB))
    host = (round(2.95 * GIB), round(475.2 * GIB), 1007 * GIB)
    assert lines.memory_step("Loading model weights", device, host) == (
        "Loading model weights took 14.97 GiB of device memory (14.97 GiB/94.62 GiB used) and 2.95 GiB of host memory "
        "(475.2 GiB/1007 GiB used)"
    )
