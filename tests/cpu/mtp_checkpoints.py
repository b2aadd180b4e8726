"""Random checkpoints with a layer that predicts one token further (MTP), and the layer in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cpu.checkpoints import SMALL, Model, draw_weights

QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
    "post_norm": "mtp.norm", "mtp_block": "mtp.layers.0",
}  # fmt: skip
DEEPSEEK = {
    "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm", "mtp_block": "",
}  # fmt: skip


class Reference:
    """The model and its layer that predicts, as transformers computes them."""

    def __init__(self, model: Any, layer: Any) -> None:
        self.model, self.layer = model, layer
        self._texts: list[tuple[list[int], Tensor]] = []

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> None:
        """Compute the features of a text; those of its beginnings are the same."""
        self._texts.append((tokens, self.model.model(torch.tensor(tokens)[None]).last_hidden_state[0]))

    @torch.inference_mode()
    def next_logits(self, tokens: list[int], known: int) -> Tensor:
        """Return the logits [vocab] behind ``tokens``, of which ``known`` are the model's and the others drafts."""
        found = (states for text, states in self._texts if text[:known] == tokens[:known])
        states = next(found)[: known - 1]
        while True:
            count = len(states)
            ids, places = torch.tensor(tokens[1 : count + 1])[None], torch.arange(1, count + 1)[None]
            out = self.layer.forward_layer(0, states[None], places, None, input_ids=ids)[0]
            if count == len(tokens) - 1:
                logits: Tensor = self.model.lm_head(out[-1])
                return logits
            states = torch.cat((states, out[-1:]))


def save_with_layer(
    model: Model, folder: Path, change: Callable[[Any, Any], None] = lambda *_: None, **fields: object
) -> Reference:
    """Write a random checkpoint with the layer in the released layout.

    ``change(model, layer)`` may edit the weights, and ``fields`` are further fields of the config.
    """
    import transformers  # here: it takes seconds, and most processes of a run need it never
    from transformers.modeling_layers import MtpModel

    family, changes = model
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class(**SMALL | changes, attn_implementation="eager", experts_implementation="eager")
    config.num_mtp_layers, config.mtp_layer_types, config.mtp_mlp_layer_types = 1, ["full_attention"], ["sparse"]
    reference = kind(config).eval()
    layer = MtpModel(reference, 1).eval()
    own = layer.layers[0]
    for name in ("enorm", "hnorm", "post_norm"):  # the last norm of a layer with states has a gate
        setattr(own, name, type(own.mtp_block.input_layernorm)(config.hidden_size, eps=config.rms_norm_eps))
    for part in (reference, own):
        draw_weights(part, family)
    with torch.no_grad():
        change(reference, layer)
    reference.save_pretrained(folder)
    count = config.num_hidden_layers
    qwen = family.startswith("Qwen")
    names, at = (QWEN, "") if qwen else (DEEPSEEK, f"model.layers.{count}.")
    stored = load_file(folder / "model.safetensors")
    for name, tensor in own.state_dict().items():
        first, _, rest = name.partition(".")
        stored[f"{at}{names[first]}.{rest}".replace("..", ".")] = tensor
    if not qwen:  # a released checkpoint has copies
        copies = {"embed_tokens": reference.model.embed_tokens, "shared_head.head": reference.lm_head}
        stored |= {f"{at}{name}.weight": part.weight.clone() for name, part in copies.items()}
    save_file({name: each.contiguous() for name, each in stored.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    said = {name: each for name, each in json.loads(path.read_text()).items() if "mtp" not in name}
    said |= {"mtp_num_hidden_layers" if qwen else "num_nextn_predict_layers": 1, **fields}
    path.write_text(json.dumps(said))
    return Reference(reference, layer)


def copying(reference: Any, layer: Any) -> None:
    """Let the last token decide most of the next one, and the layer that predicts know this part."""
    for name, weight in reference.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            weight.mul_(0.002)
    own, size = layer.layers[0], reference.config.hidden_size
    for name, weight in own.mtp_block.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            weight.zero_()
    own.eh_proj.weight.zero_()[:, :size].copy_(torch.eye(size))
    whole = reference.model.norm.weight
    own.post_norm.weight.copy_(whole)
    own.enorm.weight.fill_(float(own.enorm.__class__(1).weight.item()))
