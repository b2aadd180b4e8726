import dataclasses
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cuda.facts import FACTS as CUDA
from preheat.core import CALLERS_FIELDS, SAMPLING_FIELDS, Level, SamplingParams
from preheat.limits import Limits
from preheat.plan import lines
from preheat.plan.buckets import Bucket, StepSize, padded_work
from preheat.plan.cache_items import SwapItem
from preheat.plan.cost import Cost, Costs, ModelSizes
from preheat.plan.item import Item
from preheat.plan.modes import with_defaults
from preheat.plan.options import PlanOptions
from preheat.plan.plan import KINDS, make_plan
from preheat.plan.programs import Program
from preheat.plan.sampler_settings import BRANCH_SETTINGS, GAUDI_SETTINGS, SAMPLER_SETTINGS
from preheat.plan.step_items import SamplerItem
from preheat.settings import Settings
from preheat.warmup.record import Record
from tests.specs import llama

DEFAULTS = SamplingParams()
NOT_SAMPLED = {name for name, field in SAMPLING_FIELDS.items() if field.acts != "sampler"}
SIZES = ModelSizes.of(llama(hidden=64, inner=64, layers=1, heads=1, kv_heads=1, head_dim=64, vocab=100))


def uncovered(settings) -> set[str]:
    """Return fields of SamplingParams that no setting moves from the default, and that are not out of scope."""
    moved = {
        field.name
        for params in settings
        for field in msgspec.structs.fields(SamplingParams)
        if getattr(params, field.name) != getattr(DEFAULTS, field.name)
    }
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    return fields - moved - NOT_SAMPLED - set(CALLERS_FIELDS)


def test_every_field_that_the_sampler_looks_at_is_in_a_setting():
    assert uncovered(SAMPLER_SETTINGS.values()) == set()


def test_the_cover_of_sampler_fields_can_fail():
    assert uncovered(GAUDI_SETTINGS.values()) >= {"min_p", "seed", "logprobs", "logit_bias", "min_tokens"}


def test_nothing_is_declared_out_of_scope_that_does_not_exist():
    assert {field.name for field in msgspec.structs.fields(SamplingParams)} >= NOT_SAMPLED


def test_the_twelve_settings_are_logged_in_order():
    items = [item for item in sampler_items(138) if item.setting in GAUDI_SETTINGS]
    text = lines.sampler_start([0, 1, 138], [(item.setting, item.batch_changed) for item in items])
    assert text == [
        "Warming up sampler with batch sizes: [0, 1, 138] and following configs:",
        "temp=0.0, top_p=1.0, top_k=0, batch_changed=True",
        "temp=1.0, top_p=1.0, top_k=0, batch_changed=True",
        "temp=0.7, top_p=0.9, top_k=50, batch_changed=True",
        "temp=0.3, top_p=0.95, top_k=20, batch_changed=True",
        "temp=1.2, top_p=0.8, top_k=100, batch_changed=True",
        "temp=0.8, top_p=0.85, top_k=0, batch_changed=True",
        "temp=0.0, top_p=1.0, top_k=0, batch_changed=False",
        "temp=1.0, top_p=1.0, top_k=0, batch_changed=False",
        "temp=0.7, top_p=0.9, top_k=50, batch_changed=False",
        "temp=0.3, top_p=0.95, top_k=20, batch_changed=False",
        "temp=1.2, top_p=0.8, top_k=100, batch_changed=False",
        "temp=0.8, top_p=0.85, top_k=0, batch_changed=False",
        "Starting sampler warmup...",
    ]


def sampler_items(*sizes, on_host=False) -> list[SamplerItem]:
    options = PlanOptions(host_sampler=on_host)
    return list(SamplerItem.of_plan(SimpleNamespace(sampler_sizes=sizes, options=options)))


def test_each_size_runs_each_setting_changed_and_unchanged():
    items = sampler_items(0, 4)
    assert len(items) == len(set(items)) == 2 * 2 * len(SAMPLER_SETTINGS)
    assert items[:12] == [SamplerItem(0, name, changed) for changed in (True, False) for name in GAUDI_SETTINGS]
    assert items[12:14] == [SamplerItem(0, name, True) for name in list(BRANCH_SETTINGS)[:2]]


def test_a_sampler_on_the_host_runs_each_setting_once_and_each_program():
    items = sampler_items(0, 1, 4, on_host=True)
    assert {(item.setting, item.batch_changed) for item in items if item.rows == 1} == {
        (name, changed) for name in SAMPLER_SETTINGS for changed in (True, False)
    }
    assert [item.program for item in items if item.rows == 4] == [Program("sampler", 4, level) for level in Level]
    assert {item.program for item in items} == {item.program for item in sampler_items(0, 1, 4)}
    assert len(items) == len({item.name for item in items}) == 2 * len(SAMPLER_SETTINGS) + 2 * len(Level)


