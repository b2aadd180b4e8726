"""A tiny random LLaVA, written by Hugging Face transformers, with its logits as reference."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import Tensor

from tests.tokenizers import byte_level

SIZE, PATCH, TOKENS = 28, 7, 16
"""Sides of an image and of a patch, and an image's positions in a prompt."""

TEMPLATE = (
    "{% for m in messages %}{{ m.role.upper() }}: {% for c in m.content %}{% if c.type == 'image' %}<image>\n{% else %}"
    "{{ c.text }} {% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
VISION: dict[str, Any] = {
    "hidden_size": 60, "intermediate_size": 84, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": SIZE,
    "patch_size": PATCH,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 640, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

Reference = Callable[..., Tensor]
"""Function from a text, its images and the next tokens to float32 logits.

The logits are at each of these tokens and behind the last one. Without ``special`` the text does not begin with <s>.
"""


def randomize(model: torch.nn.Module) -> None:
    """Draw weights of a size that keeps activations in range; norms are near 1."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            mean = float("norm" in name and name.endswith("weight"))
            std = weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.1
            weight.normal_(mean=mean if weight.dim() == 1 else 0.0, std=std)


def save_llava(folder: Path, seed: int = 0, **changes: Any) -> Reference:
    """Write a checkpoint with tokenizer and processor, and return the reference."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    backend = byte_level()
    backend.add_special_tokens([AddedToken("<image>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    vocab_size, token = backend.get_vocab_size(), backend.token_to_id("<image>")
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(vocab_size=vocab_size, **TEXT),
        image_token_index=token, attn_implementation="eager", **changes,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    more = {"patch_size": PATCH, "num_additional_image_tokens": 1, "chat_template": TEMPLATE}
    strategy = changes.get("vision_feature_select_strategy", "default")
    processor = LlavaProcessor(images, tokenizer, vision_feature_select_strategy=strategy, **more)
    processor.save_pretrained(folder)
    return reference(model, processor)


def save_adapter(folder: Path, out: Path, seed: int = 0) -> Reference:
    """Write a random adapter of the decoder's layers, by PEFT, and return the reference with it.

    ``folder`` holds the checkpoint.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    torch.manual_seed(seed)
    base = LlavaForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    config = LoraConfig(r=6, lora_alpha=9, target_modules=r".*language_model.*\.(q_proj|v_proj|down_proj)")
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=weight.shape[1] ** -0.5)
    model.save_pretrained(out)
    processor = LlavaProcessor.from_pretrained(folder)
    processor.image_processor = CLIPImageProcessorPil.from_pretrained(folder)
    return reference(model.eval(), processor)


def reference(model: Any, processor: Any) -> Reference:
    """Return a :data:`Reference` of the model."""

    @torch.inference_mode()
    def logits(text: str, pictures: Sequence[PIL.Image.Image], after: Sequence[int], special: bool = True) -> Tensor:
        given = processor(text=text, images=list(pictures) or None, return_tensors="pt", add_special_tokens=special)
        ids = torch.cat((given["input_ids"], torch.tensor([list(after)], dtype=torch.int64)), 1)
        pixels = {"pixel_values": given["pixel_values"]} if pictures else {}
        found: Tensor = model(input_ids=ids, **pixels).logits[0, -1 - len(after) :]
        return found

    return logits


def as_modules(source: Path, target: Path) -> None:
    """Write the same checkpoint with the module names of transformers 5."""
    target.mkdir()
    for file in source.iterdir():
        if file.name != "model.safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    renamed = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        new = name.replace("language_model.lm_head", "lm_head").replace("language_model.model", "model.language_model")
        if new.startswith(("vision_tower", "multi_modal_projector")):
            new = f"model.{new}"
        renamed[new] = tensor
    save_file(renamed, target / "model.safetensors", {"format": "pt"})


def picture(number: int, width: int = 45, height: int = 33, mode: str = "RGB") -> PIL.Image.Image:
    """Return an image of noise."""
    shape = (height, width, len(PIL.Image.new(mode, (1, 1)).getbands()))
    values = np.random.default_rng(number).integers(0, 256, shape, np.uint8)
    return PIL.Image.fromarray(values[:, :, 0] if shape[2] == 1 else values)


def data_url(image: PIL.Image.Image, form: str = "PNG") -> str:
    """Return ``image`` as a data URL."""
    file = io.BytesIO()
    image.save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def edit_json(path: Path, **changes: Any) -> None:
    """Replace fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
