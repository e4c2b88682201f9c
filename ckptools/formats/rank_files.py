"""Rank files: one torch.save file per rank, or per rank and part.

Composer (`ep0-ba5-rank3.pt`), OLMo (`rank3.pt`), Accelerate (`pytorch_model_fsdp_0_rank3.bin`), verl
(`model_world_size_4_rank_3.pt`, `optim_…`, `extra_state_…`) and any other code that calls torch.save on every rank.
Inside are ShardedTensors (FSDP1) or DTensors (FSDP2, FSDP1 with a device mesh, tensor parallel) whose files state rank
and world size, and plain values that every rank repeats. A lone `…-rank0.pt` without sharded tensors is a complete
checkpoint: only rank 0 wrote (Composer's default; DDP).

One file is enough for every shape and each rank's part. The siblings' directories are read too, to find missing and
cut ranks, and with few ranks also the rank, world size and step in their pickles. The siblings are read in full if
all ranks are asked for, or if those do not fit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptools.errors import ReadError, UnsafePathError, UsageError
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.rank_search.rank_groups import (
    GroupRead,
    group_in,
    rank_group,
    siblings_by_content,
    stated_world_size,
)
from ckptools.formats.rank_search.rank_names import RankName, numbers_in, parse, siblings, unfinished_ranks
from ckptools.formats.shared.checkpoint_builder import (
    CheckpointBuilder,
    find_step_with_beside,
    in_form,
)
from ckptools.formats.shared.merge import Merge, Ranked, put
from ckptools.formats.shared.tensor_parallel import (
    ALL_RANKS,
    GivenRules,
    RankPiece,
    UnlikeError,
    given_rule,
    join,
    read_rules,
)
from ckptools.formats.wrapped_shards import wrapped_ranks
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import FILES_FOUND, Fact, GivenNames, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in, with_leaves
from ckptools.option import spelled
from ckptools.pickles.alike import Alike
from ckptools.text import KeyPath, fqn_of, named_ranks
from ckptools.training_state.optimizers import (
    AS_SAVED,
    UNNAMED,
    Id,
    Naming,
    believed,
    group_ids,
    is_flat_parameter,
    model_for_names,
    name_with,
)
from ckptools.training_state.roles import candidates
from ckptools.training_state.sections import Section, find_sections, is_flat_optimizer, is_optimizer

if TYPE_CHECKING:
    from ckptools.formats.shared.given_names_and_shapes import Shapes


# -- optimizers of ranks with different parameters, named before they are merged ---------------------------------------
# A plain `optimizer.state_dict()` numbers the parameters of its own process from 0, so that in the files of pipeline
# stages one number stands for another parameter on every rank. Each rank's numbers are named by that rank's own model,
# like those of a single file; a parameter without a name is kept apart from other ranks' parameters of that number.
#
# Rank files do not state that each has different parameters. It is inferred if no rank has all of the model: then a
# missing file takes parameters with it, sizes may differ, and a param group has the entries of all ranks.

NO_MODEL = (
    "numbered rank by rank, and no model of each rank is here: nothing proves that a number is one parameter on two "
    "ranks, so it is not joined"
)


def _not_named() -> str:
    ways = f"give the names with {spelled('names')} FROM; {spelled('only', 'model')} writes the model"
    return f"every rank numbers its own parameters, and nothing proves which one this is; {ways}"


class NamedRanks(NamedTuple):
    """The trees of ranks, with names in their optimizers.

    Attributes:
        roots: the trees to merge, by the key path where each is put.
        assumed: parameters whose names are right if groups have the order of that rank's module.
    """

    roots: Mapping[KeyPath, Ranked]
    assumed: frozenset[str]


def named_by_own_models(
    merge: Merge, sections: Sequence[Section], given: GivenNames | None, in_parts: bool
) -> NamedRanks | None:
    """Name each rank's optimizers by that rank's own model, if one number may stand for different parameters.

    Returns:
        None if no optimizer has numbers, or numbers stand for the same parameters on all ranks.

    Raises:
        RefusedError: the given names do not fit a rank's model.
    """
    of_model = [s.path for s in candidates(sections)]
    numbered = [s.path for s in sections if s.kind == "optimizer" and _is_numbered(merge.of_groups(s.path))]
    known = bool(of_model or given)
    optimizers = [path for path in numbered if in_parts or _number_their_own(merge.values(path), known)]
    if not optimizers:
        return None
    models = [merge.values(path) for path in of_model]
    roots, assumed = dict(merge.roots), set[str]()
    for path in optimizers:
        root = merge.root_of(path) or ()
        named: list[tuple[int, Any]] = []
        for rank, content in roots[root]:
            tree = content.tree() if isinstance(content, Alike) else content
            value = merge.values(path).get(rank)
            if value is not None:
                mine = [of[rank] for of in models if rank in of]
                model = model_for_names([m for m in mine if isinstance(m, Mapping)], AS_SAVED)
                own = given if given is None or model is None else _of_one_rank(given, model, rank)
                naming = name_with(value, model, believed(AS_SAVED, model or {}), own)
                assumed |= {naming.names[i] for i in naming.assumed}
                renamed = _renamed(value, naming, rank, _not_named() if models else NO_MODEL)
                tree = with_leaves(tree, {path[len(root) :]: renamed})
            named.append((rank, tree))
        roots[root] = named
    return NamedRanks(roots, frozenset(assumed))


def _is_numbered(optimizers: Mapping[int, Any]) -> bool:
    """Whether every rank has an optimizer's state dict, and some number their parameters."""
    if not all(is_optimizer(o) and not is_flat_optimizer(o) for o in optimizers.values()):
        return False
    return any(type(i) is int for o in optimizers.values() for ids in (*group_ids(o), o["state"]) for i in ids)


