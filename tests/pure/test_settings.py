"""Settings: one registry, read from keywords, the environment, a file and the defaults, in that order."""

import argparse
import dataclasses
import json
import logging
import re
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from preheat.configs.adapters import lora_modules
from preheat.errors import SettingsError
from preheat.options.options import add_flags, parse_bool
from preheat.settings import OPTIONS, Settings

# An option that can be set today, with two values that differ from the default and from each other.
TRIALS = {
    "max_num_seqs": (7, 8),
    "max_model_len": (128, 256),
    "gpu_memory_utilization": (0.25, 0.5),
    "enable_prefix_caching": (False, False),
    "dtype": ("float32", "bfloat16"),
    "api_key": (("a", "b"), ("c",)),
    "served_model_name": (("a", "b"), ("c",)),
    "hf_overrides": ({"rope_theta": 1e6, "eos_token_id": [1, 2]}, {"x": None}),
    "num_threads": (1, 2),
    "engine_iteration_timeout_s": (1.5, 30.0),
    "host": ("0.0.0.0", "::1"),
}

# The names that the sources use, and the option that each of them sets.
SOURCE_NAMES = {
    **{
        f"VLLM_{phase}_{dim}_BUCKET_{part}": f"{phase}_{dim}_bucket_{part}".lower()
        for phase, dims in {"PROMPT": ("BS", "SEQ"), "DECODE": ("BS", "BLOCK", "SEQ")}.items()
        for dim in dims
        for part in ("MIN", "STEP", "MAX")
    },
    **{
        f"VLLM_{name}": name.lower()
        for name in (
            "SKIP_WARMUP GRAPH_RESERVED_MEM GRAPH_PROMPT_RATIO GRAPH_PROMPT_STRATEGY GRAPH_DECODE_STRATEGY "
            "HANDLE_TOPK_DUPLICATES CONFIG_HIDDEN_LAYERS PROFILER_ENABLED DEFRAG_THRESHOLD DEFRAG_WITH_GRAPHS DEBUG "
            "BATCH_INVARIANT DETERMINISM_WARMUP_ITERATIONS ENGINE_ITERATION_TIMEOUT_S BUCKETING_STRATEGY CONTIGUOUS_PA"
        ).split()
    },
    "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION": "log_step_graph_compilation",
    "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL": "log_step_graph_compilation_all",
    "VLLM_HPU_LOG_STEP_CPU_FALLBACKS": "log_step_cpu_fallbacks",
    "VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL": "log_step_cpu_fallbacks_all",
    "VLLM_RPC_TIMEOUT": "rpc_timeout_ms",
    "PT_HPU_LAZY_MODE": "lazy_mode",
    "QUANT_CONFIG": "quant_config",
}


def as_text(value):
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(value) if isinstance(value, tuple) else str(value)


def test_defaults_are_valid_and_frozen():
    settings = Settings.load(env={})
    assert settings == Settings()
    for name, opt in OPTIONS.items():
        opt.check(opt.default, name)  # settings check other values alone
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.port = 1


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize("present", [{"args", "env", "file"}, {"env", "file"}, {"file"}, set()])
def test_flag_beats_environment_beats_file_beats_default(name, present, tmp_path):
    high, low = TRIALS[name]
    rank = [source for source in ("args", "env", "file") if source in present]
    values = {source: high if i == 0 else low for i, source in enumerate(rank)}
    args = {name: values["args"]} if "args" in values else {}
    env = {f"PREHEAT_{name.upper()}": as_text(values["env"])} if "env" in values else {}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({name.replace("_", "-"): _plain(values["file"])} if "file" in values else {}))
    expected = high if present else OPTIONS[name].default
    assert getattr(Settings.load(args, env, str(path)), name) == expected


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


def test_every_source_name_is_known():
    by_env = {env: opt.name for opt in OPTIONS.values() for env in opt.env_names}
    assert {env: by_env.get(env) for env in SOURCE_NAMES} == SOURCE_NAMES


