"""Find files that may be copies of each other: files with equal bytes but for different parts of the tensors.

Equal bytes prove no copy: ranks that begin from one seed, constant values and the moments of tied weights are equal
too. So this is a warning for every format; an error needs a file that states its rank, which the formats check
themselves. A file that was copied over another equals it to the last byte, so files whose sizes, beginnings or ends
differ are passed over; so are files that share only a few elements, or constant ones.

If the files state checksums, only records with equal checksums are compared. If not, the first bytes of some tensors
are compared, and only between files whose tensors have the same names and sizes.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, count, pairwise
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.opening import OpenFiles
from ckptools.model.extents import ExtentFile, ExtentLayout, Extents, read_paths
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints, is_contiguous
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor, TensorKind
from ckptools.text import KeyPath

Checksum = tuple[str, int, int]
"""`(dtype, CRC-32, bytes)`: the facts that a container states of a tensor."""

MIN_EQUAL = 16
"""With fewer equal elements than this, equality may be chance."""

END = 64 << 10
"""Bytes at both ends of two files that are compared: a zip archive has its directory at the end."""

MAX_READ = 64
"""At most this many records of a file have their first element read."""

FIRST_KINDS = 4
"""Kinds of records that suffice to show that most files are not copies."""

MANY, ONE_OF = 500, 16
"""If a file has more than `MANY` records, one in `ONE_OF` suffices to distinguish files."""

BLOCK = 1 << 20
"""Bytes per step of computing a checksum."""

ONES = {
    "float64": struct.pack("<d", 1),
    "float32": struct.pack("<f", 1),
    "float16": struct.pack("<e", 1),
    "bfloat16": struct.pack("<f", 1)[2:],
}
"""The bytes of the number one, by dtype."""


def stated_checksum(value: Any, whole: bool = False) -> Checksum | None:
    """The checksum of a tensor's zip entry; None where none is stated.

    Args:
        value: a tensor of one shard, or any other value.
        whole: ignore tensors that fill only a part of their zip entry.
    """
    source = value.shards[0].source if isinstance(value, Tensor) and len(value.shards) == 1 else None
    if source is None or not source.crc or (whole and value.nbytes != source.record_span[1]):
        return None
    return source.dtype, source.crc, value.nbytes


def perhaps_copied(copy: Path, other: Path, rank: int | None, sources: Iterable[Source] = ()) -> Iterator[Problem]:
    """Warn that a file may be a copy of another one; their tensors are known to be equal.

    Args:
        copy: the file.
        other: another file, with other parts of the tensors.
        rank: the rank in the first file's name.
        sources: the tensors with equal checksums, if the files were compared by checksums.
    """
    with OpenFiles() as files, suppress(ReadError):
        listed = list(sources)
        if _ends(copy, files) == _ends(other, files) and (not listed or _vary(listed, files)):
            folders = copy.name == other.name
            one, two = (f"{path.parent.name}/{path.name}" if folders else path.name for path in (copy, other))
            text = f"{one} equals {two} in size, at both ends and in its values, and is another part: one may be a copy"
            text += " of the other, or both had equal values to save (one seed, constant init)"
            yield Problem(Code.STRAY_FILE, text, rank, severity="warning", files=(one, two))


def stated_sources(values: Iterable[Any]) -> list[Source]:
    """The sources of all tensors with a stated checksum among some values."""
    shards = (shard for value in values if isinstance(value, Tensor) for shard in value.found)
    return [source for shard in shards for source in shard.sources if source.crc]


def _ends(path: Path, files: OpenFiles) -> tuple[int, bytes, bytes]:
    """The size of a file, its first bytes and its last bytes."""
    with files.open(path) as file:
        length = min(file.size, END)
        return file.size, file.read(0, length), file.read(file.size - length, length)


def _vary(sources: Iterable[Source], files: OpenFiles) -> bool:
    """Whether records with enough elements in all are not constant."""
    records = {source.record_span: source for source in sources if source.crc}
    largest = sorted(records.values(), key=lambda source: -source.record_span[1])[:MAX_READ]
    counts = (0 if repeats(one, files) else one.record_span[1] // ITEMSIZE[one.dtype] for one in largest)
    return any(varied >= MIN_EQUAL for varied in accumulate(counts))


def repeats(source: Source, files: OpenFiles) -> bool:
    """Whether a record repeats its first element throughout, judged by its checksum.

    Raises:
        ReadError: the first element cannot be read.
    """
    start, nbytes = source.record_span
    with files.open(source.path) as file:
        return _repeated(file.read(start, ITEMSIZE[source.dtype]), nbytes) == source.crc


def check_copies(tensors: Iterable[tuple[KeyPath, Tensor]]) -> Iterator[Problem]:
    """Warn of files with equal checksums for different boxes of tensors: one may be a copy of the other.

    Replicas, which have equal boxes, do not count.
    """
    stating = [(path, tensor) for path, tensor in tensors if tensor.sharded and tensor.extents.states_any_crc]
    doubtful = _perhaps_equal([tensor.extents for _, tensor in stating])
    if not doubtful:
        return
    places: dict[Path, dict[tuple[KeyPath, Box, str], Facts]] = {}
    ranks: dict[Path, int] = {}
    for path, tensor in stating:
        for shard, source in _stated(tensor.extents, doubtful):
            ranks[source.path] = shard.rank or 0
            places.setdefault(source.path, {})[path, shard.box, source.record] = _facts(source, tensor.kind)
    first: dict[object, Path] = {}
    for file, stated in places.items():
        names = {path for path, _, _ in stated}
        # Tied weights may have a file each; two files with shards of one tensor have its name in common.
        other = first.setdefault((frozenset(stated.values()), *(names if len(names) == 1 else ())), file)
        if other == file:
            continue
        # A file may have equal tensors by design, such as experts copied from one layer; then so may other files.
        times = Counter(facts[2:] for facts in set(stated.values()))
        elsewhere = (facts[2:] for place, facts in stated.items() if place not in places[other])
        if may_be_a_copy(facts for facts in elsewhere if times[facts] == 1):
            every = (source for _, tensor in stating for _, source in _stated(tensor.extents, doubtful))
            yield from perhaps_copied(file, other, ranks[file], (source for source in every if source.path == file))


Facts = tuple[str, int, str, int, int]
"""The name of a record, the place in it where a DTensor begins, and its checksum."""


def _facts(source: Source, kind: TensorKind) -> Facts:
    # Ranks that cut a DTensor without a copy save all of it, each with another offset in it. A run of a flattened
    # parameter has an offset that depends on its rank only, whatever its values.
    start, nbytes = source.record_span
    return source.record, source.offset - start if kind == "dtensor" else 0, source.dtype, source.crc, nbytes


def _stated(extents: Extents, files: Collection[Path]) -> Iterator[tuple[Shard, Source]]:
    """The shards in some files whose records state a CRC-32, each with its source; only shards with a known rank."""
    wanted = {file for file in extents.distinct_files if file.path in files and file.rank is not None}
    for i in [i for i, file in enumerate(extents.files) if file in wanted] if wanted else ():
        shard = extents[i]
        if shard.box.numel:
            yield from ((shard, source) for source in shard.sources if source.crc and source.path in files)


RecordKind = tuple[str, str, int]
"""The name of a record, its dtype, and its size in bytes."""


def _perhaps_equal(several: Sequence[Extents]) -> set[Path]:
    """The files that may have all their checksums in common with another file.

    Copies share the checksums of every kind of record, so that for most files a few kinds suffice: kinds that many
    files have, with few records each. With many records, only checksums divisible by `step` are compared.
    """
    of_kinds: dict[RecordKind, list[Extents]] = defaultdict(list)
    for extents in several:
        for kind in _kinds(extents):
            of_kinds[kind].append(extents)

    def few_in_many_files(kind: RecordKind) -> tuple[int, int]:
        return -len(of_kinds[kind][0].distinct_files), sum(map(len, of_kinds[kind]))

    files = read_paths(several)
    left = set(files)
    for kind in sorted(of_kinds, key=few_in_many_files)[:FIRST_KINDS]:
        stated: dict[Path, set[int]] = defaultdict(set)
        step = ONE_OF if sum(map(len, of_kinds[kind])) > MANY * len(files) else 1
        for extents in of_kinds[kind]:
            for path, crc in _crcs(extents, files, kind, step):
                stated[path].add(crc)
        crcs_of = {path: frozenset(crcs) for path, crcs in stated.items()}
        times = Counter(crcs_of.values())
        left -= {path for path, crcs in crcs_of.items() if times[crcs] == 1}
        if not left:
            break
    return left


def _kinds(extents: Extents) -> set[RecordKind]:
    others = (source for shard in extents.located.values() for source in shard.sources)
    return {*map(_kind, extents.distinct_layouts), *map(_kind, others)}


def _kind(of: Source | ExtentLayout) -> RecordKind:
    return of.record, of.dtype, of.record_span[1]


def _crcs(extents: Extents, files: Collection[Path], kind: RecordKind, step: int) -> Iterator[tuple[Path, int]]:
    """The checksums of one kind of records, each with its file: only checksums divisible by `step`."""
    for i in [i for i, crc in enumerate(extents.crcs) if crc and not crc % step]:
        file, layout = extents.files[i], extents.layouts[i]
        if file.path is None or file.rank is None or 0 in extents.sizes[i]:
            continue
        if layout is not None and _kind(layout) == kind:
            yield file.path, extents.crcs[i]
    for shard in extents.located.values():
        for source in shard.sources if shard.box.numel and shard.rank is not None else ():
            if source.path in files and source.crc and not source.crc % step and _kind(source) == kind:
                yield source.path, source.crc


def may_be_a_copy(records: Iterable[Checksum]) -> bool:
    """Whether files that share these checksums may be copies: the records have enough elements and are not constant."""
    varied = [(nbytes, dtype) for dtype, crc, nbytes in set(records) if not is_constant(dtype, crc, nbytes)]
    return sum(nbytes // ITEMSIZE[dtype] for nbytes, dtype in varied) >= MIN_EQUAL


def is_constant(dtype: str, crc: int, nbytes: int) -> bool:
    """Whether this is the checksum of bytes that are all zeros or all ones of a dtype."""
    patterns = (bytes(ITEMSIZE[dtype]), ONES.get(dtype, b"\0"))
    return any(_repeated(pattern, nbytes) == crc for pattern in patterns)


def _repeated(pattern: bytes, nbytes: int) -> int:
    """The CRC-32 of `nbytes` bytes of a repeated pattern."""
    block = pattern * (min(nbytes, BLOCK) // len(pattern) + 1)
    crc, step = 0, BLOCK // len(pattern) * len(pattern)
    for at in range(0, nbytes, step):
        crc = zlib.crc32(block[: min(step, nbytes - at)], crc)
    return crc


# -- comparison by first bytes -----------------------------------------------------------------------------------------


SAMPLE = 4096
"""Bytes of each tensor that are compared."""

MAX_COMPARED = 16
"""At most this many tensors are compared, the largest first."""

MIN_VARIED = 16
"""If non-constant tensors have fewer elements than this, equality may be chance."""


class _Listed(NamedTuple):
    """The shards of a tensor whose records state no CRC-32.

    Attributes:
        name: of the tensor.
        shards: of the tensor.
        places: indices of the shards without a CRC-32.
    """

    name: str
    shards: Extents
    places: Sequence[int]

    @property
    def columns(self) -> tuple[object, ...]:
        """A key that tensors share if they are cut alike: their columns are the same objects."""
        of = self.shards
        if len(self.places) < len(of):
            return (id(self.places),)
        return id(of.files), id(of.offsets), id(of.sizes)

    def rows(self) -> Iterator[tuple[Path, int, Ints, Ints]]:
        """Yield the file, index, offsets and sizes of each shard."""
        of = self.shards
        for i in self.places:
            if (path := of.files[i].path) is not None:
                yield path, i, of.offsets[i], of.sizes[i]


def copied_files(tensors: Iterable[tuple[str, Tensor]], files: OpenFiles) -> list[Problem]:
    """Warn of each file that may be a copy of another one; `tensors` are `(name, tensor)` pairs.

    Raises:
        ReadError: a file cannot be read.
    """
    sharded = ((name, tensor.extents) for name, tensor in tensors if tensor.sharded)
    listed = [_Listed(name, extents, places) for name, extents in sharded if (places := _without_checksum(extents))]
    alike: dict[int, list[Path]] = defaultdict(list)
    for path, kind in _classes(listed, itemgetter(3)).items():
        alike[kind].append(path)
    several = [paths for paths in alike.values() if len(paths) > 1]
    places_of = _classes(listed, itemgetter(2, 3)) if several else {}
    # Replicas have equal boxes: one file of each set of replicas is compared.
    found: list[Problem] = []
    for paths in several:
        firsts: dict[int, Path] = {}
        for path in paths:
            firsts.setdefault(places_of[path], path)
        if len(firsts) > 1:
            found += _copies_among([*firsts.values()], listed, files)
    return found


def _classes(listed: Iterable[_Listed], what: Callable[[Any], Hashable]) -> dict[Path, int]:
    """Number the files; two files share a number if `what` is equal for every tensor's rows."""
    classes: dict[Path, int] = {}
    done, new = set[object](), count()
    for one in listed:
        if one.columns in done:
            continue  # it would distinguish the same files
        done.add(one.columns)
        found: dict[Path, set[Hashable]] = defaultdict(set)
        for row in one.rows():
            found[row[0]].add(what(row))
        kinds: dict[object, int] = {}
        for path, values in found.items():
            kind = classes.get(path), frozenset(values)
            classes[path] = kinds[kind] if kind in kinds else kinds.setdefault(kind, next(new))
    return classes


