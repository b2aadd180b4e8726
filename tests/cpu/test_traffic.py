"""A server's record proposes bucket sizes for its traffic.

A boot takes them, and answers the same.
"""

from __future__ import annotations

from preheat import LLM, SamplingParams
from preheat.cli.main import main
from preheat.warmup.record import Record

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128, "block_size": 16, "boot_check": "off"}


def test_the_traffic_of_one_boot_makes_the_buckets_of_the_next(tmp_path, capsys):
    prompts = [list(range(300, 300 + length)) for length in (21, 22, 23, 50)]
    params = SamplingParams(temperature=0.0, max_tokens=4)

    def run(**options):
        llm = LLM(**SMALL | {"skip_warmup": False, "cache_dir": "off", "enable_prefix_caching": False} | options)
        found = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
        return llm, found

    llm, expected = run()
    data = llm.loop.listener.report()
    record = Record.from_json(data)
    assert record.traffic == {"mixed": {21: 1, 22: 1, 23: 1, 50: 1}, "decode": {1: 12}}

    (tmp_path / "record.json").write_bytes(data)
    assert main(["plan", "--from-traffic", str(tmp_path / "record.json")]) == 0
    text = capsys.readouterr().out
    (tmp_path / "buckets.txt").write_text(text)
    del llm
    llm, found = run(
        bucketing_policy="unified", bucketing_strategy="file", bucketing_from_file=str(tmp_path / "buckets.txt")
    )
    assert found == expected
    sizes = [bucket.tokens for bucket in llm.loop.packer.plan.dispatcher.phases["mixed"].buckets]
    assert max(sizes) == 64 and len(sizes) < 10
    assert Record.from_json(llm.loop.listener.report()).misses == {}


def test_a_file_that_is_no_record_is_refused(tmp_path, capsys):
    (tmp_path / "x").write_text("[]")
    assert main(["plan", "--from-traffic", str(tmp_path / "x")]) == 2
    assert "no record can be read there" in capsys.readouterr().err
