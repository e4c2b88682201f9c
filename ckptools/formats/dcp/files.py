"""The files of a DCP folder: its metadata, and the data files that the metadata names.

`__{rank}_{n}.distcp`, where n counts the files of a rank: one per writer thread, or one per item. The writing rank is
the only rank that DCP records. `.metadata` is renamed from `.metadata.tmp` after all other files are written; a save
without collectives leaves `__{rank}.metadata` of every rank instead. Source:
torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.opening import (
    File,
    OpenFiles,
    Window,
    check_stays_inside,
    content_of,
    reading,
)
from ckptools.files.storage import UNFINISHED
from ckptools.files.zip_archive import END_RECORD, EOCD, archive_before, find_directory
from ckptools.formats.dcp.items import PICKLE, ItemReader
from ckptools.formats.dcp.metadata import DcpMetadata, StoredItem
from ckptools.formats.shared.checkpoint_builder import Fault, StatedFile
from ckptools.formats.shared.several_checkpoints import several
from ckptools.model.facts import Fact
from ckptools.model.problems import Code, Problem, Severity
from ckptools.model.shards import Item, Source
from ckptools.model.tensor import Tensor
from ckptools.rules.files import missing, strays
from ckptools.rules.optimizers import ELEMENTWISE
from ckptools.tensor_io.dcp_items import OtherItemError
from ckptools.tensor_io.fetch_ahead import Part
from ckptools.text import few, plural, spans
from ckptools.training_state.steps import NAMES, RANKS_DIFFER

METADATA = ".metadata"
OF_RANK = re.compile(r"__(\d{1,7})\.metadata")
DATA = re.compile(r"__(\d{1,7})_\d+\.distcp")

MAX_NAMED = 3
"""At most this many names are listed in a message, and the others counted."""


def rank_of(file: str) -> int | None:
    """The rank that wrote a file, by its name; None for other names."""
    found = DATA.fullmatch(file.rpartition("/")[2])
    return int(found[1]) if found else None


def by_rank(file: str) -> tuple[int, list[int], str]:
    """A sort key of data files: rank, number, name."""
    return -1 if (rank := rank_of(file)) is None else rank, [int(n) for n in re.findall(r"\d{1,18}", file)], file


def metadata_files(folder: Path, follow_symlinks: bool) -> list[tuple[Path, int | None]]:
    """Find the metadata of a DCP folder: the one for all ranks, or else each rank's with its rank.

    Raises:
        ReadError: there is none.
        UnsafePathError: one is a link out of the folder.
    """
    names = names_in(folder)
    ranks = sorted((int(found[1]), name) for name in names if (found := OF_RANK.fullmatch(name)))
    files: list[tuple[Path, int | None]] = [(folder / name, rank) for rank, name in ranks]
    if METADATA in names:
        files = [(folder / METADATA, None)]
    if not files:
        raise ReadError(folder, _without_metadata(names), "unfinished")
    for path, _ in files if not follow_symlinks else ():
        check_stays_inside(path, folder)
    return files


def names_in(folder: Path) -> set[str]:
    """The names of the files and folders in a folder."""
    with reading(folder):
        return {path.name for path in folder.iterdir()}


def _without_metadata(names: set[str]) -> str:
    if any(name.endswith(".metadata.tmp") for name in names):
        return ".metadata.tmp is here, .metadata is not: the save has not ended, or it died"
    files = sum(name.endswith(".distcp") for name in names)
    what = "1 .distcp file" if files == 1 else f"{files} .distcp files"
    return f"{what} without .metadata, the only list of what they hold, which DCP writes last: {UNFINISHED}"


def lacks_metadata(folder: Path, part: str | None = None) -> Problem:
    """The problem of a part that is a DCP folder without its metadata."""
    more = f", the only list of what the .distcp files there hold, which DCP writes last: {UNFINISHED}"
    return missing(f"{folder.name}/{METADATA}", None, part, more=more)


def looks_like_dcp(folder: Path) -> bool:
    """Whether a folder has metadata or data files of DCP."""
    return any(_is_dcp_name(path.name) for path in folder.iterdir())


def _is_dcp_name(name: str) -> bool:
    return name in (METADATA, ".metadata.tmp") or bool(OF_RANK.fullmatch(name) or DATA.fullmatch(name))


def dcp_folder_of(path: Path) -> Path | None:
    """Find the DCP folder of a path: itself, the folder of a file, or the only step of a run.

    Raises:
        UsageError: a run folder contains several.
    """
    if not path.is_dir():
        return path.parent if path.is_file() and _is_dcp_name(path.name) else None
    if looks_like_dcp(path):
        return path
    named = [(NAMES.findall(p.name), p) for p in path.iterdir() if p.is_dir() and not p.is_symlink()]
    named.sort(key=lambda n: (int((n[0] or [0])[-1]), n[1].name))
    steps = [child for numbers, child in named if numbers and looks_like_dcp(child)]
    if len(steps) > 1:
        raise several(path, steps)
    return steps[0] if steps else None


def contradicts(why: str) -> Fault:
    """The fault of a file that is refused as a whole, even if some items look right."""
    return Fault(f"is not the file that the metadata describes: {why}", "contradicts")


def find_data_files(folder: Path, needed: Mapping[str, int], follow_symlinks: bool) -> dict[str, StatedFile]:
    """Find the data files that the metadata names; `needed` has the required size of each.

    Raises:
        UnsafePathError: one is a link out of the folder, or not a regular file.
    """
    return {
        name: StatedFile.found(folder / name, folder, rank_of(name), n, follow_symlinks) for name, n in needed.items()
    }


def with_faults(files: Mapping[str, StatedFile], faults: Mapping[Path, Fault]) -> dict[str, StatedFile]:
    """Add faults to the files that have them."""
    return {name: replace(f, fault=f.fault or faults.get(f.path)) for name, f in files.items()}


def check_data_files(files: Mapping[str, StatedFile], names_in_file: Callable[[str], list[str]]) -> Iterable[Problem]:
    """Yield problems of data files that are missing, cut, or from another save, with the names of their items."""
    for name, file in files.items():
        if file.state != "whole":  # finding the names in it takes a while
            yield from file.problems(name, few(names_in_file(name), MAX_NAMED))


def other_data_files(folder: Path, named: Iterable[str]) -> tuple[dict[str, StatedFile], list[str]]:
    """Find data files that the metadata does not name: empty ones, of ranks without data, and strays.

    Raises:
        ReadError: the system refuses to report on one.
    """
    names = sorted(name for name in names_in(folder) - set(named) if DATA.fullmatch(name))
    found = {name: StatedFile.found(folder / name, folder, rank_of(name), 0, True) for name in names}
    empty = {name: file for name, file in found.items() if file.size == 0}
    return empty, [name for name in names if name not in empty]


def check_strays(stray: Sequence[str]) -> Iterable[Problem]:
    """Yield problems of data files from another save, or another rank, in the same folder."""
    why = "not named by the metadata, perhaps left over from another save into this folder"
    return strays(stray, why, rank_of(stray[0]) if stray else None, severity="warning")


# -- detection of data files that the metadata does not describe: exchanged between ranks, or from another save --------
# In such a file an item may fit by chance and hold another rank's values, so the whole file is refused. Evidence is its
# length, an item of another dtype or shape, and an archive between those that the metadata lists. A file that was cut
# or overwritten in one place is still the saved one: a cut falls into an item, and the archive behind the damage is
# listed.

MOST_ZEROS = 1 << 20
"""At most this many bytes behind the last item are read."""

MAGIC = 4
"""First bytes by which an archive is detected, compressed or not."""

END = 98
"""Bytes at the end of an archive that state its length, including a zip64 end record."""

PIECE = 1 << 20
"""Bytes per step of the search for the end of an archive."""

MAX_SEARCHED = 4 << 30
"""At most this many bytes are searched."""


class SuspectFile(NamedTuple):
    """A file with an item that cannot be read, or does not lie where the metadata says.

    Attributes:
        fqn: the name of the item.
    """

    fqn: str
    path: Path
    place: Item | StoredItem
    error: ReadError | None = None


def check_sizes(
    files: Mapping[str, StatedFile], last: Mapping[str, StoredItem], items: ItemReader, longer: bool = False
) -> tuple[dict[Path, Fault], list[Problem]]:
    """Return faults of files with a wrong length that must be refused, and warnings for other wrong lengths.

    Args:
        files: the data files by their names in the metadata.
        last: the last item of each, by its end.
        items: reads those files.
        longer: whether bytes may follow the last item.
    """
    faults, problems = dict[Path, Fault](), list[Problem]()
    for name, file in files.items():
        if file.size is None or file.size == file.needed or file.fault is not None:
            continue
        if longer and file.size > file.needed:
            continue
        try:
            opened = items.open(file.path)
            if _has_safetensors(opened, file.size, last[name]):
                continue  # the header of the blob states its end
            if why := _of_another_length(opened, file.size, last[name]):
                text = f"{file.size} bytes, expected {file.needed}, {why}"
                faults[file.path] = contradicts(text)
            elif file.size > file.needed:
                text = f"{name} has {file.size - file.needed} bytes behind its last item, all zeros"
                problems.append(Problem(Code.ODD_FILE_SIZE, text, file.rank))
        except ReadError as error:
            if error.kind == "no access":
                faults[file.path] = Fault(error.reason, "no access")
    return faults, problems


def _of_another_length(file: File, size: int, last: StoredItem) -> str:
    """Why a file of a wrong length must be from another save; empty if it need not be."""
    if size < last.end:
        ends = file.read(max(size - EOCD.size, 0), min(size, EOCD.size)).startswith(END_RECORD)
        return "and ends with a whole item" if ends else ""
    behind = file.read(last.end, min(size - last.end, MOST_ZEROS))
    return "and goes on behind its last item" if any(behind) else ""


def _has_safetensors(file: File, size: int, last: StoredItem) -> bool:
    """Whether the last item lies in a safetensors blob, or an empty blob follows it."""
    heads = [file.read(start, min(size - start, 9)) for start in (last.offset, last.end) if start < size]
    return any(head[8:] == b"{" and int.from_bytes(head[:8], "little") < size for head in heads)


def other_files(
    suspects: Sequence[SuspectFile], metadata: Sequence[DcpMetadata], items: ItemReader
) -> dict[Path, Fault]:
    """Find files to refuse as a whole, by the first unreadable item of each."""
    faults: dict[Path, Fault] = {}
    first = {suspect.path: suspect for suspect in sorted(suspects, key=lambda s: s.place.offset, reverse=True)}
    for path, suspect in first.items():
        error = suspect.error
        if error is not None and error.kind == "no access":
            faults[path] = Fault(error.reason, "no access")
        elif isinstance(error, OtherItemError):
            faults[path] = contradicts(f"{suspect.fqn}: {error.reason}")
        elif why := _another_archive(suspect, metadata, items):
            faults[path] = contradicts(why)
    return faults


def _another_archive(suspect: SuspectFile, metadata: Sequence[DcpMetadata], items: ItemReader) -> str:
    """Describe an archive at or behind an item's place that the metadata does not list; empty for none."""
    name = suspect.path.relative_to(items.folder).as_posix()
    columns = [zip(one.stored.files, one.stored.starts, one.stored.lengths, strict=True) for one in metadata]
    listed = {(start, start + length) for file, start, length in chain(*columns) if file == name}
    try:
        file = items.open(suspect.path)
        if suspect.place.zstd:
            return "" if is_in_place(file, suspect.place) else f"{suspect.fqn} does not begin where it should"
        found = _archive_behind(file, suspect.place.offset)
        if found is None or found in listed:
            return ""
    except ReadError:
        return ""
    return f"an item lies at bytes {found[0]} to {found[1]}, which the metadata does not list"


