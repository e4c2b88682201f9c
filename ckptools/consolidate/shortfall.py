"""What keeps a checkpoint from being written: which problems leave gaps, which tell of parts without any, values that
contradict the layout that was found, and the line that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptools.errors import NotWholeError
from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.tensor_io import rounding
from ckptools.tensor_io.same_files import copied_files
from ckptools.text import and_others, printable, spans
from ckptools.training_state.rank_own import is_own
from ckptools.training_state.sections import Section, sections_of


def refuses(problem: Problem, holes: str | None) -> bool:
    """Whether an error stands in the way by itself, whatever the tensors are like.

    Args:
        problem: an error about something that is going to be written.
        holes: None to refuse what is not whole.
    """
    return problem.kind.forbids == "any output" or (not holes and problem.kind.lacks == "value")


def absent(errors: Iterable[Problem]) -> list[Problem]:
    """Parts that leave no gap in a tensor: their names are not known, or they are a rank's own state, which has one."""
    return [p for p in errors if p.kind.lacks == "part" or (p.kind.lacks == "file" and (p.rank is None or p.tensor))]


def unreadable_files(checkpoint: Checkpoint) -> list[Problem]:
    """Files that the system does not let us read: the cause of the gaps that they leave, and no damage."""
    return [p for p in checkpoint.problems if p.kind is Code.FILE_UNREADABLE and p.severity == "error"]


def own_values_lost(checkpoint: Checkpoint, parts: Iterable[Section], listed: bool) -> list[Problem]:
    """What is wrong with files of ranks that have values for themselves, though no tensor of the model has a gap.

    Where such values are `listed` for every rank, those of each count; else another rank's would take the place of the
    lowest's.
    """
    lowest = min((f.rank for f in checkpoint.files if f.rank is not None), default=None)
    if lowest is None or all(s.kind in ("model", "optimizer") for s in parts):
        return []
    errors = [p for p in checkpoint.problems if p.severity == "error" and p.kind.lacks == "file" and p.rank is not None]
    return [p for p in errors if listed or p.rank == lowest]


def own_values_absent(checkpoint: Checkpoint, parts: Sequence[Section]) -> list[str]:
    """The note on ranks whose files are missing where nothing but their own values, such as RNG states, went with them.

    Args:
        checkpoint: opened with all ranks.
        parts: what is going to be written.
    """
    own = [*(s.path for s in sections_of(checkpoint) if is_own(s)), *checkpoint.differing]
    lost = [p for p in checkpoint.problems if p.severity == "warning" and p.kind.lacks == "file" and p.rank is not None]
    if not lost or not any(part.holds(path) for part in parts for path in own):
        return []
    ranks = sorted({p.rank for p in lost if p.rank is not None})
    return [f"what rank {spans(ranks)} had for itself is lost: {printable(lost[0].message)}{and_others(len(lost) - 1)}"]


def check_rounding(checkpoint: Checkpoint, part: str) -> None:
    """Refuse to write what a layout that is contradicted by its values would give.

    Raises:
        NotWholeError: an fp32 copy does not round to its weight.
    """
    if part not in ("optimizer", "all") and getattr(checkpoint.options, "weights", "") == "module":
        return
    problems, _ = rounding.compare(checkpoint.rounded)
    if problems:
        raise NotWholeError(checkpoint.path, f"{problems[0]}{and_others(len(problems) - 1)}", problems)


def check_copies(checkpoint: Checkpoint, tensors: Iterable[tuple[str, Tensor]], files: OpenFiles) -> None:
    """Refuse to write from a file that is a copy of another rank's, which would take the place of what it held.

    Raises:
        NotWholeError: one is.
        ReadError: a file cannot be read.
    """
    problems = copied_files(tensors, files)
    if problems:
        raise NotWholeError(checkpoint.path, f"{problems[0]}{and_others(len(problems) - 1)}", problems)


def summary(checkpoint: Checkpoint, problems: Sequence[Problem]) -> str:
    """One line: what is wrong first, how much more, and what to do."""
    files = [p for p in checkpoint.problems if p.kind.lacks == "file"]
    ranks = sorted({p.rank for p in files if p.rank is not None and p.kind is not Code.FILE_UNREADABLE})
    cause = f"rank {spans(ranks)} missing or cut; " if ranks else ""
    more = and_others(len(problems) - 1)
    gaps_only = all(p.kind.lacks != "nothing" for p in problems)
    way = "; --allow-missing writes what is whole" if gaps_only else ""
    return f"not whole: {cause}{printable(str(problems[0]))}{more}{way}"
