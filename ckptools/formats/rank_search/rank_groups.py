"""Find the rank files of one checkpoint, choose which of them to read, and determine the rank of each.

Siblings are found by names that `rank_names` parses. The caller may give files with other names: several files
together, whose rank is the only number in which their names differ, or else in their content; or a pattern such as
`model-{rank}-of-{world}.pt` for the files of a folder. A rank in the content takes precedence over the name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice, pairwise
from math import prod
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError, UnsafePathError, UsageError
from ckptools.files.opening import reading, real_path, tells_others
from ckptools.formats.options import Options, is_small
from ckptools.formats.rank_search.rank_checks import UNNAMED
from ckptools.formats.rank_search.rank_names import (
    RankName,
    check_links,
    names_in,
    numbers_in,
    parse,
    siblings,
)
from ckptools.formats.shared.checkpoint_builder import SavedFiles
from ckptools.formats.shared.several_checkpoints import several
from ckptools.formats.wrapped_shards import stated_claim
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import describe_for_error, leaf_at, tensors_in
from ckptools.option import spelled
from ckptools.pickles import reader
from ckptools.pickles.reader import Saved
from ckptools.text import KeyPath

# -- the rank files of a checkpoint, by names that only their contents prove: `2.pt`, `model-2-of-4.pt`, `part3.pth` ---
# A number in a file's name is the rank, or the rank plus one, if the files beside it that differ in this number alone
# are no more than the world has ranks, and their contents state the ranks in their names. The name of a missing rank is
# then known. Behind a word that counts steps (`checkpoint_3.pt`) each of them has to state the rank. The number may be
# in the folder's name too: `rank_2/model.pt`.
#  Or several numbers differ, and there is one file of every rank by its content: the numbers then have to count nodes
# and places on these, or the axes of a grid, because two runs that each lost some ranks may also have one of every
# rank.
#
# A rank may have several files beside each other, one for each item that was saved: `model_3.pt`, `optimizer_3.pt`.
#
# Other files are ignored: the user can name them, or their pattern.

MAX_SIBLINGS = 4096
"""At most this many files are examined; in a larger folder the user gives a pattern."""

MAX_SAMPLED = 8
"""At most this many files are read for one number in the name; a small world is read in full anyway."""


def siblings_by_content(path: Path, saved: Saved, follow_symlinks: bool = False) -> list[RankName]:
    """Find the rank files of a file's checkpoint by their contents, in rank order; empty if the contents prove none.

    Links are skipped, unless they are to be followed.
    """
    world = max((world for _, world in saved.claims), default=1)
    folder = path.absolute().parent
    if world < 2 or "{" in folder.name + path.name or not tells_others(path):
        return []
    rank_in = cache(_rank_in)
    # The file by its name in its folder, and by its folder's name in the folder above.
    above = path.parent.parent if path.parent.name else Path("..")
    places = (path.parent, path.name, len(path.name)), (above, f"{folder.name}/{path.name}", len(folder.name))
    found: dict[bool, list[RankName]] = {True: [], False: []}
    for root, name, end in places:
        for number, counts_steps in numbers_in(name[:end]):
            pattern = f"{name[: number.start()]}{{rank}}{name[number.end() :]}"
            group = _of_ranks(_beside(path, root, pattern, follow_symlinks), world, counts_steps, rank_in)
            found[counts_steps] = max(found[counts_steps], group, key=len)
    group = found[False] or found[True]
    if len(group) < world:
        known = {one.path: one.rank for one in group}  # proven by some contents: these are not read again
        for root, name, _ in places:
            every = _every_rank(path, root, name, world, follow_symlinks, known, rank_in)
            if len(every) == world:
                return every
            if {one.rank for one in every} - {*known.values()}:
                group = []  # files for ranks that it lacks; their ranks are not proven
    return _with_items(group, saved.tree, world, follow_symlinks)


def _beside(path: Path, root: Path, pattern: str, follow_symlinks: bool) -> list[RankName]:
    """The files below a folder whose paths match a pattern, without links, except the file itself."""
    names = files_matching(root, pattern, follow_symlinks=True)[:MAX_SIBLINGS]
    return [n for n in names if n.path == path or follow_symlinks or not _is_link(n.path, root)]


def _is_link(path: Path, root: Path) -> bool:
    return path.is_symlink() or (path.parent != root and path.parent.is_symlink())


def _every_rank(
    path: Path,
    root: Path,
    name: str,
    world: int,
    follow_symlinks: bool,
    known: Mapping[Path, int],
    rank_in: Callable[[Path], int | None],
) -> list[RankName]:
    """The files that differ in any numbers, in the order of the ranks in their contents, if there is one per rank.

    If there are fewer, the files whose content has a rank; empty if the numbers cannot count ranks.
    """
    free = [number.span() for number, counts_steps in numbers_in(name) if not counts_steps]
    ends, starts = [0, *(end for _, end in free)], [*(start for start, _ in free), len(name)]
    expression = re.compile(r"(\d{1,9})".join(re.escape(name[a:b]) for a, b in zip(ends, starts, strict=True)))
    pattern = re.sub(r"\d+", "*", name.partition("/")[0]) + ("/*" if "/" in name else "")
    with reading(root):
        entries = sorted(islice(root.glob(pattern), MAX_SIBLINGS))
    found: dict[int, tuple[Path, list[int]]] = {}
    fitting = [(one, fits) for one in entries if (fits := expression.fullmatch(one.relative_to(root).as_posix()))]
    for one, fits in fitting if len(fitting) <= 2 * world else ():
        if one != path and not follow_symlinks and _is_link(one, root):
            continue
        rank = known[one] if one in known else rank_in(one)
        if rank is not None and 0 <= rank < world:
            if rank in found:
                return []
            found[rank] = one, [*map(int, fits.groups())]
    ranked = sorted(found.items())
    if len(ranked) == world and not count_as_ranks([numbers for _, (_, numbers) in ranked]):
        return []
    return [RankName(one, path.stem, rank, "", "", None, _unnamed(path)) for rank, (one, _) in ranked]


def count_as_ranks(numbers: Sequence[Sequence[int]]) -> bool:
    """Whether the numbers in the names of all ranks, in rank order, count ranks, or nodes and the places on them.

    For two runs that each lost some ranks, and together have one file of every rank, they do not.
    """
    differing = [list(column) for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    ranks = [column for column in differing if column in (list(range(len(column))), list(range(1, len(column) + 1)))]
    others = [column for column in differing if column not in ranks]
    grid = prod(len(set(column)) for column in others) == len(set(zip(*others, strict=True)))
    if len(ranks) == 1 and len(others) > 1 and grid:
        return True  # the rank, and its place on each axis of parallelism
    if len(ranks) > 1 or len(others) > 2 or not all(column[0] in (0, 1) for column in others):
        return False
    if len(others) < 2:
        return bool(ranks) and all(after - before in (0, 1) for column in others for before, after in pairwise(column))
    nodes, places = others
    steps = zip(pairwise(nodes), pairwise(places), strict=True)
    return all((b, there) in ((a, here + 1), (a + 1, places[0])) for (a, b), (here, there) in steps)


def _rank_in(path: Path) -> int | None:
    """The only rank in a file's content, -1 for none or several; None for a file that cannot be read."""
    with suppress(ReadError):
        ranks = {rank for rank, _ in reader.read(path).claims}
        return -1 if None in ranks or len(ranks) != 1 else ranks.pop()
    return None