def _archive_behind(file: File, start: int) -> tuple[int, int] | None:
    """The extent of the first zip archive that ends behind `start`."""
    at, most = start, min(file.size, start + MAX_SEARCHED)
    while at < most:
        data = file.read(at, min(PIECE + EOCD.size, most - at))
        found = data.find(END_RECORD)
        while found >= 0 and found < PIECE:
            begins = archive_before(file, at + found)
            if begins is not None:
                return begins, at + found + EOCD.size
            found = data.find(END_RECORD, found + 1)
        at += PIECE
    return None


def is_in_place(file: File, place: Item | StoredItem) -> bool:
    """Whether an item lies where the metadata says, judged by its first and last bytes."""
    window = Window(file, place.offset, place.length)
    head = window.read(0, min(window.size, MAGIC))
    if place.zstd or content_of(head) != "zip":
        return content_of(head) == "zstd" if place.zstd else head.startswith(PICKLE)
    try:
        find_directory(window)
    except ReadError as error:
        if error.kind == "no access":
            raise
        return False
    return True


def bounds_of(item: Item) -> list[Part]:
    """The byte ranges by which `is_in_place` judges an item: its start, and the end of an archive."""
    end = item.offset + item.length
    head = item.path, item.offset, item.offset + MAGIC
    return [head] if item.zstd else [head, (item.path, end - END, end)]


