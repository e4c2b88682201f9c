"""Reading of one DCP folder into a tree: its metadata, its files, and every chunk in its place.

Formats that keep such folders inside of their own (Accelerate, Megatron) use `read_folder` too.

DCP writes one copy of what several ranks hold alike, so a tensor's shard names the rank that wrote it, and of a buffer
that differs between ranks only one copy exists. The files show which ranks wrote, not how many ranks there were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import add, attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.opening import File, content_of, head_of, read_json, reading
from ckptools.files.zip_archive import MAX_PICKLE
from ckptools.formats.dcp.files import (
    METADATA,
    DataFile,
    by_rank,
    check_data_files,
    check_sizes,
    check_strays,
    compare_steps,
    find_data_files,
    lacks_metadata,
    metadata_files,
    names_in,
    other_data_files,
    other_files,
    with_faults,
)
from ckptools.formats.dcp.items import PICKLE, ItemReader
from ckptools.formats.dcp.metadata import ContradictionError, DcpMetadata, StoredItem, nest, read_metadata
from ckptools.formats.dcp.tensors import read_objects, read_tensors
from ckptools.formats.options import Options
from ckptools.formats.rank_search.rank_checks import compare_ranks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault, RankDifferences
from ckptools.formats.shared.companions import Companion, CompanionFiles, unlike_states
from ckptools.formats.shared.merge import Merge
from ckptools.formats.shared.provenance import of_folder
from ckptools.model.checkpoint import Checkpoint, Fact, ModuleOrder, RankFile
from ckptools.model.problems import Code, Problem, Severity
from ckptools.model.tree import KeyPath, leaf_at
from ckptools.pickles.machine import Machine, load_checked
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import COUNTERS, find_step

PLANNED = ModuleOrder(False, "DCP lists tensors as the plans of its ranks met")
"""Rank 0 merges the plans of all ranks, and chooses by size who saves a replica (`dedup_save_plans`)."""


@dataclass(frozen=True)
class Folder:
    """The content of a DCP folder.

    Attributes:
        tree: the nested state where the metadata has paths, else the flat one.
        flat: the same leaves by fqn.
        files: the metadata, then every data file that it names, by rank.
        names: dotted names that its pickles mention.
        writer: which torch wrote it, by the names of its classes.
        writers: ranks that wrote a file.
        extra: attributes of the metadata that torch does not have, such as Megatron's `mcore_data`.
        differing: key paths of objects that differ between ranks, where each wrote its own metadata.
        per_rank: what each rank has at such a key path, and of random states and positions in the data.
        unequal: the same where all ranks should have one value, or only some have any.
        step: that of most files, where files are of different saves.
        bytes_expected: bytes that its files together have at least.
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
        while True:  # until no file that was read turns out to be another than that of the metadata
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
    if not any(p.severity == "error" for p in contradiction):  # else the tree has other paths
        found = compare_ranks(merge, tree)
    problems = [*check_data_files(here, lambda file: _names_in(file, metadata)), *odd, *tensors.problems, *lost]
    counters = _counters(objects, metadata, here)
    mixed, step = compare_steps(tensors.by_fqn, counters, {file.path: file.rank for file in here.values()})
    return Folder(
        path=folder,
        tree=found.tree,
        flat=flat,
        files=(*(one.rank_file for one in metadata), *(file.rank_file(tensors.all_seen) for file in files.values())),
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
    objects: Mapping[str, Any], metadata: Iterable[DcpMetadata], here: Mapping[str, DataFile]
) -> list[tuple[Path, int]]:
    """Objects that count steps, and the files that they lie in."""
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
    """The nested state; or the flat one, with a problem that says why."""
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
# A rank with one file for all of its items leaves it even if it has none (0 bytes, not in the metadata), so such files
# show all ranks. Where each item has a file of its own, a rank without items leaves none, and the files show a minimum.
# Source: torch/distributed/checkpoint/filesystem.py, `write_data`.

STATED = (("state", "metadata", "world_size"), ("metadata", "world_size"))
"""Key paths where a state records the world size."""


class Writers(NamedTuple):
    """The ranks that left files in a DCP.

    Attributes:
        all: whether there are no others.
    """

    ranks: tuple[int, ...] = ()
    all: bool = True

    def __or__(self, other: object) -> Writers:
        """Union for two folders of one checkpoint."""
        assert isinstance(other, Writers)
        return Writers(tuple(sorted({*self.ranks, *other.ranks})), self.all and other.all)


def _one_file_each(metadata: Iterable[DcpMetadata]) -> bool:
    """Whether a file has items of several names, as where each rank has one for all of its items."""
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
    """Return the world size: as the state says, or at least the ranks with files or RNG states."""
    files = max(writers.ranks, default=0) + 1
    for path in STATED:
        stated = leaf_at(tree, path)
        if type(stated) is int and stated > 0:
            source = ".".join(path)
            return Fact(stated, (source,)) if stated >= files else Fact(files, ("files found", source), agree=False)
    lists = [s.value for s in find_sections(tree) if s.kind == "rng" and isinstance(s.value, list)]
    if (states := max(map(len, lists), default=0)) > files:
        return Fact(states, ("RNG states",), at_least=True)
    return Fact(files, ("files found",), at_least=not writers.all)


