"""The benchmarks without an engine: their workloads equal the workloads of vLLM's figures."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import invariance_cost, turns
from benchmarks.common import arithmetic, compared, table
from benchmarks.common.client import Client, Served, quantile, summary
from benchmarks.common.families import scaled_down
from benchmarks.common.machine import ROOT
from benchmarks.common.process import environment, flags
from benchmarks.common.report import Clock, PartReport, read_parts
from benchmarks.common.shapes import FULL, SHAPES, TINY, engine_options, long_answer, long_length
from benchmarks.invariance_cost import beside
from benchmarks.registry import ALL, SINGLE, SUITE
from benchmarks.suite import command
from benchmarks.suite.first import SETTINGS, ratio_row
from preheat.cli import bench
from preheat.cli.main import main
from preheat.model.families import read_spec
from preheat.plan.cost import ModelSizes
from preheat.settings import Settings


def test_the_mix_is_the_one_of_the_anchors():
    from benchmarks.suite.offline import nanobench

    prompts, params = nanobench(FULL, 128256)
    assert (len(prompts), sum(each.max_tokens for each in params)) == (256, 133_966)
    assert all(100 <= len(ids) <= 1024 and max(ids) <= 10_000 for ids in prompts)


def test_the_cost_of_invariance_is_the_time_that_it_adds():
    invariant = {"ITL, batch 1, ms": 4.4, "prefill 2 × 3, tokens/s": 800.0, "ITL, batch 8, ms": 5.0}
    rows = beside(invariant, {"ITL, batch 1, ms": 4.0, "prefill 2 × 3, tokens/s": 1000.0})
    assert [row["what"] for row in rows] == list(invariant)[:2]
    assert [row["cost_percent"] for row in rows] == [10.0, 25.0]


def test_arrivals_equal_the_anchors(monkeypatch):
    """The client sends as many requests at each rate as were sent to vLLM, without waiting for answers."""
    client = Client(0, 128256)

    async def ask(prompt, tokens, **sampling):
        assert 100 <= len(prompt) <= 1024 and 32 <= tokens <= 256 and sampling == {"temperature": 0.6}
        return Served(tokens, first=0.01, last=0.02, gaps=[0.01])

    async def at_once(seconds):
        pass

    monkeypatch.setattr(client, "ask", ask)
    monkeypatch.setattr(client, "prompt", lambda length: [0] * length)
    monkeypatch.setattr("benchmarks.common.client.asyncio.sleep", at_once)
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


def test_a_smoke_test_runs_each_shape_scaled_down_with_all_kinds_of_layers():
    for name, config in SHAPES.items():
        whole, small = read_spec(config), read_spec(scaled_down(config))
        assert ModelSizes.of(small).read_by(256) < 1e8 < ModelSizes.of(whole).read_by(1), name
        for kind in (lambda layer: layer.attention.kv.latent, lambda layer: layer.attention.window is None,
                     lambda layer: type(layer.mlp)):  # fmt: skip
            assert {kind(layer) for layer in small.layers} == {kind(layer) for layer in whole.layers}, name


def test_the_least_of_a_step_counts_experts_windows_and_each_weight_once():
    """By hand, from the published sizes; fewer visited experts are fewer bytes."""
    spec = read_spec(SHAPES["gpt-oss-20b"])
    found = arithmetic.step_bytes(spec, 32, 1000)
    projections = 2880 * (64 + 8 + 8) * 64 + 64 * 64 * 2880 + 32 * 2880
    assert found["weights"] == pytest.approx(2 * (24 * projections + 201088 * 2880), rel=1e-3)
    assert found["experts"] == pytest.approx(24 * 32 * 3 * 2880**2 * (1 / 2 + 4 / 32) * (1 - (7 / 8) ** 32), rel=1e-3)
    assert found["cache"] == 32 * 12 * (1000 + 128) * 2 * 8 * 64 * 2
    few = arithmetic.limits(spec, 32, 1000, touched=8.0)
    assert few["experts"] == {"of": 32, "equal_chances": 31.6, "counted": 8.0}
    sheet = next(iter(arithmetic.SPEEDS))
    assert few["ms"][sheet] == pytest.approx(sum(found.values()) / 4.8e9, rel=1e-3)
    assert few["ms_of_counted"][sheet] < few["ms"][sheet] / 2
    parts = {"latency": {"figures": {"itl_ms": {"32": 9.0}, "arithmetic": {"32": few}}}}
    text = arithmetic.render(parts)
    assert (
        "31.6 of 32 by equal chances, counted 8" in text and f"measured {9 / few['ms_of_counted'][sheet]:.2f}" in text
    )
    assert arithmetic.render({}) == ""


def test_options_survive_the_command_line(tmp_path):
    options = engine_options("qwen3-0.6b", {"debug": ("defrag",), "max_num_seqs": "7"}, tmp_path, tiny=False)
    assert json.loads((tmp_path / "config.json").read_text()) == SHAPES["qwen3-0.6b"]
    settings = Settings.load(options, env={})
    assert (settings.load_format, settings.max_num_seqs, settings.on_cold) == ("dummy", 7, "raise")
    words = flags({"enable_prefix_caching": False, "skip_tokenizer_init": True, "debug": ("defrag",), "port": 1})
    assert words == ["--no-enable-prefix-caching", "--skip-tokenizer-init", "--debug", "defrag", "--port=1"]


def test_a_report_is_whole_after_every_figure(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.common.report.fingerprint", dict)
    monkeypatch.setattr("benchmarks.common.report.fingerprint_from_outside", dict)
    path = tmp_path / "new" / "x.json"
    latency = PartReport(path, "latency", {"a": 1})
    latency.put(4.0, "itl_ms", "1")
    PartReport(path, "serve", {}).leave_out("load", "out of time")
    latency.put(5.0, "itl_ms", "8")
    found = read_parts(path)
    assert found["latency"] == {"options": {"a": 1}, "machine": {}, "figures": {"itl_ms": {"1": 4.0, "8": 5.0}}}
    assert found["serve"]["figures"] == {"left_out": ["load: out of time"]}
    assert read_parts(tmp_path / "none.json") == {}


def test_our_figures_stand_beside_theirs():
    parts = {"latency": {"figures": {"itl_ms": {"1": 4.4}, "ttft_ms": 45.5}}}
    rows = dict(table.rows("llama-3.1-8b", parts))
    engines = [each.engine for each in table.columns("llama-3.1-8b", parts)]
    assert engines[:4] == ["preheat", "vLLM 0.26.0", "SGLang 0.5.17", "vLLM 0.24.0"]
    assert rows["ITL, batch 1, ms"] == [4.4, 4.943, 4.765, 4.924, 17.929]
    assert rows["nanobench, tokens/s"] == [None, 9631, 9330, 9658, 5879]
    assert rows["24 requests/s: TTFT p99, ms"] == [None, None, None, 62.74, None]
    text = table.render("llama-3.1-8b", parts)
    assert "vLLM 0.24.0, VLLM_BATCH_INVARIANT=1" in text
    assert next(line for line in text.splitlines() if line.startswith("nanobench")).split()[-5:] == [
        "–", "9,631", "9,330", "9,658", "5,879",
    ]  # fmt: skip
    assert [row[0] for row in table.rows("bundled", parts)] == ["ITL, batch 1, ms", "TTFT of 2,048 tokens, ms"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench latency --model x", "--shape"),
        ("bench latency --checkpoint", "startup alone"),
        ("bench startup --checkpoint --shape bundled", "startup alone"),
        (f"bench startup --caches {Path(__file__).parent}", "empty folder"),
        ("bench latncy", "did you mean latency?"),
    ],
)
def test_mistakes_are_reported(line, message, capsys):
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_all_parts_run_in_order_each_group_by_itself(tmp_path, monkeypatch):
    ran = []

    def run(words, **_):
        ran.append(words[3:])
        return type("Done", (), {"returncode": int("serve" in words)})()

    monkeypatch.setattr(command.subprocess, "run", run)
    line = ["bench", "all", "--shape", "bundled", "--output", str(tmp_path), "--max-num-seqs", "3"]
    assert main(line) == 1  # serving failed, the rest ran
    groups = [[word for word in words if not word.startswith("--")] for words in ran]
    assert groups == [["startup"], ["first", "latency", "throughput"], ["serve"], ["long"]]
    assert all("--max-num-seqs=3" in words and "--shape=bundled" in words for words in ran)


def test_a_clock_runs_down():
    assert Clock(10).left <= 10 < Clock(100).left


def test_a_client_practises_elsewhere():
    """A client practices without a server at the port that it will ask."""
    client = asyncio.run(Client.practised(1, 4096))
    assert client.prompt(3) == Client(1, 4096).prompt(3)


def test_every_name_is_a_benchmark_and_every_benchmark_has_a_name(capsys):
    assert sorted(part for group in command.TOGETHER for part in group) == sorted(SUITE)
    helpers = {"__init__", "__main__", "performance_doc", "registry"}
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - helpers == set(SINGLE)
    assert not set(SINGLE) & {*SUITE, ALL}
    assert main(["bench"]) == 0
    listed = re.findall(r"^  (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert listed == [*SUITE, ALL, *SINGLE]


def test_a_single_benchmark_gets_its_arguments(monkeypatch):
    given = []
    monkeypatch.setattr(invariance_cost, "main", given.extend)
    assert main(["bench", "invariance_cost", "--turns", "1"]) == 0
    assert given == ["--turns", "1"]


def test_without_a_checkout_the_error_names_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site-packages" / "preheat" / "cli" / "bench.py"))
    assert main(["bench", "latency"]) == 1
    assert "clone its repository" in capsys.readouterr().err


def test_the_command_never_imports_torch():
    modules = [f"benchmarks.{name}" for name in ("__main__", "suite.command", "common.table", "performance_doc")]
    code = f"import sys, importlib as i; [i.import_module(m) for m in {modules}]; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch was imported"


def test_turns_compare_times_and_rates():
    """A rate is slower if it is lower; a commit's figure is the best of its turns."""
    first = {"itl_ms": {"1": 4.0, "8": 5.0}, "prefill_tok_s": 100, "options": {"ms": 1}, "arithmetic": {"1": {"ms": 2}}}
    again = {"itl_ms": {"1": 3.0, "8": 6.0}, "prefill_tok_s": 120, "steps": [{"name": "warm-up", "seconds": 2.0}, 7]}
    found = [dict(turns.figures_in(each)) for each in (first, again)]
    assert found[0] == {"itl_ms 1": 4.0, "itl_ms 8": 5.0, "prefill_tok_s": 100.0}
    assert found[1]["steps warm-up seconds"] == 2.0
    old = compared.best(found)
    assert old == {"itl_ms 1": 3.0, "itl_ms 8": 5.0, "prefill_tok_s": 120.0}
    assert compared.percent_slower(old, {"itl_ms 1": 3.3, "itl_ms 8": 5.0, "prefill_tok_s": 100.0, "ttft_ms": 1.0}) == {
        "itl_ms 1": 10.0, "itl_ms 8": 0.0, "prefill_tok_s": 20.0
    }  # fmt: skip


@pytest.mark.parametrize("words", [["HEAD"], ["HEAD", "--turns", "2", "latency"], ["--turns", "0", "HEAD", "latency"]])
def test_turns_refuse_a_command_without_a_benchmark(words, capsys):
    with pytest.raises(SystemExit):
        turns.main(words)
    assert "name a commit, a benchmark and its arguments" in capsys.readouterr().err
