"""Objects of a caller of the library: parameters, outputs, arguments, metrics, streams of a request."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import weakref

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preheat.distributed import cleanup_dist_env_and_memory

from preheat import AsyncEngineArgs, EngineArgs, FlatLogprobs, Logprob, RequestOutputKind, SamplingParams
from preheat.core import SAMPLING_FIELDS, Stats
from preheat.errors import InvalidRequest, SettingsError
from preheat.frontend.embedding import print_embeddings
from preheat.frontend.metric_values import Counter, Histogram, Vector, metric_values
from preheat.frontend.outputs import CompletionOutput, EmbeddingRequestOutput, PoolingOutput, PoolingRequestOutput
from preheat.library.engine_args import FlexibleArgumentParser
from preheat.library.inputs import parts_of
from preheat.library.worker import METHODS, Worker, collective_rpc
from preheat.metrics import Metrics
from preheat.settings import Settings
from preheat.utils.gc import collect_and_freeze


@given(st.lists(st.integers(0, 20)))
def test_stop_ids_are_named_once_in_their_order(ids):
    kept = SamplingParams(stop_token_ids=ids).stop_token_ids
    assert kept == sorted(set(ids), key=ids.index)


def test_a_clone_is_another_one():
    params = SamplingParams(stop=["a"], extra_args={"b": [1]}, output_kind=RequestOutputKind.DELTA)
    other = params.clone()
    assert other == params and other is not params and other.extra_args["b"] is not params.extra_args["b"]
    other.temperature = 0.5
    assert params.temperature == 1
    alone = SamplingParams(skip_clone=True)
    assert alone.clone() is alone
    assert SamplingParams.from_optional(top_p=None, top_k=3) == SamplingParams(top_k=3)


def test_callers_fields_travel_and_have_no_row():
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert {"output_kind", "flat_logprobs", "extra_args"}.isdisjoint(SAMPLING_FIELDS)
    with pytest.raises(ValueError, match="stream_interval must be at least 1"):
        SamplingParams(stream_interval=0)


position = st.dictionaries(st.integers(0, 9), st.builds(Logprob, st.floats(-9, 0), st.integers(1, 9), st.text()))


@given(st.lists(position))
def test_flat_logprobs_are_the_positions(positions):
    flat = FlatLogprobs(positions)
    assert list(flat) == positions and flat == FlatLogprobs(positions)
    assert list(flat[1:]) == positions[1:]
    if positions:
        assert flat[-1] == positions[-1]
        assert flat != FlatLogprobs(positions[1:])


def test_outputs_of_prompts():
    import numpy as np

    assert [CompletionOutput(0, "", [], finish_reason=end).finished() for end in (None, "stop")] == [False, True]
    pooled = PoolingRequestOutput("7", PoolingOutput(np.array([1.0, 2.0], np.float32)), [3], num_cached_tokens=1)
    made = EmbeddingRequestOutput.from_base(pooled)
    assert (made.request_id, made.outputs.embedding, made.num_cached_tokens) == ("7", [1.0, 2.0], 1)
    assert isinstance(made, PoolingRequestOutput)


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_arguments_of_an_engine(kind):
    args = kind(max_num_seqs=4)
    assert dataclasses.asdict(args) == {"max_num_seqs": 4}
    assert (args.max_num_seqs, args.seed, args.model) == (4, None, Settings().model)
    args.max_model_len = 64
    assert args.create_engine_config() == Settings.load({"max_num_seqs": 4, "max_model_len": 64})
    other = dataclasses.replace(args, max_num_seqs=8)
    assert (other.max_num_seqs, other.max_model_len, args.max_num_seqs) == (8, 64, 4) and other != args
    with pytest.raises(AttributeError, match="no option 'color'"):
        args.color  # noqa: B018
    with pytest.raises(SettingsError, match="color"):
        kind(color="red")


def test_arguments_come_from_flags():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--best", action="store_true")
    args = EngineArgs.from_cli_args(parser.parse_args(["--max-num-seqs", "4", "--best", "--enforce-eager"]))
    assert dataclasses.asdict(args) == {"max_num_seqs": "4", "enforce_eager": True}
    assert args.create_engine_config().max_num_seqs == 4


def test_metrics_are_objects():
    metrics = Metrics("m")
    metrics.update(Stats(preemptions=3, accepted_per_pos=[5, 2]))
    metrics.first_token.observe(0.3)
    found = {value.name: value for value in metric_values(metrics)}
    assert isinstance(found["preheat:num_preemptions"], Counter) and found["preheat:num_preemptions"].value == 3
    places = found["preheat:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(places, Vector) and places.values == [5, 2] and places.labels == {"model_name": "m"}
    times = found["preheat:time_to_first_token_seconds"]
    assert isinstance(times, Histogram) and (times.count, times.sum) == (1, 0.3)
    assert times.buckets["+Inf"] == 1 and times.buckets["0.25"] == 0


def test_workers_name_their_methods():
    with pytest.raises(InvalidRequest, match=f"no method 'exec': they have {', '.join(METHODS)}"):
        collective_rpc(Worker(Settings(), None), "exec", (), None)
    with pytest.raises(InvalidRequest, match="2 ranks"):
        collective_rpc(Worker(Settings(tensor_parallel_size=2), None), "get_model", (), None)


def test_a_script_parses_flags_as_vllm_does():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--top_p", type=float)
    parser.add_argument("--max-tokens", type=int)
    parser.set_defaults(model="m", enforce_eager=True)
    args = parser.parse_args(
        ["-tp", "2", "--max_num_seqs", "8", "--top_p", "0.5", "--max_tokens=3", "--hf-overrides.a.b", "1",
         "--enable-prefix-caching", "false"]
    )  # fmt: skip
    assert (args.tensor_parallel_size, args.top_p, args.max_tokens, args.model) == ("2", 0.5, 3, "m")
    assert args.port == Settings(model="m").port and "port" not in vars(args)
    with pytest.raises(AttributeError):
        args.heat  # noqa: B018
    made = EngineArgs.from_cli_args(args).create_engine_config()
    assert (made.tensor_parallel_size, made.max_num_seqs, made.enable_prefix_caching) == (2, 8, False)
    assert made.hf_overrides == {"a": {"b": 1}}
    with pytest.raises(SystemExit):
        argparse.ArgumentParser().parse_args(["-tp", "2"])


def test_an_embedding_is_printed_short(capsys):
    print_embeddings([1.0, 2.0])
    print_embeddings([1.0, 2.0, 3.0, 4.0, 5.0], prefix="Reward")
    assert capsys.readouterr().out == "Embeddings: [1.0, 2.0] (size=2)\nReward: [1.0, 2.0, 3.0, 4.0, ...] (size=5)\n"


def test_ids_beside_the_embeddings_of_a_prompt_must_all_be_embedded():
    prompt = {"prompt_embeds": 1, "prompt_token_ids": [3, 4], "prompt_is_token_ids": [False, False]}
    assert parts_of(prompt, lambda tensor: tensor) == (1, {})
    with pytest.raises(InvalidRequest, match="give the embeddings of all"):
        parts_of(prompt | {"prompt_is_token_ids": [False, True]}, lambda tensor: tensor)
    with pytest.raises(InvalidRequest, match="prompt_token_ids: leave one out"):
        parts_of({"prompt_embeds": 1, "prompt_token_ids": [3]}, lambda tensor: tensor)


def test_memory_of_unreferenced_engines_is_given_back():
    """Unreferenced memory is freed, also of cycles that were put away, as a booted engine is."""

    class Engine: ...

    engine, gone = Engine(), []
    engine.own = engine
    weakref.finalize(engine, gone.append, True)
    collect_and_freeze()
    del engine
    gc.collect()
    assert not gone  # the control: an ordinary collection does not look there
    cleanup_dist_env_and_memory()
    assert gone


@pytest.mark.parametrize("name", ["prompt_logprob_token_ids", "routed_experts_prompt_start", "watermarking"])
def test_parameters_that_mean_nothing_here_are_refused_with_a_reason(name: str) -> None:
    for nothing in (None, False, 0):
        SamplingParams(**{name: nothing})
    with pytest.raises(ValueError, match=f"{name} is not supported: \\w+ \\w+"):
        SamplingParams(**{name: 1})
