"""One DCP folder, read into a tree: its metadata, what of its files is here, and every chunk in its place.

`read_folder` is also what formats are built on that keep such folders inside of their own (Accelerate, Megatron).

DCP writes one copy of what several ranks hold alike, so a tensor's shard names the rank that wrote it, and of a
buffer that differs between ranks only one is here. Which ranks there were, nothing tells: only who wrote a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptools.formats.dcp.files import (
    DataFile,
    by_rank,
    check_data_files,
    check_strays,
    find_data_files,
    metadata_files,
    names_in,
    other_data_files,
    with_faults,
)
from ckptools.formats.dcp.items import ItemReader
from ckptools.formats.dcp.metadata import Metadata, StoredItem
from ckptools.formats.dcp.metadata_reader import read_metadata
from ckptools.formats.dcp.objects import read_objects
from ckptools.formats.dcp.other_files import Suspect, check_sizes, other_files
from ckptools.formats.dcp.tensors import TensorsRead, read_tensors
from ckptools.formats.dcp.tree import ContradictionError, nest
from ckptools.formats.dcp.world_size import Writers, writers_of
from ckptools.formats.options import Options
from ckptools.formats.shared.merge import Merge
from ckptools.formats.shared.provenance import of_folder
from ckptools.formats.shared.rank_checks import RankValues, compare_ranks
from ckptools.model.checkpoint import ModuleOrder, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import KeyPath

PLANNED = ModuleOrder(False, "DCP lists tensors as the plans of its ranks met")
"""Rank 0 puts the ranks' plans together; who saves a replica is chosen by size (`dedup_save_plans`)."""


@dataclass(frozen=True)
class Folder:
    """What a DCP folder holds.

    Attributes:
        path: the folder.
        tree: the nested state where the metadata has its paths, else the flat one.
        flat: the same leaves by fqn.
        files: the metadata, then every data file that it names, by rank.
        problems: what is wrong.
        names: dotted names that its pickles mention.
        writer: which torch wrote it, as far as its classes tell.
        writers: who wrote a file.
        extra: attributes of the metadata that torch does not have, such as Megatron's `mcore_data`.
        differing: key paths of objects that differ between ranks, where each wrote its own metadata.
        per_rank: what each rank has at such a key path, and of random states and positions in the data.
        unequal: the same where all should have one value, or only some have any.
        bytes_expected: bytes that its files together have at least.
        files_read: how many files were opened.
        bytes_read: how much of them was read.
    """

    path: Path
    tree: dict[str, Any] = field(repr=False)
    flat: dict[str, Any] = field(repr=False)
    files: tuple[RankFile, ...] = field(repr=False)
    problems: tuple[Problem, ...]
    names: tuple[str, ...] = field(repr=False)
    writer: str
    writers: Writers
    extra: Mapping[str, Any] = field(repr=False)
    differing: tuple[KeyPath, ...]
    per_rank: Mapping[KeyPath, Mapping[int, Any]] = field(repr=False)
    unequal: Mapping[KeyPath, Mapping[int, Any]] = field(repr=False)
    bytes_expected: int
    files_read: int
    bytes_read: int


