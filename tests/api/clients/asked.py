"""Questions that each client asks of a server whose model repeats the last message.

A client is a program in a process of its own, since clients differ in the versions of packages that they need. The
program gets the server's address, does each step that the client can do, and prints the step's name when it is done.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

URL = sys.argv[1]
API, KEY, MODEL = f"{URL}/v1", "none", "m"
TEXT = ", ".join(["Grüße aus Oslo"] * 12)  # long, so that the text comes in several events on a busy machine too
CALL = '<tool_call>\n{"name": "forecast", "arguments": {"city": "Oslo"}}\n</tool_call>'
SUNNY = "Sunny in Oslo"

os.environ |= {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": API}


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=0, le=9)


WEATHER = Weather(city="Oslo", days=3)
JSON = WEATHER.model_dump_json()


def forecast(city: str) -> str:
    """Forecast the weather.

    Args:
        city: The name of the city.
    """
    return f"Sunny in {city}"


def run(*steps: Callable[[], object]) -> None:
    """Run each step in order and print its name.

    A step may be a coroutine function.
    """
    import asyncio

    for step in steps:
        asyncio.run(step()) if inspect.iscoroutinefunction(step) else step()
        print(step.__name__, flush=True)
