"""A recurrence over tokens with its short convolution: the gated delta rule, and that of Mamba 2.

A layer keeps two things of a sequence in a state slot: the last inputs of its convolution, and a matrix for each value
head. Both are values like a block of keys. They depend on the tokens before them, and on nothing else. Prompts and
decoding run the same recurrence, so a prompt may be cut anywhere.

Contract. Inputs are a token's queries, keys, values, gates, betas and decays, of the model's dtype. Everything below is
fp32, one operation after the other, none fused; each is rounded once. ``tree`` is the sum of 2^n numbers: the first
half plus the second half, element by element, until one number is left.

1. Convolution, for each channel of queries, keys and values: the oldest input times the first tap, plus the next input
   times the next tap, and so on to the token's own input. Inputs before position 0 are zero. y / (1 + exp(-y)) follows.
2. Each head of queries and of keys is multiplied by the reciprocal square root of tree(squares) + 1e-6, and queries
   then by 1 / sqrt(key dim).
3. beta = 1 / (1 + exp(-b)). decay = exp(rate * step) with step = softplus(a + bias) and rate = -exp(A_log). Up to 20,
   softplus(x) is log1p(exp(x)), else x.
4. With the matrix S [key dim, value dim] of a value head, which is zero before position 0, and its key head's k and q:
   S = S * decay; m = tree over the key dim of S * k; n = tree over the key dim of S * q; d = (value - m) * beta;
   S = S + k * d; out = n + tree(k * q) * d.
5. Each head of out is multiplied by the reciprocal square root of tree(squares) / value dim + eps, by the norm's
   weight, and by z / (1 + exp(-z)) of the gate z. The result is rounded to the model's dtype.

That is the gated delta rule. Each field of a :class:`~preheat.ops.values.StateRule` changes one place of it. So Mamba 2
is the same recurrence: keys are its B, queries its C, values its x, steps its dt, and skips its D.

- ``bias``, in 1: the channel's bias is added before the activation.
- Not ``unit``: step 2 is left out.
- ``limits``, in 3: a step below the first one becomes it, and a step above the second one becomes it.
- Not ``betas``, in 3: beta is the step. A token brings no betas.
- Not ``delta``, in 4: d = value * beta.
- ``skip``, at the end of 4: out = out + skip * value, with a number for each value head.
- ``gate_first``, in 5: out is multiplied by z / (1 + exp(-z)) before the squares are taken, and not again.
- ``normed``, in 5: so many neighboring heads have one sum of squares, divided by all of their numbers. It is the tree
  over the sums of its heads, with zeros behind them up to a power of two. Each head may have weights of its own.

No step mixes tokens, sequences or columns of S, but for the stated sums. So a row's bits depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.ops.values import Recurrence

EPS = 1e-6
"""Added to the sum of squares of a query or key head."""

LINEAR = 20.0
"""The greatest number whose softplus is not the number itself."""


@dataclass(frozen=True)
class DeltaWeights:
    """The sizes of a layer, and its weights besides linear layers, all fp32.

    ``taps`` are [channels, taps], the oldest first; channels are queries, keys and values. ``rate`` and ``bias`` are
    [value heads]. ``norm`` is [value dim], or [value heads, value dim]. ``conv_bias`` [channels] and ``skip`` [value
    heads] are there if the rule has them.
    """

    value: Recurrence
    taps: Tensor
    rate: Tensor
    bias: Tensor
    norm: Tensor
    eps: float
    conv_bias: Tensor | None = None
    skip: Tensor | None = None


@dataclass(frozen=True)
class DeltaStates:
    """The states of one layer, by state slot.

    ``window`` [slots, taps - 1, channels] holds the last inputs of the convolution in the model's dtype, the oldest
    first. ``matrix`` is fp32 [slots, value heads, key dim, value dim].
    """

    window: Tensor
    matrix: Tensor

    @classmethod
    def of(cls, value: Recurrence, slots: int, dtype: torch.dtype, device: torch.device) -> DeltaStates:
        """Return the zero states of ``slots`` slots."""
        window = torch.zeros(slots, value.taps - 1, value.channels, dtype=dtype, device=device)
        shape = slots, value.value_heads, value.key_dim, value.value_dim
        return cls(window, torch.zeros(shape, dtype=torch.float32, device=device))


class DeltaRows:
    """The rows of a step, for all layers, in parts.

    Part i computes ``extend[i]`` >= 1 tokens of the sequence with the state in slot ``read[i]``, and leaves the state
    behind them in slot ``write[i]``. A row is one part, unless ``row`` numbers the rows of the parts: each further part
    of a row reads the slot that the part before it wrote. So a row can leave the states behind several of its tokens.
    Tokens of a row are neighbors, and rows follow one another. No slot is written twice, or written by one row and read
    by another.
    """

    def __init__(
        self,
        read: np.ndarray,
        write: np.ndarray,
        extend: np.ndarray,
        taps: int,
        device: torch.device,
        *,
        row: np.ndarray | None = None,
    ) -> None:
        parts, kept = np.arange(len(extend)), taps - 1
        ends = extend.astype(np.int64).cumsum()
        starts = ends - extend
        head = parts if row is None else np.searchsorted(row, row)  # the first part of each part's row
        self.count = int(ends[-1]) if len(parts) else 0
        self.read, self.write, self.first, self.extend = (
            torch.from_numpy(each.astype(np.int64)).to(device) for each in (read, write, starts, extend)
        )
        self._turns = torch.from_numpy(parts - head)  # a part waits for the turns of its row's earlier parts
        heads = np.repeat(head, extend)
        inputs = _inputs(heads, np.arange(self.count) - starts[heads], starts, kept, taps)
        windows = _inputs(head, ends - starts[head], starts, kept, kept + 1)[:, :kept]
        self.inputs, self.windows = (torch.from_numpy(each).to(device) for each in (inputs, windows))

    def steps(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield for each turn its parts from the longest on, and for each place in a part the tokens there.

        All are int64; tokens are in the order of the parts.
        """
        for turn in range(int(self._turns.max()) + 1):
            own = (self._turns == turn).nonzero()[:, 0].to(self.extend.device)
            order = own[self.extend[own].argsort(descending=True, stable=True)]
            extend, first = self.extend[order], self.first[order]
            counts = (int((extend > step).sum()) for step in range(int(extend.max())))
            yield order, [first[:count] + step for step, count in enumerate(counts)]


