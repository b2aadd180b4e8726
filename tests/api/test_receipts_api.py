"""Receipts over HTTP: in whole answers, at the end of streams, and nowhere else."""

from __future__ import annotations

import json

import msgspec

from preheat.frontend.receipt import Receipt, chain_of
from tests.api.conftest import Server

ASKED = {"temperature": 1, "seed": 5, "max_tokens": 6, "ignore_eos": True, "receipt": True}


def checked(receipt: object, tokens: int) -> Receipt:
    found = msgspec.convert(receipt, Receipt, str_keys=True)
    assert len(found.tokens) == len(found.bits) == tokens and chain_of(found.tokens, found.bits) == found.chain
    assert found.request.seed == 5 and found.request.id == 0 and not found.mixed
    return found


def test_whole_answers_and_streams_have_one_receipt(server: Server) -> None:
    said = server.post("/v1/completions", {"prompt": "Once", "n": 2, **ASKED}).json
    first, second = (checked(choice["receipt"], 6) for choice in said["choices"])
    assert first.chain != second.chain and (first.request.choice, second.request.choice) == (0, 1)
    assert first.contract.id == server.get("/ready").json["contract_id"]
    lines = server.post("/v1/completions", {"prompt": "Once", "stream": True, **ASKED}).body.decode().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    found = [choice["receipt"] for event in events for choice in event["choices"] if "receipt" in choice]
    assert len(found) == 1 and checked(found[0], 6).chain == first.chain


def test_chats_have_receipts_too_and_others_have_none(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    (choice,) = server.post("/v1/chat/completions", {**chat, **ASKED}).json["choices"]
    whole = checked(choice["receipt"], 6)
    text = server.post("/v1/chat/completions", {**chat, **ASKED, "stream": True}).body.decode()
    assert text.count('"receipt":{') == 1 and whole.chain in text
    assert "receipt" not in server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2}).json["choices"][0]


def test_a_beam_search_refuses_a_receipt(server: Server) -> None:
    asked = {"prompt": "Once", "use_beam_search": True, "n": 2, "max_tokens": 2, "receipt": True}
    answer = server.post("/v1/completions", asked)
    assert answer.status == 400 and answer.json["error"]["param"] == "receipt"
