"""The table of cards: the limits of each, and the choices of kernels cut to them."""

import logging
from itertools import product
from pathlib import Path

import pytest
import torch

from preheat.backends.cuda import environment
from preheat.backends.cuda.device import detect as device
from preheat.backends.cuda.device.card import CARDS, HOPPER, NEEDED, card_of, experience, unknown
from preheat.backends.cuda.lacking import lacking
from preheat.backends.cuda.matmul.config import (
    Expanded,
    ExpertsShape,
    LinearShape,
    Tile,
    experts_reference,
    reference,
)
from preheat.backends.cuda.matmul.fit import fits, shared_bytes
from preheat.backends.cuda.matmul.kernels import KernelConfigs, candidates, rule
from preheat.backends.cuda.matmul.rules import experts_rule
from preheat.backends.registry import pick_backend
from preheat.errors import ModelError, SettingsError
from preheat.model.families import read_spec
from preheat.model.files import find_checkpoint, read_config
from preheat.model.kv_scales import with_kv_dtype
from preheat.model.values import check_supported
from preheat.ops.kinds import Scheme
from preheat.ops.values import Cache, Matmul, Ok, Refused, WeightFormat

SCHEMES = {
    "plain": None,
    "int4": Scheme(code="int4", scales="group", group=128),
    "int4 of small groups": Scheme(code="int4", scales="group", group=32, zeros=True),
    "int8": Scheme(code="int8", scales="channel"),
    "fp8": Scheme(code="fp8", scales="channel", activations="token"),
    "fp8 of blocks": Scheme(code="fp8", scales="block", group=128, activations="block"),
    "fp8 weights": Scheme(code="fp8", scales="channel"),
}
SIZES = ((6144, 4096, False), (28672, 4096, True), (4096, 14336, False), (1000, 1112, False), (151936, 1024, False))
ROWS = (1, 16, 17, 33, 64, 65, 128, 512, 2048, 8192)
RECORDED = Path(__file__).with_name("hopper_choices.txt")


def layers():
    for (name, scheme), (outputs, inputs, gated), dtype in product(
        SCHEMES.items(), SIZES, (torch.bfloat16, torch.float32)
    ):
        if dtype == torch.float32 and scheme is not None:
            continue
        shape = LinearShape(outputs, inputs, gated, dtype, scheme=scheme)
        yield f"{name} {outputs} x {inputs} {dtype}", shape
        if not gated and inputs % 512 == 0:
            yield f"{name} {outputs} x {inputs} {dtype} in splits", shape._replace(splits=4)


def experts():
    for (name, scheme), dtype in product(SCHEMES.items(), (torch.bfloat16, torch.float32)):
        yield f"experts {name} {dtype}", ExpertsShape(128, 2048, 768, 8, dtype, scheme)


def of_hopper():
    """Yield the choices for Hopper as lines."""
    for name, shape in layers():
        yield f"{name}: " + "; ".join(short(rule(shape, rows, card=HOPPER)) for rows in ROWS)
    for name, shape in experts():
        yield f"{name}: " + "; ".join(short(experts_rule(shape, rows, card=HOPPER)) for rows in ROWS)


def short(choice):
    """Return a choice as its class and fields."""
    fields = getattr(choice, "__struct_fields__", None) or getattr(choice, "_fields", ())
    if not fields:
        return str(int(choice))
    return f"{type(choice).__name__[0]}({','.join(short(getattr(choice, field)) for field in fields)})"


def test_choices_for_hopper_are_the_recorded_ones():
    """Digests and timings of Hopper GPUs were taken with these choices."""
    assert RECORDED.read_text().splitlines() == list(of_hopper())


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.version)
def test_choices_fit_the_card(card):
    for _, shape in layers():
        configs = KernelConfigs(card=card)
        for rows in ROWS:
            chosen = [rule(shape, rows, card=card), configs.own(shape, rows), reference(shape)]
            configs.reject(shape, rows)
            check([*chosen, configs(shape, rows)], shape, card)
    for _, shape in experts():
        for rows in ROWS:
            for config in (experts_rule(shape, rows, card=card), experts_reference(shape)):
                check([config.gate_up], shape.gate_up, card)
                check([config.down], shape.down, card)


