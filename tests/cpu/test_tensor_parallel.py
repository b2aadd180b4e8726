"""Tensor parallelism on a CPU: one, two and four ranks give the same bits.

For the contract, ranks are threads of this process with the exchanges of processes. The engine has ranks that are
processes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.backends.base.collective import Collective
from preheat.backends.base.layers import LayerWeights
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.collective import PLACE_BYTES
from preheat.backends.cpu.sharing import CpuSharing
from preheat.backends.rendezvous import OneNode
from preheat.errors import ModelError, RankDied, SettingsError, WireError
from preheat.model import shard as shards
from preheat.model import sources
from preheat.model.decoder import Decoder
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.from_host import FromHost
from preheat.model.loader import Reading, load_weights
from preheat.model.recurrence_specs import DeltaSpec
from preheat.model.shard import shard
from preheat.ops.matmul import tree_sum
from preheat.parallel import channel
from preheat.parallel.channel import RingReceiver, RingSender
from preheat.parallel.ranks import Ranks
from preheat.parallel.reports import Heard, Reporter
from preheat.parallel.share import for_ranks
from preheat.settings import Settings
from preheat.warmup.record import Record
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.test_model_families import WITH_STATES, error_at_each_position, logits_of, random_tokens

NAMES = (
    "llama with biases",
    "qwen3 moe",
    "qwen2 moe",
    "mpt",
    "phi3",
    "glm 4",
    "cohere 2",
    "granite",
    "deepseek v3",
    "deepseek v2 lite",
    "qwen3-next",
    "granite 4 h with experts",
)
TOKENS = 24
OF_RANKS = {
    "qwen3-next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "granite 4 h with experts": {"mamba_n_groups": 4, "mamba_conv_bias": True},
}
"""Sizes that four ranks can divide."""


def on_ranks(world: int, folder: Path, run: Callable[[Collective], Tensor]) -> list[Tensor]:
    """Return the results of ``run`` on ``world`` ranks: threads that meet in a new folder."""
    folder.mkdir(parents=True)

    def rank(number: int) -> Tensor:
        torch.set_num_threads(1)
        return run(CpuSharing().join(OneNode(folder, number, world), lambda: None))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))


def logits_on(collective: Collective, model: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    spec = read_spec(read_config(model))
    weights = load_weights(spec, model, dtype, CpuBackend(), collective=collective)
    mine = shard(spec, collective.rank, collective.world)
    return logits_of(Decoder(mine, weights, 256), random_tokens(TOKENS))


def on_sizes(model: Path, folder: Path, dtype: torch.dtype = torch.float32, wrap: Callable = lambda c: c) -> list:
    """Return the logits on 1, 2 and 4 ranks, and assert that all ranks of a size agree."""
    found = []
    for world in (1, 2, 4):
        all_ranks = on_ranks(world, folder / str(world), lambda c: logits_on(wrap(c), model, dtype))
        assert all(torch.equal(logits, all_ranks[0]) for logits in all_ranks)
        found.append(all_ranks[0])
    return found


def same(found: list[Tensor]) -> bool:
    return all(torch.equal(logits, found[0]) for logits in found)


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_the_number_of_ranks(name, tmp_path):
    """One, two and four ranks give the same bits for models of all shapes.

    The models have biases, experts with and without a shared one, ALiBi slopes, fused queries, keys and values in
    another order, key/value heads that several ranks hold, and a vocabulary that four does not divide.
    """
    family, sizes = MODELS[name]
    reference = save_checkpoint((family, sizes | OF_RANKS.get(name, {})), tmp_path / "model")
    found = on_sizes(tmp_path / "model", tmp_path)
    assert same(found)
    bound = WITH_STATES if name == "qwen3-next" else 1e-5
    assert error_at_each_position(found[0], reference(random_tokens(TOKENS))).max() <= bound


def test_the_state_of_another_ranks_head_is_seen(tmp_path, monkeypatch):
    """Control: the second rank's state decays as the first rank's."""
    family, sizes = MODELS["qwen3-next"]
    save_checkpoint((family, sizes), tmp_path / "model")
    right = on_ranks(2, tmp_path / "right", lambda c: logits_on(c, tmp_path / "model"))
    monkeypatch.setattr(DeltaSpec, "own_heads", property(lambda self: (0, self.value.value_heads)))
    wrong = on_ranks(2, tmp_path / "wrong", lambda c: logits_on(c, tmp_path / "model"))
    assert not torch.equal(right[0], wrong[0])


def test_ranks_do_not_share_a_norm_of_all_heads(tmp_path):
    """Granite 4 H has one norm of all heads of a layer; one rank may be summed as many."""
    save_checkpoint(MODELS["granite 4 h"], tmp_path)
    spec = read_spec(read_config(tmp_path))
    assert shard(spec, 0, 1).layers[0].attention.value == spec.layers[0].attention.value
    with pytest.raises(ModelError, match=r"the norm of 12 heads together, model\.layers\.0\.mamba\.norm, yet"):
        shard(spec, 0, 2)


def test_bits_in_bfloat16(tmp_path):
    save_checkpoint(MODELS["mixtral"], tmp_path / "model")
    assert same(on_sizes(tmp_path / "model", tmp_path, torch.bfloat16))


class Wrapped:
    """Collective that passes calls on, as a base for planted faults."""

    def __init__(self, collective: Collective) -> None:
        self._collective, self.rank, self.world = collective, collective.rank, collective.world

    def gather(self, x: Tensor) -> Tensor:
        return self._collective.gather(x)


class RoundsOnTheWire(Wrapped):
    def gather(self, x: Tensor) -> Tensor:
        return super().gather(x.bfloat16()).to(x.dtype)


class OrderOfArrival(Wrapped):
    """Plant a rank that gets its own part first."""

    def gather(self, x: Tensor) -> Tensor:
        found = super().gather(x)
        return found.roll(-self.rank, 0) if x.shape[1] == 96 else found  # logits stay in their order


@pytest.mark.parametrize("name", ["llama with biases", "qwen3 moe"])
def test_controls(name, tmp_path, monkeypatch):
    """Control: three faults of ranks are seen.

    They are rounding on the way, a tree of the number of ranks, and sums in the order of arrival.
    """
    save_checkpoint(MODELS[name], tmp_path / "model")
    model = tmp_path / "model"
    plain = on_sizes(model, tmp_path / "plain", wrap=Wrapped)
    assert same(plain)
    assert not same(on_sizes(model, tmp_path / "rounds", wrap=RoundsOnTheWire))
    arrivals = on_ranks(4, tmp_path / "arrival", lambda c: logits_on(OrderOfArrival(c), model))
    assert not torch.equal(arrivals[0], plain[0])
    monkeypatch.setattr(shards, "k_splits_of", lambda world: max(world, 2))
    assert not same(on_sizes(model, tmp_path / "follows"))


def test_a_rank_reads_only_the_rows_that_it_keeps(tmp_path, monkeypatch):
    save_checkpoint(MODELS["qwen3 moe"], tmp_path / "model")
    read = threading.local()

    def counted(place: sources._Place, piece: object = None, take: Callable = sources._Place.read) -> Tensor:
        tensor = take(place, piece)
        read.numbers += tensor.numel()
        return tensor

    monkeypatch.setattr(sources._Place, "read", counted)
    spec = read_spec(read_config(tmp_path / "model"))

    def load(collective: Collective) -> Tensor:
        read.numbers = 0  # a thread may be a second rank when it has been one
        load_weights(spec, tmp_path / "model", torch.float32, CpuBackend(), collective=collective)
        return torch.tensor([read.numbers, shard(spec, collective.rank, collective.world).num_params])

    found = on_ranks(4, tmp_path / "ranks", load)
    assert [row[0] for row in found] == [row[1] for row in found]
    assert all(row[1] < 0.55 * spec.num_params for row in found)  # of a model that is half embeddings


def test_dummy_weights_of_ranks_are_parts_of_the_whole(tmp_path):
    save_checkpoint(MODELS["phi3"], tmp_path / "model")
    spec = read_spec(read_config(tmp_path / "model"))

    def logits(collective: Collective) -> Tensor:
        weights = load_weights(
            spec, tmp_path, torch.float32, CpuBackend(), Reading("dummy"), collective=collective
        )  # fmt: skip
        mine = shard(spec, collective.rank, collective.world)
        return logits_of(Decoder(mine, weights, 256), random_tokens(TOKENS))

    assert same([on_ranks(world, tmp_path / str(world), logits)[0] for world in (1, 2)])


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "inc", "quant_config": "inc.json"},
        {"execution_mode": "compile"},
    ],
)
def test_options_that_exclude_ranks_are_refused_by_name(options):
    name = next(iter(options))
    for ranks in ({"tp_invariant": True}, {"tensor_parallel_size": 2}):
        with pytest.raises(SettingsError, match=f"{name}.* do not work together yet.*tensor_parallel_size"):
            Settings(**ranks, **options)


@pytest.mark.parametrize(
    ("lacks", "options"),
    [(("tensor_parallel",), {}), (("tensor_parallel", "w8a8"), {"quantization": "fp8"})],
)
def test_traits_that_a_device_lacks_are_refused_before_weights_are_read(lacks, options, monkeypatch):
    monkeypatch.setattr(CpuBackend, "facts", replace(CpuBackend.facts, lacks={lacks: "nobody has built it"}))
    with pytest.raises(SettingsError, match="cannot be used on cpu: nobody has built it: leave tensor_parallel_size"):
        LLM(tp_invariant=True, **OPTIONS, **options)


def test_shares_that_are_loaded_on_the_host_go_to_the_device(monkeypatch):
    taken = []
    backend, device = CpuBackend(), torch.device("meta")
    monkeypatch.setattr(backend, "device", device)
    monkeypatch.setattr(CpuBackend, "layer", lambda self, *given: taken.extend(given))
    FromHost(backend, lambda source, out: None).layer("value", LayerWeights(torch.ones(2, 8)), "context")
    assert [taken[0], taken[1].weight.device, taken[1].bias, taken[2]] == ["value", device, None, "context"]


def test_threads_of_a_rank_do_not_depend_on_the_number_of_ranks():
    found = {
        for_ranks(Settings(tensor_parallel_size=size, tp_invariant=True), CpuBackend.facts).num_threads
        for size in (1, 2, 4)
    }
    assert len(found) == 1 and None not in found


def test_a_tree_of_neighbours():
    parts = [torch.tensor(value) for value in (1e8, 1.0, -1e8, 1.0)]
    assert tree_sum(parts) == (parts[0] + parts[1]) + (parts[2] + parts[3])
    assert tree_sum(parts) != ((parts[0] + parts[1]) + parts[2]) + parts[3]
    with pytest.raises(ValueError, match="not 3"):
        tree_sum(parts[:3])


def test_a_gather_may_exceed_its_shared_memory_slot(tmp_path):
    size = PLACE_BYTES // 2 + 3  # in four bytes each, two places and a bit
    got = on_ranks(2, tmp_path / "ranks", lambda c: c.gather(torch.arange(size) + c.rank))
    assert torch.equal(got[0], torch.stack([torch.arange(size), torch.arange(size) + 1])) and torch.equal(*got)


def test_messages_arrive_whole_and_in_order(tmp_path):
    """Messages arrive whole and in order.

    There is far more data than the ring holds, and one of two ranks is slow.
    """
    sent = [np.full(size, size) for size in (1, 10, channel.SLOT_BYTES, 3 * channel.SLOT_BYTES) * 6]

    def read(rank: int) -> bool:
        receiver = RingReceiver(tmp_path, 3, rank)
        for expected in sent:
            time.sleep(0.002 * rank)
            if not np.array_equal(receiver.receive(), expected):
                return False
        return True

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(read, rank) for rank in (1, 2)]
        sender = RingSender(tmp_path, 3, lambda: None)
        for message in sent:
            sender.send(message)
        assert all(answer.result(20) for answer in answers)


def test_an_error_of_one_rank_leaves_no_answer_behind():
    """The next call gets its own answers, not those that came after an error."""
    ranks = object.__new__(Ranks)
    ranks.heard, ranks.check = [Heard(Pipe()[0]) for _ in range(3)], lambda: None
    for heard, answer in zip(ranks.heard, (WireError.of(ModelError("no room")), 1, 2), strict=True):
        heard.answers.put(answer)
    with pytest.raises(ModelError, match="no room"):
        ranks.answers()
    for heard in ranks.heard:
        heard.answers.put("next")
    assert ranks.answers() == ["next"] * 3


def test_a_wait_ends_with_the_engine(tmp_path):
    """The leader's wait for a rank that reads nothing ends with the engine."""

    def check() -> None:
        raise RankDied("rank 1 is gone")

    sender = RingSender(tmp_path, 2, check)
    for number in range(channel.SLOTS):
        sender.send(number)
    with pytest.raises(RankDied, match="rank 1 is gone"):
        sender.send("one too many")


