"""Kinds of damage: one function for each, and the table `KINDS` that names them.

The functions know files and bytes, and no layout: `damage.py` asks ckptools what lies where.
"""

from __future__ import annotations

import random
import re
import shutil
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ckptools.dtypes import ITEMSIZE
from ckptools.files.opening import File, Window
from ckptools.files.zip_archive import Container, checksum_places
from ckptools.model.shard import Shard
from ckptools.model.source import Source
from ckptools.tensor_io.checksums import crc32
from ckptools.text import few

# One NaN of each dtype that the strategies save, little-endian.
NAN = {
    "float32": struct.pack("<f", float("nan")),
    "bfloat16": struct.pack("<f", float("nan"))[2:],
    "float16": struct.pack("<e", float("nan")),
}

# The number of the rank in a name: `-rank3.pt`, `_rank_3.pt`, `__3_0.distcp`, `random_states_3.pkl`.
RANK = re.compile(r"(?:(?<=rank)|(?<=rank_)|(?<=^__)|(?<=states_))\d+")


@dataclass(frozen=True)
class Asked:
    """One item of `--break`; `other` is the second rank, where the kind takes two."""

    kind: str
    rank: int
    other: int | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """One rank or both."""
        return (self.rank,) if self.other is None else (self.rank, self.other)

    def __str__(self) -> str:
        return f"{self.kind}:{'-'.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Broken:
    """A damage that was done, and the problems that show it.

    Attributes:
        files: their names.
        what: what was done to them, in words.
        shown: codes of what `verify` finds in them, such as `CK004`.
        refused: the error with which `verify` ends, where it cannot even open what is left; else empty.
    """

    asked: Asked
    files: str
    what: str
    shown: tuple[str, ...] = ()
    refused: str = ""

    @property
    def seen(self) -> str:
        """The damage as `verify` shows it, in words."""
        if self.refused:
            return "cannot be opened"
        return ", ".join(self.shown) or "nothing: the files do not show it"


@dataclass(frozen=True)
class Target:
    """The target of one damage.

    Attributes:
        files: of the rank.
        others: the other side, as `Kind.others` says; as many, in the same order.
        shards: fqn and shard of what can be damaged in `files`, where bytes of a tensor are.
        chance: draws the place.
    """

    files: tuple[Path, ...]
    others: tuple[Path, ...]
    shards: tuple[tuple[str, Shard], ...]
    chance: random.Random


@dataclass(frozen=True)
class Kind:
    """One kind of damage.

    Attributes:
        do: does it; returns what was done, in words.
        part: what of a rank is damaged: all its `files`, the first `file`, or a `tensor` in that.
        others: the files on its other side, if it has one: of the `second rank`, of the same rank in an `older run`
            or `another run`, or new ones, called as those of the `next rank` behind the last.
    """

    do: Callable[[Target], str]
    part: str = "files"
    others: str = ""

    @property
    def two(self) -> bool:
        """Whether it takes two ranks."""
        return self.others == "second rank"


def put_nan(target: Target) -> str:
    """Put NaN into one element, with a checksum that is right: as a diverged run saves it."""
    fqn, shard, source = _draw(target)
    width = len(NAN[source.dtype])
    element = target.chance.randrange(prod(source.shape))
    _write(source.path, source.offset + element * width, NAN[source.dtype])
    _restate_checksum(shard, source)
    return f"NaN in {fqn}, the checksum made right"


def flip_bit(target: Target) -> str:
    """Flip one bit of a tensor's bytes, as a bad disk or cable does."""
    fqn, _, source = _draw(target)
    at = source.offset + target.chance.randrange(prod(source.shape) * ITEMSIZE[source.dtype])
    bit = target.chance.randrange(8)
    with File(source.path) as file:
        byte = file.read(at, 1)[0]
    _write(source.path, at, bytes([byte ^ 1 << bit]))
    return f"bit {bit} of byte {at} flipped, in {fqn}"


