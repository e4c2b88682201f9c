"""One pass over the bytes of many arrays, in threads: what cannot be read is noted, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from threading import Event
from typing import Generic, Protocol, TypeVar

from ckptools.checks.statistics.reading import said
from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.opening import OpenFiles
from ckptools.model.tensor import Source
from ckptools.tensor_io import fetch_ahead
from ckptools.tensor_io.elements import Piece, bands_of, pieces_of
from ckptools.tensor_io.numbers import Raw
from ckptools.tensor_io.progress import Progress
from ckptools.tensor_io.read import extent
from ckptools.tensor_io.shared_work import in_ranks
from ckptools.tensor_io.threads import thread_count

PIECE = 16 << 20
"""Bytes of an array that one thread works on at a time, at least."""

MAX_PIECES = 4096
"""Pieces that the arrays of a large checkpoint are cut into, so that their list stays short."""

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class HasBytes(Protocol):
    """Something that is read."""

    @property
    def nbytes(self) -> int:
        """How many bytes it is."""


Part = TypeVar("Part", bound=HasBytes)


class Collector(Protocol[Result_co]):
    """Takes in the elements of a piece, and tells what it found."""

    def add(self, raw: Raw) -> None:
        """Take in some elements."""

    def result(self, times: int) -> Result_co:
        """What was found, where every element is there so many times."""


@dataclass
class Found(Generic[Result]):
    """What a pass over one array found.

    Attributes:
        results: of its pieces that could be read, in their order.
        problem: why others could not; empty where all could.
        nbytes: bytes read.
    """

    results: list[Result] = field(default_factory=list)
    problem: str = ""
    nbytes: int = 0

    def take(self, result: Result | None, problem: str, nbytes: int) -> None:
        """Note the result of a piece of so many bytes, or why there is none."""
        self.problem = self.problem or problem
        if result is not None:
            self.results.append(result)
            self.nbytes += nbytes


@dataclass(frozen=True)
class Array:
    """What one tensor, or a part of one, has for bytes.

    Attributes:
        name: of a tensor that has them.
        sources: where they lie.
    """

    name: str
    sources: tuple[Source, ...]


def over(
    arrays: Sequence[Array],
    collector: Callable[[int, str], Collector[Result]],
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Found[Result]]:
    """Read every array once, and collect what is in it.

    Args:
        arrays: what to read.
        collector: makes what takes in a piece of the array of a number, and of a dtype.
        jobs: threads.
        progress: called as bytes are read.
    """
    found: list[Found[Result]] = [Found() for _ in arrays]
    pieces = list(_pieces(arrays, found))

    def read(number: int, piece: Piece, files: OpenFiles, given_up: Event) -> Result:
        collecting = collector(number, piece.source.dtype)
        with files.open(piece.source.path) as file:
            for band in bands_of(piece, file):
                if given_up.is_set():
                    break
                collecting.add(band)
        return collecting.result(piece.times)

    read_parts(pieces, read, _bytes_of, found, [array.name for array in arrays], jobs, progress)
    return found


def _bytes_of(piece: Piece) -> list[fetch_ahead.Part]:
    source = piece.source
    return [(source.path, source.offset, source.offset + extent(source))]


def read_parts(
    parts: Sequence[tuple[int, Part]],
    read: Callable[[int, Part, OpenFiles, Event], Result],
    reads: Callable[[Part], Iterable[fetch_ahead.Part]],
    found: Sequence[Found[Result]],
    names: Sequence[str],
    jobs: int | None,
    progress: Progress | None,
) -> None:
    """Read the parts of some rows in threads, and note what was found, or why not, with the row of each.

    Args:
        parts: what is read, each with the number of its row.
        read: the result of a part of the row of a number; it ends early once the event is set.
        reads: what of which files that takes.
        found: of each row, what takes its results.
        names: of each row, for `progress`.
        jobs: threads.
        progress: called as bytes are read.
    """
    given_up = Event()

    def one(work: tuple[int, Part]) -> tuple[Result | None, str]:
        number, part = work
        try:
            result = read(number, part, files, given_up)
        except ReadError as error:
            return None, said(error)
        if progress is not None:
            progress(part.nbytes, names[number])
        return result, ""

    with OpenFiles() as files:
        threads = thread_count(jobs)
        results = in_ranks(one, parts, threads, lambda p: p[1].nbytes, given_up.set, lambda p: reads(p[1]))
    for (number, part), (result, problem) in zip(parts, results, strict=True):
        found[number].take(result, problem, part.nbytes)


def _pieces(arrays: Sequence[Array], found: Sequence[Found[Result]]) -> Iterator[tuple[int, Piece]]:
    """The pieces of every array with its number; what has none says why."""
    total = sum(prod(s.shape) * ITEMSIZE[s.dtype] for array in arrays for s in array.sources)
    limit = max(PIECE, total // MAX_PIECES)
    for number, array in enumerate(arrays):
        for source in array.sources:
            try:
                yield from ((number, piece) for piece in pieces_of(source, limit))
            except ReadError as error:
                found[number].problem = said(error)
