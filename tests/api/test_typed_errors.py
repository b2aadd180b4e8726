"""Errors are typed from the loop to the client: whoever raises one decides the status that the client sees."""

from __future__ import annotations

from tests.api.conftest import serving

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "num_threads": 1}


def test_a_prompt_beyond_the_token_budget_is_refused_when_prompts_are_not_chunked() -> None:
    with serving("bundled", engine=None, enable_chunked_prefill=False, **SMALL) as server:
        refused = server.post("/v1/completions", {"prompt": [5] * 33, "max_tokens": 2})
        assert refused.status == 400
        assert (
            "--enable-chunked-prefill" in refused.error["message"]
            and "--max-num-batched-tokens" in refused.error["message"]
        )
        assert refused.error["param"] == "prompt"
        assert server.post("/v1/completions", {"prompt": [5] * 32, "max_tokens": 2}).status == 200