# -- files of a DCP folder that are from another save, by the optimizer's step counters in each file -------------------
# A DCP has one copy of each parameter's step, in the file of the rank with the least data (`dedup_save_plans`), so most
# files have some. If those of one file agree, and contradict those of all others, the file was written at another step.
# Steps of parameters that were frozen for a while differ too, but in any file; only a stage of a pipeline could have
# all of its own. So it is an error only if moments of those parameters lie in other files as well.

CODES = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}

MAX_READ = 1000
"""At most this many distinct steps of a file are read; checksums show which are equal."""


def compare_steps(
    tensors: Mapping[str, Any], counters: Iterable[tuple[Path, int]], ranks: Mapping[Path, int | None]
) -> tuple[list[Problem], Fact | None]:
    """Compare the steps that optimizers count, file by file.

    Args:
        tensors: the tensors of a folder, by fqn.
        counters: other counts of steps with their files, which may support one of those steps.
        ranks: rank of each file.

    Returns:
        Problems of files from another save than most, and the step of most files if they have different ones.
    """
    found: dict[str, dict[Path, dict[str, Source]]] = defaultdict(lambda: defaultdict(dict))
    for fqn, value in tensors.items():
        owner, _, slot = fqn.rpartition(".")
        if slot == "step" and isinstance(value, Tensor) and value.numel == 1 and value.dtype in CODES:
            sources = [shard.source for shard in value.found if shard.source is not None]
            if len(sources) == 1:
                optimizer = owner.rpartition("state.")[0]
                found[optimizer][sources[0].path][owner] = sources[0]
    for files in found.values():
        problems, step = _compared(files, tensors, counters, ranks) if len(files) > 1 else ([], None)
        if problems:
            return problems, step
    return [], None


