"""Code of a platform stands in its folder of backends/.

No other module names a platform or asks for it.
"""

import ast

import pytest

from preheat.settings import OPTIONS
from tests.meta.source import MODULES, imports, name_of

PLATFORMS = {"cpu", "cuda", "hpu"}

MODULES_OF_PLATFORMS = tuple(f"{package}.{name}" for package in ("torch", "preheat.backends") for name in PLATFORMS)


def platform_facts(tree: ast.AST) -> set[str]:
    """Return the places in ``tree`` that name a platform or ask for it.

    A question may go to a tensor, a device or torch.
    """
    return {f"line {node.lineno}: {said}" for node in ast.walk(tree) if (said := platform_fact(node))}


def platform_fact(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str(name)) if name in PLATFORMS:
            return repr(name)
        case ast.Attribute(attr="is_cuda" | "is_cpu" | "is_hpu" as name):
            return name
        case ast.Attribute(attr="type", value=ast.Name(id="device") | ast.Attribute(attr="device")):
            return "device.type"
        case ast.Attribute(attr="cuda" | "hpu" | "cpu" as name, value=ast.Name(id="torch")):
            return f"torch.{name}"
        case ast.Attribute(attr="cuda" | "hpu" | "cpu" as name, value=ast.Attribute(attr="backends")):
            return f"backends.{name}"
        case ast.ImportFrom() | ast.Import():
            return next((name for name in imports(node) if name.startswith(MODULES_OF_PLATFORMS)), None)
    return None


def outside(module: str) -> bool:
    return module.partition(".")[0] != "backends"


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.AST]:
    """Return the syntax trees of modules outside of backends, by name."""
    return {name_of(path): ast.parse(path.read_text()) for path in MODULES if outside(name_of(path))}


def test_no_platform_is_named_outside_of_backends(trees):
    assert len(trees) > 300
    assert {name: found for name, tree in trees.items() if (found := platform_facts(tree))} == {}


@pytest.mark.parametrize(
    "line",
    [
        'if name == "cuda": ...', 'table = {"hpu": 1}', "x.is_cuda", "x.device.type", "device.type",
        "torch.cuda.Stream()", "torch.backends.cuda.matmul", "import torch.cuda", "from torch.cuda import graph",
        "from preheat.backends.cuda.device.graph import capture", 'device = torch.device("cpu")',
    ],
)  # fmt: skip
def test_the_walk_finds_a_planted_platform(line):
    assert platform_facts(ast.parse(line))


def test_the_walk_ignores_prose_and_other_words():
    """Control: prose and other words are no platform's name, nor is every type."""
    source = (
        '"""On cuda, as on a cpu."""\nraise E("use --device cpu")\nx.type; torch.mm\nfrom preheat.backends import base'
    )
    assert platform_facts(ast.parse(source)) == set()


OF_THE_BRIDGE = {"lazy_mode"} | {opt.name for opt in OPTIONS.values() if opt.group == "Gaudi"}
"""Options of Gaudi's software."""

TABLES = {"plan.modes": {"lazy_mode"}}
"""Uses of such options outside of backends: the table of execution modes, which every platform follows."""


def test_options_of_one_platform_are_read_in_its_folder(trees):
    found = {}
    for name, tree in trees.items():
        found[name] = OF_THE_BRIDGE & {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name: read for name, read in found.items() if read} == TABLES
