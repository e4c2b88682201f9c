"""Checks of files: all are there, complete, of one save, of one layout, and archives that torch opens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ckptools.errors import CkptoolsError, DamagedError, NotWholeError, ReadError
from ckptools.files.opening import File, OpenFiles, Window, reading
from ckptools.files.zip_archive import Container
from ckptools.files.zip_directory import EOCD, archive_before
from ckptools.formats.shared.checkpoint_builder import KINDS
from ckptools.model.checkpoint import Checkpoint, RankFile
from ckptools.model.cover import cover_problem
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.text import plural, size
from ckptools.verify.record import Check, Result

PRESENCE = (
    Code.FILE_MISSING,
    Code.FILE_CUT,
    Code.VALUE_LOST,
    Code.STRAY_FILE,
    Code.NAME_CONTRADICTS,
    Code.ONE_OF_SEVERAL,
    Code.NOT_READ,
    Code.FILE_UNREADABLE,
    Code.NEVER_WRITTEN,
    Code.MODEL_PART_MISSING,
)
ONE_SAVE = (Code.ODD_FILE_SIZE, Code.MIXED_SAVES)

FAR_APART = 3600.0
"""Seconds between the first and the last file of one save; more suggest two saves."""


def presence(ck: Checkpoint) -> Check:
    """Whether every file is there and complete, and no other file is among them."""
    here = sum(f.is_here for f in ck.files)
    problems = [*(p for p in ck.problems if p.kind in PRESENCE), *_left_over(ck)]
    return judged("files", problems, f"{here} of {len(ck.files)} here and complete")


def one_save(ck: Checkpoint) -> Check:
    """Whether sizes, times and steps of the files are consistent with one save."""
    here = [f for f in ck.files if f.is_here]
    sizes = sorted({f.nbytes for f in here})
    times = [f.modified for f in ck.files if f.modified]
    apart = max(times) - min(times) if times else 0.0
    problems = [p for p in ck.problems if p.kind in ONE_SAVE]
    if apart > FAR_APART:
        text = f"files were written {apart / 3600:.1f} hours apart; they may be of two saves, or copied one by one"
        problems.append(Problem(Code.MIXED_SAVES, text, severity="warning"))
    span = f"{size(sizes[0])} to {size(sizes[-1])}" if len(sizes) > 1 else size(sizes[0]) if sizes else "no size"
    return judged("one save", problems, f"{plural(len(here), 'file')} of {span}, written within {apart:.0f} s")


def _left_over(ck: Checkpoint) -> Iterator[Problem]:
    """Files left behind by an interrupted save or consolidate."""
    for folder in dict.fromkeys(f.path.parent for f in ck.files):
        if not folder.is_dir():
            continue
        with reading(folder):
            names = sorted(entry.name for entry in folder.iterdir())
        for name in names:
            if name.endswith((".metadata.tmp", ".partial")):
                yield Problem(Code.LEFT_OVER, f"{Path(name).name} is left over from a write that was interrupted")


# -- layout -----------------------------------------------------------------------------------------------------------


AGREEMENT = (Code.WORLD_SIZES_DISAGREE, Code.LAYOUT_DISAGREES)


def exactly_covered(ck: Checkpoint) -> Check:
    """Whether every element of every tensor is in exactly one shard; replicas of a shard count once."""
    tensors = [(path, t) for path, t in tensors_in(ck.tree) if t.kind != "meta"]
    if not tensors:
        return skipped("layout", "no tensors")
    lost = [p for p in ck.problems if p.kind is Code.TENSOR_NOT_JOINED and p.severity == "error"]
    unplaced = {p.tensor for p in lost}
    others = ((fqn, t) for fqn, t in ((fqn_of(path), t) for path, t in tensors) if fqn not in unplaced)
    problems = [*lost, *(p for fqn, t in others if (p := cover_problem(t, fqn)) is not None)]
    sharded = sum(t.sharded for _, t in tensors)
    return judged("layout", problems, f"{plural(len(tensors), 'tensor')}, {sharded} sharded, covered exactly")


def ranks_agree(ck: Checkpoint) -> Check:
    """Whether ranks agree on the world size, and on the shape, dtype and shards of every tensor."""
    ranks = len({f.rank for f in ck.files if f.status == "read" and f.rank is not None})
    problems = [p for p in ck.problems if p.kind in AGREEMENT]
    if ranks < 2 and not problems:
        return skipped("ranks agree on layout", "no two ranks to compare")
    return judged("ranks agree on layout", problems, f"{ranks} of {ranks}")


# -- archives ---------------------------------------------------------------------------------------------------------
#
# All values can be right and torch still refuse their file: the reader opens `version` and others first, through the
# local header of each. Source: caffe2/serialize/inline_container.cc (`PyTorchStreamReader::init`).


VERSIONS = ("version", ".data/version")
"""Records with the version of an archive; without one torch refuses it."""

SMALL = (*VERSIONS, ".format_version", ".storage_alignment", ".data/serialization_id", "byteorder")
"""Optional records that torch reads from every archive, beside the pickle and the storages."""

MAX_SMALL = 1 << 10
"""Largest size of one of them in bytes."""


def damaged_archives(ck: Checkpoint, files: OpenFiles) -> list[Problem]:
    """Archives that torch would refuse or misread, although their pickle and tensors are right."""
    return [p for file in ck.files if file.status == "read" for p in _damaged_in(file, files)]


def _damaged_in(rank_file: RankFile, files: OpenFiles) -> Iterator[Problem]:
    with suppress(ReadError), files.open(rank_file.path) as file:  # other checks report a missing file
        for window in _archives(file):
            item = f", item at byte {window.start}:" if window.start else ""
            for why in _refused(window):
                text = f"{rank_file.path.name}{item} {why}; torch.load may refuse it"
                yield Problem(Code.BAD_CHECKSUM, text, rank_file.rank)


def _archives(file: File) -> Iterator[Window]:
    """The archives in a file, last first: one, or those of the items of a `.distcp`.

    In a store each item would take several requests, so only files that are one archive are checked there.
    """
    end = file.size
    while end > EOCD.size:
        begins = archive_before(file, end - EOCD.size)
        if begins is None or (begins and file.descriptor is None):
            return
        yield Window(file, begins, end - begins)
        end = begins


def _refused(window: Window) -> Iterator[str]:
    """Why torch refuses an opened archive; problems of its directory were reported when it was opened."""
    with suppress(ReadError):
        archive = Container(window)
        spelled = {name.lower(): name for name in archive.records}
        if spelled.keys().isdisjoint(VERSIONS):
            yield "has no record version"
        for name in SMALL:
            if name in spelled:
                yield from _damage(archive, spelled[name])


def _damage(archive: Container, name: str) -> Iterator[str]:
    try:
        archive.read(name, MAX_SMALL)
    except ReadError as error:
        yield error.reason


# -- results ----------------------------------------------------------------------------------------------------------


def judged(name: str, problems: Iterable[Problem], detail: str) -> Check:
    """Make a check whose result follows from its problems."""
    found = tuple(problems)
    severities = {p.severity for p in found}
    result: Result = "FAIL" if "error" in severities else "warn" if "warning" in severities else "ok"
    return Check(name, result, detail, found)


def skipped(name: str, why: str) -> Check:
    """Make a check that had nothing to do, or was not asked for."""
    return Check(name, "skip", why)


def attempt(name: str, check: Callable[[Checkpoint], Check], ck: Checkpoint) -> Check:
    """Run a check; a file that cannot be read becomes its problem."""
    try:
        return check(ck)
    except (ReadError, NotWholeError) as error:
        return judged(name, [unreadable(error)], "")


def unreadable(error: CkptoolsError, rank: int | None = None, fqn: str | None = None) -> Problem:
    """The problem of a file, or a part of one, that could not be read."""
    return Problem(_kind(error), str(error), rank, fqn)


def _kind(error: CkptoolsError) -> Code:
    if isinstance(error, NotWholeError):
        return Code.TENSOR_GAP
    if isinstance(error, DamagedError):
        return Code.BAD_CHECKSUM
    return KINDS[error.kind] if isinstance(error, ReadError) else Code.FILE_CUT


def ignore_codes(checks: Sequence[Check], codes: Iterable[str]) -> tuple[tuple[Check, ...], int]:
    """Judge checks without the problems of some codes; return them and the number of problems left out."""
    unwanted, kept, ignored = set(codes), [], 0
    for check in checks:
        problems = tuple(p for p in check.problems if p.code not in unwanted)
        ignored += len(check.problems) - len(problems)
        again = judged(check.name, problems, check.detail).result
        kept.append(check if len(problems) == len(check.problems) else replace(check, result=again, problems=problems))
    return tuple(kept), ignored
