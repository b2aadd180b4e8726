"""Stop strings in a growing text.

The match that is complete first wins; of those that end at the same character, the longest. So the outcome depends
on the text alone, never on how it was cut into tokens.
"""

from __future__ import annotations


class StopStrings:
    """The stop strings of a request as one Aho-Corasick automaton, shared by its choices.

    State s has read the longest end of the text that begins a stop string. ``hold[s]`` counts its characters that may
    still become one; ``match[s]`` is the longest stop string that is complete there.
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
        """Breadth first, because a state's links depend on those of shorter ones."""
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
        """The state after ``char``."""
        while state and char not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(char, 0)


class StopChecker:
    """Watches one sequence's text and holds back what may still become a stop string; ``found`` is the one that did."""

    __slots__ = ("_held", "_state", "_strings", "found")

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self._held = ""
        self.found: str | None = None

    def push(self, delta: str, armed: bool = True) -> str:
        """The text that may be shown, given ``delta`` more. Unarmed, no stop string that ends in it counts."""
        strings, state = self._strings, self._state
        for position, char in enumerate(delta, len(self._held) + 1):
            state = strings.step(state, char)
            if armed and (found := strings.match[state]):
                self.found = found
                shown = position if strings.include else position - len(found)
                return (self._held + delta)[:shown]
        self._state = state
        text = self._held + delta
        shown = len(text) - strings.hold[state]
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, now that no text follows."""
        held, self._held = self._held, ""
        return held
