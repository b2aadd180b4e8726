"""Receipts: an answer is given again by another boot, and every change of it is found at its first position."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from preheat import LLM
from preheat.cli.main import main
from preheat.core import SamplingParams, StructuredOutputsParams
from preheat.errors import InvalidRequest, PreheatError, SettingsError
from preheat.frontend.receipt import Receipt, chain_of
from preheat.frontend.receipt_log import KEPT, ReceiptLog
from preheat.ops.digest import row_digests
from preheat.settings import Settings
from preheat.startup import boot_engine, boot_front
from preheat.verify import replay
from preheat.verify.drive import Engine

BASE = {"max_num_seqs": 8, "max_model_len": 128, "block_size": 16, "skip_warmup": True, "boot_check": "off",
        "on_cold": "off", "num_threads": 1, "execution_mode": "eager"}  # fmt: skip
PLAIN = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, receipt=True)
KINDS = [
    PLAIN,
    replace(PLAIN, temperature=1.0, seed=2**64 - 5, n=2, top_p=0.9),
    replace(PLAIN, temperature=1.0, presence_penalty=1.0, logit_bias={7: 2.5}, logprobs=2),
    replace(PLAIN, temperature=1.0, seed=3, min_tokens=4, stop=["e", "a"]),
    replace(PLAIN, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="[ab]{2,6}")),
]  # fmt: skip


@pytest.fixture(scope="module")
def options(shallow: str) -> dict[str, object]:
    return {**BASE, "model": shallow}


@pytest.fixture(scope="module")
def llm(options: dict[str, object]) -> LLM:
    return LLM(**options)


@pytest.fixture(scope="module")
def receipts(llm: LLM) -> list[Receipt]:
    """Return the receipts of all choices of an engine that runs requests together."""
    prompts = [{"prompt_token_ids": [(5 * at + number) % 90 for at in range(20)]} for number in range(len(KINDS))]
    outputs = llm.generate(prompts, KINDS, use_tqdm=False)
    found = [choice.receipt for output in outputs for choice in output.outputs]
    assert [each.tokens for each in found] == [choice.token_ids for output in outputs for choice in output.outputs]
    return [msgspec.json.decode(msgspec.json.encode(each), type=Receipt) for each in found]


@pytest.fixture(scope="module")
def engine(options: dict[str, object]) -> Engine:
    """Return another boot."""
    return Engine(boot_engine, Settings.load(options))


def test_another_boot_gives_every_answer_again(engine: Engine, receipts: list[Receipt]) -> None:
    assert len(receipts) == len(KINDS) + 1
    for receipt in receipts:
        assert len(receipt.contract.id) == len(receipt.chain) == 32 and receipt.contract.tokenizer
        replay.check_contract(receipt, engine)
        assert str(replay.replay(receipt, engine)) == f"equal: {len(receipt.tokens)} tokens, and the logits behind each"


def test_a_step_alone_has_the_logits_of_the_receipt(engine: Engine, receipts: list[Receipt]) -> None:
    import torch

    for receipt in receipts:
        step = replay.step_at(receipt, engine, len(receipt.tokens) - 1)
        assert step.equal and step.token == receipt.tokens[-1] and len(list(step.lines())) == 1 + replay.TOP
        assert row_digests(torch.tensor([step.logits])).tolist() == [step.expected]
    with pytest.raises(InvalidRequest, match="--at must be from 0 to 7, not 8"):
        replay.step_at(receipts[0], engine, 8)


def changed_token(receipt: Receipt) -> Receipt:
    tokens = [*receipt.tokens]
    tokens[3] ^= 1
    return replace(receipt, tokens=tokens)


def changed_digest(receipt: Receipt) -> Receipt:
    data = bytearray(msgspec.json.decode(f'"{receipt.digests}"', type=bytes))
    data[8 * 5] ^= 1
    return replace(receipt, digests=msgspec.json.encode(bytes(data)).decode().strip('"'))


CHANGES = {
    "token": (changed_token, "the token is", 3),
    "digest": (changed_digest, "the logits differ", 5),
    "prompt": (lambda r: replace(r, request=replace(r.request, prompt=[2, *r.request.prompt[1:]])), "the logits", 0),
    "seed": (lambda r: replace(r, request=replace(r.request, seed=r.request.seed ^ 1)), "the token is", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_receipt_is_found_at_its_first_position(engine: Engine, receipts: list[Receipt], change: str) -> None:
    alter, what, position = CHANGES[change]
    receipt = receipts[1]  # seeded
    found = replay.replay(alter(receipt), engine)
    assert not found.equal and what in found.what
    assert position is None or found.position == position


def test_receipts_of_a_log_run_together_and_a_failed_one_harms_no_other(
    engine: Engine, receipts: list[Receipt]
) -> None:
    unknown = replace(receipts[0], request=replace(receipts[0].request, lora_name="unknown"), adapter="none")
    elsewhere = replace(receipts[3], contract=replace(receipts[3].contract, weights="others"))
    asked = [receipts[0], changed_digest(receipts[1]), elsewhere, receipts[2], changed_token(receipts[3])]
    found = list(replay.replay_log(asked, engine))
    assert [each.position for each in found] == [None, 5, 0, None, 3]
    assert [each.position for each in replay.replay_log(asked[2:], engine, any_contract=True)] == [None, None, 3]
    again = list(replay.replay_log([*asked, unknown], engine))
    assert again[:-1] == found and "another contract" in found[2].what
    assert "the engine failed a request" in again[-1].what and engine.loop.idle


def test_a_changed_weight_is_found(options: dict[str, object], receipts: list[Receipt], tmp_path: Path) -> None:
    """One flipped bit of the weights: the contract names it, and the logits show it."""
    shutil.copytree(str(options["model"]), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    norm = json.loads(data[8:start])["model.norm.weight"]["data_offsets"]
    data[start + norm[0] + 1] ^= 1
    path.write_bytes(data)
    other = Engine(boot_engine, Settings.load({**options, "model": str(tmp_path)}))
    with pytest.raises(PreheatError, match=r"another contract than this engine, first in weights: \w{32} -> \w{32}"):
        replay.check_contract(receipts[0], other)
    assert replay.replay(receipts[0], other).position == 0


def test_the_command_reads_a_log_and_an_answer(
    options: dict[str, object], receipts: list[Receipt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not True]
    flags += ["--skip-warmup"]
    log, answer = tmp_path / "log.jsonl", tmp_path / "answer.json"
    log.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in receipts[:2]))
    answer.write_bytes(msgspec.json.encode({"choices": [{"receipt": receipts[0]}, {"receipt": None}]}))
    rotated = tmp_path / "rotated.jsonl"
    for path, receipt in zip((tmp_path / "rotated.jsonl.1", rotated), receipts, strict=False):
        path.write_bytes(msgspec.json.encode(receipt) + b"\n")
    for given in (["--receipt", str(log)], ["--receipts-log", str(rotated)]):
        assert main(["replay", *given, *flags]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0].split()[1:] for line in lines] == [
            [each.chain[:8], "equal"] for each in receipts[:2]
        ]
        assert last == "2 of 2 answers are equal"
    for missing, why in ((None, "give --receipt FILE, or --receipts-log FILE"), (str(answer) + "s", "has no file")):
        with pytest.raises(SettingsError, match=why):
            replay.read_log(missing)
    assert len(replay.read_receipts(str(answer))) == 1
    answer.write_bytes(msgspec.json.encode(changed_token(receipts[0])))
    with pytest.raises(SettingsError, match="its chain does not belong to its tokens and digests"):
        replay.read_receipts(str(answer))
    for change in ("prompt", "seed"):
        answer.write_bytes(msgspec.json.encode(CHANGES[change][0](receipts[2])))
        with pytest.raises(SettingsError, match="does not belong to its contract, request and adapter"):
            replay.read_receipts(str(answer))
    answer.write_bytes(msgspec.json.encode(replace(CHANGES["seed"][0](receipts[2]), asked="")))
    assert len(replay.read_receipts(str(answer))) == 1  # control: a receipt of an earlier version
    for text in ("", "[]", "{}", '{"digests": 3}', "\ud800".encode("utf-8", "surrogatepass")):
        answer.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(SettingsError):
            replay.read_receipts(str(answer))


def test_the_chain_covers_the_order() -> None:
    assert chain_of([], []) == "0" * 32
    assert len({chain_of([1, 2], [3, 4]), chain_of([2, 1], [3, 4]), chain_of([1, 2], [4, 3]), chain_of([1], [3])}) == 4


def test_every_answer_may_get_a_receipt_and_none_is_given_where_it_could_not_hold(
    options: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "receipts.jsonl"
    llm = LLM(**options, receipts=True, receipts_log=str(path))
    (output,) = llm.generate([{"prompt_token_ids": [1, 2]}], replace(PLAIN, receipt=False), use_tqdm=False)
    assert output.outputs[0].receipt is not None
    llm.frontend.receipts.log.close()
    (logged,) = replay.read_receipts(str(path))
    assert msgspec.json.encode(logged) == msgspec.json.encode(output.outputs[0].receipt)
    llm.frontend.receipts._lacking = "receipts and pooling do not work together"
    with pytest.raises(InvalidRequest, match="receipt: receipts and pooling"):
        llm.generate([{"prompt_token_ids": [1]}], PLAIN, use_tqdm=False)


def test_receipts_of_an_update_are_marked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract changes while a request runs: its receipt says so, and replaying it is refused."""
    (state,) = [llm.frontend.prepare([1, 2, 3], PLAIN)]
    llm.frontend.start([state])
    llm.loop.take(0)
    llm.loop.step()
    monkeypatch.setattr(llm.frontend.state, "contract", replace(llm.frontend.contract, weights="update 1"))
    while llm.frontend.busy:
        llm.loop.step()
        llm._receive()
    receipt = state.choices[0].receipt
    assert receipt.mixed
    with pytest.raises(PreheatError, match="the weights changed while the answer was given"):
        replay.check_contract(receipt, None)


