"""The command line as far as it goes without a model: flags, prompts, mistakes, help."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat import __version__
from preheat.backends.registry import FACTS
from preheat.cli.generate import _bias
from preheat.cli.main import _parser, main
from preheat.cli.prompts import _read_prompts
from preheat.cli.serve import curl, served
from preheat.core import CALLERS_FIELDS, SAMPLING_FIELDS, SamplingParams
from preheat.errors import PreheatError, SettingsError
from preheat.settings import OPTIONS, Settings
from preheat.startup import planned


def test_every_sampling_parameter_has_a_flag():
    fields = [each.name for each in msgspec.structs.fields(SamplingParams) if each.name not in CALLERS_FIELDS]
    assert fields == list(SAMPLING_FIELDS)
    words = "--n 2 --temperature 0.5 --top_p .9 --stop a b --stop-token-ids 1 2 --ignore-eos --no-skip-special-tokens"
    args = _parser()[0].parse_args(["generate", *words.replace("_", "-").split(), "--logit-bias", '{"7": -1}'])
    values = {name: value for name, value in vars(args).items() if name in SAMPLING_FIELDS}
    assert SamplingParams(**values) == SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        skip_special_tokens=False,
        logit_bias={7: -1.0},
    )


@pytest.mark.parametrize("line", ["serve m --api-key k", "serve --api-key k m", "serve --api-key=k m"])
def test_a_key_is_one_word(line):
    args = vars(_parser()[0].parse_args(line.split()))
    assert (args["model_argument"], args["api_key"]) == ("m", ["k"])


@given(st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100)))
def test_logit_bias_is_json(bias):
    assert _bias(json.dumps(bias)) == bias


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n{"), min_size=1), min_size=1))
def test_a_line_is_a_prompt(texts):
    file = io.StringIO("\n".join(texts), newline="\n")
    assert list(_read_prompts(file, "f")) == texts


@settings(max_examples=40)
@given(st.lists(st.text() | st.lists(st.integers(0, 1000)), min_size=1))
def test_a_json_line_gives_its_prompt(prompts):
    file = io.StringIO("\n".join(json.dumps({"prompt": p, "id": 1}) for p in prompts))
    assert list(_read_prompts(file, "f")) == prompts


def test_a_byte_order_mark_is_no_part_of_the_first_prompt():
    assert list(_read_prompts(io.StringIO('\ufeff{"prompt": "a"}\n\ufeffb\n'), "f")) == ["a", "\ufeffb"]
    assert list(_read_prompts(io.StringIO("\ufeffa\n"), "f")) == ["a"]


def test_text_may_begin_with_a_brace():
    assert list(_read_prompts(io.StringIO("{ return 1; }\n"), "f")) == ["{ return 1; }"]


@pytest.mark.parametrize(
    ("text", "message"), [("", "no prompt"), ('ok\n{"text": "x"}', "f, line 2"), ("\n\n", "no prompt")]
)
def test_errors_of_prompt_files_name_the_mistake(text, message):
    with pytest.raises(SettingsError, match=message):
        list(_read_prompts(io.StringIO(text), "f"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve --max-num-seq 3", "did you mean --max-num-seqs"),
        ("serve --num_scheduler_seqs 8", "use --async-scheduling"),
        ("serve --num-scheduler-steps=8 --no-async-scheduling", "async_scheduling is off: drop one of them"),
        ("serve --tensor_paralel_size 8", "write --tensor-parallel-size"),
        ("serve --max_num_seqs 0", "at least 1"),
        ("serve --max-len 3", "write --max-model-len"),
        ("serve --gpu-mem 0.5", "write --gpu-memory-utilization"),
        ("serve --tp 2", "write --tensor-parallel-size"),
        ("serve -tp 3", "tensor_parallel_size must be 1, 2, 4 or 8"),
        ("serve --kv-transfer-config {}", "kv_transfer_config has no kv_role"),
        ("serve --stop x", "unknown argument --stop; --help lists all"),  # a flag of another command is no hint
        ("serve a b", "unexpected word 'b'"),
        ("--modle serve", "unknown argument --modle"),
        ("generate model --prompt x", "as --model model"),
        ("serve --served-model-name a b", "write the model before it"),
        ("generate --prompt x --top-k -5", "between -1 and 2147483647"),
        ("plan --hf-overrides []", "not a JSON object"),
        ("plan --quantization awq", "only fp8, int8, int4 and inc can be made while loading"),
        ("generate --prompt x --top-p 3", "top_p"),
        ("generate --prompt x --logit-bias [1]", "--logit-bias"),
        ("generate --prompts missing.txt", "missing.txt"),
        ("plan --max-num-batched-tokens 0", "at least 1"),
        ("plan --max-model-len 100000", "exceeds the 2048 positions"),
        ("plan --port 8000", "unknown argument --port"),
        ("buckets --min 9 --step 1 --max 8", "must not exceed"),
        ("buckets --step 1 --max 8", "--min"),
        ("buckets --strategy lineal --min 1 --step 1 --max 8", "lineal"),
        ("warm --html no/such/folder/x.html", "its folder does not exist"),
        ("generate --prompt x --config missing.yaml", "missing.yaml"),
    ],
)
def test_mistakes_are_one_line_and_status_2(line, message, capsys):
    try:
        status = main(line.split())
    except SystemExit as stop:  # argparse's own
        status = stop.code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2
    assert "error: " in error
    assert message in error


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "serve --help",
        "generate --help",
        "warm --help",
        "--version",
        "serve --port x",
        "plan --json",
        "buckets --min 1 --step 2 --max 4",
    ],
)
def test_help_mistakes_and_plans_never_wait_for_torch(line):
    code = f"""
