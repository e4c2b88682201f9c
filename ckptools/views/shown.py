"""Any value of a tree in a few words, and as JSON. Bounded, whatever the value holds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta
from itertools import islice
from typing import Any

from ckptools.dtypes import short
from ckptools.model.tensor import Tensor
from ckptools.model.values import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Opaque, TorchName, scalar
from ckptools.text import clip, number, plural, printable, shape

MAX_ITEMS = 6
"""Items of a list or dict that are shown in a line."""

MAX_BITS = 512
"""A longer integer is described: printing one takes time quadratic in its length, and Python refuses it."""

MAX_JSON_VALUES = 10_000
"""Values of one subtree that go into JSON. Containers can be shared, so a small file may unfold to millions."""

MAX_JSON_TEXT = 10_000

MAX_JSON_DEPTH = 240
"""Levels of containers; trees have fewer, foreign objects may have any number inside."""


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a flag or None: something that fits into one cell."""
    return scalar(value) is None or isinstance(scalar(value), (bool, int, float, str, timedelta, date))


def described(value: Any) -> str | None:
    """Words for a value that is not shown itself but described; None for numbers, texts and containers."""
    if isinstance(value, Tensor):
        return f"{short(value.dtype)} tensor {shape(value.shape)}"
    if isinstance(value, (NumpyArray, NumpyScalar)):
        dims = shape(value.shape) if isinstance(value, NumpyArray) else ""
        return f"numpy {value.dtype} {dims}".strip()
    if isinstance(value, (bytes, bytearray)):
        return plural(len(value), "byte")
    if isinstance(value, Opaque):
        return f"<{value.name}{_arguments(value)}>"
    if isinstance(value, Global):
        return f"<{value.dotted}>"
    if isinstance(value, (TorchName, Device, NumpyDtype)):
        return str(value)
    if type(value) is int and value.bit_length() > MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    return None


def is_brief(value: Opaque) -> bool:
    """Whether all that the file says of a foreign object is a few plain arguments, as of an enum, a path, a pair."""
    bare = value.state is None and not value.items and not value.keywords and isinstance(value.args, tuple)
    return bare and len(value.args) <= MAX_ITEMS and all(is_plain(a) or isinstance(a, Global) for a in value.args)


def _arguments(value: Opaque) -> str:
    return f"({', '.join(shown(a, 40) for a in value.args)})" if value.args and is_brief(value) else ""


def shown(value: Any, width: int = 80, depth: int = 2) -> str:
    """A value in one line of at most `width` characters, safe to print."""
    return clip(printable(_shown(scalar(value), width, depth)), width)


def _shown(value: Any, width: int, depth: int) -> str:
    told = described(value)
    if told is not None:
        return told
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return repr(clip(value, width))
    if isinstance(value, Mapping):
        return _mapping(value, width, depth)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _sequence(value, width, depth)
    return str(value)


def _mapping(value: Mapping[Any, Any], width: int, depth: int) -> str:
    if not depth:
        return "{" + plural(len(value), "value") + "}"
    some = islice(value.items(), MAX_ITEMS)
    return "{" + _joined([f"{key_name(k)}: {shown(v, width, depth - 1)}" for k, v in some], len(value)) + "}"


def _sequence(value: Any, width: int, depth: int) -> str:
    first, last = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
    if not depth:
        return first + plural(len(value), "value") + last
    return first + _joined([shown(v, width, depth - 1) for v in islice(value, MAX_ITEMS)], len(value)) + last


def _joined(texts: list[str], total: int) -> str:
    return ", ".join(texts + ([f"{total - len(texts)} more"] if total > len(texts) else []))


def key_name(key: Any) -> str:
    """A dict key in words: a text as it is, anything else as it would be shown."""
    return key if isinstance(key, str) else shown(key)


class Jsonable:
    """Turns values of a tree into what `json.dumps` writes the same way everywhere.

    Attributes:
        nonfinite: NaN and infinite numbers met so far, which became null.
        left_out: values beyond the budget, which were left out.
    """

    def __init__(self) -> None:
        self.nonfinite = 0
        self.left_out = 0
        self._budget = MAX_JSON_VALUES
        self._depth = 0

    def of(self, value: Any) -> Any:
        """Convert one subtree; each call has its own budget."""
        self._budget = MAX_JSON_VALUES
        return self._convert(value)

    def _convert(self, value: Any) -> Any:
        value = scalar(value)
        self._budget -= 1
        if self._budget < 0:
            self.left_out += 1
            return None
        if isinstance(value, float):
            return self._finite(value)
        if isinstance(value, str):
            return clip(value, MAX_JSON_TEXT)
        if isinstance(value, Opaque) and self._depth and value.fields and not is_brief(value):
            return {"class": clip(value.name, MAX_JSON_TEXT), "fields": self._inside(value.fields)}
        told = described(value)
        if told is not None:
            return told
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, (Mapping, list, tuple, set, frozenset)):
            return self._inside(value)
        return value.total_seconds() if isinstance(value, timedelta) else str(value)

    def _inside(self, value: Any) -> Any:
        """A container; what lies too deep in foreign objects, which may hold themselves, is left out."""
        self._depth += 1
        if self._depth > MAX_JSON_DEPTH:
            self.left_out += len(value)
            made: Any = None
        elif isinstance(value, Mapping):
            made = self._object(value)
        else:
            made = [self._convert(item) for item in self._some(value)]
        self._depth -= 1
        return made

    def _finite(self, value: float) -> float | None:
        if value - value == 0:
            return value
        self.nonfinite += 1
        return None

    def _some(self, items: Any) -> Any:
        """The items that the budget has room for."""
        for done, item in enumerate(items):
            if self._budget <= 0:
                self.left_out += len(items) - done
                return
            yield item

    def _object(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key in self._some(value):
            name = clip(key_name(key), MAX_JSON_TEXT)
            # 1 and '1' are two keys in Python and one in JSON; both are shown.
            while name in made:
                name = f"{name} ({type(key).__name__})"
            made[name] = self._convert(value[key])
        return made
