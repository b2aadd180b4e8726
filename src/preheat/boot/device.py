"""The device of a boot, with its settings and the execution mode of the model."""

from __future__ import annotations

import logging
from dataclasses import replace

from preheat.backends.base.backend import Backend
from preheat.backends.base.facts import Facts, Mode
from preheat.boot.values import Device
from preheat.errors import SettingsError
from preheat.limits import check_ends
from preheat.model.drafts import draft_settings
from preheat.model.eagle import is_head
from preheat.model.files import find_model
from preheat.model.loader import obstacle
from preheat.model.stated import stated_spec
from preheat.model.traits import check_traits
from preheat.parallel.share import for_ranks, for_replica
from preheat.plan.modes import check_options, instead, resolve, with_defaults
from preheat.plan.of_model import for_model
from preheat.settings import Settings
from preheat.utils.caches import cache_root

logger = logging.getLogger(__name__)


def open_device(settings: Settings, backend: Backend) -> Device:
    """Return the prepared device, its settings and its mode. Raises SettingsError for unsupported options."""
    check_options(settings, backend.facts)
    if not settings.batch_invariant:
        logger.warning("batch_invariant is off: the bits of a request may depend on the other requests in its batch")
    mode = resolve(backend.facts, settings)
    stated, other = with_defaults(settings, backend.facts), instead(backend.facts, settings)
    if other is None:
        check_traits(stated, backend.facts, mode)
    settings = for_ranks(for_replica(settings, backend.facts), backend.facts)
    backend.prepare(settings, mode, cache_root(settings))
    if other is not None and (reason := _obstacle(stated, backend, mode)):
        logger.info("Execution mode %s instead of %s: %s", other, mode, reason)
        mode = other
        check_traits(stated, backend.facts, mode)
        backend.prepare(settings, mode, cache_root(settings))
    return Device(_for_model(settings, backend.facts), backend, mode)


def _for_model(settings: Settings, facts: Facts) -> Settings:
    """Return the settings that the model needs: tokens of a step, and no prefix that goes on without a state."""
    spec = stated_spec(settings, find_model(settings, with_weights=False))
    if spec.has_states:
        check_ends(with_defaults(settings, facts))
        if settings.mamba_cache_mode == "none" and settings.enable_prefix_caching:
            logger.info("enable_prefix_caching is off: mamba_cache_mode none keeps no state at the ends of blocks")
            settings = replace(settings, enable_prefix_caching=False)
    return for_model(settings, facts, spec)


def _obstacle(settings: Settings, backend: Backend, mode: Mode) -> str | None:
    """Return why the settings, the model or its draft do not run in ``mode``, None if they do."""
    try:
        check_traits(settings, backend.facts, mode)
    except SettingsError as error:
        return str(error)
    draft = draft_settings(settings)
    if draft is None or is_head(draft):  # a head's layers are those of its target
        return obstacle(settings, backend)
    return obstacle(settings, backend) or obstacle(draft, backend)