def _number_their_own(optimizers: Mapping[int, Any], is_known: bool) -> bool:
    """Whether one number may stand for another parameter on each rank.

    It may if ranks number different counts. Without a model or names from the user, it may also if the moments of one
    number are matrices on one rank and vectors on another, or by checksums: copies have moments in common, stages none.
    """
    if len({tuple(map(len, group_ids(optimizer))) for optimizer in optimizers.values()}) > 1:
        return True
    if is_known:
        return False
    dimensions: dict[tuple[Any, str], int] = {}
    for slot, count in chain.from_iterable(map(_dimensions, optimizers.values())):
        if dimensions.setdefault(slot, count) != count:
            return True
    sums = {frozenset(_stated_checksums(optimizer)) for optimizer in optimizers.values()}
    return len(sums) > 1 and all(one and not one & other for one, other in combinations(sums, 2))


def _dimensions(optimizer: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, str], int]]:
    """Yield the number of dimensions of each moment, by the parameter's number and the moment's name."""
    for number, entry in optimizer["state"].items():
        for slot, moment in entry.items() if isinstance(entry, Mapping) else ():
            if isinstance(moment, Tensor) and moment.kind == "plain":
                yield (number, slot), len(moment.shape)


def _stated_checksums(optimizer: Mapping[str, Any]) -> Iterator[tuple[Any, str, int]]:
    """Yield the CRC-32 of each moment, except vectors, which could be pieces of a flattened parameter."""
    for number, entry in optimizer["state"].items():
        for slot, moment in entry.items() if isinstance(entry, Mapping) else ():
            if isinstance(moment, Tensor) and moment.kind == "plain" and len(moment.shape) > 1:
                yield from ((number, slot, s.source.crc) for s in moment.found if s.source and s.source.crc)


def _of_one_rank(given: GivenNames, model: Mapping[str, Any], rank: int) -> GivenNames:
    """The given names, without parameters that a rank does not have."""
    listed = tuple(tuple(name for name in group if name in model) for group in given.listed)
    shapes = {k: v for k, v in given.shapes.items() if k in model}
    return replace(given, given_by=f"{given.given_by}, for rank {rank}", listed=listed, shapes=shapes)


