"""An engine without a model, with every token of its answers told by hand.

It speaks the transport's protocol. It loads adapters from folders that exist, and unloads them after their last
request. With an adapter it repeats the prompt backwards.

Token k of a sequence is ``prompt[(k + 1) % len(prompt)]``: it repeats its prompt, from the second token on. A prompt
whose first token is HANG makes the step that starts it last for ever; a prompt with FAIL fails its request. Its record
describes a small plan. Every step counts as a hit of the first item, every failing request as a cold event.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from preheat.core import (
    AdapterReport,
    Ask,
    Cancel,
    Delta,
    Died,
    Drain,
    Finish,
    LoadAdapter,
    Progress,
    Ready,
    Report,
    Request,
    Stats,
    TokenLogprobs,
    UnloadAdapter,
)
from preheat.errors import AdapterError, MemoryFault, PreheatError, WireError
from preheat.frontend.receipt import packed
from preheat.settings import Settings
from preheat.transport import EngineTransport
from tests import records

HANG, FAIL, DIE, FLIP = 3, 4, 9, 8
MAX_MODEL_LEN, BLOCKS = 4096, 1000
STEP_SECONDS, STOPPED_AFTER = 0.002, 100


@dataclass
class Sequence:
    request: Request
    output: list[int] = field(default_factory=list)

    def next(self) -> int:
        prompt = self.request.prompt[:: -1 if self.request.lora_name else 1]
        return prompt[(len(self.output) + 1) % len(prompt)]


def logprobs_of(token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, ((token, -0.5), (token + 1, -1.5), (token + 2, float("-inf")))[:count])


class ScriptedEngine:
    def __init__(
        self, transport: EngineTransport, step_seconds: float = STEP_SECONDS, max_model_len: int = MAX_MODEL_LEN
    ) -> None:
        self.transport, self.step_seconds, self.max_model_len = transport, step_seconds, max_model_len
        self.running: dict[int, Sequence] = {}
        self.new: list[Request] = []
        self.unloading: list[UnloadAdapter] = []
        self.draining = False
        self.record = records.warmed(records.make(max_num_seqs=8), hits=False)
        self.record.proof.digest = "d16e57"
        self.digest = ""

    def run(self) -> None:
        self.transport.put(Ready(self.max_model_len, BLOCKS, 64, 0.0, self.record.to_json(), digest=self.digest))
        self.transport.start_heartbeat()
        while not (self.draining and not self.running):
            self.take(0 if self.running else None)
            if self.running:
                self.transport.put(self.step())
            self.unload()

    def take(self, timeout: float | None) -> None:
        for message in self.transport.take(timeout):
            match message:
                case Request():
                    self.running[message.id] = Sequence(message, [*message.delivered])
                    self.new.append(message)
                case Cancel():
                    self.running.pop(message.id, None)
                    if not self.running:
                        self.transport.put(Delta(stats=self.stats()))
                case Ask():
                    self.transport.put(Report(self.record.to_json()))
                case LoadAdapter():
                    missing = AdapterError(f"{message.path} holds no adapter", param="lora_path")
                    error = None if os.path.isdir(message.path) else WireError.of(missing)
                    self.transport.put(AdapterReport(message.name, message.id, error))
                case UnloadAdapter():
                    self.unloading.append(message)
                case Drain():
                    self.draining = True
                    if message.now:
                        self.running.clear()

    def unload(self) -> None:
        """Unload each adapter that waits for its last request, once that request has ended."""
        used = {sequence.request.lora_name for sequence in self.running.values()}
        for message in [message for message in self.unloading if message.name not in used]:
            self.unloading.remove(message)
            self.transport.put(AdapterReport(message.name, message.id))

    def stats(self) -> Stats:
        return Stats(blocks_used=len(self.running), blocks_total=BLOCKS)

    def step(self) -> Delta:
        time.sleep(self.step_seconds)
        self.record.entries[0].hits += 1
        delta = Delta()
        for request in self.new:
            delta.started[request.id] = 0
            if request.prompt[0] == HANG:
                time.sleep(3600)
            count = request.params.prompt_logprobs
            if count is not None:
                delta.prompt_logprobs[request.id] = [None, *(logprobs_of(t, count) for t in request.prompt[1:])]
        self.new.clear()
        for id, sequence in list(self.running.items()):
            self.advance(id, sequence, delta)
        delta.stats = self.stats()
        return delta

    def advance(self, id: int, sequence: Sequence, delta: Delta) -> None:
        request = sequence.request
        if request.prompt[0] == FAIL:
            self.record.cold["script"] = self.record.cold.get("script", 0) + 1
            delta.finished[id] = Finish("error", error=WireError.of(PreheatError("the step failed")))
            del self.running[id]
            return
        token = sequence.next()
        sequence.output.append(token)
        delta.ids.append(id)
        delta.tokens.append(token)
        if request.params.logprobs is not None:
            delta.logprobs[len(delta.ids) - 1] = logprobs_of(token, request.params.logprobs)
        delta.digests += packed([token])
        if token in request.stop_ids and len(sequence.output) > request.params.min_tokens:
            delta.finished[id] = Finish("stop", stop_id=token)
        elif len(sequence.output) >= request.max_tokens:
            delta.finished[id] = Finish("length")
        if id in delta.finished:
            del self.running[id]


def run_engine(settings: Settings, address: str) -> None:
    transport = EngineTransport(address)
    ScriptedEngine(transport).run()
    transport.close()


def run_paced_engine(settings: Settings, address: str) -> None:
    """Run slowly enough for a server to send each token in a write of its own."""
    transport = EngineTransport(address)
    ScriptedEngine(transport, step_seconds=0.03).run()
    transport.close()


def run_late_engine(settings: Settings, address: str) -> None:
    """Take some time to become ready."""
    transport = EngineTransport(address)
    time.sleep(1.5)
    ScriptedEngine(transport).run()
    transport.close()


def run_waiting_engine(settings: Settings, address: str) -> None:
    """Stay in the middle of the warm-up until the model's folder has a file named go."""
    transport = EngineTransport(address)
    transport.put(Progress(0, 40, "(mixed, 64, 8)"))
    transport.put(Progress(12, 40, "(decode, 8)", 2.5))
    while not Path(settings.model, "go").exists():
        time.sleep(0.02)
    ScriptedEngine(transport).run()
    transport.close()


