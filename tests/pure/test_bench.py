"""The bench without an engine: its workloads are the ones that the figures beside ours were taken with."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from preheat.bench import commands, table
from preheat.bench.client import Client, Served, quantile, summary
from preheat.bench.first import SETTINGS, ratio_row
from preheat.bench.report import Clock, Report, read_parts
from preheat.bench.serve import flags
from preheat.bench.shapes import FULL, SHAPES, TINY, engine_options, long_answer, long_length
from preheat.cli import main
from preheat.model.families import read_spec
from preheat.settings import Settings


def test_the_mix_is_the_one_of_the_anchors():
    from preheat.bench.offline import nanobench

    prompts, params = nanobench(FULL, 128256)
    assert (len(prompts), sum(each.max_tokens for each in params)) == (256, 133_966)
    assert all(100 <= len(ids) <= 1024 and max(ids) <= 10_000 for ids in prompts)


def test_the_cost_of_invariance_is_the_time_that_it_adds(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    from invariance_cost import beside

    invariant = {"ITL, batch 1, ms": 4.4, "prefill 2 × 3, tokens/s": 800.0, "ITL, batch 8, ms": 5.0}
    rows = beside(invariant, {"ITL, batch 1, ms": 4.0, "prefill 2 × 3, tokens/s": 1000.0})
    assert [row["what"] for row in rows] == list(invariant)[:2]
    assert [row["cost_percent"] for row in rows] == [10.0, 25.0]


def test_arrivals_are_those_of_the_anchors(monkeypatch):
    """As many requests at each rate as vLLM was sent, without waiting for them."""
    client = Client(0, 128256)

    async def ask(prompt, tokens, **sampling):
        assert 100 <= len(prompt) <= 1024 and 32 <= tokens <= 256 and sampling == {"temperature": 0.6}
        return Served(tokens, first=0.01, last=0.02, gaps=[0.01])

    async def at_once(seconds):
        pass

    monkeypatch.setattr(client, "ask", ask)
    monkeypatch.setattr(client, "prompt", lambda length: [0] * length)
    monkeypatch.setattr("preheat.bench.client.asyncio.sleep", at_once)
    sent = [
        asyncio.run(client.sweep(rate, FULL.rate_seconds, FULL.served_tokens, FULL.answer_tokens))["sent"]
        for rate in FULL.rates
    ]
    theirs = table.anchors()["shapes"]["llama-3.1-8b"]["default"]["sweep"]
    assert sent == [line["sent"] for line in theirs] == [14, 52, 109, 292, 343]


def test_summaries_and_ratios():
    assert [quantile([0.001, 0.002, 0.004], share) for share in (0.5, 0.99, 1.0)] == [2.0, 4.0, 4.0]
    assert quantile([], 0.5) is None
    found = summary([Served(3, 0.1, 0.3, [0.1, 0.1]), Served(5, error="gone")], wall=2.0)
    assert (found["sent"], found["ok"], found["out_tok_s"], found["errors"]) == (2, 1, 2, ["gone"])
    assert ratio_row("greedy", 16, 30.0, [10.0, 20.0, 15.0])["ratio"] == 2.0
    assert len(SETTINGS) == 9 and len(FULL.first_lengths) == 5


def test_shapes_are_models_that_run_and_long_contexts_fit():
    for name, config in SHAPES.items():
        assert read_spec(config).num_layers == config["num_hidden_layers"], name
    for sizes in (FULL, TINY):
        for rows, context in sizes.long:
            assert context + long_answer(sizes, rows, context) <= long_length(sizes)
            assert long_answer(sizes, rows, context) > rows * context / 8192 + sizes.steps  # steps of reading at most
    assert long_length(FULL) <= read_spec(SHAPES["llama-3.1-8b"]).max_position_embeddings


def test_options_survive_the_command_line(tmp_path):
    options = engine_options("qwen3-0.6b", {"debug": ("defrag",), "max_num_seqs": "7"}, tmp_path, tiny=False)
    assert json.loads((tmp_path / "config.json").read_text()) == SHAPES["qwen3-0.6b"]
    settings = Settings.load(options, env={})
    assert (settings.load_format, settings.max_num_seqs, settings.on_cold) == ("dummy", 7, "raise")
    words = flags({"enable_prefix_caching": False, "skip_tokenizer_init": True, "debug": ("defrag",), "port": 1})
    assert words == ["--no-enable-prefix-caching", "--skip-tokenizer-init", "--debug", "defrag", "--port=1"]


def test_a_report_is_whole_after_every_figure(tmp_path, monkeypatch):
    monkeypatch.setattr("preheat.bench.report.fingerprint", dict)
    monkeypatch.setattr("preheat.bench.report.fingerprint_from_outside", dict)
    path = tmp_path / "new" / "x.json"
    latency = Report(path, "latency", {"a": 1})
    latency.put(4.0, "itl_ms", "1")
    Report(path, "serve", {}).leave_out("load", "out of time")
    latency.put(5.0, "itl_ms", "8")
    found = read_parts(path)
    assert found["latency"] == {"options": {"a": 1}, "machine": {}, "figures": {"itl_ms": {"1": 4.0, "8": 5.0}}}
    assert found["serve"]["figures"] == {"left_out": ["load: out of time"]}
    assert read_parts(tmp_path / "none.json") == {}


def test_our_figures_stand_beside_theirs():
    parts = {"latency": {"figures": {"itl_ms": {"1": 4.4}, "ttft_ms": 45.5}}}
    rows = {row[0]: row[1:] for row in table.rows("llama-3.1-8b", parts)}
    assert rows["ITL, batch 1, ms"] == (4.4, 4.924, 17.929)
    assert rows["nanobench, tokens/s"] == (None, 9658, 5879)
    assert rows["24 requests/s: TTFT p99, ms"] == (None, 62.74, None)
    text = table.render("llama-3.1-8b", parts)
    assert "vLLM 0.24.0 invariant" in text
    assert next(line for line in text.splitlines() if line.startswith("nanobench")).split()[-3:] == [
        "–", "9,658", "5,879",
    ]  # fmt: skip
    assert [row[0] for row in table.rows("bundled", parts)] == ["ITL, batch 1, ms", "TTFT of 2,048 tokens, ms"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench latency --model x", "--shape"),
        ("bench latency --checkpoint", "startup alone"),
        ("bench startup --checkpoint --shape bundled", "startup alone"),
        (f"bench startup --caches {Path(__file__).parent}", "empty folder"),
    ],
)
def test_mistakes_are_told(line, message, capsys):
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_all_parts_run_in_order_each_group_by_itself(tmp_path, monkeypatch):
    ran = []

    def run(command, **_):
        ran.append(command[4:])
        return type("Done", (), {"returncode": int("serve" in command)})()

    monkeypatch.setattr(commands.subprocess, "run", run)
    line = ["bench", "all", "--shape", "bundled", "--output", str(tmp_path), "--max-num-seqs", "3"]
    assert main(line) == 1  # serving failed, the rest ran
    groups = [[word for word in command if not word.startswith("--")] for command in ran]
    assert groups == [["startup"], ["first", "latency", "throughput"], ["serve"], ["long"]]
    assert all("--max-num-seqs=3" in command and "--shape=bundled" in command for command in ran)


def test_a_clock_runs_down():
    assert Clock(10).left <= 10 < Clock(100).left


def test_a_client_practises_elsewhere():
    """Nobody listens at the port that it will ask."""
    client = asyncio.run(Client.practised(1, 4096))
    assert client.prompt(3) == Client(1, 4096).prompt(3)