def test_environment_names_are_unique():
    names = [env for opt in OPTIONS.values() for env in opt.env_names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("opt", [opt for opt in OPTIONS.values() if isinstance(opt.later, str)], ids=lambda o: o.name)
def test_unimplemented_options_take_only_their_default(opt):
    other = {
        bool: lambda: not opt.default,
        int: lambda: 2 if opt.default != 2 else 3,
        float: lambda: 0.7,
        str: lambda: next((c for c in opt.choices or () if c != opt.default), "x"),
        tuple: lambda: ("x",),
    }[opt.kinds[0]]()
    assert getattr(Settings.load({opt.name: opt.default}, env={}), opt.name) == opt.default
    for args, env in (({opt.name: other}, {}), ({}, {opt.env_names[0]: as_text(other)})):
        with pytest.raises(SettingsError, match="not supported yet") as error:
            Settings.load(args, env)
        assert (opt.env_names[0] if env else opt.name) in str(error.value)


@given(st.sampled_from(["1", "true", "yes", "0", "false", "no"]), st.data())
def test_booleans_have_one_parser(word, data):
    spelled = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in word)
    assert parse_bool(f" {spelled} ") is (word in ("1", "true", "yes"))
    settings = Settings.load(env={"VLLM_HANDLE_TOPK_DUPLICATES": spelled})
    assert settings.handle_topk_duplicates is (word in ("1", "true", "yes"))


@given(st.text().filter(lambda t: t.strip().lower() not in ("1", "true", "yes", "0", "false", "no")))
def test_any_other_boolean_is_an_error_that_names_the_variable(text):
    with pytest.raises(SettingsError, match="VLLM_HANDLE_TOPK_DUPLICATES"):
        Settings.load(env={"VLLM_HANDLE_TOPK_DUPLICATES": text})


@given(st.text())
def test_determinism_iterations_never_fail_to_parse(text):
    parse = OPTIONS["determinism_warmup_iterations"].parse
    try:
        expected = max(int(text), 0)
    except ValueError:
        expected = 0
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_num_seq": 1}, "did you mean max_num_seqs"),
        ({"tensor_paralel_size": 1}, "write --tensor-parallel-size"),
        ({"port": "many"}, "port: 'many' is not a whole number"),
        ({"port": 70000}, "between 0 and 65535"),
        ({"port": True}, "port: True is not a whole number"),
        ({"port": 80.0}, "port: 80.0 is not a whole number"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"gpu_memory_utilization": float("nan")}, "between 0.01 and 1"),
        ({"dtype": "bfloat"}, "is not one of"),
        ({"block_size": 48}, "power of two"),
        ({"hf_overrides": "[1]"}, "hf_overrides: '[1]' is not a JSON object"),
        ({"hf_overrides": "{"}, "not a JSON object"),
        ({"root_path": "llm"}, "must begin with a slash"),
        ({"seed": -1, "port": 3}, "seed: -1 must be between 0 and 18446744073709551615"),
        ({"block_size": 8}, "between 16 and 256"),
        ({"ssl_keyfile": "key.pem"}, "ssl_certfile"),
        ({"device": "gpu"}, "is not one of auto, cpu, cuda"),
        ({"model": None}, "model: None is not text"),
    ],
)
def test_errors_of_values_name_the_mistake(args, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        Settings.load(args, env={})


@pytest.mark.parametrize("opt", OPTIONS.values(), ids=lambda opt: opt.name)
def test_no_value_of_any_option_is_a_traceback(opt):
    """No value of any option is a traceback.

    Some values are numbers too large for a processor, or bytes that end a path.
    """
    values = {int: [2**70, -(2**70), 2**64], str: ["a\0b"], tuple: [("a", "b\0")], dict: [{"model": "a\0"}]}
    for value in values.get(opt.kinds[0], []):
        with pytest.raises(SettingsError) as refused:
            Settings.load({opt.name: value}, env={})
        assert len(refused.value.message) < 500


@pytest.mark.parametrize("port", [-1, 65_536, 2**70])
def test_ports_are_numbers_of_ports(port):
    with pytest.raises(SettingsError, match=r"port: .* must be (between 0 and|at most)"):
        Settings.load({"port": str(port)}, env={})


def test_settings_made_directly_are_checked_too():
    with pytest.raises(SettingsError, match="max_num_seqs"):
        Settings(max_num_seqs=-1)


@pytest.mark.parametrize("name", ["VLLM_SKIP_WARMPU", "PREHEAT_MODLE"])
def test_unknown_variables_are_warned_about(name, caplog):
    with caplog.at_level(logging.WARNING):
        Settings.load(env={name: "1", "PATH": "/bin", "OTHER_VLLM_X": "1"})
    (record,) = caplog.records
    assert name in record.getMessage()
    assert "did you mean" in record.getMessage()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 3", "did you mean max_num_seqs"),
        ("port: eighty", "is not a whole number"),
        ("- port", "one mapping"),
        ("config: other.yaml", "cannot name another"),
        ("a: [", "cannot read"),
    ],
)
def test_errors_of_config_files_name_the_mistake(text, message, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message) as error:
        Settings.load({"config": str(path)}, env={})
    assert str(path) in str(error.value)


