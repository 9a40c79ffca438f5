"""Typed access to the keys of a JSON config, with errors that name file, key and reason."""

import json
from collections.abc import Iterable
from typing import Any

from llm_train_bench.model import config_keys


class ConfigError(ValueError):
    """A model config that cannot be used; the message names the file, the key and the reason."""


class Keys:
    """Typed access to a config's keys; remembers the keys asked for, and explains errors."""

    def __init__(self, raw: dict[str, Any], where: str, prefix: str = ""):
        self.raw, self.where, self.prefix = raw, where, prefix
        self.used: set[str] = set()

    def error(self, key: str, reason: str) -> ConfigError:
        """A ConfigError that says file, key, value and reason."""
        value = f" {json.dumps(self.raw[key])}" if key in self.raw else ""
        value = value if len(value) <= 60 else ""
        return ConfigError(f"{self.where}: {self.prefix}{key}{value}: {reason}")

    def get(self, key: str, default: Any = ...) -> Any:
        """A key's value, whatever it is, or the default; without a default it must be there."""
        self.used.add(key)
        if key in self.raw:
            return self.raw[key]
        if default is ...:
            raise self.error(key, "missing; the model's shape needs it")
        return default

    def check(self, holds: Any, key: str, reason: str) -> None:
        """Raise an error about a key unless the condition holds."""
        if not holds:
            raise self.error(key, reason)

    def object(self, key: str, default: dict[str, Any] | None = None) -> "Keys":
        """The keys of an object, or of the default where it is absent, null or empty."""
        value = self.get(key, None) or default or {}
        why = f"must be an object or null, found {kind_of(value)}"
        self.check(isinstance(value, dict), key, why)
        return Keys(value, self.where, f"{self.prefix}{key}.")

    def choice(self, key: str, allowed: Iterable[str], default: Any = ...) -> str:
        """One of the allowed texts; any other is an error, as in the methods below."""
        value = self.get(key, default)
        self.check(value in [*allowed], key, f"not implemented; there are {', '.join(allowed)}")
        return value

    def integer(self, key: str, default: Any = ..., minimum: int = 1, null: bool = False) -> Any:
        """A whole number; null (None) where the default is None, or where `null` has a meaning."""
        value = self.get(key, default)
        if value is None and (null or default is None):
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be a whole number, found {kind_of(value)}")
        self.check(value >= minimum, key, f"must be at least {minimum}")
        self.check(value < (2**31 if "layer" not in key else 2**12), key, "is absurdly large")
        return value

    def number(self, key: str, default: Any = ..., null: bool = True) -> float:
        """A finite number above 0; null means the default, where there is one and `null` is allowed."""
        value = self.get(key, default)
        value = default if value is None and null and default is not ... else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, found {kind_of(value)}")
        why = "is absurdly large" if value > 1 else "must be well above 0"
        self.check(1e-300 < value < 1e300, key, why)
        return float(value)

    def fraction(self, key: str, default: float, below: float = 1) -> float:
        """A number from 0 to below 1 or another bound, such as a dropout rate."""
        value = self.get(key, default)
        fits = type(value) in (int, float) and 0 <= value < below
        self.check(fits, key, f"must be a number from 0 to below {below:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        self.check(isinstance(value, bool), key, f"must be true or false, found {kind_of(value)}")
        return value

    def only(self, key: str, neutral: Any) -> Any:
        """The only value that is implemented."""
        value = self.get(key, neutral)
        same = value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        self.check(same, key, f"only {json.dumps(neutral)} is implemented")
        return neutral

    def activation(self, key: str, default: str) -> str:
        """Our name of an activation function that is implemented."""
        return config_keys.ACTIVATIONS[self.choice(key, config_keys.ACTIVATIONS, default)]

    def leftover(self) -> list[str]:
        """Keys that were not read."""
        return [key for key in self.raw if key not in self.used]

    def refuse_unsupported(self) -> None:
        """Raise for a key that would change the computation and is not at its neutral value."""
        self.only("is_causal", True)
        for key in [key for key in self.leftover() if key in config_keys.UNSUPPORTED]:
            neutral = [1] if key in config_keys.FACTORS else []
            is_neutral = self.get(key) in (None, False, 0, "", [], {}, *neutral)
            self.check(is_neutral, key, "changes the computation and is not implemented")

    def unknown(self) -> tuple[str, ...]:
        """Keys that have no effect, and are not known as irrelevant."""
        left = [key for key in self.leftover() if not key.startswith(("_", "summary_"))]
        left = [key for key in left if self.raw[key] or key not in config_keys.WITHOUT_EFFECT]
        return tuple(key for key in left if key not in config_keys.IGNORED)


def kind_of(value: Any) -> str:
    """A JSON value's kind, in words for an error message."""
    names = {list: "a list", dict: "an object", str: "text", bool: "true/false", type(None): "null"}
    text = str(value)
    return names.get(type(value), f"the number {text if len(text) < 40 else text[:20] + '...'}")