def from_older(target: Target) -> str:
    """Leave this rank at an older step, as a save that was cut off does."""
    _copy(target.others, target.files)
    return "replaced by the same rank's of one step before"


def from_another(target: Target) -> str:
    """Put in this rank's file of another run, as two jobs that write to one folder do."""
    _copy(target.others, target.files)
    return "replaced by the same rank's of a run with another seed"


def swap(target: Target) -> str:
    """Exchange the files of two ranks, as a wrong rename does."""
    for mine, other in zip(target.files, target.others, strict=True):
        aside = mine.with_name(f".{mine.name}.swapped")
        mine.rename(aside)
        other.rename(mine)
        aside.rename(other)
    return f"exchanged with {names(target.others)}"


def copy(target: Target) -> str:
    """Write this rank's files over another's, as a wrong copy does."""
    _copy(target.files, target.others)
    return f"copied over {names(target.others)}"


def duplicate(target: Target) -> str:
    """Leave this rank's files a second time, under the number behind the last: as of a larger world."""
    _copy(target.files, target.others)
    return f"also there as {names(target.others)}"


def truncate(target: Target) -> str:
    """Cut the file at half its size, as a full disk or a broken transfer does."""
    (path,) = target.files
    nbytes = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(nbytes // 2)
    return f"cut at 50%: {nbytes // 2} of {nbytes} bytes are left"


def remove(target: Target) -> str:
    """Remove the rank's files, as a lost node does."""
    for path in target.files:
        path.unlink()
    return "removed"


# In this order they are done: a bit is flipped before its file is cut or moved.
KINDS: dict[str, Kind] = {
    "nan": Kind(put_nan, part="tensor"),
    "bitflip": Kind(flip_bit, part="tensor"),
    "stale": Kind(from_older, others="older run"),
    "mixed-run": Kind(from_another, others="another run"),
    "swap": Kind(swap, others="second rank"),
    "copy": Kind(copy, others="second rank"),
    "duplicate": Kind(duplicate, others="next rank"),
    "truncate": Kind(truncate, part="file"),
    "missing": Kind(remove),
}


def names(files: Iterable[Path]) -> str:
    """The names of some files, at most three; where two are called alike, with their folders."""
    found = list(files)
    alike = len({path.name for path in found}) < len(found)
    return few([f"{path.parent.name}/{path.name}" if alike else path.name for path in found], 3)


def _draw(target: Target) -> tuple[str, Shard, Source]:
    """Draw a shard; a counter of one element only where there is nothing else."""
    fqn, shard = target.chance.choice([one for one in target.shards if one[1].box.numel > 1] or target.shards)
    assert shard.source is not None
    return fqn, shard, shard.source


def _copy(sources: Iterable[Path], targets: Iterable[Path]) -> None:
    for source, target in zip(sources, targets, strict=True):
        shutil.copyfile(source, target)


def _write(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def _restate_checksum(shard: Shard, source: Source) -> None:
    """Make the CRC-32 right that an archive states of the record in which a shard lies; safetensors state none."""
    if not source.crc:
        return
    with File(source.path) as file:
        item = shard.item
        archive = Container(file if item is None else Window(file, item.offset, item.length))
        places = [archive.file.start + at for at in checksum_places(archive, source.record)]
        checksum = crc32(file.read(*source.record_span))
    for at in places:
        _write(source.path, at, struct.pack("<I", checksum))


def renumbered(path: Path, rank: int, other: int) -> Path:
    """Name the same file of another rank: the number behind `rank`, else the last one that is equal."""
    found = list(RANK.finditer(path.name)) or [m for m in re.finditer(r"\d+", path.name) if int(m[0]) == rank]
    if not found:
        return path.with_name(f"{path.stem}-{other}{path.suffix}")
    start, end = found[-1].span()
    return path.with_name(f"{path.name[:start]}{other:0{end - start}d}{path.name[end:]}")