def test_missing_config_file_is_an_error(tmp_path):
    with pytest.raises(SettingsError, match="cannot read"):
        Settings.load(env={"PREHEAT_CONFIG": str(tmp_path / "none.yaml")})


def test_empty_config_file_sets_nothing(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("# nothing\n")
    assert Settings.load({"config": str(path)}, env={}) == Settings(config=str(path))


def test_keys_are_never_shown():
    assert "secret" not in repr(Settings(api_key=("secret",)))


@pytest.mark.parametrize("name", TRIALS)
def test_every_kind_of_option_has_a_flag(name):
    parser = argparse.ArgumentParser()
    add_flags(parser, OPTIONS.values())
    value = TRIALS[name][0]
    flag = OPTIONS[name].flag
    if isinstance(value, bool):
        line = [flag if value else flag.replace("--", "--no-", 1)]
    else:
        words = [str(item) for item in value] if isinstance(value, tuple) else [as_text(value)]
        line = [word for each in words for word in (flag, each)] if OPTIONS[name].one_word else [flag, *words]
    given_flags = vars(parser.parse_args(line))
    assert set(given_flags) == {name}
    assert getattr(Settings.load(given_flags, env={}), name) == value


def test_help_shows_every_settable_option():
    parser = argparse.ArgumentParser()
    add_flags(parser, OPTIONS.values())
    text = parser.format_help()
    shown = {opt.name for opt in OPTIONS.values() if re.search(rf"{opt.flag}\b(?!-)", text)}
    assert shown == {opt.name for opt in OPTIONS.values() if not isinstance(opt.later, str)}


def test_settings_do_not_import_torch():
    code = "import sys, preheat.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_adapters_are_named_as_words_or_objects(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("lora_modules:\n- sql=/a\n- {name: chat, path: /b}\nenable_lora: true\nmax_cpu_loras: 2\n")
    named = Settings.load({}, {}, str(file)).lora_modules
    assert [(module.name, module.path) for module in lora_modules(named)] == [("sql", "/a"), ("chat", "/b")]


def test_a_tilde_is_the_folder_of_the_user(tmp_path, monkeypatch):
    """A shell leaves it in ``--config=~/file`` and in ``name=~/folder``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "preheat.yaml").write_text("lora_modules: [sql=~/sql]\nenable_lora: true\n")
    settings = Settings.load({"config": "~/preheat.yaml"}, {})
    assert lora_modules(settings.lora_modules)[0].path == str(tmp_path / "sql")
    assert lora_modules(['{"name": "sql", "path": "~/sql"}'])[0].path == str(tmp_path / "sql")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"lora_modules": ("sql",), "enable_lora": True}, "lora_modules"),
        ({"lora_modules": ('{"name": "a"}',), "enable_lora": True}, "lora_modules"),
        ({"lora_modules": ("a=/a", "a=/b"), "enable_lora": True, "max_cpu_loras": 2}, "lora_modules"),
        ({"lora_modules": ("a=/a", "b=/b"), "enable_lora": True}, "max_cpu_loras"),
        ({"max_loras": 3, "max_cpu_loras": 2, "enable_lora": True}, "max_cpu_loras"),
        ({"lora_modules": ("a=/a",)}, "lora_modules"),
        ({"lora_modules": ("bundled=/a",), "enable_lora": True}, "lora_modules"),
        ({"lora_root": "/a"}, "lora_root"),
        ({"fully_sharded_loras": True, "enable_lora": True}, "fully_sharded_loras"),
        ({"fully_sharded_loras": True, "tensor_parallel_size": 2, "max_lora_rank": 32}, "fully_sharded_loras"),
    ],
)
def test_options_of_adapters_that_contradict_each_other(given, param):
    with pytest.raises(SettingsError) as error:
        Settings(**given)
    assert error.value.param == param
