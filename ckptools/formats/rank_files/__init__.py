"""Rank files: one torch.save file per rank, or per rank and part.

Composer (`ep0-ba5-rank3.pt`), OLMo (`rank3.pt`), Accelerate (`pytorch_model_fsdp_0_rank3.bin`), verl
(`model_world_size_4_rank_3.pt`, `optim_…`, `extra_state_…`) and everything else that calls torch.save on every rank.
Inside are ShardedTensors (FSDP1) or DTensors (FSDP2, FSDP1 with a device mesh, tensor parallel) whose files state rank
and world size, and plain values that every rank repeats. A lone `…-rank0.pt` without sharded tensors is a complete
checkpoint: only rank 0 wrote (Composer's default; DDP).

One file is enough to know every shape and each rank's part. The siblings' directories are read too, to find missing and
cut ranks, and with few ranks also the rank, world size and step in their pickles. The siblings are read in full when
all ranks are asked for, or when those do not fit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.errors import ReadError, UnsafePathError
from ckptools.formats.options import Options
from ckptools.formats.rank_files import rank_optimizers
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.rank_search.rank_groups import GroupRead, group_in, rank_group, stated_world_size
from ckptools.formats.rank_search.rank_names import RankName, columns, parse, siblings, unfinished_ranks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, in_form, looked_at, was_read
from ckptools.formats.shared.merge import Merge, Ranked
from ckptools.formats.shared.step_beside import find_step_with_beside
from ckptools.formats.wrapped_shards import wrapped_ranks
from ckptools.model.checkpoint import Checkpoint, Fact, GivenNames, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of, tensors_in
from ckptools.text import named_ranks
from ckptools.training_state.parameter_names import AS_SAVED, is_flat_parameter
from ckptools.training_state.sections import Section, find_sections

if TYPE_CHECKING:
    from ckptools.formats.shared.given import Shapes

NAME = "rank_files"
READS = "one torch.save file per rank: Composer, verl, OLMo, Accelerate (FSDP1, FSDP2, HSDP, TP)"
KNOWN_BY = "a rank in the file name, such as ep0-ba5-rank3.pt, or a folder of such files"
TRIED = ("torch 1.13.1 to 2.15.0", "Composer 0.13.5 and 0.14.1", "verl 0.9.1", "torchao 0.18.0", "torchrec 1.8.0")
JOINS = ("model", "optimizer", "rest")

LOCAL = "per-rank .pt, FSDP flat parameters (local state)"

MAX_WORLD = 1 << 16
"""Most ranks that are looked for; no cluster has more."""

FILES_FOUND = ("files found",)
"""Source of a world size that is stated nowhere."""


def detect(path: Path) -> bool:
    """A file with a rank in its name, or a folder that holds such files."""
    if path.is_dir():
        return group_in(path) is not None
    return parse(path) is not None


def read(path: Path, options: Options, by_name: Shapes | None = None) -> Checkpoint:
    """Open the checkpoint that a rank file, or a folder of them, belongs to.

    Flat parameters may have their shapes from an optimizer state in another file (`by_name`).

    Raises:
        ReadError: the file itself cannot be read.
        UsageError: the folder holds several checkpoints.
    """
    builder = CheckpointBuilder(NAME, path)
    found = rank_group(path, options)
    if found is None:
        raise ReadError(path, "no rank in this name, and no rank files in this folder")
    name, group = found
    if len(group) == 1 and options.looks_around and sum(c.level == 0 for c in columns(name.path)) > 1:
        from ckptools.formats.rank_search.sibling_search import siblings_by_content

        group = siblings_by_content(name.path, options.read_file(name.path), options.follow_symlinks) or group
        name = next(n for n in group if n.path == name.path)
    return _opening(builder, name, group, options).checkpoint(by_name)


def read_group(
    path: Path, first: Path, group: Sequence[RankName], options: Options, by_name: Shapes | None = None
) -> Checkpoint:
    """Open the checkpoint of a path: of its `first` file, and the others in its group, which a format has found.

    Shapes as in `read`.

    Raises:
        ReadError: the file itself, or of a folder every one, cannot be read.
    """
    name = next(n for n in group if n.path == first)
    return _opening(CheckpointBuilder(NAME, path), name, group, options).checkpoint(by_name)


def _opening(builder: CheckpointBuilder, name: RankName, group: Sequence[RankName], options: Options) -> _RankGroup:
    """Read the given file; or the first readable one of a folder, so that damaged files are problems."""
    errors: list[ReadError] = []
    for member in group if builder.path.is_dir() else [name]:
        try:
            return _RankGroup(builder, GroupRead(builder.problems, member, group, options))
        except UnsafePathError:
            raise
        except ReadError as error:
            errors.append(error)
    raise errors[0]


class _RankGroup:
    """The files that were read, to be merged into one checkpoint."""

    def __init__(self, builder: CheckpointBuilder, read: GroupRead) -> None:
        self.builder, self.problems, self.read = builder, builder.problems, read
        self.options, self.name, self.group = read.options, read.name, read.group
        self.wrapped = wrapped_ranks(read.saved, read.ranks, read.name.path)

    def checkpoint(self, by_name: Shapes | None) -> Checkpoint:
        world = self._world_size()
        merge = Merge()
        tree = _merged(merge, self._roots())
        sections = find_sections(tree)
        in_parts = rank_optimizers.is_in_parts(merge, sections)
        named = rank_optimizers.named_by_own_models(merge, sections, self.options.names, in_parts)
        if named is not None:
            merge = Merge()
            tree = _merged(merge, named.roots)
        given = None if in_parts or named else self.options.names
        local, notes, assumed = self._flat_shards(tree, by_name, given)
        if self.options.rules is not None:
            from ckptools.formats.rank_files.ruled import join_by_rules
            from ckptools.formats.shared.tensor_parallel import ALL_RANKS, read_rules

            tree, unlike = join_by_rules(self.builder.path, merge, tree, read_rules(self.options.rules), world.value)
            self.problems += unlike
            if world.sources == FILES_FOUND:
                self.problems.append(Problem(Code.ONE_OF_SEVERAL, ALL_RANKS, severity="warning"))
        found = rank_checks.compare_ranks(merge, tree)
        tree = found.tree
        files = tuple(self._files(world.value))
        self.problems += self.wrapped.problems if self.wrapped else ()
        sharded = [t for _, t in tensors_in(tree) if t.sharded]
        sections = find_sections(tree)
        keys = tree if isinstance(tree, dict) else ()
        self.problems += rank_checks.check_files(files, self.read.faults, world.value, bool(sharded), in_parts, keys)
        self.problems += rank_optimizers.lost_parts(files) if in_parts else ()
        self.problems += self._left_out()
        if not (sharded or local):
            self.problems += self._signs_of_more(in_parts, world, sections, all(f.status == "read" for f in files))
        self.problems += () if in_parts else rank_checks.check_lacking(merge, tree, sections)
        self.builder.add_rank_values(found)
        self.problems += rank_checks.check_gathered_rng(sections, merge.differing)
        self.problems += (Problem(Code.LAYOUT_INFERRED, note, None, fqn_of(path)) for path, note in notes.items())
        self.builder.add_saved(self.read.saved.values(), placed=not in_parts)
        self.problems += rank_checks.check_cut_order(tree, self.builder.names)
        plainly = LOCAL if local else _saved_as(sharded, len(self.group), in_parts)
        saved_as = self.wrapped.saved_as if self.wrapped else plainly
        # The number in the path that is the rank counts no steps.
        without_rank = Path(self.name.spelled) if "{rank}" in self.name.spelled else self.name.path
        return self.builder.checkpoint(
            name=_checkpoint_name(self.name),
            saved_as=in_form(saved_as, self.read.saved[self.name.path].form),
            tree=tree,
            files=files,
            world_size=world,
            step=find_step_with_beside(without_rank, sections),
            module_order=AS_SAVED,
            all_ranks=self.read.all_ranks,
            bytes_expected=rank_checks.expected_bytes(files),
            assumed_names=assumed | (named.assumed if named else set()),
            names_given=self.options.names if named else None,
            in_parts=in_parts,
        )

    def _flat_shards(
        self, tree: Any, by_name: Shapes | None, given: GivenNames | None
    ) -> tuple[bool, dict[KeyPath, str], set[str]]:
        """See `resolve_flat_shards`, whose module most rank files do not need."""
        if self.wrapped:
            return self.wrapped.take_apart(tree)
        if given is None and not any(map(_may_be_flat, find_sections(tree))):
            return False, {}, set()
        from ckptools.formats.flat_parameters.shards import resolve_flat_shards

        return resolve_flat_shards(tree, self.read.all_ranks, self.options.shapes, by_name, given)

    def _roots(self) -> dict[KeyPath, Ranked]:
        """The ranks' trees in rank order, by the key path of each part."""
        parts: dict[KeyPath, list[tuple[int, Any]]] = {}
        for name in self.group:
            if name.path in self.read.saved:
                path, rank = (name.part,) if name.part else (), self.read.ranks[name.path]
                saved = self.read.saved[name.path]
                content = self.wrapped.placed(rank, saved.tree) if self.wrapped else saved.content
                parts.setdefault(path, []).append((rank, content))
        return {path: sorted(ranked, key=lambda i: i[0]) for path, ranked in parts.items()}

    def _files(self, world: int) -> Iterable[RankFile]:
        parts = {n.part: n for n in reversed(self.group)}
        here = {(self.read.ranks[n.path], n.part) for n in self.group}
        for name in self.group:
            rank, saved = self.read.ranks[name.path], self.read.saved.get(name.path)
            if saved is not None:
                yield was_read(saved, rank, name.part)
            else:
                yield looked_at(name.path, rank, name.part, self.read.faults, len(self.group))
        alone = len(self.group) == 1
        alone = alone and not any(s.claims for s in self.read.saved.values()) and self.name.world_size is None
        begun = unfinished_ranks(self.name) if self.options.looks_around else ()
        for rank in sorted({*(() if alone else range(min(world, MAX_WORLD))), *begun}):
            for part, name in parts.items():
                if (rank, part) not in here:
                    yield RankFile(name.of_rank(rank, part), rank, part, "missing", 0, None)

    def _left_out(self) -> Iterator[Problem]:
        """A note on other ranks' files beside a single file that was opened alone."""
        alone = self.options.only_this_file and not self.builder.path.is_dir()
        others = [name for name in siblings(self.name) if name.path != self.name.path] if alone else []
        if others:
            ranks = named_ranks({name.rank for name in others})
            text = f"files beside it are of {ranks} by their names; left out by --only-this-file"
            yield Problem(Code.NOT_READ, text, files=tuple(name.path.name for name in others))

    def _signs_of_more(
        self, in_parts: bool, world: Fact, sections: Sequence[Section], every_file: bool
    ) -> Iterator[Problem]:
        """Signs, in the files or the name of a single one, of parameters that are in none of them."""
        from ckptools.formats.rank_search.stage_signs import parts_by_rank, signs_of_more

        yield from () if in_parts else parts_by_rank(self.name.path, sections)
        if not every_file:
            return
        ranked = [(self.read.ranks[path], one.tree) for path, one in self.read.saved.items()]
        yield from signs_of_more(sorted(ranked, key=lambda i: i[0]), in_parts, world.sources != FILES_FOUND)
        if len(self.group) == 1 and self.name.rank > 0 and world.sources == FILES_FOUND:
            text = f"rank {self.name.rank}'s file by its name, and no other rank's is here; they may hold more"
            yield Problem(Code.ONE_OF_SEVERAL, text, severity="warning")

    def _world_size(self) -> Fact:
        """The number of ranks that saved the checkpoint, from the best source."""
        if self.wrapped:
            return self.wrapped.world
        at_least = {w for s in self.read.saved.values() if s.at_least for _, w in s.claims}
        claimed = sorted({w for s in self.read.saved.values() if not s.at_least for _, w in s.claims})
        named = self.name.world_size
        found = len({self.read.ranks[n.path] for n in self.group})
        if len(claimed) > 1:
            self.problems.append(Problem(Code.WORLD_SIZES_DISAGREE, f"sharded tensors speak of world sizes {claimed}"))
        if at_least and max(at_least) > max(claimed, default=0):
            return self._world_of_slices(max(at_least), named, found)
        if claimed:
            agrees = named in (None, claimed[-1]) and len(claimed) == 1
            if named not in (None, claimed[-1]):
                text = f"world size {claimed[-1]} by content, {named} by file name"
                self.problems.append(Problem(Code.WORLD_SIZES_DISAGREE, text))
            return Fact(claimed[-1], ("layout", *(["file name"] if named == claimed[-1] else [])), agrees)
        if named is not None:
            return Fact(named, ("file name",))
        stated = stated_world_size(one.tree for one in self.read.saved.values())
        if stated is not None and found > 1:
            return Fact(stated, ("metadata",))
        return Fact(found, FILES_FOUND)

    def _world_of_slices(self, at_least: int, named: int | None, found: int) -> Fact:
        """The world size where files show a part of it only: as named, or as many as there are files."""
        at_least = max(at_least, 1 + max(self.read.ranks.values()))
        if named is not None and named >= at_least:
            return Fact(named, ("file name",))
        return Fact(found, FILES_FOUND) if found >= at_least else Fact(at_least, ("at least, by its layout",))


