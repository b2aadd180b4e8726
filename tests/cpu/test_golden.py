"""Golden files: equal boots agree, and a change is placed in the model or in the sampler."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from preheat.cli.main import main
from preheat.errors import SettingsError
from preheat.ops.sampler import HostSampler
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify import golden as golden_module
from preheat.verify.command import Asked
from preheat.verify.drive import Engine
from preheat.verify.golden import Golden, check_same_prompts, differences, golden_of, read_golden, write_golden
from preheat.verify.prompts import with_settings

pytestmark = pytest.mark.usefixtures("two_layers")

OPTIONS = {"max_num_seqs": 4, "max_model_len": 96, "block_size": 16, "skip_warmup": True, "boot_check": "off",
           "on_cold": "off", "num_threads": 1, "execution_mode": "eager"}  # fmt: skip
PROMPTS = with_settings([[(7 * at + start) % 300 for at in range(30)] for start in range(4)], 5)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(boot_engine, Settings.load(OPTIONS))


@pytest.fixture(scope="module")
def stored(engine: Engine) -> Golden:
    return golden_of(engine, PROMPTS)


def test_another_boot_agrees_and_the_file_is_read_as_written(stored: Golden, tmp_path: Path) -> None:
    write_golden(stored, str(tmp_path / "g.json"))
    read = read_golden(str(tmp_path / "g.json"))
    assert read == stored and len(set(read.answers)) == 4 and len(set(read.layers)) == 3
    other = golden_of(Engine(boot_engine, Settings.load(OPTIONS)), PROMPTS)
    assert differences(read, other) == []


def test_a_change_of_the_sampler_is_not_of_the_model(
    engine: Engine, stored: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = HostSampler.sample
    monkeypatch.setattr(HostSampler, "sample", lambda self, *given: right(self, *given) ^ 1)
    engine.forget_prefixes()
    (line,) = differences(stored, golden_of(engine, PROMPTS))
    assert line.startswith("answers: 4 of 4 prompts differ, first prompt 0; operation by operation all layers")


@pytest.mark.parametrize(
    ("layer", "said"), [(0, "layer that differs is layer 0"), (1, "layer 1"), (2, "but the logits differ")]
)
def test_the_first_layer_that_differs_is_named(stored: Golden, layer: int, said: str) -> None:
    layers = [*stored.layers[:layer], *("other" for _ in stored.layers[layer:])]
    other = msgspec.structs.replace(stored, layers=layers, answers=["x", *stored.answers[1:]])
    (line,) = differences(stored, other)
    assert line.startswith("answers: 1 of 4 prompts differ, first prompt 0") and line.endswith(said)


def test_a_changed_weight_is_found_in_its_layer(engine: Engine, stored: Golden) -> None:
    weight = engine.loop.executor.decoder.weights.layers[1].post_norm.weight
    before = weight.clone()
    engine.forget_prefixes()
    weight[0] *= 2
    try:
        (line,) = differences(stored, golden_of(engine, PROMPTS))
    finally:
        weight.copy_(before)
        engine.forget_prefixes()
    assert line.endswith("the first layer that differs is layer 1")


def test_the_command_writes_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, prompts = tmp_path / "g.json", tmp_path / "prompts"
    prompts.write_text('{"prompt": [1, 2, 3]}\n{"prompt": [4, 5]}\n')
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if value is not True]
    flags += ["--skip-warmup", "--reduced", "--prompts", str(prompts)]
    assert main(["verify", "--write-golden", str(path), *flags]) == 0
    assert main(["verify", "--golden", str(path), *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 answers are equal bit for bit"
    found = msgspec.json.decode(path.read_bytes())
    found["answers"][1] = "0" * 32
    path.write_bytes(msgspec.json.encode(found))
    assert main(["verify", "--golden", str(path), *flags]) == 1
    assert "1 of 2 prompts differ, first prompt 1" in capsys.readouterr().out
    prompts.write_text('{"prompt": [1, 2, 4]}\n')
    assert main(["verify", "--golden", str(path), *flags]) == 2
    assert "has 2 other prompts" in capsys.readouterr().err


def test_files_and_flags_that_are_none_are_refused(stored: Golden, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not exist: write it with --write-golden"):
        read_golden(str(tmp_path / "none"))
    (tmp_path / "bad").write_text('{"answers": 3}')
    with pytest.raises(SettingsError, match="is no golden file"):
        read_golden(str(tmp_path / "bad"))
    with pytest.raises(SettingsError, match="cannot be written"):
        write_golden(stored, "/proc/none/g")
    with pytest.raises(SettingsError, match="has 4 other prompts"):
        check_same_prompts(stored, PROMPTS[1:], "g")
    usual = {"prompts": None, "reduced": True, "json": False, "digest": None, "against": None}
    for more in ({"golden": "a", "write_golden": "b"}, {"golden": "a", "json": True}):
        with pytest.raises(SettingsError):
            Asked(**usual | more)
    assert golden_module.CONTEXT >= 64
