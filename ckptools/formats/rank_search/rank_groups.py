"""The rank files of one checkpoint, which of them are read, and the rank of each.

Siblings are found by names that `rank_names` parses. Other names are taken where the caller gives them: several files
together, whose rank is the one number in which their names differ, or else in their content; or a pattern such as
`model-{rank}-of-{world}.pt` for the files of a folder. A rank in the content takes precedence over the name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError, SeveralError, UnsafePathError, UsageError
from ckptools.files.location import real_path, tells_others
from ckptools.files.opening import reading
from ckptools.formats.options import Options, is_small
from ckptools.formats.rank_search.rank_checks import UNNAMED
from ckptools.formats.rank_search.rank_names import RankName, check_links, names_in, parse, siblings
from ckptools.formats.shared.checkpoint_builder import Fault
from ckptools.formats.shared.several import several
from ckptools.formats.wrapped_shards.layout import stated_claim
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import leaf_at
from ckptools.model.values import describe_for_error
from ckptools.pickles.reader import Saved

NUMBER = re.compile(r"\d+")
HOLDER = re.compile(r"\{(rank|world)\}")
MAX_FILES = 1 << 16


def rank_group(path: Path, options: Options) -> tuple[RankName, list[RankName]] | None:
    """Find the rank file to read first, and all files of its checkpoint in rank order; None where there are none.

    Raises:
        UsageError: the folder holds several checkpoints, or the pattern is none.
        ReadError: no file fits the pattern.
        UnsafePathError: a file is a link out of the folder.
    """
    if options.files:
        group = group_of_files(options.files)
    elif options.ranks is not None:
        group = files_matching(path, options.ranks, options.follow_symlinks)
    elif not tells_others(path) and parse(path) is not None:
        group = group_of_files([path])
    else:
        name = group_in(path) if path.is_dir() else parse(path)
        if name is None:
            return None
        group = [name] if options.only_this_file else siblings(name)
        if not options.follow_symlinks:
            check_links(group, asked=path)
        return name, group
    return group[0], group


def _is_other_name(path: Path) -> bool:
    """Whether a file is a link to another rank file of its folder, such as Composer's `latest-rank0.pt`."""
    target = real_path(path) if path.is_symlink() else path
    return target != path and target.parent == real_path(path.parent) and parse(target) is not None


def only_group(folder: Path) -> RankName | None:
    """A file of the one checkpoint in a folder of rank files; None when it has none.

    Raises:
        UsageError: it holds several.
    """
    groups: dict[tuple[tuple[str, str], int | None], RankName] = {}
    for name in names_in(folder):
        if not _is_other_name(name.path):
            groups.setdefault((name.group, name.world_size), name)
    if len(groups) > 1:
        raise several(folder, [name.path for name in groups.values()])
    return next(iter(groups.values()), None)


def group_in(folder: Path) -> RankName | None:
    """A file of the one checkpoint in a folder of rank files, by their names or else by their contents.

    Raises:
        UsageError: it holds several.
    """
    try:
        return only_group(folder)
    except SeveralError:
        # Most folders have names that are enough.
        from ckptools.formats.rank_search.sibling_search import are_of_one

        names = list(names_in(folder))
        if not are_of_one([name.path for name in names]):
            raise
        return names[0]


def group_of_files(files: Sequence[Path]) -> list[RankName]:
    """The files that a caller named as one checkpoint, in the order of the ranks in their names."""
    parsed = [name for name in map(parse, files) if name is not None]
    if len(parsed) == len(files) and len({(n.part, n.rank) for n in parsed}) == len(files):
        return sorted((n._replace(spelled=_unnamed(n.path)) for n in parsed), key=lambda n: (n.rank, n.path))
    numbers = _numbers(files)
    if numbers is None:
        return [
            RankName(p, p.stem, at, p.suffix, "", None, _unnamed(p), rank_in_name=False) for at, p in enumerate(files)
        ]
    world = _of_world(files[0], max(numbers))
    numbered = zip(files, numbers, strict=True)
    return _from_zero([RankName(p, NUMBER.split(p.stem)[0], n, "", "", world, _unnamed(p)) for p, n in numbered])


def _unnamed(path: Path) -> str:
    return str(path.with_name(UNNAMED))


def _numbers(files: Sequence[Path]) -> list[int] | None:
    """The number of each path, where the paths differ in just one; else None."""
    paths = [str(path) for path in files]
    if len({NUMBER.sub("0", path) for path in paths}) > 1:
        return None
    columns = list(zip(*(map(int, NUMBER.findall(path)) for path in paths), strict=True))
    differing = [list(column) for column in columns if len(set(column)) > 1]
    return differing[0] if len(differing) == 1 and len(set(differing[0])) == len(files) else None


def _of_world(path: Path, largest: int) -> int | None:
    """The `4` of `model-2-of-4.pt`, unless the largest number is above it."""
    found = re.search(r"\d+-of-(\d{1,7})(?!\d)", path.name)
    return int(found[1]) if found and largest <= int(found[1]) else None


