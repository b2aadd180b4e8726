"""The boot log in the documentation of vLLM on Gaudi, line by line.

It is made from its own inputs, on the fake card. The model has one layer with the log's cache, 16 MiB a block, and next
to no weights. Weights, workspace and graphs are charged by the log's own figures, and nothing is computed. A boot does
all the rest: buckets, their order, the division of memory, the order of captures, and every number that follows.
"""

from __future__ import annotations

import logging
import re

import pytest

from preheat import LLM
from preheat.warmup.record import Record
from tests.cpu.fake_hpu import OPTIONS, boot, inserted, model

GIB, MIB = 2**30, 2**20
HEADS, DIM, HIDDEN = 128, 256, 16
THIN = {
    "hidden_size": HIDDEN, "intermediate_size": 16, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "head_dim": DIM,
}  # fmt: skip
ASKED = OPTIONS | {
    "dtype": "bfloat16", "gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 1519, "max_num_batched_tokens": 4096,
    "max_model_len": 2048, "block_size": None, "batch_invariant": False, "skip_tokenizer_init": True,
}  # fmt: skip
ENV = {
    "VLLM_GRAPH_RESERVED_MEM": "0.4", "VLLM_PROMPT_BS_BUCKET_STEP": "32", "VLLM_PROMPT_BS_BUCKET_MAX": "4",
    "VLLM_PROMPT_SEQ_BUCKET_MAX": "1024", "VLLM_DECODE_BS_BUCKET_STEP": "128", "VLLM_DECODE_SEQ_BUCKET_MIN": "128",
    "VLLM_DECODE_SEQ_BUCKET_STEP": "128", "VLLM_DECODE_SEQ_BUCKET_MAX": "2048",
}  # fmt: skip
WEIGHTS = 2 * (4 * HIDDEN * HEADS * DIM + 3 * HIDDEN * 16 + 320 * HIDDEN + 3 * HIDDEN)

PROMPTS = [(rows, length) for rows in (1, 2, 4) for length in range(128, 1025, 128)]
DECODES = [(rows, length) for rows in (1, 2, 4) for length in range(128, 2049, 128)]
CAPTURED = [pair for pair in PROMPTS if pair[0] * pair[1] <= 1024 or pair == (2, 640)]
LOG = [
    "Prompt bucket config (min, step, max_warmup) bs:[1, 32, 4], seq:[128, 128, 1024]",
    f"Generated 24 prompt buckets: {PROMPTS}",
    "Decode bucket config (min, step, max_warmup) bs:[1, 128, 4], seq:[128, 128, 2048]",
    f"Generated 48 decode buckets: {DECODES}",
    "Pre-loading model weights on hpu:0 took 14.97 GiB of device memory (14.97 GiB/94.62 GiB used)",
    "Loading model weights took in total 14.97 GiB of device memory (14.97 GiB/94.62 GiB used)",
    "Model profiling run took 504 MiB of device memory (15.46 GiB/94.62 GiB used)",
    (
        "Free device memory: 79.16 GiB, 39.58 GiB usable (gpu_memory_utilization=0.5), 15.83 GiB reserved for "
        "HPUGraphs (VLLM_GRAPH_RESERVED_MEM=0.4), 23.75 GiB reserved for KV cache"
    ),
    "# HPU blocks: 1519, # CPU blocks: 0",
    "Initializing cache engine took 23.73 GiB of device memory (39.2 GiB/94.62 GiB used)",
    "[Warmup][Prompt][1/24] batch_size:4 seq_len:1024 free_mem:55.43 GiB",
    "[Warmup][Prompt][2/24] batch_size:4 seq_len:896 free_mem:55.43 GiB",
    "[Warmup][Prompt][3/24] batch_size:4 seq_len:768 free_mem:55.43 GiB",
    "[Warmup][Prompt][24/24] batch_size:1 seq_len:128 free_mem:55.43 GiB",
    "[Warmup][Decode][1/48] batch_size:4 seq_len:2048 free_mem:55.43 GiB",
    "[Warmup][Decode][2/48] batch_size:4 seq_len:1920 free_mem:55.43 GiB",
    "[Warmup][Decode][3/48] batch_size:4 seq_len:1792 free_mem:55.43 GiB",
    "[Warmup][Decode][47/48] batch_size:2 seq_len:128 free_mem:55.43 GiB",
    "[Warmup][Decode][48/48] batch_size:1 seq_len:128 free_mem:55.43 GiB",
    "[Warmup][Graph/Prompt][1/24] batch_size:1 seq_len:128 free_mem:55.43 GiB",
    "[Warmup][Graph/Prompt][12/24] batch_size:4 seq_len:256 free_mem:47.35 GiB",
    "[Warmup][Graph/Prompt][13/24] batch_size:2 seq_len:512 free_mem:45.91 GiB",
    "[Warmup][Graph/Prompt][14/24] batch_size:1 seq_len:1024 free_mem:44.48 GiB",
    "[Warmup][Graph/Prompt][15/24] batch_size:2 seq_len:640 free_mem:43.03 GiB",
    f"Graph/Prompt captured:15 (62.5%) used_mem:14.03 GiB buckets:{CAPTURED}",
    f"Graph/Decode captured:48 (100.0%) used_mem:161.9 MiB buckets:{DECODES}",
    "Warmup finished in # secs, allocated 14.19 GiB of device memory",
    "init_cache_engine took 37.92 GiB of device memory (53.39 GiB/94.62 GiB used)",
]
"""Lines of the log without times and without the host's memory, since these differ between machines."""
RATIO_3 = (
    "Using 15.85 GiB/55.43 GiB of free device memory for HPUGraphs, 4.754 GiB for prompt and 11.09 GiB for decode "
    "(VLLM_GRAPH_PROMPT_RATIO=0.3)"
)
"""Our line for the log's numbers 4.755 and 11.095.

The log takes 0.3 and 0.7 of 15.85, a rounded number.
"""
EQUAL = [
    "[Warmup][Graph/Prompt][11/24] batch_size:1 seq_len:896 free_mem:48.77 GiB",
    "[Warmup][Graph/Decode][1/48] batch_size:4 seq_len:128 free_mem:47.51 GiB",
    "[Warmup][Graph/Decode][48/48] batch_size:1 seq_len:2048 free_mem:47.35 GiB",
]
"""Lines that the log can only have written at a ratio of 0.5.

The log's text still explains this ratio ("both stages share equal memory constraints"). Eleven prompt graphs took 7.9
GiB before the first decode, and 0.3 of the pool is 4.8 GiB.
"""


