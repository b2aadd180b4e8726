"""A file that configures logging, as vLLM's users have them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOR_VLLM = {
    "version": 1,
    "formatters": {"f": {"class": "vllm.logging_utils.NewLineFormatter", "format": "said %(levelname)s %(message)s"}},
    "handlers": {"h": {"class": "logging.StreamHandler", "formatter": "f", "stream": "ext://sys.stdout"}},
    "loggers": {"vllm": {"handlers": ["h"], "level": "DEBUG"}, "uvicorn": {"level": "ERROR"}},
}
LOGS = """
import logging, sys
early = logging.getLogger("preheat.early")
from preheat.errors import SettingsError
from preheat.settings import Settings
from preheat.utils.log import set_up_logging
try:
    set_up_logging(Settings.load(dict(model="m")))
except SettingsError as error:
    sys.exit(f"{error.param}: {error.message}")
early.debug("one\\ntwo")
logging.getLogger("other").info("three")
"""


def logged(file: Path, config: Any) -> subprocess.CompletedProcess[str]:
    if config is not None:
        file.write_text(config if isinstance(config, str) else json.dumps(config))
    environment = {"VLLM_LOGGING_CONFIG_PATH": str(file), "PYTHONPATH": ":".join(sys.path)}
    return subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, env=environment, check=False)


def test_settings_for_vllms_loggers_apply_to_ours(tmp_path: Path) -> None:
    """A file for vLLM's loggers applies to ours: each event once, on one line.

    Other loggers stay as they are.
    """
    done = logged(tmp_path / "log.json", FOR_VLLM)
    assert done.stdout == "said DEBUG one\\ntwo\n"
    assert done.stderr.endswith("other: three\n") and "two" not in done.stderr


def test_a_preheat_logger_overrides_the_vllm_one(tmp_path: Path) -> None:
    done = logged(tmp_path / "log.json", FOR_VLLM | {"loggers": {"vllm": {"level": "DEBUG"}, "preheat": {}}})
    assert done.returncode == 0 and "one" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "cannot be read: No such file"), ("{", "is not a JSON object"), ("[]", "is not a JSON object"),
        ({"version": 2}, "Unsupported version"), ({"version": 1, "handlers": {"h": {"class": "no.Such"}}}, "No module"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_understood_is_an_error_at_boot(tmp_path: Path, config: Any, said: str) -> None:
    done = logged(tmp_path / "log.json", config)
    assert done.returncode == 1
    assert done.stderr.startswith(f"log_config_file: log_config_file {tmp_path}/log.json ") and said in done.stderr
