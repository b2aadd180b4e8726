"""Adapters on a GPU: a row's bits depend on the row and its adapter alone.

Loads and evictions change nothing meanwhile. Rows without an adapter have the bits of an engine without any.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common.adapter import write_adapter
from preheat import LLM, LoRARequest, SamplingParams
from preheat.backends.base.layers import LayerContext, LayerWeights
from preheat.backends.cuda.backend import CudaBackend
from preheat.backends.cuda.device.card import PORTABLE, Card
from preheat.backends.cuda.device.detect import card_at
from preheat.backends.cuda.device.graph import capture
from preheat.backends.cuda.device.hopper import is_hopper
from preheat.backends.cuda.matmul.config import Wide
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.layer import Embedding, Layer
from preheat.backends.cuda.matmul.lora.blocks import MANY_ROWS, CudaAdapterRows
from preheat.backends.cuda.matmul.lora.expand import Expansion, expand
from preheat.backends.cuda.pointwise.activation import silu_and_mul
from preheat.lora.adapter import adapted_modules
from preheat.model.families import read_spec
from preheat.ops.kinds import Scheme
from preheat.ops.matmul import LowRankPair, add_delta, delta
from preheat.ops.proof import noise, signed_pairs
from preheat.ops.quantization import empty_weight, quantize_channels
from preheat.ops.values import Finish, LowRank
from preheat.settings import Settings
from preheat.warmup.record import Record
from tests import layers
from tests.cpu.test_random_requests import VOCAB
from tests.cuda.test_engine import CONFIG, ROOMY, TIGHT

COUNT = 5
"""Number of adapters."""
FEW_BLOCKS = {"max_model_len": 448, "num_gpu_blocks_override": 34}
"""So few blocks that a sequence has to give way to another."""
WITH: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 40, "max_cpu_loras": COUNT}

Bits = list[Any]
Adapters = list[LoRARequest | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path) -> Adapters:
    """Return None, then adapters of several ranks; the last adapter leaves most layers alone."""
    modules = adapted_modules(read_spec(CONFIG))
    few = {name: shape for name, shape in modules.items() if name.endswith(("v_proj", "up_proj"))}
    found: Adapters = [None]
    for number in range(1, COUNT + 1):
        chosen = few if number == COUNT else modules
        path = write_adapter(model / str(number), chosen, rank=8 * number, seed=number)
        found.append(LoRARequest(f"a{number}", number, str(path)))
    return found


def made(model: Path, **more: Any) -> LLM:
    return LLM(str(model), skip_tokenizer_init=True, **ROOMY | more)


@pytest.fixture(scope="module")
def roomy(model: Path) -> LLM:
    """An engine with an adapter slot for each adapter; everything has run and is captured before ready."""
    return made(model, **WITH, max_loras=COUNT, skip_warmup=False, on_cold="raise", boot_check="full")


def load() -> tuple[list[list[int]], list[SamplingParams], list[int]]:
    """Return requests of all lengths, and the adapter number of each."""
    chance = random.Random(5)
    prompts, params, whose = [], [], []
    for number in range(48):
        prompts.append([chance.randrange(VOCAB) for _ in range(min(int(chance.expovariate(1 / 60)) + 1, 400))])
        params.append(SamplingParams(
            temperature=float(number % 2), seed=number, max_tokens=chance.randint(4, 40), logprobs=2, ignore_eos=True,
            prompt_logprobs=1 if number % 11 == 3 else None, detokenize=False,
        ))  # fmt: skip
        whose.append(number % 7 % (COUNT + 1))
    return prompts, params, whose


def answers(llm: LLM, adapters: Sequence[LoRARequest | None], picked: Sequence[int] | None = None) -> Bits:
    """Return tokens and exact log-probabilities of the picked requests, by default all."""
    prompts, params, whose = load()
    picked = range(len(prompts)) if picked is None else picked
    llm.reset_prefix_cache()
    outputs = llm.generate(
        [prompts[at] for at in picked], [params[at] for at in picked], use_tqdm=False,
        lora_request=[adapters[whose[at]] for at in picked] if any(adapters) else None,
    )  # fmt: skip
    llm.loop.scheduler.check()
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


@pytest.fixture(scope="module")
def expected(roomy: LLM, adapters: Adapters) -> Bits:
    return answers(roomy, adapters)


def test_mixed_is_each_alone_by_graphs_and_nothing_is_cold(roomy: LLM, adapters: Adapters, expected: Bits) -> None:
    for at in (0, 1, 2, 3, 4, 5, 14, 25, 36, 47):
        assert answers(roomy, adapters, [at]) == [expected[at]]
    assert answers(roomy, adapters, range(47, -1, -1))[::-1] == expected
    record = Record.from_json(roomy.loop.listener.report())
    assert not any(record.cold.values()), record.events
    assert record.misses == {} and record.by_name()["(check, adapters)"].outcome in ("ready", "reused")
    graphs = [item for name, item in record.by_name().items() if name.startswith("(lora, ")]
    assert graphs and all(item.graph for item in graphs if item.outcome != "dropped")


def test_rows_without_an_adapter_have_the_bits_of_an_engine_without_any(
    model: Path, roomy: LLM, expected: Bits
) -> None:
    found = answers(roomy, [None])  # before another engine in this process captures its graphs
    plain = made(model)
    whose = load()[2]
    right = answers(plain, [None])
    base = [at for at in range(len(whose)) if not whose[at]]
    assert [expected[at] for at in base] == [right[at] for at in base]
    assert found == right
    assert all(expected[at] != right[at] for at in range(len(whose)) if whose[at])


def test_loads_and_evictions_meanwhile_change_no_bit(model: Path, adapters: Adapters, expected: Bits) -> None:
    """Two adapter slots for five adapters, few blocks, small steps, a step in flight."""
    tight = made(model, **TIGHT | WITH | FEW_BLOCKS, max_loras=2, async_scheduling=True)
    loads: list[int] = []
    right = tight.loop.executor.load_adapters

    def counted(given: Any) -> None:
        loads.extend(slot for slot, _ in given)
        right(given)

    tight.loop.executor.load_adapters = counted  # type: ignore[method-assign,assignment]
    assert answers(tight, adapters) == expected
    assert len(loads) > COUNT and {*loads} == {0, 1}
    assert tight.loop.scheduler.stats().preemptions


def test_eager_steps_change_no_bit(model: Path, adapters: Adapters, expected: Bits) -> None:
    eager = made(model, **WITH, max_loras=3, enforce_eager=True, block_size=256, bucketing_policy="split")
    assert answers(eager, adapters) == expected


def test_with_the_sums_of_ranks_mixed_is_each_alone(model: Path, adapters: Adapters) -> None:
    """On one GPU; tests/cuda/test_tensor_parallel.py covers two."""
    shared = {"tp_invariant": True, "skip_warmup": False, "on_cold": "raise"}
    split = made(model, **WITH, max_loras=COUNT, **shared)
    found, base = answers(split, adapters), answers(split, [None])
    for at in (0, 1, 5, 14, 47):
        assert answers(split, adapters, [at]) == [found[at]]
    assert base == answers(made(model, tp_invariant=True), [None])
    assert [found[at] == base[at] for at in range(len(base))] == [not each for each in load()[2]]


def test_beside_float8_weights_mixed_is_each_alone(model: Path, adapters: Adapters) -> None:
    float8 = made(model, **WITH, max_loras=COUNT, quantization="fp8")
    found, base = answers(float8, adapters), answers(float8, [None])
    for at in (0, 1, 5, 14, 47):
        assert answers(float8, adapters, [at]) == [found[at]]
    assert base == answers(made(model, quantization="fp8"), [None])
    assert [found[at] == base[at] for at in range(len(base))] == [not each for each in load()[2]]


INPUTS, OUTPUTS, SLOTS = 1536, (640, 128, 128), 8
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def layer(dtype: torch.dtype, inputs: int = INPUTS, max_rank: int = 48) -> tuple[Any, CudaAdapterRows]:
    weight = (noise(sum(OUTPUTS), inputs) / 40).to("cuda", dtype)
    return made_of(weight, OUTPUTS, max_rank, tokens=2048)


def made_of(
    weight: Any, parts: tuple[int, ...], rank: int, *, tokens: int, activation: Any = None, card: Card = PORTABLE
) -> tuple[Any, CudaAdapterRows]:
    """A layer with room for adapters, and its rows."""
    device = torch.device("cuda")
    rows, term = CudaAdapterRows(tokens, SLOTS, device), LowRank(parts, SLOTS, rank, layers.name_of(weight.dtype))
    value = layers.value_of(weight, terms=(term,), finish=Finish(activation=activation))
    context = LayerContext(rows=rows)
    return Layer(value, LayerWeights(weight), KernelConfigs(card=card), device, context), rows


def put(made: Any, slot: int, *given: tuple[torch.Tensor, torch.Tensor, float]) -> None:
    """Put an adapter with matrices for each part into adapter slot ``slot``."""
    made.slots.write(slot, made.slots.pack({part: LowRankPair(*each) for part, each in enumerate(given)}))


def add(made: Any, rows: Any, x: torch.Tensor, y: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """Return ``y`` plus the adapters' terms."""
    rows.describe(0, "tokens", torch.tensor(slots, dtype=torch.int32).numpy())
    rows.use("tokens")
    return expand(y.clone(), shrunk(made, x, rows), made.slots.bounds, gated=False)


