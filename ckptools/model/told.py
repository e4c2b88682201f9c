"""What a pickle holds, told in an error message: short, on one line, and in time that its maker cannot choose."""

from __future__ import annotations

from typing import Any

from ckptools.model.values import Global

MAX_TEXT = 60
MAX_ITEMS = 8
MAX_BITS = 64


def told(value: Any) -> str:
    """Describe `value` on one line of bounded length, without going into containers deeper than one level."""
    if isinstance(value, (list, tuple)):
        more = ", …" if len(value) > MAX_ITEMS else ""
        return f"[{', '.join(map(_scalar, value[:MAX_ITEMS]))}{more}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, Global):
        value = value.dotted
    if isinstance(value, (str, bytes)):
        return repr(value[:MAX_TEXT]) + ("…" if len(value) > MAX_TEXT else "")
    if type(value) is int and value.bit_length() > MAX_BITS:
        return f"an int of {value.bit_length()} bits"
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else f"a {type(value).__name__}"