def _renamed(optimizer: Mapping[str, Any], naming: Naming, rank: int, why: str) -> dict[str, Any]:
    """A rank's optimizer with names; `why` is the note on parameters without a name, whose tensors are not joined."""

    def name(number: Id) -> str:
        return naming.names.get(number) or f"{UNNAMED}{number} of rank {rank}"

    state = {
        name(i): entry if i in naming.names or not isinstance(entry, Mapping) else _noted(entry, why)
        for i, entry in optimizer["state"].items()
    }
    grouped = zip(optimizer["param_groups"], group_ids(optimizer), strict=True)
    groups = [{**group, "params": [name(i) for i in ids]} if ids else group for group, ids in grouped]
    return {**optimizer, "state": state, "param_groups": groups}


def _noted(entry: Mapping[str, Any], why: str) -> dict[str, Any]:
    return {k: replace(v, note=v.note or why) if isinstance(v, Tensor) else v for k, v in entry.items()}


def is_in_parts(merge: Merge, sections: Sequence[Section]) -> bool:
    """Whether no rank has every tensor of the model."""
    models = (s for s in sections if s.kind == "model" and any(s.holds(path) for path in merge.partial))
    keys = ([v.keys() for v in merge.values(m.path).values() if isinstance(v, Mapping)] for m in models)
    return any(set().union(*by_rank) not in by_rank for by_rank in keys)


def lost_parts(files: Iterable[RankFile]) -> Iterator[Problem]:
    """Yield the problem of unreadable files: neither their parameters nor the names of these are in another file."""
    lost = sorted({f.rank for f in files if f.rank is not None and not f.is_here})
    if lost:
        text = f"ranks hold parameters of their own; those of {named_ranks(lost)} are nowhere else"
        yield Problem(Code.MODEL_PART_MISSING, text)


# -- whole tensors in rank files that are slices, joined by the user's rules -------------------------------------------
# Each rank of FSDP2 may save its local tensors (`to_local()`), which do not state their place. `--rules` gives the
# dimension along which they follow each other in rank order; sizes may differ there, as FSDP2's last ranks have less.


def join_by_rules(path: Path, merge: Merge, tree: Any, rules: GivenRules, world: int) -> tuple[Any, list[Problem]]:
    """Join the slices whose names the rules match, in the model and in an optimizer that is keyed by name.

    Returns:
        The tree, and problems of slices that do not fit together.

    Raises:
        UsageError: the rules match no tensor here.
    """
    problems, ruled = list[Problem](), False
    for name, place in [*_places(find_sections(tree))]:
        rule, values = given_rule(rules, name), merge.values(place)
        if rule is None or not all(isinstance(v, Tensor) and v.kind == "plain" for v in values.values()):
            continue
        ruled = True
        ranks: Sequence[int] = range(world) if rule.dim is not None else sorted(values)
        try:
            joined = join([RankPiece(rank, rank, values.get(rank)) for rank in ranks], rule, world)
        except UnlikeError as error:
            problems.append(Problem(Code.LAYOUT_DISAGREES, str(error), None, fqn_of(place)))
            continue
        tree = put(tree, place, joined)
        merge.disagreeing.pop(place, None)
        merge.uneven = [one for one in merge.uneven if one != place]
    if not ruled:
        raise UsageError(
            path, f"{spelled('rules')}: no pattern fits a tensor here that says nothing of its place itself"
        )
    return tree, problems


def _places(sections: Iterable[Section]) -> Iterator[tuple[str, KeyPath]]:
    """Yield the name and key path of each tensor of a model, and of each moment with the name of its parameter."""
    for section in sections:
        if section.kind == "model":
            yield from ((key, section.place_of((key,))) for key in section.value)
        state = section.value.get("state") if section.kind == "optimizer" else None
        for key, entry in state.items() if isinstance(state, Mapping) else ():
            slots = entry.items() if isinstance(entry, Mapping) and isinstance(key, str) else ()
            yield from ((key, (*section.path, "state", key, slot)) for slot, v in slots if getattr(v, "shape", ()))


# -- the rank files of a checkpoint ------------------------------------------------------------------------------------


