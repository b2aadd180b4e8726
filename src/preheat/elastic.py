"""Changes in a running engine: new weights, in place, and the release of memory.

A change ends with the check of a boot: the digest of the logits. With new weights it equals the digest of a fresh boot
with them; after a sleep it equals the digest before.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from preheat.backends.base.backend import Backend
from preheat.backends.base.device import SleepMemory
from preheat.backends.names import HOST
from preheat.core import Command, EngineState
from preheat.engine.audit import Audit
from preheat.errors import CheckFailed, EngineDead, InvalidRequest, NotInvariant, PreheatError, SettingsError
from preheat.execution.executor import Executor
from preheat.execution.kv_cache import BlockCache
from preheat.execution.sleep import CACHE, WEIGHTS
from preheat.execution.weight_transfer import Transfers
from preheat.model.loader import LoadedModel
from preheat.model.residence import Dropped
from preheat.model.sources import GivenTensors, SafetensorsFiles, StoredTensors
from preheat.model.update import Update, reset_state, tensors_of
from preheat.schedule.scheduler import Scheduler
from preheat.settings import Settings
from preheat.settings.combinations import check, traits_of
from preheat.utils.contract import Contract
from preheat.verify.boot import BootCheck
from preheat.warmup.cold_monitor import ColdMonitor

logger = logging.getLogger(__name__)

LEVELS: dict[int, dict[str, bool]] = {0: {}, 1: {CACHE: False, WEIGHTS: True}, 2: {CACHE: False, WEIGHTS: False}}
"""The memory that a sleep releases, by level.

True keeps its contents on the host.

