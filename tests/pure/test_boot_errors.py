"""An unforeseen error of a boot is one line too, and keeps its cause."""

import pytest

from preheat.errors import ModelError, PreheatError
from preheat.settings import Settings
from preheat.startup import boot_errors, boot_front


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "there is not enough memory (MemoryError): use a smaller model, or lower --max-num-seqs"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "not enough memory ([enf",
        ),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried"), "not enough memory (CUDA out of"),
        (KeyError("x\ny"), "The engine cannot start: KeyError: 'x\\ny'; --log-level debug shows the traceback"),
        (
            ValueError("first\nsecond"),
            "The engine cannot start: ValueError: first; --log-level debug shows the traceback",
        ),
    ],
)
def test_any_error_becomes_one_line(error, message):
    with pytest.raises(PreheatError) as found, boot_errors("The engine cannot start"):
        raise error
    assert message in str(found.value) and "\n" not in str(found.value)
    assert found.value.__cause__ is error


def test_our_own_errors_stay_as_they_are():
    with pytest.raises(ModelError, match=r"^no such model$"), boot_errors("The engine cannot start"):
        raise ModelError("no such model")


def test_the_architecture_is_judged_before_the_tokenizer(tmp_path):
    """The architecture is judged before the tokenizer, so that an unread tokenizer is not given as the reason."""
    (tmp_path / "config.json").write_text('{"architectures": ["RwkvForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="architecture RwkvForCausalLM is not supported: it needs layers with a state"):
        boot_front(Settings(model=str(tmp_path)), lambda _: None)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        boot_front(Settings(model=str(tmp_path)), lambda _: None)
