"""Numbers as people write them on a command line. Needs nothing but Python."""

import decimal
import re
from typing import TypeVar

Number = TypeVar("Number", int, float)
POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "B": 3, "G": 3, "T": 4}


def parse_number(text: str, kind: type[Number], thousand: int = 1000) -> Number:
    """4096, 1e12, 4k, 1.5B, 1T or 5%, with `thousand` for k; ValueError for anything else."""
    match = re.fullmatch(r"([+-]?[\d._]+(?:[eE][+-]?\d{1,3})?)([kKMBGT]?)(%?)", text, re.ASCII)
    if not match or (match[3] and kind is int):
        raise ValueError(f"{text!r} is no number")
    try:
        value = decimal.Decimal(match[1]) * thousand ** POWERS[match[2]]
    except decimal.InvalidOperation:
        raise ValueError(f"{text!r} is no number") from None
    value = value / 100 if match[3] else value
    if kind is int and (abs(value) > 10**30 or value != int(value)):
        raise ValueError(f"{text!r} is no whole number")
    return kind(value)