NAME = "rank_files"
READS = "one torch.save file per rank: Composer, verl, OLMo, Accelerate (FSDP1, FSDP2, HSDP, TP)"
KNOWN_BY = "a rank in the file name, such as ep0-ba5-rank3.pt, or a folder of such files"
TRIED = ("torch 1.13.1 to 2.15.0", "Composer 0.13.5 and 0.14.1", "verl 0.9.1", "torchao 0.18.0", "torchrec 1.8.0")
JOINS = ("model", "optimizer", "rest")

LOCAL = "per-rank .pt, FSDP flat parameters (local state)"

MAX_WORLD = 1 << 16
"""At most this many ranks are looked for; no cluster has more."""

ONLY_FOUND = (FILES_FOUND,)
"""The source of a world size that no file states."""


def detect(path: Path) -> bool:
    """Whether a path is a file with a rank in its name, or a folder with such files."""
    if path.is_dir():
        return group_in(path) is not None
    return parse(path) is not None


def read(path: Path, options: Options, by_name: Shapes | None = None) -> Checkpoint:
    """Open the checkpoint of a rank file, or of a folder of rank files.

    Flat parameters may have their shapes from an optimizer state in another file (`by_name`).

    Raises:
        ReadError: the file itself cannot be read.
        UsageError: the folder contains several checkpoints.
    """
    builder = CheckpointBuilder(NAME, path)
    found = rank_group(path, options)
    if found is None:
        raise ReadError(path, "no rank in this name, and no rank files in this folder")
    name, group = found
    others = [number for number, counts_steps in numbers_in(name.path.name) if not counts_steps]
    if len(group) == 1 and options.looks_around and len(others) > 1:
        group = siblings_by_content(name.path, options.read_file(name.path), options.follow_symlinks) or group
        name = next(n for n in group if n.path == name.path)
    return _opening(builder, name, group, options).checkpoint(by_name)


def read_group(
    path: Path, first: Path, group: Sequence[RankName], options: Options, by_name: Shapes | None = None
) -> Checkpoint:
    """Open the checkpoint of a path from its `first` file and the others in its group, which a format has found.

    Shapes as in `read`.

    Raises:
        ReadError: the file itself, or every file of a folder, cannot be read.
    """
    name = next(n for n in group if n.path == first)
    return _opening(CheckpointBuilder(NAME, path), name, group, options).checkpoint(by_name)


