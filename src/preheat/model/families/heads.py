"""Heads behind the pooled state of a text, and behind the state of each token."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from preheat.errors import ModelError
from preheat.model.config import Config
from preheat.model.specs import ModelSpec
from preheat.model.tensor_specs import HeadActivation, HeadSpec, NormSpec
from preheat.pooling.classes import from_tokens, labels_of

_POOLER: tuple[str, HeadActivation, str] = ("pooler.dense", "tanh", "classifier")
_HEADS: dict[str, tuple[str, HeadActivation, str]] = {
    "Bert": _POOLER,
    "Gte": _POOLER,
    "New": _POOLER,
    "DistilBert": ("pre_classifier", "relu", "classifier"),
    "ModernBert": ("head.dense", "gelu", "classifier"),
}
"""The two modules of a head for classes, and the activation between them, by family."""

_HEAD: tuple[str, HeadActivation, str] = ("classifier.dense", "tanh", "classifier.out_proj")
"""The head of the other families."""

COLBERT_SIZE = 128
"""Numbers of a ColBERT's vector where the config does not say."""


def with_classifier(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return ``spec`` with the head that gives a text a number for each class."""
    inner, activation, last = _HEADS.get(config.architecture, _HEAD)
    hidden, labels = spec.hidden_size, len(labels_of(config.fields))
    modern = config.architecture == "ModernBert"
    if modern:
        config.refuse("classifier_activation", "gelu")
    first = HeadSpec(inner, hidden, hidden, activation, bias=not modern or config.flag("classifier_bias"))
    norms: list[HeadSpec | NormSpec] = [NormSpec("head.norm", hidden, config.positive("norm_eps", 1e-5), kind="layer",
                      bias=config.flag("norm_bias"))] if modern else []  # fmt: skip
    head: tuple[HeadSpec | NormSpec, ...] = (first, *norms, HeadSpec(last, labels, hidden))
    return replace(spec, pooled_head=head, ignored=_without(spec.ignored, head))


def with_token_head(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return ``spec`` with the layer that makes a ColBERT's vector of a token's state."""
    size = next((config.size(name) for name in ("colbert_dim", "dim", "projection_dim") if config.has(name)), None)
    head = (HeadSpec("linear", size or COLBERT_SIZE, spec.hidden_size, bias=False),)
    return replace(spec, pooled_head=head, ignored=_without(spec.ignored, head))


def classifying_decoder(spec: ModelSpec, config: Config, name: str) -> ModelSpec:
    """Return the decoder ``spec`` with the head of the architecture ``name``: a number for each class.

    With ``classifier_from_token`` the checkpoint is a generating model: :func:`with_token_rows`.
    """
    if from_tokens(config.fields) is not None:
        return replace(spec, architecture=name)
    labels, hidden = len(labels_of(config.fields)), spec.hidden_size
    return replace(
        spec, architecture=name, head=None, pooled_head=(HeadSpec("score", labels, hidden, bias=False),),
        ignored=(*spec.ignored, r"lm_head\..*"),
    )  # fmt: skip


def with_token_rows(spec: ModelSpec, ids: tuple[int, ...], outputs: int) -> ModelSpec:
    """Return ``spec`` without its output head, with the logits of the tokens ``ids`` in its place.

    One output of two tokens is the logit of the second token less the logit of the first one.
    """
    if spec.head is None or len(spec.head.parts) != 1 or spec.head.bias:
        raise ModelError(f"classifier_from_token needs an output head without a bias, and {spec.architecture} has none")
    ((module, height),) = spec.head.parts
    head = HeadSpec(module, outputs, spec.hidden_size, bias=False, rows=ids, height=height)
    return replace(spec, pooled_head=(head,))


def _without(ignored: tuple[str, ...], head: tuple[HeadSpec | NormSpec, ...]) -> tuple[str, ...]:
    """Return ``ignored`` without the patterns that match a tensor of ``head``."""

    def matches(pattern: str) -> Iterator[bool]:
        return (re.fullmatch(pattern, f"{each.name}.weight") is not None for each in head)

    return tuple(pattern for pattern in ignored if not any(matches(pattern)))