@given(st.sets(st.integers(0, 512), min_size=1, max_size=30).map(sorted))
def test_items_that_do_not_repeat_run_every_program_and_every_setting(sizes):
    """A later boot leaves out the others."""
    items = [item for item in sampler_items(*sizes) if item.rows]
    left = [item for item in items if not item.repeats]
    assert {item.program for item in left} == {item.program for item in items}
    assert {(item.setting, item.batch_changed) for item in left} == {
        (each.setting, each.batch_changed) for each in items
    }
    assert len(left) <= 4 * len(SAMPLER_SETTINGS) + len(Level) * len(sizes)


def test_repeated_items_of_a_large_plan_are_most():
    items = sampler_items(*range(26))
    assert (len(items), sum(not item.repeats for item in items)) == (780, 2 * 30 + 24 * 3)
    assert not any(item.repeats for item in sampler_items(0, 1, 4, on_host=True))


def test_the_plan_of_a_cpu_has_few_items():
    """The plan of a CPU has few items.

    Once its sampler made 728 of 818, and these took most of a start.
    """
    limits = Limits(
        max_model_len=2048, max_num_seqs=CPU.max_num_seqs, max_num_batched_tokens=CPU.max_num_batched_tokens,
        max_num_prefill_seqs=None, block_size=64, num_blocks=2049,
    )  # fmt: skip
    plan = make_plan(limits, PlanOptions.of(with_defaults(Settings(), CPU), CPU))
    kinds = Counter(item.kind for item in plan.items)
    assert kinds["sampler"] <= 100
    assert len(plan.items) <= 160
    assert (
        Counter(item.kind for item in make_plan(limits, PlanOptions.of(with_defaults(Settings(), CUDA), CUDA)).items)[
            "sampler"
        ]
        > 400
    )


def test_every_item_of_the_sampler_names_a_program():
    """Each sampler item names a program of its setting's level, at each number of rows."""
    found = {item.program for item in sampler_items(1, 4)}
    assert found == {Program("sampler", rows, level) for rows in (1, 4) for level in Level}
    assert SamplerItem(4, "logprobs", False).program == Program("sampler", 4, Level.GREEDY)
    assert SamplerItem(4, "min_p", True).program == Program("sampler", 4, Level.FILTERED)
    assert SamplerItem(4, "min_tokens", False).program == Program("sampler", 4, Level.FULL)
    assert str(Program("sampler", 4, Level.FULL)) == "(sampler, 4, full)"


def test_levels():
    assert Level.of(SAMPLER_SETTINGS["temp=0.0, top_p=1.0, top_k=0"]) is Level.GREEDY
    assert Level.of(SAMPLER_SETTINGS["min_p"]) is Level.of(SAMPLER_SETTINGS["seed"]) is Level.FILTERED
    assert {Level.of(BRANCH_SETTINGS[name]) for name in ("penalties", "logit_bias", "min_tokens", "everything")} == {
        Level.FULL
    }


def test_the_lines_of_the_sampler_and_the_defragmenter(caplog):
    told = []
    SamplerItem.run_kind(sampler_items(4), lambda item: None, SimpleNamespace(tell=told.append))
    assert told[0].startswith("Warming up sampler with batch sizes: [")
    assert told[-1] == "Sampler warmup completed successfully"
    told.clear()
    SwapItem.run_kind([SwapItem(8), SwapItem(16)], lambda item: None, SimpleNamespace(num_blocks=2, tell=told.append))
    SwapItem.run_kind([SwapItem(8)], lambda item: None, SimpleNamespace(num_blocks=1, tell=told.append))
    assert told == [
        "Warming up defragmenter with thresholds: [8, 16]",
        "Defragmenter warmup completed successfully",
        "Warming up defragmenter with thresholds: [8]",
    ]
    assert caplog.messages == ["Skipping defragmenter warmup, insufficient blocks (1)"]


@pytest.mark.parametrize(
    ("shape", "text", "dims"),
    [
        (Bucket.prompt(4, 512), "(prompt, 4, 512)", {"rows": 4, "longest": 512}),
        (Bucket.decode(4), "(decode, 4)", {"rows": 4}),
        (Bucket.decode(4, blocks=64), "(decode, 4, 64)", {"rows": 4, "blocks": 64}),
        (Bucket.decode(4, longest=640), "(decode, 4, 640)", {"rows": 4, "longest": 640}),
        (Bucket.mixed(512, 16), "(mixed, 512, 16)", {"tokens": 512, "rows": 16}),
    ],
)
def test_shapes_name_themselves(shape, text, dims):
    assert str(shape) == text
    assert shape.named_dims() == dims
    assert shape.dims == tuple(dims.values())


def test_a_bucket_holds_the_steps_that_fit_it():
    need = StepSize("prompt", 3, 900, 400)
    assert Bucket.prompt(4, 512).holds(need)
    assert Bucket.mixed(1024, 4).holds(need)
    assert not Bucket.mixed(512, 4).holds(need)
    assert not Bucket.prompt(2, 512).holds(need)
    assert not Bucket.prompt(4, 384).holds(need)
    assert not Bucket.decode(1024, longest=512).holds(need)
    assert not Bucket.decode(4, blocks=8).holds(StepSize("decode", 4, 4, blocks=9))