def _compared(
    files: Mapping[Path, Mapping[str, Source]],
    tensors: Mapping[str, Any],
    counters: Iterable[tuple[Path, int]],
    ranks: Mapping[Path, int | None],
) -> tuple[list[Problem], Fact | None]:
    kinds = {(source.crc, source.dtype) for of_file in files.values() for source in of_file.values()}
    if len(kinds) == 1 and all(crc for crc, _ in kinds):
        return [], None
    with OpenFiles() as opened:
        steps = {path: set(_read(of_file.values(), opened)) for path, of_file in files.items()}
    known = set().union(*steps.values())
    counted = {(path, step) for path, of_file in steps.items() for step in of_file}
    counted |= {(path, step) for path, step in counters if step in known}
    holders = Counter(step for _, step in counted)
    usual, count = holders.most_common(1)[0] if holders else (0, 0)
    most = 2 * count > len({path for path, _ in counted})
    problems = []
    for path, of_file in steps.items():
        if of_file and all(holders[step] == 1 for step in of_file):
            cut = len(files[path]) > 1 and any(_is_elsewhere(owner, path, tensors) for owner in files[path])
            text = f"{path.name} counts {spans(of_file)} in {plural(len(files[path]), 'optimizer step')}"
            text += f", most files count {usual}" if most else ", and other files count others"
            text += f"; it {'is' if cut else 'may be'} of another save"
            severity: Severity = "error" if cut else "warning"
            problems.append(Problem(Code.MIXED_SAVES, text, ranks.get(path), severity=severity, files=(path.name,)))
    fact = Fact(usual, (f"counters in {plural(count, 'file')}", RANKS_DIFFER), agree=False)
    return problems, fact if problems and most else None


def _read(sources: Iterable[Source], files: OpenFiles) -> Iterator[int]:
    """Yield each distinct step; an unreadable one has a problem of its own."""
    known = {source.crc or number: source for number, source in enumerate(sources)}
    for source in islice(known.values(), MAX_READ):
        with suppress(ReadError), files.open(source.path) as file:
            (step,) = struct.unpack(CODES[source.dtype], file.read(source.offset, ITEMSIZE[source.dtype]))
            if math.isfinite(step):
                yield int(step)


def _is_elsewhere(owner: str, path: Path, tensors: Mapping[str, Any]) -> bool:
    """Whether moments of a parameter lie in other files than its step."""
    slots = (tensors.get(f"{owner}.{slot}") for slot in ELEMENTWISE)
    found = {shard.source.path for slot in slots if isinstance(slot, Tensor) for shard in slot.found if shard.source}
    return not found <= {path}
