"""Files with equal bytes under two names, which may be copies: by stated checksums, or by their first bytes.

Equal bytes prove no copy: ranks that begin from one seed, constant values and the moments of tied weights are equal
too. So this is a warning for every format; an error needs a file that states whose it is, which formats check
themselves. A file that was copied over another equals it to the last byte, so nothing is said of files whose sizes,
beginnings or ends differ. Neither is it of few elements, or of elements that are all alike.

Where containers state checksums, only records whose checksums are equal are looked at. Bare bytes state none: the first
bytes of some tensors are compared, only of files whose tensors have the same names and sizes.
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

MIN_TELLING = 16
"""Fewer equal elements than this may be chance."""

END = 64 << 10
"""Bytes at the beginning and at the end of two files that are compared: a zip archive has its directory there."""

MAX_READ = 64
"""Records of a file of which the first element is read."""

FIRST_KINDS = 4
"""Kinds of records by which most files are known to be no copies."""

MANY, ONE_OF = 500, 16
"""Of more records to a file than this, one of so many is enough to distinguish files."""

BLOCK = 1 << 20
"""Bytes per step of computing a checksum."""

ONES = {
    "float64": struct.pack("<d", 1),
    "float32": struct.pack("<f", 1),
    "float16": struct.pack("<e", 1),
    "bfloat16": struct.pack("<f", 1)[2:],
}
"""The bytes of the number one."""


def stated_checksum(value: Any, whole: bool = False) -> Checksum | None:
    """The checksum of the zip entry that a tensor lies in; None where none is stated.

    Args:
        value: a tensor of one shard, or anything else.
        whole: ignore tensors that are a part of their zip entry.
    """
    source = value.shards[0].source if isinstance(value, Tensor) and len(value.shards) == 1 else None
    if source is None or not source.crc or (whole and value.nbytes != source.record_span[1]):
        return None
    return source.dtype, source.crc, value.nbytes


def perhaps_copied(copy: Path, other: Path, rank: int | None, sources: Iterable[Source] = ()) -> Iterator[Problem]:
    """Warn that a file may be a copy of another one; its tensors were found equal.

    Args:
        copy: the file.
        other: another file, for another part of the tensors.
        rank: the rank whose file the first one is called.
        sources: where the tensors lie whose checksums are equal, if they were compared by those.
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
    """Where those of some values lie that are tensors with a checksum."""
    shards = (shard for value in values if isinstance(value, Tensor) for shard in value.found)
    return [source for shard in shards for source in shard.sources if source.crc]


def _ends(path: Path, files: OpenFiles) -> tuple[int, bytes, bytes]:
    """The size of a file, its first bytes and its last ones."""
    with files.open(path) as file:
        length = min(file.size, END)
        return file.size, file.read(0, length), file.read(file.size - length, length)


