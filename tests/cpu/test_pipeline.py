"""Pipeline parallelism on a CPU: stages change no bits, with or without ranks that share a stage's layers."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.backends.cpu.sharing import CpuSharing
from preheat.backends.rendezvous import OneNode
from preheat.errors import ModelError, RankDied, SettingsError
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.stage import stage_of
from preheat.parallel.groups import Groups, Pipe
from preheat.settings import Settings
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.test_tensor_parallel import OPTIONS, answers, record_of

pytestmark = pytest.mark.usefixtures("eager")  # faults are planted in operations of torch


def close(llm: LLM) -> None:
    if (ranks := getattr(llm.loop.executor, "ranks", None)) is not None:
        ranks.close()


def found(stages: int, size: int = 1, **more: object) -> tuple[str, object]:
    """Return the digest and the answers of an engine."""
    llm = LLM(pipeline_parallel_size=stages, tensor_parallel_size=size, **OPTIONS | more)
    try:
        return record_of(llm).proof.digest, answers(llm)
    finally:
        close(llm)


@pytest.fixture(scope="module")
def one() -> tuple[str, object]:
    return found(1)


def test_four_stages_have_the_digest_and_the_answers_of_one_engine(one):
    assert found(4) == one


def test_stages_of_two_ranks_each():
    assert found(2, 2) == found(1, tp_invariant=True)


def test_a_stage_that_is_killed_ends_the_engine():
    llm = LLM(pipeline_parallel_size=2, **OPTIONS)
    os.kill(llm.loop.executor.ranks.processes[0].pid, signal.SIGKILL)
    with pytest.raises(RankDied, match="Rank 1 ended"):
        llm.generate(["x"] * 3, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)


@pytest.mark.parametrize("name", ["qwen3 moe", "llama tied"])
def test_families_have_the_bits_of_one_engine(name, tmp_path):
    """Stages keep the digest of one engine.

    There are models with experts, and with tied embeddings on the first and last stage. Three stages are a first, a
    middle and a last one.
    """
    save_checkpoint(MODELS[name], tmp_path)
    spec = read_spec(read_config(tmp_path))
    options = {"model": str(tmp_path), "skip_tokenizer_init": True, "dtype": "float32", **OPTIONS}
    digests = []
    for stages in (1, 3):
        llm = LLM(pipeline_parallel_size=stages, **options)
        digests.append(record_of(llm).proof.digest)
        close(llm)
    assert len(set(digests)) == 1 and len(digests[0]) == 32
    parts = [stage_of(spec, number, 3) for number in range(3)]
    twice = spec.embedding.params if spec.tied else 0  # on the first stage and on the last
    norms = 2 * spec.layers[0].input_norm.params  # each stage but the last holds norms of the next one
    assert sum(part.num_params for part in parts) == spec.num_params + twice + norms
    assert [len(part.layers) for part in parts] == [1, 1, 1]


class RoundsOnTheWire(Pipe):
    def send(self, *tensors: Tensor) -> None:
        super().send(*(tensor.bfloat16().to(tensor.dtype) for tensor in tensors))


@pytest.mark.parametrize(("kind", "same"), [(Pipe, True), (RoundsOnTheWire, False)])
def test_hidden_states_keep_their_bits_between_stages(kind, same, tmp_path):
    """Data keeps its bits between stages.

    The control rounds hidden states on the way.
    """
    settings, sent = Settings(pipeline_parallel_size=2), torch.randn(2, 300, 96)

    def rank(number: int) -> Tensor:
        pipe = Groups.join(settings, CpuSharing(), OneNode(tmp_path, number, 2), lambda: None).pipe
        assert pipe is not None
        if number == 0:
            kind(pipe.before, pipe.after, pipe.everyone, pipe.source).send(*sent)
            return sent
        got = torch.zeros_like(sent)
        pipe.receive(*got)
        return got

    with ThreadPoolExecutor(2) as pool:
        given, got = pool.map(rank, range(2))
    assert torch.equal(given, got) is same


def test_options_that_exclude_stages_are_refused_by_name(tmp_path):
    refused = {"enable_lora": True, "kv_offloading_size": 1.0, "execution_mode": "compile"}
    for name, value in refused.items():
        with pytest.raises(SettingsError, match=f"{name}.* do not work together yet: .*leave pipeline_parallel_size"):
            Settings(pipeline_parallel_size=2, **{name: value})
    save_checkpoint(MODELS["llama"], tmp_path)
    with pytest.raises(ModelError, match="has 3 layers: lower --pipeline-parallel-size to 3"):
        stage_of(read_spec(read_config(tmp_path)), 0, 4)
