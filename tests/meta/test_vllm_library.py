"""The surface of vLLM's library: each name is here, or is refused with a reason."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import yaml

import preheat
from preheat.errors import InvalidRequest
from preheat.utils.refused import Refused

SURFACE = {
    name: names.split()
    for name, names in yaml.safe_load(Path(__file__).with_name("vllm_library.yaml").read_text()).items()
}
MEMBERS = [(owner, name) for owner, names in SURFACE.items() if owner != "package" for name in names]


def members(owner: type) -> set[str]:
    """What objects of a class have: ``dir()``, fields, and attributes that ``__init__`` sets."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(owner)))
    body = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner.__name__)
    own = {node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return {*dir(owner), *inspect.get_annotations(owner), *own}


@pytest.mark.parametrize("name", SURFACE["package"])
def test_names_of_the_package(name):
    assert name in dir(preheat) and getattr(preheat, name) is not None


@pytest.mark.parametrize(("owner", "name"), MEMBERS)
def test_members(owner, name):
    assert name in members(getattr(preheat, owner))


def refused() -> list[Refused]:
    owners = [preheat, *(getattr(preheat, owner) for owner in SURFACE if owner != "package")]
    found = [getattr(owner, name, None) for owner in owners for name in dir(owner)]
    return [value for value in found if isinstance(value, Refused)]


def test_what_is_refused_says_why_when_it_is_used():
    assert len(refused()) > 5
    for each in refused():
        for use in (each, lambda each=each: each.anything):
            with pytest.raises(InvalidRequest, match="is not here: "):
                use()
        assert len(each.reason) > 15 and not hasattr(each, "anything")


def test_the_walk_can_fail():
    assert "teleport" not in members(preheat.LLM)
    assert "finished" in members(preheat.CompletionOutput)
