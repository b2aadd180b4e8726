"""``--middleware``: code of the operator before every route."""

from __future__ import annotations

import pytest

from preheat.errors import SettingsError
from preheat.server.http.own_middleware import load_middleware
from tests.api.conftest import serving

HERE = "tests.api.middleware_of_an_operator"


def test_every_answer_passes_the_middleware(folder) -> None:
    with serving(str(folder), middleware=[f"{HERE}.Stamp", f"{HERE}.teapot"]) as server:
        plain = server.get("/version")
        assert plain.status == 200 and plain.headers["x-stamp"] == "class"
        coffee = server.get("/coffee")
        assert (coffee.status, coffee.json) == (418, {"brews": False}) and "x-stamp" not in coffee.headers
        assert server.get("/tea").status == 404
    with serving(str(folder)) as server:
        assert "x-stamp" not in server.get("/version").headers and server.get("/coffee").status == 404


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no.such.thing", "ModuleNotFoundError"), ("word", "cannot be loaded"), (f"{HERE}.nothing", "AttributeError"),
        (f"{HERE}.not_one", "must be a class or an async def"),
    ],
)  # fmt: skip
def test_a_path_that_leads_to_none_is_an_error_at_boot(path: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_middleware([path])
