"""New weights from a trainer: the engine's side of :mod:`preheat.execution.weight_group`.

Joining and receiving run in a thread while steps go on. Tensors lie on the host until all have arrived. Then they
replace the old weights as a checkpoint's files do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.configs.weight_transfer import Announced, TransferGroup, backend_of, transfer_config
from preheat.errors import InvalidRequest
from preheat.execution.weight_group import WeightGroup
from preheat.model.loader import LoadedModel
from preheat.model.update import tensors_of
from preheat.settings import Settings

MOST_TIMES = 4
"""Limit of announced bytes, as a multiple of the model's.

A checkpoint may have wider numbers than the model.
"""


class Transfers:
    """Tensors that have arrived for ``model``, and their process group.

    This is ``rank`` of the engine's ``world`` ranks.
    """

    def __init__(
        self, settings: Settings, backend: Backend, model: LoadedModel, rank: int = 0, world: int = 1
    ) -> None:  # fmt: skip
        self._rank, self._world = rank, world
        self._config = transfer_config(settings.weight_transfer_config)
        self._device, self._model = backend.device, model
        self._group: WeightGroup | None = None
        self._received: dict[str, Tensor] = {}
        self._gathered: dict[str, Tensor] | None = None

    def joining(self, group: TransferGroup) -> Callable[[], None]:
        """Return a function that joins ``group``.

        It replaces the group before. Raises InvalidRequest.
        """
        backend = backend_of(self._config)
        group.check(self._world)
        return partial(self.join, group, backend)

    def receiving(self, tensors: Sequence[Announced]) -> Callable[[], None]:
        """Return a function that receives ``tensors``, announced in this order. Raises InvalidRequest."""
        backend_of(self._config)
        if self._group is None:
            raise InvalidRequest("there is no group with a trainer: call /init_weight_transfer_engine first")
        total = sum(each.nbytes for each in tensors)
        model = sum(each.numel() * each.element_size() for each in tensors_of(self._model.weights))
        model = model * self._model.stored.num_params // self._model.spec.num_params
        if total > MOST_TIMES * model:
            self.leave()
            raise InvalidRequest(
                f"update_info announces {total:,} bytes, and the model has {model:,}: the engine leaves the trainer's "
                "group",
                param="update_info",
            )
        return partial(self.receive, tensors)

    def received(self) -> dict[str, Tensor] | None:
        """Return the tensors that arrived last; None if they are gathered.

        Raises InvalidRequest for a tensor that has been gathered before.
        """
        received, self._received = self._received, {}
        if self._gathered is None:
            return received
        if twice := sorted(self._gathered.keys() & received.keys()):
            raise InvalidRequest(f"{twice[0]} was sent already since /start_weight_update", param="update_info")
        self._gathered |= received
        return None

    def gather(self) -> None:
        """Keep arriving tensors until :meth:`gathered`; drop tensors kept before."""
        backend_of(self._config)
        self._gathered = {}

    def gathered(self) -> dict[str, Tensor]:
        """Return all tensors that have arrived since :meth:`gather`. Raises InvalidRequest without one."""
        if self._gathered is None:
            raise InvalidRequest("no update has begun: call /start_weight_update first")
        found, self._gathered = self._gathered, None
        return found

    def check_not_gathering(self) -> None:
        """Raise InvalidRequest while tensors of another update are gathered."""
        if self._gathered is not None:
            raise InvalidRequest("an update from a trainer has begun: call /finish_weight_update first")

    def join(self, group: TransferGroup, backend: str) -> None:
        """Join ``group``, in place of the one before. Raises InvalidRequest."""
        self._leave()
        try:
            self._group = WeightGroup(
                group.master_address, group.master_port, rank=group.rank_offset + self._rank,
                world_size=group.world_size, backend=backend, device=self._device, timeout=group.timeout,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidRequest(
                f"no group with a trainer at {group.master_address}:{group.master_port}: {reason}", param="init_info"
            ) from error

    def receive(self, tensors: Sequence[Announced]) -> None:
        """Receive ``tensors``. Raises InvalidRequest."""
        assert self._group is not None, "join comes first"
        try:
            self._received = self._group.receive(tensors)
        except (RuntimeError, TimeoutError) as error:
            self._leave()
            raise InvalidRequest(
                f"the old weights stay, as not all of {len(tensors)} tensors have arrived ({error}); the engine "
                "leaves the trainer's group: call /init_weight_transfer_engine again"
            ) from error

    def leave(self) -> None:
        """Leave the group, if there is one."""
        self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
