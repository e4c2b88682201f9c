"""Selection of the rank files of one checkpoint: siblings by name, several given files, or files of a pattern.

`rank_names` parses known names. Other names are taken where the caller gives them: several files together, whose rank
is the one number in which their names differ, or else in their content; or a pattern such as
`model-{rank}-of-{world}.pt` for the files of a folder. A rank in the content takes precedence over the name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from ckptools.errors import ReadError, SeveralError, UnsafePathError, UsageError
from ckptools.files.location import real_path, tells_others
from ckptools.files.opening import reading
from ckptools.formats.options import Options
from ckptools.formats.rank_search.rank_checks import UNNAMED
from ckptools.formats.rank_search.rank_names import RankName, check_links, names_in, only_group, parse, siblings
from ckptools.formats.rank_search.sibling_search import are_of_one
from ckptools.model.values import describe_for_error

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


def group_in(folder: Path) -> RankName | None:
    """A file of the one checkpoint in a folder of rank files, by their names or else by their contents.

    Raises:
        UsageError: it holds several.
    """
    try:
        return only_group(folder)
    except SeveralError:
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
        untold = (RankName(p, p.stem, at, p.suffix, "", None, _unnamed(p)) for at, p in enumerate(files))
        return [name._replace(rank_in_name=False) for name in untold]
    world = _of_world(files[0], set(numbers))
    return _from_zero([_numbered(p, n, world) for p, n in zip(files, numbers, strict=True)])


def _numbered(path: Path, number: int, world: int | None) -> RankName:
    return RankName(path, NUMBER.split(path.stem)[0], number, "", "", world, _unnamed(path))


def _unnamed(path: Path) -> str:
    return str(path.with_name(UNNAMED))


def _numbers(files: Sequence[Path]) -> list[int] | None:
    """The number of each path, where the paths differ in just one; else None."""
    paths = [str(path) for path in files]
    if len({NUMBER.sub("0", path) for path in paths}) > 1:
        return None
    columns = list(zip(*(map(int, NUMBER.findall(path)) for path in paths), strict=True))
    differing = [list(column) for column in columns if len(set(column)) > 1]
    if len(differing) != 1 or len(set(differing[0])) < len(files):
        return None
    return differing[0]


def _of_world(path: Path, numbers: set[int]) -> int | None:
    """The `4` of `model-2-of-4.pt`, unless a number is larger."""
    found = re.search(r"\d+-of-(\d{1,7})(?!\d)", path.name)
    return int(found[1]) if found and max(numbers) <= int(found[1]) else None


def files_matching(folder: Path, pattern: str, follow_symlinks: bool) -> list[RankName]:
    """The files of a folder whose names match a pattern such as `model-{rank}-of-{world}.pt`, in rank order.

    Args:
        folder: where they are.
        pattern: a path below it with `{rank}`, and `{world}` where the names have the world size.
        follow_symlinks: accept links out of the folder.

    Raises:
        UsageError: the path is no folder, or the pattern has no `{rank}` or leads out of the folder.
        ReadError: no file fits.
        UnsafePathError: a file is a link out of the folder.
    """
    from glob import escape

    _check_pattern(folder, pattern)
    expression = re.compile("".join(_expressions(pattern)))
    anything = "".join("*" if n % 2 else escape(text) for n, text in enumerate(HOLDER.split(pattern)))
    with reading(folder):
        paths = sorted(islice((p for p in folder.glob(anything) if p.is_file()), MAX_FILES))
    found = [(p, m) for p in paths if (m := expression.fullmatch(p.relative_to(folder).as_posix()))]
    if not found:
        raise ReadError(folder, f"no file fits --ranks {describe_for_error(pattern)}{_here(folder)}")
    if not follow_symlinks:
        _check_inside((p for p, _ in found), folder)
    return _from_zero([_fitted(folder, pattern, p, m) for p, m in found])


def _check_pattern(folder: Path, pattern: str) -> None:
    if not folder.is_dir():
        raise UsageError(folder, "--ranks goes with a folder, in which it says what the rank files are called")
    inside = not Path(pattern).is_absolute() and ".." not in Path(pattern).parts and "\0" not in pattern
    if "{rank}" not in pattern or not inside:
        text = "expected a name in the folder with {rank} in it, such as 'model-{rank}-of-{world}.pt'"
        raise UsageError(None, f"--ranks {describe_for_error(pattern)}: {text}")


def _expressions(pattern: str) -> Iterable[str]:
    """The pattern as a regular expression: a placeholder that comes again stands for the same number."""
    seen: set[str] = set()
    for n, text in enumerate(HOLDER.split(pattern)):
        if n % 2 == 0:
            yield re.escape(text)
        else:
            yield f"(?P={text})" if text in seen else rf"(?P<{text}>\d{{1,7}})"
            seen.add(text)


def _here(folder: Path) -> str:
    with reading(folder):
        names = sorted(p.name for p in islice(folder.iterdir(), 100))
    return (
        f"; here are {', '.join(map(describe_for_error, names[:6]))}{', …' if len(names) > 6 else ''}" if names else ""
    )


def _check_inside(paths: Iterable[Path], folder: Path) -> None:
    real = real_path(folder)
    for path in paths:
        if not real_path(path).is_relative_to(real):
            raise UnsafePathError(path, "is or lies behind a link out of the folder; follow it with --follow-symlinks")


def _fitted(folder: Path, pattern: str, path: Path, found: re.Match[str]) -> RankName:
    words = found.groupdict()
    spelled = pattern.replace("{world}", words.get("world") or "")
    head = HOLDER.split(Path(pattern).name)[0]
    world = int(words["world"]) if words.get("world") else None
    return RankName(path, head, int(found["rank"]), "", "", world, str(folder / spelled), len(found["rank"]))


def _from_zero(names: list[RankName]) -> list[RankName]:
    """Renumber the names from rank 0 where they count from 1 to the world size."""
    ordered = sorted(names, key=lambda n: (n.rank, n.path))
    worlds = {n.world_size for n in ordered}
    if ordered[0].rank >= 1 and worlds == {ordered[-1].rank}:
        return [n.from_one() for n in ordered]
    return ordered
