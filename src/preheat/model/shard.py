"""The shard of a rank: a spec of the model's form.

No torch here. Heads, and the inner numbers of feed-forward blocks and experts, are divided among the ranks; so are the
rows of the output head. Layers that produce them (queries, keys and values; gate and up; the head) are split by rows,
layers that read them (the attention's output, down) by columns. Key/value heads are repeated where there are fewer than
ranks. The heads of a state are divided by key heads. Latent vectors, and the layer that makes them, are on every rank.
All other parts, the table of embeddings and the norms too, are on every rank.

With ``--enable-expert-parallel`` experts are not cut: rank r of W has the experts [r * E / W, (r + 1) * E / W) of E.

A layer is cut in the same way on one rank as on many, so that bits do not depend on the number of ranks. Rows are cut
into tiles, one product each, and columns into K splits (:mod:`preheat.ops.matmul`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec
from preheat.model.formats import FORMATS
from preheat.model.latent_specs import LatentSpec
from preheat.model.mlp_specs import DenseSpec, ExpertsSpec, MlpSpec, MoeSpec
from preheat.model.recurrence_specs import DeltaSpec
from preheat.model.specs import LayerSpec, ModelSpec
from preheat.model.tensor_specs import LinearSpec
from preheat.ops.values import k_splits_of
from preheat.settings import Settings

Range = tuple[int, int]


def sums_k_splits(settings: Settings) -> bool:
    """Whether layers are summed as on several ranks, even on one."""
    return settings.tensor_parallel_size > 1 or bool(settings.tp_invariant)


def shard(spec: ModelSpec, rank: int, world: int) -> ModelSpec:
    """Return the shard of ``spec`` on ``rank`` of ``world`` ranks.

    Raises ModelError, with the remedy, for sizes that cannot be divided.
    """
    cut = _Cut(rank, world)
    return replace(spec, layers=tuple(map(cut.layer, spec.layers)), head=spec.head and cut.head(spec.head))


def head_tile(vocab_size: int, world: int) -> int:
    """Return the rows of the head's tiles.

    The last tile may be smaller.
    """
    return -(-vocab_size // k_splits_of(world))


@dataclass(frozen=True)
class _Cut:
    rank: int
    world: int

    @property
    def k_splits(self) -> int:
        return k_splits_of(self.world)

    def layer(self, spec: LayerSpec) -> LayerSpec:
        return replace(spec, attention=self.attention(spec.attention), mlp=self.mlp(spec.mlp))

    def attention(self, spec: AttentionSpec | DeltaSpec) -> AttentionSpec | DeltaSpec:
        if isinstance(spec, DeltaSpec):
            return self.delta(spec)
        if spec.whole_qk_norm is not None:
            raise _not_yet("norms of all query heads together")
        if spec.latent is not None:
            return self._latent(spec, spec.latent)
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._divide("attention heads", heads, self.world)
        if kv_heads % self.world and self.world % kv_heads:
            raise self._error("key/value heads", kv_heads)
        first = self.rank * kv_heads // self.world  # several ranks share a head where there are fewer heads than ranks
        kv_range = first * dim, (first + max(kv_heads // self.world, 1)) * dim
        q_range = self._mine("a layer's queries", heads * dim)
        q_size, kv_size, kv_tiles = heads * dim, kv_heads * dim, min(self.k_splits, kv_heads)
        blocks = [(0, q_size, q_range, self.k_splits)]
        stored = 0 if spec.source is not None else 1 if spec.one_kv else 2
        blocks += [(q_size + at * kv_size, kv_size, kv_range, kv_tiles) for at in range(stored)]
        if spec.gated:
            blocks.append((q_size + stored * kv_size, q_size, q_range, self.k_splits))
        mine = q_range[0] // dim, q_range[1] // dim
        return replace(
            spec,
            num_heads=mine[1] - mine[0],
            kv=replace(spec.kv, num_kv_heads=(kv_range[1] - kv_range[0]) // dim),
            qkv=self._rows(spec.qkv, blocks),
            o=self._columns(spec.o),
            alibi=spec.alibi and spec.alibi[slice(*mine)],
            sinks=spec.sinks and replace(spec.sinks, kept=mine),
        )

    def delta(self, spec: DeltaSpec) -> DeltaSpec:
        """Cut the heads; a rank has key heads with all of their value heads, so a state never meets another rank's."""
        value, normed = spec.value, spec.value.rule.normed
        if normed > 1 and value.value_heads // normed % self.world:
            raise _not_yet(f"the norm of {normed} heads together, {spec.norm.name},")
        self._divide("key heads of a state", value.key_heads, self.world)
        first, own = self.rank * value.key_heads // self.world, value.key_heads // self.world
        sizes = value.parts
        starts = (sum(sizes[:at]) for at in range(len(sizes)))
        blocks = [
            (start, size, self._mine("rows of a state", size), self.k_splits)
            for start, size in zip(starts, sizes, strict=True)
        ]
        return replace(
            spec,
            value=replace(value, key_heads=own, value_heads=value.value_heads // self.world),
            qkv=self._rows(spec.qkv, blocks),
            o=self._columns(spec.o),
            first_head=first,
        )

    def _latent(self, spec: AttentionSpec, latent: LatentSpec) -> AttentionSpec:
        """Cut the queries, the maps of each head and the output; every rank has the latent vectors."""
        first, last = self._mine("attention heads", spec.num_heads)
        size, up = latent.up.key + latent.rope, latent.up
        mine, whole = (first * size, last * size), spec.num_heads * size
        queries, qkv = (0, whole, mine, self.k_splits), spec.qkv
        q = latent.q and self._rows(latent.q, [queries])
        if q is None:
            rest = qkv.outputs - whole
            qkv = self._rows(qkv, [queries, (whole, rest, (0, rest), 1)])
        up = replace(up, heads=last - first, first=first)
        return replace(
            spec, num_heads=last - first, qkv=qkv, o=self._columns(spec.o), latent=replace(latent, q=q, up=up)
        )

    def mlp(self, spec: MlpSpec) -> MlpSpec:
        if isinstance(spec, DenseSpec):
            return self.dense(spec)
        return self.moe(spec)

    def dense(self, spec: DenseSpec) -> DenseSpec:
        inner = spec.down.inputs
        mine = self._mine("intermediate numbers", inner)
        blocks = [(at, inner, mine, self.k_splits) for at in range(0, spec.gate_up.outputs, inner)]
        return replace(spec, gate_up=self._rows(spec.gate_up, blocks), down=self._columns(spec.down))

    def moe(self, spec: MoeSpec) -> MoeSpec:
        if spec.experts.bias and not spec.experts.dealt:
            raise _not_yet("the inner numbers of experts with biases", "add --enable-expert-parallel, or ")
        _require_known(spec.experts)
        shared = spec.shared and replace(spec.shared, block=self.dense(spec.shared.block))
        return replace(spec, experts=self._experts(spec.experts), shared=shared)

    def _experts(self, spec: ExpertsSpec) -> ExpertsSpec:
        """Deal whole experts to the ranks, or cut the inner numbers of each."""
        if spec.dealt:
            count, world = spec.num_experts, self.world
            if count % world:
                raise ModelError(
                    f"--enable-expert-parallel: the model's {count:,} experts cannot be dealt to {world} ranks in "
                    "equal numbers; lower --tensor-parallel-size, or leave --enable-expert-parallel out",
                    param="enable_expert_parallel",
                )
            mine = count // world
            return replace(spec, num_experts=mine, first=self.rank * mine, stored_experts=count)
        kept = self._mine("intermediate numbers of an expert", spec.inner)
        self._require_whole_groups(spec, "intermediate numbers of an expert", spec.inner)
        return replace(
            spec, inner=kept[1] - kept[0], kept=kept, stored_inner=spec.inner, k_splits=self._own_k_splits
        )  # fmt: skip

    def head(self, spec: LinearSpec) -> LinearSpec:
        """Cut the head into tiles of equal size but for the last.

        A rank has consecutive tiles.
        """
        tile = head_tile(spec.outputs, self.world)
        ends = [min(at * tile, spec.outputs) for at in range(self.k_splits + 1)]
        first, last = self.rank * self._own_k_splits, (self.rank + 1) * self._own_k_splits
        tiles = tuple(ends[at + 1] - ends[at] for at in range(first, last))
        if not all(tiles):
            raise self._error("tokens of the vocabulary", spec.outputs)
        return replace(spec, order=_ranges(spec, ends[first], ends[last]), tiles=tiles)

    @property
    def _own_k_splits(self) -> int:
        """Number of K splits on the rank."""
        return self.k_splits // self.world

    def _rows(self, spec: LinearSpec, blocks: list[tuple[int, int, Range, int]]) -> LinearSpec:
        """Keep a range of rows in each block, cut into tiles.

        A block is its first row, its size, the kept range within it, and the number of tiles of the whole block.
        """
        _require_known(spec)
        order, tiles = list[Range](), list[int]()
        for start, size, (first, last), count in blocks:
            self._divide(f"rows of {spec.parts[0][0]}", size, count)
            order += _ranges(spec, start + first, start + last)
            tiles += [size // count] * ((last - first) * count // size)
        return replace(spec, order=tuple(order), tiles=tuple(tiles))

    def _columns(self, spec: LinearSpec) -> LinearSpec:
        _require_known(spec)
        mine = self._mine(f"inputs of {spec.parts[0][0]}", spec.inputs)
        self._require_whole_groups(spec, f"inputs of {spec.parts[0][0]}", spec.inputs)
        return replace(
            spec, inputs=mine[1] - mine[0], columns=mine, stored_inputs=spec.inputs, k_splits=self._own_k_splits,
            order=spec.order or ((0, spec.stored_outputs),),
        )  # fmt: skip

    def _require_whole_groups(self, spec: LinearSpec | ExpertsSpec, what: str, inputs: int) -> None:
        """Raise ModelError where a K split ends inside a scale's inputs.

        Inputs grouped by ``g_idx`` may be cut anywhere.
        """
        if spec.scheme is None or spec.scheme.indexed:
            return
        group = 128 if spec.scheme.activations == "block" else spec.scheme.group
        if group and inputs % (self.k_splits * group):
            raise ModelError(
                f"--tensor-parallel-size {self.world}: a scale is shared by {group} of the model's {inputs:,} {what}, "
                f"and their {self.k_splits} equal parts are not whole groups; {self._remedy}",
                param="tensor_parallel_size",
            )

    def _mine(self, what: str, size: int) -> Range:
        """Return the rank's part of ``size``.

        Raises ModelError unless ``size`` makes whole K splits.
        """
        self._divide(what, size, self.k_splits)
        part = size // self.world
        return self.rank * part, (self.rank + 1) * part

    def _divide(self, what: str, size: int, parts: int) -> None:
        if size % parts:
            raise self._error(what, size, parts)

    def _error(self, what: str, size: int, parts: int | None = None) -> ModelError:
        return ModelError(
            f"--tensor-parallel-size {self.world}: the model's {size:,} {what} cannot be divided into "
            f"{parts or self.world} equal parts; {self._remedy}",
            param="tensor_parallel_size",
        )

    @property
    def _remedy(self) -> str:
        return "lower --tensor-parallel-size" if self.world > 1 else "leave --tp-invariant out"


def _require_known(spec: LinearSpec | ExpertsSpec) -> None:
    """Raise ModelError for a format that cannot be cut."""
    if spec.format not in FORMATS:
        raise _not_yet(f"layers that are stored as {spec.format}")


def _not_yet(what: str, remedy: str = "") -> ModelError:
    return ModelError(
        f"ranks cannot share {what} yet: {remedy}leave --tensor-parallel-size and --tp-invariant out",
        param="tensor_parallel_size",
    )


def _ranges(spec: LinearSpec, first: int, last: int) -> tuple[Range, ...]:
    """Return the stacked rows of the layer's rows [``first``, ``last``)."""
    return _part(spec.order or ((0, spec.stored_outputs),), first, last)


@cache
def _part(order: tuple[Range, ...], first: int, last: int) -> tuple[Range, ...]:
    """Return the rows [``first``, ``last``) of ``order``; layers share long orders."""
    at, found = 0, list[Range]()
    for start, end in order:
        begin, stop = max(first - at, 0), min(last - at, end - start)
        if begin < stop:
            found.append((start + begin, start + stop))
        at += end - start
    return tuple(found)
