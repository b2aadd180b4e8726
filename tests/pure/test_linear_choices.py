"""The choice of a linear layer's implementation.

There are tables, a rule where they are silent, and rejections by a proof.
"""

import logging
from functools import partial
from itertools import product
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.shapes import SHAPES as CONFIGS
from preheat.backends.base.backend import TuneRequest
from preheat.backends.cuda.device.card import CARDS
from preheat.backends.cuda.matmul.config import (
    FP8_REFERENCE,
    PROCESSORS,
    REFERENCE,
    SHARED_BYTES,
    Expanded,
    ExpertsConfig,
    ExpertsShape,
    Library,
    LinearShape,
    Tile,
    Wide,
    codes_bytes,
    experts_shape_of,
    reference,
    shape_of,
    small_m_bytes,
)
from preheat.backends.cuda.matmul.kernels import OWN_ROWS, KernelConfigs, candidates, kernel_configs, rule
from preheat.backends.cuda.matmul.rules import codes_rule, experts_rule, tile_rule
from preheat.backends.cuda.matmul.tables import (
    Entry,
    ExpertsEntry,
    Table,
    encode,
    merged,
    place,
    read,
    shipped,
)
from preheat.errors import PreheatError
from preheat.model.families import read_spec
from preheat.model.values import matmul_of, values_of
from preheat.ops.kinds import Scheme
from preheat.ops.values import Experts, Matmul

SHAPE = LinearShape(512, 1024)
NARROW, WIDE = Tile(32, 16, 256, 2, 6), Tile(64, 64, 64, 4, 4)
WIDEST = Wide(256, 128, 4)
HOPPER = (9, 0)
H200 = CARDS[HOPPER]


def table(*entries, device="This GPU", shape=SHAPE, **more):
    return Table(device, HOPPER, [Entry.of(shape, rows, choice, 1.0, **more) for rows, choice in entries])


def test_an_entry_counts_up_to_its_own_rows():
    found = KernelConfigs([table((16, NARROW), (1, WIDE), (64, Library()), (256, WIDEST))])
    assert [found(SHAPE, rows) for rows in (1, 2, 16, 17, 64)] == [WIDE, NARROW, NARROW, Library(), Library()]
    assert found(SHAPE, 65) == found(SHAPE, 256) == WIDEST
    assert found(SHAPE, 257) == rule(SHAPE, 257)
    assert found(SHAPE._replace(bias=True), 16) == NARROW
    for other in (SHAPE._replace(gated=True), SHAPE._replace(inputs=1000), SHAPE._replace(dtype=torch.float32)):
        assert found(other, 64) == rule(other, 64) != Library()


def test_the_last_table_that_knows_a_map_counts_alone():
    other = LinearShape(256, 256)
    found = KernelConfigs([table((16, NARROW), (64, NARROW)), table((64, NARROW), shape=other), table((16, WIDE))])
    assert found(SHAPE, 16) == WIDE
    assert found(SHAPE, 64) == rule(SHAPE, 64)
    assert found(other, 64) == NARROW


def test_without_invariance_the_fastest_of_all_counts():
    both = table((16, NARROW), (64, NARROW))
    both.entries[:0] = table((64, Library(split=True)), ordered=False).entries
    assert KernelConfigs([both])(SHAPE, 64) == NARROW
    varying = KernelConfigs([both], invariant=False)
    assert [varying(SHAPE, rows) for rows in (16, 64)] == [NARROW, Library(split=True)]


def test_layers_with_adapters_do_without_cublas_for_few_rows():
    both = table((1, NARROW), (64, Library()), (256, Library()))
    both.entries += table((16, WIDE), own=True).entries
    found = KernelConfigs([both])
    assert [found(SHAPE, rows) for rows in (1, 16, 64)] == [NARROW, Library(), Library()]
    assert [found.own(SHAPE, rows) for rows in (1, 2, 16, 17)] == [NARROW, WIDE, WIDE, tile_rule(SHAPE, 17)]
    assert found.own(SHAPE, OWN_ROWS) == tile_rule(SHAPE, OWN_ROWS)
    assert found.own(SHAPE, OWN_ROWS + 1) == Library()


