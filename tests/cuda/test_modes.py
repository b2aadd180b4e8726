"""Modes on a GPU: graphs of a few layers, no graphs, and an engine that need not keep its bits."""

from __future__ import annotations

import pytest

from preheat.core import Ready
from preheat.errors import SettingsError
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.warmup.record import Record

OPTIONS = {
    "device": "cuda", "skip_warmup": False, "max_num_seqs": 8, "max_num_batched_tokens": 512, "cache_dir": "off",
    "determinism_warmup_iterations": 1, "num_gpu_blocks_override": 65, "on_cold": "raise",
    "graph_reserved_mem": 0.5,  # memory that tests beside this one take is taken from the graphs' share
}  # fmt: skip


def boot(**options):
    transport = InlineTransport()
    loop = boot_engine(Settings.load(OPTIONS | options), transport)
    ready = next(message for message in transport.receive() if isinstance(message, Ready))
    return Record.from_json(ready.record), loop, ready.blocked_reason


def captured(record: Record) -> set[str]:
    return {entry.name for entry in record.entries if entry.graph}


@pytest.fixture(scope="module")
def whole():
    record, loop, blocked = boot()
    assert not blocked
    return record, len(loop.executor.forwards._graphs)


def test_graphs_of_two_layers_have_the_same_bits(whole):
    record, loop, blocked = boot(config_hidden_layers=2)
    assert not blocked  # its graphs agree with eager runs, too
    assert record.proof.digest == whole[0].proof.digest
    assert captured(record) == captured(whole[0]) != set()
    parts = -(-len(loop.executor.decoder.weights.layers) // 2)
    assert parts > 1
    assert len(loop.executor.forwards._graphs) == parts * whole[1]


def test_without_graphs_too(whole):
    record, _, blocked = boot(enforce_eager=True)
    assert not blocked
    assert record.mode == "eager"
    assert captured(record) == set()
    assert record.proof.digest == whole[0].proof.digest


def test_an_engine_may_do_without_invariance():
    record, loop, blocked = boot(batch_invariant=False)
    assert not blocked
    assert not record.invariant
    assert [entry.shape["name"] for entry in record.entries if entry.kind == "check"] == ["finite", "later run"]
    assert not [entry for entry in record.entries if entry.kind == "determinism"]
    assert loop.executor.decoder.weights.head.configs.invariant is False


def test_compile_is_rejected():
    with pytest.raises(SettingsError, match="graphs already save the launches"):
        boot(execution_mode="compile")
