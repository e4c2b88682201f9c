"""The provenance of an output of `consolidate`: its sources, and the values that no checkpoint had. Data only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ckptools.model.records import displayed, to_dict
from ckptools.text import clip, clip_middle, plural, printable

SCHEMA = "ckptools/provenance/1"
KEY = "ckptools"
"""Key of the record in the metadata of a safetensors file."""

FILE_NAME = "ckptools.json"
"""Name of the record as an entry of a `.pt`, and as a file of a DCP folder."""

OTHER = "other"
"""The `fill` of a tensor whose missing values came from another checkpoint of the run."""

MAX_BYTES = 1 << 20
"""At most this many bytes of a record are read; records that ckptools writes stay far below."""

MAX_NAMED = 200
"""A record names at most this many tensors of each kind and counts the others; the side file lists all."""

MAX_NAME, MAX_WHY, MAX_SOURCES = 400, 300, 8
"""Characters of a name and of a reason; and sources that are listed, each the source of the one before."""


class Said(NamedTuple):
    """The provenance record as text, or why it cannot be read.

    Attributes:
        text: the JSON.
        fault: why the text cannot be read; "" if it can.
    """

    text: str
    fault: str = ""


@displayed
class Origin(NamedTuple):
    """A checkpoint from which an output was made.

    Attributes:
        name: its name without a folder.
        format: name of its format.
        step: its training step; None when unknown.
        world_size: number of ranks that saved it; None when unknown.
    """

    name: str
    format: str
    step: int | None = None
    world_size: int | None = None

    def __str__(self) -> str:
        step = [] if self.step is None else [f"step {self.step}"]
        ranks = [] if self.world_size in (None, 1) else [plural(self.world_size or 0, "rank")]
        return ", ".join([clip_middle(printable(self.name), 80), *step, *ranks])

    def _summary(self) -> str:
        return str(self)


class Filled(NamedTuple):
    """A tensor with values that were in no file.

    Attributes:
        name: fqn in the output.
        fill: `nan` or `zero`, the value of the filled elements; `other` for values of another checkpoint of the run.
        elements: number of filled elements.
        numel: elements of the tensor.
        origin: that other checkpoint in words, such as `ep0-ba4-rank0.pt, step 4, 2 ranks`.
    """

    name: str
    fill: str
    elements: int
    numel: int
    origin: str = ""


class LeftOut(NamedTuple):
    """A tensor or value of the source that the output lacks.

    Attributes:
        name: the fqn that it would have; "" if even that is unknown.
        why: the reason.
        lost: whether the source had lost it; else the output's format cannot store it.
    """

    name: str
    why: str
    lost: bool


@displayed
@dataclass(frozen=True)
class Provenance:
    """The origin of an output, and the values in it that differ from the saved ones.

    Attributes:
        version: version of the ckptools that wrote it.
        part: the part of the source in the output: `model`, `optimizer`, `all`, or a glob of names; `model ema` if the
            source has several models.
        sources: the checkpoint that it was made of, then the sources of that checkpoint, and so on.
        filled: tensors with values that were in no file.
        left_out: tensors and values that the output lacks.
        more_filled: number of further filled tensors that are not named.
        more_lost: number of further losses of the source that are not named.
        unsure: why the source may have had more data than is known, so that the output may lack it.
    """

    version: str
    part: str
    sources: tuple[Origin, ...]
    filled: tuple[Filled, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    more_filled: int = 0
    more_lost: int = 0
    unsure: tuple[str, ...] = ()

    @property
    def by(self) -> str:
        """The version that wrote the output, and the source's sources: `by ckptools 0.1.0; that of ep0-ba5, step 5`."""
        before = [f"that of {source}" for source in self.sources[1:]]
        return "; ".join([f"by ckptools {clip(printable(self.version), 40)}", *before])

    def __str__(self) -> str:
        return ", ".join([*map(str, self.sources[:1]), self.by])

    def to_dict(self) -> dict[str, Any]:
        """The record as in `inspect --json`."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        return {
            "ckptools": self.version,
            "part": self.part,
            "sources": [source._asdict() for source in self.sources],
            "filled": len(self.filled) + self.more_filled,
            "lost": sum(one.lost for one in self.left_out) + self.more_lost,
            "left_out": sum(not one.lost for one in self.left_out),
        }

    def _summary(self) -> str:
        return str(self)

    def to_json(self) -> str:
        """The record as written: at most `MAX_NAMED` names of a kind, so that it stays below `MAX_BYTES`."""
        filled, more_filled = _within(self.filled, self.more_filled)
        lost, more_lost = _within([one for one in self.left_out if one.lost], self.more_lost)
        others, _ = _within([one for one in self.left_out if not one.lost], 0)
        made = {
            "schema": SCHEMA,
            "ckptools": self.version,
            "part": clip(self.part, MAX_NAME),
            "sources": [_clipped(one)._asdict() for one in self.sources[:MAX_SOURCES]],
            "filled": [_without_empty(one) for one in filled],
            "left_out": [one._replace(why=clip(one.why, MAX_WHY))._asdict() for one in (*lost, *others)],
            "more_filled": more_filled,
            "more_lost": more_lost,
            **({"unsure": [{"why": clip(why, MAX_WHY)} for why in self.unsure[:MAX_NAMED]]} if self.unsure else {}),
        }
        return json.dumps(made, separators=(",", ":"), ensure_ascii=True)


def _without_empty(one: Filled) -> dict[str, Any]:
    """The fields as written; the origin only if there is one."""
    made = one._replace(origin=clip(one.origin, MAX_NAME))._asdict()
    return made if one.origin else {name: value for name, value in made.items() if name != "origin"}


def _clipped(origin: Origin) -> Origin:
    return origin._replace(name=clip_middle(origin.name, MAX_NAME), format=clip(origin.format, MAX_NAME))


def _within(entries: Sequence[Any], more: int) -> tuple[list[Any], int]:
    """The entries that the record names, and the number of the others."""
    kept = [one for one in entries if len(one.name) <= MAX_NAME][:MAX_NAMED]
    return kept, more + len(entries) - len(kept)


def joined(records: Iterable[Provenance]) -> Provenance | None:
    """Merge the records of an output's files; None if no file has one."""
    found = list(dict.fromkeys(records))
    if len(found) < 2:
        return found[0] if found else None
    first = next((record for record in found if record.sources), found[0])
    return Provenance(
        first.version,
        first.part,
        first.sources,
        tuple(dict.fromkeys(one for record in found for one in record.filled)),
        tuple(dict.fromkeys(one for record in found for one in record.left_out)),
        max(record.more_filled for record in found),
        max(record.more_lost for record in found),
        tuple(dict.fromkeys(why for record in found for why in record.unsure)),
    )


