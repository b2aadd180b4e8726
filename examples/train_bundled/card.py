"""The model card, filled in from what a run measured."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from . import sampling
from .corpus import HELDOUT_ONE_IN
from .layout import CONTEXT, VOCAB_SIZE
from .model import CausalLM

PROMPTS = [
    "def add(a, b):",
    "def fibonacci(n):",
    "for i in range(",
    "Return the",
    "If the optional argument",
]
QUESTIONS = [
    "Hello!",
    "Write a function to reverse a string.",
    "How do I read a file?",
    "What does os.path.join do?",
]
SAMPLE_TOKENS = 64

CARD = """\
---
license: apache-2.0
library_name: preheat
language: [en]
tags: [llama, code, python]
---

# The bundled model

A very small Llama ({parameters:,} parameters, bfloat16) that comes with preheat, so that the
first command works offline and tests run on text that makes sense. It completes simple Python,
writes prose in the style of Python's documentation, and answers in a chat format. It is **not**
a useful assistant: what it says of an API is often wrong, and with greedy decoding it
easily falls into repeating itself.

- `LlamaForCausalLM`: {shape[num_hidden_layers]} layers, hidden size {shape[hidden_size]},
  feed-forward {shape[intermediate_size]}, {shape[num_attention_heads]} query and
  {shape[num_key_value_heads]} key/value heads of {shape[head_dim]}, tied embeddings.
- Vocabulary {vocab}, byte-level BPE: every string survives encoding and decoding.
- Context {context} tokens.
- Documents begin with `<|begin|>` (the tokenizer adds it) and end with `<|endoftext|>`; a chat
  turn ends with `<|end|>`. Both stop generation.

## Training text and its licence

| text | files | bytes | tokens | times in one pass |
| --- | ---: | ---: | ---: | ---: |
{train_rows}

- *code*: Python 3.11.7's standard library, `Lib/**/*.py`, with half of the test files; without
  generated tables, `encodings`, `pydoc_data` and very large files.
- *docs*: the reStructuredText sources of Python 3.11.2's documentation, as Debian's
  `python3.11-doc` ships them.
- *chat*, *snippet*: made from those two by `examples/train_bundled/chat.py`: descriptions of
  objects, modules and glossary terms as answers to questions, and documented functions.
- *primer*: greetings, sums, some capitals and about a hundred simple functions, written for
  this project (`examples/train_bundled/primer.py`), under preheat's own licence.

Python's library and documentation are copyright © 2001 Python Software Foundation; all rights
reserved. They are used under the PSF licence agreement, of which `LICENSE-PYTHON.txt` is a
copy. Some library files carry their authors' own permissive notices; the documentation lists
them under "Licenses and Acknowledgements for Incorporated Software".

## Training and held-out loss

{steps:,} steps of AdamW, {seen:,} tokens ({epochs:.1f} passes over the text), {minutes:.1f} minutes
on one {device}. Peak learning rate {options[peak_lr]}, dropout {options[dropout]}, weight decay
{options[weight_decay]}, {options[batch]} sequences of {options[context]} tokens a step,
seed {options[seed]}.

About one file in {one_in} is held out by a hash of its path, with all that was made from it. The
losses are those of the chosen checkpoint before its weights were rounded to bfloat16.

| held-out text | files | bytes | nats per token | bits per byte |
| --- | ---: | ---: | ---: | ---: |
{heldout_rows}

For comparison, the mean loss on the training text over the last steps, with dropout, was
{train_loss:.2f} nats per token.

## How to repeat it

With Python 3.11 for the text, from the repository's root; the training step wants one GPU.

```sh
python -m examples.train_bundled corpus --docs DIR       # DIR: html/_sources of python3.11-doc
python -m examples.train_bundled tokenizer
python -m examples.train_bundled train --out RUN --steps {steps_plain}
python -m examples.train_bundled export --run RUN --licence LICENSE.txt   # Python's own
```

Corpus and tokenizer come out identical; the training is seeded, but GPU arithmetic may differ in
the last bits, so the weights come out alike, not equal.

## Samples

Greedy, at most {sample_tokens} new tokens, computed in float32 from the stored weights.

{samples}
"""


def collect_samples(model: CausalLM, tokenizer: Tokenizer) -> str:
    """Continuations of the prompts and answers to the questions, as fenced blocks."""
    parts = []
    for prompt in PROMPTS:
        text = sampling.complete(model, tokenizer, prompt, SAMPLE_TOKENS)
        parts.append(f"`{prompt}`\n\n{_fence(prompt + text)}")
    for question in QUESTIONS:
        text = sampling.answer(model, tokenizer, question, SAMPLE_TOKENS)
        parts.append(f'Chat: "{question}"\n\n{_fence(text)}')
    return "\n\n".join(parts)


def _fence(text: str) -> str:
    """Four backticks, since the model's own answers hold fences of three."""
    return f"````text\n{text.rstrip()}\n````"


def _heldout_rows(figures: dict[str, Any], listed: dict[str, Any]) -> str:
    rows = []
    for kind, entry in figures.items():
        held = listed.get(kind)
        files = str(held["files"]) if held else ""
        size = held["bytes"] if held else sum(part["bytes"] for part in listed.values())
        rows.append(f"| {kind} | {files} | {size:,} | {entry['nats_per_token']:.3f} | {entry['bits_per_byte']:.3f} |")
    return "\n".join(rows)


def _train_rows(listed: dict[str, Any]) -> str:
    return "\n".join(
        f"| {kind} | {entry['files']:,} | {entry['bytes']:,} | {entry['tokens']:,} | {entry['repeats']} |"
        for kind, entry in listed.items()
    )


def render(metrics: dict[str, Any], which: str, manifest: dict[str, Any], samples: str) -> str:
    """The card's text."""
    return CARD.format(
        parameters=metrics["parameters"],
        shape=metrics["options"]["shape"],
        vocab=VOCAB_SIZE,
        context=CONTEXT,
        train_rows=_train_rows(manifest["train"]),
        heldout_rows=_heldout_rows(metrics["heldout"][which], manifest["heldout"]),
        steps=metrics["steps"],
        steps_plain=metrics["steps"],
        seen=metrics["tokens_seen"],
        epochs=metrics["tokens_seen"] / metrics["tokens_per_epoch"],
        minutes=metrics["minutes"],
        device=metrics["device"],
        options=metrics["options"],
        one_in=HELDOUT_ONE_IN,
        train_loss=metrics["history"][-1]["train"],
        sample_tokens=SAMPLE_TOKENS,
        samples=samples,
    )
