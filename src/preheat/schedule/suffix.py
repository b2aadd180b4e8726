"""Suffix decoding: drafts from a sequence's own text and past answers.

They are the most frequent tokens behind its last tokens. Source: SuffixDecoding (Oliaro et al., 2024), the suffix
method of vLLM. A tree holds every stretch of up to ``depth`` tokens of its texts and how often each occurred. A draft
starts from the longest end of a sequence that the tree has. It follows the most frequent continuations, as long as the
product of their shares is at least ``likely``.

Both trees are bounded. One is built of a running sequence and dropped with it. The other holds at most ``requests``
past answers and at most :data:`MOST_NODES` stretches, and forgets the oldest answers first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from preheat.schedule.slots import Slots

NOTHING = np.empty(0, np.int32)

MOST_NODES = 500_000
"""The most stretches in a server's tree, of about 300 bytes each."""

MOST_TOKENS = 1024
"""The most tokens of a text in the trees.

They are the last ones of a running sequence, and the first ones of a past answer.
"""


@dataclass(slots=True)
class _Node:
    """A stretch that occurred ``count`` times, and its continuations by token."""

    count: int = 0
    then: dict[int, _Node] = field(default_factory=dict)


class SuffixTree:
    """All stretches of up to ``depth`` tokens of its texts.

    ``nodes`` is their number.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self.nodes, self._root = depth, 0, _Node()

    def add(self, tokens: Sequence[int], fresh: int | None = None, times: int = 1) -> None:
        """Add a text; ``times`` -1 removes it.

        With ``fresh`` only the stretches new by its last ``fresh`` tokens are added.
        """
        begin = max(len(tokens) - (len(tokens) if fresh is None else fresh), 0)
        for start in range(max(begin - self.depth + 1, 0), len(tokens)):
            self._add_from(tokens, start, max(begin, start), times)

    def _add_from(self, tokens: Sequence[int], start: int, new: int, times: int) -> None:
        """Count the stretches that begin at ``start`` and end at ``new`` or later."""
        node = self._root
        for at in range(start, min(start + self.depth, len(tokens))):
            token = tokens[at]
            child = node.then.get(token)
            if child is None:
                child = node.then[token] = _Node()
                self.nodes += 1
            if at >= new:
                child.count += times
                if not child.count:
                    self.nodes -= _size(child)
                    del node.then[token]
                    return
            node = child

    def follow(self, tokens: Sequence[int], most: int, factor: float, likely: float) -> tuple[list[int], float]:
        """Return the drafts behind the end of ``tokens``.

        They follow the longest end with a continuation here. Also return the sum of their shares. There are at most
        ``most`` drafts, and at most ``factor`` for each matched token.
        """
        for length in range(min(self.depth - 1, len(tokens)), 0, -1):
            node = self._find(tokens[len(tokens) - length :])
            if node is not None and node.then:
                return _most_frequent(node, min(most, int(length * factor)), likely)
        return [], 0.0

    def _find(self, stretch: Sequence[int]) -> _Node | None:
        node: _Node | None = self._root
        for token in stretch:
            node = node.then.get(token) if node is not None else None
        return node


def _size(node: _Node) -> int:
    """Return the number of stretches that begin with the stretch of ``node``, itself included."""
    return 1 + sum(_size(child) for child in node.then.values())


def _most_frequent(node: _Node, most: int, likely: float) -> tuple[list[int], float]:
    drafts, share, score = list[int](), 1.0, 0.0
    while node.then and len(drafts) < most:
        total = sum(child.count for child in node.then.values())
        token, child = min(node.then.items(), key=lambda each: (-each[1].count, each[0]))
        share *= child.count / total
        if share < likely:
            break
        drafts.append(token)
        score += share
        node = child
    return drafts, score


@dataclass(slots=True)
class _SequenceTree:
    """The tree of a running sequence, with ``length`` of its tokens."""

    request: int
    tree: SuffixTree
    length: int = 0


class SuffixProposer:
    """The method ``suffix``, with the options of :class:`preheat.configs.speculation.Speculation`.

    With ``requests`` 0 there are no past answers.
    """

    writes_cache = False

    def __init__(self, num_speculative_tokens: int, depth: int, requests: int, factor: float, likely: float) -> None:
        self.num_speculative_tokens, self.depth = num_speculative_tokens, depth
        self.requests, self.factor, self.likely = requests, factor, likely
        self.past = SuffixTree(depth)
        self._answers: OrderedDict[int, list[int]] = OrderedDict()  # oldest first
        self._trees: dict[int, _SequenceTree] = {}

    def propose(self, slots: Slots, rows: np.ndarray, most: np.ndarray) -> list[np.ndarray]:
        """See :class:`preheat.schedule.proposer.Proposer`."""
        return [self._drafts(slots, slot, count) for slot, count in zip(rows.tolist(), most.tolist(), strict=True)]

    def _drafts(self, slots: Slots, slot: int, count: int) -> np.ndarray:
        if count < 1:
            return NOTHING
        own = self._follow(slots, slot)
        known = int(slots.device_len[slot])
        end = slots.tokens[slot, max(known - self.depth, 0) : known].tolist()
        trees = (own, self.past)
        drafts, _ = max((tree.follow(end, count, self.factor, self.likely) for tree in trees), key=lambda way: way[1])
        return np.array(drafts, np.int32)

    def _follow(self, slots: Slots, slot: int) -> SuffixTree:
        """Return the tree of the sequence in ``slot``, brought up to its tokens."""
        request, known = slots.request[slot], int(slots.device_len[slot])
        assert request is not None
        own = self._trees.get(slot)
        if own is None or own.request != request.id or own.length > known:
            own = self._trees[slot] = _SequenceTree(request.id, SuffixTree(self.depth))
            own.tree.add(slots.tokens[slot, max(known - MOST_TOKENS, 0) : known].tolist())
        else:
            fresh = known - own.length
            own.tree.add(slots.tokens[slot, max(own.length - self.depth, 0) : known].tolist(), fresh)
        own.length = known
        return own.tree

    def ended(self, slots: Slots, stopped: Sequence[int]) -> None:
        """Keep the answers of the ended sequences for later ones.

        The oldest answers beyond the bounds are forgotten.
        """
        for slot in stopped:
            self._trees.pop(slot, None)
            request = slots.request[slot]
            if request is None or not self.requests or request.cache_salt or request.id < 0:
                continue
            begin, end = int(slots.prompt_len[slot]), int(slots.device_len[slot])
            answer = [token for token in slots.tokens[slot, begin:end].tolist() if token >= 0][:MOST_TOKENS]
            self._answers[request.id] = answer
            self.past.add(answer)
        while self._answers and (len(self._answers) > self.requests or self.past.nodes > MOST_NODES):
            _, oldest = self._answers.popitem(last=False)
            self.past.add(oldest, times=-1)