def shrunk(made: Any, x: torch.Tensor, rows: Any) -> Expansion:
    """Return the shrunk rows, by a launch that waits for everything before it."""
    blocks, factors = rows.blocks_for(len(x)), made.slots
    given, to = factors.room(x, blocks)
    factors.shrink(given, to, blocks, beside=False)
    assert isinstance(to, Expansion)
    return to


@DTYPES
@pytest.mark.parametrize("inputs", [INPUTS, 1000, 64])
def test_the_added_term_equals_the_reference(dtype: torch.dtype, inputs: int) -> None:
    made, rows = layer(dtype, inputs)
    x, y = noise(50, inputs, seed=1).to(dtype), noise(50, sum(OUTPUTS), seed=2).to(dtype)
    given = [((noise(23, inputs, seed=part) / 30).to(dtype), noise(size, 23, seed=9 + part).to(dtype), 0.7)
             for part, size in enumerate(OUTPUTS)]  # fmt: skip
    put(made, 3, *given)
    found = add(made, rows, x.cuda(), y.cuda(), [3] * 50).cpu()
    right = add_delta(y, torch.cat([delta(x, LowRankPair(*each)) for each in given], 1))
    if dtype == torch.float32:
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-5)
    else:
        assert (found != right).float().mean() < 0.01
        torch.testing.assert_close(found, right, atol=1e-2, rtol=2**-7)


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "fp8"])
@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
def test_shrinking_beside_a_layer_has_the_bits_of_one_launch_after_another(activation: Any, kind: str) -> None:
    """With each kernel of the layer, in a graph, behind a kernel that writes x, again and again."""
    CudaBackend().prepare(Settings(), "eager", None)
    device, outputs = torch.device("cuda"), (1024, 1024) if activation else (1024, 256, 256)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    weight: Any = (noise(sum(outputs), INPUTS) / 40).to(device, dtype)
    if kind == "fp8":
        scheme = Scheme(code="fp8", scales="channel", activations="token")
        coded = empty_weight(scheme, *weight.shape, dtype=dtype, device=device)
        quantize_channels(weight, coded)
        weight = coded
    made, rows = made_of(weight, outputs, 48, tokens=256, activation=activation, card=card_at())
    for slot in range(SLOTS):
        rank = 5 + 6 * slot
        a = noise(rank, INPUTS, seed=slot).to(dtype) / 40
        put(made, slot, *((a, noise(size, rank, seed=part).to(dtype), 0.7) for part, size in enumerate(outputs)))
    for count in (1, 2, 8, 16, 33, 64, 200):
        x = torch.empty(count, INPUTS, dtype=dtype, device=device)
        rows.describe(0, "tokens", np.array([(row * 5) % (SLOTS + 1) - 1 for row in range(count)], np.int32))
        rows.use("tokens")
        found: list[torch.Tensor] = []
        source = noise(count, INPUTS, seed=1).to(device, dtype)
        made(source)  # compiles, because a graph cannot
        graph = capture(lambda x=x, found=found, source=source: found.append(made(torch.add(source, 0, out=x))))
        right = expand(layers.product(made, source), shrunk(made, source, rows), made.slots.bounds, gated=False)
        if activation:
            right = silu_and_mul(right)
        for _ in range(20):
            found[-1].fill_(float("nan"))
            graph.replay()
            assert torch.equal(found[-1], right)


