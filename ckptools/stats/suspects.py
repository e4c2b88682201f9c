"""Find tensors worth a look by their statistics, then read them again to say where the oddity is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median

import numpy as np

from ckptools.dtypes import ITEMSIZE, is_floating
from ckptools.errors import CkptoolsError, ReadError
from ckptools.files.opening import OpenFiles
from ckptools.keys.entries import layer_and_role
from ckptools.keys.value_digests import once
from ckptools.model.problems import Severity
from ckptools.model.records import Looked, Rows, grouped
from ckptools.model.shards import Shard, Source
from ckptools.stats.passes import MeasuredPart, located, numbers
from ckptools.stats.record import ODDITIES, Oddity, Stats, Suspect, Suspects
from ckptools.tensor_io.elements import pieces_of, raw_bands
from ckptools.tensor_io.stream import tensor_digest
from ckptools.text import count, first_few, number, plural, shape

MOST_LOOKS = 200
"""At most this many tensors are read again to locate an oddity."""

MIN_RUN = 256
"""Shortest run of zeros to report, if it is not accidental."""

ACCIDENT = 1e-6
"""A run of zeros is accidental if scattered zeros would form one this long with at least this probability."""

MIN_DENORMAL = 1e-3
"""Share of denormal numbers to report: trained weights have almost none."""

MIN_LAYERS = 5
"""A layer is called unlike the others only if at least this many layers have a tensor of that name."""

MIN_FACTOR = 3.0
MIN_PEAK = 30.0
"""Report an rms (first), or a largest magnitude, so many times larger or smaller than the median of other layers."""

MIN_Z = 6.0
"""Smallest robust z-score, of logarithms, to report."""

LEAST_SPREAD = 0.1
"""Lower limit for the spread of logarithms among layers."""

LARGEST = 1e4
"""Report larger weights: float16 ends at 65,504, and activations computed from them would overflow."""

MIN_GAP = 30.0
"""Outliers of a matrix are at least so many times as large as all other elements."""

EMPTY_BINS = 6
"""Smallest gap between binary exponents of band parts with and without outliers; outliers are searched beyond it."""

MIN_APART = 256
"""Smallest matrix, in elements, to look for outliers."""

APART = 1 / 64
"""Largest share of elements that count as outliers."""

MOST_NAMED = 8
"""At most this many rows of zeros are named."""

FEW_VALUES = 3
"""A tensor with at most this many distinct values, such as a mask, is not a weight."""

WEIGHT = re.compile(r"(^|_)(weight|bias|kernel|embed|embeds|embedding|embeddings|proj|gamma|beta)($|_)")
"""Last part of the name of a weight."""

NO_WEIGHT = re.compile(
    r"(^|_)(mask|masked|alibi|slopes|inv|freqs?|rotary|rope|cos|sin|scales?|zeros?|point|points|absmax|amax|packed|quant"
    r"|codes|running|mean|var|variance|std|min|max|counts?|counter|size|sum|sums|total|steps?|num|avg|sq|momentum|sigmas?"
    r"|alphas|betas|cumprod|timesteps|times|bins|edges|boundaries|centers|anchors|grid|coords|positions?|index|ids|idx"
    r"|energies|shift|offsets?|stats?|buffer|cache|cached|history|state|norms|lengths|table)($|_)"
)
"""Last part of the name of a table, a statistic, a counter or a scale, whose values may be large."""

STARTS_AT_ZERO = re.compile(r"\.lora_(B|embedding_A)(\.|$)")
"""Parts of a LoRA adapter that are zero before the first step. Source: peft 0.21.2, `reset_lora_parameters`."""

Roles = dict[tuple[str, int | None], list[Stats]]
"""Statistics by role (name without the layer number) and rank; each role occurs in several layers."""


def suspects(parts: Sequence[MeasuredPart], rows: Sequence[Stats], peaks: Sequence[Mapping[int, int]]) -> Suspects:
    """Find tensors worth a look, errors first; `rows` are the statistics of `parts`, `peaks` their `Sums.peaks`."""
    coded = [part for part in parts if part.tensor.are_codes]
    values = [each for each in zip(parts, rows, peaks, strict=True) if not each[0].tensor.are_codes]
    measured = [each for each in values if is_floating(each[1].dtype)]
    weights = [(part, row, own) for part, row, own in measured if row.numel and is_weight(part)]
    floats = [(part, row) for part, row, _ in measured if row.elements]
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
        zeros = [row for _, row in floats if row.zeros == row.elements]
        alive = {role: sum(bool(row.rms) for row in members) for role, members in roles.items()}
        found += [one for row in zeros for one in _all_zero(row, roles, alive, nothing_else)]
        apart = ((part, row, _stands_apart(part, row, own)) for part, row, own in weights)
        large = [(part, row, least) for part, row, least in apart if least or _is_too_large(row)]
        for n, (part, row, least) in enumerate(large):
            found += _out_of_range(part, row, least, files if n < MOST_LOOKS else None)
        known = {(one.name, one.rank) for one in found if one.what == "out of range"}
        odd = (one for members in roles.values() for one in _out_of_line(members))
        found += [one for one in odd if (one.name, one.rank) not in known]
        found += _copies(floats, roles, files)
    in_codes = f"{plural(len(coded), 'tensor')} with codes of quantized weights" if coded else ""
    compared = sum(len(members) for members in roles.values() if len(members) >= MIN_LAYERS)
    few_layers = f"fewer than {MIN_LAYERS} layers have such a tensor" if len(numbered) > compared else ""
    return Suspects(
        Rows(sorted(found, key=lambda one: (one.severity != "error", ODDITIES.index(one.what)))),
        Looked(
            sum(row.elements == row.numel for _, row, _ in weights),
            len(weights) + len(coded),
            in_codes or ("not all of their values can be read" if weights else "no weights of a model"),
        ),
        Looked(
            compared,
            len(numbered) + sum(layer_and_role(part.name)[0] is not None for part in coded),
            "; ".join(filter(None, (in_codes, few_layers))) or "no tensor is of a layer",
        ),
    )


def is_weight(part: MeasuredPart) -> bool:
    """Whether a tensor is a weight of a model, judged by name and shape; not a statistic, table, counter or scale."""
    last = _last_word(part)
    if part.kind not in ("model", "other") or NO_WEIGHT.search(last):
        return False
    return bool(WEIGHT.search(last)) or len(part.tensor.shape) > 1


def _last_word(part: MeasuredPart) -> str:
    return re.split(r"[./]", part.name.lower())[-1]


def _suspect(row: Stats, what: Oddity, words: str, severity: Severity = "warning") -> Suspect:
    return Suspect(row.name, row.rank, what, severity, words)


def _of_values(part: MeasuredPart, row: Stats, files: OpenFiles | None) -> Iterator[Suspect]:
    """Find oddities in the values of one tensor: NaN, infinities, denormal numbers, runs of zeros."""
    if row.nonfinite:
        kinds = ", ".join(f"{n:,} {kind}" for n, kind in ((row.nan, "NaN"), (row.inf, "infinite")) if n)
        at = _first(part, files, lambda values: ~np.isfinite(values)) if files is not None else ""
        yield _suspect(row, "not finite", kinds + at, "error")
    if row.denormal >= max(1, MIN_DENORMAL * row.elements):
        yield _suspect(row, "denormal", f"{count(row.denormal)} of {count(row.elements)} elements are denormal")
    if files is not None and MIN_RUN <= row.zeros < row.elements:
        with suppress(ReadError):  # reported in the tensor's row
            yield from _zeros(part, row, files)


def _all_zero(
    row: Stats, roles: Roles, alive: Mapping[tuple[str, int | None], int], nothing_else: bool
) -> Iterator[Suspect]:
    """Report an all-zero tensor: as an error if most other layers differ, or if all matrices are zero.

    `alive` counts the tensors of each role that are not all zero.
    """
    layer, role = layer_and_role(row.name)
    zero = "all zero" if row.elements == row.numel else "what is here of it is zero"
    if STARTS_AT_ZERO.search(row.name) and row.elements == row.numel:
        zero += ", as PEFT starts it: this adapter changes nothing here"
    differ = alive.get((role, row.rank), 0) if layer else 0
    if differ > 1 and 2 * differ > len(roles[role, row.rank]) - 1:
        yield _suspect(row, "all zero", f"{zero}, unlike {plural(differ, 'other layer')}", "error")
    elif len(row.shape) > 1:
        words = f"{zero}, like every matrix here" if nothing_else else zero
        yield _suspect(row, "all zero", words, "error" if nothing_else else "warning")


# -- read a tensor again -----------------------------------------------------------------------------------------------


def _shards(part: MeasuredPart) -> list[tuple[Shard, Source]]:
    """Choose one readable shard for each region, with its source; encoded shards, which have none, are left out."""
    chosen = once(located(part.tensor)).shards
    return [(s, s.source) for s in reversed(chosen) if s.box.numel and s.source is not None]


def _in_order(part: MeasuredPart) -> list[tuple[Shard, Source]]:
    """The shards whose elements lie in the file in row-major order, so that their number gives their index."""
    return [(shard, source) for shard, source in _shards(part) if source.contiguous]


def _values(source: Source, files: OpenFiles) -> Iterator[np.ndarray]:
    """Yield the elements of a source as numbers, band by band."""
    with files.open(source.path) as file:
        for piece in pieces_of(source, 1 << 62):
            for raw in raw_bands(piece, file):
                yield numbers(raw, source.dtype)


def _first(part: MeasuredPart, files: OpenFiles, test: Callable[[np.ndarray], np.ndarray]) -> str:
    """Locate the first element that passes a test: `, first at [12, 4031]`."""
    with suppress(ReadError):
        for shard, source in _in_order(part):
            before = 0
            for flags in map(test, _values(source, files)):
                if flags.any():
                    return f", first at {shape(shard.box.index_of(before + int(flags.argmax())))}{_whose(part, shard)}"
                before += len(flags)
    return ""


def _whose(part: MeasuredPart, shard: Shard) -> str:
    """Name the rank of a shard, unless the part is of this rank alone."""
    return "" if shard.rank is None or part.rank is not None else f" (rank {shard.rank})"


def _changes(source: Source, files: OpenFiles) -> Iterator[int]:
    """Yield where each run of zeros begins, and where it ends, in turn."""
    before, last = 0, np.int8(0)
    for values in _values(source, files):
        zero = (values == 0).view("i1")
        yield from (np.flatnonzero(np.diff(zero, prepend=last)) + before).tolist()
        before, last = before + len(zero), zero[-1]
    if last:
        yield before


def _zeros(part: MeasuredPart, row: Stats, files: OpenFiles) -> Iterator[Suspect]:
    """Report a long run of zeros, or rows of a matrix that are all zero."""
    dead, named = 0, list[int]()
    for shard, source in _in_order(part):
        width, elements = shard.box.sizes[-1] if shard.box.sizes else 1, shard.box.numel
        in_rows = len(row.shape) > 1 and width == row.shape[-1]
        first = shard.box.offsets[0] if len(row.shape) == 2 else 0
        start = length = zeros = 0
        changes = _changes(source, files)
        for low, high in zip(changes, changes, strict=True):
            zeros += high - low
            if high - low > length:
                start, length = low, high - low
            if in_rows and high - low >= width:
                rows = range(-(-low // width), high // width)
                dead += len(rows)
                named += [first + n for n in rows[: MOST_NAMED - len(named)]]
        whole_rows = in_rows and not start % width and not length % width
        if whole_rows or length == elements or not _no_accident(length, zeros, elements):
            continue
        where = "the last" if start + length == elements else f"from {count(start)} on"
        words = f"{where} {length:,} of {elements:,} elements are zero{_whose(part, shard)}"
        yield _suspect(row, "zeros", words, "error")
        return
    if dead and len(row.shape) == 2:
        few = f": {first_few(named)}{' …' if dead > len(named) else ''}"
        yield _suspect(row, "dead rows", f"{plural(dead, 'row')} of {row.shape[0]:,} all zero{few}")


def _no_accident(length: int, zeros: int, elements: int) -> bool:
    """Whether a run of zeros is too long to arise from the other zeros scattered at random."""
    others = (zeros - length) / max(elements - length, 1)
    return length >= MIN_RUN and (others <= 0 or math.log(elements) + length * math.log(others) < math.log(ACCIDENT))


# -- values too large for a weight -------------------------------------------------------------------------------------


def _peak(row: Stats) -> float:
    return max(-float(row.min or 0), float(row.max or 0))


def _is_too_large(row: Stats) -> bool:
    return _peak(row) > LARGEST and ITEMSIZE[row.dtype] > 1  # 8-bit numbers are codes with a separate scale


def _stands_apart(part: MeasuredPart, row: Stats, peaks: Mapping[int, int]) -> float:
    """Return the magnitude from which elements may be outliers, judged by the largest of each band part; else 0.

    `peaks` counts band parts by the binary exponent of their largest magnitude.
    """
    if len(row.shape) < 2 or row.elements < MIN_APART or not WEIGHT.search(_last_word(part)):
        return 0.0
    above, chunks = 0, sum(peaks.values())
    for exponent, below in pairwise(sorted(peaks, reverse=True)):
        above += peaks[exponent]
        if above > max(1, chunks // 8):
            break
        if exponent - below >= EMPTY_BINS:
            return math.ldexp(1.0, exponent - 1)
    return 0.0


def _out_of_range(part: MeasuredPart, row: Stats, least: float, files: OpenFiles | None) -> Iterator[Suspect]:
    """Report elements too large for a weight, or outliers: at least `least`, and far larger than all others."""
    too_large, largest = _is_too_large(row), number(float(f"{_peak(row):.3g}"))
    if files is None:
        if too_large:
            yield _suspect(row, "out of range", f"largest magnitude {largest}")
        return
    limit = LARGEST if too_large else least
    with suppress(ReadError):  # reported in the tensor's row
        at = _first(part, files, lambda values: np.abs(values) >= limit)
        large, smallest, below, different = 0, math.inf, 0.0, set[float]()
        for _, source in _shards(part):
            for values in _values(source, files):
                finite = values[np.isfinite(values)]
                sizes = np.abs(finite.astype("f8"))
                beyond = sizes[sizes >= limit]
                large += len(beyond)
                smallest = min(smallest, beyond.min(initial=math.inf))
                below = max(below, sizes.max(where=sizes < limit, initial=0.0))
                if len(different) <= FEW_VALUES:
                    different |= set(np.unique(finite)[: FEW_VALUES + 1].tolist())
        said = plural(large, "element")
        if too_large:
            if len(different) <= FEW_VALUES and (len(row.shape) > 2 or not WEIGHT.search(_last_word(part))):
                return
            yield _suspect(row, "out of range", f"{said} beyond {LARGEST:,.0f}, the largest {largest}{at}")
        elif large <= APART * row.elements and smallest >= MIN_GAP * below > 0:
            times = f"{smallest / below:,.0f} x as large as all others"
            yield _suspect(row, "out of range", f"{said} {times}: {largest}{at}")


# -- compare with other layers -----------------------------------------------------------------------------------------


def _out_of_line(members: Sequence[Stats]) -> Iterator[Suspect]:
    """Report tensors whose rms or largest magnitude is far from the same tensor's in other layers."""
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
    """Yield rows far from the median, by a robust z-score of logarithms, with the value and its ratio to the median."""
    logs = [(row, value, math.log(value)) for row, value in known if value > 0 and math.isfinite(value)]
    if len(logs) < MIN_LAYERS:
        return
    middle = median(log for _, _, log in logs)
    spread = max(1.4826 * median(abs(log - middle) for _, _, log in logs), LEAST_SPREAD)
    for row, value, log in logs:
        if abs(log - middle) >= max(math.log(least), MIN_Z * spread):
            yield row, value, math.exp(log - middle)


def _copies(floats: Sequence[tuple[MeasuredPart, Stats]], roles: Roles, files: OpenFiles) -> Iterator[Suspect]:
    """Report tensors of several layers with equal values, bit for bit; constant and tied tensors are left out."""
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
