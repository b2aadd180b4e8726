"""Releases: the packages are complete, and an installed package runs without the repository."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import preheat
from tests import shared_code
from tests.meta.source import PACKAGE, ROOT
from tools import sbom

NAME = f"preheat-{preheat.__version__}"
INFO = f"{NAME}.dist-info"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Return the output of a command."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, check=False, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def hatch(folder: Path, dist: Path, *targets: str) -> None:
    wanted = [word for target in targets for word in ("--target", target)]
    run(sys.executable, "-m", "hatchling", "build", "--directory", str(dist), *wanted, cwd=folder)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from the sdist, as installers do."""
    folder = tmp_path_factory.mktemp("dist")
    hatch(ROOT, folder, "sdist")
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        archive.extractall(folder / "source", filter="data")
    hatch(folder / "source" / NAME, folder, "wheel")
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def test_the_wheel_has_all_of_the_package_and_nothing_else(wheel: Path) -> None:
    """The wheel has the whole package.

    It has data files and py.typed, but no tests, tools or fake device.
    """
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    ours = {f"preheat/{path.relative_to(PACKAGE).as_posix()}": path for path in files}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert [name for name, path in ours.items() if name in names and archive.read(name) != path.read_bytes()] == []
        (record,) = (name for name in names if name.endswith("/RECORD"))
        assert {row[0] for row in csv.reader(io.StringIO(archive.read(record).decode()))} == names
    added = {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    assert names == set(ours) | added
    assert names >= {"preheat/py.typed", "preheat/bundled/LICENSE-PYTHON.txt", "preheat/backends/cuda/tables/h200.json"}


def test_the_wheels_metadata_match_the_project(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(f"{INFO}/METADATA").decode().partition("\n\n")[0].splitlines()
    assert {"Name: preheat", f"Version: {preheat.__version__}", "License-Expression: Apache-2.0"} <= set(lines)
    required = {plain(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist: ")}
    assert {line for line in required if "extra" not in line} == {plain(line) for line in project["dependencies"]}
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra: ")}
    assert extras == set(project["optional-dependencies"])


def plain(requirement: str) -> str:
    return re.sub(r"[\s']", "", requirement).lower().replace("_", "-")


def test_the_sdist_has_the_sources(dist: Path) -> None:
    with tarfile.open(dist / f"{NAME}.tar.gz") as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    wanted = {"LICENSE", "pyproject.toml", "constraints.txt", "CHANGELOG.md", "docs/settings.md", "tests/conftest.py"}
    assert wanted <= names
    assert [name for name in names if name.startswith((".venv", "dist/")) or "__pycache__" in name] == []


def test_an_installed_wheel_runs_by_itself(
    wheel: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An installed wheel runs in a folder of its own.

    The folder comes before the repository's, beside the packages that the wheel needs.
    """
    site = tmp_path / "site"
    pip = ("install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", *pip, "--target", site, wheel, cwd=tmp_path)
    where = {"PYTHONPATH": str(site), "PREHEAT_CACHE_DIR": str(shared_code.folder_of(tmp_path_factory))}
    code = "import preheat, importlib.metadata as m; print(preheat.__file__, m.version('preheat'))"
    file, installed = run(sys.executable, "-c", code, cwd=tmp_path, **where).split()
    assert Path(file).is_relative_to(site)
    assert installed == preheat.__version__
    words = ("generate", "--prompt", "def add(a, b):", "--max-tokens", "4", "--temperature", "0", "--json")
    answer = json.loads(run(site / "bin" / "preheat", *words, cwd=tmp_path, **where))
    assert len(answer["token_ids"]) == 4


def test_the_bill_of_materials_names_installed_packages() -> None:
    bill = sbom.bill()
    assert bill == sbom.bill()
    found = {each["name"]: each["version"] for each in bill["components"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = {sbom.canonicalize_name(re.split(r"[<>=\[; ]", line)[0]) for line in project["dependencies"]}
    assert direct <= found.keys()
    assert {name: version(name) for name in found} == found
    assert not {"preheat", "pytest", "ruff", "hatchling"} & found.keys()
    known = {each["bom-ref"] for each in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    assert {each["ref"] for each in bill["dependencies"]} == known
    assert {ref for each in bill["dependencies"] for ref in each["dependsOn"]} <= known
    unlicensed = [each["name"] for each in bill["components"] if "licenses" not in each]
    assert len(unlicensed) < len(found) / 2
