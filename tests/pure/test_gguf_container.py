"""Wrong GGUF files: each is refused in one line that says what to do, and costs no memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preheat.errors import ModelError
from preheat.frontend.tokenizer import Tokenizer
from preheat.model.families import read_spec
from preheat.model.files import find_model, find_tokenizer, read_config
from preheat.model.gguf.container import read_container
from preheat.model.gguf.folder import folder_of
from preheat.settings import Settings
from tests.gguf_files import Tensor, field, file_bytes, text

FIELDS: dict[str, Any] = {
    "general.architecture": "llama", "llama.context_length": 64, "llama.embedding_length": 32, "llama.block_count": 1,
    "llama.feed_forward_length": 64, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "ab", "<end>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3], "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.eos_token_id": 3,
}  # fmt: skip


def plain(*shape: int) -> Tensor:
    size = 4
    for each in shape:
        size *= each
    return "F32", shape, bytes(size)


TENSORS: dict[str, Tensor] = {
    "token_embd.weight": plain(4, 32), "output_norm.weight": plain(32), "blk.0.attn_norm.weight": plain(32),
    "blk.0.attn_q.weight": ("Q8_0", (32, 32), bytes(1088)), "blk.0.attn_k.weight": ("Q8_0", (16, 32), bytes(544)),
    "blk.0.attn_v.weight": ("Q8_0", (16, 32), bytes(544)), "blk.0.attn_output.weight": plain(32, 32),
    "blk.0.ffn_norm.weight": plain(32), "blk.0.ffn_gate.weight": plain(64, 32), "blk.0.ffn_up.weight": plain(64, 32),
    "blk.0.ffn_down.weight": plain(32, 64),
}  # fmt: skip
WHOLE = file_bytes(FIELDS, TENSORS)


def use(data: bytes, folder: Path, *, tokenizer: bool = True) -> Path:
    """Return the folder of a file of these bytes."""
    file = folder / "m.gguf"
    file.write_bytes(data)
    return folder_of(file, folder / "cache", tokenizer=tokenizer)


def changed(**fields: Any) -> bytes:
    """Return the file with other fields, whose names have __ for dots; None leaves one out."""
    given = FIELDS | {name.replace("__", "."): value for name, value in fields.items()}
    return file_bytes({name: value for name, value in given.items() if value is not None}, TENSORS)


def test_a_file_becomes_a_folder_once(tmp_path):
    folder = use(WHOLE, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["vocab_size"]) == (["LlamaForCausalLM"], 4)
    assert config["eos_token_id"] == [3] and config["tie_word_embeddings"]
    packed = {f"model.layers.0.self_attn.{each}_proj" for each in "qkv"}
    assert config["quantization_config"]["modules"].keys() == packed
    assert (folder / "model.gguf").resolve() == tmp_path / "m.gguf"
    before = (folder / "config.json").stat().st_mtime_ns
    assert folder_of(tmp_path / "m.gguf", tmp_path / "cache", tokenizer=True) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    assert use(changed(llama__block_count=2), tmp_path) != folder


def test_a_file_is_found_without_a_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(WHOLE)
    folder = find_model(Settings(model=str(tmp_path / "m.gguf"), cache_dir="off"))
    assert folder.is_relative_to(tmp_path) and folder.parent.stat().st_mode & 0o077 == 0
    folder.parent.chmod(0o777)
    with pytest.raises(ModelError, match="open to others: remove it"):
        find_model(Settings(model=str(tmp_path / "m.gguf"), cache_dir="off"))


def header(tensors: int, fields: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + rest


HUGE = 1 << 60
WRONG = {
    "empty": (b"", "is empty: fetch or convert the file again"),
    "another format": (b"PK\3\4" + bytes(40), r"is no GGUF file: it begins with b'PK.*'; give a file"),
    "short": (b"GGU", "it is cut off in 'the header'"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "is a big-endian GGUF file: convert it without"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(16), "has version 1 of GGUF, and versions 2 and 3 are read"),
    "many tensors": (header(HUGE, 0), "states 1,152,921,504,606,846,976 tensors, and at most"),
    "many fields": (header(0, HUGE), "states 1,152,921,504,606,846,976 fields, and at most"),
    "long name": (header(0, 1, struct.pack("<Q", HUGE)), "a field's name has 1,152,921,504,606,846,976 bytes"),
    "long text": (header(0, 1, text("x") + struct.pack("<IQ", 8, HUGE)), "cut off in 'x', where 1,152,.* are left"),
    "long list": (header(0, 1, text("x") + struct.pack("<IIQ", 9, 4, HUGE)), "'x' states 1,152,.*, and at most 0"),
    "list of lists": (header(0, 1, text("x") + struct.pack("<IIQ", 9, 9, 1)), "'x' has the unknown type 9"),
    "unknown type of a field": (header(0, 1, text("x") + struct.pack("<I", 99)), "'x' has the unknown type 99"),
    "no text": (header(0, 1, text("x") + struct.pack("<IQ", 8, 1) + b"\xff"), "'x' is no UTF-8 at byte 0"),
    "twice": (header(0, 2, (text("x") + field(1)) * 2), "the field 'x' is there more than once"),
    "alignment": (changed(general__alignment=7), "general.alignment must be a power of two"),
    "dimensions": (header(1, 0, text("t") + struct.pack("<I", 99)), "'t' has 99 dimensions, and 1 to 4 are read"),
    "a shape": (
        header(1, 0, text("t") + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0)), r"'t' has the shape \[1152921504606846976"
    ),
    "unknown type of a tensor": (header(1, 0, text("t") + struct.pack("<IQIQ", 1, 32, 77, 0)), "the unknown type 77"),
    "no blocks": (header(1, 0, text("t") + struct.pack("<IQIQ", 1, 33, 8, 0)), "rows of 33 numbers .* blocks of 32"),
    "beyond the end": (
        header(1, 0, text("t") + struct.pack("<IQIQ", 1, 32, 8, HUGE)), "'t' ends at byte .*, and the file has .* cut"
    ),
    "cut off": (WHOLE[:-32], "'blk.0.ffn_down.weight' ends at byte .*: it is cut off; fetch or convert"),
    "one of several": (changed(split__count=3), "it is one part of several; merge them with llama-gguf-split"),
    "no architecture": (changed(general__architecture=None), "it has no field general.architecture"),
    "another architecture": (changed(general__architecture="mamba"), "'mamba' is not supported; supported are llama,"),
    "no field": (changed(llama__block_count=None), "it has no field llama.block_count; give the checkpoint"),
    "a field of another type": (changed(llama__block_count="two"), "llama.block_count has the value 'two'"),
    "no heads": (changed(llama__attention__head_count=0), "llama.attention.head_count has the value 0"),
    "layers that differ": (changed(llama__feed_forward_length=[64, 32]), r"differs between layers: \[64, 32\]"),
    "a field that is not computed": (changed(llama__logit_scale=0.5), "logit_scale has the value 0.5, which is not"),
    "another rope scaling": (changed(llama__rope__scaling__type="ntk"), "the rope scaling 'ntk' is not supported"),
    "longrope without factors": (changed(llama__rope__scaling__type="longrope"), "factors_short.weight is missing"),
    "factor of the tables": (changed(llama__rope__scaling__attn_factor=1.5), "attn_factor is 1.5, which is not"),
    "weights of experts": (changed(llama__expert_weights_norm=False), "expert_weights_norm is False, which is not"),
    "values of another size": (changed(llama__attention__value_length=8), "keys of None numbers and values of 8"),
    "a part of a head": (changed(llama__rope__dimension_count=8), "8 of 16 dimensions of a head turn"),
    "another tokenizer": (changed(tokenizer__ggml__model="bert"), "'bert' is not supported; .* with --tokenizer"),
    "another rule": (changed(tokenizer__ggml__pre="viking"), "the rule 'viking' that splits text is not known; known"),
    "no merges": (changed(tokenizer__ggml__merges=None), "tokenizer.ggml.merges is missing; name a folder"),
    "a token beyond the end": (changed(tokenizer__ggml__eos_token_id=4), "eos_token_id is 4, and there are 4 tokens"),
    "types": (changed(tokenizer__ggml__token_type=[1]), "it has 4 tokens and 1 kinds of tokens"),
    "a type that is not read": (
        file_bytes(FIELDS, TENSORS | {"output.weight": ("IQ4_NL", (4, 32), bytes(72))}),
        r"tensors of types that are not read: output.weight \(IQ4_NL\); quantize the model to one of F32, F16, .*Q6_K",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused(name, tmp_path):
    data, message = WRONG[name]
    with pytest.raises(ModelError, match=message) as caught:
        use(data, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_on_the_hub_is_named_by_its_type(tmp_path, monkeypatch):
    import huggingface_hub

    asked: list[dict[str, Any]] = []

    def snapshot(model: str, **options: Any) -> str:
        asked.append({"model": model, **options})
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    (tmp_path / "hub").mkdir()
    for name in ("tiny-Q8_0", "tiny-IQ8_0", "mmproj-Q8_0", "tiny-Q4_0-00001-of-00002"):
        (tmp_path / "hub" / f"{name}.gguf").write_bytes(WHOLE)
    cache = str(tmp_path / "cache")
    folder = find_model(Settings(model="org/tiny-GGUF:q8_0", revision="v2", cache_dir=cache))
    assert (folder / "model.gguf").resolve().name == "tiny-Q8_0.gguf"
    assert (asked[0]["model"], asked[0]["revision"]) == ("org/tiny-GGUF", "v2")
    assert asked[0]["allow_patterns"] == ["*Q8_0.gguf", "*q8_0.gguf"]
    assert find_tokenizer(Settings(tokenizer="org/tiny-GGUF:Q8_0", cache_dir=cache)) == folder
    with pytest.raises(ModelError, match=":Q4_0': one whole file of type Q4_0 is needed, and there is none"):
        find_model(Settings(model="org/tiny-GGUF:Q4_0", cache_dir=cache))
    with pytest.raises(ModelError, match="has files of several types: name one, as in org/tiny-GGUF:Q4_K_M"):
        find_model(Settings(model="org/tiny-GGUF", cache_dir=cache))


def test_what_is_no_file(tmp_path):
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        folder_of(tmp_path / "m.gguf", tmp_path, tokenizer=True)
    (tmp_path / "d.gguf").mkdir()
    with pytest.raises(ModelError, match="cannot be read: it is a folder"):
        folder_of(tmp_path / "d.gguf", tmp_path, tokenizer=True)


def test_an_unknown_tokenizer_may_be_replaced(tmp_path):
    folder = use(changed(tokenizer__ggml__pre="viking"), tmp_path, tokenizer=False)
    assert not (folder / "tokenizer.json").exists()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_file_is_used_or_refused_within_little_memory(tmp_path, data):
    """Up to four changed runs of bytes, or a cut, end in a model and a tokenizer, or in a ModelError."""
    raw = bytearray(WHOLE)
    end = len(WHOLE) - sum(len(each) for _, _, each in TENSORS.values())  # the weights themselves may be anything
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        new = data.draw(st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from([b"\xff" * 8, bytes(8)])))
        raw[at : at + len(new)] = new
    raw = raw[: data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))]
    tracemalloc.start()
    message, folder = "", None
    try:
        folder = use(bytes(raw), tmp_path)
    except ModelError as error:
        message = error.message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20
    assert "\n" not in message
    with suppress(ModelError):
        if folder is not None:
            read_spec(read_config(folder))
            Tokenizer(folder)


def test_the_bound_of_memory_can_be_seen(tmp_path):
    """Control: a list that is read before its length is compared would take more than the bound."""
    tracemalloc.start()
    (tmp_path / "m.gguf").write_bytes(header(0, 1, text("x") + struct.pack("<IIQ", 9, 4, 1 << 20) + bytes(4 << 20)))
    read_container(tmp_path / "m.gguf")
    assert tracemalloc.get_traced_memory()[1] > 4 << 20
    tracemalloc.stop()
