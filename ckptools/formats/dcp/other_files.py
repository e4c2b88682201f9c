"""Detection of data files that the metadata does not describe: exchanged between ranks, or from another save.

In such a file an item may fit by chance and hold another rank's values, so the whole file is refused. Signs are its
length, an item of another dtype or shape, and an archive between those that the metadata lists. A file that was cut or
overwritten in one place is still the saved one: a cut falls into an item, and the archive behind the damage is listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ckptools.errors import ReadError
from ckptools.files.file_type import content_of
from ckptools.files.opening import File, Window
from ckptools.files.zip_directory import END_RECORD, EOCD, archive_before, find_directory
from ckptools.formats.dcp.files import DataFile, FileFault
from ckptools.formats.dcp.items import PICKLE, ItemReader
from ckptools.formats.dcp.metadata import DcpMetadata, StoredItem
from ckptools.model.problems import Code, Problem
from ckptools.model.source import Item
from ckptools.tensor_io.dcp_items import OtherItemError
from ckptools.tensor_io.fetch_ahead import Part

MOST_ZEROS = 1 << 20
"""Most bytes behind the last item that are read."""

MAGIC = 4
"""First bytes by which an archive is recognised, compressed or not."""

END = 98
"""Bytes at the end of an archive that state its length, with those of a zip64 end record."""

PIECE = 1 << 20
"""Bytes per step of the search for the end of an archive."""

MAX_SEARCHED = 4 << 30
"""Most bytes that are searched."""


class SuspectFile(NamedTuple):
    """An item that could not be read, or does not lie where the metadata says.

    Attributes:
        fqn: the name that it should hold.
        path: its file.
        place: its stated place.
        error: the error from reading it.
    """

    fqn: str
    path: Path
    place: Item | StoredItem
    error: ReadError | None = None


def check_sizes(
    files: Mapping[str, DataFile], last: Mapping[str, StoredItem], items: ItemReader, longer: bool = False
) -> tuple[dict[Path, FileFault], list[Problem]]:
    """Return faults of files with a wrong length that must be refused, and warnings for other wrong lengths.

    Args:
        files: the data files by their names in the metadata.
        last: the last item of each, by its end.
        items: reads those files.
        longer: whether they may go on behind it.
    """
    faults, problems = dict[Path, FileFault](), list[Problem]()
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
                faults[file.path] = FileFault.contradicts(text)
            elif file.size > file.needed:
                text = f"{name} has {file.size - file.needed} bytes behind its last item, all zeros"
                problems.append(Problem(Code.ODD_FILE_SIZE, text, file.rank))
        except ReadError as error:
            if error.kind == "no access":
                faults[file.path] = FileFault(Code.FILE_UNREADABLE, error.reason)
    return faults, problems


def _of_another_length(file: File, size: int, last: StoredItem) -> str:
    """Why a file of a wrong length must be from another save; empty where it need not be."""
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
) -> dict[Path, FileFault]:
    """Faults of files to refuse, by the first unreadable item of each."""
    faults: dict[Path, FileFault] = {}
    first = {suspect.path: suspect for suspect in sorted(suspects, key=lambda s: s.place.offset, reverse=True)}
    for path, suspect in first.items():
        error = suspect.error
        if error is not None and error.kind == "no access":
            faults[path] = FileFault(Code.FILE_UNREADABLE, error.reason)
        elif isinstance(error, OtherItemError):
            faults[path] = FileFault.contradicts(f"{suspect.fqn}: {error.reason}")
        elif why := _another_archive(suspect, metadata, items):
            faults[path] = FileFault.contradicts(why)
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


def end_of(item: Item) -> Part:
    """The bytes that show whether an item is in its place."""
    end = item.offset + item.length
    return (item.path, item.offset, item.offset + MAGIC) if item.zstd else (item.path, end - END, end)
