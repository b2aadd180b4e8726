"""Long lists of a request are worked on in parts: a call of C code keeps the event loop waiting."""

from types import SimpleNamespace
from typing import Any

import pytest

from preheat.core import SamplingParams
from preheat.errors import InvalidRequest
from preheat.frontend import params_checker
from preheat.frontend.params_checker import ParamsChecker
from preheat.server.openai.completions import listed
from preheat.utils.parts import MOST, parts

IDS = [7] * (2 * MOST + 1)


def test_parts_have_all_items_in_order():
    assert [len(part) for part in parts(IDS)] == [MOST, MOST, 1]
    assert [*parts(dict.fromkeys("abc", 1))] == [["a", "b", "c"]] and not [*parts(())]


@pytest.mark.parametrize("bad", [-1, 10])
@pytest.mark.parametrize("place", [0, MOST, 2 * MOST])
def test_ids_are_checked_in_parts(bad: int, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def least(found: Any) -> int:
        seen.append(len(found))
        return min(found)

    monkeypatch.setattr(params_checker, "min", least, raising=False)
    checker = ParamsChecker(SimpleNamespace(vocab_size=10), 5, None)  # type: ignore[arg-type]
    checker.check_vocabulary(IDS, "prompt")
    checker.check_vocabulary((), "prompt")
    assert seen == [MOST, MOST, 1]
    with pytest.raises(InvalidRequest, match=f"prompt has token id {bad}"):
        checker.check_vocabulary([*IDS[:place], bad, *IDS[place + 1 :]], "prompt")


@pytest.mark.parametrize("place", [0, 2 * MOST])
def test_a_list_of_prompts_and_ids_is_refused(place: int) -> None:
    frontend: Any = SimpleNamespace(input=SimpleNamespace(check_length=lambda *_: None))
    assert listed(frontend, [*IDS], SamplingParams()) == [IDS]
    with pytest.raises(InvalidRequest, match="not both" if place else "1 to"):
        listed(frontend, [*IDS[:place], "x", *IDS[place:]], SamplingParams())
