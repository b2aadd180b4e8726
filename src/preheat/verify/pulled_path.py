"""The path of ``preheat verify`` with blocks that come from another engine.

An engine with the role ``both`` reads prompts, and its blocks are copied as it sends them. A peer with the copies then
listens on this machine, the engine forgets all blocks, and its requests pull them by TCP. One engine stands for two, as
two may not fit into memory: another boot has equal hashes and bits, or is refused by its contract.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as changed

from preheat.core import BlockSource, SamplingParams
from preheat.kv_transfer.sends import Sends, Staged
from preheat.kv_transfer.server import BlockServer
from preheat.schedule.sequence import Sequence as Known
from preheat.verify.compare import Divergence, PathResult, compare
from preheat.verify.drive import Engine
from preheat.verify.prompt_sets import alone, prompt_of, random_tokens
from preheat.verify.prompts import Prompt

BLOCKS = 3
"""Full blocks of a prompt."""

KINDS = (
    (SamplingParams(temperature=0.0), ""),
    (SamplingParams(temperature=1.0, presence_penalty=1.0), ""),
    (SamplingParams(temperature=1.0, top_k=40), "apart"),
)
"""Parameters and salt of each prompt."""

HOST = "127.0.0.1"
_LOOK_SECONDS = 0.01


@dataclass
class Copies:
    """Copied blocks by their hashes, see :class:`preheat.kv_transfer.sends.Departures`."""

    blocks: dict[bytes, bytes]

    def stage(self, block_hash: bytes) -> Staged | None:
        """Return a copied block, None if there is none."""
        data = self.blocks.get(block_hash)
        return None if data is None else Staged(block_hash, 0, memoryview(data), lambda: None)

    def release(self, place: int) -> None:
        """Do nothing: a copy stays."""


def exchanges(engine: Engine) -> bool:
    """Return whether the engine sends blocks and pulls them."""
    return engine.loop.sends is not None and engine.loop.admission.pulls is not None


def pulled(path: str, engine: Engine, outputs: int) -> PathResult | None:
    """Pull the blocks of prompts from a peer, and compare the answers with those of an engine that computes them.

    Every full block of a prompt has to arrive. Returns None where no prompt has a full block.
    """
    size = engine.ready.block_size
    texts = random_tokens(engine, len(KINDS), BLOCKS * size + 5, outputs)
    prompts = [prompt_of(each, params, outputs, salt) for each, (params, salt) in zip(texts, KINDS, strict=True)]
    wanted = (len(prompts[0].tokens) - 1) // size
    if not wanted:
        return None
    engine.forget_prefixes()
    hashes = [_hashes(engine, prompt) for prompt in prompts]
    first = alone(engine, prompts)
    copies = _copied(engine, [each for some in hashes for each in some])
    engine.forget_prefixes()
    with serving(engine, copies) as port:
        again = alone(engine, [changed(each, source=BlockSource(HOST, port, len(each.tokens))) for each in prompts])
    cached = [answer.cached for answer in engine.answers]
    wrong = [
        Divergence(1, number, 0, float(wanted * size - found))
        for number, found in enumerate(cached)
        if found != wanted * size
    ]
    note = f"{sum(cached) // size} of {wanted * len(prompts)} blocks from a peer"
    return compare(path, first, [again], note).with_wrong(wrong)


def _hashes(engine: Engine, prompt: Prompt) -> list[bytes]:
    """Return the hashes of the prompt's full blocks, none of which the engine has."""
    prefix = engine.loop.scheduler.prefix
    return prefix.lacking(Known(prompt.request(0)), len(prompt.tokens) // engine.ready.block_size)


def _copied(engine: Engine, hashes: Sequence[bytes]) -> Copies:
    """Return copies of the engine's blocks, as it sends them."""
    assert engine.loop.sends is not None, "the engine sends blocks"
    departures, found = engine.loop.sends.departures, dict[bytes, bytes]()
    for block_hash in hashes:
        if (staged := departures.stage(block_hash)) is not None:
            staged.wait()
            found[block_hash] = bytes(staged.view)
            departures.release(staged.place)
    return Copies(found)


@contextmanager
def serving(engine: Engine, copies: Copies) -> Iterator[int]:
    """Serve ``copies`` to peers with the engine's contract and key; yield the port."""
    loop, over, woken = engine.loop, threading.Event(), threading.Event()
    assert loop.sends is not None and loop.admission.pulls is not None, "the engine exchanges blocks"
    sends = Sends(copies, loop.sends.hello, woken.set)
    server = BlockServer(sends, HOST, 0, loop.admission.pulls.key)

    def run() -> None:
        while not over.is_set():
            woken.wait(_LOOK_SECONDS)
            woken.clear()
            sends.turn(available=True)

    thread = threading.Thread(target=run, name="copied-blocks")
    thread.start()
    try:
        yield server.port
    finally:
        over.set()
        thread.join()
        server.close()
