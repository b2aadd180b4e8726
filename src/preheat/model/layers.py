"""The parts of a loaded model, as a tree like its :class:`~preheat.model.specs.ModelSpec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.base.collective import Collective
from preheat.backends.base.layers import (
    AnyLayer,
    Close,
    Closing,
    ExpertsLayer,
    FusedInput,
    Join,
    Linear,
    Norm,
    ValuesNorm,
)
from preheat.model.latent import Latent
from preheat.model.layer_inputs import LayerEnd
from preheat.ops.delta import DeltaWeights
from preheat.ops.quantization import plain_rows

Linears = Iterator[tuple[str, AnyLayer]]
"""Linear layers, experts and layers of heads, each with its path in the spec."""


@dataclass(frozen=True, slots=True)
class OwnValues:
    """Steps that make the values of keys or of values; ``repeats``: the projection returns keys that are values too.

    ``norm`` norms each head's values, and has ``size`` numbers of all heads.
    """

    norm: Norm
    size: int
    repeats: bool

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return queries, keys and values of ``qkv`` [tokens, n], side by side."""
        if isinstance(self.norm, ValuesNorm):
            return self.norm.of_values(qkv, self.size // self.norm.weight.shape[-1], repeats=self.repeats)
        last = qkv[:, -self.size :]
        values = self.norm(last.reshape(-1, self.norm.weight.shape[-1])).view(last.shape)
        return torch.cat((qkv if self.repeats else qkv[:, : -self.size], values), 1)


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of attention.

    ``qk_norm`` is the norm of each query and key head, if there is one. ``whole_qk_norm`` norms all query heads
    together, and all key heads together. ``sinks`` are fp32 [heads], if there are any. ``latent`` are the maps of
    attention over latent vectors, and ``values`` the steps that make values of the projection.
    """

    qkv: Linear
    o: Linear
    qk_norm: Norm | None
    whole_qk_norm: tuple[Norm, Norm] | None = None
    sinks: Tensor | None = None
    latent: Latent | None = None
    values: OwnValues | None = None

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values of ``x`` [tokens, hidden], side by side."""
        qkv, first = self.qkv(x), 0
        if self.latent is not None:
            return self.latent.project(qkv)
        for each in self.whole_qk_norm or ():
            part = qkv[:, first : first + each.weight.shape[-1]]
            part.copy_(each(part))
            first += part.shape[1]
        return qkv if self.values is None else self.values(qkv)

    def linears(self) -> Linears:
        yield "qkv", self.qkv
        yield "o", self.o
        if self.latent is not None:
            yield from below("latent", self.latent.linears())


@dataclass(frozen=True, slots=True)
class RecurrenceWeights:
    """The weights of a layer with a state in place of attention."""

    qkv: Linear
    o: Linear
    delta: DeltaWeights
    qk_norm: None = None
    whole_qk_norm: None = None
    sinks: None = None
    latent: None = None

    def project(self, x: Tensor) -> Tensor:
        """Return the recurrence's inputs of ``x`` [tokens, hidden], side by side."""
        return self.qkv(x)

    def linears(self) -> Linears:
        yield "qkv", self.qkv
        yield "o", self.o


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """The feed-forward block, [tokens, hidden] -> [tokens, hidden]; ``gate_up`` includes the activation."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))

    def join(self, x: Tensor, norm: Norm, residual: Tensor, how: FusedInput | None) -> Tensor:
        """See :func:`joined`."""
        return joined(self.down, self.gate_up(x), norm, residual, how)

    @property
    def fused_input(self) -> FusedInput | None:
        """Fused input of the block, see :func:`fused`."""
        return fused(self.gate_up)

    def linears(self) -> Linears:
        yield "gate_up", self.gate_up
        yield "down", self.down


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that all tokens visit, with its gate.

    ``add`` is the backend's operation to add its output. ``gate`` is [1, hidden]; without one (None) the outputs are
    added as they are.
    """

    block: DenseMlp
    gate: Tensor | None
    add: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, routed: Tensor) -> Tensor:
        """Return ``routed`` plus this expert's gated output for ``x``.

        ``routed`` is the other experts' output.
        """
        return routed + self.block(x) if self.gate is None else self.add(routed, x, self.gate, self.block(x))


@dataclass(frozen=True, slots=True)
class Beside:
    """Norms of experts, their router and a shared expert that read the residual stream, and of their outputs."""

    router: Norm
    experts: Norm
    experts_out: Norm
    shared: Norm
    shared_out: Norm


