"""Every kind of damage that a copy of a checkpoint may suffer, and how to undo it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.damage.another_step import of_another_step

Change = dict[Path, bytes | None]
"""New content of files; None for those that go."""

FLIPS = 2
"""Bits that are flipped in each kind of file, one at a time, at places that depend on names alone."""


@dataclass(frozen=True)
class Damage:
    """One thing that happened to a checkpoint.

    Attributes:
        kind: deleted, halved, one byte short, flipped, swapped, copied, another step.
        what: the files, below the checkpoint's folder, and where in them.
        make: the new content of the files, from what they hold now.
    """

    kind: str
    what: str
    make: Callable[[], Change]

    def __str__(self) -> str:
        return f"{self.kind} {self.what}"


def damages(folder: Path, files: Sequence[Path]) -> Iterator[Damage]:
    """Every kind of damage once for each kind of file of a checkpoint that lies in `folder` and consists of `files`.

    Files of one kind, whose names differ in numbers only, take turns: what one of them suffers the other need not.
    """
    for alike in _kinds(files):
        for number, file in enumerate(alike):
            yield from list(_of_file(folder, file, alone=len(files) == 1))[number :: len(alike)]
        for one, other in pairwise(alike):
            names = f"{one.relative_to(folder)} and {other.relative_to(folder)}"
            yield Damage("swapped", names, lambda a=one, b=other: {a: b.read_bytes(), b: a.read_bytes()})
            yield Damage("copied", names, lambda a=one, b=other: {b: a.read_bytes()})


def _of_file(folder: Path, file: Path, alone: bool) -> Iterator[Damage]:
    name = str(file.relative_to(folder))
    size = file.stat().st_size
    yield Damage("deleted", name, lambda: {file: None})
    yield Damage("halved", name, lambda: {file: file.read_bytes()[: size // 2]})
    yield Damage("one byte short", name, lambda: {file: file.read_bytes()[:-1]})
    if not alone:
        yield Damage("another step", name, lambda: _changed(file))
    places = random.Random(name)
    for at, bit in [(places.randrange(size), places.randrange(8)) for _ in range(FLIPS if size else 0)]:
        yield Damage("flipped", f"{name} byte {at} bit {bit}", lambda at=at, bit=bit: {file: _flip(file, at, bit)})


def _flip(file: Path, at: int, bit: int) -> bytes:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    return bytes(data)


def _changed(file: Path) -> Change:
    data = of_another_step(file.read_bytes())
    return {file: data} if data is not None else {}


def _kinds(files: Sequence[Path]) -> Iterable[list[Path]]:
    """Files by kind: those of one kind have names that differ in numbers only."""
    alike: dict[str, list[Path]] = {}
    for file in files:
        alike.setdefault("".join("#" if c.isdigit() else c for c in str(file)), []).append(file)
    return alike.values()
