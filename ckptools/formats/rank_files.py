"""Rank files: one torch.save file per rank, or per rank and part.

Composer (`ep0-ba5-rank3.pt`), OLMo (`rank3.pt`), Accelerate (`pytorch_model_fsdp_0_rank3.bin`), verl
(`model_world_size_4_rank_3.pt`, `optim_…`, `extra_state_…`) and everybody who calls torch.save on every rank. Inside
are ShardedTensors (FSDP1) or DTensors (FSDP2, FSDP1 with a device mesh, tensor parallel) whose files say rank and
world size, and plain values that every rank repeats. A lone `…-rank0.pt` without sharded tensors is a complete
checkpoint: only rank 0 wrote (Composer's default; DDP).

Reading one file is enough to know every shape and who holds what. Its siblings' directories are looked at, so that
a missing or cut rank is known; their pickles are read only when all ranks are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckptools.checkpoint import Checkpoint, ReadCost, leaf_at
from ckptools.errors import ReadError
from ckptools.files import File
from ckptools.formats import flat_pieces
from ckptools.formats.merge import Merge
from ckptools.formats.options import Options, Reader
from ckptools.formats.rank_names import RankName, only_group, parse, siblings
from ckptools.model import Fact, KeyPath, Problem, RankFile, Severity, Shard, Tensor, fqn_of, tensors_in
from ckptools.pickles import container, reader
from ckptools.pickles.reader import Saved
from ckptools.regions import Box
from ckptools.sections import find_sections
from ckptools.steps import find_step

NAME = "rank_files"
READS = "one torch.save file per rank: Composer, verl, OLMo, Accelerate (FSDP1, FSDP2, HSDP, TP)"

ODD_SIZE = 0.5
"""A rank file of less than this fraction of the median is named; uneven shards alone do not make one so small."""


def detect(path: Path) -> bool:
    """A file with a rank in its name, or a folder that holds such files."""
    if path.is_dir():
        return only_group(path) is not None
    return parse(path) is not None


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint that a rank file, or a folder of them, belongs to.

    Raises:
        ReadError: the file itself cannot be read.
        UsageError: the folder holds several checkpoints.
    """
    started = time.perf_counter()
    name = only_group(path) if path.is_dir() else parse(path)
    if name is None:
        raise ReadError(path, "no rank in this name, and no rank files in this folder")
    group = [name] if options.only_this_file else siblings(name, options.follow_symlinks)
    return _Opening(path, name, group, options.read_file, options.all_ranks).checkpoint(started)


