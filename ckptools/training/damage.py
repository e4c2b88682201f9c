"""Damage on purpose: `--break truncate:2,bitflip:1,swap:0-3` on a checkpoint that was just saved.

A number is a rank, whose files are damaged; if no file belongs to a rank, it is the number of a file, from 0 on. No
table says which problems show a damage: the damaged checkpoint is verified, and the problems that `verify` finds in the
rank or the file are reported.
"""

from __future__ import annotations

import dataclasses
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import CkptoolsError, UsageError
from ckptools.files.opening import File, Window
from ckptools.files.zip_archive import Container, checksum_places
from ckptools.formats.open import open_checkpoint
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.shards import Shard, Source
from ckptools.model.tree import tensors_in
from ckptools.tensor_io.checksums import crc32
from ckptools.text import few, fqn_of
from ckptools.training.options import CreateOptions
from ckptools.verify.run import verify

# -- kinds of damage: one function for each, and the table `KINDS` that names them -------------------------------------
# The functions know files and bytes, but no layout: `apply` asks ckptools where each tensor lies.


# One NaN of each dtype that the strategies save, little-endian.
NAN = {
    "float32": struct.pack("<f", float("nan")),
    "bfloat16": struct.pack("<f", float("nan"))[2:],
    "float16": struct.pack("<e", float("nan")),
}

# The number of the rank in a name: `-rank3.pt`, `_rank_3.pt`, `__3_0.distcp`, `random_states_3.pkl`.
RANK = re.compile(r"(?:(?<=rank)|(?<=rank_)|(?<=^__)|(?<=states_))\d+")


@dataclass(frozen=True)
class Asked:
    """One item of `--break`; `other` is the second rank, where the kind takes two."""

    kind: str
    rank: int
    other: int | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The one or two ranks that the item names."""
        return (self.rank,) if self.other is None else (self.rank, self.other)

    def __str__(self) -> str:
        return f"{self.kind}:{'-'.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Broken:
    """A damage that was done, and the problems that show it.

    Attributes:
        files: names of the damaged files.
        what: the damage in words.
        shown: codes of the problems that `verify` finds in these files, such as `CK004`.
        refused: the error with which `verify` ends if it cannot open the damaged checkpoint; else empty.
    """

    asked: Asked
    files: str
    what: str
    shown: tuple[str, ...] = ()
    refused: str = ""

    @property
    def seen(self) -> str:
        """The damage as `verify` shows it, in words."""
        if self.refused:
            return "cannot be opened"
        return ", ".join(self.shown) or "nothing: the files do not show it"


@dataclass(frozen=True)
class Target:
    """The files of one damage, and the shards in them.

    Attributes:
        files: the files of the rank.
        others: the files on the other side, as `Kind.others` says: equally many, in the same order.
        shards: fqn and shard of everything in `files` that can be damaged, if the kind damages a tensor; else empty.
        chance: draws the place of the damage.
    """

    files: tuple[Path, ...]
    others: tuple[Path, ...]
    shards: tuple[tuple[str, Shard], ...]
    chance: random.Random


@dataclass(frozen=True)
class Kind:
    """One kind of damage.

    Attributes:
        do: does the damage; returns it in words.
        part: the damaged part of a rank: all its `files`, the first `file`, or a `tensor` in the first file.
        others: the files on the other side, if the kind has one: the files of the `second rank`, the files of the same
            rank in an `older run` or `another run`, or new files, named as those of a `next rank` after the last.
    """

    do: Callable[[Target], str]
    part: str = "files"
    others: str = ""


def put_nan(target: Target) -> str:
    """Put NaN into one element and correct the checksum, as if a diverged run had saved it."""
    fqn, shard, source = _draw(target)
    width = len(NAN[source.dtype])
    element = target.chance.randrange(prod(source.shape))
    _write(source.path, source.offset + element * width, NAN[source.dtype])
    _restate_checksum(shard, source)
    return f"NaN in {fqn}, the checksum made right"


def flip_bit(target: Target) -> str:
    """Flip one bit of a tensor's bytes, as a bad disk or cable does."""
    fqn, _, source = _draw(target)
    at = source.offset + target.chance.randrange(prod(source.shape) * ITEMSIZE[source.dtype])
    bit = target.chance.randrange(8)
    with File(source.path) as file:
        byte = file.read(at, 1)[0]
    _write(source.path, at, bytes([byte ^ 1 << bit]))
    return f"bit {bit} of byte {at} flipped, in {fqn}"


