"""Detection of a usable Gaudi, without importing torch or Habana's software."""

from __future__ import annotations

import glob
from importlib.util import find_spec
from pathlib import Path

FRAMEWORKS = "habana_frameworks"
NODES = ("/dev/accel/accel[0-9]*", "/dev/hl[0-9]*")
"""Device nodes of the driver's later and earlier versions."""

FAKE_ONLY = "simulator.py"
"""A file that only a fake of the frameworks has."""


def frameworks() -> Path | None:
    """Return the folder of Habana's frameworks; None if they are not installed."""
    spec = find_spec(FRAMEWORKS)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def is_simulated() -> bool:
    """Return whether the installed frameworks are a fake."""
    folder = frameworks()
    return folder is not None and (folder / FAKE_ONLY).is_file()


def nodes() -> list[str]:
    """Return the device nodes of the cards."""
    return sorted(path for pattern in NODES for path in glob.glob(pattern))


def detected() -> bool:
    """Return whether ``auto`` takes this platform.

    It takes real frameworks and a card, never a fake.
    """
    return frameworks() is not None and not is_simulated() and bool(nodes())


def obstacle() -> str | None:
    """Return the obstacle to using a Gaudi, with advice, or None."""
    if frameworks() is None:
        return (
            "Gaudi's PyTorch bridge (habana_frameworks) is not installed: install habana-torch-plugin of the Gaudi "
            "software that the driver belongs to, run in Gaudi's container, or use --device cpu"
        )
    if not is_simulated() and not nodes():
        return (
            "there is no Gaudi: none of " + " or ".join(NODES) + " exists; check hl-smi and that the container was "
            "started with --runtime=habana, or use --device cpu"
        )
    return None
