"""Memory left to a container: the limits of its control groups, in both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.utils.memory import left_in_groups

NAMES = {
    "0::/pods/mine\n": ("", "memory.max", "memory.current", "inactive_file"),
    "4:cpu,memory:/pods/mine\n0::/\n": (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


def group(folder: Path, names: tuple[str, ...], limit: object, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


@pytest.mark.parametrize("groups", NAMES)
def test_each_group_up_to_the_root_has_its_limit(groups, tmp_path):
    controller, *names = NAMES[groups]
    group(tmp_path / controller / "pods" / "mine", names, 1000, 900, 250)
    group(tmp_path / controller / "pods", names, 400, 300, 0)
    group(tmp_path / controller, names, "max", 0, 0)
    assert left_in_groups(groups, tmp_path) == [350, 100]


@pytest.mark.parametrize("groups", NAMES)
def test_a_container_sees_its_group_as_the_root(groups, tmp_path):
    controller, *names = NAMES[groups]
    group(tmp_path / controller, names, 1000, 1200, 0)
    assert left_in_groups(groups, tmp_path) == [0]


def test_without_groups_there_is_no_limit(tmp_path):
    assert left_in_groups("3:cpu:/a\n0::/a\n", tmp_path) == []
