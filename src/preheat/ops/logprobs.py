"""Log-probabilities of the raw logits, before penalties and temperature: the host reference.

Contract. A row's answer depends on that row alone: log_softmax works row by row, everything else is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from preheat.core import TokenLogprobs
from preheat.ops.order import BestIds, best_ids, mend, row_chunks


def token_logprobs(
    logits: Tensor,
    tokens: np.ndarray,
    alternatives: np.ndarray,
    logprob_ids: Sequence[Sequence[int]] = (),
    best: BestIds = best_ids,
) -> list[TokenLogprobs]:
    """Return one entry per row: token ``tokens[i]`` and alternatives with their log-probabilities.

    The alternatives are the tokens ``logprob_ids[i]``, if there are any, else the ``alternatives[i]`` most likely
    tokens (0: none). ``logits`` are float32 [rows, vocab] on the host and stay unchanged; ``tokens`` and
    ``alternatives`` are integers [rows]. A rank is 1 + the number of tokens before: tokens with a greater logit, or
    with an equal logit and a lower id. NaN counts as impossible, +inf as the greatest finite number. An impossible
    token has the log-probability -inf. ``best`` finds the ids.
    """
    entries: list[TokenLogprobs] = []
    for part in row_chunks(*logits.shape):
        entries += _entries(logits[part], tokens[part].astype(np.int64), alternatives[part], logprob_ids[part], best)
    return entries


def prompt_entries(entries: list[TokenLogprobs], finite: np.ndarray) -> list[TokenLogprobs]:
    """Set log-probabilities to NaN in rows that are not ``finite``.

    Return ``entries``. The entries belong to prompt tokens; ``finite`` is bool [rows]. A request with a NaN entry ends
    with an error.
    """
    for place in (~finite).nonzero()[0].tolist():
        entries[place].logprob = math.nan
    return entries


def _entries(
    logits: Tensor, tokens: np.ndarray, alternatives: np.ndarray, logprob_ids: Sequence[Sequence[int]], best: BestIds
) -> list[TokenLogprobs]:
    values = logits.numpy()
    if not np.isfinite(values.max(axis=-1)).all():
        values = mend(values)
    logprobs = torch.from_numpy(values).log_softmax(-1).numpy()
    found, vocab = list[TokenLogprobs](), values.shape[1]
    for row, (token, count) in enumerate(zip(tokens.tolist(), alternatives.tolist(), strict=True)):
        line, ids = values[row], list(logprob_ids[row]) if row < len(logprob_ids) else []
        if not ids and count:
            ids = best(line, min(count, vocab)).tolist()
        own, *others = _possible(logprobs[row][[token, *ids]]).tolist()
        found.append(TokenLogprobs(token, own, _rank(line, token), tuple(zip(ids, others, strict=True))))
    return found


def _rank(line: np.ndarray, token: int) -> int:
    """Return the 1-based rank of ``token`` in its row."""
    greater, equal = np.count_nonzero(line > line[token]), np.count_nonzero(line[:token] == line[token])
    return int(1 + greater + equal)


def _possible(logprobs: np.ndarray) -> np.ndarray:
    """Replace NaN, from a row without a possible token, by -inf."""
    return np.where(np.isnan(logprobs), -np.inf, logprobs)