def _of_ranks(
    names: list[RankName], world: int, counts_steps: bool, rank_in: Callable[[Path], int | None]
) -> list[RankName]:
    """Files by the ranks in their names, if the contents state these ranks, or one less; else empty.

    Half of the contents must agree, or together they must have all ranks, in another order, as swapped files do.
    """
    numbers = [name.rank for name in names]
    if len(set(numbers)) < len(numbers) or len(numbers) < 2:
        return []
    read = names[:: -(-len(names) // MAX_SAMPLED)]
    for first in (0, 1):
        if first <= numbers[0] and numbers[-1] < world + first:
            said = [(name.rank - first, own) for name in read if (own := rank_in(name.path)) is not None]
            right = sum(rank == own for rank, own in said)
            swapped = sorted(own for _, own in said) == list(range(world)) and not counts_steps
            if swapped or (right > 1 and right >= (len(said) if counts_steps else len(said) / 2)):
                return [name.from_one() for name in names] if first else names
    return []


def are_of_one(files: Sequence[Path]) -> bool:
    """Whether files with any names together are the rank files of one checkpoint, or some of them."""
    if any(path.is_symlink() or not path.is_file() for path in files):
        return False
    try:
        saved = reader.read(files[0])
    except ReadError:
        return False
    return {name.path for name in siblings_by_content(files[0], saved)} >= set(files)


# -- other items of the same ranks: `model_3.pt`, `optimizer_3.pt`, `step_3.pt` ----------------------------------------
# Names whose rank is proven by contents imply the names of the other items: only the words before the rank differ.
# They are of the same checkpoint if they have other keys; two runs beside each other have the same ones.
#
# Source: torch_checkpointing's `TorchSerialization` writes such files; so does many a script.

MAX_ITEMS = 32


def _with_items(group: Sequence[RankName], tree: Any, world: int, follow_symlinks: bool) -> list[RankName]:
    """The rank files of a checkpoint and of its other items, each with its `part`; unchanged for one item."""
    own, rank, _ = Path(group[0].spelled).name.partition("{rank}") if group else ("", "", "")
    families = _families(group[0], world, follow_symlinks) if own and rank else {}
    known = {path for path, _ in tensors_in(tree)}
    others = {head: names for head, names in families.items() if head != own and _is_item(names, known, world)}
    if not others:
        return list(group)
    items = {own: list(group), **others}
    named = [name._replace(part=head.rstrip("-_.")) for head, names in items.items() for name in names]
    return sorted(named, key=lambda name: (name.rank, "model" not in name.part, name.part))


def _families(of: RankName, world: int, follow_symlinks: bool) -> dict[str, list[RankName]]:
    """The files beside `of` whose names differ in the rank and in words before it, grouped by those words."""
    own_template = of.path.parent / Path(of.spelled).name
    own, _, tail = own_template.name.partition("{rank}")
    # other words, with the same numbers and separator
    words = r"\D*?".join(["", *re.findall(r"\d+", own), ""]) + re.escape(own[len(own.rstrip("-_.")) :])
    pattern = re.compile(rf"(?P<head>{words})(?P<rank>\d{{1,7}}){re.escape(tail)}", re.DOTALL)
    found: dict[str, list[RankName]] = {}
    for path in sorted(islice(of.path.parent.iterdir(), MAX_SIBLINGS)):
        fits = pattern.fullmatch(path.name)
        rank = int(fits["rank"]) - of.first if fits else -1
        if fits and 0 <= rank < world and (follow_symlinks or not path.is_symlink()) and path.is_file():
            template = str(own_template.with_name(f"{fits['head']}{{rank}}{tail}"))
            name = RankName(path, fits["head"], rank, "", "", None, template, of.width, of.first)
            found.setdefault(fits["head"], []).append(name)
    return {head: sorted(names, key=lambda n: n.rank) for head, names in islice(found.items(), MAX_ITEMS)}


def _is_item(names: Sequence[RankName], known: set[KeyPath], world: int) -> bool:
    """Whether files are another item, judged by the first readable one: none of its tensors has a known key path.

    A lone file is an item if its content has the rank of its name and the world size.
    """
    for name in names:
        with suppress(ReadError):
            saved = reader.read(name.path)
            sure = len(names) > 1 or (name.rank, world) in saved.claims
            return sure and known.isdisjoint(path for path, _ in tensors_in(saved.tree))
    return False


# -- the rank files of one checkpoint ----------------------------------------------------------------------------------


NUMBER = re.compile(r"\d+")
HOLDER = re.compile(r"\{(rank|world)\}")
MAX_FILES = 1 << 16


def rank_group(path: Path, options: Options) -> tuple[RankName, list[RankName]] | None:
    """Find the rank file to read first, and all files of its checkpoint in rank order; None without rank files.

    Raises:
        UsageError: the folder contains several checkpoints, or the pattern is malformed.
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


def group_in(folder: Path) -> RankName | None:
    """A file of the only checkpoint in a folder of rank files, by their names or else by their contents.

    Raises:
        UsageError: it contains several.
    """
    names = [name for name in names_in(folder) if not _is_other_name(name.path)]
    groups: dict[tuple[tuple[str, str], int | None], RankName] = {}
    for name in names:
        groups.setdefault((name.group, name.world_size), name)
    if len(groups) > 1 and not are_of_one([name.path for name in names]):
        raise several(folder, [name.path for name in groups.values()])
    return next(iter(groups.values()), None)


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
    found = re.search(r"\d+-of-(\d{1,7})(?!\d)", files[0].name)
    world = int(found[1]) if found and max(numbers) <= int(found[1]) else None
    numbered = zip(files, numbers, strict=True)
    return _from_zero([RankName(p, NUMBER.split(p.stem)[0], n, "", "", world, _unnamed(p)) for p, n in numbered])


def _unnamed(path: Path) -> str:
    return str(path.with_name(UNNAMED))


def _numbers(files: Sequence[Path]) -> list[int] | None:
    """The number of each path, if the paths differ in a single number; else None."""
    paths = [str(path) for path in files]
    if len({NUMBER.sub("0", path) for path in paths}) > 1:
        return None
    columns = list(zip(*(map(int, NUMBER.findall(path)) for path in paths), strict=True))
    differing = [list(column) for column in columns if len(set(column)) > 1]
    return differing[0] if len(differing) == 1 and len(set(differing[0])) == len(files) else None


def files_matching(folder: Path, pattern: str, follow_symlinks: bool) -> list[RankName]:
    """The files below a folder whose paths match a pattern such as `model-{rank}-of-{world}.pt`, in rank order.

    Raises:
        UsageError: the path is not a folder, or the pattern has no `{rank}` or leads out of the folder.
        ReadError: no file fits.
        UnsafePathError: a file is a link out of the folder.
    """
    from glob import escape

    if not folder.is_dir():
        raise UsageError(
            folder, f"{spelled('ranks')} goes with a folder, in which it says what the rank files are called"
        )
    inside = not Path(pattern).is_absolute() and ".." not in Path(pattern).parts and "\0" not in pattern
    if "{rank}" not in pattern or not inside:
        text = "expected a name in the folder with {rank} in it, such as 'model-{rank}-of-{world}.pt'"
        raise UsageError(None, f"{spelled('ranks')} {describe_for_error(pattern)}: {text}")
    expression = re.compile(_expression(pattern))
    with reading(folder):
        paths = sorted(islice((p for p in folder.glob(HOLDER.sub("*", escape(pattern))) if p.is_file()), MAX_FILES))
    found = [(p, m) for p in paths if (m := expression.fullmatch(p.relative_to(folder).as_posix()))]
    if not found:
        raise ReadError(folder, f"no file fits {spelled('ranks')} {describe_for_error(pattern)}{_here(folder)}")
    real = real_path(folder)
    for path, _ in () if follow_symlinks else found:
        if not real_path(path).is_relative_to(real):
            raise UnsafePathError(
                path, f"is or lies behind a link out of the folder; follow it with {spelled('follow-symlinks', True)}"
            )
    return _from_zero([_fitted(folder, pattern, p, m) for p, m in found])


def file_matching(path: Path, pattern: str) -> RankName:
    """Parse one file's name by a pattern, without listing its folder."""
    found = re.fullmatch(_expression(pattern), path.name)
    assert found is not None, f"{path.name} is no {pattern}"
    return _fitted(path.parent, pattern, path, found)


def _expression(pattern: str) -> str:
    """The pattern as a regular expression: a repeated placeholder stands for the same number."""
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
    template = str(folder / pattern.replace("{world}", world or ""))
    ranked = next(part for part in reversed(Path(pattern).parts) if "{rank}" in part)
    head = HOLDER.split(ranked)[0]
    return RankName(path, head, int(found["rank"]), "", "", int(world) if world else None, template, len(found["rank"]))


def _from_zero(names: list[RankName]) -> list[RankName]:
    """Renumber the names from rank 0 if they count from 1 to the world size."""
    ordered = sorted(names, key=lambda n: (n.rank, n.path))
    worlds = {n.world_size for n in ordered}
    if ordered[0].rank >= 1 and worlds == {ordered[-1].rank}:
        return [n.from_one() for n in ordered]
    return ordered


# -- read the files, and determine the rank of each --------------------------------------------------------------------


class GroupRead(SavedFiles):
    """The files of a group that were read: every rank's, or the named file and the one it may be swapped with.

    Attributes:
        name: the named file; its rank counts from 0.
        group: all files, likewise, in rank order.
        all_ranks: whether every file was to be read.

    Raises:
        ReadError: the named file cannot be read.
    """

    def __init__(self, problems: list[Problem], name: RankName, group: Sequence[RankName], options: Options) -> None:
        super().__init__(options.read_file)
        self.problems, self.name, self.group, self.options = problems, name, group, options
        self._states_rank = False
        every = options.all_ranks or not name.rank_in_name
        wanted = group if every else [n for n in group if n.rank == name.rank]
        self.all_ranks = every or len(wanted) == len(group)
        wanted = sorted(wanted, key=lambda n: n.path != name.path)
        options.read_ahead([member.path for member in wanted])
        for member in wanted:
            self._read_member(member, must=member.path == name.path or not member.rank_in_name)
        # Parameter names may belong to several ranks, and then fit no rank alone. Names of files that were given
        # one by one need not count ranks: their contents state the ranks.
        unnamed = options.names is not None and not any(s.claims for s in self.saved.values())
        uncounted = bool(options.files) and group[-1].rank > len(group)
        if not self.all_ranks and (self._is_small() or unnamed or uncounted):
            rest = [member for member in self.group if member.path not in {*self.saved, *self.faults}]
            self.options.read_ahead([member.path for member in rest])
            for member in rest:
                self._read_member(member, must=False)
            self.all_ranks = True
        if all(map(self._counts_from_one, group)) and any(self._rank_inside(n) is not None for n in group):
            self.group, self.name = [n.from_one() for n in group], name.from_one()
        self._read_namesakes(self.name)
        self.ranks = {n.path: self._rank_of(n) for n in self.group}
        self.problems += self._misnamed()

    def _read_member(self, member: RankName, must: bool) -> None:
        saved = self.read(member.path, must)
        if saved is not None:
            stated = stated_claim(saved.tree) if isinstance(saved.content, dict) or self._states_rank else None
            self._states_rank = stated is not None
            self.saved[member.path] = saved._replace(claims=frozenset([stated])) if stated else saved

    def _is_small(self) -> bool:
        """Whether the files, by the size of those that were read, are small enough to read all."""
        nbytes = sum(saved.bytes_read for saved in self.saved.values())
        return is_small(len({n.rank for n in self.group}), nbytes * len(self.group) // max(len(self.saved), 1))

    def _read_namesakes(self, name: RankName) -> None:
        """If the content states another rank than the name, read that rank's file too: the two may be swapped."""
        rank = self._rank_inside(name)
        while rank is not None:
            others = [n for n in self.group if n.rank == rank and n.part == name.part]
            if not others or others[0].path in {*self.saved, *self.faults}:
                return
            self._read_member(others[0], must=False)
            rank = self._rank_inside(others[0])

    def _rank_inside(self, name: RankName) -> int | None:
        """The only rank in a file's content; None for none, several, or a file that was not read."""
        claims = {rank for rank, _ in self.saved[name.path].claims} if name.path in self.saved else set()
        claimed = [rank for rank in claims if rank is not None]
        return claimed[0] if len(claimed) == 1 else None

    def _counts_from_one(self, name: RankName) -> bool:
        """Whether a name in the caller's own pattern has the rank plus one, by the contents that were read."""
        return (
            bool(name.spelled) and not name.first and name.rank > 0 and self._rank_inside(name) in (None, name.rank - 1)
        )

    def _rank_of(self, name: RankName) -> int:
        """The rank in a file's content, else in its name."""
        rank = self._rank_inside(name)
        if rank is None and not name.rank_in_name:
            raise UsageError(
                name.path, f"neither name nor content has its rank; give it with {spelled('ranks')} PATTERN"
            )
        return name.rank if rank is None else rank

    def _misnamed(self) -> Iterator[Problem]:
        """Find files whose content states another rank than their name: a resume by rank loads another rank's shards.

        It is a warning if the numbers in the names may not be ranks: all of them are off by the same amount, or the
        files were given one by one; and for a copy, because the rank that occurs twice is an error already.
        """
        known = {
            n.path: n.rank - rank for n in self.group if (rank := self._rank_inside(n)) is not None and n.rank_in_name
        }
        shifted = len(known) > 1 and len(set(known.values())) == 1
        files_of = Counter((self.ranks[n.path], n.part) for n in self.group)
        for name in self.group:
            rank = self.ranks[name.path]
            if name.rank_in_name and rank != name.rank:
                counts = not shifted and (parse(name.path) is not None or not self.options.files)
                sure = counts and files_of[rank, name.part] == 1
                kind = Code.NAMED_AS_ANOTHER_RANK if sure else Code.NAME_CONTRADICTS
                text = f"{name.path.name} holds rank {rank}; the content is believed"
                yield Problem(kind, text, name.rank, found=rank, expected=name.rank)


def stated_world_size(trees: Iterable[Any]) -> int | None:
    """The number of ranks stated in the files: at their root, or as Composer stores it in `state.metadata`."""
    for tree in trees:
        for path in (("state", "metadata", "world_size"), ("world_size",)):
            stated = leaf_at(tree, path)
            if type(stated) is int and stated > 0:
                return stated
    return None
