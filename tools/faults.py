"""The faults that :mod:`tools.planted_faults` plants: each a few replacements in a copy of ``src``."""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    """A replacement in ``src/preheat/<path>``: ``old``, which occurs once, becomes ``new``."""

    path: str
    old: str
    new: str


class Fault(NamedTuple):
    """A fault: its name, its edits, and the test nearest to it.

    ``engine`` is the one of :data:`tools.fault_engines.ENGINES` that shows it. ``unseen`` is the reason why
    ``preheat verify`` cannot see it, if it does not.
    """

    name: str
    edits: tuple[Edit, ...]
    test: str
    engine: str = "plain"
    unseen: str = ""


_LINEAR = "backends/cpu/linear.py"
_PAGED = "backends/cpu/paged_attention.py"
_ATTENTION = "backends/cpu/attention.py"
_SAMPLER = "ops/sampler.py"
_STAGES = "execution/logit_stages.py"
_PREFIX = "schedule/prefix.py"
_BATCH = "execution/input_batch.py"

_MERGE = "total, norm = part[:, 0] * weight[:, 0], weight[:, 0]\n"
_PLAN = "        first_rows = {\n            each:"
_AGAIN = """        again = (step.extend > 1) & (step.first + step.extend > tables.prompt_len[step.slots])
        self.again = torch.from_numpy(np.flatnonzero(again[row]))
"""
_ROPE = "            apply_rope_(turned[..., layer.still :], *self._turns[id(layer.rope)])\n"
_SUM = "    scale = (wide * wide).sum(-1, True).mul_(share).add_(eps).rsqrt_()\n    normed"
_DECODE = "backends/cpu/decode_attention.py"
_DECODE_MERGE = "        total, norm = weighted[0], weight[0]\n"
_TURNED = "            weighted, weight = weighted.flip(0), weight.flip(0)\n"
_REDUCED = "tests/cpu/test_model_ops.py::test_a_rows_bits_depend_on_nothing_but_the_row"
_FEATURES = "tests/cpu/test_verify_features.py::test_all_is_well_and_was_really_taken"
_SAMPLING = "tests/cpu/test_sampler.py"
_RESULTS, _SLOTS = "schedule/results.py", "schedule/slots.py"
_FRONTEND = "frontend/input_processor.py"
_CACHED = "tests/cpu/test_verify_cache.py::test_each_planted_fault_is_found_by_its_path"
_SERVED = "tests/cpu/test_verify_cache.py::test_broken_contracts_are_found_through_the_frontend"
_WINDOWS = "tests/cpu/test_verify_windows.py"
_LORA, _ADAPTER_SLOTS = "backends/cpu/lowrank.py", "schedule/adapters.py"
_ADAPTED = "tests/cpu/test_lora.py"
_RESUMED = "tests/cpu/test_resumed.py::test_a_resumed_row_is_computed_as_the_first_time"


def _split_from(rows: int) -> tuple[Edit, ...]:
    new = f"""    rows, inputs = x.shape
    if rows > {rows}:
        half = x.clone()
        half[:, inputs // 2 :] = 0
        return _product(half, weight, bias) + _product(x - half, weight)
"""
    return (Edit(_LINEAR, "    rows, inputs = x.shape\n    size", new + "    size"),)


