"""The model that comes with preheat keeps the promises of its card and of the documentation."""

import json
from pathlib import Path

import jinja2
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from examples.train_bundled.export import CONFIG, TOKENIZER_CONFIG
from examples.train_bundled.model import CausalLM, LlamaShape
from examples.train_bundled.primer import chat_pairs, plain_documents

BUNDLED = Path(__file__).resolve().parents[2] / "src" / "preheat" / "bundled"
LAYER_WEIGHTS = [
    "input_layernorm",
    "mlp.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "post_attention_layernorm",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "self_attn.q_proj",
    "self_attn.v_proj",
]


def read_json(name: str) -> dict:
    return json.loads((BUNDLED / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


@pytest.fixture(scope="module")
def weights() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of each tensor, from only the file's header."""
    with safe_open(BUNDLED / "model.safetensors", framework="numpy") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}


def test_the_checkpoint_is_small_enough_to_ship():
    size = sum(path.stat().st_size for path in BUNDLED.iterdir() if path.is_file())
    assert size <= 20_000_000


def test_the_weights_are_five_to_nine_million_bfloat16_numbers(weights):
    total = 0
    for dtype, shape in weights.values():
        assert dtype == "BF16"
        count = 1
        for extent in shape:
            count *= extent
        total += count
    assert 5_000_000 <= total <= 9_000_000


def test_the_weights_match_the_configured_llama(weights):
    config = read_json("config.json")
    expected = {"model.embed_tokens.weight", "model.norm.weight"} | {
        f"model.layers.{layer}.{name}.weight" for layer in range(config["num_hidden_layers"]) for name in LAYER_WEIGHTS
    }
    assert set(weights) == expected
    assert weights["model.embed_tokens.weight"][1] == (config["vocab_size"], config["hidden_size"])


def test_the_configuration_keeps_its_promises():
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["torch_dtype"] == "bfloat16"
    assert config["vocab_size"] >= 1024
    assert config["max_position_embeddings"] >= 2048


def test_tokenizer_and_configuration_agree(tokenizer):
    config, generation = read_json("config.json"), read_json("generation_config.json")
    names = read_json("tokenizer_config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id(names["bos_token"]) == config["bos_token_id"]
    assert tokenizer.token_to_id(names["pad_token"]) == config["pad_token_id"]
    endings = [tokenizer.token_to_id(token) for token in (names["eos_token"], "<|end|>")]
    assert generation["eos_token_id"] == endings == config["eos_token_id"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def add(a, b):\n\treturn a + b\r\n",
        "  spaces   at both ends  ",
        "naïve café, 漢字, עברית, 👩‍🚀, \u200b, \x00\x7f",
        "".join(map(chr, range(0x2FF))),
    ],
)
def test_every_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_plain_text_begins_with_the_opening_token(tokenizer):
    ids = tokenizer.encode("import os").ids
    assert ids[0] == read_json("config.json")["bos_token_id"]
    assert tokenizer.decode(ids) == "import os"


def test_the_chat_template_renders_to_special_tokens(tokenizer):
    names = read_json("tokenizer_config.json")
    rendered = (
        jinja2.Environment()
        .from_string(names["chat_template"])
        .render(
            messages=[
                {"role": "system", "content": "Answer briefly."},
                {"role": "user", "content": " What is a list? "},
            ],
            bos_token=names["bos_token"],
            add_generation_prompt=True,
        )
    )
    assert rendered == (
        "<|begin|><|system|>\nAnswer briefly.<|end|>\n<|user|>\nWhat is a list?<|end|>\n<|assistant|>\n"
    )
    tokens = tokenizer.encode(rendered, add_special_tokens=False).tokens
    special = [token for token in tokens if token.startswith("<|")]
    assert special == ["<|begin|>", "<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>"]


def test_the_card_and_the_licence_of_the_text_are_there():
    card = (BUNDLED / "README.md").read_text(encoding="utf-8")
    assert "bits per byte" in card
    assert "LICENSE-PYTHON.txt" in card
    licence = (BUNDLED / "LICENSE-PYTHON.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence


def test_training_it_again_writes_the_same_configuration():
    assert read_json("config.json") == CONFIG
    assert read_json("tokenizer_config.json") == TOKENIZER_CONFIG


def test_training_it_again_makes_the_same_parameters(weights):
    made = {name: tuple(value.shape) for name, value in CausalLM(LlamaShape()).named_parameters()}
    assert made == {name: shape for name, (_, shape) in weights.items()}


def test_the_primer_holds_simple_functions_and_answers():
    assert all(compile(document, "primer", "exec") for document in plain_documents() if document.startswith("def "))
    assert ("What is 2 + 3?", "2 + 3 = 5") in list(chat_pairs())