class BesideInputs(NamedTuple):
    """The inputs of a block with norms :class:`Beside`, each [tokens, hidden]."""

    experts: Tensor
    router: Tensor
    shared: Tensor


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """A feed-forward block of experts, [tokens, hidden] -> [tokens, hidden].

    With norms ``beside``, the block reads the residual stream or its norms, and adds the normed output of the experts
    to the normed output of the shared expert.
    """

    router: Linear
    experts: ExpertsLayer
    shared: SharedExpert | None = None
    beside: Beside | None = None

    def __call__(self, x: Tensor | BesideInputs) -> Tensor:
        if (own := self.beside) is not None and self.shared is not None:
            given = self._inputs(own, x)
            routed = own.experts_out(self.experts(given.experts, self.router(given.router)))
            return own.shared_out(self.shared.block(given.shared)).add_(routed)
        assert not isinstance(x, BesideInputs)
        routed = self.experts(x, self.router(x))
        if self.shared is None:
            return routed
        return self.shared(plain_rows(x), routed)

    def join(self, x: Tensor, norm: Norm, residual: Tensor, how: FusedInput | None) -> Tensor | None:
        """See :func:`joined`: for experts with nothing beside them, whose outputs are sums over ranks."""
        join = getattr(self.experts, "join", None)
        if join is None or self.shared is not None or self.beside is not None:
            return None
        return cast("Tensor | None", join(x, self.router, norm, residual, how))

    def close(self, x: Tensor | BesideInputs, residual: Tensor, steps: Closing) -> Tensor | None:
        """Run the block and its last ``steps``; return the norm of the stream, or None where that takes more launches.

        ``steps`` have one norm, and nothing beside the block.
        """
        close, experts = _close_of(steps.norms[0]), cast(Any, self.experts)
        gated = self.shared is not None and self.shared.gate is not None
        if close is None or gated or not getattr(experts, "has_slots", False):
            return None
        own = self.beside
        if own is not None and self.shared is not None:
            given = self._inputs(own, x)
            shared, logits = self.shared.block(given.shared), self.router(given.router)
            steps = steps._replace(first=own.experts_out, beside=shared, beside_norm=own.shared_out)
            rows = experts.unsummed(given.experts, logits)
        else:
            assert not isinstance(x, BesideInputs)
            if self.shared is not None:
                steps = steps._replace(beside=self.shared.block(plain_rows(x)))
            rows = experts.unsummed(x, self.router(x))
        return close(rows, residual, steps)[0]

    @staticmethod
    def _inputs(own: Beside, x: Tensor | BesideInputs) -> BesideInputs:
        return x if isinstance(x, BesideInputs) else BesideInputs(own.experts(x), own.router(x), own.shared(x))

    @property
    def fused_input(self) -> FusedInput | None:
        """Fused input of the experts.

        The router and a shared expert read the same input.
        """
        if self.beside is not None:
            return None
        return fused(self.experts, self.router, *(() if self.shared is None else (self.shared,)))

    def linears(self) -> Linears:
        yield "router", self.router
        yield "experts", self.experts
        if self.shared is not None:
            yield from below("shared.block", self.shared.block.linears())


Mlp = DenseMlp | MoeMlp


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer."""

    attention: AttentionWeights | RecurrenceWeights
    mlp: Mlp
    input_norm: Norm
    post_norm: Norm
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    parallel: bool = False
    end: LayerEnd | None = None

    def joined_attention(self, attended: Tensor, residual: Tensor, how: FusedInput | None) -> Tensor | BesideInputs:
        """Add attention to ``residual``, from ``attended`` [tokens, heads * dim]; return the second block's input."""
        own, close = getattr(self.mlp, "beside", None), _close_of(self.post_norm)
        if own is None or close is None:
            return joined(
                self.attention.o, attended, self.post_norm, residual, how, out_norm=self.attention_out_norm
            )  # fmt: skip
        steps = Closing((own.experts, own.router, own.shared), first=self.attention_out_norm)
        return BesideInputs(*close(self.attention.o(attended), residual, steps))

    def joined_mlp(
        self, x: Tensor | BesideInputs, residual: Tensor, norm: Norm, how: FusedInput | None, given: Tensor | None
    ) -> Tensor:
        """Add the second block of ``x`` to ``residual``, run the layer's end; return the ``norm`` in the form ``how``.

        ``given`` are the layer's own inputs.
        """
        end, close = self.end, _close_of(norm) if how is None else None
        if close is not None and (end is None or end.reader is None):
            steps = Closing((norm,), last=self.mlp_out_norm, scalar=None if end is None else end.scalar)
            if isinstance(self.mlp, MoeMlp):
                if (found := self.mlp.close(x, residual, steps)) is not None:
                    return found
            elif end is not None:
                return close(self.mlp(cast(Tensor, x)), residual, steps)[0]
        if end is None and not isinstance(x, BesideInputs):
            return joined(self.mlp, x, norm, residual, how, out_norm=self.mlp_out_norm)
        out = cast(MoeMlp, self.mlp)(x)
        residual.add_(out if self.mlp_out_norm is None else self.mlp_out_norm(out))
        if end is not None:
            end(residual, given)
        return normed(norm, residual, None, how)

    def attention_output(self, attended: Tensor) -> Tensor:
        """Return the addition of attention to the residual, from ``attended`` [tokens, heads * dim]."""
        out = self.attention.o(attended)
        return out if self.attention_out_norm is None else self.attention_out_norm(out)

    def linears(self) -> Linears:
        yield from below("attention", self.attention.linears())
        yield from below("mlp", self.mlp.linears())
        if self.end is not None:
            yield from below("end", self.end.linears())