import sys
from preheat.cli.main import main
try:
    main({line.split()!r})
except SystemExit:
    pass
sys.exit('torch' in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


LLAMA = Path(__file__).parents[1] / "models" / "llama-3.1-8b"


def printed(line, capsys):
    assert main(line.split()) == 0
    return capsys.readouterr().out


def test_one_ladder_as_json_and_as_text(capsys):
    line = "buckets --strategy linear --min 2 --step 32 --max 64"
    assert json.loads(printed(f"{line} --json", capsys)) == [2, 4, 8, 16, 32, 64]
    assert printed(line.replace("--min", "--strategy linear --min"), capsys) == "6 buckets: 2, 4, 8, 16, 32, 64\n"


def test_the_plan_of_a_published_config(capsys):
    """The plan of a published config needs no weights."""
    asked = f"plan {LLAMA} --max-num-seqs 256 --max_model_len 4096 --max-num-batched-tokens 2048 --block-size 64"
    text = printed(asked, capsys)
    assert text.startswith("256 sequences x 4,096 tokens, 2,048 tokens a step, blocks of 64\n")
    plan = json.loads(printed(f"{asked} --json", capsys))
    assert {"items", "dropped", "padding", "estimated_seconds", "estimated_bytes"} <= set(plan)
    assert plan["padding"]["decode"]["spread"] == "rows uniform over 1-256"
    assert plan["padding"]["mixed"]["spread"] == "tokens log-uniform over 16-2048"
    assert all(padding["mean"] <= 0.10 for padding in plan["padding"].values())
    wide = json.loads(printed(f"{asked} --dtype float32 --json", capsys))
    assert wide["estimated_bytes"] == 2 * plan["estimated_bytes"]


def test_the_options_of_planning_reach_the_plan(capsys):
    line = "plan --bucketing-policy split --bucketing-strategy linear --decode-seq-bucket-max 1024 --max-num-seqs 4"
    plan = json.loads(printed(f"{line} --json", capsys))
    decodes = [item["shape"] for item in plan["items"] if item["kind"] == "decode" and not item["fallback"]]
    assert plan["policy"] == "split"
    assert {shape["rows"] for shape in decodes} == {1, 2, 4}
    assert max(shape["longest"] for shape in decodes) == 1024


@pytest.mark.parametrize("name", ["tokenizer", "chat_template", "lora_modules"])
def test_the_plan_reads_the_files_that_its_options_name(name, tmp_path):
    given = {name: str(tmp_path / "none"), "device": "cpu"}
    if name == "lora_modules":
        given = {name: (f"a={tmp_path / 'none'}",), "enable_lora": True, "device": "cpu"}
    with pytest.raises(PreheatError, match=str(tmp_path / "none")):
        planned(Settings(**given))


@pytest.mark.parametrize(("device", "name"), [(each.name, name) for each in FACTS.values() for name in each.rejected])
def test_the_plan_refuses_an_option_that_the_device_rejects(device, name):
    turned = not OPTIONS[name].default
    with pytest.raises(SettingsError, match=f"{name} cannot be turned"):
        planned(Settings.load({"device": device, name: turned}))


def test_the_plan_refuses_a_mode_that_the_ranks_cannot_use(capsys):
    line = "plan --device cpu --execution-mode llvm --tensor-parallel-size 2"
    assert main(line.split()) == 2
    assert "compiled layers exchange nothing with other ranks" in capsys.readouterr().err


def test_overrides_reach_the_plan(capsys):
    line = ["plan", str(LLAMA), "--json", "--max-num-seqs", "8", "--hf-overrides", '{"num_hidden_layers": 16}']
    assert main(line) == 0
    half = json.loads(capsys.readouterr().out)
    whole = json.loads(printed(f"plan {LLAMA} --json --max-num-seqs 8", capsys))
    assert half["estimated_seconds"] < 0.6 * whole["estimated_seconds"]


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_help_begins_with_one_line_of_usage_and_groups_the_options(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: preheat {command} ") and text.splitlines()[1] == ""
    groups = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert {"Model", "Memory", "Scheduling", "Warm-up"} < set(groups)


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"preheat {__version__}\n"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(), "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type"),
        (Settings(host="0.0.0.0", port=81), "http://127.0.0.1:81/"),
        (Settings(host="::1"), "http://[::1]:8000/"),
        (Settings(ssl_certfile="c", ssl_keyfile="k", host="x.org"), "https://x.org:8000/"),
        (Settings(api_key=("secret",)), "Bearer $PREHEAT_API_KEY"),
    ],
)
def test_the_curl_fits_the_settings(settings, expected):
    assert expected in curl(settings)
    assert "secret" not in curl(settings)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({}, 512),
        ({"max_num_mixed_tokens": 2048}, 2048),
        ({"bucketing_policy": "split"}, None),
        ({"enable_chunked_prefill": False}, None),
    ],
)
def test_a_server_bounds_its_mixed_steps_unless_told_otherwise(given, tokens):
    assert served(Settings.load(given)).max_num_mixed_tokens == tokens
    assert Settings.load({}).max_num_mixed_tokens is None


