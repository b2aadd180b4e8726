"""Contents of the repository: no machine's paths, the scripts, one version, pinned dependencies."""

import dataclasses
import re
import shutil
import subprocess
import tomllib

import pytest

import preheat
from preheat.backends.registry import FACTS
from preheat.plan.options import PlanOptions
from preheat.settings import OPTIONS
from tests.meta.source import MODULES, ROOT, name_of, product_files

# The brackets keep this file from containing the paths that it looks for.
FOREIGN = re.compile(r"/wor[k]/|\.\./share[d]|/roo[t]/|/hom[e]/[a-z]|/tm[p]/contract|/op[t]/(pypi|wheels)")
SCRIPTS = {"install", "run", "test", "lint", "docs", "bench", "image", "release"}


def test_no_file_names_a_machine():
    found = []
    for path in product_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in FOREIGN.finditer(text)]
    assert found == []


def test_the_check_for_machine_paths_can_fail():
    assert FOREIGN.search("see /" + "work/main")
    assert FOREIGN.search("from ../" + "shared/design.md")


def test_every_option_is_used():
    """Every option is read.

    An option that no code reads would be accepted and ignored.
    """
    text = "".join(path.read_text() for path in MODULES if not f"{name_of(path)}.".startswith("settings."))
    planned = {field.name for field in dataclasses.fields(PlanOptions)}  # read all at once
    active = [opt.name for opt in OPTIONS.values() if not isinstance(opt.later, str)]
    unused = {name for name in active if not re.search(rf"settings\.{name}\b", text)}
    rejected = FACTS["cpu"].rejected.keys() & FACTS["cuda"].rejected.keys()  # cannot be set anywhere yet
    assert unused - planned - rejected - {"config"} == set()  # read by the settings


def test_people_and_ci_share_the_scripts():
    scripts = {path.name for path in (ROOT / "scripts").iterdir()}
    assert scripts == SCRIPTS
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in SCRIPTS if f"scripts/{name}" not in contributing] == []
    ci = (ROOT / ".ci" / "run").read_text()
    assert "scripts/test" in ci
    assert "scripts/lint" in ci


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_scripts_are_plain_shell(name):
    path = ROOT / "scripts" / name
    first, *rest = path.read_text().splitlines()
    assert first == "#!/bin/sh"
    assert "set -eu" in rest
    assert path.stat().st_mode & 0o111
    shell = shutil.which("dash") or "sh"
    assert subprocess.run([shell, "-n", path], check=False).returncode == 0


def test_changelog_has_the_version():
    versions = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert preheat.__version__ in versions


def test_every_declared_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    wanted = {_name(line) for line in project["dependencies"] + extras}
    pinned = {_name(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert wanted - pinned == set()


def _name(requirement: str) -> str:
    return re.split(r"[<>=\[; ]", requirement)[0].lower().replace("_", "-")
