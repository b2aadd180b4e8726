"""Hostile templates: at boot or on a message, their time and memory are bounded."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.errors import InvalidRequest, ModelError
from preheat.frontend import template_process, template_work
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.template_process import TemplateExhausted, TemplateFailed, TemplateRefused, render, variables
from preheat.frontend.tokenizer import Tokenizer
from preheat.utils.helper import Helpers, Kind
from tests.tokenizers import byte_level
from tests.waiting import until

ORDINARY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LAST = "messages[-1].content == 'now'"

HOSTILE = {
    "a product": "{{ ('a' * 1000000000)[:1] }}",
    "a product of lists": "{{ ([0] * 1000000000) | length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a wide text": "{{ 'a' | center(3000000000) }}",
    "a wide number": "{{ '%3000000000d' | format(1) }}",
    "a wide field": "{{ '{:3000000000}'.format(1) }}",
    "a method that fills": "{{ 'a'.ljust(3000000000) }}",
    "rows that are filled": "{{ [1] | batch(1000000000, 0) | list }}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "much output": "{% for a in range(99999) %}{{ 'abcdefghij' * 100000 }}{% endfor %}",
    "a text that doubles": (
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
    "a block that doubles": (
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set x %}{{ n.x }}{{ n.x }}{% endset %}"
        "{% set n.x = x %}{% endfor %}"
    ),
    "lists within lists": (
        "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}"
    ),
    "lists that are compared": (
        "{% set n = namespace(x=[], y=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
        "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}"
    ),
    "macros that call": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "much nonsense": "{{ lipsum(n=100000, min=1000, max=2000) }}",
    "an expression that goes back": "{{ ('a' * 40 + '!') | urlize }}{{ 'a' * 3000000000 }}",
}


@pytest.fixture(autouse=True, scope="module")
def strict():
    """Use processes with less time than real ones, so that the tests take less."""
    usual = template_process._helpers, template_process.CPU_SECONDS
    kind = Kind("preheat.frontend.template_work:make_work", b"", 0.25, template_process.MEMORY)
    template_process._helpers, template_process.CPU_SECONDS = Helpers(kind, template_process.AT_ONCE), 0.25
    yield
    template_process._helpers, template_process.CPU_SECONDS = usual


def largest_child() -> int:
    """Return the KiB of the largest child so far, including children of other tests."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped_and_the_next_one_rendered(name):
    known, before = {"messages": [{"role": "user", "content": "now"}]}, largest_child()
    with pytest.raises(TemplateFailed):  # exhausted, or by a limit of Jinja
        render(HOSTILE[name], known)
    assert render(ORDINARY, known) == "<user>now"
    assert largest_child() < max((template_process.MEMORY >> 10) + 200_000, before + 1)


def test_compiling_is_bounded_too():
    """Compiling is bounded too, as Jinja computes constants when it compiles."""
    with pytest.raises(TemplateExhausted):
        variables(HOSTILE["a power"])


def tokenizer(folder: Path, **config: object) -> Tokenizer:
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    return Tokenizer(folder)


def test_errors_at_boot_name_the_template_file_and_its_fault(tmp_path):
    inside, beside = tmp_path / "inside", tmp_path / "beside"
    inside.mkdir()
    beside.mkdir()
    memory, seconds = "{% set x = messages | list * 1000000000 %}", HOSTILE["nested loops"]
    with pytest.raises(ModelError, match=rf"{inside}/tokenizer_config\.json .*took more than 0.25 s of CPU time; corr"):
        ChatTemplate(tokenizer(inside, chat_template=seconds)).check()
    plain = tokenizer(beside)
    (beside / "chat_template.jinja").write_text(memory)
    with pytest.raises(ModelError, match=rf"{beside}/chat_template\.jinja .*took more than 512 MiB; correct it, or"):
        ChatTemplate(plain).check()
    (beside / "chat_template.jinja").write_text(ORDINARY)
    (beside / "additional_chat_templates").mkdir()
    (beside / "additional_chat_templates" / "tool_use.jinja").write_text(seconds)
    with pytest.raises(ModelError, match=r"additional_chat_templates/tool_use\.jinja .* 0\.25 s of CPU time"):
        ChatTemplate(plain).check()
    given = tmp_path / "given.jinja"
    given.write_text(seconds)
    with pytest.raises(ModelError, match=rf"{given} .* 0.25 s of CPU time"):
        ChatTemplate(plain, str(given)).check()
    with pytest.raises(ModelError, match=r"--chat-template: the chat template cannot be compiled: it took more than"):
        ChatTemplate(plain, HOSTILE["a power"])


def test_one_that_waits_for_a_message_is_an_error_of_its_request(tmp_path):
    source = f"{{% if {LAST} %}}{HOSTILE['nested loops']}{{% endif %}}{ORDINARY}"
    template = ChatTemplate(tokenizer(tmp_path, chat_template=source))
    template.check()
    assert template.render([{"role": "user", "content": "later"}]) == "<user>later"
    with pytest.raises(InvalidRequest, match=r"config\.json cannot show these messages: it took more than 0.25 s"):
        template.render([{"role": "user", "content": "now"}])
    assert template.render([{"role": "user", "content": "later"}]) == "<user>later"


def test_another_is_rendered_meanwhile():
    ended = []

    def run() -> None:
        with pytest.raises(TemplateExhausted):
            render(HOSTILE["nested loops"], {})
        ended.append("slow")

    thread = threading.Thread(target=run)
    template_process.warm_up(ORDINARY)
    thread.start()
    assert until(lambda: template_process._helpers._idle.qsize() < template_process.AT_ONCE)
    for _ in range(3):
        assert render(ORDINARY, {"messages": [{"role": "a", "content": "b"}]}) == "<a>b"
    ended.append("quick")
    thread.join()
    assert ended == ["quick", "slow"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(value=JSON, text=st.text(st.characters()))
def test_a_process_renders_as_this_process_would(value, text):
    """A process renders as this one would: integers of any size, lone surrogates, order of keys."""
    known = {"value": value, "text": text}
    source = "{{ text }}|{{ value | tojson }}|{{ value }}|{{ text | length }}"
    assert render(source, known) == template_work._compiled(source).render(known)


def test_errors_say_the_same():
    with pytest.raises(TemplateRefused, match=r"^no such role$"):
        render("{{ raise_exception('no such role') }}", {})
    with pytest.raises(TemplateFailed, match=r"^'x' is undefined$") as failed:
        render("{{ x.y }}", {})
    assert not isinstance(failed.value, TemplateRefused)
    with pytest.raises(TemplateFailed, match=r"^line 2: "):
        variables("\n{% for %}")
    with pytest.raises(TemplateFailed) as long:
        render("{{ raise_exception('x' * 1000000) }}", {})
    assert len(str(long.value)) == 1000
    with pytest.raises(InvalidRequest, match="plain data"):
        render(ORDINARY, {"x": lambda: 1})


def test_the_variables_that_it_looks_at():
    assert variables("{% set a = b %}{{ a }}{{ c.d }}{% for e in f %}{{ e }}{% endfor %}") == {"b", "c", "f"}


def test_this_process_knows_nothing_of_jinja():
    code = "import sys, preheat.frontend.chat_template; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
