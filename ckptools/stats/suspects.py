"""What is worth a look among tensors, by name: found from their figures, then located by reading these alone again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import numpy as np

from ckptools.dtypes import is_floating
from ckptools.errors import CkptoolsError, ReadError
from ckptools.files.opening import OpenFiles
from ckptools.keys.folding import layer_and_role
from ckptools.keys.value_digests import once
from ckptools.model.problems import Severity
from ckptools.model.records import grouped
from ckptools.model.tensor import Shard
from ckptools.stats.passes import numbers
from ckptools.stats.reading import MeasuredPart, located
from ckptools.stats.record import Oddity, Stats, Suspect
from ckptools.tensor_io.elements import pieces_of, raw_bands
from ckptools.tensor_io.stream import tensor_digest
from ckptools.text import count, first_few, number, plural, shape

MOST_LOOKS = 200
"""At most this many tensors are read again to say where something is."""

MIN_RUN = 256
"""Zeros in a row that are worth a look, if they are no accident."""

ACCIDENT = 1e-6
"""A run of zeros is no accident if scattered zeros would make one this long with less than this probability."""

MIN_DENORMAL = 1e-3
"""Share of denormal numbers that is worth a look: trained weights have next to none."""

MIN_LAYERS = 5
"""Layers that a role needs for one to be out of line."""

MIN_FACTOR = 3.0
MIN_PEAK = 30.0
"""An rms that many times larger or smaller than usual in its role is worth a look, and a largest magnitude."""

MIN_Z = 6.0
"""The robust z-score, of logarithms, that a tensor out of line has at least."""

LEAST_SPREAD = 0.1
"""The spread of logarithms that a role is taken to have at least."""

Roles = dict[tuple[str, int | None], list[Stats]]
"""Rows by role and rank; each role is in several layers."""


def suspects(parts: Sequence[MeasuredPart], rows: Sequence[Stats]) -> tuple[Suspect, ...]:
    """Find what is worth a look, errors first; `rows` are the figures of `parts`."""
    floats = [(part, row) for part, row in zip(parts, rows, strict=True) if is_floating(row.dtype) and row.elements]
    numbered = [row for _, row in floats if layer_and_role(row.name)[0] is not None]
    roles: Roles = grouped(numbered, lambda row: (layer_and_role(row.name)[1], row.rank))
    nothing_else = all(not row.rms for _, row in floats if len(row.shape) > 1)
    found: list[Suspect] = []
    looks = 0
    with OpenFiles() as files:
        for part, row in floats:
            again = row.nonfinite or MIN_RUN <= row.zeros < row.elements
            look = bool(again) and looks < MOST_LOOKS
            looks += look
            found += _of_values(part, row, files if look else None)
        found += [one for _, row in floats if row.zeros == row.elements for one in _all_zero(row, roles, nothing_else)]
        found += [one for members in roles.values() for one in _out_of_line(members)]
        found += _copies(floats, roles, files)
    order = ("not finite", "all zero", "zeros", "out of line", "denormal", "dead rows", "copy")
    return tuple(sorted(found, key=lambda one: (one.severity != "error", order.index(one.what))))


def _suspect(row: Stats, what: Oddity, words: str, severity: Severity = "warning") -> Suspect:
    return Suspect(row.name, row.rank, what, severity, words)


def _of_values(part: MeasuredPart, row: Stats, files: OpenFiles | None) -> Iterator[Suspect]:
    """What stands out of the values of one tensor, whatever others are like."""
    if row.nonfinite:
        kinds = ", ".join(f"{n:,} {kind}" for n, kind in ((row.nan, "NaN"), (row.inf, "infinite")) if n)
        at = _first(part, files, lambda values: ~np.isfinite(values)) if files is not None else ""
        yield _suspect(row, "not finite", kinds + at, "error")
    if row.denormal >= max(1, MIN_DENORMAL * row.elements):
        yield _suspect(row, "denormal", f"{count(row.denormal)} of {count(row.elements)} elements are denormal")
    if files is not None and MIN_RUN <= row.zeros < row.elements:
        with suppress(ReadError):  # its row says so
            yield from _zeros(part, row, files)


def _all_zero(row: Stats, roles: Roles, nothing_else: bool) -> Iterator[Suspect]:
    """A tensor of zeros: an error where the same role in most other layers is not, or no matrix has anything else."""
    layer, role = layer_and_role(row.name)
    zero = "all zero" if row.elements == row.numel else "what is here of it is zero"
    others = [other for other in roles.get((role, row.rank), ()) if other.name != row.name] if layer else []
    differ = [other for other in others if other.rms]
    if len(differ) > 1 and 2 * len(differ) > len(others):
        yield _suspect(row, "all zero", f"{zero}, unlike {plural(len(differ), 'other layer')}", "error")
    elif len(row.shape) > 1:
        words = f"{zero}, like every matrix here" if nothing_else else zero
        yield _suspect(row, "all zero", words, "error" if nothing_else else "warning")


# -- a second look ------------------------------------------------------------------------------------------------


def _shards(part: MeasuredPart) -> list[Shard]:
    """The shards with bytes here, each region once."""
    tensor = located(part.tensor)
    return list({shard.box: shard for shard in reversed(tensor.found) if shard.box.numel}.values())[::-1]


def _flags(shard: Shard, files: OpenFiles, test: Callable[[np.ndarray], np.ndarray]) -> Iterator[np.ndarray]:
    """Whether each element of a shard passes a test, band after band in row-major order."""
    source = shard.source
    assert source is not None
    with files.open(source.path) as file:
        for piece in pieces_of(source, 1 << 62):
            for raw in raw_bands(piece, file):
                yield test(numbers(raw, source.dtype))


def _first(part: MeasuredPart, files: OpenFiles, test: Callable[[np.ndarray], np.ndarray]) -> str:
    """Where the first element is that passes a test: `, first at [12, 4031]`."""
    with suppress(ReadError):
        for shard in _shards(part):
            if shard.source is None or not shard.source.contiguous or shard.encoded is not None:
                continue
            before = 0
            for flags in _flags(shard, files, test):
                if flags.any():
                    index = np.unravel_index(before + int(flags.argmax()), shard.box.sizes)
                    where = [int(n) + offset for n, offset in zip(index, shard.box.offsets, strict=True)]
                    return f", first at {shape(where)}{_whose(shard)}"
                before += len(flags)
    return ""


def _whose(shard: Shard) -> str:
    return "" if shard.rank is None else f" (rank {shard.rank})"


@dataclass
class _Runs:
    """Zeros in a row in one shard: the longest run, the one at its end, and the rows that are all zero."""

    width: int
    longest: tuple[int, int] = (0, 0)
    last: tuple[int, int] = (0, 0)
    dead: int = 0
    first_dead: tuple[int, ...] = ()
    total: int = 0

    def ends(self, start: int, stop: int) -> None:
        """Take note of a run that is over."""
        self.longest = max(self.longest, (stop - start, -start))
        first, behind = -(-start // self.width), stop // self.width
        if behind > first:
            self.dead += behind - first
            self.first_dead = (*self.first_dead, *range(first, min(behind, first + 8)))[:8]


def _runs_of(shard: Shard, files: OpenFiles) -> _Runs:
    found, before, start = _Runs(max(shard.box.sizes[-1:] or (1,))), 0, None
    for flags in _flags(shard, files, lambda values: values == 0):
        found.total += int(np.count_nonzero(flags))
        edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).view("i1")))
        if start is not None and (not len(edges) or edges[0]):
            found.ends(start, before)
            start = None
        for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            begin = start if start is not None else before + low
            start = begin if high == len(flags) else None
            if start is None:
                found.ends(begin, before + high)
        before += len(flags)
    if start is not None:
        found.ends(start, before)
        found.last = (before - start, start)
    return found


def _zeros(part: MeasuredPart, row: Stats, files: OpenFiles) -> Iterator[Suspect]:
    """A tail or a block of zeros, and rows of a matrix that are all zero."""
    dead, named = 0, list[int]()
    for shard in _shards(part):
        if shard.source is None or not shard.source.contiguous or shard.encoded is not None:
            continue
        runs, elements = _runs_of(shard, files), shard.box.numel
        length, start = runs.longest[0], -runs.longest[1]
        in_rows = len(row.shape) > 1 and shard.box.sizes[-1] == row.shape[-1]
        if in_rows and runs.dead:
            first = shard.box.offsets[0] if len(row.shape) == 2 else 0
            dead, named = dead + runs.dead, [*named, *(n + first for n in runs.first_dead)]
        whole_rows = in_rows and not start % runs.width and not length % runs.width
        if whole_rows or length == elements or not _no_accident(length, runs.total, elements):
            continue
        where = "the last" if start + length == elements else f"from {count(start)} on"
        words = f"{where} {length:,} of {elements:,} elements are zero{_whose(shard)}"
        yield _suspect(row, "zeros", words, "error")
        return
    if dead and len(row.shape) == 2:
        few = f": {first_few(named)}{' …' if dead > len(named[:8]) else ''}"
        yield _suspect(row, "dead rows", f"{plural(dead, 'row')} of {row.shape[0]:,} all zero{few}")


def _no_accident(length: int, zeros: int, elements: int) -> bool:
    """Whether a run is longer than the other zeros, if they were scattered, would make one."""
    others = (zeros - length) / max(elements - length, 1)
    return length >= MIN_RUN and (others <= 0 or math.log(elements) + length * math.log(others) < math.log(ACCIDENT))


# -- beside other layers ------------------------------------------------------------------------------------------


def _out_of_line(members: Sequence[Stats]) -> Iterator[Suspect]:
    """Tensors whose rms, or else largest magnitude, is far from that of the same role in other layers."""
    taken: set[str] = set()
    peaks = [(row, max(abs(row.min or 0), abs(row.max or 0))) for row in members]
    for what, least, known in (
        ("rms", MIN_FACTOR, [(row, row.rms or 0.0) for row in members]),
        ("largest magnitude", MIN_PEAK, peaks),
    ):
        for row, value, factor in _far_off([(row, float(value)) for row, value in known], least):
            if row.name not in taken:
                close = number(float(f"{max(factor, 1 / factor):.2g}"))
                times = f"{close} x" if factor > 1 else f"1/{close} of"
                words = f"{what} {number(float(f'{value:.3g}'))}, {times} its role in other layers"
                yield _suspect(row, "out of line", words)
            taken.add(row.name)


def _far_off(known: Sequence[tuple[Stats, float]], least: float) -> Iterator[tuple[Stats, float, float]]:
    """Rows whose figure is far from the median, by a robust z-score of logarithms, and by how much."""
    logs = [(row, value, math.log(value)) for row, value in known if value > 0 and math.isfinite(value)]
    if len(logs) < MIN_LAYERS:
        return
    middle = median(log for _, _, log in logs)
    spread = max(1.4826 * median(abs(log - middle) for _, _, log in logs), LEAST_SPREAD)
    for row, value, log in logs:
        if abs(log - middle) >= max(math.log(least), MIN_Z * spread):
            yield row, value, math.exp(log - middle)


def _copies(floats: Sequence[tuple[MeasuredPart, Stats]], roles: Roles, files: OpenFiles) -> Iterator[Suspect]:
    """Tensors of one role in several layers with the same values, bit for bit, without constants and tied ones."""
    part_of = {id(row): part for part, row in floats}
    for members in roles.values():
        varied = [row for row in members if row.std and row.rank is None and row.elements == row.numel]
        alike = grouped(varied, lambda r: (r.shape, r.dtype, r.min, r.max, r.mean, r.std, r.l2, r.nan, r.inf))
        for same in (rows for rows in alike.values() if len(rows) > 1):
            first: dict[str, tuple[Stats, object]] = {}
            for row in same[:MOST_LOOKS]:
                tensor = part_of[id(row)].tensor
                with suppress(CkptoolsError):
                    known, places = first.setdefault(
                        tensor_digest(once(tensor), files), (row, {shard.source for shard in tensor.found})
                    )
                    if known is not row and places != {shard.source for shard in tensor.found}:
                        yield _suspect(row, "copy", f"the same values as {known.name}, bit for bit")
