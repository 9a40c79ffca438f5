"""Numbers as people write them on a command line. Needs nothing but Python."""

import decimal
import re
from typing import TypeVar

Number = TypeVar("Number", int, float)
POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "B": 3, "G": 3, "T": 4}


def parse_number(
    text: str, kind: type[Number], thousand: int = 1000, percent: bool = False
) -> Number:
    """4096, 1e12, 4k, 1.5B or 1T, with `thousand` for k; 5% where `percent`. ValueError for others."""
    number = r"([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+))(?:([eE][+-]?\d{1,3})|([kKMBGT]))?(%?)"
    match = re.fullmatch(number, text, re.ASCII)
    if not match or (match[4] and not percent):
        raise ValueError(f"{text!r} is not a number")
    value = decimal.Decimal(match[1] + (match[2] or "")) * thousand ** POWERS[match[3] or ""]
    value = value / 100 if match[4] else value
    if kind is int and (abs(value) > 10**30 or value != int(value)):
        raise ValueError(f"{text!r} is not a whole number")
    return kind(value)
