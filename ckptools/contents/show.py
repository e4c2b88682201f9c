"""`show`: print values in full and by rank, and tensors with their shards, statistics or a slice of elements."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptools.contents.record import KeyRow, PartRow, RankValue, ShardRow, Shown, ShownKey
from ckptools.contents.tree import described, full_value, is_short, key_rows, with_inside
from ckptools.dtypes import ITEMSIZE, short
from ckptools.errors import NotWholeError, ReadError, UsageError, original_of
from ckptools.files.opening import OpenFiles
from ckptools.formats import options
from ckptools.keys.entries import (
    KINDS,
    Entry,
    asks_for_private,
    entries_of,
    is_glob,
    is_private,
    leaves_of,
    matching,
    pattern,
)
from ckptools.keys.random_states import stream_rows
from ckptools.keys.sharding import placement
from ckptools.keys.value_digests import content_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import Cover, TangledLayoutError, cover
from ckptools.model.records import Rows, grouped
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard, Source, in_rank_order
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Absent
from ckptools.option import spelled
from ckptools.tensor_io.dcp_items import ItemLocator, with_items_read, with_source
from ckptools.tensor_io.slicing import slicing_of
from ckptools.text import KeyPath, few, first_few, is_within, named_ranks, no_such_key, plural, printable, shape, size
from ckptools.training_state.sections import sections_of

if TYPE_CHECKING:
    from types import EllipsisType


# -- elements of a slice of a tensor; only the bytes of the slice are read ---------------------------------------------


MAX_ELEMENTS = 10_000
"""At most this many elements are shown."""

UNDECODED = ("complex32", "float4_e2m1fn_x2")

INDEX = re.compile(r"\s*(-?\d{1,18})?\s*(?:(:)\s*(-?\d{1,18})?\s*)?")


def index_of(text: str) -> tuple[int | slice | EllipsisType, ...]:
    """Parse an index such as `0:4,:8`: ints and slices with step 1; negative ints count from the end; also `...`.

    Raises:
        UsageError: the text is not an index.
    """
    found: list[int | slice | EllipsisType] = []
    for part in text.strip().strip("[]").split(","):
        if part.strip() == "...":
            found.append(...)
            continue
        index = INDEX.fullmatch(part)
        if index is None or not (index[1] or index[2]):
            raise UsageError(
                None, f"{spelled('values')} {text!r}: {part.strip()!r} is no index; write slices such as '0:4,:8'"
            )
        start, stop = (None if word is None else int(word) for word in (index[1], index[3]))
        found.append(slice(start, stop) if index[2] else int(index[1]))
    return tuple(found)


def elements(tensor: Tensor, text: str) -> Any:
    """Read the elements of a slice as nested lists of numbers and booleans; complex numbers as text.

    Raises:
        NotWholeError: no file contains some of the elements.
        ReadError: a file cannot be read, or the tensor cannot be joined.
        UsageError: the text is not a slice of this tensor, has too many elements, or the dtype cannot be decoded.
    """
    import numpy as np

    from ckptools.tensor_io.numbers import decoded, raw_dtype
    from ckptools.tensor_io.read import read_box

    if tensor.dtype in UNDECODED:
        raise UsageError(None, f"{short(tensor.dtype)} is not decoded; load it with torch")
    try:
        cut = slicing_of(tensor.shape, index_of(text))
    except IndexError as error:
        raise UsageError(None, f"{spelled('values')} {text!r}: {error}") from error
    box = cut.box
    if box.numel > MAX_ELEMENTS:
        raise UsageError(None, f"{spelled('values')} {text!r}: {box.numel} elements; at most {MAX_ELEMENTS} are shown")
    out = np.empty(box.sizes, raw_dtype(tensor.dtype))
    placed = replace(tensor, shards=tuple(_meeting(tensor, box)))
    _check_all_is_here(placed, box, text)
    for row in _rows_of_box(box):
        place = zip(row.seen_from(box).offsets, row.sizes, strict=True)
        out[tuple(slice(o, o + n) for o, n in place)] = read_box(placed, row)
    values = decoded(out, tensor.dtype).reshape(cut.kept)
    return (values.astype(str) if values.dtype.kind == "c" else values).tolist()


def _meeting(tensor: Tensor, box: Box) -> Iterator[Shard]:
    """Yield the shards that overlap a region, one copy of each, and find their bytes in the files."""
    known: dict[Box, Shard] = {}
    for shard in tensor.shards:
        if shard.is_here and (not box.sizes or shard.box.intersect(box)):
            known.setdefault(shard.box, shard)
    yield from map(with_source, known.values())


def _check_all_is_here(tensor: Tensor, box: Box, text: str) -> None:
    if tensor.note or not box.sizes:
        return
    parts = (shard.box.intersect(box) for shard in tensor.shards)
    found = cover(box.sizes, [common.seen_from(box) for common in parts if common is not None])
    if found.missing:
        gaps = [Box(tuple(a + b for a, b in zip(g.offsets, box.offsets, strict=True)), g.sizes) for g in found.gaps]
        where = few(list(map(str, gaps)), 3)
        reason = f"no file here holds {found.missing} of the {box.numel} elements of [{text}]: {where}"
        raise NotWholeError("tensor", reason)


def _rows_of_box(box: Box) -> Iterator[Box]:
    """Split a region into rows, so that bytes between two rows in the file are not read."""
    if not box.numel:
        return
    *outer, last = zip(box.offsets, box.sizes, strict=True) if box.sizes else [(0, 1)]
    for at in product(*(range(start, start + length) for start, length in outer)):
        yield Box((*at, last[0]), (*(1 for _ in at), last[1])) if box.sizes else box


# -- the shards of a tensor: where each lies in a file, and the layout that they make ----------------------------------


MAX_LISTED = 8

MAX_UNLISTED = 1 << 16
"""At most this many ranks are checked; a file may state any world size."""


def shard_rows(tensor: Tensor) -> tuple[ShardRow, ...]:
    """Make a row for each shard of a tensor, in rank order; reads headers of DCP items, but no values."""
    return tuple(_shard_row(shard, tensor.dtype) for shard in in_rank_order(tensor.shards))


def _shard_row(shard: Shard, dtype: str) -> ShardRow:
    try:
        return stated_row(with_source(shard), dtype)
    except ReadError as error:
        file, nbytes = str(shard.item.path) if shard.item else "", shard.box.numel * ITEMSIZE[dtype]
        return ShardRow(shard.rank, *shard.box, "unreadable", file, "", None, nbytes, "", error.reason)


def stated_row(shard: Shard, dtype: str = "") -> ShardRow:
    """Make the row of a shard from the structure alone, without reading a file.

    Bytes are counted by the given dtype, or by the dtype in the file; 0 if both are unknown.
    """
    file, source, parts = shard.file, next(iter(shard.sources), None), tuple(_parts(shard))
    dtype = dtype or (file.dtype if file else "")
    nbytes = sum(part.bytes for part in parts) if parts else shard.box.numel * ITEMSIZE[dtype] if dtype else 0
    if file is None:
        return ShardRow(shard.rank, *shard.box, "missing", "", "", None, nbytes, "", "no file here holds it")
    crc, record = (_crc(source), source.record) if source else ("", "")
    stored_as = shard.encoded.name if shard.encoded is not None else ""
    original = original_of(file.path)
    offset = file.offset if original is file.path else None  # an unpacked item has no offset in its file
    row = ShardRow(shard.rank, *shard.box, "here", str(original), record, offset, nbytes, crc, "")
    return row._replace(stored_as=stored_as, parts=parts)


def _parts(shard: Shard) -> Iterator[PartRow]:
    for name, source in shard.encoded.parts if shard.encoded else ():
        per, nbytes = shard.encoded.per(name) if shard.encoded else "", prod(source.shape) * ITEMSIZE[source.dtype]
        yield PartRow(name, source.dtype, source.shape, per, source.record, source.offset, nbytes, _crc(source))


def _crc(source: Source) -> str:
    return f"{source.crc:08x}" if source.crc else ""


def holes(tensor: Tensor, rows: Iterable[ShardRow]) -> tuple[tuple[str, ...], int]:
    """Find the regions of a tensor that no readable shard covers, and count their elements; none if unknown."""
    here = dict.fromkeys(Box(row.offsets, row.sizes) for row in rows if row.status == "here")
    found = _cover(tensor, here) if tensor.numel else None
    return (tuple(map(str, found.gaps)), found.missing) if found else ((), 0)


def _cover(tensor: Tensor, here: Iterable[Box]) -> Cover | None:
    """Find gaps and overlaps between the given regions.

    None for a tensor saved without values, or with shards of unknown position (its note says why).
    """
    if tensor.note or tensor.kind in ("meta", "sparse", "quantized", "unreadable"):
        return None
    try:
        return cover(tensor.shape, here)
    except TangledLayoutError:
        return None


# -- layout ------------------------------------------------------------------------------------------------------------


class DrawnShard(NamedTuple):
    """A shard to draw; `here` if a file that was read contains it, else `note` says why not."""

    box: Box
    rank: int | None
    here: bool
    note: str


class DrawnPiece(NamedTuple):
    """A region of a tensor, and the shards that copy it, in rank order."""

    box: Box
    copies: Sequence[DrawnShard]


class TensorLayout(NamedTuple):
    """The layout of a tensor, to draw: its shards, its distinct nonempty regions, and gaps and overlaps if known."""

    tensor: Tensor
    shards: tuple[DrawnShard, ...]
    pieces: tuple[DrawnPiece, ...]
    cover: Cover | None

    @property
    def cut(self) -> Ints:
        """The dimensions in which some region is smaller than the tensor."""
        return tuple(d for d, n in enumerate(self.tensor.shape) if any(p.box.sizes[d] != n for p in self.pieces))

    @property
    def in_fragments(self) -> bool:
        """Whether a rank has several regions, as happens with flattened parameters."""
        ranks = [one.rank for one in self.shards if one.box.numel and one.rank is not None]
        return len(set(ranks)) < len(ranks)

    @property
    def copies(self) -> int:
        """The largest number of copies of one region."""
        return max((len(piece.copies) for piece in self.pieces), default=0)


def layout_of(tensor: Tensor, rows: Iterable[ShardRow] | None = None) -> TensorLayout:
    """Find which ranks hold which region of a tensor: from `rows` if given, else as the tensor itself states."""
    if rows is None:
        shards = tuple(DrawnShard(s.box, s.rank, s.is_here, "in no file that was read") for s in tensor.shards)
    else:
        shards = tuple(DrawnShard(Box(r.offsets, r.sizes), r.rank, r.status == "here", r.note) for r in rows)
    within = [one for one in shards if one.box.inside(tensor.shape)]
    here = {one.box for one in shards if one.here and one.box.numel}
    found = grouped((one for one in within if one.box.numel), lambda one: one.box)
    for copies in found.values():
        copies.sort(key=lambda one: -1 if one.rank is None else one.rank)
    pieces = tuple(DrawnPiece(box, found[box]) for box in sorted(found))
    return TensorLayout(tensor, shards, pieces, _cover(tensor, here))


def layout_words(layout: TensorLayout) -> Iterator[str]:
    """Describe shape and layout, number and sizes of pieces, copies, ranks without elements, and gaps."""
    tensor, pieces = layout.tensor, layout.pieces
    yield f"{short(tensor.dtype)} {shape(tensor.shape)}, {size(tensor.nbytes)}, {placement(tensor)}"
    if tensor.note:
        yield f"cannot be put together: {printable(tensor.note)}"
    if pieces:
        sizes = dict.fromkeys(shape(piece.box.sizes) for piece in pieces)
        yield f"{plural(len(pieces), 'piece')} of {first_few(list(sizes), 4)}{_copied(pieces)}"
    for piece in pieces[:MAX_LISTED]:
        yield f"  {piece.box or 'the whole'}  {_named_ranks([one.rank for one in piece.copies])}"
    if len(pieces) > MAX_LISTED:
        yield f"  {len(pieces) - MAX_LISTED} more"
    empty = [one.rank for one in layout.shards if not one.box.numel and one.rank is not None]
    if empty and tensor.numel:
        yield f"no elements: {_named_ranks(empty)}"
    unlisted = set(range(min(tensor.world_size or 0, MAX_UNLISTED + 1))) - {one.rank for one in layout.shards}
    if unlisted and len(unlisted) <= MAX_UNLISTED and all(one.rank is not None for one in layout.shards):
        yield f"no shard is listed of {_named_ranks(sorted(unlisted))}"
    absent = [one for one in layout.shards if one.box.numel and not one.here]
    if absent:
        yield f"not here: {plural(len(absent), 'piece')} of {_named_ranks([one.rank for one in absent])}"
    found = layout.cover
    if found is None or not layout.tensor.numel:
        return
    if found.missing:
        where = "all of it" if found.missing == layout.tensor.numel else first_few(found.gaps, 4)
        yield f"HOLES: {found.missing} of {layout.tensor.numel} elements are in no file that was read: {where}"
    if found.overlaps:
        a, b = found.overlaps[0]
        yield f"OVERLAP: {a} and {b} share elements"
    if found.outside:
        yield f"OUTSIDE: {found.outside[0]} does not lie in the tensor"
    if found.exact:
        yield "together they hold every element once" if len(layout.pieces) > 1 else "it holds every element"


def _copied(pieces: Sequence[DrawnPiece]) -> str:
    counts = {len(piece.copies) for piece in pieces}
    if counts == {1}:
        return ""
    return f", each on {counts.pop()} ranks" if len(counts) == 1 else f", on {min(counts)} to {max(counts)} ranks each"


def _named_ranks(ranks: Sequence[int | None]) -> str:
    known = {rank for rank in ranks if rank is not None}
    return named_ranks(known) if known else "an unknown rank"


# -- the record of `show` ----------------------------------------------------------------------------------------------


SMALL = 1 << 20
"""Statistics are computed for tensors of at most this many elements."""

MANY = 16
"""With more tensors than this, no statistics are computed."""

FIGURES = ("rms", "l2", "min", "max", "mean", "std", "zeros", "nan", "inf", "elements")

NOTHING = Absent()


def show(
    ck: Checkpoint,
    keys: Sequence[str],
    values: str | None = None,
    private: bool = False,
    all_ranks: bool = False,
    with_all_ranks: Callable[[], Checkpoint] | None = None,
) -> Shown:
    """Show some keys; a tensor's row reports values that cannot be read.

    Args:
        ck: the checkpoint; the structure of one rank may be enough.
        keys: names, beginnings of names, kinds of sections, or globs.
        values: a slice whose elements are read from each tensor, such as `0:4,:8`.
        private: show also values whose names begin with `_`.
        all_ranks: read the structure of all ranks, whatever the keys.
        with_all_ranks: opens the checkpoint with the structure of all ranks; None if `ck` has it. By default it runs
            for tensors, random states and other values that may differ between ranks; for values that all ranks share
            (hyperparameters, schedulers) only if there are at most `options.MAX_RANKS` ranks.

    Raises:
        UsageError: a key does not exist, or `values` is not a slice of its tensor.
    """
    if values is not None and not isinstance(values, str):  # a user may pass values=True, which `verify` accepts
        raise UsageError(None, f"{spelled('values')} {values!r}: expected a slice such as '0:4,:8'")
    if values is not None:
        index_of(values)  # refuses a mistake before anything is read
    if with_all_ranks is not None and (all_ranks or _needs_all_ranks(ck, keys)):
        ck = with_all_ranks()
    chosen = _chosen(ck, keys)
    asked = private or asks_for_private(keys)
    shown = [entry for entry in chosen if asked or not is_private(entry)]
    streams = stream_rows(ck, {entry.section for entry in shown if entry.kind == "rng"})
    gathered = all(entry.kind == "rng" for entry in shown)
    known = {rank for row in streams for rank in row.fingerprints} if gathered else set()
    return Shown(
        path=ck.path,
        name=ck.name,
        keys=tuple(keys),
        private=len(chosen) - len(shown),
        not_read=len(_ranks(ck, "seen", "listed")),
        lost=sum(str(rank) not in known for rank in _ranks(ck, "missing", "cut", "bad")),
        streams=streams,
        rows=_rows(ck, shown, values),
    )


def stated(ck: Checkpoint, keys: Iterable[tuple[KeyRow, Any]]) -> Shown:
    """Make rows of keys from the structure alone, opening no file.

    A shard may then lack its offset in the file, and holes are not reported.
    """
    rows = Rows(_as_stated(row, value) for row, value in keys)
    names = tuple(row.name for row in rows)
    return Shown(ck.path, ck.name, names, 0, len(_ranks(ck, "seen", "listed")), 0, Rows(), rows)


def _as_stated(row: KeyRow, value: Any) -> ShownKey:
    if not isinstance(value, Tensor):
        return ShownKey(*row)._replace(value=full_value(value))
    return ShownKey(*row, tuple(stated_row(shard, value.dtype) for shard in in_rank_order(value.shards)))


def _rows(ck: Checkpoint, entries: Sequence[Entry], values: str | None) -> Rows[ShownKey]:
    tensors = sum(isinstance(entry.value, Tensor) for entry in entries)
    rows: list[ShownKey] = []
    locator = ItemLocator()
    with OpenFiles() as files:
        unequal = UnequalValues(ck, files)
        entries = entries if values is not None else [_as_weight(ck, entry, files) for entry in entries]
        found = list(with_inside(entries, ck.path))
        for row, (entry, is_inside) in zip(key_rows(ck, (entry for entry, _ in found)), found, strict=True):
            value = with_items_read(entry.value, locator, files) if isinstance(entry.value, Tensor) else entry.value
            shown = _shown(row, value, values, tensors)
            rows.append(shown._replace(shards=()) if is_inside else shown._replace(ranks=unequal.at(entry)))
    return Rows(rows)


def _as_weight(ck: Checkpoint, entry: Entry, files: OpenFiles) -> Entry:
    """Replace codes by the weight that they encode, if ckptools can decode it."""
    if not isinstance(entry.value, Tensor) or not entry.value.are_codes:
        return entry
    from ckptools.training_state.packed_values import weight_at  # imports numpy

    weight = weight_at(ck, entry.path, files)
    return entry if weight is None else entry._replace(value=weight)


def _chosen(ck: Checkpoint, keys: Iterable[str]) -> list[Entry]:
    names = {entry.name for key in keys for entry in entries_at(ck, key)}
    return [entry for entry in entries_of(ck) if entry.name in names]


def _needs_all_ranks(ck: Checkpoint, keys: Sequence[str]) -> bool:
    """Whether files of other ranks may add keys, shards or copies of a tensor, or other values."""
    try:
        entries = _chosen(ck, keys)
    except UsageError:
        return bool(_ranks(ck, "seen", "listed"))
    tensors = [entry.value for entry in entries if isinstance(entry.value, Tensor)]
    if any(entry.kind == "rng" for entry in entries) or not all(t.extents.are_items for t in tensors):
        return True
    if len(tensors) == len(entries):  # one file lists the shards of all ranks
        return False
    few = len({file.rank for file in ck.files}) <= options.MAX_RANKS
    return bool(_ranks(ck, "seen", "listed")) and (few or any(entry.kind == "other" for entry in entries))


def _ranks(ck: Checkpoint, *status: str) -> set[int]:
    """Ranks whose files have one of the statuses and were not read; none if the files read belong to no rank."""
    read = {file.rank for file in ck.files if file.status == "read" and file.rank is not None}
    found = {file.rank for file in ck.files if file.status in status and file.rank is not None}
    return found - read if read else set()


def _shown(row: KeyRow, value: Any, values: str | None, tensors: int) -> ShownKey:
    if not isinstance(value, Tensor):
        return ShownKey(*row)._replace(value=full_value(value))
    shards = shard_rows(value)
    gaps, missing = holes(value, shards)
    unreadable = dict.fromkeys(f"rank {s.rank}: {s.note}" for s in shards if s.status == "unreadable")
    shown = ShownKey(*row, shards, gaps, missing, problem="; ".join(unreadable))
    if values is not None:
        try:
            return shown._replace(slice=values, values=elements(value, values))
        except (NotWholeError, ReadError, UsageError) as error:
            # If the slice does not fit one of several tensors, that tensor's row reports it as a problem.
            if tensors == 1 and isinstance(error, UsageError):
                raise
            return shown._replace(slice=values, problem=error.reason)
    return _with_figures(shown, value) if tensors <= MANY else shown


def _with_figures(shown: ShownKey, tensor: Tensor) -> ShownKey:
    here = any(shard.status == "here" for shard in shown.shards)
    if shown.kind == "rng" or tensor.encoded_as or not 0 < tensor.numel <= SMALL or not here:
        return shown
    from ckptools.stats.figures import tensor_stats

    found = tensor_stats(tensor, shown.name)
    if not tensor.shape and found.elements and tensor.dtype not in UNDECODED:
        shown = shown._replace(value=elements(tensor, "..."))
    figures = {name: getattr(found, name) for name in FIGURES}
    return shown._replace(
        statistics=figures if found.elements else None,
        problem=shown.problem or ("" if shown.missing else found.problem),
    )


# -- find the entries of a KEY: a name, the beginning of names, a kind of section, or a glob ---------------------------


def entries_at(ck: Checkpoint, key: str) -> list[Entry]:
    """Find the entry with this name, and the entries below it.

    If there are none, the key may be a glob (which may match nothing in a checkpoint without keys), or begin with a
    kind of section: `optimizer.param_groups` finds `optimizers.AdamW.param_groups`, `model` the whole model.

    Raises:
        UsageError: no entry was found; the message suggests the nearest name.
    """
    entries = entries_of(ck)
    found = _beginning(entries, key) or (matching(entries, key) if is_glob(key) else []) or _of_kind(ck, key)
    if not found and (entries or not is_glob(key)):
        names = [*(entry.name for entry in entries), *(section.name for section in sections_of(ck))]
        raise UsageError(ck.path, f"{no_such_key(key, names)}; ckptools tree lists all")
    return found


def _beginning(entries: Sequence[Entry], key: str) -> list[Entry]:
    found = [entry for entry in entries if is_within(entry.name, key)]
    return found or [e for e in entries if any(is_within(name, key) for name in e.names)]


def _of_kind(ck: Checkpoint, key: str) -> list[Entry]:
    """Find the entries for a key that names a section or begins with a kind of section, as the lines of a tree do.

    Names of a model may themselves begin with the section's name: `model.model.norm.weight` is `model.norm.weight`.
    """
    kind, _, rest = key.partition(".")
    own = [entry for entry in entries_of(ck) if entry.section == key]
    if own or kind not in KINDS:
        return own
    inside = [entry for entry in entries_of(ck) if entry.kind == kind]
    if is_glob(rest):
        wanted = pattern((rest,))
        return [entry for entry in inside if wanted.fullmatch(entry.inside) or wanted.fullmatch(entry.name)]
    return [e for e in inside if not rest or is_within(e.inside, rest) or is_within(e.name, rest)]


# -- values that differ between ranks ----------------------------------------------------------------------------------


class UnequalValues:
    """Find the values of a checkpoint that differ between ranks."""

    def __init__(self, ck: Checkpoint, files: OpenFiles) -> None:
        self._files = files
        self._by_path = {**ck.unequal, **ck.per_rank}
        self._leaves: dict[KeyPath, Mapping[int, Mapping[KeyPath, Any]]] = {}

    def at(self, entry: Entry) -> tuple[RankValue, ...]:
        """Make a row for each distinct value, lowest rank first; none for tensors, or if no rank is known to differ."""
        above = next((entry.path[:n] for n in range(len(entry.path) + 1) if entry.path[:n] in self._by_path), None)
        if above is None or isinstance(entry.value, Tensor):
            return ()
        if above not in self._leaves:
            self._leaves[above] = {rank: dict(leaves_of(value)) for rank, value in self._by_path[above].items()}
        below = entry.path[len(above) :]
        values = {rank: leaves.get(below, NOTHING) for rank, leaves in self._leaves[above].items()}
        ranks: dict[Any, list[int]] = {}
        for rank in sorted(values):
            found = None if isinstance(values[rank], Absent) else content_of(values[rank], self._files)
            ranks.setdefault(found and (found.digest or found), []).append(rank)
        return tuple(_row(of, values[of[0]]) for of in ranks.values()) if len(ranks) > 1 else ()


def _row(ranks: Iterable[int], value: Any) -> RankValue:
    if isinstance(value, Absent):
        return RankValue(tuple(ranks), None, "nothing there")
    return RankValue(tuple(ranks), full_value(value), "" if is_short(value) else described(value))
