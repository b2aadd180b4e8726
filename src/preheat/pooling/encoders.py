"""The names of encoders: the beginning of an architecture's name is the family, the end is the head."""

from __future__ import annotations

from typing import NamedTuple

ENCODERS = (
    "Bert", "Camembert", "DistilBert", "Gte", "JinaEmbeddingsV3", "MPNet", "ModernBert", "New", "NomicBert", "Roberta",
    "XLMRoberta",
)  # fmt: skip
"""The families of encoders. The longest one that begins a name counts."""

CLASSIFIER = "ForSequenceClassification"
"""The end of the name of a model that classifies texts, or pairs of texts."""

TOKENS = "ColBERT"
"""The head of a model that gives each token a vector."""

COLBERTS = {"HF_ColBERT": "Bert", "ColBERTModernBertModel": "ModernBert"}
"""The architectures with a vector for each token, and their families."""

HEADS = ("Model", "ForMaskedLM", CLASSIFIER)
"""The ends of names. Nothing here reads the head for masked words."""

UNREAD = ("NomicBert",)
"""The families without a head for classes here."""

SPARE = 1
"""Places behind the longest text of an encoder.

An engine keeps a place for the token that follows a text. An encoder never computes that token.
"""


class EncoderName(NamedTuple):
    """The family and the head in the name of an architecture."""

    family: str
    head: str


def encoder_name(architecture: object) -> EncoderName | None:
    """Return the parts of the name of an encoder; None for another architecture."""
    if (colbert := COLBERTS.get(str(architecture))) is not None:
        return EncoderName(colbert, TOKENS)
    for family in sorted(ENCODERS, key=len, reverse=True):
        head = str(architecture).removeprefix(family)
        if head == CLASSIFIER and family in UNREAD:
            continue
        if head in HEADS and str(architecture) == f"{family}{head}":
            return EncoderName(family, head)
    return None
