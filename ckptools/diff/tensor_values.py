"""Compare tensor values: streamed from the shards of both sides, in bands, by several threads.

Tensors that both sides cut into the same regions are compared region by region; a region whose zip entries state the
same CRC-32 is not read. Others are read in bands of rows, which are contiguous in row-wise and column-wise shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from ckptools.diff.plain_values import numbered
from ckptools.diff.record import (
    DIFFERENT,
    NOT_FINITE,
    Difference,
    Measures,
    Side,
    SubjectRow,
    TensorDifference,
    Tolerance,
    Verdict,
)
from ckptools.diff.sides import SideTensor
from ckptools.dtypes import ITEMSIZE, short
from ckptools.errors import CkptoolsError, RefusedError
from ckptools.files.opening import OpenFiles
from ckptools.formats.megatron.folders import arguments
from ckptools.keys.expected_names import Original, original_of, saved_shapes
from ckptools.keys.pairing import Pairing, pair
from ckptools.keys.value_digests import once
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows, grouped
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.rules.verdict import verdict_of
from ckptools.tensor_io.fetch_ahead import (
    Part,
    Progress,
    begin_stage,
    copies_among,
    in_ranks,
    no_progress,
    parts_of_all,
)
from ckptools.tensor_io.replicas import differing_boxes
from ckptools.tensor_io.slicing import bands_of
from ckptools.tensor_io.stream import tensor_bytes, tensor_digest
from ckptools.text import common_prefix, few, plural, shape
from ckptools.training_state.models import chosen_models
from ckptools.training_state.sections import sections_of, sections_of_kind

REGION = 1 << 24
"""Elements compared by one thread; larger tensors are shared among threads."""


OWN_COPIES = "ranks hold different copies of it (verify names them)"


@dataclass(frozen=True)
class Reading:
    """Settings for comparing values; `every_byte` reads regions even if both sides state the same checksum."""

    files: OpenFiles
    threads: int
    tolerance: Tolerance | None = None
    every_byte: bool = False
    progress: Progress = no_progress


@dataclass
class Measured:
    """The result of comparing two tensors.

    Attributes:
        measures: of the elements that were read; None if none was.
        skipped: number of elements not read, as both sides state the same checksum.
        damaged: True if a region differs although both sides state the same checksum.
        by_rank: True if ranks hold different copies, and each was compared with the same rank's.
        problem: why the tensors cannot be compared.
    """

    measures: Measures | None = None
    skipped: int = 0
    damaged: bool = False
    by_rank: bool = False
    problem: str = ""
    nbytes: int = 0
    nbytes_skipped: int = 0


@dataclass
class _Pair:
    """Two tensors to compare, as pairs with one shard per region; a pair for each rank if its copies differ."""

    name: str
    tensors: tuple[Tensor, Tensor]
    parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    found: Measured = field(default_factory=Measured)


class _Region(NamedTuple):
    """A region of two tensors that one thread reads and compares."""

    pair: _Pair
    box: Box
    a: Sequence[Shard]
    b: Sequence[Shard]
    stated_alike: bool


def compare_tensors(pairs: Iterable[tuple[str, Tensor, Tensor]], how: Reading) -> list[Measured]:
    """Compare values of pairs of tensors, each `(name, a, b)`; both have one shape, and shards that cover it."""
    made = [_Pair(name, (a, b)) for name, a, b in pairs]

    def copies(pair: _Pair) -> list[Part]:
        return [part for tensor in pair.tensors for part in copies_among(_unsure(tensor, how.every_byte))]

    def nbytes(pair: _Pair) -> int:
        return sum(tensor.nbytes for tensor in pair.tensors)

    if any(tensor.has_copies for pair in made for tensor in pair.tensors):
        begin_stage(how.progress, "comparing copies")
    unequal = in_ranks(lambda pair: _copies_differ(pair, how), made, how.threads, nbytes, reads=copies)
    for two, odd in zip(made, unequal, strict=True):
        _settle_copies(two, odd)
    regions = [region for two in made for region in _regions(two, how.every_byte)]
    begin_stage(how.progress, "", sum(map(_region_nbytes, regions)))

    def reads(region: _Region) -> list[Part]:
        return parts_of_all((*region.a, *region.b))

    results = in_ranks(lambda one: _measured(one, how), regions, how.threads, lambda one: one.box.numel, reads=reads)
    for region, result in zip(regions, results, strict=True):
        found = region.pair.found
        if isinstance(result, str):
            found.problem = found.problem or result
        else:
            found.measures = found.measures or Measures()
            found.measures.add(result)
            found.nbytes += _region_nbytes(region)
            found.damaged |= region.stated_alike and result.differing > 0
    return [pair.found for pair in made]


def _region_nbytes(region: _Region) -> int:
    """Bytes of a region on both sides."""
    return region.box.numel * sum(ITEMSIZE[tensor.dtype] for tensor in region.pair.tensors)


def _copies_differ(pair: _Pair, how: Reading) -> list[bool] | str:
    try:
        return [copies_differ(tensor, how.files, how.every_byte) for tensor in pair.tensors]
    except CkptoolsError as error:
        return str(error)


def _settle_copies(pair: _Pair, odd: list[bool] | str) -> None:
    """Keep one copy of each region: any if all are equal; otherwise compare rank by rank."""
    if isinstance(odd, str):
        pair.found.problem = odd
        return
    if not any(odd):
        pair.parts = [(once(pair.tensors[0]), once(pair.tensors[1]))]
        return
    ranks = [_holders(tensor) for tensor in pair.tensors]
    if ranks[0] and ranks[0] == ranks[1]:
        pair.found.by_rank = True
        pair.parts = [(_of_rank(pair.tensors[0], r), _of_rank(pair.tensors[1], r)) for r in ranks[0]]
        return
    where = " and ".join(side for side, one in zip("AB", odd, strict=True) if one)
    pair.found.problem = f"{where}: {OWN_COPIES}"


def _holders(tensor: Tensor) -> list[int]:
    """Ranks that each hold the whole tensor; none if some hold a part or a shard's rank is unknown."""
    each = all(s.rank is not None and s.box.sizes == tensor.shape for s in tensor.found)
    return sorted({s.rank for s in tensor.found if s.rank is not None}) if each else []