OPTIONS = {
    "num_threads": 1, "max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 32, "skip_warmup": False,
    "boot_check": "quick", "kv_cache_memory_bytes": 8 << 20, "determinism_warmup_iterations": 0,
    "engine_heartbeat_timeout_s": 4.0,
}  # fmt: skip
PROMPTS = ["def add(a, b):", "class Stack:", "import os"]


def answers(llm: LLM) -> list[object]:
    """Return results with greedy and drawn tokens, logprobs of output and prompt, and penalties."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=1),
        SamplingParams(temperature=0.9, seed=3, top_p=0.8, max_tokens=6, presence_penalty=0.5),
        SamplingParams(temperature=0.7, seed=5, top_k=20, max_tokens=6, logprobs=1),
    ]
    results = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(r.outputs[0].token_ids, repr(r.outputs[0].logprobs), repr(r.prompt_logprobs)) for r in results]


def record_of(llm: LLM) -> Record:
    record: Record = llm.loop.listener.record
    return record


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    llm = LLM(tensor_parallel_size=2, **OPTIONS)
    yield llm
    llm.loop.executor.ranks.close()


def test_logprobs_are_of_the_logits_that_were_drawn_from():
    """Logprobs are of the drawn token's logits, although prompt logits reuse the memory in float32.

    The logits of a prompt are computed behind the draw in the same step.
    """
    llm = LLM(tp_invariant=True, **OPTIONS | {"dtype": "float32", "skip_warmup": True, "boot_check": "off"})
    greedy = [SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, prompt_logprobs=n) for n in (1, None, None)]
    for result in llm.generate(PROMPTS, greedy, use_tqdm=False):
        (answer,) = result.outputs
        assert [answer.logprobs[place][token].rank for place, token in enumerate(answer.token_ids)] == [1, 1]


def test_an_engine_of_two_ranks_has_the_answers_of_one(two):
    one = LLM(tp_invariant=True, **OPTIONS)
    first, second = record_of(one), record_of(two)
    assert first.proof.digest == second.proof.digest and len(first.proof.digest) == 32
    assert first.proof.parts["sums"] == second.proof.parts["sums"] == "4 K splits in a tree"
    assert [first.proof.parts["ranks"], second.proof.parts["ranks"]] == [1, 2]
    assert second.invariant and not second.unproved()
    assert answers(one) == answers(two)


def test_cold_events_of_all_ranks_are_in_the_record(two):
    assert record_of(two).cold == {}
    ours, theirs = Pipe()
    Reporter(theirs).cold("import: somebody was imported")
    heard = two.loop.executor.ranks.heard[0]
    rank_1, heard.line = heard.line, ours  # as if rank 1 had seen it
    heard.listen()
    heard.line = rank_1
    two.generate(["x"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert record_of(two).cold == {"rank 1": 1}
    assert record_of(two).events[-1].detail == "import: somebody was imported"


def test_ranks_that_differ_are_noticed(two):
    executor, plan = two.loop.executor, two.loop.packer.plan
    executor.agree(plan)
    executor._seen.add(torch.zeros(1, 8))
    with pytest.raises(Exception, match=r"do not agree, so the engine takes no requests: logits: .* on rank 1"):
        executor.agree(plan)


def test_a_rank_that_stops_ends_the_engine_with_the_reason(two):
    """A stopped rank, alive to the system, ends the engine by its missing heartbeat.

    It is the last test of this engine.
    """
    ranks = two.loop.executor.ranks
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)
    with pytest.raises(RankDied, match="Rank 1 has sent no heartbeat for 4 s"):
        two.generate(["x"] * 3, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert ranks.processes[0].wait(60) == -signal.SIGKILL
    with pytest.raises(RankDied, match="no heartbeat"):
        two.generate(["x"], use_tqdm=False)
