"""Small tokenizers of the two families that we run, built in memory."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

TEXT = [
    "def add(a, b):\n    return a + b\n",
    "Grüße 你好 😀👩‍👩‍👧 naïve café",
    "<|im_start|>user hello  world<|im_end|>",
] * 5
SPECIAL = ["<s>", "</s>", "<|im_start|>"]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens([AddedToken("<tool name>"), AddedToken("｜é｜")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def thinking() -> Backend:
    """Return ``byte_level`` with the two tokens between which reasoning lies."""
    backend = byte_level()
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return backend


def sentencepiece(strip: bool = True, metaspace: bool = False) -> Backend:
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdefghijklmnopqrstuvwxyz.,!()\n", "▁the", "▁▁", "▁a", "he", "▁he", "😀", "<0x4g>", "▁"]
    vocabulary = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(
        models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("h", "e")], unk_token="<unk>", byte_fallback=True)
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in ["<unk>", *SPECIAL]])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    if metaspace:
        backend.decoder = decoders.Metaspace()
    return backend