Where the device's memory is the host's, kept contents stay in place.
"""


class Freed:
    """Released memory of ``tag``, at addresses that stay reserved; see :class:`Dropped`."""

    def __init__(self, memory: SleepMemory, tag: str, *, keep: bool) -> None:
        self._memory, self._tag = memory, tag
        memory.sleep(tag, keep=keep)

    def restore(self) -> None:
        """Take memory again. Raises PreheatError if the device has not enough."""
        try:
            self._memory.wake(self._tag)
        except RuntimeError as error:
            raise PreheatError(f"there is no memory for {self._tag}: free some on the device and wake again") from error


def cache_contents(model: LoadedModel, version: str = "") -> str:
    """Return the key of cache contents beyond the hashed tokens.

    It holds the numerics, and the version of changed weights.
    """
    return (json.dumps(model.numerics) if model.numerics else "") + version


class Elastic:
    """The :class:`preheat.engine.control.Operator` of an engine. ``check`` makes a fresh boot check."""

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        model: LoadedModel,
        *,
        scheduler: Scheduler,
        executor: Executor,
        check: Callable[[], BootCheck],
        monitor: ColdMonitor,
        contract: Contract,
    ) -> None:
        self._settings, self._backend, self._model = settings, backend, model
        self._scheduler, self._executor, self._check, self._monitor = scheduler, executor, check, monitor
        self._changes = 0  # of the possible contents of the cache
        self._dropped: dict[str, Dropped | Freed] = {}
        self._lacking = False  # whether weights are missing since they were dropped
        self._digest: str | None = None  # the expected digest of the next check
        self._transfers = Transfers(settings, backend, model)
        self.audit: Audit | None = None
        self.state = EngineState(digest=monitor.record.proof.digest, contract=contract)

    def beside(self, command: Command) -> Callable[[], None] | None:
        """See :class:`preheat.engine.control.Operator`."""
        if command.group is not None:
            self._check_supported()
            return self._transfers.joining(command.group)
        if command.announced:
            self._check_supported()
            return self._transfers.receiving(command.announced)
        return None

    def gather(self) -> None:
        self._transfers.gather()

    def finish(self, command: Command) -> None:
        self._replace(command, self._transfers.gathered())

    def update(self, command: Command) -> None:
        """Update the weights. Raises ModelError or InvalidRequest, and the old weights stay."""
        if not command.announced:
            self._transfers.check_not_gathering()
            self._replace(command, command.tensors)
        elif (received := self._transfers.received()) is not None:
            self._replace(command, received)

    @torch.no_grad()  # not inference mode: its tensors would differ for programs that read them
    def _replace(self, command: Command, tensors: Mapping[str, torch.Tensor] | None) -> None:
        """Replace the weights by ``tensors``, or by the files of the command."""
        self._check_supported()
        slept = self._dropped.pop(WEIGHTS, None)
        if slept is not None:
            slept.restore()
        if self._lacking:
            reset_state(self._model.weights)
        try:
            self._load(command, tensors)
        except BaseException:
            if slept is not None:
                self._drop(WEIGHTS, keep=not self._lacking)
            raise
        finally:
            self._monitor.forget()
            if self.audit is not None and not self._dropped:
                self.audit.retake()
        self._lacking, self._digest = False, None
        self.state.weight_version = command.version or str(self._changes)
        self.state.blocked_reason = ""
        logger.info("The weights now have version %s, digest %s", self.state.weight_version, self.state.digest)

    def _load(self, command: Command, tensors: Mapping[str, torch.Tensor] | None) -> None:
        with self._backend.uploading() as copy:
            on_host = self._settings.weights_load_device == HOST and copy
            source = self._source(command, tensors, copy, bool(on_host))
            update = Update(self._model, source, self._backend, on_host=on_host, whole=self._lacking)
        update.swap()
        before, self.state.contract = self.state.contract, self._updated()
        self._forget()
        if self._dropped:
            self.state.digest = ""  # computed when the cache is there again
            return
        try:
            self._compute_digest()
        except EngineDead:
            raise
        except Exception as error:
            update.swap()
            self.state.contract = before
            self._forget()
            self._compute_digest()
            if isinstance(error, CheckFailed):
                raise InvalidRequest(f"the old weights stay, as the new ones fail the check: {error}") from None
            raise

    def _updated(self) -> Contract:
        """Return the contract of new weights. Their digest is not computed, so they equal no other weights."""
        assert self.state.contract is not None, "an engine has a contract from its boot on"
        return msgspec.structs.replace(self.state.contract, weights=f"update {uuid.uuid4().hex}")

    def _source(
        self, command: Command, tensors: Mapping[str, torch.Tensor] | None, copy: Callable[..., None], on_host: bool
    ) -> StoredTensors:
        read, renames = _plain_copy if on_host else copy, self._model.spec.renames
        if tensors is not None:
            return StoredTensors("the tensors", [GivenTensors(tensors)], read, renames)
        folder, folders = Path(command.path), self._model.spec.folders
        return SafetensorsFiles(folder, read, renames, below=command.root or None, folders=folders)

    def check_sleep(self, level: int) -> None:
        """Raise InvalidRequest, with advice, if the engine cannot sleep at this level."""
        if not self._settings.enable_sleep_mode:
            raise InvalidRequest("sleep needs an engine that was started with --enable-sleep-mode")
        if level not in LEVELS:
            raise InvalidRequest(f"level must be 0, 1 or 2, not {level}", param="level")
        if not LEVELS[level].get(WEIGHTS, True):
            self._check_supported()  # nothing else brings weights back

    def sleep(self, level: int) -> None:
        """Release memory. Running sequences keep their tokens; the rest is computed again after the sleep."""
        if level:
            if self.audit is not None:
                self.audit.suspend()
            self._forget()
            self._digest = self.state.digest or None  # a boot without warm-up has none
        for tag, keep in LEVELS[level].items():
            self._drop(tag, keep=keep)
        logger.info("Asleep at level %d: the process holds %.2f GiB", level, self._backend.used_memory() / 2**30)

    @torch.no_grad()
    def wake(self, tags: list[str]) -> bool:
        """Take memory again. Raises NotInvariant if the digest has changed, and the engine then takes no requests."""
        if unknown := set(tags) - {WEIGHTS, CACHE}:
            raise InvalidRequest(f"tags are {WEIGHTS} and {CACHE}, not {min(unknown)!r}", param="tags")
        wanted = tags or [WEIGHTS, CACHE]
        if self._lacking and CACHE in wanted:
            raise InvalidRequest("sleep level 2 has dropped the weights: send all of them with /update_weights first")
        for tag in wanted:
            if tag in self._dropped:
                self._dropped[tag].restore()  # may find no memory: then the tag still sleeps
                del self._dropped[tag]
                if tag == CACHE:
                    self._clear_cache()
        if self._dropped or self._lacking:
            return False
        if self._digest is not None or not self.state.digest:
            self._prove()
        if self.audit is not None:
            self.audit.retake()
        return True

    def _drop(self, tag: str, *, keep: bool) -> None:
        self._lacking |= tag == WEIGHTS and not keep
        if (memory := self._backend.sleep_memory()) is not None:
            self._dropped[tag] = Freed(memory, tag, keep=keep)
        elif keep:
            return
        elif tag == WEIGHTS:
            self._dropped[tag] = Dropped(tensors_of(self._model.weights))
        else:
            self._dropped[tag] = Dropped(cache.data for cache in self._caches)

    def _clear_cache(self) -> None:
        for cache in self._caches:
            cache.data.view(torch.uint8).zero_()

    def _prove(self) -> None:
        """Check that the digest equals the one before the sleep.

        After new weights there is nothing to compare.
        """
        expected, self._digest = self._digest, None
        self.state.sleeping = None
        try:
            self._compute_digest()
            if expected is not None and expected != self.state.digest:
                raise NotInvariant(f"the digest was {expected} before the sleep and is {self.state.digest} now")
        except (CheckFailed, NotInvariant) as error:
            self.state.blocked_reason = f"No requests are taken since the engine was woken up: {error.message}"
            logger.error("%s", self.state.blocked_reason)
            raise
        finally:
            self._monitor.forget()

    def _forget(self) -> None:
        """Invalidate the contents of the cache."""
        self._changes += 1
        assert self.state.contract is not None, "an engine has a contract from its boot on"
        self._scheduler.rekey(cache_contents(self._model, f"change {self._changes} of {self.state.contract.id}"))

    def _compute_digest(self) -> None:
        if self._settings.boot_check == "off":
            return
        check = self._check()
        check.begin()
        check.run("finite")
        self._scheduler.forget_inputs()
        self.state.digest = self._monitor.record.proof.digest

    @property
    def _caches(self) -> list[BlockCache]:
        return [self._executor.cache, *self._executor.other_caches]

    def _check_supported(self) -> None:
        """Raise InvalidRequest, with advice, if weights cannot be updated."""
        facts, on = self._backend.facts, traits_of(self._settings) | {"updates"}
        try:
            check(on, {f"on {facts.name}": facts.lacks})
        except SettingsError as error:
            raise InvalidRequest(error.message) from None


def _plain_copy(source: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(source)
