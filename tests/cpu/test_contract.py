"""The contract: the digest of weights, the parts that decide tokens, and the first one that differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.frontend import Frontend
from preheat.frontend.tokenizer import Tokenizer
from preheat.model import weights_digest
from preheat.model.files import BUNDLED_PATH, weight_files
from preheat.model.reading import Piece
from preheat.model.sources import SafetensorsFiles
from preheat.model.weights_digest import WeightsDigest
from preheat.settings import Settings
from preheat.startup import boot_engine, boot_front
from preheat.utils.contract import Contract, first_difference
from preheat.verify.drive import Engine
from preheat.verify.prompts import with_settings

OPTIONS = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 16, "skip_warmup": True, "on_cold": "off",
           "boot_check": "off", "num_threads": 1}  # fmt: skip
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def eager_engine(shallow: str) -> Engine:
    return Engine(boot_engine, Settings.load({**OPTIONS, "model": shallow, "execution_mode": "eager"}))


def digest(folder: Path) -> str:
    return WeightsDigest(weight_files(folder)).result()


def test_the_digest_of_weights_is_of_tensors_and_not_of_files(shallow: str, tmp_path: Path) -> None:
    tensors = load_file(Path(shallow) / WEIGHTS)
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-{number}-of-2.safetensors", {"a": "b"})
    places = {name: f"model-{number % 2 + 1}-of-2.safetensors" for number, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert len(digest(tmp_path)) == 32
    assert digest(tmp_path) == digest(Path(shallow))


def test_any_flipped_bit_of_any_tensor_changes_the_digest(shallow: str, tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS
    shutil.copy(Path(shallow) / WEIGHTS, path)
    right = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(right[:8], "little")
    header = json.loads(right[8:start])
    header.pop("__metadata__", None)
    found = {digest(tmp_path)}
    for number, tensor in enumerate(header.values()):
        first, last = tensor["data_offsets"]
        at = start + (first, last - 1)[number % 2]
        right[at] ^= 1 << number % 8
        path.write_bytes(right)
        found.add(digest(tmp_path))
    assert len(found) == 1 + len(header) > 20


def test_a_file_in_another_format_counts_as_a_whole(tmp_path: Path) -> None:
    found = set()
    for content in (b"", b"GGUF and more", b"GGUF and mora", (3).to_bytes(8, "little") + b"[1]"):
        (tmp_path / WEIGHTS).write_bytes(content)
        found.add(digest(tmp_path))
    assert len(found) == 4


def test_the_loader_gives_its_bytes_to_the_digest(
    shallow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tensors that no loader reads come from the file, and the digest is that of the files alone."""
    right, reread = digest(Path(shallow)), list[str | None]()
    of_file = weights_digest._digest
    monkeypatch.setattr(weights_digest, "_digest", lambda piece: reread.append(piece.name) or of_file(piece))
    options = {**OPTIONS, "model": shallow, "execution_mode": "eager"}
    assert Engine(boot_engine, Settings.load(options)).ready.contract.weights == right and not reread

    tensors = load_file(Path(shallow) / WEIGHTS)
    save_file(tensors | {"model.rotary_emb.inv_freq": torch.ones(3)}, tmp_path / WEIGHTS)  # harmless, and never read
    started = WeightsDigest(weight_files(tmp_path))
    files = SafetensorsFiles(tmp_path, lambda source, out: None, read=started.read)
    for name, tensor in tensors.items():
        files.fill(name, tensor[: len(tensor) // 2].clone(), Piece(tuple(tensor.shape), (0, len(tensor) // 2)))
    assert started.result() == digest(tmp_path) != right
    assert reread[0] == "model.rotary_emb.inv_freq"


def test_a_loader_with_other_bytes_gives_another_digest(shallow: str) -> None:
    started = WeightsDigest(weight_files(Path(shallow)))
    for name, tensor in load_file(Path(shallow) / WEIGHTS).items():
        data = tensor.reshape(-1).view(torch.uint8)
        data[-1] ^= name == "model.norm.weight"
        started.read(name, lambda data=data: data.numpy().data)
    assert started.result() != digest(Path(shallow))


def test_a_boot_that_fails_hashes_nothing_more(shallow: str) -> None:
    started = WeightsDigest(weight_files(Path(shallow)))
    started.close()
    started.read("model.norm.weight", lambda: pytest.fail("read"))
    started.loaded()
    assert not started._lines


ONE = Contract(weights="w", numerics={"dtype": "bfloat16", "versions": {"torch": "2.12"}}, template="t")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"weights": "v", "template": "u"}, "weights: w -> v"),
        ({"numerics": {"dtype": "bfloat16", "versions": {"torch": "2.13"}}}, "numerics.versions.torch: 2.12 -> 2.13"),
        ({"numerics": {"dtype": "bfloat16"}}, "numerics.versions: {'torch': '2.12'} -> None"),
        ({"defaults": "d"}, "defaults:  -> d"),
    ],
)
def test_the_first_part_that_differs_is_named(other: dict[str, object], said: str) -> None:
    changed = msgspec.structs.replace(ONE, **other)
    assert str(first_difference(ONE, changed)) == said
    assert changed.id != ONE.id
    assert first_difference(ONE, msgspec.structs.replace(ONE)) is None


