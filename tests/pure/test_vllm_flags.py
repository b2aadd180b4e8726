"""Command lines, files and variables that were made for vLLM: each name in them has an answer."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.cli.common import load
from preheat.cli.main import _parser, _values
from preheat.errors import SettingsError
from preheat.options import environment
from preheat.options.command_words import dashed, plain_words
from preheat.options.options import parse_count
from preheat.options.vllm_flags import ALWAYS, FOREIGN, INSTEAD, REFUSED, SETS, SHORT, UNUSED
from preheat.options.vllm_variables import VARIABLES, why_unused
from preheat.settings import OPTIONS, Settings
from preheat.utils.text import misspelled
from tests.command_lines import pairs

DATA = Path(__file__).parent / "vllm"
PAGES = ("from-vllm.md", "from-others.md")
FLAGS = [
    word for line in (DATA / "flags.txt").read_text().splitlines() if not line.startswith("#") for word in line.split()
]
OF_OURS = {opt.flag for opt in OPTIONS.values()}


def recipes() -> list[tuple[str, str]]:
    """Return each line, and the reason of its refusal, if any."""
    found: list[tuple[str, str]] = []
    for line in (DATA / "recipes.txt").read_text().splitlines():
        if line.startswith("    "):
            found[-1] = (found[-1][0], line.strip())
        elif line and not line.startswith("#"):
            found.append((line, ""))
    return found


@pytest.fixture(scope="module", autouse=True)
def one_parser() -> Iterator[None]:
    """Use one parser for all lines of this file: making one takes longer than parsing a line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[_values.__module__], "_parser", cache(_parser))
        yield


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "QUANT_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    environment.warn.cache_clear()


def settings(*words: str) -> Settings:
    """Return the settings of ``preheat serve`` with these words."""
    values = _values(["serve", *map(dashed, words)])
    values.pop("run")
    return load(values)


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_of_vllm_is_an_option_or_a_row(flag: str) -> None:
    name = flag[2:].replace("-", "_")
    assert (name in OPTIONS) != (name in FOREIGN)


