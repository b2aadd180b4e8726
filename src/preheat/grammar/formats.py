"""The supported formats of JSON Schema, as regular expressions for the whole text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from preheat.grammar.nodes import Node
from preheat.grammar.pattern import WHOLE, parsed

_DATE = (
    "(?:(?:[1-9][0-9]{3}|0(?:[1-9][0-9]{2}|0[1-9][0-9]|00[1-9]))"
    "-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][48]|[2468]0|[13579][26])00)-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_CLOCK})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_HEX = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """Return an expression for eight groups, or fewer around a double colon."""
    forms = [f"(?:{_HEX}:){{7}}{_HEX}"]
    for before in range(8):
        head = f"{_HEX}(?::{_HEX}){{{before - 1}}}" if before else ""
        tail = f"(?:{_HEX}(?::{_HEX}){{0,{6 - before}}})?" if before < 7 else ""
        forms.append(f"{head}::{tail}")
    return f"(?:{'|'.join(forms)})"


_UNIT = r"[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{2}"
_PATH = f"(?:{_UNIT}|[:@])"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_HOURS = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"

FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}[Tt]{_TIME}",
        "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]+W)",
        "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOST}|\[{_IPV4}\])",
        "hostname": _HOST,
        "ipv4": _IPV4,
        "ipv6": _ipv6(),
        "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
        "uri": (
            r"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:"
            rf"//(?:(?:{_UNIT}|:)*@)?(?:\[{_ipv6()}\]|(?:{_UNIT})*)(?::[0-9]*)?(?:/{_PATH}*)*"
            rf"|/(?:{_PATH}+(?:/{_PATH}*)*)?|(?:{_PATH}+(?:/{_PATH}*)*)?)"
            rf"(?:\?(?:{_PATH}|[/?])*)?(?:#(?:{_PATH}|[/?])*)?"
        ),
    }
)


@cache
def format_node(name: str) -> Node:
    """Return the texts of the format ``name``."""
    return parsed(FORMATS[name], WHOLE)
