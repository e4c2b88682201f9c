"""What is wrong with a set of rank files, told from their names, sizes and structure; no tensor bytes are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckptools.agreement import named, odd_ranks
from ckptools.formats.merge import same_records
from ckptools.formats.on_disk import fault
from ckptools.model import KeyPath, Problem, RankFile, Severity, Tensor, fqn_of, tensors_in
from ckptools.sections import Section, is_gathered
from ckptools.steps import COUNTERS

ODD_SIZE = 0.5
"""A rank file of less than this fraction of the median is named; uneven shards alone do not make one so small."""


UNNAMED = "?"
"""What a missing file is called where the caller named the others one by one."""


def of_files(files: Sequence[RankFile], why: Mapping[Path, str], world: int, sharded: bool) -> Iterator[Problem]:
    """Missing, cut, odd, stray and duplicate files; `why` says what is wrong with those that cannot be read."""
    sizes = sorted(f.nbytes for f in files if f.status in ("read", "seen"))
    usual = sizes[len(sizes) // 2] if sizes else 0
    for file in files:
        yield from _of_file(file, why, world, sharded, usual)
    for (rank, part), count in Counter((f.rank, f.part) for f in files).items():
        if count > 1:
            text = f"{count} files say they are rank {rank}{' of ' + part if part else ''}"
            yield Problem("CK009", "error", text, rank)


def _of_file(file: RankFile, why: Mapping[Path, str], world: int, sharded: bool, usual: int) -> Iterator[Problem]:
    name = file.path.name
    if file.status == "missing":
        severity: Severity = "error" if sharded or file.part else "warning"
        text = f"no file {name}" if name != UNNAMED else "none of the named files is of this rank"
        yield Problem("CK001", severity, text, file.rank)
    elif file.status in ("cut", "bad"):
        text = f"{name} {why[file.path].removeprefix(f'{file.path}: ')}"
        yield Problem(fault(text), "error", text, file.rank)
    elif file.rank is not None and file.rank >= world and sharded:
        yield Problem("CK009", "error", f"{name} is rank {file.rank} of a world of {world}", file.rank)
    elif not file.part and file.nbytes < usual * ODD_SIZE:
        yield Problem("CK003", "warning", f"{name} has {file.nbytes} bytes, others {usual}", file.rank)


RUN_NAMES = ("run_name", "run_id", "rank_zero_seed")
"""What is one for a run and all of its ranks; the last is Composer's."""


def of_values(differing: Mapping[KeyPath, Sequence[int]], sections: Sequence[Section]) -> Iterator[Problem]:
    """Plain values that should be equal on all ranks and are not."""
    for path, ranks in differing.items():
        listed = named(ranks)
        if _counts_steps(path):
            text = f"differs between ranks (rank {listed} from the others); they are not of one step"
            yield Problem("CK006", "error", text, None, fqn_of(path))
        elif path[-1:] and path[-1] in RUN_NAMES:
            text = f"differs between ranks (rank {listed} from the others); they are not of one run"
            yield Problem("CK006", "error", text, None, fqn_of(path))
        elif not _is_per_rank(path, sections):
            text = f"rank {listed} has another value than the others"
            yield Problem("CK105", "error", text, None, fqn_of(path))


def of_gathered(sections: Sequence[Section], differing: Mapping[KeyPath, Sequence[int]]) -> Iterator[Problem]:
    """RNG states of all ranks that every rank's file lists: files of one save list the same ones.

    Composer gathers them while it saves, so they tell two runs apart that are at the same step. Tensors are compared
    by the checksums of their records, so that nothing is read. Source: composer/utils/reproducibility.py.
    """
    for section in sections:
        if section.kind != "rng" or not is_gathered(section.value):
            continue
        odd = {rank for path, ranks in differing.items() if section.holds(path) for rank in ranks}
        tensors = [tensor for _, tensor in tensors_in(section.value)]
        for tensor in tensors:
            ranked = [(s.rank, s) for s in tensor.shards if s.rank is not None]
            odd.update(odd_ranks(ranked, lambda a, b: same_records((a, b))))
        for rank in sorted(odd):
            text = "lists other RNG states of the ranks than the other files do; it is of another run or save"
            yield Problem("CK006", "error", text, rank, section.name)


def per_rank(differing: Iterable[KeyPath], sections: Sequence[Section]) -> tuple[KeyPath, ...]:
    """The values that differ between ranks by nature: RNG, wall-clock times, data loaders."""
    return tuple(p for p in differing if _is_per_rank(p, sections) and not _counts_steps(p))


def _counts_steps(path: KeyPath) -> bool:
    return bool(path) and path[-1] in (*COUNTERS, "last_epoch", "_step_count")


def _is_per_rank(path: KeyPath, sections: Sequence[Section]) -> bool:
    return not any(s.holds(path) for s in sections if s.kind in ("model", "optimizer", "scheduler"))


def of_tensors(tensors: Iterable[tuple[KeyPath, Tensor]]) -> list[Problem]:
    """One warning per reason why tensors cannot be consolidated."""
    reasons: dict[str, list[str]] = {}
    for path, tensor in tensors:
        if tensor.note and tensor.kind != "meta":
            reasons.setdefault(tensor.note, []).append(fqn_of(path))
    return [
        Problem("CK106", "warning", f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}")
        for why, names in reasons.items()
    ]


def expected_bytes(files: Sequence[RankFile]) -> int | None:
    """Bytes of all files if every missing or cut one had the usual size."""
    good = sorted(f.nbytes for f in files if f.status in ("read", "seen"))
    absent = sum(f.status not in ("read", "seen") for f in files)
    return sum(good) + absent * good[len(good) // 2] if good else None