@pytest.mark.parametrize("name", sorted(set(FOREIGN)))
def test_each_row_answers_the_parser(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each row answers with an odd value: a refused flag gives its reason, an unused flag warns."""
    row = FOREIGN[name]
    given = [] if row.switch else ["7"]
    if row.verdict == "refused":
        with pytest.raises(SettingsError, match=re.escape(row.says)):
            settings("m", row.flag, *given)
        for taken in row.accepted:
            assert settings("m", row.flag, taken) == settings("m")
        if row.switch:
            assert settings("m", f"--no-{row.flag[2:]}") == settings("m")
    elif row.verdict != "sets":
        with caplog.at_level(logging.WARNING):
            assert settings("m", row.flag, *given) == settings("m")
        assert [record.getMessage() for record in caplog.records] == [f"{row.flag} has no effect: {row.says}"] * (
            row.verdict == "unused"
        )


def test_the_table_is_one() -> None:
    """No flag has two rows, or a row and an option.

    Options set or named by a row exist.
    """
    words = [
        word.partition("=")[0] for table in (SETS, ALWAYS, UNUSED, REFUSED) for word in " ".join(table.values()).split()
    ]
    assert len(words) == len(set(words)) == len(FOREIGN)
    assert not set(words) & OF_OURS
    assert {row.says.partition(".")[0] for row in FOREIGN.values() if row.verdict == "sets"} <= OPTIONS.keys()
    named = {flag for row in FOREIGN.values() for flag in re.findall(r"--[a-z][a-z-]+", row.says)}
    assert named
    assert named <= OF_OURS
    assert set(INSTEAD.values()) <= OF_OURS
    assert set(SHORT.values()) <= OF_OURS | set(words)
    variables = {name for row in FOREIGN.values() for name in re.findall(r"VLLM_[A-Z_]+[A-Z]", row.says)}
    assert variables <= {name for opt in OPTIONS.values() for name in opt.env_names} | {"VLLM_DECODE_BS_BUCKET"}


@pytest.mark.parametrize(("line", "reason"), recipes(), ids=lambda text: text[:60])
def test_recipes_start_or_say_why_not(line: str, reason: str) -> None:
    words = shlex.split(line)
    if reason:
        with pytest.raises(SettingsError, match=re.escape(reason)):
            settings(*words)
    else:
        assert settings(*words).model == words[0]


def test_there_are_enough_recipes() -> None:
    assert sum(not reason for _, reason in recipes()) >= 40


@pytest.mark.parametrize(("theirs", "ours"), [pair for page in PAGES for pair in pairs(page)])
def test_lines_of_the_pages_are_right(theirs: str, ours: str) -> None:
    """Our command line starts, and differs from vLLM's only where vLLM's would not start."""
    program, command, *words = shlex.split(ours)
    assert (program, command in {"serve", "run-batch"}) == ("preheat", True)
    if command == "run-batch":
        return
    made = settings(*words)
    if not theirs.startswith("vllm serve"):
        return
    known = shlex.split(theirs)[2:]
    if known == words:
        return
    assert set(words) < set(known)
    with pytest.raises(SettingsError):
        settings(*known)
    assert made.model == known[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-tp 2 -pp=1 -dp 2 -q fp8", {"tensor_parallel_size": 2, "data_parallel_size": 2, "quantization": "fp8"}),
        ("--max-model-len 1.5k --max-num-batched-tokens=2K", {"max_model_len": 1500, "max_num_batched_tokens": 2048}),
        ("--max-model-len auto", {"max_model_len": None}),
        ("--max-model-len -1", {"max_model_len": None}),
        ("--kv_cache_memory_bytes 3G", {"kv_cache_memory_bytes": 3 * 2**30}),
        ("--enforce-eager true --enable-prefix-caching False", {"enforce_eager": True, "enable_prefix_caching": False}),
        ("--enable-chunked-prefill=false", {"enable_chunked_prefill": False}),
        ("--max-num-queued-reqs 9", {"max_queued_requests": 9}),
        ("--hf-overrides.rope_theta 5e5", {"hf_overrides": {"rope_theta": 5e5}}),
        (
            '--hf-overrides {"a":{"b":1}} --hf_overrides.a.c_d x --hf-overrides.l+ 1 --hf-overrides.l+=y',
            {"hf_overrides": {"a": {"b": 1, "c_d": "x"}, "l": [1, "y"]}},
        ),
        ("--rope-theta 2 --hf-overrides.x 1", {"hf_overrides": {"rope_theta": 2, "x": 1}}),
        (
            "-sc.method ngram -sc.num_speculative_tokens 3",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        (
            "--spec-method ngram --spec-tokens 2",
            {"speculative_config": {"method": "ngram"}, "num_speculative_tokens": 2},
        ),
        ("--guided-decoding-backend guidance", {"structured_outputs_config": {"backend": "guidance"}}),
        ('--allowed-methods ["GET","POST"]', {"allowed_methods": ("GET", "POST")}),
        ("--allowed-headers a b", {"allowed_headers": ("a", "b")}),
    ],
)
def test_forms_of_vllm_are_understood(line: str, expected: dict[str, Any]) -> None:
    made = settings("m", *line.split())
    assert {name: getattr(made, name) for name in expected} == expected
    assert made == Settings.load({"model": "m", **expected})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-model-len 1.5K", "'1.5K' is not a whole number"),
        ("--max-model-len 1/3k", "is not a whole number"),
        ("--max-num-seqs auto", "'auto' is not a whole number"),
        ("--hf-overrides.a", "--hf-overrides.a needs a value after it"),
        ("--hf-overrides 3 --hf-overrides.a 1", "'3' is not a JSON object"),
        ("--kernel-config.moe_backend triton", "the plan chooses kernels"),
        ("--max-num-seqs.a 1", "is not a whole number"),
        ("--nnodes 2", "--nnodes 2 is not 1: ranks are"),
        ("--tool-call-parser.x 1", "is not one of"),
        ("-n 2", "--nnodes 2 is not 1"),
        ("-ep", "enable_expert_parallel deals experts to ranks, and there is one: raise tensor_parallel_size"),
        ("--enable-eplb", "--enable-eplb: experts are dealt in order to the ranks"),
        ("--attention-backend", "--attention-backend: the plan chooses kernels"),
        ("--distributed-executor-backend uni -tp 2", "uni runs one rank"),
    ],
)
def test_senseless_flags_are_refused_with_the_reason(line: str, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        settings("m", *line.split())


LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "a b", "--x", "1", "a=b.c"])
KEYS = st.sampled_from(["a", "b_c", "D", "e1"])
INNER = st.dictionaries(KEYS, LEAVES | st.lists(LEAVES, max_size=2), min_size=1, max_size=3)
OBJECTS = st.dictionaries(KEYS, LEAVES | INNER, min_size=1, max_size=3)


def dotted(value: object, path: str) -> list[str]:
    """Return the words that give an object by its keys."""
    if isinstance(value, dict):
        return [word for key, each in value.items() for word in dotted(each, f"{path}.{key}")]
    return [path, json.dumps(value)]


@given(OBJECTS)
def test_an_object_by_its_keys_is_the_object(value: dict[str, Any]) -> None:
    words = plain_words(["--a", "1", *dotted(value, "--hf-overrides"), "--last"], ())
    assert [words[0], words[1], words[-1]] == ["--a", "1", "--last"]
    assert json.loads(words[2].removeprefix("--hf-overrides=")) == value
    (given_whole,) = plain_words([f"--hf-overrides={json.dumps(value)}", *dotted(value, "--hf-overrides")], ())
    assert json.loads(given_whole.partition("=")[2]).keys() == value.keys()


@given(st.lists(st.text(min_size=1).filter(lambda word: not word.startswith("-"))))
def test_words_that_are_no_flags_stay_as_they_are(words: list[str]) -> None:
    assert plain_words(words, ("--x",)) == words


@given(st.integers(1, 10**6), st.sampled_from("kmgtKMGT"))
def test_short_numbers_are_powers(count: int, letter: str) -> None:
    base, power = (1000 if letter.islower() else 1024), "kmgt".index(letter.lower()) + 1
    assert parse_count(f"{count}{letter}") == count * base**power
    assert parse_count(str(count)) == count
    assert parse_count(f"{count}.5m") == count * 10**6 + 500_000


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "1kk", "0x1k", "1 k e", "-", "1.5K"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_count(text)


def test_files_and_keywords_read_the_same_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = {
        "tensor-parallel-size": 2,
        "trust_remote_code": True,
        "no-enable-prefix-caching": True,
        "disable-log-requests": True,
        "max-model-len": "8k",
        "speculative-config.method": "ngram",
        "spec-tokens": 3,
        "served-model-name": ["a", "b"],
        "nnodes": 1,
        "kv-transfer-config": None,
        "enable-dbo": False,
    }
    yaml = "".join(f"{key}: {json.dumps(value)}\n" for key, value in lines.items())
    for name, text in {"a.yaml": yaml, "a.json": json.dumps(lines, indent=1)}.items():
        (tmp_path / name).write_text(text)
        made = settings("m", "--config", str(tmp_path / name))
        assert (made.tensor_parallel_size, made.enable_prefix_caching, made.max_model_len) == (2, False, 8000)
        assert made.speculation is not None
        assert made.served_model_name == ("a", "b")
    assert [record.getMessage() for record in caplog.records] == [
        "--trust-remote-code has no effect: no code of a checkpoint is ever run"
    ]
    with pytest.raises(SettingsError, match="one batch"):
        Settings.load({"enable_dbo": True}, env={})
    (tmp_path / "b.yaml").write_text("enable-dbo: true\n")
    with pytest.raises(SettingsError, match="one batch"):
        settings("m", "--config", str(tmp_path / "b.yaml"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("--max-num-sqes", "; did you mean --max-num-seqs?"),
        ("--kv-transfer", ""),
        ("--weight-config", ""),
        ("--max-num-seq", "; did you mean --max-num-seqs?"),
        ("--prt", "; did you mean --port?"),
        ("--x", ""),
        ("--rust", ""),
    ],
)
def test_hints_are_for_typos_alone(name: str, hint: str) -> None:
    assert misspelled(name, sorted(OF_OURS)) == hint


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("VLLM_ATTENTION_BACKEND", "the plan chooses kernels"),
        ("VLLM_CPU_KVCACHE_SPACE", "use --kv-cache-memory-bytes"),
        ("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "--role alone divides the work, see docs/roles.md"),
        ("VLLM_ROCM_USE_AITER_MOE", "the plan chooses kernels"),
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "--hf-overrides"),
        ("VLLM_NEVER_HEARD_OF", "Unknown environment variable VLLM_NEVER_HEARD_OF is ignored"),
        ("VLLM_SKIP_WARMPU", "did you mean VLLM_SKIP_WARMUP?"),
    ],
)
def test_variables_are_warned_about_with_the_reason(name: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        Settings.load(env={name: "1"})
    (record,) = caplog.records
    assert name in record.getMessage()
    assert reason in record.getMessage()


@pytest.mark.parametrize("name", ["VLLM_USE_V1", "VLLM_NO_USAGE_STATS", "VLLM_SERVICE_HOST", "VLLM_PORT_8000_TCP_ADDR"])
def test_variables_without_a_choice_raise_no_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    Settings.load(env={name: "1"})
    assert caplog.records == []


def test_variables_that_set_something_have_no_reason() -> None:
    ours = {name for opt in OPTIONS.values() for name in opt.env_names}
    assert [name for name in ours if name in VARIABLES] == []
    assert why_unused("VLLM_DEEP_GEMM_WARMUP") == why_unused("VLLM_USE_DEEP_GEMM") != ""
    assert why_unused("OTHER") is None


def test_the_short_form_of_the_responses_store_is_vllms() -> None:
    assert Settings.load(env={"VLLM_ENABLE_RESPONSES_API_STORE": "1"}).enable_responses_store