def test_the_kernel_for_many_rows_is_for_hopper_and_has_tiles_for_most_of_it():
    found, wide = KernelConfigs(card=H200), LinearShape(6144, 4096)
    assert KernelConfigs().wide(wide, 2048) is None
    assert found.wide(LinearShape(512, 4096), 1024) is None  # 32 tiles
    assert found.wide(wide, 512) is None
    assert found.wide(wide, 2048) == Wide(256, 128, 4)
    assert found.wide(wide, 1024) == Wide(128, 128, 6)  # three rounds of half a tile, not two of a whole one
    for other in (wide._replace(dtype=torch.float32), wide._replace(inputs=4100), FP8):
        assert found.wide(other, 2048) is None
    found.reject(wide, 2048)
    assert found.wide(wide, 2048) is None


def test_all_that_may_serve_a_layer_is_proven():
    both = table((64, Library()), (8192, Library()), shape=LinearShape(6144, 4096))
    both.entries += table((64, WIDE), shape=LinearShape(6144, 4096), own=True).entries
    found = KernelConfigs([both], card=H200)
    few, many = (partial(found.used, LinearShape(6144, 4096), rows) for rows in (64, 2048))
    assert few(adapted=False) == many(adapted=False) == [Library()]
    assert few(adapted=True) == [Library(), WIDE]
    assert many(adapted=True) == [Library(), WIDEST]


def test_a_rejected_kernel_is_replaced_by_the_plain_kernel():
    found = KernelConfigs([table((64, Library()))])
    assert found(SHAPE, 64) == Library()
    found.reject(SHAPE, 64)
    assert found(SHAPE, 64) == tile_rule(SHAPE, 64)
    assert found(SHAPE, 63) == Library()


SHAPES = [LinearShape(outputs, inputs) for outputs in (896, 4096, 28672, 151936) for inputs in (896, 4096, 14336)]
SHAPES += [shape._replace(gated=True) for shape in SHAPES]


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 256, 8192])
def test_the_rule_keeps_to_the_kernels_limits(rows):
    for shape in SHAPES:
        tile = tile_rule(shape, rows)
        used = (tile.outputs * (2 if shape.gated else 1) + tile.rows) * tile.inputs * 2 * tile.stages
        assert used <= SHARED_BYTES, (shape, tile)
        assert tile.stages >= 2
        assert tile.warps * 16 * 8 <= tile.outputs * tile.rows  # an instruction for each warp
        assert rule(shape, rows) in (tile, Library())
        assert tile_rule(shape._replace(dtype=torch.float32), rows) == REFERENCE[torch.float32]
        assert isinstance(rule(shape._replace(dtype=torch.float32), rows), Tile)


def test_cublas_serves_many_rows_unless_outputs_are_few():
    wide, narrow = LinearShape(28672, 4096), LinearShape(1024, 3072)
    assert [isinstance(rule(wide, rows), Library) for rows in (1, 32, 33, 8192)] == [False, False, True, True]
    assert [isinstance(rule(narrow, rows), Library) for rows in (24, 127, 128)] == [False, False, True]


def test_a_table_is_read_as_it_was_written(tmp_path):
    written = table((16, NARROW), (64, Library(split=True)), (512, WIDEST), device="NVIDIA H200 NVL")
    path = place(tmp_path, written.device)
    assert path.name == "linear-maps-NVIDIA-H200-NVL.json"
    path.write_bytes(encode(written))
    assert read(path) == [written]
    assert path.read_text().count("\n") == len(written.entries) + 2
    assert '"wide":{"outputs":256,"rows":128,"stages":4}}' in path.read_text()


INT4 = SHAPE._replace(scheme=Scheme(code="int4", scales="group", group=128, zeros=True))
FP8 = SHAPE._replace(scheme=Scheme(code="fp8", scales="channel", activations="token"))


