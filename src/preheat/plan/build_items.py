"""Items that are built before a step needs them: functions and grammars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from preheat.plan.cost import Cost, Costs
from preheat.plan.functions import Function
from preheat.plan.item import Item, ItemRunner, Plan


@dataclass(frozen=True, slots=True)
class FunctionItem(Item):
    """A compiled function of layers. It is compiled, or read from the cache folder, before any step runs it."""

    KIND, stage = "function", "first"
    function: Function

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[FunctionItem]:
        return map(cls, plan.options.functions)

    @classmethod
    def run_kind(cls, items: Sequence[Self], run_one: Callable[[Item], None], warm: ItemRunner) -> int:
        """Run all items. An error ends the boot, because no step runs without its functions."""
        for item in items:
            run_one(item)
        return len(items)

    @property
    def shape(self) -> dict[str, Any]:
        return {"name": str(self.function)}

    def cost(self, costs: Costs) -> Cost:
        return costs.function(self.name)

    def run(self, warm: ItemRunner) -> None:
        warm.build_function(self.function)


@dataclass(frozen=True, slots=True)
class GrammarItem(Item):
    """A grammar known before the first request.

    A state's first mask is slower than later ones, so states are built too.
    """

    KIND = "grammar"
    grammar: str

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[GrammarItem]:
        return map(cls, plan.options.grammars)

    @property
    def shape(self) -> dict[str, Any]:
        return {"name": self.grammar}

    def cost(self, costs: Costs) -> Cost:
        return costs.grammar(self.name)

    def run(self, warm: ItemRunner) -> None:
        warm.build_grammar(self.grammar)
