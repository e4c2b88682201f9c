"""The rank files of one checkpoint: which are read, the rank of each, and the world size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptools.errors import ReadError, UsageError
from ckptools.formats.options import Options, is_small
from ckptools.formats.rank_search.rank_names import RankName
from ckptools.formats.rank_search.stage_signs import stated_world_size
from ckptools.formats.shared.checkpoint_builder import Fault
from ckptools.model.checkpoint import Fact
from ckptools.model.problems import Code, Problem
from ckptools.pickles.reader import Saved

FILES_FOUND = ("files found",)
"""Source of a world size that is stated nowhere."""


class GroupRead:
    """The files of a group that were read: every rank's, or the given one and its possible swap.

    Args:
        problems: receives problems of names and world sizes.
        name: the given file, which must be readable.
        group: all files, in rank order.
        options: how they are read.

    Attributes:
        name: the given file; its rank counts from 0.
        group: all files, likewise.
        saved: the content of those that were read.
        faults: why others could not be read.
        all_ranks: whether every file was to be read.
        ranks: the rank of each file.

    Raises:
        ReadError: the given file cannot be read.
    """

    def __init__(self, problems: list[Problem], name: RankName, group: Sequence[RankName], options: Options) -> None:
        self.problems, self.name, self.group, self.options = problems, name, group, options
        self.saved: dict[Path, Saved] = {}
        self.faults: dict[Path, Fault] = {}
        every = options.all_ranks or not name.rank_in_name
        wanted = group if every else [n for n in group if n.rank == name.rank]
        self.all_ranks = every or len(wanted) == len(group)
        wanted = sorted(wanted, key=lambda n: n.path != name.path)
        options.read_ahead([member.path for member in wanted])
        for member in wanted:
            self._read(member, must=member.path == name.path or not member.rank_in_name)
        # Names of parameters may be those of several ranks, and then fit no rank alone. Names of files that were given
        # one by one need not count ranks: their contents have them.
        unnamed = options.names is not None and not any(s.claims for s in self.saved.values())
        uncounted = bool(options.files) and group[-1].rank > len(group)
        if not self.all_ranks and (self._is_small() or unnamed or uncounted):
            self._read_rest()
        if all(map(self._counts_from_one, group)) and any(self._said(n) is not None for n in group):
            self.group, self.name = [n.from_one() for n in group], name.from_one()
        self._read_namesakes(self.name)
        self.ranks = {n.path: self._rank_of(n) for n in self.group}

    def _read(self, member: RankName, must: bool) -> None:
        try:
            self.saved[member.path] = self.options.read_file(member.path)
        except ReadError as error:
            if must:
                raise
            self.faults[member.path] = Fault.of(error, member.path)

    def _is_small(self) -> bool:
        """Whether the files, estimated by those that were read, are small enough to read all."""
        nbytes = sum(saved.bytes_read for saved in self.saved.values())
        return is_small(len({n.rank for n in self.group}), nbytes * len(self.group) // max(len(self.saved), 1))

    def _read_rest(self) -> None:
        rest = [member for member in self.group if member.path not in {*self.saved, *self.faults}]
        self.options.read_ahead([member.path for member in rest])
        for member in rest:
            self._read(member, must=False)
        self.all_ranks = True

    def _read_namesakes(self, name: RankName) -> None:
        """Where the content has another rank than the name, read the file of that name too: they may be swapped."""
        rank = self._said(name)
        while rank is not None:
            others = [n for n in self.group if n.rank == rank and n.part == name.part]
            if not others or others[0].path in {*self.saved, *self.faults}:
                return
            self._read(others[0], must=False)
            rank = self._said(others[0])

    def _said(self, name: RankName) -> int | None:
        """The one rank in a file's content; None for none, several, or a file that was not read."""
        claims = {rank for rank, _ in self.saved[name.path].claims} if name.path in self.saved else set()
        claimed = [rank for rank in claims if rank is not None]
        return claimed[0] if len(claimed) == 1 else None

    def _counts_from_one(self, name: RankName) -> bool:
        """Whether a name in the caller's own spelling has one more than the rank, by the contents that were read."""
        return bool(name.spelled) and not name.first and name.rank > 0 and self._said(name) in (None, name.rank - 1)

    def _rank_of(self, name: RankName) -> int:
        """The rank in a file's content, else in its name."""
        rank = self._said(name)
        if not name.rank_in_name:
            if rank is None:
                raise UsageError(name.path, "neither name nor content has its rank; give it with --ranks PATTERN")
            return rank
        if rank is None or rank == name.rank:
            return name.rank
        text = f"{name.path.name} holds rank {rank}; the content is believed"
        self.problems.append(Problem(Code.NAME_CONTRADICTS, text, name.rank))
        return rank

    def world_size(self) -> Fact:
        """The number of ranks that saved the checkpoint, from the best source."""
        at_least = {w for s in self.saved.values() if s.at_least for _, w in s.claims}
        claimed = sorted({w for s in self.saved.values() if not s.at_least for _, w in s.claims})
        named = self.name.world_size
        found = len({self.ranks[n.path] for n in self.group})
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
        stated = stated_world_size(one.tree for one in self.saved.values())
        if stated is not None and found > 1:
            return Fact(stated, ("metadata",))
        return Fact(found, FILES_FOUND)

    def _world_of_slices(self, at_least: int, named: int | None, found: int) -> Fact:
        """The world size where files show a part of it only: as named, or as many as there are files."""
        at_least = max(at_least, 1 + max(self.ranks.values()))
        if named is not None and named >= at_least:
            return Fact(named, ("file name",))
        return Fact(found, FILES_FOUND) if found >= at_least else Fact(at_least, ("at least, by its layout",))
