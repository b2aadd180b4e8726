"""The deep health check over HTTP."""

from __future__ import annotations

from tests.api.conftest import Server


def test_a_server_without_digests_refuses_the_deep_check(server: Server) -> None:
    assert server.get("/health").status == server.get("/health?deep=0").status == 200
    answer = server.get("/health?deep=1")
    assert answer.status == 400 and "--audit-every" in answer.json["error"]["message"]
    assert server.get("/health?deep=2").json["error"]["param"] == "deep"
