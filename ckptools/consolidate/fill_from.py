"""Regions that are missing or damaged, taken from another checkpoint of the same run; refused where it is of another.

Files cannot prove that two checkpoints are of one run. What they state is compared, every difference is a refusal, and
what they do not state is said: it stays the user's word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptools.consolidate.publishing.source_records import without_damaged
from ckptools.errors import RefusedError, UsageError
from ckptools.files.location import location, real_path
from ckptools.formats.open import open_again
from ckptools.formats.options import Options
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover, cover_problem
from ckptools.model.provenance import Origin
from ckptools.model.records import grouped
from ckptools.model.regions import Box
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of, walk
from ckptools.model.values import describe_for_error
from ckptools.tensor_io.checksums import Record
from ckptools.text import and_others, few, plural

RUN_NAMES = ("run_name", "run_id", "experiment_name", "wandb_id")
"""Keys whose values name a run. Source: Composer's state (`run_name`); names of trainers' own states."""

MOST = 3
"""Names in a refusal."""

RunNames = tuple[dict[str, Any], dict[str, Any]]
"""Names of the run that each of the two checkpoints states, by key."""

ToWrite = Callable[[Checkpoint], Iterable[tuple[KeyPath, Tensor]]]


@dataclass
class Donor:
    """Another checkpoint of the run, and what was taken of it.

    Attributes:
        tensors: those to write, by key path.
        proven: what both checkpoints state alike.
        unproven: what neither or only one of them states.
        damage: its records whose checksums do not match.
        taken: regions that were taken, by key path in the output.
    """

    checkpoint: Checkpoint
    tensors: Mapping[KeyPath, Tensor]
    proven: tuple[str, ...]
    unproven: tuple[str, ...]
    damage: Mapping[Record, int] = field(default_factory=dict)
    taken: dict[KeyPath, tuple[Box, ...]] = field(default_factory=dict)

    @property
    def origin(self) -> Origin:
        """What it is called, its format, step and world size."""
        return origin_of(self.checkpoint)

    def fill(self, tensor: Tensor, source: KeyPath, at: KeyPath) -> Tensor:
        """The tensor with its gaps filled from the one at the same key path; itself if that lacks any of them."""
        other = self.tensors.get(source)
        if other is None:
            return tensor
        other, _ = without_damaged(other, fqn_of(source), self.damage)
        gaps = cover(tensor.shape, tensor.found_boxes).gaps
        parts = [part for gap in gaps for part in _parts(gap, other)]
        made = replace(tensor, shards=(*tensor.found, *parts))
        if not parts or cover_problem(made, fqn_of(source)) is not None:
            return tensor
        self.taken[at] = gaps
        return made

    def note(self) -> str:
        """What was compared, and what could not be."""
        unproven = f"; NOT provable: {'; '.join(self.unproven)}" if self.unproven else ""
        return f"--fill-from {self.origin}: of the same run as far as files say: {'; '.join(self.proven)}{unproven}"


def origin_of(checkpoint: Checkpoint) -> Origin:
    """The origin that an output states of a checkpoint."""
    step = checkpoint.step.value if checkpoint.step.agree and type(checkpoint.step.value) is int else None
    return Origin(checkpoint.name, checkpoint.format, step, checkpoint.world_size.exact)


def open_donor(checkpoint: Checkpoint, given: str | Path, to_write: ToWrite) -> Donor:
    """Open another checkpoint with the options of the first, and refuse one that is not of the same run.

    `to_write` yields the tensors of a checkpoint that are to be written, by key path.

    Raises:
        RefusedError: it is of another run or architecture, or the same checkpoint.
        ReadError: it cannot be opened.
    """
    options = replace(checkpoint.options or Options(), files=(), only_this_file=False, ranks=None, said={})
    other = open_again(location(given), options)
    if _real_files(checkpoint) & _real_files(other):
        raise RefusedError(other.path, "--fill-from: shares files with the checkpoint that is to be filled")
    try:
        mine, theirs = dict(to_write(checkpoint)), dict(to_write(other))
    except UsageError as error:
        raise RefusedError(other.path, f"--fill-from: is not of the same run: {error.reason}") from error
    names = _run_names(checkpoint), _run_names(other)
    differences = [*_facts_that_differ(checkpoint, other, names), *_tensors_that_differ(mine, theirs)]
    if differences:
        others = and_others(len(differences) - 1)
        raise RefusedError(other.path, f"--fill-from: is not of the same run: {differences[0]}{others}")
    return Donor(other, theirs, *_proofs(checkpoint, other, names, len(mine)))


def _real_files(checkpoint: Checkpoint) -> set[Path]:
    return {real_path(file.path) for file in checkpoint.files if file.is_here}


def _parts(gap: Box, other: Tensor) -> Iterator[Shard]:
    """Parts of the other tensor's shards that hold a gap; of replicas each, so that they are compared."""
    for shard in other.found:
        common = gap.intersect(shard.box)
        if common is None or shard.encoded is not None:
            continue
        inside = Box(tuple(c - s for c, s in zip(common.offsets, shard.box.offsets, strict=True)), common.sizes)
        yield shard.part(inside, common)