def _of_rank(tensor: Tensor, rank: int | None) -> Tensor:
    return replace(tensor, shards=tuple(s for s in tensor.found if s.rank == rank))


def copies_differ(tensor: Tensor, files: OpenFiles, every_byte: bool = False) -> bool:
    """Whether ranks have different bytes for a region; equal stated checksums suffice unless `every_byte`."""
    return bool(differing_boxes(_unsure(tensor, every_byte), files))


def _unsure(tensor: Tensor, every_byte: bool) -> list[Shard]:
    """Shards of regions whose stated checksums do not prove the copies equal."""
    groups = grouped(tensor.found if tensor.has_copies else (), lambda shard: shard.box)
    return [s for g in groups.values() if every_byte or not all(_stated_alike(g[0], s) for s in g) for s in g]


def _stated_alike(a: Shard, b: Shard) -> bool:
    """Whether two shards are the same byte range of zip entries with equal length and stated CRC-32."""
    return a.source is not None and b.source is not None and bool(a.source.crc) and _part(a.source) == _part(b.source)


def _part(source: Source) -> tuple[object, ...]:
    """Identify the bytes of a shard by the CRC-32 of their zip entry and their place in it."""
    start, length = source.record_span
    return source.crc, length, source.offset - start, source.dtype, source.shape, source.strides


