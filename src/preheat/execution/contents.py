"""The weights and caches of one rank, as sleeps and updates of weights change them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.collective import Collective
from preheat.backends.base.device import SleepMemory
from preheat.backends.names import HOST
from preheat.errors import PreheatError
from preheat.execution.executor import Executor
from preheat.execution.kv_cache import BlockCache
from preheat.execution.sleep import CACHE, WEIGHTS
from preheat.model.loader import LoadedModel, plain_copy
from preheat.model.residence import Dropped
from preheat.model.sources import GivenTensors, SafetensorsFiles, StoredTensors
from preheat.model.update import Update, reset_state, tensors_of
from preheat.settings import Settings


class NewWeights(NamedTuple):
    """Where new weights are: in ``tensors`` by name, or else in the files of the folder ``path``.

    All files are below the folder ``root``, if one is given. ``whole``: the old weights are gone, so none may be
    missing. ``held``: every rank has the tensors, from a trainer.
    """

    path: str = ""
    root: str = ""
    tensors: Mapping[str, Tensor] | None = None
    whole: bool = False
    held: bool = False


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


class Contents:
    """The weights of ``model``, and the caches of ``executor``.

    ``collective`` are the ranks that share the model's layers, if there are any.
    """

    def __init__(
        self, settings: Settings, backend: Backend, model: LoadedModel, executor: Executor,
        collective: Collective | None = None,
    ) -> None:  # fmt: skip
        self._backend, self._model, self._executor, self._collective = backend, model, executor, collective
        self._on_host = settings.weights_load_device == HOST
        self._dropped: dict[str, Dropped | Freed] = {}
        self._update: Update | None = None

    @property
    def asleep(self) -> Collection[str]:
        """The tags of memory that is given back."""
        return self._dropped.keys()

    def drop(self, tag: str, keep: bool) -> None:
        """Give back the memory of ``tag``; ``keep`` its numbers on the host.

        Numbers to keep stay in place where the device's memory is the host's.
        """
        if (memory := self._backend.sleep_memory()) is not None:
            self._dropped[tag] = Freed(memory, tag, keep=keep)
        elif keep:
            return
        elif tag == WEIGHTS:
            self._dropped[tag] = Dropped(tensors_of(self._model.weights))
        else:
            self._dropped[tag] = Dropped(cache.data for cache in self._caches)

    @torch.no_grad()
    def restore(self, tag: str) -> None:
        """Take the memory of ``tag`` again, if it is given back; a cache is zeros then.

        Raises PreheatError if there is not enough: then the tag still sleeps.
        """
        if tag not in self._dropped:
            return
        self._dropped[tag].restore()
        del self._dropped[tag]
        if tag == CACHE:
            for cache in self._caches:
                cache.data.view(torch.uint8).zero_()

    @torch.no_grad()
    def reset(self) -> None:
        """Reset the state of all layers, whose memory was lost."""
        reset_state(self._model.weights)

    @torch.no_grad()  # not inference mode: its tensors would differ for programs that read them
    def load(self, new: NewWeights) -> None:
        """Load ``new`` beside the old weights. Raises ModelError, and nothing is written then."""
        with self._backend.uploading() as copy:
            on_host = self._on_host and copy
            source = self._source(new, plain_copy if on_host else copy)
            self._update = Update(
                self._model, source, self._backend, on_host=on_host, whole=new.whole, collective=self._collective
            )

    @torch.no_grad()
    def swap(self) -> None:
        """Swap the old weights and the loaded ones."""
        assert self._update is not None, "load comes first"
        self._update.swap()

    def release(self) -> None:
        """Forget the weights beside those that serve."""
        self._update = None

    def _source(self, new: NewWeights, read: Callable[[Tensor, Tensor], None]) -> StoredTensors:
        renames = self._model.spec.renames
        if new.tensors is not None:
            return StoredTensors("the tensors", [GivenTensors(new.tensors)], read, renames)
        folders = self._model.spec.folders
        return SafetensorsFiles(Path(new.path), read, renames, below=new.root or None, folders=folders)

    @property
    def _caches(self) -> list[BlockCache]:
        return [self._executor.cache, *self._executor.other_caches]
