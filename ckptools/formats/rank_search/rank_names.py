"""Names of the ranks' files, and the files that belong together by their names.

Composer `ep0-ba5-rank3.pt`, OLMo `rank3.pt`, verl `model_world_size_4_rank_3.pt` with `optim_…` and `extra_state_…`,
Accelerate `pytorch_model_fsdp_0_rank3.bin`, `x.rank_3.pth`, each also compressed (`.pt.gz`) or a tar. A name is only a
hint: rank and world size are taken from the content if it states them.

Temporary names, left over after an interrupted write:

    step-8.tmp, .metadata.tmp, __0_0.distcp.tmp     DCP's FileSystemWriter, and other writers that rename when done
    .ckptools-RUN, .model.pt.1a2b3c4d.partial       ckptools create; ckptools consolidate
    tmp-checkpoint-500                              transformers' Trainer, 4.37 and 4.38
    model.safetensors.incomplete                    huggingface_hub, while it downloads

Source: torch/distributed/checkpoint/filesystem.py, transformers/trainer.py, huggingface_hub/file_download.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ckptools.files.opening import check_stays_inside, is_remote, reading

COMPRESSED = (".gz", ".bz2", ".xz", ".lzma", ".zst", ".lz4", ".lzo")
RANKED = re.compile(
    r"(?P<head>.*?)(?<![A-Za-z])rank[_-]?(?P<rank>\d{1,7})"
    r"(?P<tail>\.(?:pt|pth|bin|ckpt|tar)(?:\.(?:gz|bz2|xz|lzma|zst|lz4|lzo))?|\.tgz|)",
    re.DOTALL,
)
WITHOUT_SUFFIX = re.compile(r"ep\d+-ba\d+-\Z")
"""Matches the prefix of Composer's names until 0.8, which had no suffix (`ep0-ba5-rank0`)."""

WORLD = re.compile(r"(?P<part>[A-Za-z_]*?)_?world_size_(?P<world>\d{1,7})_\Z")
VERL_PARTS = ("model", "optim", "extra_state")

MAX_ENTRIES = 1 << 16

TEMPORARY = re.compile(
    r".*\.(?:tmp|partial|incomplete)|.*\.tmp[._-][\w.-]*|\.ckptools-.*|tmp-checkpoint-\d+|\.tmp[._-].*", re.DOTALL
)

NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")
COUNTS_STEPS = re.compile(r"(?:ep|epoch|ba|batch|step|iter|iteration|checkpoint)[-_=]?\d+", re.IGNORECASE)


class RankName(NamedTuple):
    """A file name with a rank in it.

    Attributes:
        head: text before the rank; the same for all ranks of one part.
        tail: text behind the rank.
        part: the part of a rank's state, if a rank has several files; else "".
        world_size: None if the name does not state it.
        spelled: for the caller's own names: the path of any rank, with `{rank}`, or `?`.
        width: digits of the rank in it.
        first: the number of rank 0 in it.
        rank_in_name: whether the name has the rank; else `rank` is an index in a list.
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
        """The common part of the names of all files of one checkpoint."""
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
    """Parse a file name with a rank in it; None without a rank."""
    found = RANKED.fullmatch(path.name)
    if not found:
        return None
    head, rank, tail = found["head"], int(found["rank"]), found["tail"]
    if not tail and not WITHOUT_SUFFIX.search(head):
        return None
    world = WORLD.match(head)
    part = world["part"] if world and world["part"] in VERL_PARTS else ""
    return RankName(path, head, rank, tail, part, int(world["world"]) if world else None)


def check_links(names: Sequence[RankName], asked: Path) -> None:
    """Refuse links out of the folder among rank files; only the file that the caller named may be one.

    Raises:
        UnsafePathError: one of them leads out.
    """
    for name in names:
        if name.path != asked:
            check_stays_inside(name.path, name.path.parent)


def siblings(of: RankName) -> list[RankName]:
    """The files of the same checkpoint beside `of`, itself included, in rank order."""
    same = [n for n in names_in(of.path.parent) if n.group == of.group and n.world_size == of.world_size]
    return sorted(same, key=lambda n: (n.rank, VERL_PARTS.index(n.part) if n.part else 0))


def names_in(folder: Path) -> Iterable[RankName]:
    """Yield every file name with a rank in a folder."""
    with reading(folder):
        entries = sorted(folder.iterdir())
    return (name for name in map(parse, entries) if name is not None)


def is_temporary(name: str) -> bool:
    """Whether a file or folder has the name of an unfinished write."""
    return TEMPORARY.fullmatch(name) is not None


def unfinished(path: Path) -> list[str]:
    """Temporary names that contain a missing file's name: left-overs of its writer."""
    if is_remote(path):  # its store is not listed for this
        return []
    with suppress(OSError):
        beside = islice(path.parent.iterdir(), MAX_ENTRIES)
        return sorted(one.name for one in beside if path.name in one.name and is_temporary(one.name))
    return []


def unfinished_ranks(of: RankName) -> set[int]:
    """Ranks that have a file with a temporary name beside a file of the checkpoint: their writers did not end."""
    if is_remote(of.path) or not of.rank_in_name or of.spelled:
        return set()
    middle = of.path.name[len(of.head) : len(of.path.name) - len(of.tail)].rstrip("0123456789")
    name = re.compile(rf"(?<![\w-]){re.escape(of.head + middle)}(\d{{1,7}}){re.escape(of.tail)}(?!\w)")
    with suppress(OSError):
        beside = islice(os.listdir(of.path.parent), MAX_ENTRIES)  # noqa: PTH208 - no path for each of many files
        return {int(found[1]) for one in beside if (found := name.search(one)) and is_temporary(one)}
    return set()


def numbers_in(name: str) -> Iterator[tuple[re.Match[str], bool]]:
    """Yield the numbers in a file's name, and whether each counts steps, because of a word such as `checkpoint`."""
    steps = [found.span() for found in COUNTS_STEPS.finditer(name)]
    for found in NUMBER.finditer(name):
        yield found, any(start <= found.start() < end for start, end in steps)


def with_digits(path: Path, number: re.Match[str], digits: str) -> Path:
    """The path of a file with one number in its name replaced."""
    return path.with_name(f"{path.name[: number.start()]}{digits}{path.name[number.end() :]}")
