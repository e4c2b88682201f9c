"""The side file of an output, `OUT.left-out.json`, which lists what was not written and every hole that was filled."""

from __future__ import annotations

from math import prod
from typing import Any

from ckptools.model.provenance import Filled, LeftOut, Provenance

SCHEMA = "ckptools/left-out/1"
MAX_SIDE_FILE = 16 << 20
"""Bytes of a side file that are read."""

MAX_LISTED = 5000
"""Things of each kind that are told by their names."""


def of_side_file(made: Any) -> Provenance:
    """What a side file says, without a source: only what is filled, and what is missing.

    Raises:
        KeyError, TypeError, ValueError: it is no such file.
    """
    if not isinstance(made, dict) or made.get("schema") != SCHEMA:
        raise ValueError(f"expected {SCHEMA}")
    holes = {_name(one): one for one in made["missing"]}
    filled = [_filled(name, one) for name, one in holes.items() if one["filled_with"] is not None]
    left_out = [LeftOut(_name(one), _text(one["why"]), _lost(one, holes)) for one in made["left_out"]]
    lost = [one for one in left_out if one.lost]
    kept = [*lost[:MAX_LISTED], *(one for one in left_out if not one.lost)]
    more = [max(len(found) - MAX_LISTED, 0) for found in (filled, lost)]
    return Provenance("", "", (), tuple(filled[:MAX_LISTED]), tuple(kept), *more)


def _lost(one: dict[str, Any], holes: dict[str, Any]) -> bool:
    """Whether the source had lost it; files of before this was stated have holes to tell it by."""
    return one["lost"] is True if "lost" in one else _name(one) in holes


def _filled(name: str, one: dict[str, Any]) -> Filled:
    if one["filled_with"] not in ("nan", "zero"):
        raise ValueError("filled with neither nan nor zero")
    holes = sum(prod(map(_size, region["sizes"])) for region in one["regions"])
    elements = _size(one.get("elements", holes))
    return Filled(name, one["filled_with"], elements, _size(one.get("numel", elements)))


def _name(one: dict[str, Any]) -> str:
    return _text(one["name"])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a name that is no text")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("a size that is no number")
    return value