def take(whose: str, target: Target) -> str:
    """Replace the rank's files by the same rank's files of another run."""
    _copy(target.others, target.files)
    return f"replaced by the same rank's of {whose}"


def give(how: str, target: Target) -> str:
    """Write this rank's files under another's names."""
    _copy(target.files, target.others)
    return f"{how} {names(target.others)}"


def swap(target: Target) -> str:
    """Exchange the files of two ranks."""
    for mine, other in zip(target.files, target.others, strict=True):
        aside = mine.with_name(f".{mine.name}.swapped")
        mine.rename(aside)
        other.rename(mine)
        aside.rename(other)
    return f"exchanged with {names(target.others)}"


def truncate(target: Target) -> str:
    """Cut the file at half its size, as a full disk or a broken transfer does."""
    (path,) = target.files
    nbytes = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(nbytes // 2)
    return f"cut at 50%: {nbytes // 2} of {nbytes} bytes are left"


def remove(target: Target) -> str:
    """Remove the rank's files, as a lost node does."""
    for path in target.files:
        path.unlink()
    return "removed"


# Damages are done in this order: a bit is flipped before its file is cut or moved.
KINDS: dict[str, Kind] = {
    "nan": Kind(put_nan, part="tensor"),
    "bitflip": Kind(flip_bit, part="tensor"),
    # A save that was cut off, and two jobs that write to one folder.
    "stale": Kind(partial(take, "one step before"), others="older run"),
    "mixed-run": Kind(partial(take, "a run with another seed"), others="another run"),
    # A wrong rename, a wrong copy, and files of a larger world.
    "swap": Kind(swap, others="second rank"),
    "copy": Kind(partial(give, "copied over"), others="second rank"),
    "duplicate": Kind(partial(give, "also there as"), others="next rank"),
    "truncate": Kind(truncate, part="file"),
    "missing": Kind(remove),
}


def names(files: Iterable[Path]) -> str:
    """The names of some files, at most three; with their folders if two have the same name."""
    found = list(files)
    alike = len({path.name for path in found}) < len(found)
    return few([f"{path.parent.name}/{path.name}" if alike else path.name for path in found], 3)


def _draw(target: Target) -> tuple[str, Shard, Source]:
    """Draw a shard; a shard of one element, such as a counter, only if there is no other."""
    fqn, shard = target.chance.choice([one for one in target.shards if one[1].box.numel > 1] or target.shards)
    assert shard.source is not None
    return fqn, shard, shard.source


def _copy(sources: Iterable[Path], targets: Iterable[Path]) -> None:
    for source, target in zip(sources, targets, strict=True):
        shutil.copyfile(source, target)


def _write(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def _restate_checksum(shard: Shard, source: Source) -> None:
    """Correct the CRC-32 that an archive states for the record of a shard; safetensors state no checksums."""
    if not source.crc:
        return
    with File(source.path) as file:
        item = shard.item
        archive = Container(file if item is None else Window(file, item.offset, item.length))
        places = [archive.file.start + at for at in checksum_places(archive, source.record)]
        checksum = crc32(file.read(*source.record_span))
    for at in places:
        _write(source.path, at, struct.pack("<I", checksum))


def renumbered(path: Path, rank: int, other: int) -> Path:
    """Name the same file of another rank: replace the number after `rank`, else the last number equal to the rank."""
    found = list(RANK.finditer(path.name)) or [m for m in re.finditer(r"\d+", path.name) if int(m[0]) == rank]
    if not found:
        return path.with_name(f"{path.stem}-{other}{path.suffix}")
    start, end = found[-1].span()
    return path.with_name(f"{path.name[:start]}{other:0{end - start}d}{path.name[end:]}")


# -- damage on purpose -------------------------------------------------------------------------------------------------


RUNS = ("older run", "another run")

DISAGREEMENTS = (Code.MIXED_SAVES, Code.COPIES_DIFFER, Code.LAYOUT_DISAGREES)
"""Problems between ranks; without a majority they name no rank."""

# Strategies and layouts with which rank 0 writes one file for all ranks.
ONE_FILE = (("ddp", "composer"), ("ddp", "snapshot"), ("ddp", "lightning"), ("ddp", "fabric"))


def parse(text: str) -> tuple[Asked, ...]:
    """Read what `--break` was given; in the order in which it is done.

    Raises:
        UsageError: a kind is unknown, an item has too few or too many ranks, or a rank is named twice.
    """
    asked = [_parse_one(item.strip()) for item in text.split(",") if item.strip()]
    ranks = [rank for one in asked for rank in one.ranks]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise UsageError(None, f"--break {text}: rank {twice[0]} is named twice; damage each rank once")
    return tuple(sorted(asked, key=lambda one: list(KINDS).index(one.kind)))


def _parse_one(item: str) -> Asked:
    kind, _, ranks = item.partition(":")
    if kind not in KINDS:
        raise UsageError(None, f"--break {item}: {kind} is not a known damage; choose from {', '.join(KINDS)}")
    numbers, two = ranks.split("-"), KINDS[kind].others == "second rank"
    if not all(n.isascii() and n.isdigit() for n in numbers) or len(numbers) != 1 + two:
        wanted = f"two ranks, as in {kind}:0-1" if two else f"one rank, as in {kind}:2"
        raise UsageError(None, f"--break {item}: {kind} takes {wanted}")
    return Asked(kind, *map(int, numbers))


def check(options: CreateOptions, world_size: int | None, own_ranks: bool = True) -> None:
    """Refuse damage that does not apply, before anything is trained; `world_size` is None while it is not known.

    Other runs can be trained only if this process starts all ranks itself: `own_ranks`.

    Raises:
        UsageError: as `parse`; a rank does not exist; a kind means nothing in this layout.
    """
    whose = f"{options.layout} with {options.strategy}"
    one_file = (options.strategy, options.layout) in ONE_FILE
    for asked in parse(options.damage):
        if one_file and (asked.rank or KINDS[asked.kind].part == "files"):
            raise UsageError(None, f"--break {asked} does not apply: {whose} is one file for all ranks, named rank 0")
        if world_size is not None and max(asked.ranks) >= world_size:
            raise UsageError(None, f"--break {asked}: there is no rank {max(asked.ranks)} in a world of {world_size}")
        run = KINDS[asked.kind].others
        if run == "older run" and options.steps < 2:
            raise UsageError(None, f"--break {asked}: there is no older step; it needs --steps 2 or more")
        if run in RUNS and not own_ranks:
            raise UsageError(None, f"--break {asked} trains another run: ckptools create must start the ranks")


def other_runs(text: str) -> tuple[str, ...]:
    """The runs, of `RUNS`, that the damage takes files from."""
    return tuple(run for run in RUNS if run in {KINDS[asked.kind].others for asked in parse(text)})


def apply(path: Path, text: str, seed: int, runs: Mapping[str, Path]) -> tuple[Broken, ...]:
    """Damage a finished checkpoint, given by its folder or a rank's file; return what `verify` finds for each damage.

    The same seed damages the same place. `runs` has the path to open for each run that `other_runs` names.

    Raises:
        UsageError: a rank has no file here, or no file with a tensor; then nothing was damaged.
    """
    files = _Files(path)
    elsewhere = {name: _Files(other) for name, other in runs.items()}
    targets = {asked: _target(asked, files, elsewhere, seed) for asked in parse(text)}
    problems: Sequence[Problem] = ()
    refused = ""
    done = [Broken(asked, names(t.files), KINDS[asked.kind].do(t)) for asked, t in targets.items()]
    try:
        problems = verify(files.left, deep=True, values=any(b.asked.kind == "nan" for b in done)).problems
    except CkptoolsError as error:
        refused = str(error)
    shown = [_shown(broken, targets[broken.asked], problems, files.count) for broken in done]
    return tuple(dataclasses.replace(b, shown=codes, refused=refused) for b, codes in zip(done, shown, strict=True))


class _Files:
    """The files of a checkpoint by rank, and the shards in them; by number if no file belongs to a rank."""

    def __init__(self, path: Path) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(path, all_ranks=True)
        ranked = [file for file in self.checkpoint.files if file.rank is not None]
        self.paths = [file.path for file in ranked or self.checkpoint.files]
        self._ranks = [file.rank for file in ranked] or range(len(self.paths))
        self.count = self.checkpoint.world_size.value if ranked else len(self.paths)

    @property
    def left(self) -> Path:
        """The path that still opens it: as before, or the first file that is left."""
        path = self.checkpoint.path
        return path if path.exists() else next((file for file in self.paths if file.exists()), path)

    def with_tensors(self, asked: Asked) -> Path:
        """The file of a rank that holds tensors of the model; files without a rank are written by rank 0."""
        tensors = self.checkpoint.model.values()
        holding = {s.source.path for tensor in tensors for s in tensor.found if s.source}
        without_rank = [file.path for file in self.checkpoint.files if file.rank is None and asked.rank == 0]
        mine = self.of(asked, asked.rank)
        return next((path for path in (*mine, *without_rank) if path in holding), mine[0])

    def of(self, asked: Asked, rank: int) -> tuple[Path, ...]:
        found = tuple(path for path, whose in zip(self.paths, self._ranks, strict=True) if whose == rank)
        if not found:
            raise self.refusal(asked, f"rank {rank} has no file here, only {names(self.paths)}")
        return found

    def shards_in(self, asked: Asked, file: Path) -> tuple[tuple[str, Shard], ...]:
        """Every shard that lies in a file and can be damaged in this way, with its fqn."""
        dtypes = NAN if asked.kind == "nan" else ITEMSIZE
        found: list[tuple[str, Shard]] = []
        for path, tensor in tensors_in(self.checkpoint.tree):
            for shard in tensor.found:
                source = shard.source
                if source is None or source.path != file or source.dtype not in dtypes:
                    continue
                # Only a shard with bytes, all in one piece, can be damaged.
                if source.contiguous and prod(source.shape) > 0:
                    found.append((fqn_of(path), shard))
        if not found:
            raise self.refusal(asked, f"no tensor lies in {file.name}")
        return tuple(found)

    def refusal(self, asked: Asked, why: str) -> UsageError:
        return UsageError(self.checkpoint.path, f"was saved and not damaged: --break {asked} does not apply, {why}")


def _target(asked: Asked, files: _Files, elsewhere: dict[str, _Files], seed: int) -> Target:
    kind = KINDS[asked.kind]
    mine = files.of(asked, asked.rank)
    others: tuple[Path, ...] = ()
    if asked.other is not None:
        others = files.of(asked, asked.other)
    elif kind.others in RUNS:
        others = elsewhere[kind.others].of(asked, asked.rank)
    elif kind.others:
        others = tuple(renumbered(path, asked.rank, files.count) for path in mine)
    if others and len(others) != len(mine):
        raise files.refusal(asked, f"{names(mine)} and {names(others)} do not correspond")
    chance = random.Random(f"{seed} {asked}")
    mine = mine if kind.part == "files" else (files.with_tensors(asked),)
    shards = files.shards_in(asked, mine[0]) if kind.part == "tensor" else ()
    return Target(mine, others, shards, chance)


def _shown(broken: Broken, target: Target, problems: Iterable[Problem], count: int) -> tuple[str, ...]:
    """The codes of the problems that concern the damaged files or ranks; of all problems if there is only one file."""
    files, ranks = {path.name for path in (*target.files, *target.others)}, set(broken.asked.ranks)

    def is_shown(problem: Problem) -> bool:
        # A gap in the same tensor shows the damage of another rank.
        of_values = problem.kind in (Code.NOT_FINITE, Code.BAD_CHECKSUM)
        return (
            count == 1
            or not ranks.isdisjoint(problem.all_ranks)
            or (problem.kind in DISAGREEMENTS and not problem.all_ranks)
            or (of_values and f" in {problem.tensor}," in f"{broken.what},")
            or any(name in problem.message or name in problem.files for name in files)
        )

    found = [problem for problem in problems if problem.severity != "note" and is_shown(problem)]
    return tuple(dict.fromkeys(p.code + (" (a warning)" if p.severity == "warning" else "") for p in found))