# -- composite checkpoints: several DCP folders and files, put together into one tree ----------------------------------


def is_dcp(folder: Path) -> bool:
    """Whether a folder has the metadata of a finished DCP."""
    return folder.is_dir() and (folder / METADATA).is_file()


class CompositeBuilder:
    """Collects the parts of one checkpoint, each read by its own format, and builds the `Checkpoint`.

    Attributes:
        tree: every part by its key.
        writers: who wrote a DCP file.
        writer: what wrote the DCP folders.
        nbytes: bytes that the files should have.
        builder: what else was found of all parts.
    """

    def __init__(self, format: str, path: Path, options: Options) -> None:
        self.path, self.options = path, options
        self.tree: dict[str, Any] = {}
        self.files: list[RankFile] = []
        self.writers = Writers()
        self.writer, self.nbytes = "", 0
        self.builder = CheckpointBuilder(format, path)
        self.problems = self.builder.problems

    def check_link(self, path: Path) -> None:
        """Refuse a part that is a link out of the checkpoint.

        Raises:
            UnsafePathError: it is one, and links were not allowed.
        """
        self.options.check_link(path, self.path)

    def add_dcp(self, folder: Path, key: str | None, top: str | None = None) -> None:
        """Add a DCP folder as `tree[key]`, or its top-level parts without a key.

        Args:
            folder: where it is.
            key: its key in this checkpoint.
            top: the folder's only top-level key, which is dropped; None to keep the tree as it is.

        Raises:
            ReadError: it cannot be read.
        """
        self.check_link(folder)
        found = read_folder(folder, self.options)
        self.files += (f._replace(part="/".join(filter(None, (folder.name, f.part)))) for f in found.files)
        self.builder.add_read(found.files_read, found.bytes_read, found.names)
        self.writers |= found.writers
        self.writer = self.writer or found.writer
        self.nbytes += found.bytes_expected
        inner = found.tree.get(top) if top is not None and set(found.tree) <= {top} else found.tree
        if key is None:
            self.tree |= found.tree
        else:
            self.tree[key] = {} if inner is None else inner
        problems = [replace(problem, message=f"{folder.name}: {problem.message}") for problem in found.problems]
        self._add_findings(found, problems, key, None if inner is found.tree else top)

    def _add_findings(
        self, found: Folder | Checkpoint, problems: Iterable[Problem], key: str | None, dropped: str | None
    ) -> None:
        """Add problems and differences of a part below its key, without the top-level key that was dropped."""
        if key is None:
            self.problems += problems
        else:
            prefix = "" if dropped is None else f"{dropped}."
            for problem in problems:
                tensor = None if problem.tensor is None else f"{key}.{problem.tensor.removeprefix(prefix)}"
                self.problems.append(replace(problem, tensor=tensor))
        above, cut = () if key is None else (key,), 0 if dropped is None else 1
        self.builder.differing += ((*above, *path[cut:]) for path in found.differing)
        self.builder.per_rank |= {(*above, *path[cut:]): values for path, values in found.per_rank.items()}
        self.builder.unequal |= {(*above, *path[cut:]): values for path, values in found.unequal.items()}

    def add_dcp_part(self, folder: Path, key: str | None, absent: str, needed: bool = True) -> None:
        """Add a DCP folder as `tree[key]`, or at the top without a key; a problem where it cannot be read.

        Args:
            folder: where it is.
            key: its key in this checkpoint; None for its own top-level parts.
            absent: what to say where there is no such folder.
            needed: whether that is an error; else a warning.

        Raises:
            UnsafePathError: it is a link out of the checkpoint.
        """
        if not is_dcp(folder):
            here = folder.is_dir()
            text = lacks_metadata(folder)
            severity: Severity = "error" if here or needed else "warning"
            self.problems.append(Problem(Code.FILE_MISSING, text if here else absent, None, folder.name, severity))
            return
        try:
            self.add_dcp(folder, key)
        except UnsafePathError:
            raise
        except ReadError as error:
            fault = Fault.of(error, folder / METADATA)
            self.problems.append(fault.problem(f"{folder.name}/{METADATA}", None, folder.name))

    def add_file(self, path: Path, key: str) -> None:
        """Add the content of a torch.save, pickle or JSON file as `tree[key]`, or a problem where it cannot be read.

        Raises:
            UnsafePathError: it is a link out of the checkpoint.
        """
        self.check_link(path)
        with reading(path):
            status = path.stat()
        try:
            found = self._read(path)
        except ReadError as error:
            self.problems.append(Fault.of(error, path).problem(path.name, None, key))
            self.files.append(RankFile(path, None, key, "bad", status.st_size, status.st_mtime))
            return
        self.tree[key] = found
        self.files.append(RankFile(path, None, key, "read", status.st_size, status.st_mtime))
        self.nbytes += status.st_size
        self.builder.add_read(1, 0)

    def _read(self, path: Path) -> Any:
        if path.suffix == ".json":
            self.builder.add_read(0, path.stat().st_size)
            return read_json(path)
        with File(path) as file:
            plain = path.suffix == ".pkl" and file.size > 0 and file.read(0, 1) == PICKLE
            plain = plain and not content_of(head_of(file))
            if plain and file.size > MAX_PICKLE:
                raise ReadError(path, f"has {file.size} bytes; at most {MAX_PICKLE} are read")
            machine = Machine(file.read(0, file.size)) if plain else None
        if machine is not None:  # what `pickle.dump` wrote; tensors in it are foreign objects
            tree = load_checked(machine, path, "pickle")
            self.builder.add_read(0, len(machine.data), (g.dotted for g in machine.globals.values()))
            return tree
        saved = self.options.read_file(path)
        self.builder.add_read(0, saved.bytes_read, saved.names)
        return saved.tree

    def add_parts(self, other: CompositeBuilder) -> None:
        """Add other parts behind these."""
        self.tree |= other.tree
        self.files += other.files
        self.writers |= other.writers
        self.writer = self.writer or other.writer
        self.nbytes += other.nbytes
        self.builder.add(other.builder)

    def add_companions(self, found: CompanionFiles) -> None:
        """Add companion files, without replacing parts."""
        both = [key for key in found.tree if key in self.tree]
        self.tree |= {key: value for key, value in found.tree.items() if key not in both}
        self.problems += [*found.problems, *found.swapped()]
        self.problems += (
            Problem(Code.METADATA_CONTRADICTS, f"{key} is here twice; the DCP folder is read", severity="warning")
            for key in both
        )
        self.files += found.files
        self.nbytes += sum(f.nbytes for f in found.files)
        self.builder.add_read(sum(f.status == "read" for f in found.files), found.bytes_read, found.names)

    def add_checkpoint(self, other: Checkpoint, key: str, top: str | None = None) -> None:
        """Add a checkpoint that was opened on its own as `tree[key]`; `top` is its only top-level key, or as above."""
        dropped = top if top is not None and isinstance(other.tree, dict) and set(other.tree) == {top} else None
        self.tree[key] = other.tree if dropped is None else other.tree[dropped]
        self._add_findings(other, other.problems, key, dropped)
        self.files += (f._replace(part=key) for f in other.files)
        self.writers |= Writers(tuple(range(other.world_size.value or 0)))
        self.nbytes += other.bytes_expected or 0
        self.builder.add_read(other.cost.files, other.cost.nbytes, other.names)

    def add_states(self, key: str, files: Mapping[tuple[str, int], Path]) -> None:
        """Add what each rank has for itself as `tree[key]`; problems where a file cannot be read.

        Files are by the kind of rank, such as `dp`, and its number. The tree has numbers alone where there is one kind.

        Raises:
            UnsafePathError: a file is a link out of the checkpoint.
        """
        found, states = CompanionFiles(), dict[int | str, Any]()
        alone = len({kind for kind, _ in files}) == 1
        self.options.read_ahead([files[one] for one in sorted(files)])
        for (kind, rank), path in sorted(files.items()):
            self.check_link(path)
            state = found.read(Companion(path, key, rank), self.options)
            if found.files[-1].status == "read":
                states[rank if alone else f"{kind}_{rank}"] = state
        found.tree = {key: states} if states else {}
        self.add_companions(found)
        self.problems += unlike_states(key, states)

    def miss_state(self, path: Path, key: str, rank: int, severity: Severity = "error") -> None:
        """Note that a rank's file is missing."""
        self.files.append(RankFile(path, rank, key, "missing", 0, None))
        text = f"no file {path.parent.name}/{path.name}"
        self.problems.append(Problem(Code.FILE_MISSING, text, rank, key, severity))

    def checkpoint(
        self,
        saved_as: str,
        world_size: Fact,
        order: ModuleOrder,
        steps: Iterable[str] | None = None,
        named: Path | None = None,
    ) -> Checkpoint:
        """Build the checkpoint from the parts.

        Args:
            saved_as: for people.
            world_size: as the parts state it; without a value, the DCP files decide.
            order: whether the model's names come in the order of the module, and why.
            steps: keys of the tree that may count steps; None for all.
            named: the path whose names may state the step; by default its own.
        """
        if world_size.value is None:
            world_size = world_size_of(self.writers, self.tree)
        counting = (s for s in find_sections(self.tree) if steps is None or (s.path and s.path[0] in steps))
        return self.builder.checkpoint(
            name=self.path.absolute().name,
            saved_as=saved_as,
            tree=self.tree,
            files=self.files,
            world_size=world_size,
            step=find_step(named or self.path, tuple(counting)),
            module_order=order,
            text_keys=True,
            bytes_expected=self.nbytes,
            all_ranks=self.options.all_ranks,
        )
