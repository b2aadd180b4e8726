"""Stop strings in growing text.

The first match to be complete wins; among matches that end at the same character, the longest. The result depends on
the text alone, not on how it is split into tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class StopStrings:
    """The stop strings of a request as one Aho-Corasick automaton.

    The request's choices share it. A state stands for the longest suffix of the text that is a prefix of a stop string.
    ``hold[s]`` is the number of last characters that may still become a stop string; ``match[s]`` is the longest stop
    string that ends there.
    """

    __slots__ = ("fail", "hold", "include", "match", "next")

    def __init__(self, stops: list[str], include: bool = False) -> None:
        self.include = include
        self.next: list[dict[str, int]] = [{}]
        self.match: list[str | None] = [None]
        depth = [0]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self.next[state]:
                    self.next[state][char] = len(self.next)
                    self.next.append({})
                    self.match.append(None)
                    depth.append(depth[state] + 1)
                state = self.next[state][char]
            self.match[state] = stop
        self.fail = [0] * len(self.next)
        self.hold = [0] * len(self.next)
        self._link(depth)

    def _link(self, depth: list[int]) -> None:
        """Link the states breadth first, because a state's links depend on the links of shorter states."""
        level = list(self.next[0].values())
        for state in level:
            self.hold[state] = depth[state] if self.next[state] else 0
        while level:
            below: list[int] = []
            for parent in level:
                for char, state in self.next[parent].items():
                    fail = self.fail[state] = self.step(self.fail[parent], char)
                    self.match[state] = self.match[state] or self.match[fail]
                    self.hold[state] = depth[state] if self.next[state] else self.hold[fail]
                    below.append(state)
            level = below

    def step(self, state: int, char: str) -> int:
        """Return the state after ``char``."""
        while state and char not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(char, 0)


_NONE: Mapping[str, str] = MappingProxyType({})


class StopChecker:
    """Search for stop strings in one sequence's text.

    A possible beginning of a stop string is buffered; ``found`` is the match. ``texts``: the texts that are searched in
    place of some characters. Such a character is shown or held back as a whole.
    """

    __slots__ = ("_buffer", "_state", "_strings", "_texts", "found")

    def __init__(self, strings: StopStrings, texts: Mapping[str, str] = _NONE) -> None:
        self._strings, self._texts = strings, texts
        self._state = 0
        self._buffer = ""
        self.found: str | None = None

    def push(self, delta: str, armed: bool = True) -> str:
        """Return the text that may be shown with ``delta`` more.

        Not ``armed``: stop strings that end in ``delta`` are ignored.
        """
        strings, state = self._strings, self._state
        text = self._buffer + delta
        for position, char in enumerate(delta, len(self._buffer) + 1):
            searched = self._texts.get(char, char)
            for behind, each in enumerate(searched, 1 - len(searched)):
                state = strings.step(state, each)
                if armed and (found := strings.match[state]):
                    self.found = found
                    length = 0 if strings.include else len(found) - behind
                    return text[: self._before(text[:position], length)]
        self._state = state
        shown = self._before(text, strings.hold[state])
        self._buffer = text[shown:]
        return text[:shown]

    def _before(self, text: str, length: int) -> int:
        """Return where the last ``length`` searched characters of ``text`` begin."""
        at = len(text)
        while length > 0 and self._texts:
            at -= 1
            length -= len(self._texts.get(text[at], text[at]))
        return at - max(length, 0)

    def finish(self) -> str:
        """Return the text that is still buffered, at the end of the sequence."""
        text, self._buffer = self._buffer, ""
        return text
