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
from ckptools.model.tree import KeyPath, tensors_in
from ckptools.tensor_io import rounding
from ckptools.tensor_io.same_files import copied_files
from ckptools.text import and_others, named_ranks, printable
from ckptools.training_state.rank_own import is_own
from ckptools.training_state.sections import Section, sections_of
from ckptools.training_state.verdict import stands_in_the_way, verdict_of


def refuses(checkpoint: Checkpoint, problem: Problem, holes: str | None) -> bool:
    """Whether an error stands in the way by itself, whatever the tensors are like.

    Args:
        checkpoint: opened with all ranks.
        problem: an error about something that is going to be written.
        holes: None to refuse what is not whole.
    """
    if problem.kind.forbids == "any output":
        return True
    return not holes and problem.kind.lacks == "value" and stands_in_the_way(checkpoint, problem)


def absent(checkpoint: Checkpoint, errors: Iterable[Problem]) -> list[Problem]:
    """Parts that leave no gap in a tensor: their names are not known, or they are a file that is of no rank alone."""
    return [p for p in errors if p.kind.lacks in ("file", "part") and stands_in_the_way(checkpoint, p)]


def unreadable_files(checkpoint: Checkpoint) -> list[Problem]:
    """Files that the system does not let us read: the cause of the gaps that they leave, and no damage."""
    return [p for p in checkpoint.problems if p.kind is Code.FILE_UNREADABLE and p.severity == "error"]


def own_values_lost(checkpoint: Checkpoint, parts: Sequence[Section]) -> dict[KeyPath, str]:
    """What ranks had for themselves whose files are lost, by key path and rank: why; no tensor has a gap for it.

    Args:
        checkpoint: opened with all ranks.
        parts: what is going to be written.
    """
    own = [*(s.path for s in sections_of(checkpoint) if is_own(s)), *checkpoint.differing]
    own = [path for path in own if any(part.holds(path) for part in parts)]
    own = [path for path in own if not any(path[: len(other)] == other != path for other in own)]
    errors = [p for p in checkpoint.problems if p.severity == "error" and p.kind.lacks in ("file", "value")]
    lost = [p for p in errors if p.rank is not None and not stands_in_the_way(checkpoint, p)]
    return {(*path, p.rank): f"what rank {p.rank} had for itself: {printable(p.message)}" for p in lost for path in own}


def replicas_note(checkpoint: Checkpoint, parts: Iterable[Section]) -> list[str]:
    """The note that replicas have what lost or damaged files held of what is written."""
    verdict = verdict_of(checkpoint)
    if verdict.whole is not False or not verdict.recoverable:
        return []
    errors = [p for p in checkpoint.problems if p.severity == "error" and p.all_ranks]
    lost = [p for p in errors if p.kind.lacks == "file" or p.replicated]
    ranks = {rank for p in lost for rank in p.all_ranks}
    held = {s.rank for part in parts for _, t in tensors_in(part.value) for s in t.found if s.rank is not None} - ranks
    if not lost or not held:
        return []
    more = and_others(len(lost) - 1)
    return [f"{named_ranks(held)} have what {named_ranks(ranks)} held too: {printable(str(lost[0]))}{more}"]


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
    """One line: the verdict, what of it stands in the way and how much more, and what to do."""
    verdict = verdict_of(checkpoint)
    cause = f"{verdict.headline}; " if verdict.level == "bad" or verdict.joinable is False else "not whole: "
    more = and_others(len(problems) - 1)
    gaps_only = all(p.kind.lacks != "nothing" for p in problems)
    way = "; --allow-missing writes what is whole" if gaps_only else ""
    return f"{cause}{printable(str(problems[0]))}{more}{way}"