def files_matching(folder: Path, pattern: str, follow_symlinks: bool) -> list[RankName]:
    """The files below a folder whose paths match a pattern such as `model-{rank}-of-{world}.pt`, in rank order.

    Raises:
        UsageError: the path is no folder, or the pattern has no `{rank}` or leads out of the folder.
        ReadError: no file fits.
        UnsafePathError: a file is a link out of the folder.
    """
    from glob import escape

    _check_pattern(folder, pattern)
    expression = re.compile(_expression(pattern))
    with reading(folder):
        paths = sorted(islice((p for p in folder.glob(HOLDER.sub("*", escape(pattern))) if p.is_file()), MAX_FILES))
    found = [(p, m) for p in paths if (m := expression.fullmatch(p.relative_to(folder).as_posix()))]
    if not found:
        raise ReadError(folder, f"no file fits --ranks {describe_for_error(pattern)}{_here(folder)}")
    real = real_path(folder)
    for path, _ in () if follow_symlinks else found:
        if not real_path(path).is_relative_to(real):
            raise UnsafePathError(path, "is or lies behind a link out of the folder; follow it with --follow-symlinks")
    return _from_zero([_fitted(folder, pattern, p, m) for p, m in found])


def file_matching(path: Path, pattern: str) -> RankName:
    """One file whose name matches a pattern, for which its folder is not listed."""
    found = re.fullmatch(_expression(pattern), path.name)
    assert found is not None, f"{path.name} is no {pattern}"
    return _fitted(path.parent, pattern, path, found)


def _check_pattern(folder: Path, pattern: str) -> None:
    if not folder.is_dir():
        raise UsageError(folder, "--ranks goes with a folder, in which it says what the rank files are called")
    inside = not Path(pattern).is_absolute() and ".." not in Path(pattern).parts and "\0" not in pattern
    if "{rank}" not in pattern or not inside:
        text = "expected a name in the folder with {rank} in it, such as 'model-{rank}-of-{world}.pt'"
        raise UsageError(None, f"--ranks {describe_for_error(pattern)}: {text}")


def _expression(pattern: str) -> str:
    """The pattern as a regular expression: a placeholder that comes again stands for the same number."""
    expression = re.escape(pattern)
    for name in ("rank", "world"):
        holder = re.escape(f"{{{name}}}")
        expression = expression.replace(holder, rf"(?P<{name}>\d{{1,9}})", 1).replace(holder, f"(?P={name})")
    return expression


def _here(folder: Path) -> str:
    with reading(folder):
        names = sorted(p.name for p in islice(folder.iterdir(), 100))
    shown = [*map(describe_for_error, names[:6]), *("…" for _ in names[6:7])]
    return f"; here are {', '.join(shown)}" if names else ""


def _fitted(folder: Path, pattern: str, path: Path, found: re.Match[str]) -> RankName:
    world = found.groupdict().get("world")
    spelled = str(folder / pattern.replace("{world}", world or ""))
    head = HOLDER.split(Path(pattern).name)[0]
    return RankName(path, head, int(found["rank"]), "", "", int(world) if world else None, spelled, len(found["rank"]))


def _from_zero(names: list[RankName]) -> list[RankName]:
    """Renumber the names from rank 0 where they count from 1 to the world size."""
    ordered = sorted(names, key=lambda n: (n.rank, n.path))
    worlds = {n.world_size for n in ordered}
    if ordered[0].rank >= 1 and worlds == {ordered[-1].rank}:
        return [n.from_one() for n in ordered]
    return ordered


# -- which of the files are read, and the rank of each ----------------------------------------------------------------


class GroupRead:
    """The files of a group that were read: every rank's, or the given one and its possible swap.

    Attributes:
        name: the given file; its rank counts from 0.
        group: all files, likewise, in rank order.
        saved: the content of those that were read.
        faults: why others could not be read.
        all_ranks: whether every file was to be read.

    Raises:
        ReadError: the given file cannot be read.
    """

    def __init__(self, problems: list[Problem], name: RankName, group: Sequence[RankName], options: Options) -> None:
        self.problems, self.name, self.group, self.options = problems, name, group, options
        self.saved: dict[Path, Saved] = {}
        self.faults: dict[Path, Fault] = {}
        self._states_rank = False
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
        self.problems += self._misnamed()

    def _read(self, member: RankName, must: bool) -> None:
        try:
            saved = self.options.read_file(member.path)
            stated = stated_claim(saved.tree) if isinstance(saved.content, dict) or self._states_rank else None
            self._states_rank = stated is not None
            self.saved[member.path] = saved._replace(claims=frozenset([stated])) if stated else saved
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
        if rank is None and not name.rank_in_name:
            raise UsageError(name.path, "neither name nor content has its rank; give it with --ranks PATTERN")
        return name.rank if rank is None else rank

    def _misnamed(self) -> Iterator[Problem]:
        """Files that hold another rank than that of their name: a resume by rank loads another rank's shards.

        It is a warning where the numbers in the names may be no ranks: all of them are as far off, or they are of names
        that were given one by one; and of a copy, for which the rank that is here twice is an error.
        """
        known = {n.path: n.rank - rank for n in self.group if (rank := self._said(n)) is not None and n.rank_in_name}
        shifted = len(known) > 1 and len(set(known.values())) == 1
        held = Counter((self.ranks[n.path], n.part) for n in self.group)
        for name in self.group:
            rank = self.ranks[name.path]
            if name.rank_in_name and rank != name.rank:
                counts = not shifted and (parse(name.path) is not None or not self.options.files)
                sure = counts and held[rank, name.part] == 1
                kind = Code.NAMED_AS_ANOTHER_RANK if sure else Code.NAME_CONTRADICTS
                yield Problem(kind, f"{name.path.name} holds rank {rank}; the content is believed", name.rank)


def stated_world_size(trees: Iterable[Any]) -> int | None:
    """The number of ranks in the files: at their root, or as Composer stores it in `state.metadata`."""
    for tree in trees:
        for path in (("state", "metadata", "world_size"), ("world_size",)):
            stated = leaf_at(tree, path)
            if type(stated) is int and stated > 0:
                return stated
    return None
