"""Messages and help texts name things, and have one form. ``python -m tests.meta.messages`` lists all messages."""

import ast
import functools
import re

import pytest

from preheat.options.vllm_flags import FOREIGN
from preheat.settings import OPTIONS
from tests.meta.messages import messages, template
from tests.meta.words import count

found = functools.cache(messages)
"""All messages, read at the first call: a process that only collects tests reads none."""

MOST_POINTING = 4.0
"""Most pointing words in 1,000."""

LAWS = {
    "has no newline": lambda text: "\n" not in text,
    "has no space at an end": lambda text: text == text.strip(),
    "says no please": lambda text: not re.search(r"\bplease\b", text, re.IGNORECASE),
    "ends without a period unless it has several sentences": lambda text: (
        not text.endswith(".") or text.endswith("...") or ". " in text
    ),
}


def test_all_are_found():
    assert len(found()) > 1000
    assert {"SettingsError", "InvalidRequest", "ModelError", "AdapterError", "logger.warning"} <= {
        m.maker for m in found()
    }


@pytest.mark.parametrize(
    "texts",
    [
        lambda: [each.text for each in found()],
        lambda: [option.help for option in OPTIONS.values()],
        lambda: list({row.says for row in FOREIGN.values()}),
    ],
    ids=("messages", "options", "flags of vLLM"),
)
def test_they_name_things(texts):
    told = count(texts())
    assert told.words > 500
    assert told.rate < MOST_POINTING, f"{told.pointing} of {told.words} words point"


def test_help_texts_are_sentences():
    assert [option.name for option in OPTIONS.values() if not option.help.endswith(".")] == []


@pytest.mark.parametrize("law", LAWS)
def test_laws(law):
    assert [str(each) for each in found() if not LAWS[law](each.text)] == []


def test_log_lines_are_formatted_by_the_logger():
    """With ``%s`` and arguments: an f-string would be formatted even if the level is off."""
    assert [str(each) for each in found() if each.logged and "{}" in each.text] == []


@pytest.mark.parametrize(
    ("code", "text"),
    [("'plain'", "plain"), ("f'a {b!r} c'", "a {} c"), ("'a ' + b", "a {}"), ("f'a' 'b'", "ab"), ("a", None)],
)
def test_templates(code, text):
    assert template(ast.parse(code, mode="eval").body) == text