def _without_checksum(shards: Extents) -> Sequence[int]:
    """Indices of the contiguous shards without a stated CRC-32."""
    if 0 not in shards.crcs:
        return []
    if shards.one_layout is not None and not any(shards.crcs):
        return range(len(shards)) if _is_packed(shards.one_layout) else ()
    packed = {id(layout) for layout in shards.distinct_layouts if _is_packed(layout)}
    found = [i for i, number in enumerate(map(id, shards.layouts)) if number in packed and not shards.crcs[i]]
    return [i for i in found if shards.files[i].path is not None]


def _is_packed(layout: ExtentLayout) -> bool:
    return bool(prod(layout.shape)) and is_contiguous(layout.shape, layout.strides)


def _copies_among(paths: Sequence[Path], listed: Sequence[_Listed], files: OpenFiles) -> Iterator[Problem]:
    """Find likely copies among files whose shards have the same names and sizes but different boxes."""
    numbers: dict[object, dict[Path, int]] = {}
    for one in listed:
        if one.columns not in numbers:
            numbers[one.columns] = {path: number for path, number, _, _ in one.rows()}
    groups, varied = [list(paths)], dict.fromkeys(paths, 0)
    pairs = [(one, numbers[one.columns]) for one in listed]
    of_first = {one.name: one.shards[numbered[paths[0]]].box.numel for one, numbered in pairs if paths[0] in numbered}
    for name in sorted(of_first, key=lambda name: -of_first[name])[:MAX_COMPARED]:
        sources = {
            path: source
            for one, numbered in pairs
            if one.name == name
            for path in paths
            if path in numbered and (source := one.shards[numbered[path]].source) is not None
        }
        groups = [part for group in groups if len(group) > 1 for part in split_alike(group, sources, files, varied)]
    for first, *others in groups:
        for copy in (path for path in others if varied[path] >= MIN_VARIED):
            one, number = next((one, numbered[copy]) for one, numbered in pairs if copy in numbered)
            yield from perhaps_copied(copy, first, one.shards[number].rank)


