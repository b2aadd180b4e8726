"""Cold events on CUDA, provoked on a real device."""

import pytest
import torch

from preheat.backends.cold import SELDOM
from preheat.backends.cuda.backend import CudaBackend
from preheat.warmup.cold_sources import ORIGINS, ColdSources


@pytest.fixture
def device():
    torch.ones(1, device="cuda")  # the context, and the first segment
    torch.cuda.synchronize()
    return torch.device("cuda")


def new_events(found):
    """Return the events of each source, after enough steps for rarely read counters."""
    told: dict[str, list[str]] = {}
    for _ in range(SELDOM):
        for name, said in found.new_events():
            told.setdefault(name, []).append(said)
    return told


def test_everything_that_has_a_hook_or_a_counter_is_watched(device):
    how = CudaBackend().cold_sources()
    watched = [name for name in ORIGINS if how[name].how != "none"]
    assert list(ColdSources(CudaBackend()).sources) == watched


def test_a_graph_capture_is_told_once(device):
    static = torch.ones(64, device=device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        static + 1
    found = ColdSources(CudaBackend())
    assert new_events(found) == {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static * 2
    assert new_events(found)["graph capture"] == ["a CUDA graph was captured"]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert new_events(found) == {}


def test_growth_of_the_pool_is_told_and_reuse_is_not(device):
    found = ColdSources(CudaBackend())
    kept = torch.empty(96 << 20, dtype=torch.uint8, device=device)
    assert "the allocator asked CUDA for memory" in new_events(found)["allocator"][0]
    del kept
    again = torch.empty(96 << 20, dtype=torch.uint8, device=device)
    assert new_events(found) == {}
    del again
    torch.cuda.empty_cache()


def test_a_triton_kernel_is_told_when_it_is_compiled_and_loaded(device, tmp_path, monkeypatch):
    import triton
    import triton.language as tl

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))

    @triton.jit
    def double(x, n, block: tl.constexpr):
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(x + at, tl.load(x + at, at < n) * 2, at < n)

    x = torch.ones(128, device=device)
    found = ColdSources(CudaBackend())
    double[(1,)](x, 128, 128)
    said = new_events(found)["triton"]
    assert said == ["double was compiled", "double was loaded"]
    double[(1,)](x, 128, 128)
    assert new_events(found) == {}
    double[(1,)](x, 128, 64)
    assert new_events(found)["triton"] == said
    assert x[0].item() == 8


def test_a_compiled_function_is_told(device):
    def triple(x):
        return x * 3

    found = ColdSources(CudaBackend())
    torch.compile(triple, dynamic=False)(torch.ones(7, device=device))
    assert any("triple" in said for said in new_events(found)["dynamo"])