def _may_be_flat(section: Section) -> bool:
    """Whether a model has flat parameters, or an optimizer tensors that may be shards of them."""
    if section.kind == "model":
        return any(map(is_flat_parameter, section.value))
    return section.kind == "optimizer" and any(t.kind == "plain" and t.shape for _, t in tensors_in(section.value))


def _merged(merge: Merge, roots: Mapping[KeyPath, Ranked]) -> Any:
    """Merge the ranks of each part, then join the parts."""
    trees = {path: merge.trees(ranked, path) for path, ranked in roots.items()}
    return trees[()] if list(trees) == [()] else {path[0]: tree for path, tree in trees.items()}


def _checkpoint_name(name: RankName) -> str:
    if name.part:
        return name.path.parent.name
    return name.head.rstrip("-_.") or name.path.parent.name or "checkpoint"


def _saved_as(sharded: Sequence[Tensor], files: int, in_parts: bool) -> str:
    if in_parts and not sharded:
        return "per-rank .pt, each with parameters of its own"
    if not sharded:
        return "one .pt, every tensor whole" if files == 1 else "per-rank .pt, every tensor whole"
    kinds = {t.kind for t in sharded}
    meshes = {t.mesh for t in sharded if t.mesh}
    mesh = max(meshes, key=len) if meshes else ()
    shown = f" on a {' x '.join(map(str, mesh))} mesh" if len(mesh) > 1 else ""
    if kinds == {"checkpointable"}:
        return "per-rank .pt, CheckpointableTensor"
    if "tensor_parallel" in kinds:
        return "per-rank .pt, slices joined by --rules"
    if kinds == {"flat_pieces"}:
        return "per-rank .pt, pieces of flattened parameters"
    return "per-rank .pt, " + ("FSDP ShardedTensor" if "sharded_tensor" in kinds else f"DTensor{shown}")
