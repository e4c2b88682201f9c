"""torchsnapshot: `.snapshot_metadata`, which lists every value of every rank, and the files of the values.

    .snapshot_metadata              see `manifest`: JSON
    batched/{UUID}                  the tensors of a rank, back to back
    {RANK}/{PATH}                   one tensor, or one object by torch.save
    sharded/{PATH}_{OFFSETS}        a piece of a sharded tensor
    replicated/{PATH}               what all ranks have; written by one of them

A tensor that is neither sharded nor replicated is each rank's own, as torchsnapshot restores it. For the model and the
optimizers the lowest rank's is taken, with a note; elsewhere every rank's is kept.

Source: torchsnapshot/snapshot.py, manifest.py, io_preparer.py, batcher.py of 0.1.0; checked on a snapshot of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.location import check_stays_inside
from ckptools.formats import torch_file
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, file_now
from ckptools.formats.shared.merge import Merge, put
from ckptools.formats.torch_checkpointing.items import check_cover, with_lost
from ckptools.formats.torchsnapshot.manifest import METADATA, SnapshotManifest, read_manifest
from ckptools.formats.torchsnapshot.rank_tree import RankTrees, StoredFile
from ckptools.model.checkpoint import Checkpoint, Fact, ModuleOrder, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of, leaf_at, tensors_in
from ckptools.text import few, plural, spans
from ckptools.training_state.rank_values import Shared
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "torchsnapshot"
READS = "torchsnapshot: a folder with .snapshot_metadata, and the files of tensors and objects that it names"
KNOWN_BY = ".snapshot_metadata in a folder; any file below it in batched/, sharded/, replicated/ or a rank's folder"
TRIED = ("torchsnapshot 0.1.0",)
JOINS = ("model", "optimizer", "rest")

FOLDERS = ("batched", "sharded", "replicated")
AS_LISTED = ModuleOrder(True, "the manifest keeps the order of a state dict")
MAX_LISTED = 1 << 16


def detect(path: Path) -> bool:
    """A folder with the metadata, that file, or a file below the folder."""
    return _root(path) is not None


def _root(path: Path) -> Path | None:
    """The folder of the snapshot that a path is, or that a file lies in."""
    if path.is_dir():
        return path if (path / METADATA).is_file() else None
    if path.name == METADATA:
        return path.parent if path.is_file() else None
    tops = [p for p in path.parents if p.name in FOLDERS or p.name.isdecimal()]
    above = next((top.parent for top in tops if (top.parent / METADATA).is_file()), None)
    return above if path.is_file() else None


def read(path: Path, options: Options) -> Checkpoint:
    """Open the snapshot in a folder, or that a file belongs to.

    Raises:
        ReadError: its metadata cannot be read.
        UnsafePathError: a file is a link out of the folder.
    """
    folder = _root(path) or path.parent
    if options.only_this_file and not path.is_dir() and path.name != METADATA:
        return _alone(path, folder, options)
    builder, metadata = CheckpointBuilder(NAME, folder), folder / METADATA
    if not options.follow_symlinks:
        check_stays_inside(metadata, folder)
    manifest = read_manifest(metadata)
    if not manifest.entries:
        raise ReadError(metadata, "lists nothing")
    trees, merge = RankTrees(manifest, folder, options), Merge()
    tree = merge.trees([(rank, trees.of_rank(rank)) for rank in manifest.entries])
    tree, kept = _of_lowest_rank(_with_lost(tree, trees.lost), trees.own)
    found = rank_checks.compare_ranks(merge, tree)
    files = trees.files.items()
    builder.problems += [
        *_ranks_lacking(manifest),
        *(p for named in files for p in _check_file(*named)),
        *trees.problems,
    ]
    builder.add_rank_values(found)
    builder.unequal |= {key: values for key in kept if len(values := merge.values(key)) > 1}
    if kept:
        what = f"{plural(len(kept), 'tensor')} of model and optimizer are each rank's own by {METADATA}"
        text = f"{what}; the lowest rank's are taken: {few(list(map(fqn_of, kept)), 3)}"
        builder.problems.append(Problem(Code.KEPT_AS_SAVED, text))
    builder.problems += check_cover(tensors_in(found.tree))
    builder.add_read(1, manifest.nbytes)
    builder.add_saved(trees.saved.values())
    listed = [file_now(metadata, None, "metadata", "read"), *(_listed(*named) for named in files)]
    return builder.checkpoint(
        name=folder.absolute().name or "checkpoint",
        saved_as=f"torchsnapshot {manifest.version[:20]}",
        tree=found.tree,
        files=sorted(listed, key=lambda f: -1 if f.rank is None else f.rank),
        world_size=Fact(manifest.world_size, (METADATA,)),
        step=find_step(folder, find_sections(found.tree)),
        module_order=AS_LISTED,
        bytes_expected=sum(file.needed or file.size or 0 for _, file in files) + manifest.nbytes,
    )


def _alone(path: Path, folder: Path, options: Options) -> Checkpoint:
    if not torch_file.detect(path):  # an object can be read without the metadata, tensors cannot
        text = f"is one file of a snapshot, whose {METADATA} alone says what it holds; open the folder {folder}"
        raise ReadError(path, text)
    made = torch_file.read(path, options)
    problem = Problem(Code.ONE_OF_SEVERAL, f"{path.name} is one file of a snapshot, and only this one is read")
    return replace(made, problems=(problem, *made.problems))


def _rank_of(file: StoredFile) -> int | None:
    """The rank whose values a file holds; None where several share it."""
    return next(iter(file.ranks)) if len(file.ranks) == 1 else None


def _listed(location: str, file: StoredFile) -> RankFile:
    part = location.split("/")[0]
    if file.size is None:
        return RankFile(file.path, _rank_of(file), part, "missing", 0, None)
    return RankFile(file.path, _rank_of(file), part, "read" if file.is_sound else "cut", file.size, file.modified)


def _check_file(location: str, file: StoredFile) -> Iterator[Problem]:
    """A file that is missing, cut, or longer than its content."""
    content, rank, ranks = few(list(dict.fromkeys(file.holds)), 2), _rank_of(file), tuple(sorted(file.ranks))
    if file.size is None:
        # A lost tensor leaves a gap, a lost object does not.
        name = file.holds[0] if file.needed is None else None
        text = f"no file {location}, which holds {content}"
        yield Problem(Code.FILE_MISSING, text, rank, name, ranks=ranks)
    elif file.needed is not None and file.size < file.needed:
        text = f"{location} is cut short: {file.size} bytes of {file.needed}; it holds {content}"
        yield Problem(Code.FILE_CUT, text, rank, ranks=ranks)
    elif file.needed is not None and file.size > file.needed:
        text = f"{location} has {file.size} bytes, and what lies in it takes {file.needed}: it is another file"
        yield Problem(Code.METADATA_CONTRADICTS, text, rank, ranks=ranks)
    if file.bad is not None:
        yield file.bad


def _ranks_lacking(manifest: SnapshotManifest) -> Iterator[Problem]:
    """Ranks without entries; each should list its containers at least."""
    lacking = [rank for rank in range(min(manifest.world_size, MAX_LISTED)) if rank not in manifest.entries]
    if lacking:
        text = f"{METADATA} lists nothing of rank {spans(lacking)} of {manifest.world_size}"
        yield Problem(Code.METADATA_CONTRADICTS, text, lacking[0], ranks=tuple(lacking))


def _with_lost(tree: Any, lost: Mapping[KeyPath, Sequence[Shard]]) -> Any:
    """Add the pieces in lost files to the merged tree."""
    for path, shards in lost.items():
        tensor = leaf_at(tree, path)
        if isinstance(tensor, Tensor):
            tree = put(tree, path, with_lost(tensor, shards))
    return tree


def _of_lowest_rank(tree: Any, own: Mapping[KeyPath, None]) -> tuple[Any, list[KeyPath]]:
    """The merged tree with one rank's tensor where ranks have their own in model or optimizer; and the key paths."""
    shared, kept = Shared(find_sections(tree)), []
    for path in own:
        tensor = leaf_at(tree, path)
        if not isinstance(tensor, Tensor) or not shared.holds(path):
            continue
        ranks = [shard.rank for shard in tensor.shards if shard.rank is not None]
        if len(set(ranks)) > 1:
            tree = put(tree, path, replace(tensor, shards=tensor.on_rank(min(ranks))))
            kept.append(path)
    return tree, kept