def test_two_models_are_not_one(capsys):
    """A model beside ``--model`` is refused, unless both are the same."""
    for command in ("serve", "plan"):
        assert main([command, "one", "--model", "other"]) == 2
        assert "given twice" in capsys.readouterr().err


PROMPTS = {
    "text": ("a text", "--skip-tokenizer-init has no tokenizer"),
    "unknown": ('{"prompt": [1, 4096]}', "prompt 1 has the token id 4096: ids are 0 to 4,095"),
    "negative": ('{"prompt": [1]}\n{"prompt": [-1]}', "prompt 2 has the token id -1"),
    "empty": ('{"prompt": []}', "prompt 1 has no token"),
    "long": (json.dumps({"prompt": [5] * 2049}), "prompt 1 has 2,049 tokens"),
}
LATE = [
    *((f"{line} --prompts FILE", name) for line in (
        "verify", "verify --write-golden g", "diff --other {\"seed\":1}", "generate", "calibrate --output x",
    ) for name in PROMPTS),
    ("verify --against http://127.0.0.1:1 --prompts FILE", "text"),
    ("verify --write-golden no/such/g", "--write-golden no/such/g: its folder does not exist"),
    ("verify --write-golden .", "--write-golden .: it is a folder"),
    ("diff --other {\"seed\":1} --html no/such/h", "--html no/such/h: its folder does not exist"),
    ("verify --against localhost:1", "must begin with http://"),
    ("verify --fuzz nan", "--fuzz must be a number of seconds"),
    ("verify --fuzz inf", "--fuzz must be a number of seconds"),
    ("verify --fuzz -1", "--fuzz must be a number of seconds"),
    ("verify --digest RECORD --boot-check off", "this boot has no digest"),
    ("verify --digest RECORD --skip-warmup", "this boot has no digest"),
    ("generate --chat --prompts FILE", "empty"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), LATE)
def test_a_command_that_cannot_work_boots_no_engine(line, said, capsys, monkeypatch, tmp_path):
    """A mistake is told before the boot, which would take seconds, and before work, which takes minutes."""
    monkeypatch.setitem(sys.modules, "preheat.startup", SimpleNamespace(boot_engine=no_boot, run_engine=no_boot))
    monkeypatch.setitem(sys.modules, "preheat.llm", SimpleNamespace(LLM=no_boot))
    monkeypatch.setattr("preheat.verify.command.read_proof", lambda path: None)
    (tmp_path / "prompts").write_text(PROMPTS[said][0] if said in PROMPTS else "")
    words = [str(tmp_path / "prompts") if word == "FILE" else word for word in line.split()]
    words += ["--skip-tokenizer-init"] * (said == "text")
    assert main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    expected = "--chat sends texts" if "--chat" in line else PROMPTS[said][1] if said in PROMPTS else said
    assert expected in error


def no_boot(*_, **__):
    raise AssertionError("an engine boots")
