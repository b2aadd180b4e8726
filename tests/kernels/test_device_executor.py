"""The executor on CUDA: a forward program in parts of a few layers has the bits of the whole one."""

import numpy as np
import pytest
import torch

from preheat.backends.cuda.device.graph import CudaGraphs
from preheat.backends.cuda.sampling.layout import SamplerLayout
from preheat.core import Request, SamplingParams
from preheat.execution.build import Assembly, LoadedModel, build
from preheat.execution.executor import Executor
from preheat.limits import Limits
from preheat.model.decoder import Attended
from preheat.model.families import read_spec
from preheat.model.loader import Reading, load_weights
from preheat.plan.buckets import Bucket
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.plan.programs import Program
from preheat.schedule.scheduler import Scheduler
from preheat.schedule.slots import Slots
from preheat.settings import Settings
from preheat.warmup.dummy_batch import DummyBatches, rows_of
from tests.controls import fails
from tests.kernels.backend import InterpretedCuda

LIMITS = Limits(
    max_model_len=32, max_num_seqs=2, max_num_batched_tokens=4, max_num_prefill_seqs=None, block_size=16, num_blocks=5
)  # fmt: skip
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Plan and model."""
    spec, folder = read_spec(CONFIG), tmp_path_factory.mktemp("model")
    weights = load_weights(spec, folder, torch.float32, InterpretedCuda(), Reading("dummy"))
    return make_plan(LIMITS, PlanOptions()), LoadedModel(folder, spec, torch.float32, "float32", weights, 1)


def engine(made, **options):
    plan, model = made
    slots = Slots(LIMITS.max_num_seqs, LIMITS.max_model_len, LIMITS.block_size)
    packer, executor = build(Settings(**options), InterpretedCuda(), model, plan, slots, how=Assembly("graphs"))
    return packer, executor, DummyBatches(slots, LIMITS, 48)


def attended(made, shape, **options):
    """Return attention's output and the residual stream, side by side."""
    packer, executor, feed = engine(made, **options)
    with feed.work(rows_of(made[0].dispatcher.example(shape), LIMITS)) as schedule:
        return torch.cat(executor.forward(packer.pack(schedule))[:2], dim=1)


@pytest.mark.parametrize(("shape", "layers"), [(Bucket.decode(2), 1), (Bucket.mixed(4, 2), 2)], ids=str)
def test_parts_have_the_bits_of_the_whole(made, shape, layers):
    whole = attended(made, shape)
    assert whole.abs().sum() > 0
    assert torch.equal(attended(made, shape, config_hidden_layers=layers), whole)


@pytest.mark.parametrize(("layers", "parts"), [(None, [3]), (1, [1, 1, 1]), (2, [2, 1]), (99, [3])])
def test_layers_are_divided(made, layers, parts):
    _, executor, _ = engine(made, config_hidden_layers=layers)
    assert [len(part.layers) for part in executor._parts_of(Program("forward", Bucket.decode(2)))] == parts


def test_parts_hand_on_the_residual_stream_too(made, monkeypatch):
    """Negative control: with a stream of its own for each part, the bits are others."""
    shape = Bucket.decode(2)
    whole = attended(made, shape)
    forward = Executor._forward

    def forgetful(self, bucket, layers, tap=None):
        self._residual.mul_(0 if layers[0] else 1)
        return forward(self, bucket, layers, tap)

    monkeypatch.setattr(Executor, "_forward", forgetful)
    assert torch.equal(attended(made, shape), whole)
    assert not torch.equal(attended(made, shape, config_hidden_layers=2), whole)


def told(made, monkeypatch, params) -> list[int]:
    """Return the words packed for the sampler, step by step, while two rows decode.

    Assert that the sampler knows of every step as much as it would know of that step alone.
    """
    plan, model = made
    scheduler, packed = Scheduler(LIMITS, padded=plan.padded), []
    packer, executor = build(Settings(), InterpretedCuda(), model, plan, scheduler.slots, how=Assembly("graphs"))
    nothing = torch.zeros(LIMITS.max_num_seqs, 1)
    monkeypatch.setattr(executor.forwards, "_body", lambda key: Attended(nothing, nothing))
    monkeypatch.setattr(executor.samples, "_body", lambda key: nothing)
    pack = SamplerLayout.pack
    monkeypatch.setattr(SamplerLayout, "pack", lambda *args: packed.append(pack(*args)) or packed[-1])
    for number in range(2):
        scheduler.add(Request(number, [number + 1], SamplingParams(**params), number, 9, stop_ids=[5]))
    while (schedule := scheduler.schedule()) is not None:
        batch = packer.pack(schedule)
        result = executor.launch(batch).result()
        host = np.zeros(executor.sampler.layout.words, np.int32)
        used = pack(executor.sampler.layout, host, batch.sampling, batch.sampled_slots)
        assert executor.sampler.settings[:used].tolist() == host[:used].tolist()
        scheduler.process_results(schedule, result)
    return packed


@pytest.mark.parametrize(
    ("params", "count"),
    [({"temperature": 0.0}, 3), ({"temperature": 0.5, "min_p": 0.1}, 3), ({"temperature": 0.0, "min_tokens": 3}, 5)],
    ids=["greedy", "random", "edited"],
)
def test_the_sampler_fills_a_host_copy_only_for_changes(made, monkeypatch, params, count):
    """Each host copy is filled once for the step of the prompts or the steps that follow it.

    While logits are edited, it is filled for each step.
    """
    assert len(told(made, monkeypatch, params)) == count


def test_positions_that_do_not_advance_are_noticed(made, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(SamplerLayout, "advance", lambda *_: None)
    with fails():
        told(made, monkeypatch, {"temperature": 0.5})


class Graph:
    """Stands in for a CUDA graph, and counts.

    The body runs while it is captured, and not when it is replayed.
    """

    begun = replayed = 0

    def capture_begin(self, **_):
        Graph.begun += 1

    def capture_end(self):
        pass

    def replay(self):
        Graph.replayed += 1


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(Graph, "begun", 0)
    monkeypatch.setattr(Graph, "replayed", 0)
    return Graph


def test_a_shape_is_captured_in_parts_and_replays_them_all(made, graphs):
    shape = Bucket.decode(2)
    program, other = Program("forward", shape), Program("forward", Bucket.decode(1))
    packer, executor, feed = engine(made, config_hidden_layers=1)
    assert not executor.is_captured(program)
    executor.capture(program)
    assert executor.is_captured(program) and not executor.is_captured(other)
    assert not executor.is_captured(program._replace(adapted=True))
    with feed.work(rows_of(made[0].dispatcher.example(shape), LIMITS)) as schedule:
        batch = packer.pack(schedule)
        executor.forward(batch)
        executor.forward(batch, eager=True)
    assert (graphs.begun, graphs.replayed) == (3, 3)


def test_a_shape_is_captured_whole_or_not_at_all(made, graphs, monkeypatch):
    """Memory runs out at the second part."""
    program, (_, executor, _) = Program("forward", Bucket.decode(2)), engine(made, config_hidden_layers=1)
    capture = CudaGraphs.capture

    def short(self, key):
        if key.layers[0] == 1:
            raise torch.OutOfMemoryError
        capture(self, key)

    monkeypatch.setattr(CudaGraphs, "capture", short)
    with pytest.raises(torch.OutOfMemoryError):
        executor.capture(program)
    assert graphs.begun == 1
    assert not any(part in executor.forwards for part in executor._parts_of(program))