FAULTS = (
    Fault("linear layers cut the inputs in two above 8 rows", _split_from(8), _REDUCED),
    Fault(
        "linear layers cut into other, unproven parts above 600 rows", _split_from(600),
        "tests/cpu/test_model_ops.py::test_more_rows_than_a_linear_part_have_the_bits_of_few",
    ),
    Fault(
        "linear layers at unproven sizes",
        (Edit(_LINEAR, "    if size == rows:", "    size = 1\n    if size == rows:"),),
        "tests/cpu/test_model_ops.py",
        unseen="on this processor the library happens to add up the same at the sizes that were not proven",
    ),
    Fault(
        "a norm with another order from 256 rows on",
        (Edit("ops/norm.py", _SUM,
              "    squares = wide * wide\n"
              "    total = squares.sum(-1, True) if len(x) < 256 else squares.cumsum(-1)[..., -1:].clone()\n"
              "    scale = total.mul_(share).add_(eps).rsqrt_()\n    normed"),),
        _REDUCED,
    ),
    Fault(
        "a norm that is another one the first time",
        (Edit("ops/norm.py", "    normed = wide * scale\n",
              "    normed = wide * scale * (1 if _calls else 1 + 2**-10)\n    _calls.append(1)\n"),
         Edit("ops/norm.py", "from preheat.ops.opaque import opaque\n",
              "from preheat.ops.opaque import opaque\n\n_calls: list[int] = []\n")),
        "tests/cpu/test_profiling_run.py",
    ),
    Fault(
        "KV splits merged from last to first, in all rows",
        (Edit(_PAGED, _MERGE, "part, weight = part.flip(1), weight.flip(1)\n    " + _MERGE),
         Edit(_DECODE, _DECODE_MERGE, "        if True:\n" + _TURNED + _DECODE_MERGE)),
        "tests/cpu/test_attention.py::test_splits_are_merged_from_first_to_last",
        unseen="all rows are summed in the same other order: their bits still depend on nothing else",
    ),
    Fault(
        "KV splits merged from last to first from three on, in decoding rows",
        (Edit(_DECODE, _DECODE_MERGE, "        if len(weight) > 2:\n" + _TURNED + _DECODE_MERGE),),
        "tests/cpu/test_attention.py",
    ),
    Fault(
        "attention with an unproven number of rows",
        (Edit(_PAGED, "    size = _proven_rows(rows, head_dim, dtype, torch.get_num_threads())\n    if",
              "    size = rows\n    if"),),
        "tests/cpu/test_attention.py",
    ),
    Fault(
        "a resumed row whose rope is computed otherwise",
        (Edit(_ATTENTION, _PLAN, _AGAIN + _PLAN),
         Edit(_ATTENTION, _ROPE, _ROPE + "            turned[self.again] *= 1 + 2**-7\n")),
        _RESUMED,
    ),
    Fault(
        "a resumed row whose query norm is computed otherwise",
        (Edit(_ATTENTION, _PLAN, _AGAIN + _PLAN),
         Edit(_ATTENTION, "turned.copy_(layer.qk_norm(turned))\n",
              "turned.copy_(layer.qk_norm(turned))\n                turned[self.again] *= 1 + 2**-7\n")),
        _RESUMED, engine="windows",
    ),
    Fault(
        "positions of a chunk begin one late",
        (Edit(_BATCH, "np.arange(count) + (schedule.ends - rows.ends).repeat",
              "np.arange(count) + (schedule.ends - rows.ends + (schedule.first > 0)).repeat"),),
        "tests/cpu/test_input_batch.py",
    ),
    Fault(
        "compaction moves all layers but the last",
        (Edit("execution/kv_cache.py", "for blocks in self.blocks:", "for blocks in self.blocks[:-1]:"),),
        "tests/cpu/test_kv_cache.py",
    ),
    Fault(
        "a block's hash leaves out the block before",
        (Edit(_PREFIX, "content = parent + tokens[", "content = chain_root(request) + tokens["),),
        "tests/pure/test_prefix.py",
    ),
    Fault(
        "one prefix cache for all salts", (Edit(_PREFIX, "request.cache_salt.encode()", 'b""'),),
        "tests/pure/test_prefix.py",
    ),
    Fault(
        "a layer that overflows",
        (Edit("model/layers.py", "joined(self.mlp, x, norm", "joined(self.mlp, x * 1e38 * 1e38, norm"),),
        "tests/cpu/test_boot_special_contexts.py::test_all_is_well",
    ),
    Fault(
        "noise of the position after",
        (Edit(_STAGES, "position=position - slots.prompt_len[chosen]",
              "position=position - slots.prompt_len[chosen] + 1"),),
        _SAMPLING,
    ),
    Fault(
        "noise that depends on the number of rows",
        (Edit(_STAGES, "seed=slots.seed[chosen]", "seed=slots.seed[chosen] + np.uint64(len(chosen) > 4)"),),
        "tests/cpu/test_sampler_invariance.py",
    ),
    Fault(
        "noise that knows half of the seed",
        (Edit("ops/philox.py", "(seed & _LOW, seed >> _SHIFT)", "(seed & _LOW, seed & np.uint64(0))"),),
        "tests/cpu/test_philox.py",
    ),
    Fault(
        "top_k keeps one more",
        (Edit("schedule/slots.py", "lambda params: max(params.top_k, 0))",
              "lambda params: params.top_k + 1 if params.top_k > 0 else 0)"),),
        _SAMPLING,
    ),
    Fault(
        "a repetition penalty that sees only the last 1,024 tokens of the prompt",
        (Edit(_SAMPLER, "self.seen[slot, prompt_ids] = True", "self.seen[slot, prompt_ids[-1024:]] = True"),),
        "tests/cpu/test_sampler_penalties.py",
    ),
    Fault(
        "after a preemption the output counts as prompt",
        (Edit(_SAMPLER, "self.reset(int(slots[place]), prompt, output)",
              "self.reset(int(slots[place]), rows.tokens[i][: lengths[place]], output[:0])"),),
        "tests/cpu/test_sampler_penalties.py",
    ),
    Fault(
        "a frequency penalty that counts a token once",
        (Edit(_SAMPLER, "count.astype(np.float32)", "(count > 0)"),),
        "tests/cpu/test_sampler_penalties.py",
    ),
    Fault(
        "min_tokens bans nothing", (Edit(_STAGES, "if length < min_length else ()", "if False else ()"),),
        _SAMPLING,
    ),
    Fault(
        "min_tokens ends one token early", (Edit(_STAGES, "if length < min_length else ()",
                                                "if length < min_length - 1 else ()"),),
        _SAMPLING,
    ),
    Fault(
        "prompt logprobs lose a token at a chunk's end",
        (Edit(_BATCH, "first = int(schedule.first[row]) + 1\n",
              "first = int(schedule.first[row]) + 1 + bool(schedule.first[row])\n"),),
        _FEATURES,
    ),
    Fault(
        "an adapter slot keeps the adapter before where the next leaves a layer alone",
        (Edit(_LORA, "        self._tiles[slot] = 0\n", "        return\n"),),
        f"{_ADAPTED}::test_bits_depend_neither_on_the_slot_nor_on_the_largest_rank_nor_on_eviction", engine="adapters",
    ),
    Fault(
        "an adapter slot keeps ranks of the adapter before",
        (Edit(_LORA, "= packed.scale, len(packed.b), packed.dtype",
              "= packed.scale, max(len(packed.b), self._tiles[slot]), packed.dtype"),),
        f"{_ADAPTED}::test_bits_depend_neither_on_the_slot_nor_on_the_largest_rank_nor_on_eviction", engine="adapters",
    ),
    Fault(
        "rows have the adapter of the row before",
        (Edit(_BATCH, "slots.adapter[schedule.slots]\n", "np.roll(slots.adapter[schedule.slots], 1)\n"),),
        f"{_ADAPTED}::test_rows_of_several_adapters_and_of_none_have_the_bits_they_have_alone", engine="adapters",
    ),
    Fault(
        "rows without an adapter get zeros added",
        (Edit("backends/layer.py", "        terms.expand(y, shrunk, roots)\n        return y\n",
              "        terms.expand(y, shrunk, roots)\n        y += 0.0\n        return y\n"),),
        "tests/cpu/test_lora_ops.py::test_rows_without_an_adapter_are_left_alone_with_the_sign_of_zero",
        engine="adapters",
        unseen="only the sign of a zero changes, and no sum of the model's weights is a zero with a sign",
    ),
    Fault(
        "one prefix cache for all adapters", (Edit(_PREFIX, "sequence.adapter_digest.encode()", 'b""'),),
        f"{_ADAPTED}::test_equal_prompts_of_different_adapters_share_no_blocks_and_equal_adapters_do",
        engine="adapters",
    ),
    Fault(
        "the slot of an adapter is given away while rows use it",
        (Edit(_ADAPTER_SLOTS, "if digest not in self._users), None)", "if len(self._slot_of) == self.count), None)"),),
        "tests/pure/test_lora.py", engine="adapters",
    ),
    Fault(
        "an adapter that is put into its slot only the first time",
        (Edit(_ADAPTER_SLOTS, "            self._loads.append((self._slot_of[digest], adapter))\n",
              "            if digest not in _seen:\n"
              "                self._loads.append((self._slot_of[digest], adapter))\n            _seen.add(digest)\n"),
         Edit(_ADAPTER_SLOTS, 'BASE = ""\n', '_seen: set[str] = set()\nBASE = ""\n')),
        f"{_ADAPTED}::test_bits_depend_neither_on_the_slot_nor_on_the_largest_rank_nor_on_eviction", engine="adapters",
    ),
    Fault(
        "a block's hash leaves out its last token",
        (Edit(_PREFIX, "tokens[first : first + size].tobytes()", "tokens[first : first + size - 1].tobytes()"),),
        _CACHED,
    ),
    Fault(
        "a block's hash leaves out embeddings",
        (Edit(_PREFIX, "        content += _images(request, first, size)\n", "        pass\n"),),
        "tests/pure/test_prefix.py", engine="embeds",
    ),
    Fault(
        "a block is published one token early",
        (Edit(_RESULTS, "first, last = schedule.first // size, ends // size",
              "first, last = schedule.first // size, (ends + 1) // size"),),
        _CACHED,
    ),
    Fault(
        "the block that an answer fills with its last token is not published",
        (Edit(_RESULTS, "first, last = schedule.first // size, ends // size",
              "first, last = np.maximum(schedule.first - 1, 0) // size, (ends - 1) // size"),),
        _CACHED,
    ),
    Fault(
        "a swap moves only its first 16 pairs",
        (Edit("execution/executor.py", "swap_parts(swaps.pairs, swaps.size,",
              "swap_parts(swaps.pairs[:16], swaps.size,"),),
        _CACHED,
    ),
    Fault(
        "a swap leaves the tables of the last row as they were",
        (Edit("schedule/running.py", "self.slots.move_blocks(self.order, moved)",
              "self.slots.move_blocks(self.order[:-1], moved)"),),
        "tests/pure/test_compaction.py",
    ),
    Fault(
        "evicted blocks come back from the place beside theirs",
        (Edit("execution/offload.py", "copy_(kept[place], non_blocking=True)",
              "copy_(kept[place - 1], non_blocking=True)"),),
        "tests/cpu/test_kv_offload.py", engine="offload",
    ),
    Fault(
        "evicted blocks come back without their last layer",
        (Edit("execution/offload.py", "blocks[:, block].copy_(kept[place], non_blocking=True)",
              "blocks[:-1, block].copy_(kept[place][:-1], non_blocking=True)"),),
        "tests/cpu/test_kv_offload.py", engine="offload",
    ),
    Fault(
        "windows one token longer",
        (Edit(_ATTENTION, "Heads(each.window, each", "Heads(each.window and each.window + 1, each"),),
        _WINDOWS, engine="windows",
    ),
    Fault(
        "windows one token shorter",
        (Edit(_ATTENTION, "Heads(each.window, each", "Heads(each.window and each.window - 1, each"),),
        _WINDOWS, engine="windows",
    ),
    Fault(
        "windows one token longer in rows that decode",
        (Edit(_DECODE, "at.sub_(self.heads.window)", "at.sub_(self.heads.window + 1)"),),
        _WINDOWS, engine="windows",
    ),
    Fault(
        "windows one token longer in rows that are read",
        (Edit(_ATTENTION, "plan_tiles(cut, tables.block_size, kind.window, most",
              "plan_tiles(cut, tables.block_size, kind.window and kind.window + 1, most"),),
        _WINDOWS, engine="windows",
    ),
    Fault(
        "seeds cut to 32 bits by the frontend",
        (Edit(_FRONTEND, "params.seed % 2**64", "params.seed % 2**32"),), _SERVED,
    ),
    Fault(
        "the choices of a request share their noise",
        (Edit(_FRONTEND, "state.max_tokens, index, stop_ids,", "state.max_tokens, 0, stop_ids,"),), _SERVED,
    ),
    Fault(
        "the frontend forgets a request's salt",
        (Edit(_FRONTEND, "                state.cache_salt, state.segments,", '                "", state.segments,'),),
        _CACHED,
    ),
    Fault(
        "a sequence ends one token before its length",
        (Edit(_RESULTS, "sampled.positions + 1 >= slots.max_len", "sampled.positions + 2 >= slots.max_len"),),
        "tests/pure/test_scheduler.py",
    ),
    Fault(
        "stop ids end a sequence one token before min_tokens",
        (Edit(_RESULTS, "sampled.positions >= slots.min_len[", "sampled.positions + 1 >= slots.min_len["),
         Edit(_STAGES, "if length < min_length else ()", "if length < min_length - 1 else ()")),
        "tests/pure/test_scheduler.py",
    ),
    Fault(
        "a slot keeps the stop ids of its owner before",
        (Edit(_SLOTS, "        self.stop_ids[:, slot] = NO_ID\n", ""),),
        "tests/pure/test_scheduler.py",
    ),
    Fault(
        "a slot keeps parameters of its owner before where the next has the default",
        (Edit(_SLOTS, "            getattr(self, name)[slots] = field.of(request)\n",
              "            if value := field.of(request):\n                getattr(self, name)[slots] = value\n"),),
        "tests/pure/test_scheduler.py",
    ),
    Fault(
        "a slot keeps the token counts of its owner before",
        (Edit(_SAMPLER, "(self._owner[slots] != owner) | (counted > lengths)", "counted > lengths"),),
        "tests/cpu/test_sampler_penalties.py",
    ),
    Fault(
        "penalties skip the first token of what was generated",
        (Edit(_SAMPLER, "np.split(rows.tokens[i][: lengths[place]], [rows.prompt_len[i]])",
              "np.split(rows.tokens[i][: lengths[place]], [rows.prompt_len[i] + 1])"),),
        "tests/cpu/test_sampler_penalties.py",
    ),
    Fault(
        "the grammar of a preempted sequence begins again",
        (Edit("schedule/sequence.py", "        self.pooled = None\n\n    def pool",
              "        self.pooled = None\n        if self.grammar is not None:\n"
              "            self.grammar.matcher = self.grammar.first.deep_copy()\n\n    def pool"),
         Edit("grammar/state.py", "        self.matcher, self.error = matcher, \"\"\n",
              "        self.matcher, self.error = matcher, \"\"\n"
              "        self.first = matcher and matcher.deep_copy()\n")),
        "tests/cpu/test_verify_features.py::test_each_planted_fault_is_found_by_its_path",
    ),
    Fault(
        "a draft is kept although another token was sampled",
        (Edit(_RESULTS, "slots.tokens[sampled.slots, sampled.positions] != sampled.tokens",
              "slots.tokens[sampled.slots, sampled.positions] > sampled.tokens"),),
        "tests/pure/test_scheduler.py", engine="drafts",
    ),
    Fault(
        "prompts attend to keys and values before these are rounded to eight bits",
        (Edit(_ATTENTION, "        rounded = round_to(kv, self._scales, self._dtype).view(-1, kv.shape[-1])\n",
              "        rounded = round_to(kv * (1 + 2**-4 * (len(rows) > 8)), self._scales, self._dtype)"
              ".view(-1, kv.shape[-1])\n"),),
        "tests/cpu/test_fp8_cache.py", engine="fp8 cache",
    ),
    Fault(
        "the weights of experts depend on the number of tokens",
        (Edit("ops/moe.py", "return experts, weights\n",
              "return experts, weights * (1 + 2**-6 * (len(logits) > 40))\n"),),
        "tests/cpu/test_moe.py", engine="experts",
    ),
    Fault(
        "ALiBi with the slopes of the next head in rows that decode",
        (Edit(_DECODE, "alibi.index_select(0, self._heads)", "alibi.roll(1).index_select(0, self._heads)"),),
        "tests/cpu/test_attention.py", engine="alibi",
    ),
    Fault(
        "attention multiplies hidden values by zero",
        (Edit("backends/cpu/hidden.py", "    if mask is None or not _has_nan(*found):\n", "    if True:\n"),),
        "tests/cpu/test_boot_special_contexts.py::test_all_is_well",
    ),
)  # fmt: skip
