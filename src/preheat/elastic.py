"""Changes in a running engine: new weights, in place, and the release of memory.

A change ends with the check of a boot: the digest of the logits. With new weights it equals the digest of a fresh boot
with them; after a sleep it equals the digest before.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping

import msgspec
import torch

from preheat.backends.base.backend import Backend
from preheat.core import Command, EngineState
from preheat.engine.audit import Audit
from preheat.errors import CheckFailed, EngineDead, InvalidRequest, NotInvariant, SettingsError
from preheat.execution.contents import NewWeights
from preheat.execution.sleep import CACHE, WEIGHTS
from preheat.execution.weight_transfer import Transfers
from preheat.model.loader import LoadedModel
from preheat.parallel.share import AllContents
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


def cache_contents(model: LoadedModel, version: str = "") -> str:
    """Return the key of cache contents beyond the hashed tokens.

    It holds the numerics, and the version of changed weights.
    """
    return (json.dumps(model.numerics) if model.numerics else "") + version


class Elastic:
    """The :class:`preheat.engine.control.Operator` of an engine.

    ``contents`` are the weights and caches of all ranks, ``transfers`` bring a trainer's tensors to them. ``check``
    makes a fresh boot check.
    """

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        model: LoadedModel,
        *,
        scheduler: Scheduler,
        contents: AllContents,
        transfers: Transfers,
        check: Callable[[], BootCheck],
        monitor: ColdMonitor,
        contract: Contract,
    ) -> None:
        self._settings, self._backend, self._model = settings, backend, model
        self._scheduler, self._contents, self._check, self._monitor = scheduler, contents, check, monitor
        self._changes = 0  # of the possible contents of the cache
        self._lacking = False  # whether weights are missing since they were dropped
        self._digest: str | None = None  # the expected digest of the next check
        self._transfers = transfers
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
        self._replace(command, self._transfers.gathered(), held=True)

    def update(self, command: Command) -> None:
        """Update the weights. Raises ModelError or InvalidRequest, and the old weights stay."""
        if not command.announced:
            self._transfers.check_not_gathering()
            self._replace(command, command.tensors)
        elif (received := self._transfers.received()) is not None:
            self._replace(command, received, held=True)

    def _replace(
        self, command: Command, tensors: Mapping[str, torch.Tensor] | None, *, held: bool = False
    ) -> None:  # fmt: skip
        """Replace the weights by ``tensors``, or by the files of the command; see :class:`NewWeights`."""
        self._check_supported()
        slept = WEIGHTS in self._contents.asleep
        self._contents.restore(WEIGHTS)
        if self._lacking:
            self._contents.reset()
        try:
            self._load(NewWeights(command.path, command.root, tensors, self._lacking, held))
        except BaseException:
            if slept:
                self._contents.drop(WEIGHTS, not self._lacking)
            raise
        finally:
            self._monitor.forget()
            if self.audit is not None and not self._contents.asleep:
                self.audit.retake()
        self._lacking, self._digest = False, None
        self.state.weight_version = command.version or str(self._changes)
        self.state.blocked_reason = ""
        logger.info("The weights now have version %s, digest %s", self.state.weight_version, self.state.digest)

    def _load(self, new: NewWeights) -> None:
        try:
            self._contents.load(new)
            self._swap()
        finally:
            self._contents.release()

    def _swap(self) -> None:
        """Swap the loaded weights and the old ones; swap them back if the check of a boot fails."""
        self._contents.swap()
        before, self.state.contract = self.state.contract, self._updated()
        self._forget()
        if self._contents.asleep:
            self.state.digest = ""  # computed when the cache is there again
            return
        try:
            self._compute_digest()
        except EngineDead:
            raise
        except Exception as error:
            self._contents.swap()
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
            self._lacking |= tag == WEIGHTS and not keep
            self._contents.drop(tag, keep)
        logger.info("Asleep at level %d: the process holds %.2f GiB", level, self._backend.used_memory() / 2**30)

    def wake(self, tags: list[str]) -> bool:
        """Take memory again. Raises NotInvariant if the digest has changed, and the engine then takes no requests."""
        if unknown := set(tags) - {WEIGHTS, CACHE}:
            raise InvalidRequest(f"tags are {WEIGHTS} and {CACHE}, not {min(unknown)!r}", param="tags")
        wanted = tags or [WEIGHTS, CACHE]
        if self._lacking and CACHE in wanted:
            raise InvalidRequest("sleep level 2 has dropped the weights: send all of them with /update_weights first")
        for tag in wanted:
            self._contents.restore(tag)  # may find no memory: then the tag still sleeps
        if self._contents.asleep or self._lacking:
            return False
        if self._digest is not None or not self.state.digest:
            self._prove()
        if self.audit is not None:
            self.audit.retake()
        return True

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

    def _check_supported(self) -> None:
        """Raise InvalidRequest, with advice, if weights cannot be updated."""
        facts, on = self._backend.facts, traits_of(self._settings) | {"updates"}
        try:
            check(on, {f"on {facts.name}": facts.lacks})
        except SettingsError as error:
            raise InvalidRequest(error.message) from None