def run_short_engine(settings: Settings, address: str) -> None:
    """Give only short answers."""
    transport = EngineTransport(address)
    ScriptedEngine(transport, step_seconds=0, max_model_len=48).run()
    transport.close()


def run_unproved_engine(settings: Settings, address: str) -> None:
    """Report a failed check at boot."""
    transport = EngineTransport(address)
    engine = ScriptedEngine(transport)
    engine.record.entries[0].outcome = "failed"
    transport.put(Ready(MAX_MODEL_LEN, BLOCKS, 64, 0.0, engine.record.to_json(), "chunked: other bits"))
    while not engine.draining:
        engine.take(None)
    transport.close()


def run_changing_engine(settings: Settings, address: str) -> None:
    """End a sequence with another token when at least two other sequences run."""
    transport = EngineTransport(address)
    ChangingEngine(transport, step_seconds=0.02).run()  # requests that come one by one run together
    transport.close()


class ChangingEngine(ScriptedEngine):
    def advance(self, id: int, sequence: Sequence, delta: Delta) -> None:
        super().advance(id, sequence, delta)
        if len(self.running) > 2 and len(sequence.output) == sequence.request.max_tokens - 1:
            delta.tokens[-1] = sequence.output[-1] = 5 + delta.tokens[-1] % 7


def run_mortal_engine(settings: Settings, address: str) -> None:
    """Die of a prompt that begins with DIE, and find a fault of the memory at one that begins with FLIP.

    In a folder with a file named changed, compute other bits.
    """
    transport = EngineTransport(address)
    MortalEngine(transport, step_seconds=0.01, changed=Path(settings.model, "changed").exists()).run()
    transport.close()


class MortalEngine(ScriptedEngine):
    def __init__(self, transport: EngineTransport, *, step_seconds: float, changed: bool) -> None:
        super().__init__(transport, step_seconds)
        self.digest = "changed" if changed else "d16e57"

    def advance(self, id: int, sequence: Sequence, delta: Delta) -> None:
        if sequence.request.prompt[0] == DIE:
            os._exit(3)
        if sequence.request.prompt[0] == FLIP:
            self.transport.put(Died(WireError.of(MemoryFault.at("a weight"))))
            self.transport.close()
            os._exit(3)
        super().advance(id, sequence, delta)


def run_stopping_engine(settings: Settings, address: str) -> None:
    """Answer STOPPED_AFTER requests, and then give no token to any other."""
    transport = EngineTransport(address)
    StoppingEngine(transport).run()
    transport.close()


class StoppingEngine(ScriptedEngine):
    answered = 0

    def advance(self, id: int, sequence: Sequence, delta: Delta) -> None:
        if self.answered < STOPPED_AFTER:
            super().advance(id, sequence, delta)
            self.answered += id in delta.finished


def run_roomy_engine(settings: Settings, address: str) -> None:
    """Take prompts of up to a million tokens."""
    transport = EngineTransport(address)
    ScriptedEngine(transport, max_model_len=2**20).run()
    transport.close()
