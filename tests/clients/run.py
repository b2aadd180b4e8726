"""Clients that are too heavy for the test environment, against a server with the bundled model.

    python -m venv /tmp/clients
    /tmp/clients/bin/pip install dspy 'lm-eval[api]' guidellm
    preheat serve --port 8000 &
    /tmp/clients/bin/python tests/clients/run.py http://127.0.0.1:8000

Each check prints a line, and the exit status is 1 if one failed. Names behind the URL pick checks. Lighter clients are
in tests/api/clients.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

URL = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"
API, KEY, MODEL = f"{URL}/v1", "none", "bundled"
os.environ |= {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": API}
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # in place of a file from the net


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=0, le=9)


def dspy() -> None:
    import dspy as library

    class Forecast(library.Signature):
        """The weather in a city."""

        question: str = library.InputField()
        city: Literal["Oslo", "Rome"] = library.OutputField()
        days: int = library.OutputField()

    schema = Weather.model_json_schema()  # dspy itself sends the schema only to models whose names it knows
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    options: dict[str, Any] = {"api_base": API, "api_key": KEY, "max_tokens": 300, "temperature": 0, "cache": False}
    assert library.LM(f"hosted_vllm/{MODEL}", **options)("Hi")[0]
    lm = library.LM(f"hosted_vllm/{MODEL}", response_format=form, **options)
    with library.context(lm=lm, adapter=library.JSONAdapter()):
        answer = library.Predict(Forecast)(question="Hi")
    assert answer.city in ("Oslo", "Rome") and isinstance(answer.days, int)


def lm_eval() -> None:
    """`local-completions` with the server's own tokenizer, and `local-chat-completions`."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from lm_eval.models.api_models import JsonChatStr

    def asked(kind: str, *arguments: Any) -> list[Instance]:
        return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0)]

    texts = get_model("local-completions")(base_url=f"{API}/completions", model=MODEL, tokenizer_backend="remote")
    (likely,) = texts.loglikelihood(asked("loglikelihood", "def add(a, b):\n    return", " a + b"))
    (unlikely,) = texts.loglikelihood(asked("loglikelihood", "def add(a, b):\n    return", " zebra"))
    assert unlikely[0] < likely[0] < 0 and not unlikely[1]
    until = {"until": ["\n"], "max_gen_toks": 16}
    assert texts.generate_until(asked("generate_until", "def add(a, b):\n    return", until))[0]
    chat = get_model("local-chat-completions")(base_url=f"{API}/chat/completions", model=MODEL)
    talk = JsonChatStr('[{"role": "user", "content": "Hi"}]')
    assert chat.generate_until(asked("generate_until", talk, {"max_gen_toks": 16}))[0]


def guidellm() -> None:
    """GuideLLM's program: two streams of synthetic prompts by each of three endpoints.

    The program counts tokens as the server does.
    """
    tokenizer = Path(__file__).parents[2] / "src" / "preheat" / "bundled"
    for form in ("completions", "chat/completions", "responses"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "report.json")
            command = [
                Path(sys.executable).with_name("guidellm"), "run", "--disable-console",
                "--backend", f"kind=openai_http,target={URL},request_format=/v1/{form}",
                "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
                "--tokenizer", f"kind=hf_auto,model={tokenizer}",
                "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8", "--output", f"kind=json,path={path}",
            ]  # fmt: skip
            subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, timeout=120)
            (benchmark,) = json.loads(path.read_text())["benchmarks"]
        made = benchmark["scheduler_metrics"]["requests_made"]
        assert made["successful"] == 6 and not made["errored"], made
        for each in benchmark["requests"]["successful"]:
            assert each["output_tokens"] == 8 and each["prompt_tokens"] >= 32 and each["inter_token_latency_ms"] > 0


CHECKS: list[Callable[[], None]] = [dspy, lm_eval, guidellm]
ASKED = sys.argv[2:] or [check.__name__ for check in CHECKS]


def main() -> int:
    """Run all checks; return 1 if one failed."""
    failed = 0
    for check in (check for check in CHECKS if check.__name__ in ASKED):
        began = time.monotonic()
        try:
            check()
            verdict = "passed"
        except Exception:
            traceback.print_exc()
            verdict, failed = "FAILED", 1
        print(f"{check.__name__}: {verdict} in {time.monotonic() - began:.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