def _regions(pair: _Pair, every_byte: bool) -> Iterator[_Region]:
    """Yield the regions of a pair to read, and count the skipped elements."""
    for a, b in pair.parts:
        left, right = ({s.box: s for s in tensor.shards if s.box.numel} for tensor in (a, b))
        if left.keys() != right.keys():
            for box in bands_of(Box.whole(a.shape), REGION):
                yield _Region(pair, box, _meeting(a, box), _meeting(b, box), False)
            continue
        for box, shard in left.items():
            alike = _stated_alike(shard, right[box])
            if alike and not every_byte:
                pair.found.skipped += box.numel
                pair.found.nbytes_skipped += 2 * box.numel * ITEMSIZE[a.dtype]
            else:
                yield from (_Region(pair, part, (shard,), (right[box],), alike) for part in bands_of(box, REGION))


def _meeting(tensor: Tensor, box: Box) -> list[Shard]:
    return [s for s in tensor.shards if s.box.intersect(box) is not None]


def _measured(region: _Region, how: Reading) -> Measures | str:
    from ckptools.diff.arrays import Comparing
    from ckptools.tensor_io.elements import side_by_side

    dtypes = [tensor.dtype for tensor in region.pair.tensors]
    comparing = Comparing(dtypes, region.box, how.tolerance)
    sides = list(zip(dtypes, (region.a, region.b), strict=True))
    try:
        for start, (a, b) in side_by_side(region.box, sides, how.files):
            comparing.add(a, b, start)
            how.progress(a.nbytes + b.nbytes, region.pair.name)
    except CkptoolsError as error:
        return str(error)
    return comparing.found


# -- compare an output of `consolidate` with its source: does every element come from the source? ----------------------
# The source's tensors get the names and shapes of the output (`keys/pairing`) and are converted to its dtypes; then
# every byte is compared. So correct renames, fused projections, cut vocabularies and casts are not differences, and
# wrong ones are.