class _Opening:
    """The steps of opening one checkpoint, with what they find on the way."""

    def __init__(
        self, path: Path, name: RankName, group: Sequence[RankName], read_file: Reader, all_ranks: bool
    ) -> None:
        self.path, self.name, self.group, self.read_file = path, name, group, read_file
        self.problems: list[Problem] = []
        self.saved: dict[Path, Saved] = {}
        self.cut: dict[Path, str] = {}
        wanted = group if all_ranks else [n for n in group if n.rank == name.rank]
        self.all_ranks = all_ranks or len(wanted) == len(group)
        for member in sorted(wanted, key=lambda n: n.path != name.path):
            self._read(member, must=member.path == name.path)
        self.ranks = {n.path: self._rank_of(n) for n in group}

    def _read(self, member: RankName, must: bool) -> None:
        try:
            self.saved[member.path] = self.read_file(member.path)
        except ReadError as error:
            if must:
                raise
            self.cut[member.path] = str(error)

    def _rank_of(self, name: RankName) -> int:
        """The rank that a file's content says; its name's where the content says nothing."""
        claims = {rank for rank, _ in self.saved[name.path].claims} if name.path in self.saved else set()
        said = claims - {None}
        if len(said) == 1 and said != {name.rank}:
            (rank,) = said
            text = f"{name.path.name} holds rank {rank}; the content is believed"
            self.problems.append(Problem("CK010", "warning", text, name.rank))
            return int(rank or 0)
        return name.rank

    def checkpoint(self, started: float) -> Checkpoint:
        """Put everything together."""
        world = self._world_size()
        merge = Merge()
        tree = self._tree(merge)
        flat_pieces.settle(tree, self.all_ranks)
        files = tuple(self._files(world.value))
        sharded = [t for _, t in tensors_in(tree) if t.sharded]
        sections = find_sections(tree)
        self._check_files(files, world.value, bool(sharded))
        self.problems += merge.problems
        differing = tuple(self._differing(merge.differing, sections))
        self.problems += _unplaceable(tree)
        cost = ReadCost(len(self.saved), time.perf_counter() - started, sum(s.bytes_read for s in self.saved.values()))
        return Checkpoint(
            path=self.path,
            name=_checkpoint_name(self.name),
            format=NAME,
            saved_as=_saved_as(sharded, len(self.group)),
            tree=tree,
            files=files,
            world_size=world,
            step=find_step(self.name.path, sections),
            problems=tuple(sorted(self.problems, key=lambda p: ("error", "warning", "note").index(p.severity))),
            names=tuple(dict.fromkeys(n for s in self.saved.values() for n in s.names)),
            all_ranks=self.all_ranks,
            differing=differing,
            bytes_expected=_expected(files),
            cost=cost,
        )

    def _tree(self, merge: Merge) -> Any:
        """Merge the ranks of each part, then put the parts side by side."""
        parts: dict[str, list[tuple[int, Any]]] = {}
        for name in self.group:
            if name.path in self.saved:
                parts.setdefault(name.part, []).append((self.ranks[name.path], self.saved[name.path].tree))
        merged = {p: merge.trees(sorted(v, key=lambda i: i[0]), (p,) if p else ()) for p, v in parts.items()}
        return merged[""] if list(merged) == [""] else merged

    def _world_size(self) -> Fact:
        claimed = sorted({w for s in self.saved.values() for _, w in s.claims})
        named = self.name.world_size
        found = len({self.ranks[n.path] for n in self.group})
        if len(claimed) > 1:
            self.problems.append(Problem("CK103", "error", f"sharded tensors speak of world sizes {claimed}"))
        if claimed:
            agrees = named in (None, claimed[-1]) and len(claimed) == 1
            if named not in (None, claimed[-1]):
                text = f"world size {claimed[-1]} by content, {named} by file name"
                self.problems.append(Problem("CK103", "error", text))
            return Fact(claimed[-1], ("layout", *(["file name"] if named == claimed[-1] else [])), agrees)
        if named is not None:
            return Fact(named, ("file name",))
        stated = _stated_world_size(self.saved.values())
        if stated is not None and found > 1:
            return Fact(stated, ("metadata",))
        return Fact(found, ("files found",))

    def _files(self, world: int) -> Iterable[RankFile]:
        parts = dict.fromkeys(n.part for n in self.group)
        here = {(self.ranks[n.path], n.part) for n in self.group}
        for name in self.group:
            yield self._file(name)
        alone = len(self.group) == 1
        if alone and not any(s.claims for s in self.saved.values()) and self.name.world_size is None:
            return
        for rank in range(world if world <= 1 << 20 else 0):
            for part in parts:
                if (rank, part) not in here:
                    path = self.name.path.with_name(f"{part or ''}{self._head(part)}{rank}{self.name.tail}")
                    yield RankFile(path, rank, part, "missing", 0, None)

    def _head(self, part: str) -> str:
        middle = self.name.path.name[: -len(self.name.tail)]
        digits = len(middle) - len(middle.rstrip("0123456789"))
        head = middle[:-digits]
        return head[len(self.name.part) :] if part else head

    def _file(self, name: RankName) -> RankFile:
        rank = self.ranks[name.path]
        if name.path in self.saved:
            saved = self.saved[name.path]
            return RankFile(name.path, rank, name.part, "read", saved.nbytes, saved.modified)
        why = self.cut.get(name.path) or _glance(name.path)
        status = name.path.stat() if name.path.exists() else None
        size, modified = (status.st_size, status.st_mtime) if status else (0, None)
        if why:
            self.cut[name.path] = why
            return RankFile(
                name.path, rank, name.part, "cut" if "cut short" in why or not size else "bad", size, modified
            )
        return RankFile(name.path, rank, name.part, "seen", size, modified)

    def _check_files(self, files: Sequence[RankFile], world: int, sharded: bool) -> None:
        sizes = sorted(f.nbytes for f in files if f.status in ("read", "seen"))
        usual = sizes[len(sizes) // 2] if sizes else 0
        counts: dict[tuple[int | None, str], int] = {}
        for file in files:
            counts[file.rank, file.part] = counts.get((file.rank, file.part), 0) + 1
            severity: Severity = "error" if sharded or file.part else "warning"
            if file.status == "missing":
                self.problems.append(Problem("CK001", severity, f"no file {file.path.name}", file.rank))
            elif file.status in ("cut", "bad"):
                why = self.cut[file.path].removeprefix(f"{file.path}: ")
                self.problems.append(Problem("CK002", "error", f"{file.path.name} {why}", file.rank))
            elif file.rank is not None and file.rank >= world and sharded:
                text = f"{file.path.name} is rank {file.rank} of a world of {world}"
                self.problems.append(Problem("CK009", "error", text, file.rank))
            elif not file.part and file.nbytes < usual * ODD_SIZE:
                text = f"{file.path.name} has {file.nbytes} bytes, others {usual}"
                self.problems.append(Problem("CK003", "warning", text, file.rank))
        for (rank, part), count in counts.items():
            if count > 1:
                text = f"{count} files say they are rank {rank}{' of ' + part if part else ''}"
                self.problems.append(Problem("CK009", "error", text, rank))

    def _differing(self, found: dict[KeyPath, list[int]], sections: Sequence[Any]) -> Iterable[KeyPath]:
        """Values that should be equal on all ranks are problems; the others are per-rank state."""
        from ckptools.steps import COUNTERS

        strict = [s.path for s in sections if s.kind in ("model", "optimizer", "scheduler")]
        for path, ranks in found.items():
            listed = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
            if path and path[-1] in (*COUNTERS, "last_epoch", "_step_count"):
                text = f"differs between ranks (rank {listed} against the lowest rank); they are not of one step"
                self.problems.append(Problem("CK006", "error", text, None, fqn_of(path)))
            elif any(path[: len(p)] == p for p in strict):
                text = f"rank {listed} has another value than the lowest rank"
                self.problems.append(Problem("CK105", "error", text, None, fqn_of(path)))
            else:
                yield path


def _glance(path: Path) -> str:
    """Look at the end of a sibling; return what is wrong with it, or nothing."""
    try:
        with File(path) as file:
            container.glance(file)
    except ReadError as error:
        return str(error)
    return ""


def _stated_world_size(saved: Iterable[Saved]) -> int | None:
    """Composer's `state.metadata.world_size`; the length of its all-gathered `rng` says the same."""
    for one in saved:
        tree = one.tree if isinstance(one.tree, dict) else {}
        state = tree.get("state")
        metadata = state.get("metadata") if isinstance(state, dict) else None
        stated = metadata.get("world_size") if isinstance(metadata, dict) else None
        if type(stated) is int and stated > 0:
            return stated
    return None


def _unplaceable(tree: Any) -> list[Problem]:
    """One warning per reason why tensors cannot be consolidated."""
    reasons: dict[str, list[str]] = {}
    for path, tensor in tensors_in(tree):
        if tensor.note and tensor.kind != "meta":
            reasons.setdefault(tensor.note, []).append(fqn_of(path))
    return [
        Problem("CK106", "warning", f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}")
        for why, names in reasons.items()
    ]


def _checkpoint_name(name: RankName) -> str:
    if name.part:
        return name.path.parent.name
    return name.head.rstrip("-_.") or name.path.parent.name or "checkpoint"


def _saved_as(sharded: Sequence[Tensor], files: int) -> str:
    if not sharded:
        return "one .pt, every tensor whole" if files == 1 else "per-rank .pt, every tensor whole"
    kinds = {t.kind for t in sharded}
    if any(t.kind == "flat_pieces" and t.note == flat_pieces.LOCAL for t in sharded):
        return "per-rank .pt, FSDP flat parameters (local state)"
    meshes = {t.mesh for t in sharded if t.mesh}
    mesh = max(meshes, key=len) if meshes else ()
    shown = f" on a {' x '.join(map(str, mesh))} mesh" if len(mesh) > 1 else ""
    return "per-rank .pt, " + ("FSDP ShardedTensor" if "sharded_tensor" in kinds else f"DTensor{shown}")


def _expected(files: Sequence[RankFile]) -> int | None:
    """Bytes of all files if every missing or cut one had the usual size."""
    good = sorted(f.nbytes for f in files if f.status in ("read", "seen"))
    absent = sum(f.status not in ("read", "seen") for f in files)
    return sum(good) + absent * good[len(good) // 2] if good else None


# -- shards of other ranks, when a lazy tensor needs them ---------------------------------------------------------


@lru_cache(maxsize=8)
def _saved(path: Path, modified: float) -> Saved:
    """The structure of one rank file; a few are kept, for a tensor's neighbours are usually asked for next."""
    return reader.read(path)


def with_sources(tensor: Tensor, box: Box) -> Tensor:
    """Add the sources of the shards that meet `box`, reading only the rank files that hold them."""
    wanted = {s.rank for s in tensor.shards if s.source is None and (not box.sizes or s.box.intersect(box))}
    if not tensor.shards or None in wanted:
        return _from_all_ranks(tensor)
    for rank in sorted(r for r in wanted if r is not None):
        tensor = with_rank(tensor, rank)
    return tensor


def with_rank(tensor: Tensor, rank: int) -> Tensor:
    """Add the shards of one rank, from its file if that is here."""
    if tensor.home is None:
        return tensor
    home, key = tensor.home
    name = only_group(home) if home.is_dir() else parse(home)
    for member in siblings(name) if name else ():
        if member.rank == rank and member.part == (key[0] if member.part else ""):
            saved = _saved(member.path, member.path.stat().st_mtime)
            other = leaf_at(saved.tree, key[1:] if member.part else key)
            found = [Shard(s.box, rank, s.source) for s in other.found] if isinstance(other, Tensor) else []
            boxes = {s.box for s in found}
            kept = [s for s in tensor.shards if s.rank != rank and (s.source or s.box not in boxes)]
            return replace(tensor, shards=(*kept, *found))
    return tensor


def _from_all_ranks(tensor: Tensor) -> Tensor:
    """Where the file does not tell which rank holds what (HSDP, flattened pieces): read them all."""
    if tensor.home is None:
        return tensor
    home, key = tensor.home
    name = only_group(home) if home.is_dir() else parse(home)
    whole = read(name.path if name else home, Options(all_ranks=True))
    found = leaf_at(whole.tree, key)
    return found if isinstance(found, Tensor) else tensor