def _opening(builder: CheckpointBuilder, name: RankName, group: Sequence[RankName], options: Options) -> _RankGroup:
    """Read the named file; or the first readable one of a folder, so that damaged files become problems."""
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
    def __init__(self, builder: CheckpointBuilder, read: GroupRead) -> None:
        self.builder, self.problems, self.read = builder, builder.problems, read
        self.options, self.name, self.group = read.options, read.name, read.group
        self.wrapped = wrapped_ranks(read.saved, read.ranks, read.name.path)

    def checkpoint(self, by_name: Shapes | None) -> Checkpoint:
        world = self._world_size()
        merge = Merge()
        parts: dict[KeyPath, list[tuple[int, Any]]] = {}
        for name in self.group:
            if name.path in self.read.saved:
                path, rank = (name.part,) if name.part else (), self.read.ranks[name.path]
                saved = self.read.saved[name.path]
                content = self.wrapped.placed(rank, saved.tree) if self.wrapped else saved.content
                parts.setdefault(path, []).append((rank, content))
        tree = _merged(merge, {path: sorted(ranked, key=lambda i: i[0]) for path, ranked in parts.items()})
        sections = find_sections(tree)
        in_parts = is_in_parts(merge, sections)
        named = named_by_own_models(merge, sections, self.options.names, in_parts)
        if named is not None:
            merge = Merge()
            tree = _merged(merge, named.roots)
        given = None if in_parts or named else self.options.names
        local, notes, assumed = self._flat_shards(tree, by_name, given)
        if self.options.rules is not None:
            tree, unlike = join_by_rules(self.builder.path, merge, tree, read_rules(self.options.rules), world.value)
            self.problems += unlike
            if world.sources == ONLY_FOUND:
                self.problems.append(Problem(Code.ONE_OF_SEVERAL, ALL_RANKS, severity="warning"))
        found = rank_checks.compare_ranks(merge, tree)
        tree = found.tree
        files = tuple(self._files(world.value))
        self.problems += self.wrapped.problems if self.wrapped else ()
        sharded = [t for _, t in tensors_in(tree) if t.sharded]
        sections = find_sections(tree)
        keys = tree if isinstance(tree, dict) else ()
        self.problems += rank_checks.check_files(files, self.read.faults, world.value, bool(sharded), in_parts, keys)
        self.problems += lost_parts(files) if in_parts else ()
        self.problems += self._left_out()
        if not (sharded or local):
            from ckptools.formats.rank_search.one_of_several import signs_in_rank_files

            read = self.read.saved if all(f.status == "read" for f in files) else {}
            every = sorted(((self.read.ranks[path], one.tree) for path, one in read.items()), key=lambda i: i[0])
            alone, stated = len(self.group) == 1, world.sources != ONLY_FOUND
            self.problems += signs_in_rank_files(self.name, alone, every, sections, in_parts, stated)
        self.problems += () if in_parts else rank_checks.check_lacking(merge, tree, sections)
        self.builder.add_rank_values(found)
        self.problems += rank_checks.check_gathered_rng(sections, merge.differing)
        self.problems += (Problem(Code.LAYOUT_INFERRED, note, None, fqn_of(path)) for path, note in notes.items())
        self.builder.add_saved(self.read.saved.values(), placed=not in_parts)
        self.problems += rank_checks.check_cut_order(tree, self.builder.names)
        plainly = LOCAL if local else _saved_as(sharded, len(self.group), in_parts)
        saved_as = self.wrapped.saved_as if self.wrapped else plainly
        # A number in the path that is the rank does not count steps.
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
        """Place the flat shards in a tree; `resolve_flat_shards` is imported only if there are any."""
        if self.wrapped:
            return self.wrapped.take_apart(tree)
        if given is None and not any(map(_may_be_flat, find_sections(tree))):
            return False, {}, set()
        from ckptools.formats.flat_parameters.parameters import resolve_flat_shards

        return resolve_flat_shards(tree, self.read.all_ranks, self.options.shapes, by_name, given)

    def _files(self, world: int) -> Iterable[RankFile]:
        parts = {n.part: n for n in reversed(self.group)}
        here = {(self.read.ranks[n.path], n.part) for n in self.group}
        for name in self.group:
            yield self.read.listed(name.path, self.read.ranks[name.path], name.part, len(self.group))
        alone = len(self.group) == 1
        alone = alone and not any(s.claims for s in self.read.saved.values()) and self.name.world_size is None
        begun = unfinished_ranks(self.name) if self.options.looks_around else ()
        for rank in sorted({*(() if alone else range(min(world, MAX_WORLD))), *begun}):
            for part, name in parts.items():
                if (rank, part) not in here:
                    yield RankFile(name.of_rank(rank, part), rank, part, "missing", 0, None)

    def _left_out(self) -> Iterator[Problem]:
        """Note other ranks' files beside a single file that was opened alone."""
        alone = self.options.only_this_file and not self.builder.path.is_dir()
        others = [name for name in siblings(self.name) if name.path != self.name.path] if alone else []
        if others:
            ranks = named_ranks({name.rank for name in others})
            text = f"files beside it are of {ranks} by their names; left out by {spelled('only-this-file', True)}"
            yield Problem(Code.NOT_READ, text, files=tuple(name.path.name for name in others))

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
            # The files are a part: their names or their number give the minimum.
            least = max(*at_least, 1 + max(self.read.ranks.values()))
            if named is not None and named >= least:
                return Fact(named, ("file name",))
            return Fact(found, ONLY_FOUND) if found >= least else Fact(least, ("at least, by its layout",))
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
        least = 1 + max(self.read.ranks.values())  # the lower ranks may have had files, or none
        return Fact(max(found, least), ONLY_FOUND, at_least=least > found)


def _may_be_flat(section: Section) -> bool:
    """Whether a model has flat parameters, or an optimizer has tensors that may be shards of them."""
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