def read_folder(folder: Path, options: Options) -> Folder:
    """Read a DCP folder: its metadata and its objects; with all ranks, also where in its item each tensor lies.

    Raises:
        ReadError: there is no metadata, or it is damaged.
        UnsafePathError: it leads out of the folder.
    """
    metadata = [read_metadata(path, rank) for path, rank in metadata_files(folder, options.follow_symlinks)]
    if (told := of_folder(folder, names_in(folder), options.follow_symlinks)) is not None:
        options.said[metadata[0].path] = told
    holds = _holds(metadata)
    last = _last_items(metadata, holds)
    here = find_data_files(folder, {name: item.end for name, item in last.items()}, options.follow_symlinks)
    items = ItemReader(folder)
    paths = {fqn: path for one in metadata for fqn, path in (one.paths or {}).items()}
    try:
        faults, odd = check_sizes(here, last, items)
        here = with_faults(here, faults)
        content = _content(metadata, here, items, options.all_ranks, paths)
        while faults := other_files(content.suspects, metadata, items):
            here = with_faults(here, faults)
            content = _content(metadata, here, items, options.all_ranks, paths)
    finally:
        items.close()
    empty, stray = other_data_files(folder, here)
    files = dict(sorted({**here, **empty}.items(), key=lambda named: by_rank(named[0])))
    ranks = {file.rank for file in files.values() if file.rank is not None}
    leaves = {**content.tensors.by_fqn, **content.objects}
    flat = {fqn: leaves[fqn] for one in metadata for fqn in one.order}
    tree, contradiction = _nested(flat, paths)
    found = RankValues(tree, tuple(content.merge.problems), (), {}, {})
    if not any(p.severity == "error" for p in contradiction):  # else the tree has other paths
        found = compare_ranks(content.merge, tree)
    problems = [*check_data_files(here, holds), *odd, *content.tensors.problems, *content.lost]
    return Folder(
        path=folder,
        tree=found.tree,
        flat=flat,
        files=tuple(_files(metadata, files, content.tensors.all_seen)),
        problems=(*problems, *found.problems, *contradiction, *check_strays(stray)),
        names=tuple(dict.fromkeys(n for one in metadata for n in one.names) | items.names),
        writer=metadata[0].writer,
        writers=writers_of(ranks, {**holds, **{name: [] for name in empty}}, not stray),
        extra=metadata[0].extra,
        differing=found.differing,
        per_rank=found.per_rank,
        unequal=found.unequal,
        bytes_expected=sum(one.nbytes for one in metadata) + sum(f.needed for f in here.values()),
        files_read=len(metadata) + len(items.files_read),
        bytes_read=sum(one.nbytes for one in metadata) + items.bytes_read,
    )


@dataclass(frozen=True)
class _Content:
    """What the data files hold.

    Attributes:
        tensors: by fqn, and what is wrong with them.
        objects: by fqn.
        lost: problems of the objects that are lost.
        suspects: items that are damaged, or not those that the metadata lists.
        merge: what several ranks hold of one object.
    """

    tensors: TensorsRead
    objects: Mapping[str, Any]
    lost: Sequence[Problem]
    suspects: Sequence[Suspect]
    merge: Merge


def _content(
    metadata: Sequence[Metadata],
    here: Mapping[str, DataFile],
    items: ItemReader,
    everything: bool,
    paths: Mapping[str, KeyPath],
) -> _Content:
    merge = Merge()
    tensors = read_tensors(metadata, here, items, everything)
    objects, lost, suspects = read_objects(metadata, here, items, everything, merge, paths)
    return _Content(tensors, objects, lost, [*tensors.suspects, *suspects], merge)


def _holds(metadata: Sequence[Metadata]) -> dict[str, list[str]]:
    """The fqns of what each file holds, tensors first; the files in rank order."""
    holds: dict[str, dict[str, None]] = {}
    everything = [item for one in metadata for item in one.stored.items()]
    for (fqn, _), stored in sorted(everything, key=lambda item: item[0][1] is None):
        holds.setdefault(stored.file, {})[fqn] = None
    return {file: list(holds[file]) for file in sorted(holds, key=by_rank)}


def _last_items(metadata: Sequence[Metadata], files: Iterable[str]) -> dict[str, StoredItem]:
    """The item of each file that ends last."""
    last = {file: StoredItem(file, 0, 0) for file in files}
    for one in metadata:
        for stored in one.stored.values():
            if stored.end > last[stored.file].end:
                last[stored.file] = stored
    return last


def _nested(flat: dict[str, Any], paths: Mapping[str, KeyPath]) -> tuple[dict[str, Any], list[Problem]]:
    """The nested state, or the flat one with the reason."""
    if not paths:
        return flat, []
    try:
        tree, holes = nest(flat.items(), paths)
    except ContradictionError as error:
        text = f"the planner's paths contradict themselves: {error}; names are shown flat"
        return flat, [Problem(Code.METADATA_CONTRADICTS, text)]
    if not holes:
        return tree, []
    places = "1 place in a list is" if holes == 1 else f"{holes} places in lists are"
    return tree, [
        Problem(Code.METADATA_CONTRADICTS, f"{places} None here: DCP saves no empty containers", severity="note")
    ]


def _files(metadata: Sequence[Metadata], here: Mapping[str, DataFile], all_seen: bool) -> Iterator[RankFile]:
    for one in metadata:
        yield RankFile(one.path, one.rank, "metadata" if one.rank is not None else "", "read", one.nbytes, one.modified)
    yield from (file.rank_file(all_seen) for file in here.values())
