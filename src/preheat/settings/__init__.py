"""Every option of preheat, with flag, environment variables, default and help.

A :class:`Settings` is frozen and always valid. Only :meth:`Settings.load` reads the environment. Flags are the names
with dashes; every option can also be set by ``PREHEAT_<NAME>``, and some by the variable of vLLM or Gaudi. Each group
of options is a dataclass in a module of this folder. :mod:`preheat.settings.combinations` says which features go
together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from preheat.configs.adapters import check_names
from preheat.configs.bucketing import with_bucketing_policy
from preheat.configs.kv_transfer import kv_transfer
from preheat.configs.speculation import Speculation, speculation_of
from preheat.configs.structured import structured_config
from preheat.configs.weight_transfer import transfer_config
from preheat.errors import SettingsError
from preheat.options.environment import read_environment, without_unused
from preheat.options.given import given_options
from preheat.options.options import Option, registry
from preheat.settings.adapters import AdapterSettings
from preheat.settings.combinations import check_settings
from preheat.settings.devices import SeveralDevicesSettings
from preheat.settings.execution import ExecutionSettings
from preheat.settings.gaudi import GaudiSettings
from preheat.settings.general import GeneralSettings
from preheat.settings.memory import MemorySettings, SchedulingSettings
from preheat.settings.model import BUNDLED, ModelSettings
from preheat.settings.quantization import QuantizationSettings
from preheat.settings.server import ImageSettings, ServerSettings
from preheat.settings.speculation import SpeculationSettings
from preheat.settings.warm_up import (
    BucketSettings,
    DefragmenterSettings,
    DiagnosticSettings,
    GraphSettings,
    ProofSettings,
    WarmUpSettings,
)
from preheat.utils.files import read_given, shown, why_unread

__all__ = ["BUNDLED", "OPTIONS", "Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings(  # a dataclass has the fields of its last base first
    GaudiSettings,
    SpeculationSettings,
    AdapterSettings,
    QuantizationSettings,
    SeveralDevicesSettings,
    DiagnosticSettings,
    ProofSettings,
    DefragmenterSettings,
    GraphSettings,
    WarmUpSettings,
    BucketSettings,
    GeneralSettings,
    ImageSettings,
    ServerSettings,
    ExecutionSettings,
    SchedulingSettings,
    MemorySettings,
    ModelSettings,
):
    """All options. Raises SettingsError, naming the option, for an unusable value."""

    def __post_init__(self) -> None:
        for opt in OPTIONS.values():
            if (value := getattr(self, opt.name)) is not opt.default:  # a test checks the defaults
                if opt.path is not None and isinstance(value, str):
                    value = os.path.expanduser(value)  # as the readers of files do not
                    object.__setattr__(self, opt.name, value)
                opt.check(value, opt.name)
        _check_mm_limits(self.limit_mm_per_prompt)
        if self.tensor_parallel_size not in (1, 2, 4, 8):
            raise SettingsError(
                f"tensor_parallel_size must be 1, 2, 4 or 8, got {self.tensor_parallel_size}: sums are a fixed "
                "tree of four K splits (eight on 8 ranks), and each rank holds a subtree of it",
                param="tensor_parallel_size",
            )
        structured_config(self.structured_outputs_config)
        if self.root_path.strip("/") and not self.root_path.startswith("/"):
            raise SettingsError(f"root_path {self.root_path!r} must begin with a slash", param="root_path")
        transfer_config(self.weight_transfer_config)
        kv_transfer(self)
        check_names(self)
        check_settings(self)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise SettingsError(f"block_size must be a power of two, got {self.block_size}", param="block_size")

    @property
    def speculation(self) -> Speculation | None:
        """The drafting of tokens, or None."""
        return speculation_of(self)

    @classmethod
    def load(
        cls,
        args: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        config_file: str | None = None,
    ) -> Settings:
        """Load settings from keywords or flags, and other sources.

        Keywords or flags come first, then the environment, then a YAML file, then the defaults.

        ``args`` maps option names to values of the option's type, or to text. ``env`` is by default the process's
        environment, ``config_file`` the option ``config``. Raises SettingsError for unknown names and values; unknown
        variables only cause a warning.
        """
        env = os.environ if env is None else env
        values = read_environment(OPTIONS, env)
        values |= given_options(args or {}, OPTIONS)
        path = config_file or values.get("config")
        if path is not None:
            values = {"config": path, **_from_file(path), **values}
        return cls(**with_bucketing_policy(without_unused(values, args or {}, env)))


def _check_mm_limits(limits: dict[str, Any] | None) -> None:
    """Raise SettingsError unless ``limits`` are counts of images, the only kind besides text."""
    for name, count in (limits or {}).items():
        if name != "image" or type(count) is not int or count < 0:
            raise SettingsError(
                f'limit_mm_per_prompt: {name!r}: {count!r} is not {{"image": a number of images}}',
                param="limit_mm_per_prompt",
            )


OPTIONS: dict[str, Option] = registry(Settings)
"""Every option by name."""


def _from_file(path: str) -> dict[str, Any]:
    """Read the options in a YAML or JSON file. Raises SettingsError.

    The file has one mapping, from names with dashes or underscores.
    """
    import yaml

    try:
        content = yaml.safe_load(read_given(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read the config file {shown(path)}: {why_unread(error)}", param="config") from None
    if not isinstance(content, dict | None):
        raise SettingsError(f"{path} must hold one mapping of option names to values", param="config")
    values = given_options({str(key): value for key, value in (content or {}).items()}, OPTIONS, path)
    if "config" in values:
        raise SettingsError(f"{path}: a config file cannot name another one", param="config")
    return values
