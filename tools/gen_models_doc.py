"""Write docs/models.md from the families, their tests and the settings: ``python -m tools.gen_models_doc``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from preheat.model.config import Config
from preheat.model.families import ENCODERS, FAMILIES, read_spec
from preheat.model.recurrence_specs import DeltaSpec
from preheat.model.specs import ModelSpec
from preheat.options.options import Option
from preheat.pooling.encoders import HEADS as ENCODER_HEADS
from preheat.pooling.encoders import encoder_name
from preheat.settings import OPTIONS
from tests import qwen_vl
from tests.cpu.checkpoints import GEMMA4 as GEMMA4_TEXT
from tests.cpu.checkpoints import LAYER_INPUTS, MISTRAL3_TEXT, MODELS, SMALL, STATES
from tests.llava import TEXT, VISION

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

LLAVA, GPT_OSS = "LlavaForConditionalGeneration", "GptOssForCausalLM"
QWEN_VL = "Qwen3VLForConditionalGeneration"
MISTRAL3, TEXT_OF = "Mistral3ForConditionalGeneration", "Qwen3_5ForConditionalGeneration"
GEMMA4 = "Gemma4ForConditionalGeneration"
LLAVA_SMALL = {
    "architectures": [LLAVA], "text_config": {**TEXT, "vocab_size": 337}, "vision_config": VISION,
    "image_token_index": 336,
}  # fmt: skip

HEAD = """# Models

<!-- Written by tools/gen_models_doc.py from the families and tests/cpu/checkpoints.py: change it there. -->

See whether a model runs: its `config.json` must name one of these architectures. Any other is refused, with the missing
feature if it is known. A field that asks for a missing computation is refused by its name.

Checkpoints are safetensors, with the names of the Hub or of transformers 5, or [GGUF files](gguf.md). A tensor that
nothing reads is an error. If `tie_word_embeddings` is true and the file has another output head than the embeddings,
the head is used, as with transformers 5.

"""

ENCODERS_HEAD = """
## Encoders