def test_padded_work():
    assert padded_work(Bucket.prompt(4, 512)) == 2048
    assert padded_work(Bucket.mixed(512, 16)) == 512
    assert padded_work(Bucket.decode(8)) == 8
    assert padded_work(Bucket.decode(8, longest=64)) == 512
    assert padded_work(Bucket.decode(8, blocks=64)) == 72


def test_settings_cannot_be_changed():
    with pytest.raises(TypeError):
        SAMPLER_SETTINGS["more"] = DEFAULTS


@dataclasses.dataclass(frozen=True, slots=True)
class EchoItem(Item):
    """A kind of its own: a program that runs twice."""

    KIND = "echo"
    times: int

    @classmethod
    def of_plan(cls, plan):
        return [cls(rows) for rows in plan.sampler_sizes if rows]

    @property
    def shape(self):
        return {"times": self.times}

    @property
    def program(self):
        return Program("swap", -self.times)

    def cost(self, costs):
        return Cost(0.25, 7)

    def run(self, warm):
        for _ in range(self.times):
            warm.swap(self.times)


class Echoes:
    """The parts of a warm-up that the kind needs."""

    def __init__(self):
        self.heard = []

    def swap(self, pairs):
        self.heard.append(pairs)


def test_a_kind_of_item_is_one_class_and_one_line(monkeypatch):
    """A new kind is one class and one line: it is planned with its cost, recorded, and run."""
    monkeypatch.setattr("preheat.plan.plan.KINDS", (*KINDS, EchoItem))
    limits = Limits(
        max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64, max_num_prefill_seqs=None, block_size=16,
        num_blocks=9,
    )  # fmt: skip
    plan = make_plan(limits, PlanOptions(), Costs(SIZES, CPU.machine, 16))
    echoes = [item for item in plan.items if item.kind == "echo"]
    assert [(item.name, item.estimate, item.stage) for item in echoes] == [
        ("(echo, 1)", (0.25, 7), "after_cache"),
        ("(echo, 2)", (0.25, 7), "after_cache"),
    ]
    record = Record.of(plan)
    assert [entry.name for entry in record.entries if entry.kind == "echo"] == ["(echo, 1)", "(echo, 2)"]
    warm = Echoes()
    assert EchoItem.run_kind(echoes, lambda item: item.run(warm), warm) == 2
    assert warm.heard == [1, 2, 2]
    assert plan.programs == len({item.program for item in plan.items if item.program})
    assert Program("swap", -2) in {item.program for item in plan.items}


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (Program("forward", Bucket.mixed(8, 2)), "(mixed, 8, 2)"),
        (Program("forward", Bucket.decode(4, longest=64), adapted=True), "(lora, decode, 4, 64)"),
        (Program("forward", Bucket.verify(4, 3), draft=True), "(draft, verify, 4, 3)"),
        (Program("sampler", 4, Level.GREEDY, adapted=True), "(lora, sampler, 4, greedy)"),
        (Program("sampler", 4, Level.FILTERED, draft=True), "(draft, sampler, 4, filtered)"),
        (Program("head", 4, adapted=True), "(lora, head, 4)"),
        (Program("encoder", 4), "(encoder, 4)"),
        (Program("swap", 4), "(swap, 4)"),
        (Program("offload", "store"), "(offload, store)"),
    ],
    ids=str,
)
def test_a_program_has_the_name_that_stored_records_have_for_it(program, name):
    assert str(program) == name


def plan_of_everything():
    limits = Limits(
        max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64, max_num_prefill_seqs=None, block_size=16,
        num_blocks=99, image_tokens=10, num_speculative_tokens=3,
    )  # fmt: skip
    options = PlanOptions(enable_lora=True, draft_model=True, kv_offloading_size=1.0, verify_widths=(2, 4))
    return make_plan(limits, options)


def test_programs_of_different_kinds_are_different_keys():
    """Programs of different kinds are different keys.

    A step with adapters is no step of the draft model, and four images are not four pairs of blocks.
    """
    programs = {item.program for item in plan_of_everything().items if item.program}
    assert len(programs) == len(set(map(str, programs)))
    assert {program.kind for program in programs} == {"forward", "sampler", "encoder", "swap", "offload"}
    assert {(program.adapted, program.draft) for program in programs} == {(False, False), (True, False), (False, True)}
    keys = {Program("swap", 4), Program("encoder", 4), Program("head", 4), Program("sampler", 4, Level.GREEDY)}
    assert (
        len(keys | {each._replace(adapted=True) for each in keys} | {each._replace(draft=True) for each in keys}) == 12
    )


def test_the_record_finds_a_forward_program_by_its_name():
    """Capturing writes into the entry of the same name, with adapters and without."""
    items = [item for item in plan_of_everything().items if item.program and item.program.kind == "forward"]
    assert len(items) > 3
    assert all(item.name == str(item.program) for item in items)
