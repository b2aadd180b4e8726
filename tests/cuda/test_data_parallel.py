"""Replicas on GPUs: each has its own, and all have the bits of one engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.api.conftest import serving

pytestmark = pytest.mark.two_gpus

CACHE = 1 << 30
OPTIONS: dict[str, Any] = {"device": "cuda", "kv_cache_memory_bytes": CACHE, "max_num_seqs": 8}
BODY = {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 2}


def used() -> list[int]:
    """Bytes in use on each of the first two GPUs."""
    return [total - free for free, total in map(torch.cuda.mem_get_info, range(2))]


def test_each_replica_has_a_gpu_and_the_bits_of_one_engine() -> None:
    with serving("bundled", engine=None, wait=False, **OPTIONS) as server:
        server.wait_until_ready(300)
        alone = server.post("/v1/completions", BODY).json["choices"]
        digest = server.get("/warmup?format=json").json["proof"]["digest"]
    with serving("bundled", engine=None, wait=False, data_parallel_size=2, **OPTIONS) as server:
        server.wait_until_ready(300)
        assert min(used()) >= CACHE, "a GPU has no engine: a context alone takes less"
        records = server.get("/warmup?format=json").json["engines"]
        assert [record["proof"]["digest"] for record in records] == [digest] * 2
        assert all(not record["cold"] for record in records)
        for engine in ("0", "1"):
            answer = server.post("/v1/completions", BODY, **{"X-data-parallel-rank": engine})
            assert answer.json["choices"] == alone