An encoder turns a text into vectors: [embeddings](embeddings.md#encoders). It runs on a CPU or a GPU, on one rank. Its
vectors and scores are compared with transformers (float32, cosine at least 0.99999): `tests/cpu/test_encoders.py`.

"""

TAIL = """
## How they are compared

The sizes belong to random checkpoints that Hugging Face transformers writes: hidden size, layers, query/key heads of so
many dimensions, and the same of the part of a vision tower that runs. On a CPU the logits of each are compared with
transformers at every position (float32, eager attention and experts, relative error at most 1e-5, of Gemma 4 3e-5):
`tests/cpu/test_model_families.py` reads them in one go, `tests/cpu/test_model_paged.py` and
`tests/cpu/test_family_engines.py` read some of each family in chunks, decode them and begin them from a cached prefix,
and demand the same bits; `tests/cpu/test_llava.py`, `tests/cpu/test_qwen_vl.py` and
`tests/cpu/test_qwen3_5_images.py` do so for LLaVA, Qwen3-VL and Qwen3.5, from images to logits and tokens
([Images](images.md) says how they are sent). On a GPU
`tests/cuda/test_families.py` compares each with transformers there (bfloat16, and float32 where rounding would send
tokens to other experts) and runs `preheat verify` on it; `tests/cuda/test_llava.py` does so for LLaVA, and
`tests/cuda/test_moe.py` compares experts with dense kernels.

## Gemma 4

The text models run on a CPU, in `--execution-mode eager`: dense ones, E2B and E4B with their inputs of each layer, and
26B-A4B with its experts. On a GPU `tests/cuda/test_families.py` compares them with transformers
too. Encoders of images and sound are not loaded, and images are refused.

- Full layers have larger heads than layers with a window, so the cache has entries of several sizes. All blocks take
  equally many bytes, and each [cache group](decisions/kv-cache.md#room-of-a-block) has as many layers as fit.
- The last layers of E2B and E4B read the keys and values of layers before them, and take no memory.
- On a GPU heads of 512 numbers need bfloat16, and ranks do not share the experts.
- The logits differ from transformers by at most 3e-5 in float32: scores are not divided by the root of a head's size.
- `--reasoning-parser gemma4` and `--tool-call-parser gemma4` read its answers ([tools](tools.md)).

## Models with states

Most layers of Qwen3-Next, Qwen3.5 and Granite 4 H keep a state of a sequence in place of keys and values: the last
inputs of a convolution and a matrix of float32 for each value head. Prompts and decoding run one recurrence, token
after token. The order of every sum is stated (`src/preheat/ops/delta.py`). So a state is a value of the tokens before
it, and chunks, batches and preemption change no bit: `tests/cpu/test_delta.py`, `tests/cpu/test_hybrids.py`.

Qwen's rule is the gated delta rule, and Granite's is that of Mamba 2. Both are one operation: the differences are the
fields of a `StateRule` (`src/preheat/ops/values.py`, `tests/cpu/test_state_rules.py`).

- They run on a CPU, in `--execution-mode eager`. Step 4 of the contract is a compiled function there.
- They run on a GPU, eager or by graphs. One kernel takes rows that decode and prompts, token after token. The order of
  its sums is the contract's (`src/preheat/backends/cuda/recurrence/kernels.py`). Heads of keys have 64 to
  256 numbers there (`tests/cuda/test_hybrids.py`).
- A sequence has a state slot; all slots are counted in the memory before the KV cache. One sequence of Qwen3.5-35B-A3B
  takes 61 MiB, so `--max-num-seqs` decides much of the memory.
- On GPUs a row that decodes has its state written behind each fourth token. The tokens between lie on a tape of the
  sequence, 4 MiB more. The next step passes them again by the same operations, and gets the same bits with fewer bytes.
- More state slots hold the states that [hits and drafts](#kept-states) need.
- Ranks divide the heads of a state by key heads, and so its convolution. On a CPU one,
  two and four ranks give the same bits, and so do one GPU and two.
- Granite 4 H has one norm of all heads of a layer (`mamba_n_groups` 1), which ranks cannot share: several ranks are
  refused there. With more groups, ranks have whole groups.
- A `time_step_limit` counts for prompts and for decoding. In transformers it counts for prompts alone.
- The layer that drafts (`mtp.*`) is read for method `mtp` alone
  ([speculation](speculation.md#layers-that-predict-one-token-further)). The encoder of images (`model.visual.*`) is
  read for architectures `…ForConditionalGeneration` ([images](images.md)).
- [Combinations](combinations.md) lists the features that do not work with states yet, with the reasons.

### Kept states

A prompt can go on behind a prefix only from the state at the prefix's end. So states are kept at ends of blocks, in
slots of their own, and a prefix is found up to the last block end with a kept state. A hit reads that slot and writes
its own: nothing is copied, and the answer has the bits of an answer without hits. Keeping a state changes no step and
preempts nothing; when slots are lacking, the oldest kept state is evicted.

| `--mamba-cache-mode` | States are kept |
| --- | --- |
| `align`, the default | at a prompt's last block end, at an answer's last one, and where prompts branch off |
| `all` | at each block end, as long as slots last |
| `none` | never, so prefix caching is off |

- A prompt that comes again is found up to its last block end, with blocks of any `--block-size`; so are an answer and
  the next message of a chat. A beginning that prompts share is found from the third prompt on, in mode `all` from the
  second.
- `--mamba-block-size` keeps only ends at its multiples. `--max-kept-states` sets the number of slots. By default there
  is one for each sequence, and one more for each draft token of a sequence.
- Drafts ([speculation](speculation.md)) leave the state behind each draft in a slot, and the sequence goes on from the
  slot behind the last accepted one. A row has fewer drafts when fewer slots are free. A state behind a rejected draft
  is never read, and never filed.
- The check at boot begins contexts from kept states, and computes over wrong drafts: `prefix hit` and `drafts`.

Adding a family: [adding.md](adding.md#a-model-family).
"""


ENCODERS_ON_GPU = ("Bert", "ModernBert", "NomicBert")
"""Encoders that `tests/cuda/test_encoders.py` runs."""


def render() -> str:
    """Return the text of docs/models.md."""
    columns = ["Family", "Special", "Compared with transformers at", "CPU", "GPU", "Tensor-parallel", "Quantized"]
    rows = [_row(family, names) for family, names in _families().items()]
    table = f"{_line(columns)}{_line(['---'] * len(columns))}{''.join(rows)}"
    return f"{HEAD}{table}{ENCODERS_HEAD}{_encoders()}{TAIL}"


def _encoders() -> str:
    """Return the table of encoders."""
    rows = ["Architectures", "", "CPU", "GPU"], ["---"] * 4
    found = []
    for family, make in ENCODERS.items():
        names = "<br>".join(f"`{family}{head}`" for head in ENCODER_HEADS if encoder_name(f"{family}{head}"))
        about = " ".join((make.__doc__ or "").partition("\n\n")[0].split())
        gpu = (
            "yes" if family in ENCODERS_ON_GPU else "not yet" if family == "MPNet" else "by the same kernels, not tried"
        )
        found.append([names, about, "yes", gpu])
    return "".join(map(_line, [*rows, *found]))


def _families() -> dict[Callable[[Config], ModelSpec], list[str]]:
    """Return the architectures of each family: some have two names."""
    found: dict[Callable[[Config], ModelSpec], list[str]] = {}
    for name in sorted(FAMILIES, key=str.lower):
        found.setdefault(FAMILIES[name], []).append(name)
    return found


def _row(family: Callable[[Config], ModelSpec], names: list[str]) -> str:
    adds = " ".join((family.__doc__ or "").partition("\n\n")[0].split())
    specs = [_spec(f"{kind}ForCausalLM", changes) for kind, changes in MODELS.values() if f"{kind}ForCausalLM" in names]
    if LLAVA in names:
        specs = [read_spec(LLAVA_SMALL)]
    if MISTRAL3 in names:
        specs = [read_spec({"architectures": [MISTRAL3], "text_config": MISTRAL3_TEXT})]
    if QWEN_VL in names:
        specs = [read_spec(qwen_vl.CONFIG)]
    if TEXT_OF in names:
        config = SMALL | STATES | {"model_type": "qwen3_5_text"}
        specs = [read_spec({"architectures": [TEXT_OF], "text_config": config})]
    if GEMMA4 in names:
        specs = [read_spec({"architectures": [GEMMA4], "text_config": SMALL | GEMMA4_TEXT | LAYER_INPUTS})]
    states = any(spec.has_states for spec in specs)
    sizes, whole = [_sizes_of(spec) for spec in specs], any(spec.attentions[0].whole_qk_norm for spec in specs)
    assert sizes, f"no checkpoint of {names} is compared with transformers"
    cells = ["<br>".join(f"`{name}`" for name in names), adds, "<br>".join(dict.fromkeys(sizes)), "yes"]
    stacked = GPT_OSS in names
    together = any(isinstance(each.attention, DeltaSpec) and each.attention.value.rule.normed > 1
                   for spec in specs for each in spec.layers)  # fmt: skip
    return _line(
        [
            *cells,
            "yes",
            "whole experts" if stacked else "no" if whole else "whole norms" if together else "yes",
            "mxfp4" if stacked else "not yet" if states else _offered(OPTIONS["quantization"]),
        ]
    )


def _spec(architecture: str, changes: dict[str, Any]) -> ModelSpec:
    own = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
           "n_positions": "max_position_embeddings", "d_model": "hidden_size", "n_heads": "num_attention_heads",
           "n_layers": "num_hidden_layers", "max_seq_len": "max_position_embeddings"}  # fmt: skip
    config = SMALL | {"norm_topk_prob": True} | changes
    return read_spec(config | {name: config[field] for name, field in own.items()} | {"architectures": [architecture]})


def _sizes_of(spec: ModelSpec) -> str:
    attention = spec.attentions[0]
    heads = f"{attention.num_heads}/{attention.num_kv_heads} of {attention.head_dim}"
    found = f"{spec.hidden_size}, {spec.num_layers}, {heads}"
    if (
        state := next((each.attention for each in spec.layers if isinstance(each.attention, DeltaSpec)), None)
    ) is not None:
        own = state.value
        found += f"<br>states: {own.value_heads}/{own.key_heads} of {own.key_dim} by {own.value_dim}"
    if (vision := spec.vision) is None:
        return found
    hidden, dim = vision.patches.outputs, vision.patches.outputs // vision.num_heads
    tower = f"{hidden}, {len(vision.layers)}, {vision.num_heads}/{vision.num_heads} of {dim}"
    most = "up to " if vision.any_size else ""
    return f"{found}<br>tower: {tower}, {most}{vision.tokens} positions"


def _offered(option: Option) -> str:
    return "no" if isinstance(option.later, str) else "yes"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