@pytest.mark.skipif(not torch.cuda.is_available() or not is_hopper(), reason="written for Hopper")
@pytest.mark.parametrize("rank", [16, 40])
@pytest.mark.parametrize("outputs", [(640, 128, 256), (128, 384), (1536, 1536)], ids=str)
@pytest.mark.parametrize("choice", [Wide(256, 128, 4), Wide(128, 128, 6), Wide(128, 256, 4)], ids=str)
def test_the_kernel_for_many_rows_adds_terms_like_a_separate_launch(
    choice: Wide, outputs: tuple[int, ...], rank: int
) -> None:
    """Also for tiles of two parts, parts without adapter matrices, and adapters of several rank tiles."""
    CudaBackend().prepare(Settings(), "eager", None)
    device, inputs, gated = torch.device("cuda"), 1024, outputs == (1536, 1536)
    weight = (noise(sum(outputs), inputs) / 30).to(device, torch.bfloat16)
    made, rows = made_of(weight, outputs, rank, tokens=700, activation="silu_and_mul" if gated else None)
    for slot in range(SLOTS):
        a = noise(rank - slot, inputs, seed=slot).bfloat16() / 30
        b = [noise(size, len(a), seed=part).bfloat16() for part, size in enumerate(outputs)]
        parts = {2: (0,), 5: (len(outputs) - 1,)}.get(slot, range(len(outputs)))
        made.slots.write(slot, made.slots.pack({part: LowRankPair(a, b[part], 0.7) for part in parts}))
    for count in (512, 600, 700):
        x = noise(count, inputs, seed=count).to(device, torch.bfloat16)
        for whose in ([row // 45 % (SLOTS + 1) - 1 for row in range(count)], [row % 9 - 1 for row in range(count)]):
            rows.describe(0, "tokens", np.array(whose, np.int32))
            rows.use("tokens")
            to = shrunk(made, x, rows)
            right = expand(made.by(choice, x, gated=False), to, made.slots.bounds, gated=gated)
            found = made.by(choice, x, None, to)
            assert torch.equal(found, right)
            alone = [row for row in range(count) if whose[row] < 0]
            assert torch.equal(found[alone], made.by(choice, x)[alone])


def test_embeddings_follow_the_rows_that_have_adapters_from_replay_to_replay() -> None:
    """In a graph, where the launch that expands may begin before the launch that gathers has ended."""
    CudaBackend().prepare(Settings(), "eager", None)
    device, count = torch.device("cuda"), 40
    rows = CudaAdapterRows(64, SLOTS, device)
    table = noise(500, 256, seed=1).to(device, torch.bfloat16)
    term = LowRank((256,), SLOTS, 16, "bfloat16", source="tokens")
    made = Embedding(layers.value_of(table.T, terms=(term,)), device, LayerContext(rows=rows))
    for slot in range(SLOTS):
        a, b = noise(8, 500, seed=slot).bfloat16(), noise(256, 8, seed=9 + slot).bfloat16()
        made.slots.write(slot, made.slots.pack({0: LowRankPair(a, b, 0.5)}))
    tokens = torch.arange(7, 7 + count, dtype=torch.int32, device=device)
    slots, last = torch.zeros_like(tokens), torch.zeros(1, dtype=torch.int32, device=device)
    out, ids = torch.empty(count, 256, dtype=torch.bfloat16, device=device), tokens.long()

    def work() -> None:
        torch.index_select(table, 0, ids, out=out)
        made.add(tokens, slots, last, out)

    rows.describe(0, "tokens", np.zeros(count, np.int32))
    rows.use("tokens")
    work()  # compiles, because a graph cannot
    graph = capture(work)
    for turn in range(30):
        adapter_slots = [(row * (turn + 3) + turn) % (SLOTS + 1) - 1 for row in range(count)]
        rows.describe(turn % 2, "tokens", np.array(adapter_slots, np.int32))
        graph.replay()
        found = out.clone()
        for row in range(0, count, 7):
            one = table[ids[row : row + 1]].clone()
            rows.describe(turn % 2, "tokens", np.array(adapter_slots[row : row + 1], np.int32))
            torch.cuda.synchronize()
            made.add(tokens[row : row + 1], slots[:1], last, one)
            assert torch.equal(found[row], one[0])


@DTYPES
def test_room_for_more_ranks_changes_no_bit(dtype: torch.dtype) -> None:
    """A single product of the matrix unit is added like the last of several products."""
    x, y = noise(50, INPUTS, seed=1).to("cuda", dtype), noise(50, sum(OUTPUTS), seed=2).to("cuda", dtype)
    a = (noise(12, INPUTS) / 30).to(dtype)
    found = []
    for max_rank in (16, 48):
        made, rows = layer(dtype, max_rank=max_rank)
        put(made, 3, *((a, noise(size, 12, seed=9 + part).to(dtype), 0.7) for part, size in enumerate(OUTPUTS)))
        found.append(add(made, rows, x, y, [3] * 50))
    assert torch.equal(*found)


@DTYPES
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """All rows at once are in long blocks."""
    made, rows = layer(dtype)
    total = MANY_ROWS + 188
    x = signed_pairs(noise(total, INPUTS, seed=1) * noise(total, INPUTS, seed=2).exp(), 1.0).to("cuda", dtype)
    y = torch.zeros(total, sum(OUTPUTS), dtype=dtype, device="cuda")
    for slot in range(SLOTS):
        a = signed_pairs(noise(16 + slot, INPUTS, seed=slot), -1.0).to(dtype)
        put(made, slot, *((a, noise(size, len(a), seed=part).to(dtype), 2.0**20) for part, size in enumerate(OUTPUTS)))
    whose = [(row * 5) % (SLOTS + 1) - 1 for row in range(total)]
    expected = add(made, rows, x, y, whose)
    base = [row for row in range(total) if whose[row] < 0]
    assert not expected[base].any() and (expected.abs().amax(1)[whose.index(0)] > 0).item()
    minus = add(made, rows, x, torch.full_like(y, -0.0), whose)
    assert torch.signbit(minus[base]).all()
    for group in ([0], [1], [690], range(3), range(16), range(17, 50), range(128), range(100, 400), range(699, -1, -1)):
        picked = list(group)
        found = add(made, rows, x[picked].contiguous(), y[: len(picked)], [whose[row] for row in picked])
        assert torch.equal(found, expected[picked]), picked
    same = [0] * total
    alike = add(made, rows, x, y, same)
    for row in (0, 15, 16, 333, 699):
        assert torch.equal(add(made, rows, x[row : row + 1].contiguous(), y[:1], [0])[0], alike[row])