def ours(line: str) -> str:
    """Return a line of the log in our words.

    The platform has no name here, and the fake is on the host.
    """
    line = line.replace("HPUGraphs", "graphs").replace("# HPU blocks", "# device blocks")
    return line.replace("on hpu:0", "on cpu:0").replace("init_cache_engine took", "init_cache_engine took in total")


def plain(line: str) -> str:
    """Return one of our lines, without times and the host's memory."""
    line = re.sub(r" and \S+ \S+ of host memory \(.*\)$", "", line)
    return re.sub(r"finished in \d+ secs", "finished in # secs", line)


def logged(tmp_path, caplog, env: dict[str, str]) -> tuple[LLM, list[str]]:
    from habana_frameworks.simulator import Figures

    figures = Figures(workspace=504 * MIB, row=1.439 * MIB)  # one product a token in a graph of one layer
    with inserted(ENV | env, figures=figures, dry=True, scale=14.97 * GIB / WEIGHTS), caplog.at_level(logging.INFO):
        llm = boot(ASKED, model=model(tmp_path, **THIN))
        return llm, [plain(line) for line in caplog.messages]


def is_said(line: str, said: list[str]) -> bool:
    """Return whether a line was logged.

    The log measured the memory of single graphs to 0.01 GiB.
    """
    text, found, free = line.partition(" free_mem:")
    if not found or "Graph" not in text:
        return line in said
    near = [other for other in said if other.startswith(text + found)]
    return any(abs(float(other.split(":")[-1].split()[0]) - float(free.split()[0])) < 0.0101 for other in near)


@pytest.fixture(autouse=True)
def _frameworks():
    with inserted():
        yield


def test_the_boot_log_line_by_line(tmp_path, caplog):
    llm, said = logged(tmp_path, caplog, {"VLLM_GRAPH_PROMPT_RATIO": "0.3"})
    assert [line for line in map(ours, [*LOG, RATIO_3]) if not is_said(line, said)] == []
    stages = [line for line in said if line.startswith("[Warmup]") and "[Mixed]" not in line]
    assert [line.split()[0] for line in stages[:72]] == [
        *(f"[Warmup][Prompt][{number}/24]" for number in range(1, 25)),
        *(f"[Warmup][Decode][{number}/48]" for number in range(1, 49)),
    ]
    order = [said.index(next(each for each in said if each.startswith(start))) for start in (
        "Loading model", "Model profiling", "Free device", "Prompt bucket", "Decode bucket", "# device blocks",
        "Initializing", "[Warmup][Prompt]", "[Warmup][Decode]", "Using ", "[Warmup][Graph/Prompt]",
        "Graph/Prompt captured", "Warmup finished", "init_cache_engine",
    )]  # fmt: skip
    assert order == sorted(order)
    assert captured(llm, "prompt") == {str(("prompt", *pair)).replace("'", "") for pair in CAPTURED}
    assert not is_said(ours(EQUAL[0]), said)


def test_the_order_of_its_graphs_is_that_of_equal_shares(tmp_path, caplog):
    env = {"VLLM_GRAPH_PROMPT_RATIO": "0.5"}
    _, said = logged(tmp_path, caplog, env)
    graphs = [line.split()[0] for line in said if line.startswith("[Warmup][Graph")]
    prompt = [f"[Warmup][Graph/Prompt][{number}/24]" for number in range(1, 16)]
    decode = [f"[Warmup][Graph/Decode][{number}/48]" for number in range(1, 49)]
    assert graphs == prompt[:11] + decode + prompt[11:]
    assert [line for line in map(ours, [*LOG, *EQUAL]) if not is_said(line, said)] == []


def captured(llm: LLM, kind: str) -> set[str]:
    record = Record.from_json(llm.loop.listener.report())
    return {entry.name for entry in record.entries if entry.kind == kind and entry.graph}
