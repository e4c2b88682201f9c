"""File names that carry a rank, and the files that belong together.

Composer `ep0-ba5-rank3.pt`, OLMo `rank3.pt`, verl `model_world_size_4_rank_3.pt` with `optim_…` and `extra_state_…`,
Accelerate `pytorch_model_fsdp_0_rank3.bin`, `x.rank_3.pth`, each also compressed (`.pt.gz`) or a tar. A name only
proposes: rank and world size are taken from the content where that tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptools.files.location import check_stays_inside, real_path
from ckptools.files.opening import reading
from ckptools.formats.shared.several import several

COMPRESSED = (".gz", ".bz2", ".xz", ".lzma", ".zst", ".lz4", ".lzo")
RANKED = re.compile(
    r"(?P<head>.*?)(?<![A-Za-z])rank[_-]?(?P<rank>\d{1,7})"
    r"(?P<tail>\.(?:pt|pth|bin|ckpt|tar)(?:\.(?:gz|bz2|xz|lzma|zst|lz4|lzo))?|\.tgz|)",
    re.DOTALL,
)
WITHOUT_SUFFIX = re.compile(r"ep\d+-ba\d+-\Z")
"""How Composer's names began until 0.8, when they had no suffix (`ep0-ba5-rank0`)."""

WORLD = re.compile(r"(?P<part>[A-Za-z_]*?)_?world_size_(?P<world>\d{1,7})_\Z")
VERL_PARTS = ("model", "optim", "extra_state")


class RankName(NamedTuple):
    """A file name with a rank in it.

    Attributes:
        path: the file.
        head: text before the rank; the same for all ranks of one part.
        rank: as the name says.
        tail: text behind the rank.
        part: which part of a rank's state it holds, where a rank has several files; else "".
        world_size: as the name says; None when it does not.
        spelled: for names of the caller's choice: how the path of any rank is spelled, with `{rank}`, or `?`.
        width: digits of the rank in it.
        first: the number that rank 0 has in it.
        rank_in_name: whether the name tells the rank; else it is only a place in a list.
    """

    path: Path
    head: str
    rank: int
    tail: str
    part: str
    world_size: int | None
    spelled: str = ""
    width: int = 1
    first: int = 0
    rank_in_name: bool = True

    @property
    def group(self) -> tuple[str, str]:
        """What the names of all files of one checkpoint have in common."""
        return ("", self.tail) if self.part else (self.head, self.tail)

    def of_rank(self, rank: int, part: str) -> Path:
        """The file of another rank, or of another part, of the same checkpoint."""
        if self.spelled:
            return type(self.path)(self.spelled.replace("{rank}", str(rank + self.first).zfill(self.width)))
        head = f"{part}{self.head[len(self.part) :]}" if part else self.head
        middle = self.path.name[len(self.head) : len(self.path.name) - len(self.tail)].rstrip("0123456789")
        return self.path.with_name(f"{head}{middle}{rank}{self.tail}")

    def from_one(self) -> RankName:
        """The same file, for names that number ranks from 1."""
        return self._replace(rank=self.rank - 1, first=1)


def parse(path: Path) -> RankName | None:
    """Parse a file name with a rank in it; None when it has none."""
    found = RANKED.fullmatch(path.name)
    if not found:
        return None
    head, rank, tail = found["head"], int(found["rank"]), found["tail"]
    if not tail and not WITHOUT_SUFFIX.search(head):
        return None
    world = WORLD.match(head)
    if world and world["part"] in VERL_PARTS:
        return RankName(path, head, rank, tail, world["part"], int(world["world"]))
    return RankName(path, head, rank, tail, "", int(world["world"]) if world else None)


def check_links(names: Sequence[RankName], asked: Path) -> None:
    """Refuse links out of the folder among rank files; only the file that the caller asked for may be one.

    Raises:
        UnsafePathError: one of them is.
    """
    for name in names:
        if name.path != asked:
            check_stays_inside(name.path, name.path.parent)


def siblings(of: RankName) -> list[RankName]:
    """The files of the same checkpoint beside `of`, itself included, in rank order."""
    same = [n for n in names_in(of.path.parent) if n.group == of.group and n.world_size == of.world_size]
    return sorted(same, key=lambda n: (n.rank, VERL_PARTS.index(n.part) if n.part else 0))


def names_in(folder: Path) -> Iterable[RankName]:
    """Every file name with a rank in a folder."""
    with reading(folder):
        entries = sorted(folder.iterdir())
    return (name for name in map(parse, entries) if name is not None)


def _is_other_name(path: Path) -> bool:
    """Whether a file is a link to another rank file of its folder, such as Composer's `latest-rank0.pt`."""
    if not path.is_symlink():
        return False
    target = real_path(path)
    return target.parent == real_path(path.parent) and parse(target) is not None


def only_group(folder: Path) -> RankName | None:
    """A file of the one checkpoint that a folder of rank files holds; None when it holds none.

    Raises:
        UsageError: it holds several.
    """
    groups: dict[tuple[tuple[str, str], int | None], RankName] = {}
    for name in names_in(folder):
        if _is_other_name(name.path):
            continue
        groups.setdefault((name.group, name.world_size), name)
    if len(groups) > 1:
        raise several(folder, [name.path for name in groups.values()])
    return next(iter(groups.values()), None)