def test_tables_tell_formats_apart(tmp_path):
    """Tables tell formats of one size apart: plain, of four bits, in float8."""
    written = table((16, NARROW), (512, Expanded(WIDEST)), shape=INT4)
    written.entries += [*table((16, WIDE)).entries, *table((16, FP8_REFERENCE), shape=FP8).entries]
    (tmp_path / "table.json").write_bytes(encode(written))
    (stored,) = read(tmp_path / "table.json")
    assert stored == written
    found = KernelConfigs([stored])
    assert [found(shape, 16) for shape in (SHAPE, INT4, FP8)] == [WIDE, NARROW, FP8_REFERENCE]
    assert found(INT4, 512) == Expanded(WIDEST)
    other = INT4._replace(scheme=Scheme(code="int4", scales="group", group=32))
    assert found(other, 16) == rule(other, 16)


@pytest.mark.parametrize("rows", [1, 7, 16, 64, 65, 300, 512, 8192])
def test_codes_are_read_in_whole_steps(rows):
    """Codes are read in whole steps.

    In float8 there are at least 64 outputs and four warps, as in the reference's instruction. Integers for many rows
    become plain weights first.
    """
    for shape in (INT4, FP8, FP8._replace(gated=True), INT4._replace(gated=True)):
        choice = rule(shape, rows)
        if isinstance(choice, Expanded):
            assert shape.scheme.activations is None and rows >= 512
            assert choice.choice == rule(shape._replace(scheme=None), rows)
            continue
        assert choice.inputs % 128 == 0 == shape.inputs % choice.inputs
        assert shape.scheme.activations is None or (choice.outputs >= 64 and choice.warps >= 4)
        assert choice.outputs * choice.rows * (3 if shape.gated else 2) <= 192 * 32 * choice.warps
        assert codes_bytes(shape, choice.outputs, choice.rows, choice.inputs) * choice.stages <= SHARED_BYTES


def test_many_rows_of_float8_have_a_kernel_of_their_own_on_hopper():
    assert isinstance(rule(FP8, 8192, card=H200), Wide)
    blocks = FP8._replace(scheme=Scheme(code="fp8", scales="block", group=128, activations="block"))
    for shape, rows, card in ((FP8, 8192, CARDS[10, 0]), (INT4, 8192, H200), (blocks, 8192, H200),
                              (FP8._replace(inputs=FP8.inputs + 8), 8192, H200)):  # fmt: skip
        assert rule(shape, rows, card=card) == rule(shape, rows)
        assert not isinstance(rule(shape, rows), Wide)


def test_few_rows_of_codes_have_a_bulk_kernel():
    shuffled = INT4._replace(shuffled=True)
    for shape, rows in product((FP8, shuffled, shuffled._replace(gated=True)), (1, 5, 8, 33, 64, 100)):
        choice = rule(shape, rows, card=H200)
        assert isinstance(choice, Tile) and choice.bulk and min(rows, 64) <= choice.rows <= max(8, 2 * rows)
        assert small_m_bytes(shape, choice) <= SHARED_BYTES
    assert rule(INT4, 8, card=H200) == codes_rule(INT4, 8)