def _inputs(head: np.ndarray, place: np.ndarray, starts: np.ndarray, kept: int, taps: int) -> np.ndarray:
    """Return where the inputs of a convolution lie: int64 [len(head), taps], the oldest first.

    The window of each part comes first, ``kept`` inputs each, then the tokens of the step. A convolution belongs to the
    token ``place`` of the row that begins with the part ``head``.
    """
    at = place[:, None] - kept + np.arange(taps)
    own = len(starts) * kept + starts[head][:, None] + at
    found: np.ndarray = np.where(at >= 0, own, head[:, None] * kept + kept + at)
    return found


def tree(x: Tensor, dim: int) -> Tensor:
    """Return the sum of ``x`` over ``dim``, of a power of two numbers.

    The first half is added to the second half until one number is left.
    """
    while (size := x.shape[dim] // 2) > 0:
        x = x.narrow(dim, 0, size) + x.narrow(dim, size, size)
    return x.squeeze(dim)


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)), a new tensor."""
    return x / x.neg().exp_().add_(1.0)


def convolved(history: Tensor, rows: DeltaRows, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the convolution of each token in fp32 [tokens, channels], with its activation.

    ``history`` [inputs, channels] has the taps - 1 inputs before each part, then the inputs of the step's tokens.
    ``bias`` is [channels].
    """
    found = history.index_select(0, rows.inputs[:, 0]).float() * taps[:, 0]
    for tap in range(1, taps.shape[1]):
        found += history.index_select(0, rows.inputs[:, tap]).float() * taps[:, tap]
    return silu(found if bias is None else found.add_(bias))


def steps_of(a: Tensor, weights: DeltaWeights) -> Tensor:
    """Return the step of each value head, fp32 [tokens, value heads]."""
    x = a.float() + weights.bias
    return torch.where(x > LINEAR, x, x.clamp(max=LINEAR).exp_().log1p_()).clamp_(*weights.value.rule.limits)


def unit(x: Tensor) -> Tensor:
    """Return ``x`` [..., dim] divided by its length."""
    return x * (tree(x * x, -1) + EPS).rsqrt_().unsqueeze(-1)


