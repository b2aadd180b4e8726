"""Physical cores and nodes, from the files of a kernel."""

from __future__ import annotations

from preheat.utils.processors import memory_nodes, physical_cores, usable


def test_two_processors_of_a_core_count_once(tmp_path):
    for number, (package, core) in enumerate([(0, 0), (0, 1), (0, 0), (0, 1), (1, 0)]):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert physical_cores({0, 1, 2, 3, 4}, tmp_path) == 3
    assert physical_cores({0, 2}, tmp_path) == 1
    assert physical_cores({0, 9}, tmp_path) == 2  # the kernel says nothing of processor 9


def test_cores_of_this_machine():
    assert 1 <= physical_cores() <= len(usable())


def test_nodes(tmp_path):
    assert memory_nodes(tmp_path) == 1
    for name in ("node0", "node1", "possible"):
        (tmp_path / name).mkdir()
    assert memory_nodes(tmp_path) == 2