@pytest.mark.parametrize("size", [(6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False)])
def test_a_row_has_enough_of_the_weights_on_its_way(size):
    """A row has enough of the weights on its way.

    All programs that run at once, less one stage, load 4 MB of weights: an H200's latency times bandwidth.
    """
    choice = rule(LinearShape(*size, scheme=FP8.scheme), 1)
    weights = codes_bytes(FP8._replace(gated=size[2]), choice.outputs, 0, choice.inputs) * (choice.stages - 1)
    at_once = min(-(-size[0] // (choice.outputs * (2 if size[2] else 1))), 2 * PROCESSORS)
    assert weights * at_once >= 4 << 20


@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_the_tuner_tries_kernels_of_the_same_instruction(rows):
    for shape in (INT4, FP8, FP8._replace(gated=True)):
        tried = list(candidates(shape, rows, card=H200))
        tiles = [choice for choice in tried if isinstance(choice, Tile)]
        assert tiles and all(tile.inputs % 128 == 0 == shape.inputs % tile.inputs for tile in tiles)
        assert shape is INT4 or all(tile.outputs >= 64 and tile.warps >= 4 for tile in tiles)
        assert any(isinstance(choice, Wide) for choice in tried) == (shape != INT4 and rows >= 64)
        assert (Expanded(Library()) in tried) == (shape == INT4 and rows >= 128)
        assert len(tried) == len(set(tried))


@pytest.mark.parametrize(("rows", "wide"), [(64, False), (192, False), (224, True), (256, True), (384, False)])
def test_hopper_s_kernel_replaces_cublas_where_its_tiles_are_filled(rows, wide):
    """Rejected itself, it gives way to a tile of the plain kernel."""
    shape = LinearShape(4096, 14336)
    configs = KernelConfigs([Table("", (9, 0), [Entry.of(shape, rows, Library(), 1.0)])], card=H200)
    configs.reject(shape, rows)
    assert configs(shape, rows) == (Wide(64, 128, 6) if wide else tile_rule(shape, rows))
    configs.reject(shape, rows)
    assert configs(shape, rows) == tile_rule(shape, rows)
    elsewhere = KernelConfigs([Table("", (8, 0), [Entry.of(shape, rows, Library(), 1.0)])], card=CARDS[8, 0])
    elsewhere.reject(shape, rows)
    assert isinstance(elsewhere(shape, rows), Tile)


def test_codes_that_are_rejected_are_served_by_the_reference():
    configs = KernelConfigs()
    for shape in (INT4, FP8):
        configs.reject(shape, 16)
        assert configs(shape, 16) == reference(shape)
    assert reference(INT4) == Expanded(REFERENCE[torch.bfloat16])
    assert reference(FP8) == FP8_REFERENCE


def test_an_unreadable_table_is_reported_and_ignored(tmp_path, caplog):
    path = place(tmp_path, "This GPU")
    assert read(path) == []
    assert not caplog.records
    path.write_text('{"device": 1}')
    assert read(path) == []
    assert "is ignored" in caplog.text


def test_shipped_tables_say_nothing_twice_and_never_split_in_order():
    for own in shipped():
        keys = [(entry.shape, entry.rows, entry.ordered, entry.own) for entry in own.entries]
        assert len(keys) == len(set(keys))
        ordered = {(entry.shape, entry.rows): entry.choice for entry in own.entries if entry.ordered}
        assert Library(split=True) not in ordered.values()
        others = [entry for entry in own.entries if not entry.ordered]
        assert all(ordered[entry.shape, entry.rows] != entry.choice for entry in others)


def test_a_gpu_without_a_table_is_served_by_one_of_its_kind(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (known,) = shipped()
    entry = known.entries[0]
    assert kernel_configs(known.device, HOPPER, None)(entry.shape, entry.rows) == entry.choice
    assert not caplog.records
    assert kernel_configs("Another GPU", HOPPER, tmp_path)(entry.shape, entry.rows) == entry.choice
    assert f"fastest on {known.device}" in caplog.text
    later = kernel_configs("A later GPU", (12, 0), tmp_path)
    assert later(entry.shape, entry.rows) == rule(entry.shape, entry.rows, card=CARDS[12, 0])


def test_local_tables_come_before_shipped_tables(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (known,) = shipped()
    shape = known.entries[0].shape
    place(tmp_path, known.device).write_bytes(encode(table((64, WIDE), device=known.device, shape=shape)))
    assert kernel_configs(known.device, HOPPER, tmp_path)(shape, 1) == WIDE
    place(tmp_path, "Another GPU").write_bytes(encode(table((64, WIDE), device="Another GPU", shape=shape)))
    assert kernel_configs("Another GPU", HOPPER, tmp_path)(shape, 1) == WIDE
    assert not caplog.records


def test_the_tuner_measures_the_maps_of_the_model(model_config):
    spec = read_spec(model_config)
    *layers, head = (shape_of(matmul_of(linear, "bfloat16")) for _, linear in spec.linears())
    inner = spec.layers[0].mlp.down.inputs
    assert LinearShape(2 * inner, spec.hidden_size, True, torch.bfloat16, False) in layers
    assert head == LinearShape(spec.vocab_size, spec.hidden_size)
    before, new = table((16, NARROW), (64, NARROW)), table((16, WIDE))
    other = table((16, NARROW), shape=LinearShape(8, 8))
    assert merged([before], new).entries == new.entries
    assert merged([other], new).entries == other.entries + new.entries


EXPERTS = ExpertsEntry(8, 256, 128, 2, 64, 1.5, 16, tiles=(NARROW, NARROW))


def test_experts_are_looked_up_in_tables_too():
    shape = EXPERTS.shape
    wide = ExpertsEntry(8, 256, 128, 2, 512, 1.5, 128, wides=(Wide(256, 128, 4), Wide(128, 128, 6)))
    before = Table("One", HOPPER, [], [EXPERTS])
    after = Table("One", HOPPER, [], [EXPERTS, wide])
    text = encode(merged([before, table((16, NARROW))], after))
    read_back = msgspec.json.decode(text, type=Table)
    assert read_back.experts == after.experts and len(read_back.entries) == 1
    configs = KernelConfigs([before, read_back], card=H200).experts
    assert configs(shape, 1) == configs(shape, 64) == ExpertsConfig(16, NARROW, NARROW)
    assert configs(shape, 65) == ExpertsConfig(128, *wide.wides)
    assert configs(shape, 513) == experts_rule(shape, 513, card=H200)
    assert ExpertsEntry.of(shape, 512, configs(shape, 512), 1.5) == wide
    assert KernelConfigs([read_back, before]).experts(shape, 65) == experts_rule(shape, 65)


@given(
    st.sampled_from([torch.bfloat16, torch.float32]), st.integers(1, 64), st.integers(1, 2048), st.integers(1, 2048),
    st.integers(1, 8192),
)  # fmt: skip
def test_the_copy_engine_is_given_rows_of_whole_16_bytes(dtype, num_experts, hidden, inner, tokens):
    """Any guessed kernel that copies rows of plain weights in bulk has rows of whole 16 bytes."""
    guess = experts_rule(ExpertsShape(num_experts, hidden, inner, 1, dtype), tokens, card=H200)
    chosen = [(guess.gate_up, hidden), (guess.down, inner)]
    chosen.append((rule(LinearShape(inner, hidden, False, dtype), tokens), hidden))
    chosen.append((rule(LinearShape(inner, 4 * hidden, dtype=dtype, splits=4), tokens), hidden))
    for config, inputs in chosen:
        if isinstance(config, Tile) and config.bulk:
            assert inputs * dtype.itemsize % 16 == 0


@given(
    st.sampled_from([torch.bfloat16, torch.float32]), st.sampled_from(["int4", "int8"]),
    st.sampled_from([32, 64, 128, 256]), st.booleans(), st.sampled_from([1, 8, 128]), st.integers(1, 8),
    st.integers(1, 4096),
)  # fmt: skip
def test_guesses_for_codes_fit_into_shared_memory(dtype, code, group, zeros, num_experts, steps, tokens):
    """All buffers of any guess fit into shared memory.

    Triton keeps one buffer less than a tile has stages.
    """
    scheme, size = Scheme(code=code, scales="group", group=group, zeros=zeros), 256 * steps
    shape = ExpertsShape(num_experts, size, size, min(2, num_experts), dtype, scheme)
    experts = experts_rule(shape, tokens)
    split = LinearShape(size, 4 * size, dtype=dtype, scheme=scheme, splits=4)
    chosen = [(experts.gate_up, shape.gate_up), (experts.down, shape.down), (rule(split, tokens), split.of_split)]
    chosen += [(codes_rule(layer, tokens), layer) for layer in (shape.gate_up, shape.down)]
    for tile, layer in chosen:
        if isinstance(tile, Tile):
            size = codes_bytes(layer, tile.outputs, tile.rows, tile.inputs)
            assert size * max(tile.stages - 1, 1) <= SHARED_BYTES


@pytest.mark.parametrize("tokens", [1, 3, 8, 100, 1000, 8192])
def test_the_tuner_tries_tiles_that_fit_experts(tokens, monkeypatch):
    from preheat.backends.cuda.matmul.moe import tuner as moe_tuner

    monkeypatch.setattr(moe_tuner, "fits", lambda shape: True)
    shape = ExpertsShape(128, 2048, 768, 8, torch.bfloat16)
    blocks = moe_tuner.block_sizes(shape, tokens)
    assert blocks
    assert (1 in blocks) == (tokens <= 4)
    for block in blocks:
        for layer in (shape.gate_up, shape.down):
            tried = list(moe_tuner.candidates(shape, layer, block))
            assert tried
            assert all(choice.rows == max(block, 16) for choice in tried)
            assert all(layer.inputs % choice.inputs == 0 for choice in tried if isinstance(choice, Tile))


def asked_of_the_tuner(name, seconds, folder, monkeypatch):
    """Return what tuning a model measures, with its seconds: layers, the head, and each kind of experts."""
    from preheat.backends.cuda.matmul import tune

    values = [value for _, value in values_of(read_spec(CONFIGS[name]), "bfloat16")]
    *layers, head = (value for value in values if isinstance(value, Matmul))
    linear, experts = list[tuple](), list[tuple]()
    monkeypatch.setattr(tune, "is_hopper", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "This GPU")
    monkeypatch.setattr(tune, "tune", lambda shapes, rows, share, report: linear.append((shapes, share)) or [])
    monkeypatch.setattr(tune, "tune_experts", lambda *of: experts.append((of[0], of[4], of[2])) or [])
    found = [value for value in values if isinstance(value, Experts)]
    request = TuneRequest(
        layers=layers, experts=found, head=head, max_rows=8, max_head_rows=8, seconds=seconds,
        output=str(folder / "table.json"), folder=None,
    )  # fmt: skip
    with pytest.raises(PreheatError, match="too short"):
        tune.tune_layers(request, torch.device("cuda"))
    return *linear, experts


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b"])
def test_the_tuner_s_time_is_divided_among_sizes_of_layers(name, tmp_path, monkeypatch):
    """A model has a size of a layer many times, and each is measured once."""
    (layers, of_layers), (head, of_head), experts = asked_of_the_tuner(name, 90.0, tmp_path, monkeypatch)
    assert len(layers) == len(set(layers)) < 6 and len(head) == 1
    share = 90.0 / (len(layers) + 1 + len(experts))
    assert [of_layers, of_head, *(each for *_, each in experts)] == pytest.approx(
        [share * len(layers), share, *[share] * len(experts)]
    )


SPLITS = [(2048, 2), (7168, 2), (14336, 4)]
"""Inputs of layers that ranks share, and their splits on a rank of two, or of one."""


@pytest.mark.parametrize(("inputs", "splits"), SPLITS)
@pytest.mark.parametrize("scheme", [None, FP8.scheme])
@pytest.mark.parametrize("rows", [1, 64, 256, 2048])
def test_the_tuner_tries_kernels_that_end_at_each_split(inputs, splits, scheme, rows):
    """A step of a kernel lies in one split; sums of more splits than two have no room in Hopper's kernels."""
    shape = LinearShape(4096, inputs, scheme=scheme, splits=splits)
    tried = list(candidates(shape, rows, card=H200))
    assert len(tried) == len(set(tried)) > 1 and Library(split=True) not in tried
    for choice in tried:
        if choice.kind == "wide":
            assert splits == 2 and choice.outputs <= 128
        elif choice.kind == "tile":
            assert inputs // splits % choice.inputs == 0
    assert any(choice.kind == "wide" for choice in tried) == (splits == 2 and rows >= (128 if scheme is None else 64))
    if scheme is None:  # ranks exchange sums of many rows while Hopper's kernel computes others
        assert (Library() in tried) == (splits == 4 or rows < 2048)


@given(
    st.sampled_from([8, 64, 128]), st.sampled_from([8, 32, 96, 192, 256, 384, 720]), st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 8, 256, 8192]), st.sampled_from(list(CARDS.values())),
)  # fmt: skip
def test_tiles_of_experts_that_ranks_share_end_at_a_split(experts, size, splits, tokens, card):
    """The copy engine would read the inputs of the next split, too."""
    shape = ExpertsShape(experts, 2048, splits * size, 8, torch.bfloat16, splits=splits)
    assert shape.down.inputs == size and shape.gate_up.outputs == 2 * splits * size
    down = experts_rule(shape, tokens, card=card).down
    if down.kind == "wide":
        assert down.outputs == 128  # its fp32 tiles, and the stages, fill a processor
    else:
        assert not down.bulk or size % down.inputs == 0


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-30b-a3b"])
def test_experts_are_timed_with_their_biases_and_activation(name, tmp_path, monkeypatch):
    """The tuner runs the launches of the model's experts: a bias of each layer, and the activation of the first."""
    from preheat.backends.cuda.matmul.moe import tuner as moe_tuner

    values = [value for _, value in values_of(read_spec(CONFIGS[name]), "bfloat16") if isinstance(value, Experts)]
    ran = list[tuple]()
    _, _, ((shape, finish, _),) = asked_of_the_tuner(name, 9.0, tmp_path, monkeypatch)
    assert finish == values[0].gate_up.finish and finish.bias == (name == "gpt-oss-20b")

    shape, biased = ExpertsShape(4, 64, 32, 2, torch.bfloat16), finish.bias
    monkeypatch.setattr(moe_tuner, "experts_layer", lambda _, x, w, __, **how: ran.append((w.shape, how)) or x)
    monkeypatch.setattr(moe_tuner, "activate", lambda y, kind: ran.append(kind) or y)
    bench = moe_tuner.Bench(shape, 3, finish, "cpu")
    for block in (1, 16):
        arranged = SimpleNamespace(block=block)
        for gated in (True, False):
            bench.run(Tile(64, 16, 64, 4, 4), bench.x, arranged, gated=gated)
    gates = [how for size, how in (each for each in ran if isinstance(each, tuple)) if size[1] == 64 and size[2] == 64]
    downs = [how for size, how in (each for each in ran if isinstance(each, tuple)) if size[2] == 32]
    if not biased:
        assert gates == [{"gated": True}] * 2 and [how["bias"] for how in downs] == [None] * 2
        return
    assert [how["gated"] for how in gates] == [False, finish.activation] and ran.count(finish.activation) == 1
    assert [how["bias"].shape for how in (*gates, *downs)] == [(4, 64)] * 4
    assert all(choice.kind == "tile" for choice in moe_tuner.candidates(shape, shape.gate_up, 128, biased=True))
    assert moe_tuner.with_biases(ExpertsConfig(128, Wide(256, 128, 4), Wide(128, 128, 6))).gate_up.kind == "tile"


def test_the_tuner_is_asked_for_the_experts_of_the_model():
    values = [value for _, value in values_of(read_spec(CONFIGS["qwen3-30b-a3b"]), "bfloat16")]
    found = {experts_shape_of(value) for value in values if isinstance(value, Experts)}
    assert found == {ExpertsShape(128, 2048, 768, 8, torch.bfloat16)}


@pytest.fixture
def model_config():
    from preheat.model.files import find_checkpoint, read_config

    return read_config(find_checkpoint("bundled", None, with_weights=False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tuning_is_refused_without_a_gpu(capsys):
    from preheat.cli.main import main

    assert main(["tune", "--model", "bundled"]) == 2
    said = capsys.readouterr().err
    assert "nothing to tune" in said
    assert "Traceback" not in said