# -- the side file `OUT.left-out.json`, which lists all omissions and every filled hole --------------------------------


LEFT_OUT_SCHEMA = "ckptools/left-out/1"
MAX_SIDE_FILE = 16 << 20
"""Bytes of a side file that are read."""

MAX_LISTED = 5000
"""At most this many things of each kind are named."""


def of_side_file(made: Any) -> Provenance:
    """Parse a side file: only filled and missing values, without a source.

    Raises:
        KeyError, TypeError, ValueError: it is no such file.
    """
    if not isinstance(made, dict) or made.get("schema") != LEFT_OUT_SCHEMA:
        raise ValueError(f"expected {LEFT_OUT_SCHEMA}")
    holes = {_name(one): one for one in made["missing"]}
    filled = [_filled(name, one) for name, one in holes.items() if one["filled_with"] is not None]
    left_out = [LeftOut(_name(one), _text(one["why"]), _lost(one, holes)) for one in made["left_out"]]
    lost = [one for one in left_out if one.lost]
    kept = [*lost[:MAX_LISTED], *(one for one in left_out if not one.lost)]
    more_filled, more_lost = (max(len(found) - MAX_LISTED, 0) for found in (filled, lost))
    unsure = tuple(_text(one["why"]) for one in made.get("unsure", ()))[:MAX_LISTED]
    return Provenance("", "", (), tuple(filled[:MAX_LISTED]), tuple(kept), more_filled, more_lost, unsure)


def _lost(one: dict[str, Any], holes: dict[str, Any]) -> bool:
    """Whether the source had lost a left-out value; older side files do not say so, and list a hole instead."""
    return one["lost"] is True if "lost" in one else _name(one) in holes


def _filled(name: str, one: dict[str, Any]) -> Filled:
    if one["filled_with"] not in ("nan", "zero", OTHER):
        raise ValueError("filled with neither nan nor zero, nor from another checkpoint")
    holes = sum(prod(map(_size, region["sizes"])) for region in one["regions"])
    elements = _size(one.get("elements", holes))
    return Filled(name, one["filled_with"], elements, _size(one.get("numel", elements)), _text(one.get("origin", "")))


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