def _vary(sources: Iterable[Source], files: OpenFiles) -> bool:
    """Whether the records of enough elements do not repeat their first element throughout."""
    records = {source.record_span: source for source in sources if source.crc}
    largest = sorted(records.values(), key=lambda source: -source.record_span[1])[:MAX_READ]
    counts = (0 if repeats(one, files) else one.record_span[1] // ITEMSIZE[one.dtype] for one in largest)
    return any(varied >= MIN_TELLING for varied in accumulate(counts))


def repeats(source: Source, files: OpenFiles) -> bool:
    """Whether a record is its first element throughout, by the checksum that is stated.

    Raises:
        ReadError: that element cannot be read.
    """
    start, nbytes = source.record_span
    with files.open(source.path) as file:
        return _repeated(file.read(start, ITEMSIZE[source.dtype]), nbytes) == source.crc


def check_copies(tensors: Iterable[tuple[KeyPath, Tensor]]) -> Iterator[Problem]:
    """Warnings of files with equal checksums for different places of tensors: one may be a copy of the other.

    Replicas have the same places.
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
        # Tied weights may have a file each; two files of the same tensor's pieces have one name.
        other = first.setdefault((frozenset(stated.values()), *(names if len(names) == 1 else ())), file)
        if other == file:
            continue
        # What a file has twice, as experts that were made of one layer, another file may have too.
        times = Counter(facts[2:] for facts in set(stated.values()))
        elsewhere = (facts[2:] for place, facts in stated.items() if place not in places[other])
        if may_be_a_copy(facts for facts in elsewhere if times[facts] == 1):
            every = (source for _, tensor in stating for _, source in _stated(tensor.extents, doubtful))
            yield from perhaps_copied(file, other, ranks[file], (source for source in every if source.path == file))


Facts = tuple[str, int, str, int, int]
"""The name of a record, where in it a DTensor begins, and its checksum."""


def _facts(source: Source, kind: TensorKind) -> Facts:
    # Ranks that cut a DTensor without a copy save all of it, and each begins somewhere else. A run of a flattened
    # parameter begins where its rank says, whatever file lies there.
    start, nbytes = source.record_span
    return source.record, source.offset - start if kind == "dtensor" else 0, source.dtype, source.crc, nbytes


def _stated(extents: Extents, files: Collection[Path]) -> Iterator[tuple[Shard, Source]]:
    """The shards of known ranks whose records in some files state a CRC-32, and where these lie."""
    wanted = {file for file in extents.distinct_files if file.path in files and file.rank is not None}
    for i in [i for i, file in enumerate(extents.files) if file in wanted] if wanted else ():
        shard = extents[i]
        if shard.box.numel:
            yield from ((shard, source) for source in shard.sources if source.crc and source.path in files)


RecordKind = tuple[str, str, int]
"""The name of a record, its dtype, and its size in bytes."""


def _perhaps_equal(several: Sequence[Extents]) -> set[Path]:
    """The files of which records of a few kinds do not show that no other file states the same checksums.

    Files that state the same of all records do so of those of each kind, so kinds that are in many files and have few
    records are enough for most files; and of many records those whose checksum is a multiple of a number.
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
    """The checksums of `_stated`, of the records of a kind, with the files that they are in: multiples of `step`."""
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
    """Whether two files that both have these checksums may be one file: they have elements that tell."""
    varied = [(nbytes, dtype) for dtype, crc, nbytes in set(records) if not is_constant(dtype, crc, nbytes)]
    return sum(nbytes // ITEMSIZE[dtype] for nbytes, dtype in varied) >= MIN_TELLING


def is_constant(dtype: str, crc: int, nbytes: int) -> bool:
    """Whether bytes of this checksum are all zeros or all ones of a dtype."""
    patterns = (bytes(ITEMSIZE[dtype]), ONES.get(dtype, b"\0"))
    return any(_repeated(pattern, nbytes) == crc for pattern in patterns)


def _repeated(pattern: bytes, nbytes: int) -> int:
    """The CRC-32 of `nbytes` bytes of a repeated pattern."""
    block = pattern * (min(nbytes, BLOCK) // len(pattern) + 1)
    crc, step = 0, BLOCK // len(pattern) * len(pattern)
    for at in range(0, nbytes, step):
        crc = zlib.crc32(block[: min(step, nbytes - at)], crc)
    return crc


# -- by first bytes ----------------------------------------------------------------------------------------------------


SAMPLE = 4096
"""Bytes of each tensor that are compared."""

MAX_COMPARED = 16
"""Tensors that are compared, the largest first."""

MIN_VARIED = 16
"""Elements, in tensors whose elements are not all alike, below which equal files may be chance."""


class _Listed(NamedTuple):
    """Shards of a tensor whose records state no CRC-32.

    Attributes:
        name: of the tensor.
        shards: of the tensor.
        places: the numbers of those shards.
    """

    name: str
    shards: Extents
    places: Sequence[int]

    @property
    def columns(self) -> tuple[object, ...]:
        """What is the same object in tensors that are cut alike; of other tensors something of their own."""
        of = self.shards
        if len(self.places) < len(of):
            return (id(self.places),)
        return id(of.files), id(of.offsets), id(of.sizes)

    def rows(self) -> Iterator[tuple[Path, int, Ints, Ints]]:
        """The file, the number, the offsets and the sizes of each shard."""
        of = self.shards
        for i in self.places:
            if (path := of.files[i].path) is not None:
                yield path, i, of.offsets[i], of.sizes[i]


def copied_files(tensors: Iterable[tuple[str, Tensor]], files: OpenFiles) -> list[Problem]:
    """A warning for each file that may be a copy of another one; `tensors` come with their names.

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
    # Replicas have the same places: one of each set of them is compared.
    found: list[Problem] = []
    for paths in several:
        firsts: dict[int, Path] = {}
        for path in paths:
            firsts.setdefault(places_of[path], path)
        if len(firsts) > 1:
            found += _copies_among([*firsts.values()], listed, files)
    return found


def _classes(listed: Iterable[_Listed], what: Callable[[Any], Hashable]) -> dict[Path, int]:
    """A number for each file, the same for files in which every tensor has the same `what` of its rows."""
    classes: dict[Path, int] = {}
    done, new = set[object](), count()
    for one in listed:
        if one.columns in done:
            continue  # it distinguishes the same files
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
    """The numbers of the shards with values that follow each other and of which no CRC-32 is stated."""
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
    """Find files that may be copies among those whose shards have the same names and sizes, at different places."""
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
    """Split a group of files by the first bytes of one tensor; count elements where they are not all alike."""
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


# -- files of flat partitions that may be copies of another rank's, where no checksums are stated ----------------------
# Ranks' pieces of a parameter may differ in size, and then `copied_files` compares none of them; their partitions,
# padded to one length, lie at the same places of their files.


def copies_without_checksums(tensors: Iterable[tuple[str, Tensor]], files: OpenFiles) -> list[Problem]:
    """A warning for each file that may be a copy of another one; `tensors` come with their names.

    Raises:
        ReadError: a file cannot be read.
    """
    named = list(tensors)
    return copied_files(named, files) or list(copied_partitions(named, files))


def copied_partitions(tensors: Iterable[tuple[str, Tensor]], files: OpenFiles) -> Iterator[Problem]:
    """A warning for each file of flat partitions that may be a copy of another rank's.

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
    for path, of_file in records.items():  # of replicas, which have the same places, one is compared
        alike[frozenset(of_file)].setdefault(frozenset(places[path]), path)
    for spans, paths in alike.items():
        groups, varied = [list(paths.values())], dict.fromkeys(paths.values(), 0)
        for span in sorted(spans, key=lambda span: -span[1])[:MAX_COMPARED]:
            sources = {path: records[path][span] for path in paths.values()}
            groups = [part for group in groups if len(group) > 1 for part in split_alike(group, sources, files, varied)]
        for first, *others in groups:
            for copy in (path for path in others if varied[path] >= MIN_VARIED):
                yield from perhaps_copied(copy, first, ranks[copy])


# -- small tensors of which every rank has all, such as step counts: compared file by file, not tensor by tensor -------
# A world of 1,024 ranks and 5,000 tensors has a million of them. Tensor by tensor each is a file to open; here each
# file is opened once. What is not found equal here is left to `replicas`, which finds out more.


K = TypeVar("K", bound=Hashable)

SMALL = 4 << 10
"""Most bytes of a tensor that is compared here."""


TOLD_BY_CRC = 4
"""Most bytes of which no two values have the same CRC-32, which is as long, and an invertible function of them."""


class _Copies(NamedTuple):
    """The copies of a tensor, one in each file: where its bytes begin in each, and how many they are."""

    starts: Sequence[int]
    nbytes: int


def equal_copies(tensors: Iterable[tuple[K, Tensor]], files: OpenFiles, right: bool = False) -> set[K]:
    """The keys of those tensors that are small, whole in each of several local files, and have the same bytes there.

    Nothing is read of copies whose bytes their CRC-32s prove equal. Those are `right` if each that is stated was
    compared with the bytes.
    """
    listed: dict[tuple[ExtentFile, ...], dict[K, _Copies]] = {}
    equal = set[K]()
    for key, tensor in tensors:
        extents = tensor.extents
        copies = _copies(extents) if len(extents) > 1 else None
        if copies is None:
            continue
        if right and copies.nbytes <= TOLD_BY_CRC and extents.crcs[0] and extents.states_one_crc:
            equal.add(key)
        else:
            listed.setdefault(tuple(extents.files), {})[key] = copies
    return equal | {key for held_in, copies in listed.items() for key in _equal(held_in, copies, files)}


def _copies(shards: Extents) -> _Copies | None:
    """The copies of a tensor; None where it is not one small array in each of its files."""
    layout = shards.one_layout
    if layout is None or not shards.one_box:
        return None
    nbytes = prod(layout.shape) * ITEMSIZE[layout.dtype]
    if not 0 < nbytes <= SMALL or layout.record_span[1] != nbytes or layout.dtype != shards.dtype:
        return None
    first = layout.offset
    return _Copies([start + first for start in shards.starts] if first else shards.starts, nbytes)


def _equal(held_in: Sequence[ExtentFile], copies: dict[K, _Copies], files: OpenFiles) -> Iterable[K]:
    """The keys of tensors that have the same bytes in all files; none where one of these cannot be read."""
    lengths = [one.nbytes for one in copies.values()]
    of_file = zip(*(one.starts for one in copies.values()), strict=True)
    ends = [0, *accumulate(lengths)]
    equal, expected = [True] * len(copies), b""
    for file, starts in zip(held_in, of_file, strict=True):
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
