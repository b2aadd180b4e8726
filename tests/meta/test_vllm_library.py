"""The surface of vLLM's library: each name is here, or is refused with a reason."""

from __future__ import annotations

import ast
import importlib
import inspect
import types
from pathlib import Path

import pytest
import yaml

import preheat
from preheat.errors import InvalidRequest
from preheat.library.vllm_modules import modules
from preheat.utils.refused import Refused

LISTED = yaml.safe_load(Path(__file__).with_name("vllm_library.yaml").read_text())
IMPORTS, EXAMPLES = LISTED.pop("imports"), LISTED.pop("examples")
SURFACE = {name: names.split() for name, names in LISTED.items()}
MEMBERS = [(owner, name) for owner, names in SURFACE.items() if owner != "package" for name in names]


def members(owner: type) -> set[str]:
    """Return the attributes of a class's objects: ``dir()``, fields, and attributes that ``__init__`` sets."""
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


@pytest.mark.parametrize(("module", "names"), IMPORTS.items())
def test_names_of_modules(module, names):
    """Each name of a vLLM module is here, or is refused with a reason.

    A script imports it from the same module.
    """
    found = importlib.import_module(f"preheat.{module}")
    for name in names.split():
        value = getattr(found, name)
        assert isinstance(value, Refused) or value is getattr(preheat, name, value)


def test_every_module_of_the_table_is_listed():
    assert modules() <= IMPORTS.keys()
    for module in modules():
        assert dir(importlib.import_module(f"preheat.{module}")) == sorted(IMPORTS[module].split())


def test_other_modules_and_names_are_not_there():
    for statement in ("import preheat.heat", "import preheat.v1.heat", "from preheat.outputs import heat"):
        with pytest.raises(ImportError):
            exec(statement, {})


def used(name: str) -> object:
    """Return the object that a script calls ``module:NAME``, ``NAME`` of the package, or ``Class.member``."""
    module, _, name = name.rpartition(":")
    first, _, member = name.partition(".")
    value = getattr(importlib.import_module(f"preheat.{module}" if module else "preheat"), first)
    assert not member or member in members(value)
    return value if not member else getattr(value, member, None)


@pytest.mark.parametrize(("example", "told"), EXAMPLES.items())
def test_examples_of_vllm(example, told):
    """An example's names are here.

    An example that stops has a refused name, or a reason in the list.
    """
    assert not any(isinstance(used(name), Refused) for name in told.get("uses", "").split())
    if "stops" in told:
        assert isinstance(used(told["stops"]), Refused)
    assert told.keys() & {"uses", "stops", "because"}


def test_refused_names_may_be_in_annotations_and_not_among_bases():
    from preheat.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

    assert BatchUpdate | None and None | BatchUpdate
    with pytest.raises(InvalidRequest, match="LogitsProcessor is not here: "):
        type("Own", (), {}), types.new_class("Own", (LogitsProcessor,))


def refused() -> list[Refused]:
    owners = [preheat, *(getattr(preheat, owner) for owner in SURFACE if owner != "package")]
    owners += [importlib.import_module(f"preheat.{module}") for module in modules()]
    found = [getattr(owner, name, None) for owner in owners for name in dir(owner)]
    return [value for value in found if isinstance(value, Refused)]


def test_refused_names_raise_their_reason_when_used():
    assert len(refused()) > 5
    for each in refused():
        for use in (each, lambda each=each: each.anything):
            with pytest.raises(InvalidRequest, match="is not here: "):
                use()
        assert len(each.reason) > 15 and not hasattr(each, "anything")


def test_the_walk_can_fail():
    assert "teleport" not in members(preheat.LLM)
    assert "finished" in members(preheat.CompletionOutput)