def test_the_log_rotates_and_keeps_eight_files(tmp_path: Path) -> None:
    log = ReceiptLog(str(tmp_path / "r"), most_bytes=20)
    for number in range(40):
        log.write((b'{"n":%d}' % number).strip)
    log.close()
    names = [tmp_path / "r", *(tmp_path / f"r.{number}" for number in range(1, KEPT))]
    assert set(tmp_path.iterdir()) <= set(names) and (tmp_path / f"r.{KEPT - 1}").exists()
    found = [json.loads(line)["n"] for path in reversed(names) if path.exists() for line in path.read_text().split()]
    assert found == list(range(40))[-len(found):] and len(found) > 10  # fmt: skip
    with pytest.raises(SettingsError, match="receipts_log /proc/none/r cannot be written"):
        ReceiptLog("/proc/none/r")
    with pytest.raises(SettingsError, match=r"receipts_log would stay empty: .*embeddings"):
        boot_front(Settings(receipts_log=str(tmp_path / "r"), enable_prompt_embeds=True), lambda _: None)


def test_a_full_disk_is_counted_and_a_cut_line_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, write = ReceiptLog(str(tmp_path / "r")), os.write
    for number, left in enumerate((None, 3, None)):
        monkeypatch.setattr(os, "write", lambda to, data, left=left: write(to, data[:left]))
        log.write((b'{"n":%d}' % number).strip)
        while log.written + log.lost <= number:
            time.sleep(0.001)
    log.close()
    assert (log.written, log.lost) == (2, 1) and "the line is not whole" in caplog.text
    assert replay._parsed((tmp_path / "r").read_text()) == [{"n": 0}, {"n": 2}]