def check(choices, shape, card):
    for choice in choices:
        tile = choice.choice if isinstance(choice, Expanded) else choice
        if not isinstance(tile, Tile) or (card.is_hopper and tile.bulk):
            continue
        plain = shape._replace(scheme=None) if isinstance(choice, Expanded) else shape
        assert shared_bytes(tile, plain) <= card.room or tile.stages == 1, (card.version, shape, choice)
        assert card.copy_engine or not tile.bulk
        assert fits(choice, shape, card)


def test_choices_for_a_small_card_are_cut_and_the_tuner_tries_none_that_is_too_large():
    """Control: uncut choices do not fit a small card."""
    shape, small = LinearShape(28672, 4096, gated=True), CARDS[8, 6]
    uncut = rule(shape, 16, card=HOPPER)
    assert not fits(uncut, shape, small) and rule(shape, 16, card=small) != uncut
    tried = list(candidates(shape, 16, card=small))
    assert any(isinstance(choice, Tile) for choice in tried)
    assert all(fits(choice, shape, small) for choice in tried)
    assert len(tried) < len(list(candidates(shape, 16, card=CARDS[10, 0])))


def test_early_launches_and_the_copy_engine_begin_with_hopper():
    for capability, card in CARDS.items():
        assert card.early_launch == card.copy_engine == (capability >= (9, 0))
        assert card.float8 == (capability >= (8, 9))
    assert [card.version for card in CARDS.values() if card.ran] == ["9.0"]


def test_other_cards_are_refused_by_name_or_treated_as_the_next_lower_one():
    assert min(CARDS) == NEEDED == (8, 0)
    assert "no matrix unit" in unknown((7, 5)) and "8.0" in unknown((6, 1))
    assert "8.0, 8.6" in unknown((11, 0))
    assert unknown((8, 7)) is None and card_of((8, 7)).version == "8.6"
    assert "treated as 10.0" in experience((10, 3))
    assert card_of((12, 0)).shared_bytes == CARDS[8, 9].shared_bytes


def layer(scheme):
    how = (scheme.activations if scheme else None) or "plain"
    return Matmul(outputs=512, inputs=512, weight=WeightFormat("bfloat16", scheme), input=how)


@pytest.mark.parametrize("capability", CARDS, ids=lambda found: CARDS[found].version)
def test_float8_is_refused_by_name_below_8_9(capability):
    card, known = CARDS[capability], {name: lacking(CARDS[capability], layer(s)) for name, s in SCHEMES.items()}
    refused = {name for name, reason in known.items() if reason}
    assert refused == (set() if capability >= (8, 9) else {"fp8", "fp8 of blocks", "fp8 weights"})
    assert all(SCHEMES[name].name in known[name] and card.version in known[name] for name in refused)
    assert lacking(card, Cache(head_dim=128, dtype="fp8_e5m2", model="bfloat16")) is None
    e4m3 = lacking(card, Cache(head_dim=128, dtype="fp8_e4m3", model="bfloat16"))
    assert (e4m3 is None) == (capability >= (8, 9)) and (e4m3 is None or "fp8_e4m3" in e4m3)


def test_wide_heads_in_float32_are_refused_where_they_do_not_fit():
    wide = Cache(head_dim=256, dtype="float32", model="float32")
    found = {card.version for card in CARDS.values() if lacking(card, wide)}
    assert found == {"8.6", "8.9", "12.0"}
    assert "--dtype bfloat16" in lacking(CARDS[8, 6], wide)
    assert lacking(CARDS[8, 6], Cache(head_dim=128, dtype="float32", model="float32")) is None


def test_a_cache_that_a_card_lacks_is_refused_before_weights_are_read():
    spec = read_spec(read_config(find_checkpoint("bundled", None, with_weights=False)))

    def supports(value):
        reason = lacking(CARDS[8, 6], value)
        return Refused(reason) if reason else Ok()

    check_supported(spec, "bfloat16", supports)
    with pytest.raises(ModelError, match=r"layers\.0\.attention: a KV cache in fp8_e4m3 is not supported on compute"):
        check_supported(with_kv_dtype(spec, "fp8", "bfloat16"), "bfloat16", supports)


def test_an_old_gpu_is_a_warning_with_auto_and_an_error_by_name(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number=0: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number=0: "Tesla T4")
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    assert pick_backend("auto").facts.name == "cpu"
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Tesla T4 has compute capability 7.5" in said.message and "runs on the CPU" in said.message
    with pytest.raises(SettingsError, match=r"7\.5, and the kernels need 8\.0"):
        pick_backend("cuda")


def test_doctor_and_the_backend_read_one_table():
    assert environment.unknown is unknown is device.unknown
