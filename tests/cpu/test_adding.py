"""A toy family and a toy operation, added by the steps of docs/adding.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from preheat.errors import ModelError
from preheat.model import families
from preheat.model.config import Config
from preheat.model.families.common import Names, attention, dense, model, norm
from preheat.model.specs import LayerSpec, ModelSpec
from preheat.ops.activation import ACTIVATIONS
from tests.cpu.checkpoints import save_checkpoint
from tests.cpu.test_model_families import error_at_each_position, logits_of, open_decoder, random_tokens

NAMES = Names(embedding="toy.words", layer="toy.{}.", final_norm="toy.last", head="toy.head")
RENAMES = {
    "model.embed_tokens.": "toy.words.",
    "model.layers.": "toy.",
    "model.norm.": "toy.last.",
    "lm_head.": "toy.head.",
}


def toy(config: Config) -> ModelSpec:
    """Llama with other names and with the toy activation."""
    config, rope = config.renamed(num_hidden_layers="toy_layers"), config.rope()
    hidden = config.size("hidden_size")

    def layer(prefix: str) -> LayerSpec:
        return LayerSpec(
            attention=attention(config, NAMES, prefix, None, rope, qkv_bias=False, o_bias=False, qk_norm=False),
            mlp=dense(config, NAMES, prefix, bias=False, activation="relu2_and_mul"),  # type: ignore[arg-type]
            input_norm=norm(config, prefix + NAMES.input_norm, hidden),
            post_norm=norm(config, prefix + NAMES.post_norm, hidden),
        )

    layers = tuple(layer(NAMES.layer.format(number)) for number in range(config.num_layers()))
    return model(config, NAMES, layers, max_positions=config.max_positions(rope))


def relu2_and_mul(gate_up: Tensor) -> Tensor:
    """The toy operation: the square of the positive part of the gate, times up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.relu(gate).square() * up


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Tensor]:
    """A checkpoint of the toy family, and the logits of transformers."""
    reference = save_checkpoint(("Llama", {"hidden_act": "relu2", "num_hidden_layers": 2}), tmp_path)
    logits = reference(random_tokens())
    tensors, path = load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"
    for old, new in RENAMES.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads(path.read_text()) | {"architectures": ["ToyForCausalLM"]}
    path.write_text(json.dumps(config | {"toy_layers": config.pop("num_hidden_layers")}))
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, "ToyForCausalLM": toy})
    return tmp_path, logits


@pytest.fixture
def operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "relu2_and_mul", relu2_and_mul)  # type: ignore[arg-type]


@pytest.mark.usefixtures("operation")
def test_a_toy_family_has_the_logits_of_transformers(checkpoint: tuple[Path, Tensor]) -> None:
    folder, right = checkpoint
    assert error_at_each_position(logits_of(open_decoder(folder), random_tokens()), right).max() <= 1e-5


def test_a_toy_operation_is_the_one_that_runs(checkpoint: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: another operation under the name gives other logits, and no operation is an error."""
    folder, right = checkpoint
    monkeypatch.setitem(ACTIVATIONS, "relu2_and_mul", lambda x: relu2_and_mul(x) * 1.01)  # type: ignore[arg-type]
    assert error_at_each_position(logits_of(open_decoder(folder), random_tokens()), right).max() > 1e-5
    monkeypatch.delitem(ACTIVATIONS, "relu2_and_mul")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="relu2_and_mul"):
        logits_of(open_decoder(folder), random_tokens())


def test_a_family_without_its_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ToyForCausalLM"]}))
    with pytest.raises(ModelError, match="architecture ToyForCausalLM is not supported"):
        open_decoder(tmp_path)