@dataclass(frozen=True, slots=True)
class GatheredHead:
    """An output head divided among ranks: [rows, hidden] -> [rows, vocab], the same on all ranks.

    Each rank has ``width`` rows of the head, the last one perhaps fewer.
    """

    mine: Linear
    width: int
    vocab_size: int
    collective: Collective

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self.mine(x)
        if logits.shape[1] < self.width:
            logits = F.pad(logits, (0, self.width - logits.shape[1]))
        beside = getattr(self.collective, "beside", None)  # in one launch
        if beside is not None and (found := beside(logits, self.vocab_size)) is not None:
            return cast(Tensor, found) if out is None else out.copy_(found)
        gathered = self.collective.gather(logits).transpose(0, 1).reshape(len(logits), -1)[:, : self.vocab_size]
        return gathered.contiguous() if out is None else out.copy_(gathered)


class HiddenStates:
    """The head of a model without one: unchanged hidden states.

    Hidden states are [rows, hidden].
    """

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return x if out is None else out.copy_(x)


class HeadElsewhere:
    """The output head of a stage that is not the last one.

    Another rank has the head.
    """

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        raise AssertionError("another stage has the head")


def fused(*readers: object) -> FusedInput | None:
    """Return the fused input that all ``readers`` accept from a norm.

    None: they read a tensor.
    """
    found = [getattr(reader, "fused_input", None) for reader in readers]
    wanted = [each for each in found if each is not None]
    if not wanted or not all(wanted[0].same(each) for each in wanted):
        return None
    first: FusedInput = wanted[0]
    return first if len(wanted) == len(found) else first.beside_plain()


def normed(norm: Norm, x: Tensor, residual: Tensor | None, how: FusedInput | None = None) -> Tensor:
    """Return the ``norm`` of ``x``.

    It has the form of the fused input ``how`` if there is one. ``x`` is first added to ``residual`` in place, if there
    is a residual.
    """
    if how is not None:
        return cast(Tensor, how.norm(norm, x, residual))
    return norm(x) if residual is None else norm.add(x, residual)


def joined(
    block: Linear | Mlp,
    x: Tensor,
    norm: Norm,
    residual: Tensor,
    how: FusedInput | None,
    *,
    out_norm: Norm | None = None,
) -> Tensor:
    """Add ``block`` of ``x`` to ``residual`` in place; return the ``norm`` of the sum in the form ``how``.

    The block's output goes through ``out_norm`` before, if there is one. A block may have a ``join``, which does all of
    it in fewer launches, or returns None where it cannot (:data:`preheat.backends.base.layers.Join`).
    """
    join: Join | None = getattr(block, "join", None)
    if out_norm is None and join is not None and (found := join(x, norm, residual, how)) is not None:
        return found
    out = block(x)
    if out_norm is not None and how is None and (close := _close_of(norm)) is not None:
        return close(out, residual, Closing((norm,), first=out_norm))[0]
    return normed(norm, out if out_norm is None else out_norm(out), residual, how)


def _close_of(norm: Norm) -> Close | None:
    """Return the norm's way to close a block in one launch, if it has one."""
    return cast("Close | None", getattr(norm, "close", None))


def below(path: str, linears: Linears) -> Linears:
    """Return ``linears`` with paths that begin with ``path``."""
    return ((f"{path}.{name}", linear) for name, linear in linears)
