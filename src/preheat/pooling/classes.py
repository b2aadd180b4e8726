"""The classes of a classifier, and the activation of its numbers, from a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from preheat.errors import ModelError

ClassActivation = Literal["sigmoid", "softmax", "none"]

MOST_LABELS = 1_000_000

_BY_PROBLEM: Mapping[str, ClassActivation] = {
    "regression": "none", "single_label_classification": "softmax", "multi_label_classification": "sigmoid",
}  # fmt: skip
_BY_CLASS: Mapping[str, ClassActivation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""Classes of torch by which sentence-transformers names the activation of a cross-encoder."""


class TokenClasses(NamedTuple):
    """Classes by the logits of ``tokens``; with ``subtracts`` one class, the second logit less the first."""

    tokens: tuple[str, ...]
    subtracts: bool

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(f"LABEL_{id}" for id in range(1 if self.subtracts else len(self.tokens)))


def from_tokens(config: Mapping[str, Any]) -> TokenClasses | None:
    """Return the classes that ``classifier_from_token`` states; None without it. Raises ModelError.

    Names are vLLM's: ``is_original_qwen3_reranker``, and ``method`` from_2_way_softmax, subtract; method
    no_post_processing takes the logits as they are.
    """
    given = config.get("classifier_from_token")
    if given is None:
        return None
    if not isinstance(given, list) or not given or not all(isinstance(token, str) for token in given):
        raise ModelError(f"config.json: classifier_from_token must be a list of tokens, got {given!r}")
    usual = "from_2_way_softmax" if config.get("is_original_qwen3_reranker") else None
    method = config.get("method", usual)
    if method not in ("from_2_way_softmax", "no_post_processing"):
        raise ModelError(
            "config.json: classifier_from_token needs is_original_qwen3_reranker, or method from_2_way_softmax or "
            f"no_post_processing, got method {method!r}"
        )
    if method == "from_2_way_softmax" and len(given) != 2:
        raise ModelError(f"config.json: classifier_from_token needs two tokens, no and yes, got {given!r}")
    return TokenClasses(tuple(given), method == "from_2_way_softmax")


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes, in their order. Raises ModelError.

    Without ``id2label`` there are ``num_labels`` classes, by default two, named LABEL_0, LABEL_1 and so on.
    """
    if (made := from_tokens(config)) is not None:
        return made.labels
    named, count = config.get("id2label"), config.get("num_labels")
    if isinstance(named, Mapping) and named:
        names = {str(id): name for id, name in named.items()}
        found = tuple(names.get(str(id)) for id in range(len(names)))
        if all(isinstance(name, str | int | float) for name in found):
            return tuple(map(str, found))
        raise ModelError(f"config.json: id2label must name the classes 0 to {len(names) - 1}, got {dict(named)!r}")
    count = 2 if count is None else count
    if type(count) is not int or not 1 <= count <= MOST_LABELS:
        raise ModelError(f"config.json: num_labels must be a number from 1 to {MOST_LABELS}, got {count!r}")
    return tuple(f"LABEL_{id}" for id in range(count))


def activation_of(config: Mapping[str, Any]) -> ClassActivation:
    """Return the activation of the classes' numbers. Raises ModelError for an unknown one.

    The files of sentence-transformers come first, then ``problem_type``. Without both, one class has a sigmoid, and
    several share a softmax. A single class never has a softmax by ``problem_type``, as it would always be 1 (source:
    the pipeline of transformers).
    """
    own = config.get("sentence_transformers")
    stated = (own.get("activation_fn") if isinstance(own, Mapping) else None) or config.get(
        "sbert_ce_default_activation_function"
    )
    if stated is not None:
        return _named("activation_fn", str(stated).rpartition(".")[2], _BY_CLASS)
    usual: ClassActivation = "sigmoid" if len(labels_of(config)) == 1 else "softmax"
    if (problem := config.get("problem_type")) is None:
        return usual
    found = _named("problem_type", str(problem), _BY_PROBLEM)
    return usual if found == "softmax" else found


def _named(field: str, name: str, known: Mapping[str, ClassActivation]) -> ClassActivation:
    if name not in known:
        raise ModelError(f"config.json: {field} {name!r} is not supported, only {', '.join(known)} are")
    return known[name]