def split_alike(
    group: Sequence[Path], sources: Mapping[Path, Source], files: OpenFiles, varied: dict[Path, int]
) -> list[list[Path]]:
    """Split a group of files by the first bytes of a tensor; count its elements where it is not constant."""
    found: dict[bytes, list[Path]] = {}
    for path in group:
        data = _beginning(sources[path], files)
        width = ITEMSIZE[sources[path].dtype]
        if data != data[:width] * (len(data) // width):
            varied[path] += len(data) // width
        found.setdefault(data, []).append(path)
    return list(found.values())


def _beginning(source: Source, files: OpenFiles) -> bytes:
    nbytes = ITEMSIZE[source.dtype] * prod(source.shape)
    with files.open(source.path) as file:
        return file.read(source.offset, min(nbytes, SAMPLE))


# -- files of flat partitions that may be copies of another rank's, if no checksums are stated -------------------------
# Ranks' pieces of a parameter may differ in size, so that `copied_files` compares none of them; but their partitions,
# padded to one length, lie at equal offsets of their files.


def copies_without_checksums(tensors: Iterable[tuple[str, Tensor]], files: OpenFiles) -> list[Problem]:
    """Warn of each file that may be a copy of another one; `tensors` are `(name, tensor)` pairs.

    Raises:
        ReadError: a file cannot be read.
    """
    named = list(tensors)
    return copied_files(named, files) or list(copied_partitions(named, files))


def copied_partitions(tensors: Iterable[tuple[str, Tensor]], files: OpenFiles) -> Iterator[Problem]:
    """Warn of each file of flat partitions that may be a copy of another rank's.

    Raises:
        ReadError: a file cannot be read.
    """
    records: dict[Path, dict[Ints, Source]] = defaultdict(dict)
    places: dict[Path, set[tuple[str, Box]]] = defaultdict(set)
    ranks: dict[Path, int | None] = {}
    for name, tensor in tensors:
        for shard in tensor.found if tensor.kind == "flat_pieces" else ():
            for source in (source for source in shard.sources if not source.crc and shard.box.numel):
                start, length = source.record_span
                whole = source._replace(offset=start, shape=(length // ITEMSIZE[source.dtype],))
                records[source.path][start, length] = whole
                places[source.path].add((name, shard.box))
                ranks[source.path] = shard.rank
    alike: dict[frozenset[Ints], dict[frozenset[tuple[str, Box]], Path]] = defaultdict(dict)
    for path, of_file in records.items():  # of replicas, which have equal boxes, one is compared
        alike[frozenset(of_file)].setdefault(frozenset(places[path]), path)
    for spans, paths in alike.items():
        groups, varied = [list(paths.values())], dict.fromkeys(paths.values(), 0)
        for span in sorted(spans, key=lambda span: -span[1])[:MAX_COMPARED]:
            sources = {path: records[path][span] for path in paths.values()}
            groups = [part for group in groups if len(group) > 1 for part in split_alike(group, sources, files, varied)]
        for first, *others in groups:
            for copy in (path for path in others if varied[path] >= MIN_VARIED):
                yield from perhaps_copied(copy, first, ranks[copy])


# -- small tensors that every rank has in full, such as step counts: compared file by file, not tensor by tensor -------
# A world of 1,024 ranks and 5,000 tensors has a million of them. Comparing tensor by tensor opens a file for each; here
# each file is opened once. Tensors that are not proven equal here are left to `replicas`, which describes the
# difference.


K = TypeVar("K", bound=Hashable)

SMALL = 4 << 10
"""Only tensors of at most this many bytes are compared here."""


UNIQUE_BY_CRC = 4
"""Up to this length the CRC-32 is an invertible function of the bytes, so that equal CRCs prove equal bytes."""


class _Copies(NamedTuple):
    """The copies of a tensor, one per file: their start offsets, and their size in bytes."""

    starts: Sequence[int]
    nbytes: int


def equal_copies(tensors: Iterable[tuple[K, Tensor]], files: OpenFiles, right: bool = False) -> set[K]:
    """The keys of small tensors that several local files have in full, with equal bytes.

    Copies whose CRC-32s prove equality are not read; such a proof counts only if `right`: every stated CRC-32 was
    compared with its bytes.
    """
    listed: dict[tuple[ExtentFile, ...], dict[K, _Copies]] = {}
    equal = set[K]()
    for key, tensor in tensors:
        extents = tensor.extents
        copies = _copies(extents) if len(extents) > 1 else None
        if copies is None:
            continue
        if right and copies.nbytes <= UNIQUE_BY_CRC and extents.crcs[0] and extents.states_one_crc:
            equal.add(key)
        else:
            listed.setdefault(tuple(extents.files), {})[key] = copies
    return equal | {key for file_group, copies in listed.items() for key in _equal(file_group, copies, files)}


def _copies(shards: Extents) -> _Copies | None:
    """The copies of a tensor; None if it is not one small array in each of its files."""
    layout = shards.one_layout
    if layout is None or not shards.one_box:
        return None
    nbytes = prod(layout.shape) * ITEMSIZE[layout.dtype]
    if not 0 < nbytes <= SMALL or layout.record_span[1] != nbytes or layout.dtype != shards.dtype:
        return None
    first = layout.offset
    return _Copies([start + first for start in shards.starts] if first else shards.starts, nbytes)


def _equal(file_group: Sequence[ExtentFile], copies: dict[K, _Copies], files: OpenFiles) -> Iterable[K]:
    """The keys of tensors that have equal bytes in all files; empty if a file cannot be read."""
    lengths = [one.nbytes for one in copies.values()]
    of_file = zip(*(one.starts for one in copies.values()), strict=True)
    ends = [0, *accumulate(lengths)]
    equal, expected = [True] * len(copies), b""
    for file, starts in zip(file_group, of_file, strict=True):
        if file.path is None:
            return ()
        try:
            with files.open(file.path) as opened:
                if opened.descriptor is None:
                    return ()
                found = opened.read_each(starts, lengths)
        except ReadError:
            return ()
        expected = expected or found
        if found != expected:
            same = [found[a:b] == expected[a:b] for a, b in pairwise(ends)]
            equal = [before and now for before, now in zip(equal, same, strict=True)]
    return [key for key, same in zip(copies, equal, strict=True) if same]
