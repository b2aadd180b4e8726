"""The drawings of the record's page hold everything once, in its place, and inside the frame."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from preheat.warmup.charts import EDGE, HIT_LEVELS, WIDTH, format_seconds, grids, hit_level, short, timeline
from preheat.warmup.record import BootStep, ItemRecord, Record
from tests import records

PLANS = {
    "unified": {},
    "split": {"bucketing_policy": "split"},
    "by length": {"bucketing_policy": "split", "bucketing_strategy": "linear", "decode_seq_bucket_max": 2048},
}


@pytest.fixture(scope="module", params=PLANS, ids=str)
def record(request):
    return records.warmed(records.make(PLANS[request.param]))


def test_every_item_has_one_cell_of_its_own(record):
    cells = [cell for grid in grids(record) for cell in grid.cells]
    assert sorted(cell.number for cell in cells) == list(range(len(record.entries)))
    for grid in grids(record):
        assert all(cell.entry is record.entries[cell.number] for cell in grid.cells)
        assert len({(cell.x, cell.y) for cell in grid.cells}) == len(grid.cells)
        assert all(cell.x + grid.cell_width <= grid.width - EDGE + 1e-6 for cell in grid.cells)
        assert all(cell.y + grid.cell_height <= grid.height for cell in grid.cells)


def test_cells_stand_above_their_numbers(record):
    for grid in grids(record):
        columns = {tick.text: tick.at for tick in grid.columns}
        rows = {tick.text: tick.at for tick in grid.rows}
        for cell in grid.cells:
            shape = cell.entry.shape
            across = columns.get(str(shape[grid.across]))  # not every column has room for its number
            assert across is None or across == pytest.approx(cell.x + grid.cell_width / 2)
            if grid.kind in ("mixed", "prompt", "decode") and grid.rows:
                (down,) = (str(value) for name, value in shape.items() if name != grid.across)
                assert rows[down] == pytest.approx(cell.y + grid.cell_height / 2)


def test_a_grid_grows_to_the_right_and_downwards():
    (grid,) = [grid for grid in grids(records.warmed(records.make(PLANS["split"]))) if grid.kind == "prompt"]
    assert (grid.across, grid.down) == ("longest", "rows")
    places = {(cell.entry.shape["longest"], cell.entry.shape["rows"]): (cell.x, cell.y) for cell in grid.cells}
    assert sorted(places, key=lambda key: (places[key][1], places[key][0])) == sorted(places, key=lambda key: key[::-1])


def test_labels_never_overlap(record):
    for grid in grids(record):
        ends = [(tick.at - 3.2 * len(tick.text), tick.at + 3.2 * len(tick.text)) for tick in grid.columns]
        assert all(right < left for (_, right), (left, _) in itertools.pairwise(ends))


def test_the_timeline_has_every_run_item(record):
    drawn = timeline(record)
    ran = [entry for entry in record.entries if entry.touch_seconds]
    assert sum(bar.style == "touch" for lane in drawn.lanes for bar in lane.bars) == len(ran)
    assert [lane.name for lane in drawn.lanes] == ["boot", *dict.fromkeys(entry.kind for entry in ran)]
    boot = drawn.lanes[0].bars
    assert boot[0].x == pytest.approx(drawn.left)
    assert boot[-1].x + boot[-1].width == pytest.approx(WIDTH - EDGE)
    first = next(bar for lane in drawn.lanes[1:] for bar in lane.bars)
    assert first.x == pytest.approx(boot[-1].x)  # items run in the step that is called warm-up
    for lane in drawn.lanes:
        assert all(drawn.left <= bar.x and bar.x + bar.width <= WIDTH - EDGE + 1 for bar in lane.bars)


def test_nothing_that_ran_no_timeline():
    assert timeline(Record.of(records.make())) is None


def test_compiling_comes_before_the_run():
    entry = ItemRecord("x", "decode", {"rows": 1}, outcome="ready", started=1.0, compile_seconds=2.0, touch_seconds=1.0)
    drawn = timeline(Record(entries=[entry], steps=[BootStep("warm-up", 6.0, 4.0)]))
    compiled, touched = drawn.lanes[1].bars
    scale = (WIDTH - EDGE - drawn.left) / 10
    assert compiled.x == pytest.approx(drawn.left + 7 * scale)
    assert touched.x == pytest.approx(compiled.x + 2 * scale)
    assert (compiled.style, touched.style) == ("compile", "touch")


@given(st.lists(st.integers(0, 10**9), min_size=1))
def test_more_hits_are_never_paler(hits):
    most = max(hits)
    levels = [hit_level(count, most) for count in sorted(hits)]
    assert levels == sorted(levels)
    assert all((level == 0) == (count == 0) for level, count in zip(levels, sorted(hits), strict=True))
    assert all(0 <= level <= HIT_LEVELS for level in levels)


@given(st.integers(0, 10**9 - 1))
@example(9_999_999)  # not 10.0M
def test_short_counts_are_short(count):
    text = short(count)
    assert len(text) <= 4
    value = float(text[:-1]) * {"k": 1e3, "M": 1e6}[text[-1]] if text[-1] in "kM" else float(text)
    assert value == pytest.approx(count, rel=0.1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (3.2e-6, "3.2 µs"), (0.0184, "18.4 ms"), (2.314, "2.31 s"), (99.4, "99.4 s"), (250, "4 min 10 s")],
)
def test_seconds_are_readable(seconds, text):
    assert format_seconds(seconds) == text