# -- is it of the same run? -------------------------------------------------------------------------------------------


def _facts_that_differ(one: Checkpoint, other: Checkpoint, names: RunNames) -> Iterator[str]:
    """Facts that two checkpoints of one run have in common, and these have not."""
    if one.format != other.format:
        yield f"it is saved as {other.format}, the other as {one.format}"
    worlds = one.world_size.exact, other.world_size.exact
    if None not in worlds and worlds[0] != worlds[1]:
        yield f"{plural(worlds[1] or 0, 'rank')} saved it, and {plural(worlds[0] or 0, 'rank')} the other"
    mine, theirs = names
    for key in mine.keys() & theirs.keys():
        if mine[key] != theirs[key]:
            yield f"its {key} is {describe_for_error(theirs[key])}, the other's {describe_for_error(mine[key])}"


def _tensors_that_differ(mine: Mapping[KeyPath, Tensor], theirs: Mapping[KeyPath, Tensor]) -> Iterator[str]:
    for words, missing in (("lacks", mine.keys() - theirs.keys()), ("has besides", theirs.keys() - mine.keys())):
        if missing:
            listed = sorted(map(fqn_of, missing))
            yield f"it {words} {plural(len(listed), 'tensor')}: {few(listed, MOST)}"
    for path, tensor in mine.items():
        if path in theirs:
            yield from _unlike(fqn_of(path), tensor, theirs[path])


def _unlike(fqn: str, mine: Tensor, theirs: Tensor) -> Iterator[str]:
    """The first way in which two tensors of one name are declared or cut otherwise."""
    for what in ("shape", "dtype", "kind", "placements", "mesh"):
        found = getattr(theirs, what), getattr(mine, what)
        if found[0] != found[1]:
            yield f"{what} of {fqn}: {describe_for_error(found[0])}, the other's {describe_for_error(found[1])}"
            return
    cut = [grouped((s for s in tensor.found if s.box.numel), lambda s: s.rank) for tensor in (mine, theirs)]
    for rank in cut[0].keys() & cut[1].keys() - {None}:
        boxes = [sorted({s.box for s in by_rank[rank]}) for by_rank in cut]
        if boxes[0] != boxes[1]:
            yield f"rank {rank} has {boxes[1][0]} of {fqn}, and {boxes[0][0]} in the other"
            return


def _run_names(checkpoint: Checkpoint) -> dict[str, Any]:
    """Names of the run that a checkpoint states, by key."""
    leaves: Iterable[tuple[KeyPath, Any]] = walk(checkpoint.tree)
    return {str(path[-1]): leaf for path, leaf in leaves if path and path[-1] in RUN_NAMES and isinstance(leaf, str)}


def _proofs(
    one: Checkpoint, other: Checkpoint, names: RunNames, tensors: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What both state alike, and what is not provable."""
    proven = [f"names, shapes, dtypes and layout of {plural(tensors, 'tensor')}"]
    unproven = ["that values of two saves fit together"]
    if one.world_size.exact is not None and other.world_size.exact is not None:
        proven.append(f"world size {one.world_size.exact}")
    else:
        unproven.append("world size")
    shared = sorted(names[0].keys() & names[1].keys())
    if shared:
        proven += [f"{key} {describe_for_error(names[0][key])}" for key in shared]
    else:
        unproven.append("the run's name, which its files do not state")
    return tuple(proven), tuple(unproven)
