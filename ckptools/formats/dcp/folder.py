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

from ckptools.formats.dcp.files import DataFile, by_rank, check_data_files, find_data_files, metadata_files, stray_files
from ckptools.formats.dcp.items import ItemReader
from ckptools.formats.dcp.metadata import Metadata
from ckptools.formats.dcp.metadata_reader import read_metadata
from ckptools.formats.dcp.objects import read_objects
from ckptools.formats.dcp.tensors import read_tensors
from ckptools.formats.dcp.tree import ContradictionError, nest
from ckptools.formats.options import Options
from ckptools.formats.shared.merge import Merge
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
        ranks: who wrote a file.
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
    ranks: tuple[int, ...]
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
    holds = _holds(metadata)
    here = find_data_files(folder, _needed(metadata, holds), options.follow_symlinks)
    items = ItemReader(folder)
    merge = Merge()
    try:
        tensors, problems = read_tensors(metadata, here, items, options.all_ranks)
        paths = {fqn: path for one in metadata for fqn, path in (one.paths or {}).items()}
        objects, lost = read_objects(metadata, here, items, options.all_ranks, merge, paths)
    finally:
        items.close()
    leaves = {**tensors, **objects}
    flat = {fqn: leaves[fqn] for one in metadata for fqn in one.order}
    tree, contradiction = _nested(flat, paths)
    found = RankValues(tree, tuple(merge.problems), (), {}, {})
    if not any(p.severity == "error" for p in contradiction):  # else the tree has other paths
        found = compare_ranks(merge, tree)
    problems = [*check_data_files(here, holds), *problems, *lost, *found.problems, *contradiction]
    return Folder(
        path=folder,
        tree=found.tree,
        flat=flat,
        files=tuple(_files(metadata, here)),
        problems=(*problems, *stray_files(folder, here)),
        names=tuple(dict.fromkeys(n for one in metadata for n in one.names) | items.names),
        writer=metadata[0].writer,
        ranks=tuple(sorted({f.rank for f in here.values() if f.rank is not None})),
        extra=metadata[0].extra,
        differing=found.differing,
        per_rank=found.per_rank,
        unequal=found.unequal,
        bytes_expected=sum(one.nbytes for one in metadata) + sum(f.needed for f in here.values()),
        files_read=len(metadata) + len(items.files_read),
        bytes_read=sum(one.nbytes for one in metadata) + items.bytes_read,
    )


def _holds(metadata: Sequence[Metadata]) -> dict[str, list[str]]:
    """The fqns of what each file holds, tensors first; the files in rank order."""
    holds: dict[str, dict[str, None]] = {}
    everything = [item for one in metadata for item in one.stored.items()]
    for (fqn, _), stored in sorted(everything, key=lambda item: item[0][1] is None):
        holds.setdefault(stored.file, {})[fqn] = None
    return {file: list(holds[file]) for file in sorted(holds, key=by_rank)}


def _needed(metadata: Sequence[Metadata], files: Iterable[str]) -> dict[str, int]:
    """Bytes that each file must have at least."""
    needed = dict.fromkeys(files, 0)
    for one in metadata:
        for stored in one.stored.values():
            needed[stored.file] = max(needed[stored.file], stored.offset + stored.length)
    return needed


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


def _files(metadata: Sequence[Metadata], here: Mapping[str, DataFile]) -> Iterator[RankFile]:
    for one in metadata:
        yield RankFile(one.path, one.rank, "metadata" if one.rank is not None else "", "read", one.nbytes, one.modified)
    yield from (file.rank_file() for file in here.values())
