"""Calls of tools as models write them, by the names of their parsers.

Each entry has texts, and the calls in them.
"""

from __future__ import annotations

from typing import Any

OSLO = ("weather", {"city": "Oslo"})
BOTH = ("weather", {"city": "Oslo", "days": 3})
CASES: dict[str, list[tuple[str, str, list[tuple[str, Any]]]]] = {
    "deepseek_v3": [
        (('Now.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}\n'
         '```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>'
         "<｜tool▁calls▁end｜>"), "Now.\n", [OSLO, ("f", {})]),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜> ok", "ok", [("f", {})]),
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": {"b"', "",
         [("f", {"a": {}})]),
        ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```",
         "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```", []),
        ("<｜tool▁call▁begin｜>function f {}", "<｜tool▁call▁begin｜>function f {}", []),
    ],
    "deepseek_v31": [
        (('Well<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
         '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "<｜tool▁call▁end｜>"}<｜tool▁call▁end｜><｜tool▁calls▁end｜> so'),
         "Well so", [OSLO, ("f", {"a": "<｜tool▁call▁end｜>"})]),
        ("<｜tool▁calls▁begin｜>weather", "<｜tool▁calls▁begin｜>weather", []),
        ("<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}<｜tool▁call▁begin｜>g<｜tool▁sep｜> {}",
         "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}", [("g", {})]),
        ("<｜tool▁call▁begin｜><｜tool▁sep｜>{}", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}", []),
    ],
    "gemma4": [
        ('<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>', "", [BOTH]),
        (('So. <|tool_call>call:a.b-c{}<tool_call|>'
         '<|tool_call>call:f{a:{b:[1,<|"|>x, ]<|"|>,[true]],c: null}}<tool_call|>!'),
         "So. !", [("a.b-c", {}), ("f", {"a": {"b": [1, "x, ]", [True]], "c": None}})]),
        ('<|tool_call>call:f{a:{<|"|>3<|"|>:<|"|>new<|"|>},b:New York , a:-1.5e2}', "", [("f", {"a": -150.0,
         "b": "New York"})]),
        ('<|tool_call>call:weather{city:<|"|>Os', "", [("weather", {"city": "Os"})]),
        ('<|tool_call>call:weather{city:<|"|>Oslo<tool_call|> ok', " ok", [OSLO]),
        ("<|tool_call>call:f{a:1e999,b:}", "", [("f", {"a": float("inf"), "b": ""})]),
        ("<|tool_call>call:f", "<|tool_call>call:f", []),
        ("<|tool_call>call me {}", "<|tool_call>call me {}", []),
        ("<|tool_call>call:f{a:[1,]trailing}", "trailing}", [("f", {"a": [1]})]),
    ],
    "glm45": [
        (("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
         "<arg_value>3</arg_value>\n</tool_call>"), "", [BOTH]),
        ("Yes.<tool_call>f</tool_call><tool_call>weather<arg_key>city</arg_key><arg_value> A\n</arg_value></tool_call>",
         "Yes.", [("f", {}), ("weather", {"city": " A\n"})]),
        ("<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo<arg_key>days</arg_key><arg_value>3</tool_call>", "",
         [BOTH]),
        ("<tool_call>weather<arg_key>city<arg_value>Bergen</arg_value><arg_key>city</arg_key><arg_value>Oslo</arg_va",
         "",
         [OSLO]),
        ("<tool_call>weather<arg_key>days</arg_key></tool_call> ok", " ok", [("weather", {})]),
        ("<tool_call>get the weather</tool_call>", "<tool_call>get the weather</tool_call>", []),
        ("<tool_call>weather\n", "<tool_call>weather\n", []),
    ],
    "granite": [
        ('<|tool_call|> [{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "f", "arguments": {}}]', "",
         [OSLO, ("f", {})]),
        ('So:\n<tool_call>[{"arguments": {"city": "Oslo"}, "name": "weather"}] Done', "So:\n Done", [OSLO]),
        ('[{"name": "weather", "arguments": {"city": "Oslo"}}]', "", [OSLO]),
        ('[{"name": "Bob"}]', '[{"name": "Bob"}]', []),
        ('<|tool_call|>{"name": "f", "arguments": {}}', '<|tool_call|>{"name": "f", "arguments": {}}', []),
        ("<tool_call>[", "<tool_call>[", []),
    ],
    "granite-20b-fc": [
        ('<function_call> {"name": "weather", "arguments": {"city": "Oslo"}}\n<function_call> {"name": "f"}\nOk',
         "\nOk",
         [OSLO, ("f", {})]),
        ('<function_call> [{"name": "f", "arguments": {}}]', '<function_call> [{"name": "f", "arguments": {}}]', []),
        ('{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    ],
    "hermes": [
        ("Hello", "Hello", []),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', "", [OSLO]),
        ('\n\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}', "", [OSLO]),  # it is not closed
        ('Wait.\n<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>\n', "Wait.\n", [OSLO]),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g", "arguments": {"a": "<tool_call>"}}',
         "", [("f", {}), ("g", {"a": "<tool_call>"})]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "}\\"]"}]}, "id": 7}</tool_call> Done', " Done",
         [("f", {"a": [1, {"b": '}"]'}]})]),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        # The arguments may be a string that holds the object, as Granite 4 writes them.
        ('<tool_call> {"name": "f", "arguments": "{\\"a\\": [1]}"} </tool_call> so', " so", [("f", {"a": [1]})]),
        ('<tool_call>{"arguments": " {\\"a\\": 1, \\"a\\": 2", "name": "f"}', "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": "no object"}', '<tool_call>{"name": "f", "arguments": "no object"}',
         []),
        ('<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", {})]),  # cut off by max_tokens
        ("1 < 2 <tool", "1 < 2 <tool", []),
        ("  ", "  ", []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1 "b": [2,], "a": {"c": 3}}}</tool_call> ok', " ok",
         [("f", {"a": 1, "b": [2]})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\d\n", "b": None, "c": oops}}</tool_call>', "",
         [("f", {"a": "\\d\n", "b": None})]),
        (r'<tool_call>{"name": "\ud800", "arguments": {}}', "", [("\ufffd", {})]),
    ],
    "internlm": [
        ('Look <|action_start|><|plugin|>{"name": "weather", "parameters": {"city": "Oslo"}}<|action_end|>', "Look ",
         [OSLO]),
        ('<|action_start|> <|plugin|>\n{"name": "f", "parameters": {"a": ', "", [("f", {})]),
        ('<|action_start|><|interpreter|>print()<|action_end|>', "<|action_start|><|interpreter|>print()<|action_end|>",
         []),
    ],
    "jamba": [
        ((' <tool_calls>[\n    {"name": "weather", "arguments": {"city": "Oslo"}},\n    {"name": "f", "arguments": {}}'
         "\n]</tool_calls>\nThere"), "\nThere", [OSLO, ("f", {})]),
        ("<tool_calls>[]</tool_calls>", "<tool_calls>[]</tool_calls>", []),
        ('<tool_calls>[{"name": "f", "arguments": {"a": [', "", [("f", {"a": []})]),
    ],
    "kimi_k2": [
        (('I look. <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>'
         '{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|> a.b:12 <|tool_call_argument_begin|>{}<|tool_call_end|>'
         "<|tool_calls_section_end|> So"), "I look.  So", [OSLO, ("a.b", {})]),
        ("<|tool_call_begin|>functions.f.0<|tool_call_argument_begin|>{}",
         "<|tool_call_begin|>functions.f.0<|tool_call_argument_begin|>{}", []),
        ('<|tool_call_begin|>f:0<|tool_call_argument_begin|> {"a": "x', "", [("f", {"a": "x"})]),
        ("<|tool_calls_section_begin|>Well", "<|tool_calls_section_begin|>Well", []),
    ],
    "llama3_json": [
        ('{"name": "weather", "parameters": {"city": "Oslo"}}', "", [OSLO]),
        ('<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}', "", [OSLO]),
        (' {"name": "f", "parameters": {}}; {"name": "weather", "arguments": {"city": "Oslo"}}', "", [("f", {}), OSLO]),
        ('{"name": "f", "parameters": {}}\n{"name": "weather", "arguments": {"city": "Oslo"}}', "", [("f", {}), OSLO]),
        ('{"answer": 42}', '{"answer": 42}', []),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ('Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ('Now <|python_tag|>{"name": "f", "parameters": {}} ok', "Now ok", [("f", {})]),
    ],
    "minimax_m2": [
        (('<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
         '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="f"></invoke>\n</minimax:tool_call> ok'),
         " ok", [BOTH, ("f", {})]),
        ('See <minimax:tool_call><invoke name="weather"><parameter name="city"> a\n</parameter></invoke>', "See ",
         [("weather", {"city": " a\n"})]),
        ('<minimax:tool_call><invoke name="weather"><parameter name="city">Oslo<parameter name="days">3</invoke>', "",
         [BOTH]),
        ('<invoke name="f"></invoke>', '<invoke name="f"></invoke>', []),
        ('<minimax:tool_call><invoke name="f></invoke>', '<minimax:tool_call><invoke name="f></invoke>', []),
        ('<minimax:tool_call><invoke name="f"></invoke><invoke name=""></minimax:tool_call>',
         '<invoke name=""></minimax:tool_call>', [("f", {})]),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "f", "arguments": {}}]', "",
         [OSLO, ("f", {})]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]f{}', "", [OSLO, ("f", {})]),
        ('So: [TOOL_CALLS] weather[CALL_ID]abc123def[ARGS]{"city": "Oslo"}', "So: ", [OSLO]),
        ("[TOOL_CALLS] what?", "[TOOL_CALLS] what?", []),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ],
    "olmo3": [
        ("<function_calls>weather(city='Oslo')\nf(a=true, b=null)\n</function_calls>", "",
         [OSLO, ("f", {"a": True, "b": None})]),
        ("Look:\n<function_calls>\nweather(city='Oslo')", "Look:\n", [OSLO]),  # it is not closed
        ("<function_calls>f()</function_calls>\n<function_calls>g(a={'b': [False]})</function_calls> Done", " Done",
         [("f", {}), ("g", {"a": {"b": [False]}})]),
        ("<function_calls>nothing</function_calls>", "<function_calls>nothing</function_calls>", []),
        ("[f(a=1)]", "[f(a=1)]", []),
    ],
    "openai": [
        ('<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>', "", [OSLO]),
        (('<|channel|>analysis<|message|>It is { "a": 1 }.<|end|><|start|>assistant<|channel|>commentary<|message|>'
         "I look.<|end|><|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
         '\n{"city": "Oslo", "days": 3}<|call|>'), "I look.", [BOTH]),
        (("<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.\n<|return|>"),
         "One.\nTwo.\n", []),
        (('<|channel|>commentary to=functions.f<|message|>{"a": 1<|end|><|start|>assistant<|channel|>commentary '
         'to=functions.a.b<|constrain|>json<|message|>{}<|call|>'), "", [("f", {}), ("a.b", {})]),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "", []),
        ("<|channel|>commentary to=functions.f code<|message|> print(1)<|call|>", " print(1)", []),
        ("<|channel|>commentary to=functions.f", "", []),  # cut off by max_tokens
        ("<|channel|>commentary to=functions.f<|message|>", "", []),
        (' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": "x', "", [("f", {"a": "x"})]),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}", []),
        ("Hello", "Hello", []),
        (" to be<|end|><|start|>assistant<|channel|>final<|message|>or not", " to be\nor not", []),
        # The marks of a message and of its end may be missing.
        ("<|channel|>final Hello<|return|>", "Hello", []),
        ("<|channel|>analysis<|message|>Well<|channel|>final<|message|>Yes", "Yes", []),
        ("<|start|>assistant<|message|>Yes<|end|> no", "Yes\nno", []),
        ("<|chan", "<|chan", []),
    ],
    "phi4_mini_json": [
        ('functools[\n {"name": "weather", "arguments": {"city": "Oslo"}},\n {"name": "f", "arguments": {}}\n] ok',
         " ok",
         [OSLO, ("f", {})]),
        ("import functools\nfunctools.cache", "import functools\nfunctools.cache", []),
        ("functools[] is text", "functools[] is text", []),
        ('functools{"name": "f"}', 'functools{"name": "f"}', []),
        ('Use functools[{"name": "f", "arguments": {', "Use ", [("f", {})]),
    ],
    "pythonic": [
        ("[weather(city='Oslo')]", "", [OSLO]),
        ('[weather(city="Oslo", days=-3), f(a={"b": [1.5, None, true]}, c=")]")]', "",
         [("weather", {"city": "Oslo", "days": -3}), ("f", {"a": {"b": [1.5, None, True]}, "c": ")]"})]),
        ("<|python_start|>[a.b()]<|python_end|>", "", [("a.b", {})]),
        ("[link](http://x)", "[link](http://x)", []),
        ("[1, 2]", "[1, 2]", []),
        ("[f(x)]", "[f(x)]", []),
        ("[f(x=open('y'))]", "[f(x=open('y'))]", []),
        ("[f(a=1), then", "then", [("f", {"a": 1})]),
        ("Text [f()]", "Text [f()]", []),
        ("Text <|python_start|>[f(a=1, a=2)]<|python_end|>", "Text ", [("f", {"a": 2})]),
        ("<function_calls>f()\nweather(city='Oslo')</function_calls>", "", [("f", {}), OSLO]),
        ("[f(a={1: 'x', '1': 'y', null: 2})]", "", [("f", {"a": {"1": "y", "null": 2}})]),
        ("[f(a={(1, 2): 3})]", "[f(a={(1, 2): 3})]", []),
        ("[f(a=1e999)]", "[f(a=1e999)]", []),  # JSON has no infinity
        ("[f(**{'a': 1})]", "[f(**{'a': 1})]", []),
        (r"[f(a='\ud800')]", "", [("f", {"a": "\ud800"})]),
    ],
    "qwen3_coder": [
        ("<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter><parameter=days>3</parameter></function>",
         "", [("weather", {"city": "Oslo", "days": 3})]),
        ("Sure.<function=weather><parameter=city>42</parameter></function>", "Sure.", [("weather", {"city": "42"})]),
        ("<tool_call><function=f></function></tool_call>\n<function=g><parameter=x>a\n<b>\n</parameter></function>", "",
         [("f", {}), ("g", {"x": "a\n<b>"})]),
        ("<tool_call><function=weather><parameter=days>many</parameter></function>", "",
         [("weather", {"days": "many"})]),
        ("<tool_call><function=weather><parameter=city>Os", "", [("weather", {"city": "Os"})]),
        ("<tool_call>no</tool_call> <function=", "<tool_call>no</tool_call> <function=", []),
        # Each of the tags may be missing, and several.
        ("<tool_call><function=weather><parameter=city>Oslo<parameter=days>3</function></tool_call>", "", [BOTH]),
        ("<tool_call><function=weather><parameter=days>3</parameter><parameter=city>Oslo</function></tool_call> ok",
         " ok", [BOTH]),
        ("<tool_call><function=weather><parameter=days>3</parameter><parameter=city>Oslo</parameter></tool_call> ok",
         " ok", [BOTH]),
        ("<tool_call><function=weather><parameter=days>3<parameter=city>Oslo</tool_call> ok", " ok", [BOTH]),
        ("<function=weather>\n<parameter=city>\nOslo\n</parameter>\nThat was it.", "That was it.", [OSLO]),
        ("<tool_call>\n<function=f>\n</tool_call>\n<tool_call>\n<function=g>", "", [("f", {}), ("g", {})]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n<tool_call>\n<function=g></function>", "",
         [OSLO, ("g", {})]),
        ("<tool_call><function=weather><parameter=days\n3</parameter><parameter=city>Oslo</parameter></function>", "",
         [OSLO]),
        ("<function=weather><parameter=city>Bergen</parameter><parameter=city>Oslo</parameter></function>", "", [OSLO]),
        ("<function=weather><parameter=city>Oslo</para", "", [OSLO]),
        ("<function=f\n<parameter=a>1</parameter>", "<function=f\n<parameter=a>1</parameter>", []),
    ],
    "seed_oss": [
        (("Yes.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>3</parameter>\n"
         "</function>\n</seed:tool_call>"), "Yes.\n", [BOTH]),
        ("<seed:tool_call><function=f></function></seed:tool_call>\n<seed:tool_call><function=g></function>", "",
         [("f", {}), ("g", {})]),
        ("<seed:tool_call>no</seed:tool_call>", "<seed:tool_call>no</seed:tool_call>", []),
        ("<seed:tool_call>\n<function=weather>\n<parameter=city>\nOslo\n<seed:tool_call>\n<function=g>", "",
         [OSLO, ("g", {})]),
    ],
    "step3": [
        (('<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">'
         '<steptml:parameter name="city">Oslo</steptml:parameter><steptml:parameter name="days"> 3 </steptml:parameter>'
         '</steptml:invoke><｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜>function<｜tool_sep｜>f-g\n'
         '<steptml:invoke name="f-g"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>\nDone'), "\nDone",
         [BOTH, ("f-g", {})]),
        ('I <｜tool_call_begin｜><steptml:invoke name="weather"><steptml:parameter name="city">  Oslo', "I ",
         [("weather", {"city": "  Oslo"})]),
        ("<｜tool_calls_begin｜>function<｜tool_sep｜>", "<｜tool_calls_begin｜>function<｜tool_sep｜>", []),
        ('<steptml:invoke name="f"></steptml:invoke>', '<steptml:invoke name="f"></steptml:invoke>', []),
    ],
    "xlam": [
        ('[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "f", "arguments": {}}]', "", [OSLO, ("f", {})]),
        ('Here:\n```json\n[{"name": "weather", "arguments": {"city": "Oslo"}}]\n```', "Here:\n", [OSLO]),
        ('Here:[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]', "Here:", [OSLO]),
        ('Here:<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_call> Then', "Here: Then", [OSLO]),
        ('[{"name": "Bob"}]', '[{"name": "Bob"}]', []),
        ('```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
        ("```\ncode\n```", "```\ncode\n```", []),
    ],
}  # fmt: skip
CASES |= {
    name: CASES[same]
    for name, same in {
        "ernie45": "hermes", "glm47": "glm45", "granite4": "hermes", "hunyuan_a13b": "jamba",
        "llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "qwen3_xml": "qwen3_coder",
    }.items()
}  # fmt: skip
"""Texts, their content and their calls."""

HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
JSON_CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
GLM45 = "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
TAGS = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
CALLS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "ernie45": HERMES,
    "gemma4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>',
    "glm45": GLM45,
    "glm47": GLM45,
    "granite": f"<|tool_call|>[{JSON_CALL}]",
    "granite-20b-fc": f"<function_call> {JSON_CALL}",
    "granite4": HERMES,
    "hermes": HERMES,
    "hunyuan_a13b": f"<tool_calls>[{JSON_CALL}]</tool_calls>",
    "internlm": '<|action_start|><|plugin|>{"name": "weather", "parameters": {"city": "Oslo"}}<|action_end|>',
    "jamba": f"<tool_calls>[{JSON_CALL}]</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
    "llama3_json": f"<|python_tag|>{JSON_CALL}",
    "llama4_json": f"<|python_tag|>{JSON_CALL}",
    "llama4_pythonic": '<|python_start|>[weather(city="Oslo")]<|python_end|>',
    "minimax_m2": '<minimax:tool_call><invoke name="weather"><parameter name="city">Oslo</parameter></invoke>'
    "</minimax:tool_call>",
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
    "olmo3": '<function_calls>weather(city="Oslo")</function_calls>',
    "openai": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
    "phi4_mini_json": f"functools[{JSON_CALL}]",
    "pythonic": '<|python_start|>[weather(city="Oslo")]<|python_end|>',
    "qwen3_coder": TAGS,
    "qwen3_xml": TAGS,
    "seed_oss": TAGS.replace("tool_call>", "seed:tool_call>"),
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="weather"><steptml:parameter name="city">'
    "Oslo</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
    "xlam": f"[TOOL_CALLS][{JSON_CALL}]",
}
"""One call each, of the tool weather with the city Oslo.

It counts wherever it is in an answer.
"""
