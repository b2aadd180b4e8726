"""A tiny random Qwen3-VL or Qwen3.5, written by Hugging Face transformers, with its logits as reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from tokenizers import AddedToken
from torch import Tensor

from tests.cpu.checkpoints import SHARED, STATES
from tests.llava import Reference, randomize
from tests.tokenizers import byte_level

TEXT: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 640,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True,
                        "mrope_section": [6, 5, 5]},
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 72, "depth": 4, "num_heads": 3, "out_hidden_size": 96, "patch_size": 4,
    "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
TEXT_CONFIG = TEXT | {"model_type": "qwen3_vl_text", "vocab_size": 199}
CONFIG = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": TEXT_CONFIG, "image_token_id": 198,
          "vision_config": VISION, "image_processor": {"min_pixels": 192, "max_pixels": 2048}}  # fmt: skip
UNIT = 8
"""Pixels of a cell's side."""

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role.upper() }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}" + IMAGE + "{% else %}{{ c.text }} {% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


HYBRID: dict[str, Any] = STATES | {
    "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5},
}


def save_model(folder: Path, vocab_size: int = 199, layers: int = 3, family: str = "Qwen3VL") -> Any:
    """Write a random checkpoint with so many ``layers`` and return the model; a Qwen3_5 has its own number."""
    import transformers

    text, vision, experts = TEXT | {"num_hidden_layers": layers}, dict(VISION), {}
    vision["deepstack_visual_indexes"] = vision["deepstack_visual_indexes"][: layers - 1]
    if family != "Qwen3VL":
        text |= HYBRID | (SHARED if family == "Qwen3_5Moe" else {})
        del vision["deepstack_visual_indexes"]
        experts = {"experts_implementation": "eager"}
    config = getattr(transformers, f"{family}Config")(
        text_config=text | {"vocab_size": vocab_size}, vision_config=vision, image_token_id=vocab_size - 1,
        video_token_id=vocab_size - 2, attn_implementation="eager", **experts,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    randomize(model)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):  # decays of some tokens to some hundred
            weight.data.normal_(mean=-3.0, std=1.5)
    model.save_pretrained(folder)
    return model


def save_text(folder: Path) -> Callable[[Tensor], Tensor]:
    """Write a random checkpoint and return its reference for texts."""
    model = save_model(folder)

    @torch.inference_mode()
    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens[None]).logits[0]
        return found

    return logits


def save_qwen_vl(folder: Path, layers: int = 3, family: str = "Qwen3VL") -> Reference:
    """Write a checkpoint with tokenizer, chat template and image processor, and return the reference."""
    return reference(*save_model_and_tokenizer(folder, layers, family))


def save_model_and_tokenizer(folder: Path, layers: int = 3, family: str = "Qwen3VL") -> tuple[Any, Any, Any]:
    """Write the checkpoint of :func:`save_qwen_vl`; return the model, its tokenizer and its image processor."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    backend = byte_level()
    marks = [f"<|{name}|>" for name in ("vision_start", "vision_end", "video_pad", "image_pad")]
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    model = save_model(folder, backend.get_vocab_size(), layers, family)
    tokenizer.save_pretrained(folder)
    pixels = CONFIG["image_processor"]
    images = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": pixels["min_pixels"], "longest_edge": pixels["max_pixels"]},
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    images.save_pretrained(folder)
    return model, tokenizer, images


def reference(model: Any, tokenizer: Any, images: Any) -> Reference:
    """Return a :data:`Reference` of the model."""
    token = model.config.image_token_id

    @torch.inference_mode()
    def logits(text: str, pictures: Sequence[PIL.Image.Image], after: Sequence[int], special: bool = True) -> Tensor:
        given = images(list(pictures), return_tensors="pt") if pictures else None
        cells = [] if given is None else (given["image_grid_thw"].prod(-1) // 4).tolist()
        ids: list[int] = []
        for each in tokenizer(text, add_special_tokens=special)["input_ids"]:
            ids += [each] * (cells.pop(0) if each == token else 1)
        all_ids = torch.tensor([[*ids, *after]])
        more = {} if given is None else {**given, "mm_token_type_ids": (all_ids == token).int()}
        model.model.rope_deltas = None
        found: Tensor = model(input_ids=all_ids, **more).logits[0, -1 - len(after) :]
        return found

    return logits
