"""Text in and out: tokenizer, detokenizer, stop strings, chat templates, against the libraries' own answers."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from preheat.errors import InvalidRequest, ModelError, SettingsError
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.detokenize import WindowDetokenizer
from preheat.frontend.messages import chat_messages
from preheat.frontend.stop import StopChecker, StopStrings
from preheat.frontend.tokenizer import Tokenizer
from tests.tokenizers import TEXT, byte_level, sentencepiece

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def saved(folder: Path, backend: Backend, **config: Any) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    backends = {"bytes": byte_level(), "pieces": sentencepiece(), "unstripped": sentencepiece(strip=False)}
    backends["metaspace"] = sentencepiece(metaspace=True)
    return {name: saved(root / name, backend) for name, backend in backends.items()}


ids = st.lists(st.integers(0, 420), max_size=40)


def run_of(tokenizer: Tokenizer, id: int) -> bool:
    """Return whether ``id`` is a byte token."""
    return re.fullmatch("<0x[0-9A-F]{2}>", tokenizer._backend.id_to_token(id) or "") is not None


def decoded(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """Return the library's ``decode``, with one exception.

    Characters in a run of byte tokens stay, whatever else is in the run.
    """
    ids = [id for id in ids if tokenizer._backend.id_to_token(id) and not (skip and id in tokenizer.special_ids)]
    head = tokenizer.encode("h", False)
    text = ""
    for is_run, group in groupby(ids, partial(run_of, tokenizer)):
        run = list(group)
        whole = tokenizer.decode(head + run, skip)[1:] if text else tokenizer.decode(run, skip)
        if is_run and "\ufffd" in whole:
            data, whole = bytes(int(tokenizer._backend.id_to_token(id)[1:-1], 16) for id in run), ""
            while data:
                size = next((n for n in (1, 2, 3, 4) if is_utf8(data[:n])), 0)
                whole += data[:size].decode() if size else "\ufffd"
                data = data[size or 1 :]
            if not text and tokenizer.decode([tokenizer._backend.token_to_id("▁")], skip) == "":
                whole = whole.removeprefix(" ")
        text += whole
    return text


def is_utf8(data: bytes) -> bool:
    with suppress(UnicodeDecodeError):
        return bool(data.decode())
    return False


@pytest.mark.parametrize("name", ["bytes", "pieces", "unstripped", "metaspace"])
@settings(max_examples=300, deadline=None)
@given(ids=ids, skip=st.booleans())
def test_deltas_join_to_the_whole_decode(
    tokenizers: dict[str, Tokenizer], name: str, ids: list[int], skip: bool
) -> None:
    tokenizer = tokenizers[name]
    detokenizer = tokenizer.detokenizer([], skip)
    deltas = [detokenizer.push(id) for id in ids]
    runs = name in ("pieces", "unstripped")
    wanted = decoded(tokenizer, ids, skip) if runs else tokenizer.decode(ids, skip)
    assert "".join(deltas) + detokenizer.finish() == wanted


@settings(max_examples=200, deadline=None)
@given(text=st.text("a 😀鱻é\n", max_size=12), prompt=st.sampled_from(["", "h"]))
def test_a_run_of_byte_tokens_is_sent_as_the_library_streams_it(
    tokenizers: dict[str, Tokenizer], text: str, prompt: str
) -> None:
    """A character is sent at the token where ``DecodeStream`` of tokenizers sends it.

    It needs no later token.
    """
    tokenizer = tokenizers["unstripped"]
    ids = [id for char in text for id in spelled(tokenizer, char)]
    stream, detokenizer = DecodeStream(skip_special_tokens=True), tokenizer.detokenizer([])
    for id in ids:
        assert detokenizer.push(id) == (stream.step(tokenizer._backend, id) or "")
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(("stop", "tokens"), [("鱻", 3), ("鱻鱻", 6), ("鱻é", 29)])
def test_a_stop_string_in_a_run_of_byte_tokens_ends_it(
    tokenizers: dict[str, Tokenizer], stop: str, tokens: int
) -> None:
    ids = [id for char in "鱻" * 9 + "é鱻" for id in spelled(tokenizers["unstripped"], char)]
    detokenizer, checker = tokenizers["unstripped"].detokenizer([]), StopChecker(StopStrings([stop]))
    shown, read = "", 0
    while not checker.found:
        shown += checker.push(detokenizer.push(ids[read]))
        read += 1
    assert (read, shown) == (tokens, ("鱻" * 9 + "é鱻").partition(stop)[0])


def spelled(tokenizer: Tokenizer, char: str) -> list[int]:
    words = [char] if char == "a" else [f"<0x{byte:02X}>" for byte in char.encode()]
    return [tokenizer._backend.token_to_id(word) for word in words]


@pytest.mark.parametrize("name", ["bytes", "pieces", "unstripped", "metaspace"])
@settings(max_examples=200, deadline=None)
@given(ids=ids, skip=st.booleans())
def test_a_stop_string_is_found_with_the_token_that_completes_it(
    tokenizers: dict[str, Tokenizer], name: str, ids: list[int], skip: bool
) -> None:
    """Certain text is not held back: at most the last three tokens wait for others."""
    tokenizer = tokenizers[name]
    detokenizer, sent = tokenizer.detokenizer([], skip), ""
    for end, id in enumerate(ids, 1):
        sent += detokenizer.push(id)
        early = tokenizer.detokenizer([], skip)
        certain = "".join(map(early.push, ids[: end - 3])) + early.finish() if end > 3 else ""
        assert len(sent) >= len(certain.rstrip("\ufffd"))  # the early end may cut a character


@pytest.mark.parametrize("skip", [True, False])
def test_the_cost_of_a_token_does_not_depend_on_its_position(tokenizers: dict[str, Tokenizer], skip: bool) -> None:
    """Nothing is decoded again and again.

    Neither a run of U+FFFD nor tokens without a text make a window grow.
    """
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return tokenizers["bytes"].decode(ids, skip)

    bad = tokenizers["bytes"].encode("é", False)[:1]
    for kind in ([0], bad, tokenizers["bytes"].encode("h", False)):
        detokenizer = WindowDetokenizer(decode, [])
        text = "".join(map(detokenizer.push, kind * 300)) + detokenizer.finish()
        assert text == tokenizers["bytes"].decode(kind * 300, skip)
    assert max(sizes) <= 12


@pytest.mark.parametrize("name", ["bytes", "pieces"])
@pytest.mark.parametrize("text", ["hello the 🦜👩‍👩‍👧 ñ", "a 漢字 b"])
def test_characters_are_never_split(tokenizers: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text.replace(" ", "▁") if name == "pieces" else text)
    detokenizer = tokenizer.detokenizer([])
    deltas = [*(detokenizer.push(id) for id in ids), detokenizer.finish()]
    assert "".join(deltas) == text and not any("\ufffd" in delta for delta in deltas)
    assert "".join(tokenizer.decode([id]) for id in ids) != text  # the control: token by token does split them


def test_other_decoders_go_through_a_window(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["metaspace"]
    ids = tokenizer.encode("the▁▁he▁a.▁b", False)
    detokenizer = tokenizer.detokenizer([])
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == tokenizer.decode(ids) == "the  he a. b"


@settings(max_examples=100, deadline=None)
@given(prompt=ids, output=ids)
def test_text_after_a_prompt_keeps_its_leading_space(
    tokenizers: dict[str, Tokenizer], prompt: list[int], output: list[int]
) -> None:
    tokenizer = tokenizers["pieces"]
    closed = [*prompt, tokenizer.encode("h", False)[0]]  # a prompt that does not end inside a character
    detokenizer = tokenizer.detokenizer(closed)
    text = "".join(map(detokenizer.push, output)) + detokenizer.finish()
    assert decoded(tokenizer, closed, True) + text == decoded(tokenizer, closed + output, True)


def test_special_tokens_and_ends(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    tokenizer = tokenizers["bytes"]
    assert tokenizer.encode("hi")[0] == 0 and tokenizer.encode("hi", False)[0] != 0
    assert tokenizer.eos_ids == [1] and {0, 1, 2} <= tokenizer.special_ids
    assert tokenizer.token_bytes(2) == b"<|im_start|>" and tokenizer.token_bytes(10**6) == b""
    saved(tmp_path, byte_level())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.5}')
    (tmp_path / "config.json").write_text('{"vocab_size": 512, "eos_token_id": 5}')
    loaded = Tokenizer(tmp_path)
    assert loaded.eos_ids == [1, 2, 7] and loaded.vocab_size == 512 and loaded.model.generation["temperature"] == 0.5
    with pytest.raises(InvalidRequest, match="character 1"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model"])
def test_a_tokenizer_in_another_format_is_told_what_to_convert(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=rf"has {name} and no tokenizer.json: convert it once, with transformers"):
        Tokenizer(tmp_path)


def test_transformers_agrees(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = saved(tmp_path, byte_level(), chat_template=TEMPLATE, tokenizer_class="PreTrainedTokenizerFast")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for text in TEXT:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    messages = [{"role": "user", "content": "<b> & 'x'"}, {"role": "assistant", "content": "y"}]
    for flag in (True, False):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=flag)
        assert ChatTemplate(ours).render(messages, add_generation_prompt=flag) == expected


@pytest.mark.parametrize("shown", ["m.content", "m.content | trim", "m.content.rstrip()", "m.content ~ '?'"])
@pytest.mark.parametrize("final", ["y", " y ", "y\n\n", "x", "a FINAL_MESSAGE_ENDS_HERE b "])
def test_transformers_agrees_on_continued_messages(tmp_path: Path, shown: str, final: str) -> None:
    transformers = pytest.importorskip("transformers")
    source = "{% for m in messages %}<{{ m.role }}>\n{{ " + shown + " }}</{{ m.role }}>\n{% endfor %}"
    ours = saved(tmp_path, byte_level(), chat_template=source, tokenizer_class="PreTrainedTokenizerFast")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": final}]
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert ChatTemplate(ours).render(messages, continue_final_message=True) == expected
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with_tools = ChatTemplate(ours, "{{ tools | tojson }}")
    expected = theirs.apply_chat_template(messages, tools, chat_template="{{ tools | tojson }}", tokenize=False)
    assert with_tools.render(messages, tools=tools) == expected


PLAIN, TOOLS = "plain {{ messages[0].content }}", "tools {{ tools | tojson }}{{ messages[0].content }}"
WEATHER = [{"type": "function", "function": {"name": "f", "description": "g", "parameters": {"type": "object"}}}]
NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]
OTHER = json.dumps({"chat_template": "elsewhere"})
PLACES: dict[str, tuple[object, dict[str, str]]] = {
    "one text": (PLAIN, {}),
    "a list": (NAMED, {}),
    "an object": ({"default": PLAIN, "tool_use": TOOLS, "rag": "{{"}, {}),
    "a file": (None, {"chat_template.jinja": PLAIN}),
    "files": (None, {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": TOOLS}),
    "files before a list": (NAMED, {"chat_template.jinja": "file {{ messages[0].content }}"}),
    "a folder alone": ("unread", {"additional_chat_templates/default.jinja": PLAIN,
                                  "additional_chat_templates/tool_use.jinja": TOOLS}),
    "a name in the folder replaces the file": (None, {"chat_template.jinja": "unread",
                                                      "additional_chat_templates/default.jinja": PLAIN}),
    "a processor's file is not the tokenizer's": (PLAIN, {"chat_template.json": OTHER, "processor_config.json": OTHER}),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_templates_are_found_where_transformers_finds_them(tmp_path: Path, place: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, files = PLACES[place]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    more = {} if config is None else {"chat_template": config}
    ours = ChatTemplate(saved(tmp_path, byte_level(), tokenizer_class="PreTrainedTokenizerFast", **more))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    messages = [{"role": "user", "content": "x"}]
    for tools in (None, WEATHER):
        assert ours.render(messages, tools=tools) == theirs.apply_chat_template(messages, tools, tokenize=False)
    ours.check()


def test_only_conversations_with_tools_have_the_template_for_tools(tmp_path: Path) -> None:
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text(TOOLS)
    template = ChatTemplate(saved(tmp_path, byte_level()))
    messages = [{"role": "user", "content": "x"}]
    assert template.source is None
    assert template.uses("tools", WEATHER) and not template.uses("tools")
    assert template.render(messages, tools=WEATHER).startswith("tools [")
    for none in (None, []):
        with pytest.raises(
            InvalidRequest, match=r"no chat template for conversations without tools; .*--chat-template"
        ):
            template.render(messages, tools=none)
    assert ChatTemplate(saved(tmp_path, byte_level()), "{{ 1 }}").render(messages, tools=WEATHER) == "1"
    (folder / "tool_use.jinja").write_text("{{ tools.nothing() }}")
    with pytest.raises(ModelError, match="the chat template tool_use fails on a single message"):
        ChatTemplate(saved(tmp_path, byte_level())).check()
    (folder / "tool_use.jinja").write_text("{% for")
    with pytest.raises(ModelError, match="the chat template is broken"):
        ChatTemplate(saved(tmp_path, byte_level()))


def test_a_model_that_sees_images_has_the_template_of_its_processor(tmp_path: Path) -> None:
    """As in transformers, a processor's template file comes first, and its config before the tokenizer's."""

    def found(image_token: str | None) -> str:
        return ChatTemplate(saved(tmp_path, byte_level(), chat_template="config"), None, image_token).render([])

    (tmp_path / "processor_config.json").write_text(json.dumps({"chat_template": "processor"}))
    assert (found("<image>"), found(None)) == ("processor", "config")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert (found("<image>"), found(None)) == ("file", "file")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "legacy"}))
    assert (found("<image>"), found(None)) == ("legacy", "file")


def test_a_template_that_is_none_is_named(tmp_path: Path) -> None:
    for bad in (5, [5], [{"name": "default"}], {"default": None}, ["x"]):
        with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template must be a text, or texts by name"):
            ChatTemplate(saved(tmp_path, byte_level(), chat_template=bad))


def test_defaults_are_variables_of_every_conversation(tokenizers: dict[str, Tokenizer]) -> None:
    source = "{{ mood }}{{ other }}{{ bos_token }}"
    template = ChatTemplate(tokenizers["bytes"], source, defaults={"mood": "calm", "bos_token": "!"})
    assert template.render([]) == "calm!"
    assert template.render([], variables={"mood": "wild", "other": 1}) == "wild1!"
    assert template.render([], variables={"mood": None}) == "None!"
    ChatTemplate(tokenizers["bytes"], "{{ mood.upper() }}", defaults={"mood": "x"}).check()
    with pytest.raises(ModelError, match="fails on a single message"):
        ChatTemplate(tokenizers["bytes"], "{{ mood.upper() }}").check()
    with pytest.raises(SettingsError, match="default_chat_template_kwargs cannot set messages, tools"):
        ChatTemplate(tokenizers["bytes"], source, defaults={"tools": [], "messages": []})


def test_messages_take_one_form() -> None:
    """Messages take one form: all names of a thought, arguments as objects, nothing empty."""
    call = {"id": "a", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"x": 1}'}}
    plain = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", name: "why", "content": None, "tool_calls": [call], "name": []}
        thoughts = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "why")
        expected = {"role": "assistant", **thoughts, "tool_calls": [plain]}
        assert chat_messages([message]) == [expected]
        assert chat_messages(chat_messages([message])) == [expected]
    assert chat_messages([{"role": "user", "content": "", "own": 0}]) == [{"role": "user", "content": "", "own": 0}]
    for bad in ("x", {"function": {}}, {"function": {"name": "f", "arguments": "{"}}):
        with pytest.raises(InvalidRequest, match=r"messages\[1\]\.tool_calls\[0\]"):
            chat_messages([{"role": "user"}, {"role": "assistant", "tool_calls": [bad]}])
    with pytest.raises(InvalidRequest, match=r"messages\[0\] must be an object"):
        chat_messages(["hello"])


def test_an_empty_message_is_continued_behind_its_header(tokenizers: dict[str, Tokenizer]) -> None:
    template = _template(tokenizers, "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }};{% endfor %}")
    messages = [{"role": "assistant", "content": ""}]
    assert template.render(messages, continue_final_message=True) == "<assistant>\n"
    with pytest.raises(InvalidRequest, match="exclude each other"):
        template.render(messages, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(InvalidRequest, match="needs a message"):
        template.render([], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        _template(tokenizers, "{{ messages | length }}").render(messages, continue_final_message=True)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def _template(tokenizers: dict[str, Tokenizer], source: str) -> ChatTemplate:
    return ChatTemplate(tokenizers["bytes"], source)


def test_templates(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = _template(tokenizers, "{{ bos_token }}{{ messages[0].content }}{{ flag | tojson }}")
    rendered = template.render([{"role": "user", "content": parts}], variables={"flag": "<é>"})
    assert rendered == '<s>a\nb"<é>"'
    (tmp_path / "t.jinja").write_text("  {% generation %}\nx{% endgeneration %}\n{{ strftime_now('%Y') | length }}")
    assert _template(tokenizers, str(tmp_path / "t.jinja")).render([]) == "x4"
    with pytest.raises(InvalidRequest, match="--chat-template"):
        ChatTemplate(tokenizers["bytes"]).render([])
    with pytest.raises(InvalidRequest, match="no tools here"):
        _template(tokenizers, "{{ raise_exception('no tools here') }}").render([])
    with pytest.raises(InvalidRequest, match="image_url"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    with pytest.raises(InvalidRequest, match="cannot be set"):
        template.render([], variables={"messages": []})
    with pytest.raises(InvalidRequest):  # the sandbox
        _template(tokenizers, "{{ ''.__class__.__mro__[1].__subclasses__()[:1] }}").render([])
    with pytest.raises(ModelError, match=r"nowhere\.jinja"):
        _template(tokenizers, "nowhere.jinja")


def naive_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return the text cut by the definition of stop strings.

    The match with the first end counts, the longest if several end there.
    """
    matches = [
        (start + len(stop), -len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    if not matches:
        return text, None
    end, length, stop = min(matches)
    return text[: end if include else end + length], stop


letters = st.text("ab", min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(
    deltas=st.lists(st.text("abc", max_size=4), max_size=10),
    stops=st.lists(letters, min_size=1, max_size=4),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_cuts(deltas: list[str], stops: list[str], include: bool) -> None:
    checker, shown = StopChecker(StopStrings(stops, include)), ""
    for delta in deltas:
        shown += checker.push(delta)
        whole, _ = naive_stop("".join(deltas), stops, include)
        assert whole.startswith(shown)  # nothing shown is ever taken back
        if checker.found:
            break
    shown += checker.finish() if not checker.found else ""
    assert (shown, checker.found) == naive_stop("".join(deltas), stops, include)


@settings(max_examples=300, deadline=None)
@given(
    before=st.text("ab", max_size=8),
    after=st.lists(st.text("ab", max_size=3), max_size=5),
    stops=st.lists(letters, min_size=1, max_size=3),
)
def test_unarmed_text_ends_nothing(before: str, after: list[str], stops: list[str]) -> None:
    checker = StopChecker(StopStrings(stops))
    shown = checker.push(before, armed=False)
    assert checker.found is None
    for delta in after:
        shown += checker.push(delta)
        if checker.found:
            break
    text = before + "".join(after)
    ends = [e for e in range(len(before) + 1, len(text) + 1) if any(text[:e].endswith(s) for s in stops)]
    if ends:
        stop = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
        assert checker.found == stop and len(shown) <= max(len(before), ends[0] - len(stop))
    else:
        assert checker.found is None and shown + checker.finish() == text
