"""The page of figures equals the files of figures."""

import json

import pytest

from benchmarks.common.shapes import SHAPES
from benchmarks.performance_doc import BLOCK, DOCUMENT, DOCUMENTS, RESULTS, filled, svg

MACHINE = {"gpu": "Some GPU, 1.0 GiB", "cpu": "x", "versions": {"torch": "2.0"}, "commit": "abc"}


def test_tables_match_the_result_files():
    measured = {("beside_vllm", shape) for shape in SHAPES if (RESULTS / f"{shape}.json").exists()}
    assert {(kind, shape) for _, kind, shape, _ in BLOCK.findall(DOCUMENT.read_text())} >= measured
    assert len(measured) >= 2
    for document in DOCUMENTS:
        assert document.read_text() == filled(document.read_text()), "run: python -m benchmarks.performance_doc"


def test_the_cost_of_invariance_comes_from_its_file(tmp_path):
    text = "<!-- written by benchmarks/performance_doc.py: invariance_cost x -->\nstale\n<!-- end -->\n"
    assert "x: not measured yet" in filled(text, tmp_path)
    row = {"what": "ITL, batch 1, ms", "invariant": 4.4, "varying": 4.0, "cost_percent": 10.0}
    (tmp_path / "invariance_cost_x.json").write_text(json.dumps({"figures": [row], "machine": MACHINE}))
    found = filled(text, tmp_path)
    assert "| ITL, batch 1, ms | 4.4 | 4 | +10.0 % |" in found
    assert "Some GPU, 1.0 GiB, torch 2.0, commit abc" in found
    assert "stale" not in found


@pytest.mark.parametrize("shape", SHAPES)
def test_pictures_match_the_result_files(shape):
    path = DOCUMENT.parent / f"itl-{shape}.svg"
    assert (path.read_text() if path.exists() else None) == svg(shape, RESULTS), (
        "run: python -m benchmarks.performance_doc"
    )


def test_figures_come_from_files_alone(tmp_path):
    text = "<!-- written by benchmarks/performance_doc.py: beside_vllm llama-3.1-8b -->\nstale\n<!-- end -->\nrest\n"
    without = filled(text, tmp_path)
    assert "not been measured" in without
    assert "| nanobench, tokens/s | – | 9,631 | 9,330 | 9,658 | 5,879 |" in without
    assert "stale" not in without and without.endswith("rest\n")
    figures = {"nanobench": {"tok_s": 10800}, "left_out": ["a run: out of time"]}
    parts = {"throughput": {"options": {}, "machine": MACHINE, "figures": figures}}
    (tmp_path / "llama-3.1-8b.json").write_text(json.dumps({"parts": parts}))
    found = filled(text, tmp_path)
    assert "| nanobench, tokens/s | 10,800 | 9,631 | 9,330 | 9,658 | 5,879 |" in found
    assert "Some GPU, 1.0 GiB, torch 2.0, commit abc" in found
    assert "Not measured: throughput, a run: out of time." in found


def test_kernels_stand_beside_their_floors(tmp_path):
    text = "<!-- written by benchmarks/performance_doc.py: kernels x -->\n<!-- end -->\n"
    assert "Not measured yet" in filled(text, tmp_path)
    line = {"kind": "linear", "name": "", "us": 4000.0, "floor_us": 3400.0}
    figures = [{"rows": 1, "context": 1024, "idle_us": 12.0, "kernels": [line, {**line, "name": "gemm", "calls": 1}]}]
    (tmp_path / "kernels_x.json").write_text(json.dumps({"figures": figures}))
    found = filled(text, tmp_path)
    assert "| 1 × 1,024 | linear | 4,000 | 3,400 | 85% |" in found
    assert "| 1 × 1,024 | idle | 12 | 0 | – |" in found
    assert "gemm" not in found


def test_a_picture_needs_our_figures(tmp_path):
    assert svg("llama-3.1-8b", tmp_path) is None
    parts = {"latency": {"options": {}, "machine": MACHINE, "figures": {"itl_ms": {"1": 4.4, "256": 9.5}}}}
    (tmp_path / "llama-3.1-8b.json").write_text(json.dumps({"parts": parts}))
    picture = svg("llama-3.1-8b", tmp_path)
    assert all(f">{value}<" in picture for value in ("4.4", "4.924", "17.929", "9.5", "10.807"))
