"""Read one DCP folder into a tree: its metadata, its files, and every chunk in its place.

Formats with such folders inside (`recipe`, Megatron) use `read_folder` too.

DCP writes one copy of replicated data, so a tensor's shard names the rank that wrote it, and a buffer that differs
between ranks has only one copy. The files show which ranks wrote, not how many ranks there were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import add, attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.formats.dcp.files import (
    by_rank,
    check_data_files,
    check_sizes,
    check_strays,
    compare_steps,
    find_data_files,
    metadata_files,
    names_in,
    other_data_files,
    other_files,
    with_faults,
)
from ckptools.formats.dcp.items import ItemReader
from ckptools.formats.dcp.metadata import ContradictionError, DcpMetadata, StoredItem, nest, read_metadata
from ckptools.formats.dcp.tensors import read_objects, read_tensors
from ckptools.formats.options import Options
from ckptools.formats.rank_search.rank_checks import compare_ranks
from ckptools.formats.shared.checkpoint_builder import RankDifferences, StatedFile
from ckptools.formats.shared.merge import Merge
from ckptools.formats.shared.provenance import of_folder
from ckptools.model.facts import FILES_FOUND, Fact, ModuleOrder, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import leaf_at
from ckptools.text import KeyPath
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import COUNTERS

PLANNED = ModuleOrder(False, "DCP lists tensors as the plans of its ranks met")
"""Rank 0 merges the plans of all ranks, and chooses the writer of a replica by size (`dedup_save_plans`)."""


@dataclass(frozen=True)
class Folder:
    """The content of a DCP folder.

    Attributes:
        tree: the nested state if the metadata has paths, else the flat one.
        flat: the same leaves by fqn.
        files: the metadata, then every data file that it names, by rank.
        names: dotted names that its pickles mention.
        writer: the torch version that wrote it, by the names of its classes.
        writers: ranks that wrote a file.
        extra: attributes of the metadata that torch does not have, such as Megatron's `mcore_data`.
        differing: key paths of objects that differ between ranks, if each rank wrote its own metadata.
        per_rank: each rank's value at such a key path, and each rank's random states and positions in the data.
        unequal: the same for values that all ranks should share, or that only some ranks have.
        step: the step of most files, if files are of different saves.
        bytes_expected: lower bound for the total size of its files.
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
    step: Fact | None
    bytes_expected: int
    files_read: int
    bytes_read: int


def read_folder(folder: Path, options: Options) -> Folder:
    """Read a DCP folder: its metadata and objects; with all ranks, also the source of every tensor.

    Raises:
        ReadError: there is no metadata, or it is damaged.
        UnsafePathError: it leads out of the folder.
    """
    metadata = [read_metadata(path, rank) for path, rank in metadata_files(folder, options.follow_symlinks)]
    if (record := of_folder(folder, names_in(folder), options.follow_symlinks)) is not None:
        options.said[metadata[0].path] = record
    last = _last_items(metadata)
    here = find_data_files(folder, {name: item.end for name, item in last.items()}, options.follow_symlinks)
    items = ItemReader(folder, {chunk: pickle for one in metadata for chunk, pickle in one.bare.items()})
    paths = {fqn: path for one in metadata for fqn, path in (one.paths or {}).items()}
    everything = options.all_ranks and options.every_item
    try:
        faults, odd = check_sizes(here, last, items, metadata[0].longer)
        while True:  # repeated until no further file contradicts the metadata
            here, merge = with_faults(here, faults), Merge()
            tensors = read_tensors(metadata, here, items, everything)
            objects, lost, suspects = read_objects(metadata, here, items, everything, merge, paths)
            faults = other_files([*tensors.suspects, *suspects], metadata, items)
            if not faults:
                break
    finally:
        items.close()
    empty, stray = other_data_files(folder, here)
    files = dict(sorted({**here, **empty}.items(), key=lambda named: by_rank(named[0])))
    ranks = tuple(sorted({file.rank for file in files.values() if file.rank is not None}))
    all_left_files = not stray and (bool(empty) or _one_file_each(metadata))
    leaves = {**tensors.by_fqn, **objects}
    flat = {fqn: leaves[fqn] for one in metadata for fqn in one.order}
    tree, contradiction = _nested(flat, paths)
    found = RankDifferences(tree, tuple(merge.problems), (), {}, {})
    if not any(p.severity == "error" for p in contradiction):  # an error means other key paths in the tree
        found = compare_ranks(merge, tree)
    problems = [*check_data_files(here, lambda file: _names_in(file, metadata)), *odd, *tensors.problems, *lost]
    counters = _counters(objects, metadata, here)
    mixed, step = compare_steps(tensors.by_fqn, counters, {file.path: file.rank for file in here.values()})
    return Folder(
        path=folder,
        tree=found.tree,
        flat=flat,
        files=(*(one.rank_file for one in metadata), *(file.listed(read=tensors.all_seen) for file in files.values())),
        problems=(*problems, *mixed, *found.problems, *contradiction, *check_strays(stray)),
        names=tuple(dict.fromkeys(n for one in metadata for n in one.names) | items.names),
        writer=metadata[0].writer,
        writers=Writers(ranks, all_left_files and ranks == tuple(range(len(ranks)))),
        extra=metadata[0].extra,
        differing=found.differing,
        per_rank=found.per_rank,
        unequal=found.unequal,
        step=step,
        bytes_expected=sum(one.nbytes for one in metadata) + sum(f.needed for f in here.values()),
        files_read=len(metadata) + len(items.files_read),
        bytes_read=sum(one.nbytes for one in metadata) + items.bytes_read,
    )


