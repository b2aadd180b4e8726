"""The loop that serves: watched, traced, audited, and sharing blocks with other engines."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial

from preheat.boot.values import Given, Loaded, Parts, Planned
from preheat.configs.kv_events import kv_events_config
from preheat.configs.kv_transfer import kv_transfer
from preheat.core import BlockSource
from preheat.elastic import Elastic, cache_contents
from preheat.engine.audit import Audit
from preheat.engine.kv_publisher import KvPublisher
from preheat.engine.listeners import STEP_EVENTS, with_step_log
from preheat.engine.loop import Loop
from preheat.execution.memory_audit import AuditedMemory, Named, weights_of
from preheat.execution.whole_blocks import WholeBlocks
from preheat.kv_transfer.messages import Hello
from preheat.kv_transfer.pulls import Pulls
from preheat.kv_transfer.sends import Sends
from preheat.kv_transfer.server import BlockServer
from preheat.model.families import read_spec
from preheat.model.files import find_model, read_config
from preheat.model.update import tensors_of
from preheat.schedule.kv_events import KvEvents
from preheat.settings import Settings
from preheat.utils.contract import Contract
from preheat.verify.again import checks_again
from preheat.verify.boot import BootCheck
from preheat.warmup.cold_monitor import ColdMonitor
from preheat.warmup.cold_sources import ColdSources


def serving_loop(given: Given, loaded: Loaded, planned: Planned, parts: Parts, contract: Contract) -> Loop:
    """Return the loop that serves: its steps are watched, traced and logged, and an operator has commands."""
    device, share, _, transport, trace, _ = given
    settings, backend, mode = device
    plan, record, _ = planned
    scheduler, executor, drafter = parts.scheduler, parts.executor, parts.drafter
    sources, drafted = ColdSources(backend, share.cold_sources(executor)), drafter.take_steps if drafter else None
    monitor = ColdMonitor(record, plan, settings.on_cold, sources, drafted)
    check = partial(parts.check, device, record)
    scheduler.rekey(cache_contents(loaded.model, contract.id))
    operator = Elastic(
        settings, backend, loaded.model, scheduler=scheduler,
        contents=share.contents(settings, backend, loaded.model, executor),
        transfers=share.transfers(settings, backend, loaded.model), check=check, monitor=monitor, contract=contract,
    )  # fmt: skip
    listener, call = with_step_log(settings, mode, backend, monitor), trace.calls(STEP_EVENTS)
    loop = parts.loop(transport, device, listener=listener, call=call, operator=operator)
    _publish_events(settings, loop)
    _share_blocks(given, parts, loop, lambda: operator.state.contract or contract)
    if settings.audit_every is not None:
        with given.steps("Taking digests of the memory", detail=True):
            operator.audit = loop.audit = _audit(settings, loaded, parts, monitor, check)
    return loop


def _audit(
    settings: Settings, loaded: Loaded, parts: Parts, monitor: ColdMonitor, check: Callable[[], BootCheck]
) -> Audit:
    """Return the audit of everything that the engine holds now."""
    model, adapters, pool = loaded.model, loaded.model.adapters, parts.scheduler.pool

    def fixed() -> Iterator[Named]:
        yield from weights_of(model)
        yield from (("a table of positions", table) for table in parts.executor.decoder.tables())
        if loaded.draft is not None:
            yield from (("the draft model", tensor) for tensor in tensors_of(loaded.draft.weights))

    memory = AuditedMemory(fixed, adapters.tensors if adapters else tuple, parts.executor.cache, pool)
    rows = checks_again(check, monitor, parts.scheduler, memory.adapters_changed)
    return Audit(memory, settings.audit_every or 0.0, rows)


def _publish_events(settings: Settings, loop: Loop) -> None:
    """Publish events of the prefix cache from now on, if the settings enable them."""
    if (events := kv_events_config(settings.kv_events_config)).publishes:
        loop.kv_publisher = KvPublisher(events)
        loop.scheduler.pool.events = KvEvents(loop.kv_publisher.publish)


def address_of(settings: Settings, loop: Loop) -> BlockSource | None:
    """Return where other engines get blocks, None if this one sends none."""
    transfer, server = kv_transfer(settings), loop.block_server
    if transfer is None or server is None:
        return None
    return BlockSource(transfer.host, server.port, 0, transfer.engine_id or uuid.uuid4().hex)


def _share_blocks(given: Given, parts: Parts, loop: Loop, contract: Callable[[], Contract]) -> None:
    """Let other engines take blocks, and requests pull them, as far as the engine's role goes."""
    settings, backend = given.device.settings, given.device.backend
    transfer, scheduler, tier = kv_transfer(settings), parts.scheduler, parts.offload
    if transfer is None or tier is None:
        return
    spec = read_spec(read_config(find_model(settings), settings.hf_overrides))
    blocks = WholeBlocks(backend, parts.executor.cache, tier, scheduler.pool, spec.num_kv_heads)

    def hello() -> Hello:
        return Hello(contract(), scheduler.prefix.contents, blocks.layout)

    if transfer.sends:
        loop.sends = Sends(blocks, hello, given.transport.waker())
        loop.block_server = BlockServer(loop.sends, transfer.host, transfer.port, transfer.key)
    if transfer.pulls:
        loop.admission.pulls = Pulls(blocks, scheduler.prefix, hello, key=transfer.key, seconds=transfer.seconds)
