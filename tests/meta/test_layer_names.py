"""Features of layers meet in values, not in classes: no class and no file of a backend is named after two of them."""

from __future__ import annotations

import ast
import re

import pytest

from tests.meta.source import ROOT

FEATURES = re.compile(r"leaf|leaves|split|expert|adapt|quantiz|rank", re.IGNORECASE)
FILES = sorted((ROOT / "src" / "preheat" / "backends").rglob("*.py"))


def features(name: str) -> set[str]:
    """The features that a name has."""
    return {found.lower() for found in FEATURES.findall(name)}


def classes(text: str) -> list[str]:
    """The names of all classes in the source ``text``."""
    return [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_is_named_after_two_features(file):
    names = [file.stem, *classes(file.read_text())]
    assert [name for name in names if len(features(name)) > 1] == []


@pytest.mark.parametrize("name", ["AdaptedLeafLinear", "QuantizedLeafExperts", "lora_leaf_experts_quantized"])
def test_two_features_are_seen(name):
    assert len(features(name)) > 1