def _counters(
    objects: Mapping[str, Any], metadata: Iterable[DcpMetadata], here: Mapping[str, StatedFile]
) -> list[tuple[Path, int]]:
    """Objects that count steps, with their files."""
    names = (*COUNTERS, "last_epoch")
    counts = {fqn: v for fqn, v in objects.items() if type(v) is int and fqn.rpartition(".")[2] in names}
    return [
        (file.path, value)
        for one in metadata
        for fqn, value in counts.items()
        for i in one.stored.items_of(fqn)
        if (file := here.get(one.stored.files[i])) is not None
    ]


def _last_items(metadata: Sequence[DcpMetadata]) -> dict[str, StoredItem]:
    """The last item of each file, by its end; the files in rank order."""
    last: dict[str, StoredItem] = {}
    for one in metadata:
        stored, ends = one.stored, list(map(add, one.stored.starts, one.stored.lengths))
        for file, items in stored.by_file().items():
            item = stored[max(items, key=ends.__getitem__)]
            last[file] = max(last.get(file, item), item, key=attrgetter("end"))
    return {file: last[file] for file in sorted(last, key=by_rank)}


def _nested(flat: dict[str, Any], paths: Mapping[str, KeyPath]) -> tuple[dict[str, Any], list[Problem]]:
    """The DCP's state as nested containers; or flat, with a problem that says why."""
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


# -- the world size, as far as it is known -----------------------------------------------------------------------------
# A rank with one file for all of its items writes it even without items (0 bytes, not in the metadata), so such files
# show all ranks. If each item has a file of its own, a rank without items writes none, and the files show a minimum.
# Source: torch/distributed/checkpoint/filesystem.py, `write_data`.

STATED = (("state", "metadata", "world_size"), ("metadata", "world_size"))
"""Key paths at which a state records the world size."""


class Writers(NamedTuple):
    """The ranks that wrote files of a DCP.

    Attributes:
        all: whether there are no other ranks.
    """

    ranks: tuple[int, ...] = ()
    all: bool = True

    def __or__(self, other: object) -> Writers:
        """Union for two folders of one checkpoint."""
        assert isinstance(other, Writers)
        return Writers(tuple(sorted({*self.ranks, *other.ranks})), self.all and other.all)


def _one_file_each(metadata: Iterable[DcpMetadata]) -> bool:
    """Whether a file has items of several names, so that each rank has one file for all of its items."""
    first: dict[str, str] = {}
    listed = chain.from_iterable(zip(one.stored.files, one.stored.fqns, strict=True) for one in metadata)
    return any(first.setdefault(file, fqn) != fqn for file, fqn in listed)


def _names_in(file: str, metadata: Sequence[DcpMetadata]) -> list[str]:
    """The fqns in a file, tensors first."""
    found: dict[str, None] = {}
    for objects in (False, True):
        for stored in (one.stored for one in metadata):
            items = stored.by_file().get(file, ())
            found |= dict.fromkeys(stored.fqns[i] for i in items if (stored.offsets[i] is None) is objects)
    return [*found]


def world_size_of(writers: Writers, tree: Mapping[Any, Any]) -> Fact:
    """The world size: as the state records it, or at least the ranks with files or RNG states."""
    files = max(writers.ranks, default=0) + 1
    for path in STATED:
        stated = leaf_at(tree, path)
        if type(stated) is int and stated > 0:
            source = ".".join(path)
            return Fact(stated, (source,)) if stated >= files else Fact(files, (FILES_FOUND, source), agree=False)
    lists = [s.value for s in find_sections(tree) if s.kind == "rng" and isinstance(s.value, list)]
    if (states := max(map(len, lists), default=0)) > files:
        return Fact(states, ("RNG states",), at_least=True)
    return Fact(files, (FILES_FOUND,), at_least=not writers.all)
