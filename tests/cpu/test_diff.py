"""Two configurations of a model, compared token by token."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from preheat.cli.main import main
from preheat.errors import SettingsError
from preheat.model.update import tensors_of
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify import diff, diff_page
from preheat.verify.prompts import with_settings
from tests.adapters import write_adapter

OPTIONS = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 16, "skip_warmup": True, "boot_check": "off",
           "on_cold": "off", "num_threads": 1, "execution_mode": "eager"}  # fmt: skip
PROMPTS = with_settings([[(7 * at + 13 * row) % 90 for at in range(9)] for row in range(8)], 12)


def both(shallow: str, **other: object) -> diff.Both:
    values = {**OPTIONS, "model": shallow}
    return diff.Both(boot_engine, Settings.load(values), diff.other_settings(values, json.dumps(other)))


def test_equal_configurations_are_equal_and_one_changed_number_is_not(shallow: str) -> None:
    engines = both(shallow, max_num_seqs=2)
    found = list(engines.compare(PROMPTS))
    assert [(each.equal, each.first, each.divergence, each.distance) for each in found] == [(12, None, 0.0, 0.0)] * 8
    with torch.inference_mode():  # the negative control, in the second engine only
        for tensor in tensors_of(engines._other.loop.executor.decoder.weights.final_norm):
            if tensor.dim():
                tensor[::2] *= 4
    changed = list(engines.compare(PROMPTS))
    assert all(each.divergence > 0 and each.distance > 0 for each in changed)
    assert any(each.first is not None for each in changed)


def test_a_quantization_differs_and_the_table_says_where(
    shallow: str, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nThe quick brown fox\n")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "skip_warmup"]
    asked = ["diff", shallow, "--skip-warmup", *flags, "--prompts", str(prompts), "--other", '{"quantization": "int4"}']
    assert main(asked) == 0
    header, *lines, last = capsys.readouterr().out.splitlines()
    assert header.split() == diff.HEADER.split() and len(lines) == 2 and "of 48 tokens" in last
    assert main([*asked, "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["prompt"] for each in objects] == [0, 1] and all(each["divergence"] > 0 for each in objects)
    assert [f"{each['equal']}/{each['tokens']}" in line for each, line in zip(objects, lines, strict=True)] == [
        True
    ] * 2


def test_an_adapter_differs_from_its_model_and_the_page_shows_where(
    shallow: str, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    adapter, page = write_adapter(tmp_path / "adapter", 1, model=Path(shallow)), tmp_path / "page.html"
    (tmp_path / "prompts.txt").write_text("Once upon <b>a</b> time\n")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "skip_warmup"]
    asked = ["diff", shallow, "--skip-warmup", *flags, "--prompts", str(tmp_path / "prompts.txt"), "--enable-lora"]
    asked += ["--lora-modules", f"tuned={adapter}", "--other-adapter", "tuned"]
    assert main([*asked, "--json", "--html", str(page)]) == 0
    (found,) = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert found["divergence"] > 0 and len(found["divergences"]) == min(found["equal"] + 1, found["tokens"])
    text = page.read_text()
    assert "adapter tuned" in text and f"{found['equal']} of {found['tokens']}" in text and "<svg" in text
    assert "<script" not in text and not re.search(r'(?:src|href)="(?!#)', text)
    assert main([*asked[:-1], "other"]) == 2
    assert "'other' is not among --lora-modules, but tuned are" in capsys.readouterr().err
    assert main([*asked[:-2]]) == 2 and "two configurations" in capsys.readouterr().err


def test_texts_of_a_model_are_escaped_in_the_page() -> None:
    each = diff.Compared(0, 2, 1, 1, 0.5, 1.0, [0.0, 0.5], [1, 2], [1, 3])
    page = diff_page.render([each], ("a<b", "c"), lambda ids: "".join(f"<{id}>" for id in ids))
    assert "a&lt;b" in page and "&lt;1&gt;" in page and "&lt;2&gt;" in page and "&lt;3&gt;" in page
    assert "<1>" not in page and page == diff_page.render(
        [each], ("a<b", "c"), lambda ids: "".join(f"<{id}>" for id in ids)
    )


def test_the_divergence_is_the_textbook_one() -> None:
    one, other = torch.tensor([0.5, -1.0, float("-inf")]), torch.tensor([1.0, 0.0, 2.0])
    p, q = torch.softmax(one.double(), -1), torch.softmax(other.double(), -1)
    expected = float((p[:2] * (p[:2] / q[:2]).log()).sum())
    assert diff._distance(one, other) == (pytest.approx(expected), 1.0)
    assert diff._distance(one, one) == (0.0, 0.0)


@pytest.mark.parametrize("text", ["", "[]", "{}", "int8"])
def test_other_is_an_object_of_options(text: str) -> None:
    with pytest.raises(SettingsError, match="--other must be a JSON object of options"):
        diff.other_settings({}, text)