def is_output_of(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether A has one model, and states that it is the whole model of B that is looked at."""
    said, models = a.provenance, chosen_models(b)
    if said is None or said.filled or said.more_filled or said.sources[0].name != b.name or len(models) != 1:
        return False
    part = f"model {models[0].name}" if len(sections_of_kind(b, "model")) > 1 else "model"
    return said.part == part and len(sections_of_kind(a, "model")) == 1


def difference_of_output(a: Checkpoint, b: Checkpoint, sides: tuple[Side, Side], reading: Reading) -> Difference | str:
    """Compare an output with its source; return the reason if that is impossible.

    Raises:
        ReadError: a file of B cannot be read.
    """
    if verdict_of(a).whole is False or verdict_of(b).whole is False:
        return "one of the two is not whole"
    found = _paired(a, b, reading)
    if isinstance(found, str):
        return found
    mine = {str(n): t for n, t in sections_of_kind(a, "model")[0].value.items() if isinstance(t, Tensor)}
    names = list(found.tensors)
    nbytes = sum(mine[name].nbytes + found.tensors[name].nbytes for name in names)
    begin_stage(reading.progress, "", nbytes)
    rows = in_ranks(
        partial(_row, mine, found, reading), names, reading.threads, lambda name: found.tensors[name].nbytes
    )
    different = [row.name for row in rows if row.verdict != "same"]
    detail = "every element is B's" if not different else f"{few(different)}"
    verdict: Verdict = "same" if not different else "differs"
    subject = SubjectRow("weights", verdict, len(rows) - len(different), len(different), 0, detail)
    proof = found.proof({name: tensor.dtype for name, tensor in mine.items()})
    notes = [rule.line for rule in found.rules] + [cut.line for cut in found.cut]
    model = chosen_models(b)[0]
    others = [section.name for section in sections_of(b) if section.path != model.path and section.name]
    notes += [f"only in B, of which A is no output: {few(others)}"] if others else []
    notes += [f"only in B: {few(list(found.left))}: {plural(len(found.left), 'tensor')}"] if found.left else []
    return Difference(
        *sides, not different, True, None, None, Rows([subject]), Rows(rows), Rows([]),
        tuple(notes), nbytes, proof=proof,
    )  # fmt: skip


def _paired(a: Checkpoint, b: Checkpoint, reading: Reading) -> Pairing | str:
    model = chosen_models(b)[0].value
    state = {str(name): once(value) for name, value in model.items() if isinstance(value, Tensor)}
    unread = next((name for name, tensor in state.items() if tensor.note), None)
    if unread is not None:
        return f"{unread}: {state[unread].note}"
    for name, value in model.items():
        if isinstance(value, Tensor) and value.has_copies and differing_boxes(value.found, reading.files):
            return f"{name}: B: {OWN_COPIES}"
    original = original_of(a) or Original(a.path, saved_shapes(a), {}, {}, {})
    why = ""
    for assume in (False, True):  # values show whether an assumed rule was right
        try:
            return pair(state, original, arguments(b.tree), assume, b.path, reading.files)
        except RefusedError as error:
            why = why or error.reason
    return why


def _row(mine: dict[str, Tensor], found: Pairing, reading: Reading, name: str) -> TensorDifference:
    """Compare one tensor of the output with the tensor made from the source, in the output's dtype."""
    one, other = once(mine[name]), found.tensors[name]
    row = TensorDifference(
        name, "weights", "same", "", ", ".join(found.sources[name]), one.shape, other.shape, one.dtype, other.dtype
    )
    try:
        at = _first_difference(
            tensor_bytes(one, one.dtype, reading.files), tensor_bytes(other, one.dtype, reading.files)
        )
    except CkptoolsError as error:
        return row._replace(verdict="cannot be compared", detail=str(error))
    reading.progress(one.nbytes + other.nbytes, name)
    if at is None:
        return row._replace(compared=one.numel, differing=0)
    element = at // ITEMSIZE[one.dtype]
    index = tuple(element // s % n for s, n in zip(contiguous_strides(one.shape), one.shape, strict=True))
    return row._replace(verdict="differs", first=index, detail="B has other values, whatever was renamed or converted")


def _first_difference(one: Iterable[bytes | memoryview], other: Iterable[bytes | memoryview]) -> int | None:
    """Offset of the first byte in which two streams differ; None if they are equal."""
    left, right = map(iter, (one, other))
    here = there = memoryview(b"")
    at = 0
    while True:
        here, there = here or memoryview(next(left, b"")), there or memoryview(next(right, b""))
        count = min(len(here), len(there))
        if not count:
            return at if here or there else None
        same = common_prefix(here, there)
        if same < count:
            return at + same
        at, here, there = at + count, here[count:], there[count:]


# -- compare tensors: names, shapes, dtypes, and on request values, by SHA-256 if a side is a digest file


def structure_row(a: SideTensor | None, b: SideTensor | None) -> TensorDifference:
    """Compare the name, shape and dtype of a tensor, without its values; one side may lack it."""
    tensor = a or b
    assert tensor is not None
    row = TensorDifference(
        tensor.name, tensor.subject, "not compared", "", b.name if b else None,
        a.shape if a else None, b.shape if b else None, a.dtype if a else None, b.dtype if b else None,
        a.layout if a else None, b.layout if b else None,
    )  # fmt: skip
    if a is None or b is None:
        return row._replace(verdict="only in A" if b is None else "only in B")
    verdict, detail = _structure(a, b)
    return row._replace(verdict=verdict, detail=detail)


def _structure(a: SideTensor, b: SideTensor) -> tuple[Verdict, str]:
    if a.shape != b.shape:
        return "differs", f"shape {shape(a.shape)} → {shape(b.shape)}"
    problems = [f"{side}: {tensor.problem}" for side, tensor in (("A", a), ("B", b)) if tensor.problem]
    if problems:
        return "cannot be compared", "; ".join(problems)
    if a.dtype != b.dtype:
        return "differs", "; ".join([f"{short(a.dtype)} → {short(b.dtype)}", *_codes(a, b)])
    if a.traits != b.traits:
        return "differs", traits_words(a, b)
    return ("cannot be compared", numbered()) if a.number or b.number else ("not compared", "")


def _codes(a: SideTensor, b: SideTensor) -> list[str]:
    """Describe quantization codes; their differences say nothing about the weights: `A: codes of fp8, block scales`."""
    # `bool(tensor)` raises, so compare with None.
    tensors = [(side, one.tensor) for side, one in (("A", a), ("B", b)) if one.tensor is not None]
    return [f"{side}: {t.coded.words}" for side, t in tensors if t.are_codes and t.coded is not None]


def traits_words(a: SideTensor, b: SideTensor) -> str:
    """Describe how class and flags of two tensors differ: `Parameter, requires_grad → plain`."""
    return f"{a.traits or 'plain'} → {b.traits or 'plain'}"


def value_rows(
    pairs: Sequence[tuple[SideTensor | None, SideTensor | None]], how: Reading
) -> tuple[list[TensorDifference], int, int]:
    """Make a row for each pair, comparing values if both sides have them; return also bytes read and bytes skipped."""
    rows = [structure_row(a, b) for a, b in pairs]
    both = {n: (a, b) for n, (a, b) in enumerate(pairs) if a and b and a.shape == b.shape}
    both = {n: (a, b) for n, (a, b) in both.items() if not (a.problem or b.problem)}
    both = {n: (a, b) for n, (a, b) in both.items() if a.dtype == b.dtype or not _codes(a, b)}
    direct = {
        n: (a.name, a.tensor, b.tensor) for n, (a, b) in both.items() if a.tensor is not None and b.tensor is not None
    }
    measured = dict(zip(direct, compare_tensors(direct.values(), how), strict=True))
    hashed = [one for n, pair in both.items() if n not in direct for one in pair]
    digests = iter(with_digests(hashed, how))
    for n, (a, b) in both.items():
        row = with_measures(rows[n], measured[n], how) if n in measured else _by_digest(rows[n], *islice(digests, 2))
        rows[n] = _sure(row, a, b)
    read = sum(found.nbytes for found in measured.values()) + sum(map(_nbytes, hashed))
    return rows, read, sum(found.nbytes_skipped for found in measured.values())


def _sure(row: TensorDifference, a: SideTensor, b: SideTensor) -> TensorDifference:
    """Mark a row as not comparable if only the parameter's number matches; mention an assumed name."""
    if a.traits != b.traits:
        words = traits_words(a, b)
        detail = row.detail if words in row.detail else "; ".join(filter(None, (row.detail, words)))
        row = row._replace(verdict=row.verdict if row.verdict in DIFFERENT else "differs", detail=detail)
    if a.number or b.number:
        alike = "values are " + ("equal" if row.verdict in ("same", "same checksum") else "not equal")
        return row._replace(verdict="cannot be compared", detail=f"{numbered()}; {alike}")
    if row.verdict == "differs" and (codes := _codes(a, b)):  # distances of codes say nothing about weights
        row = row._replace(change=None, max=None, cosine=None, detail="; ".join(filter(None, [row.detail, *codes])))
    if a.assumed or b.assumed:
        return row._replace(detail="; ".join(filter(None, (row.detail, "name assumed"))))
    return row


def with_measures(row: TensorDifference, found: Measured, how: Reading) -> TensorDifference:
    """Add the measured values to the row of two tensors of one shape."""
    if found.problem:
        return row._replace(verdict="cannot be compared", detail=found.problem)
    same_dtype = row.dtype_a == row.dtype_b
    m = found.measures
    if m is not None:
        row = row._replace(nonfinite_a=m.nonfinite_a, nonfinite_b=m.nonfinite_b)
    if m is None or not m.differing:
        verdict: Verdict = "same checksum" if found.skipped else "same"
        if not same_dtype:
            verdict = "within tolerance" if how.tolerance else "differs"
        words = _words(row, found, same_dtype, "every value is equal")
        return row._replace(verdict=verdict, detail=words, compared=m.compared if m else 0, differing=0 if m else None)
    within = how.tolerance is not None and not m.outside
    return row._replace(
        verdict="within tolerance" if within else "differs",
        detail=_words(row, found, same_dtype),
        compared=m.compared,
        differing=m.differing,
        change=m.change,
        max=m.max,
        cosine=m.cosine,
        first=m.first,
        value_a=m.values[0] if m.values else None,
        value_b=m.values[1] if m.values else None,
    )


def _words(row: TensorDifference, found: Measured, same_dtype: bool, equal: str = "") -> str:
    m = found.measures
    words = [] if same_dtype else [f"{row.detail}, compared by value in float64", equal]
    if found.skipped and m is not None:
        words.append(f"{plural(found.skipped, 'element')} with the same CRC-32 not read, measures are of the rest")
    elif found.skipped:
        words.append("same CRC-32 in both, not read")
    if found.damaged:
        words.append("both state the same CRC-32: one of them is damaged (verify --deep)")
    if found.by_rank:
        words.append("each rank has its own, compared rank by rank")
    if m is not None and m.nonfinite:
        words.append(f"{plural(m.nonfinite, 'element')} {NOT_FINITE}")
    if m is not None and m.differing and not m.max and not m.outside and not m.nonfinite:
        words.append("equal in value, not in bits")
    return "; ".join(filter(None, words))


def with_digests(entries: Sequence[SideTensor], how: Reading) -> list[SideTensor]:
    """Add the SHA-256 of the values in row-major order to each tensor, or the problem why it is missing."""

    def reads(entry: SideTensor) -> list[Part]:
        """Byte ranges to read in order to compare the copies of a tensor and to hash one of each."""
        if entry.tensor is None:
            return []
        return [*copies_among(_unsure(entry.tensor, every_byte=False)), *parts_of_all(once(entry.tensor).shards)]

    begin_stage(how.progress, "", sum(map(_nbytes, entries)))
    found = in_ranks(lambda entry: _sha256_of(entry, how), entries, how.threads, _nbytes, reads=reads)
    return [one._replace(sha256=sha256, problem=why) for one, (sha256, why) in zip(entries, found, strict=True)]


def _nbytes(entry: SideTensor) -> int:
    """Number of bytes to read for the digest; 0 if the digest is known."""
    return 0 if entry.tensor is None else entry.tensor.nbytes


def _sha256_of(entry: SideTensor, how: Reading) -> tuple[str, str]:
    """Return the SHA-256 of a tensor's values, or "" and the problem why it is missing."""
    if entry.tensor is None or entry.problem:
        return entry.sha256, entry.problem
    try:
        if copies_differ(entry.tensor, how.files):
            return "", OWN_COPIES
        digest = tensor_digest(once(entry.tensor), how.files)
    except CkptoolsError as error:
        return "", str(error)
    how.progress(entry.tensor.nbytes, entry.name)
    return digest, ""


ANOTHER_DIGEST = "another SHA-256"
"""Detail of a tensor whose digests differ."""


def _by_digest(row: TensorDifference, a: SideTensor, b: SideTensor) -> TensorDifference:
    if row.verdict in DIFFERENT and row.dtype_a != row.dtype_b:
        return row._replace(detail=f"{row.detail}; digests say nothing about values in another dtype")
    whys = [f"{side}: {tensor.problem}" for side, tensor in (("A", a), ("B", b)) if tensor.problem]
    if whys:
        return row._replace(verdict="cannot be compared", detail="; ".join(whys))
    same = a.sha256 == b.sha256
    return row._replace(verdict="same" if same else "differs", detail="SHA-256" if same else ANOTHER_DIGEST)