class Heads(NamedTuple):
    """The inputs of step 4, fp32.

    ``q`` and ``k`` are [tokens, key heads, key dim], ``v`` is [tokens, value heads, value dim], ``decay`` and ``beta``
    are [tokens, value heads].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


Recur = Callable[[Heads, Tensor, DeltaRows, Tensor], Tensor]
"""A function with the results of :func:`recur`."""


def recur(heads: Heads, matrix: Tensor, rows: DeltaRows, begins: Tensor, *, delta: bool = True) -> Tensor:
    """Run step 4 of the contract for all tokens, but for skips: return out fp32 [tokens, value heads, value dim].

    ``matrix`` [slots, value heads, key dim, value dim] is updated in place. Parts that ``begins`` bool [parts] names
    read zeros. ``delta`` is the rule's.
    """
    q, k, v, decay, beta = heads
    share, out = v.shape[1] // k.shape[1], torch.empty_like(v)
    both = tree(k * q, -1).repeat_interleave(share, 1)
    for order, steps in rows.steps():
        states = matrix.index_select(0, rows.read[order]).masked_fill_(begins[order][:, None, None, None], 0)
        for at in steps:
            state = states[: len(at)]
            key, query = (x.index_select(0, at).repeat_interleave(share, 1).unsqueeze(-1) for x in (k, q))
            state.mul_(decay.index_select(0, at)[:, :, None, None])
            seen = tree(torch.stack((state * query, state * key) if delta else (state * query,)), -2)
            change = v.index_select(0, at)
            change = (change - seen[1] if delta else change) * beta.index_select(0, at).unsqueeze(-1)
            state.add_(key * change.unsqueeze(-2))
            out.index_copy_(0, at, seen[0] + both.index_select(0, at).unsqueeze(-1) * change)
        matrix.index_copy_(0, rows.write[order], states)
    return out


def recur_of(value: Recurrence) -> Recur:
    """Return the reference of step 4 for layers of ``value``."""
    return partial(recur, delta=value.rule.delta)


def delta_rule(
    x: Tensor, begins: Tensor, rows: DeltaRows, weights: DeltaWeights, states: DeltaStates, *, by: Recur | None = None
) -> Tensor:
    """Return the layer's output [tokens, value heads * value dim] of the model's dtype, and move the states on.

    ``x`` [tokens, inputs] are queries, keys, values, gates, betas and decays, side by side; padding may follow the
    tokens of the ``rows``. ``begins`` bool [parts]: the part begins its sequence, so its state is zero whatever its
    slot holds. ``by`` runs step 4, by default :func:`recur`.
    """
    value, x = weights.value, x[: rows.count]
    mixed, z, *gates = x.split_with_sizes([value.channels, *value.parts[3:]], 1)
    window = states.window.index_select(0, rows.read).masked_fill_(begins[:, None, None], 0)
    history = torch.cat((window.flatten(0, 1), mixed))
    heads = heads_of(convolved(history, rows, weights.taps, weights.conv_bias), gates, weights)
    out = (by or recur_of(value))(heads, states.matrix, rows, begins)
    if weights.skip is not None:
        out = out + heads.v * weights.skip[:, None]
    states.window.index_copy_(0, rows.write, history[rows.windows])
    return finished(out, z, weights).to(x.dtype)


def heads_of(mixed: Tensor, gates: Sequence[Tensor], weights: DeltaWeights) -> Heads:
    """Run steps 2 and 3 of the contract.

    ``mixed`` fp32 [tokens, channels] is the convolution; ``gates`` are betas, if there are any, and decays.
    """
    value, steps = weights.value, steps_of(gates[-1], weights)
    q, k, v = mixed.split_with_sizes(value.parts[:3], 1)
    q, k = (part.reshape(-1, value.key_heads, value.key_dim) for part in (q, k))
    if value.rule.unit:
        q, k = unit(q) * value.key_dim**-0.5, unit(k)
    return Heads(
        q=q,
        k=k,
        v=v.reshape(-1, value.value_heads, value.value_dim),
        decay=(steps * weights.rate).exp_(),
        beta=1.0 / gates[0].float().neg().exp_().add_(1.0) if value.rule.betas else steps,
    )


def finished(out: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """Run step 5 of the contract, fp32 [tokens, value heads * value dim].

    ``out`` is fp32 [tokens, value heads, value dim], ``z`` [tokens, value heads * value dim].
    """
    rule, gate = weights.value.rule, silu(z.float()).view_as(out)
    if rule.gate_first:
        out = out * gate
    sums = tree(out * out, -1)
    if rule.normed > 1:
        sums = sums.view(len(sums), -1, rule.normed)
        zeros = (1 << (rule.normed - 1).bit_length()) - rule.normed
        sums = tree(torch.nn.functional.pad(sums, (0, zeros)), -1).repeat_interleave(rule.normed, 1)
    scale = (sums * (1.0 / (rule.normed * out.shape[-1]))).add_(weights.eps).rsqrt_()
    out = out * scale.unsqueeze(-1) * weights.norm
    return (out if rule.gate_first else out * gate).flatten(1)
