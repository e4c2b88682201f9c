"""Compare values that must agree: replicas of one box on several ranks, and fp32 copies of weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import NotWholeError, ReadError
from ckptools.files.opening import OpenFiles
from ckptools.model.problems import Code, Differing, Problem
from ckptools.model.rank_vote import vote
from ckptools.model.records import grouped
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Rounded
from ckptools.option import spelled
from ckptools.text import clip_middle, shape

CHUNK = 4 << 20
"""Bytes compared at a time."""


class Unequal(NamedTuple):
    """Two differing copies of one box.

    Attributes:
        usual: the copy of the majority of ranks; without a majority, the first copy.
        other: a copy with other bytes.
        odd: ranks that more than half of the copies contradict.
    """

    usual: Shard
    other: Shard
    odd: tuple[int, ...]

    def problem(self, fqn: str, files: OpenFiles, more: str = "") -> Problem:
        """Describe the difference: the box, the ranks with each copy, and the first differing element.

        Args:
            fqn: of the tensor.
            files: keeps the files of the copies open.
            more: text to append to the message.

        Raises:
            ReadError: a file cannot be read.
        """
        first = _first_difference(self.other, self.usual, files)
        where = f" (first at {first[0]}: {first[1]} and {first[2]})" if first else ""
        text = f"{self.other.box.label}{_whose(self.other)} holds other bytes than {_whose(self.usual)}{where}{more}"
        differing = None
        if first and self.other.rank is not None and self.usual.rank is not None:
            values = sorted(((first[1], (self.other.rank,)), (first[2], (self.usual.rank,))), key=itemgetter(1))
            name = f"value at {first[0]}" if self.other.box.sizes else "value"
            differing = Differing(name, tuple(values), plain=False)
        rank = self.odd[0] if self.odd else None
        return Problem(Code.COPIES_DIFFER, text, rank, fqn, ranks=self.odd, differing=differing)


def differing_boxes(shards: Iterable[Shard], files: OpenFiles) -> dict[Box, Unequal]:
    """Find the boxes whose copies differ.

    Raises:
        ReadError: a file cannot be read.
    """
    groups = grouped(shards, lambda shard: shard.box).values()
    unequal = (copies for copies in groups if not _all_equal(copies, files))
    return {copies[0].box: _voted(copies, files) for copies in unequal}


def _voted(copies: Sequence[Shard], files: OpenFiles) -> Unequal:
    found = vote(list(enumerate(copies)), lambda a, b: _equal(a, b, files))
    usual = found.majority or found.groups[0]
    other = next(value for value, places in found.groups if places != usual[1])
    ranks = [copies[place].rank for place in found.odd]
    return Unequal(usual[0], other, tuple(rank for rank in ranks if rank is not None))


def _whose(copy: Shard) -> str:
    if copy.rank is not None:
        return f"rank {copy.rank}"
    return clip_middle(copy.file.path.name, 60) if copy.file else "one copy"


def _first_difference(a: Shard, b: Shard, files: OpenFiles) -> tuple[str, str, str] | None:
    """The index of the first differing element, and its value in both copies; None if unknown."""
    from ckptools.tensor_io.numbers import digits

    if a.source is None or b.source is None:
        return None
    width, dtype = ITEMSIZE[a.source.dtype], a.source.dtype
    for start, x, y in _side_by_side(a, b, files):
        if x != y:
            place = next(i for i in range(0, len(x), width) if x[i : i + width] != y[i : i + width])
            values = [digits(data[place : place + width], dtype) for data in (x, y)]
            return shape(a.box.index_of((start + place) // width)), values[0], values[1]
    return None


def _all_equal(copies: Sequence[Shard], files: OpenFiles) -> bool:
    """Whether all copies of one box are equal; contiguous copies are read together, each once."""
    sources = list(dict.fromkeys(shard.source for shard in copies if shard.source is not None))
    encoded = any(shard.encoded is not None for shard in copies)
    if encoded or not all(source.contiguous for source in sources):
        return all(_equal(copies[0], other, files) for other in copies[1:])
    return len(sources) < 2 or _equal_bytes(sources, copies[0].box.numel * ITEMSIZE[sources[0].dtype], files)


def _read(source: Source, at: int, nbytes: int, files: OpenFiles) -> bytes:
    with files.open(source.path) as file:
        return file.read(source.offset + at, nbytes)


def _equal(a: Shard, b: Shard, files: OpenFiles) -> bool:
    if a.encoded is not None or b.encoded is not None:
        return _equal_parts(a, b, files)
    if a.source is None or b.source is None or a.source == b.source:
        return True
    return all(x == y for _, x, y in _side_by_side(a, b, files))


def _side_by_side(a: Shard, b: Shard, files: OpenFiles) -> Iterator[tuple[int, bytes, bytes]]:
    """The bytes of two copies in row-major order, piece by piece: `(byte offset, bytes, bytes)`."""
    assert a.source is not None
    assert b.source is not None
    if not (a.source.contiguous and b.source.contiguous):
        from ckptools.tensor_io.read import read_shard

        yield 0, read_shard(a, files).tobytes(), read_shard(b, files).tobytes()
        return
    nbytes = a.box.numel * ITEMSIZE[a.source.dtype]
    for at in range(0, nbytes, CHUNK):
        n = min(CHUNK, nbytes - at)
        yield at, _read(a.source, at, n, files), _read(b.source, at, n, files)


def _equal_parts(a: Shard, b: Shard, files: OpenFiles) -> bool:
    """Whether two encoded shards have the same class and equal parts."""
    if a.encoded is None or b.encoded is None or a.encoded.name != b.encoded.name:
        return False
    one, other = (dict(shard.encoded.parts) for shard in (a, b) if shard.encoded is not None)
    forms = [{name: (source.dtype, source.shape) for name, source in parts.items()} for parts in (one, other)]
    alike = forms[0] == forms[1]
    return alike and all(_equal(_whole(one[name]), _whole(other[name]), files) for name in one)


def _whole(source: Source) -> Shard:
    return Shard(Box.whole(source.shape), None, source)


def _equal_bytes(sources: Sequence[Source], nbytes: int, files: OpenFiles) -> bool:
    for at in range(0, nbytes, CHUNK):
        n = min(CHUNK, nbytes - at)
        first = _read(sources[0], at, n, files)
        if any(_read(other, at, n, files) != first for other in sources[1:]):
            return False
    return True


# -- fp32 copies, which round to the half-precision weights of their names ---------------------------------------------

# They test an inferred layout. An optimizer that keeps fp32 copies rounds them to the model's weights after each step,
# to nearest even. Some elements of each shard are compared: enough to distinguish parameters.

SAMPLE = 4096
"""Elements of each shard that are compared, or one row if that is longer."""


def _mismatch(pair: Rounded) -> Problem | None:
    """The problem of a pair whose copy does not round to its weight; None if it does.

    Raises:
        NotWholeError, ReadError: no element could be compared, and some are missing or unreadable.
    """
    from ckptools.tensor_io import read  # imports numpy, and few checkpoints have pairs

    unread = None
    pieces = {s.box for s in (*pair.weight.shards, *pair.copy.shards) if s.box.numel}
    for box in sorted(pieces, key=lambda box: (box.offsets, box.sizes)):
        try:
            sample = _first_rows(box)
            same = _rounds_to(read.read_box(pair.copy, sample), read.read_box(pair.weight, sample), pair.weight.dtype)
        except (NotWholeError, ReadError) as error:
            unread = error
            continue
        if not same:
            as_it_is = [spelled("only", "model"), spelled("weights", "module"), spelled("unchecked", True)]
            text = (
                f"{sample}: its fp32 copy does not round to the {pair.weight.dtype} weight, so the layout that was "
                "found is not the one that was saved, one of both is damaged or another file's, or the weight was "
                f"changed by hand; {' '.join(as_it_is)} "
                "writes the weights as they are"
            )
            return Problem(Code.COPIES_DIFFER, text, None, pair.fqn)
    if unread is not None:
        raise unread
    return None


def compare_rounded(pairs: Iterable[Rounded]) -> tuple[list[Problem], int]:
    """Compare weights with their fp32 copies; return the problems, and how many pairs were compared in full."""
    problems: list[Problem] = []
    compared = 0
    for pair in pairs:
        try:
            problem = _mismatch(pair)
        except (NotWholeError, ReadError):
            # Missing and unreadable values are reported elsewhere.
            continue
        problems += [problem] if problem else []
        compared += 1
    return problems, compared


def _first_rows(box: Box) -> Box:
    if not box.sizes:
        return box
    rows = max(1, SAMPLE // max(prod(box.sizes[1:]), 1))
    return Box(box.offsets, (min(rows, box.sizes[0]), *box.sizes[1:]))


def _rounds_to(copy: Any, weight: Any, dtype: str) -> bool:
    """Whether fp32 elements round to a weight's, or equal fp32 ones; any NaN equals any other."""
    import numpy as np

    copy, weight = np.atleast_1d(copy), np.atleast_1d(weight)  # numpy 1 shifts no unsigned scalar
    values = copy.view("<f4")
    if dtype == "float16":
        with np.errstate(over="ignore"):
            rounded, nan = values.astype("<f2").view("<u2"), np.isnan(weight.view("<f2"))
    elif dtype == "float32":
        rounded, nan = copy.view("<u4"), np.isnan(weight.view("<f4"))
    else:
        bits = copy.view("<u4").astype("<u8")
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        nan = (weight.view("<u2") & 0x7FFF) > 0x7F80
    return bool(np.all((rounded == weight.view(rounded.dtype)) | (np.isnan(values) & nan)))
