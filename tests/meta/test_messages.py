"""Messages are plain: they name things, and have one form. ``python -m tests.meta.messages`` lists them all."""

import ast
import re

import pytest

from tests.meta.messages import messages, template
from tests.meta.words import count

FOUND = messages()
MOST_POINTING = 4.0
"""Most pointing words in 1,000 words of messages."""

LAWS = {
    "has no newline": lambda text: "\n" not in text,
    "has no space at an end": lambda text: text == text.strip(),
    "says no please": lambda text: not re.search(r"\bplease\b", text, re.IGNORECASE),
    "ends without a period unless it has several sentences": lambda text: (
        not text.endswith(".") or text.endswith("...") or ". " in text
    ),
}


def test_all_are_found():
    assert len(FOUND) > 1000
    assert {"SettingsError", "InvalidRequest", "ModelError", "AdapterError", "logger.warning"} <= {
        m.maker for m in FOUND
    }


def test_they_name_things():
    told = count([each.text for each in FOUND])
    assert told.words > 9000
    assert told.rate < MOST_POINTING, f"{told.pointing} of {told.words} words point"


@pytest.mark.parametrize("law", LAWS)
def test_laws(law):
    assert [str(each) for each in FOUND if not LAWS[law](each.text)] == []


def test_log_lines_are_formatted_by_the_logger():
    """With ``%s`` and arguments: an f-string would be formatted even if the level is off."""
    assert [str(each) for each in FOUND if each.logged and "{}" in each.text] == []


@pytest.mark.parametrize(
    ("code", "text"),
    [("'plain'", "plain"), ("f'a {b!r} c'", "a {} c"), ("'a ' + b", "a {}"), ("f'a' 'b'", "ab"), ("a", None)],
)
def test_templates(code, text):
    assert template(ast.parse(code, mode="eval").body) == text
