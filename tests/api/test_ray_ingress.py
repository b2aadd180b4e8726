"""The ingress of Ray Serve: requests survive the death of the replica that runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.common import crowd

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install preheat[ray]")

from benchmarks.common import ray_ingress

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Ray's own


@pytest.fixture(scope="module")
def application() -> Iterator[None]:
    ray_ingress.start(boot_check="quick")
    yield
    ray_ingress.stop()


def test_fifty_requests_survive_a_killed_replica(application: None) -> None:
    found = ray_ingress.killed(crowd.mixed(50, 2, None, 24))
    assert found["statuses"] == ["200"] and found["killed"] == 1
    assert found["differing"] == []