def test_two_boots_have_one_contract_and_a_changed_boot_names_the_change(shallow: str, eager_engine: Engine) -> None:
    one = eager_engine.ready.contract
    assert one is not None and one.weights == digest(Path(shallow))
    found = {}
    base = {**OPTIONS, "model": shallow, "execution_mode": "eager"}
    another = "bfloat16" if one.numerics["dtype"] == "float32" else "float32"  # the default is the processor's
    for name, more in {
        "": {"max_num_seqs": 6, "max_model_len": 48},  # limits decide no bit
        "numerics.dtype": {"dtype": another},
        "sampler": {"handle_topk_duplicates": True},
        "weights": {"load_format": "dummy"},
    }.items():
        other = boot_engine_of(Settings.load({**base, **more}))
        difference = first_difference(one, other)
        found[name] = difference.name if difference else ""
    assert found == {name: name for name in found}


def boot_engine_of(settings: Settings) -> Contract:
    found = Engine(boot_engine, settings).ready.contract
    assert found is not None
    return found


def test_a_frontend_adds_its_parts(shallow: str, tmp_path: Path, eager_engine: Engine) -> None:
    def contract(**more: object) -> Contract:
        frontend = boot_front(Settings.load({**OPTIONS, "model": shallow, **more}), lambda message: None)
        frontend.ready = eager_engine.ready
        return frontend.contract

    (tmp_path / "t.jinja").write_text("{{ messages }}")
    one = contract()
    assert one.weights == digest(Path(shallow)) and all((one.tokenizer, one.template, one.defaults))
    assert first_difference(one, contract()) is None
    other = first_difference(one, contract(chat_template=str(tmp_path / "t.jinja")))
    assert other is not None and other.name == "template"
    other = first_difference(one, contract(override_generation_config={"temperature": 0.3}))
    assert other is not None and other.name == "defaults"


def test_a_tokenizer_is_told_from_another(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(BUNDLED_PATH / name, tmp_path)
    same = Frontend(Tokenizer(tmp_path), lambda message: None)
    assert same.tokenizer.digest == Tokenizer(BUNDLED_PATH).digest
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text + " ")
    assert Tokenizer(tmp_path).digest != Tokenizer(BUNDLED_PATH).digest
    assert ChatTemplate(Tokenizer(tmp_path)).digest == same.template.digest


def block_hashes(engine: Engine) -> set[bytes]:
    engine.run(with_settings([[(3 * at) % 90 for at in range(40)]], 2))
    return {each for each in engine.loop.scheduler.pool._hash_of if each is not None}


def test_blocks_are_named_by_the_contract(eager_engine: Engine) -> None:
    """Other weights give other block hashes, and an update gives hashes that no other engine has."""
    scheduler, operator = eager_engine.loop.scheduler, eager_engine.loop.control._operator
    before = block_hashes(eager_engine)
    assert before
    contract = operator.state.contract
    operator.state.contract = operator._updated()
    assert first_difference(contract, operator.state.contract).name == "weights"
    operator._forget()
    after = block_hashes(eager_engine)
    assert len(after) == len(before) and not after & before
    assert scheduler.idle
