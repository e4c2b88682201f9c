"""Choice of the output's contents: the sections to write, and the reasons to refuse a checkpoint.

Everything is checked here, before the first byte is written, and all problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptools.consolidate.picking import LEFT_OUT, Picking
from ckptools.consolidate.provenance import NOT_SAVED
from ckptools.consolidate.selection import FILLS, ONLY, OutputContents, concerns, note_on_glob, sections_to_write
from ckptools.errors import NotWholeError, RefusedError, UsageError
from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of, tensors_in
from ckptools.tensor_io import replicas
from ckptools.tensor_io.checksums import Record
from ckptools.tensor_io.copied_files import copied_files
from ckptools.text import and_others, named_ranks, printable
from ckptools.training_state.judgement import stands_in_the_way, verdict_of
from ckptools.training_state.rank_values import is_own
from ckptools.training_state.sections import Section, sections_of, tensors_of


def select(
    checkpoint: Checkpoint,
    only: str,
    holes: str | None,
    prefer_rank: int | None,
    files: OpenFiles,
    damage: Mapping[Record, int] | None,
    dequantize: bool = False,
) -> OutputContents:
    """Choose the parts named by `only` from a checkpoint whose ranks have all been read.

    Args:
        checkpoint: opened with all ranks.
        only: `model` (the bare state dict), `optimizer` (the bare optimizer state), `all` (the same tree), or a glob
            for names of the model.
        holes: None to refuse tensors that are not whole, `leave` to leave them out, `nan` or `zero` to fill them.
        prefer_rank: take this rank's copy of a tensor if copies differ that should be equal.
        files: open source files.
        damage: records whose checksums do not match, with the CRC-32 that they have; their bytes count as missing. None
            if checksums are not compared.
        dequantize: write the values of quantized tensors, as their class computes them.

    Raises:
        NotWholeError: something is missing, overlaps or contradicts; lists everything.
        UsageError: there is no such section.
    """
    sections = sections_to_write(checkpoint, only)
    if prefer_rank is not None and prefer_rank not in checkpoint.ranks:
        raise UsageError(checkpoint.path, f"--prefer-rank {prefer_rank}: there is no file of that rank here")
    picking = Picking(checkpoint, holes, prefer_rank, files, damage, dequantize)
    errors = [p for p in checkpoint.problems if p.severity == "error"]
    concerned = [p for p in errors if concerns(p, sections.values(), only)]
    written = {fqn_of(path) for path, _ in tensors_of(sections.values())}
    concerned = [p for p in concerned if p.kind is not Code.COPIES_DIFFER or p.tensor not in written]  # compared below
    picking.problems += [p for p in concerned if refuses(checkpoint, p, holes)]
    without = absent(checkpoint, concerned)
    picking.problems += [] if holes else without
    picking.lose({(p.tensor or p.code,): p.message for p in without})
    picking.ranks.expect(tensors_of(sections.values()))
    trees = {name: picking.copy(s.value, s.path, (name,) if name else ()) for name, s in sections.items()}
    if picking.problems:
        problems = list(dict.fromkeys([*unreadable_files(checkpoint), *picking.problems]))
        raise NotWholeError(checkpoint.path, summary(checkpoint, problems), problems)
    if any(t is LEFT_OUT for t in trees.values()):
        raise RefusedError(
            checkpoint.path, f"is nothing that can be written, but {next(iter(picking.left_out.values()))}"
        )
    tree = trees[""] if list(trees) == [""] else trees
    if only == "all":
        places = tuple((s, s.path) for s in sections_of(checkpoint))
    else:
        places = tuple((s, (name,) if name else ()) for name, s in sections.items())
    parts = list(sections.values())
    picking.lose(own_values_lost(checkpoint, parts))
    notes = [*picking.notes_for(checkpoint, parts), *replicas_note(checkpoint, parts)]
    notes += [] if only in ONLY else note_on_glob(checkpoint, parts, only)
    filled = holes if holes in FILLS else ""
    return OutputContents(
        tree,
        frozenset(picking.model_paths),
        picking.left_out,
        picking.missing,
        filled,
        notes,
        places,
        checkpoint,
        part=only,
        lost=frozenset(picking.lost),
        carried=picking.carried,
        passed_over=tuple(p for p in concerned if p.kind.lacks == "value" and p.kind not in NOT_SAVED),
    )


# -- reasons to refuse ------------------------------------------------------------------------------------------------


def refuses(checkpoint: Checkpoint, problem: Problem, holes: str | None) -> bool:
    """Whether an error prevents writing by itself, whatever the state of the tensors.

    Args:
        checkpoint: opened with all ranks.
        problem: an error about a part to write.
        holes: None to refuse tensors that are not whole.
    """
    if problem.kind.forbids == "any output":
        return True
    return not holes and problem.kind.lacks == "value" and stands_in_the_way(checkpoint, problem)


def absent(checkpoint: Checkpoint, errors: Iterable[Problem]) -> list[Problem]:
    """Missing parts that leave no gap in a tensor: their names are unknown, or their file belongs to no single rank."""
    return [p for p in errors if p.kind.lacks in ("file", "part") and stands_in_the_way(checkpoint, p)]


def unreadable_files(checkpoint: Checkpoint) -> list[Problem]:
    """Files without read permission: they cause gaps but are not damaged."""
    return [p for p in checkpoint.problems if p.kind is Code.FILE_UNREADABLE and p.severity == "error"]


def own_values_lost(checkpoint: Checkpoint, parts: Sequence[Section]) -> dict[KeyPath, str]:
    """The ranks' own values in lost files, by key path and rank, with the reason; no tensor has a gap for them.

    Args:
        checkpoint: opened with all ranks.
        parts: the sections to write.
    """
    own = [*(s.path for s in sections_of(checkpoint) if is_own(s)), *checkpoint.differing]
    own = [path for path in own if any(part.holds(path) for part in parts)]
    own = [path for path in own if not any(path[: len(other)] == other != path for other in own)]
    errors = [p for p in checkpoint.problems if p.severity == "error" and p.kind.lacks in ("file", "value")]
    lost = [p for p in errors if p.rank is not None and not stands_in_the_way(checkpoint, p)]
    return {(*path, p.rank): f"what rank {p.rank} had for itself: {printable(p.message)}" for p in lost for path in own}


def replicas_note(checkpoint: Checkpoint, parts: Iterable[Section]) -> list[str]:
    """Note that replicas have the contents of lost or damaged files."""
    verdict = verdict_of(checkpoint)
    if verdict.whole is not False or not verdict.recoverable:
        return []
    errors = [p for p in checkpoint.problems if p.severity == "error" and p.all_ranks]
    lost = [p for p in errors if p.kind.lacks == "file" or p.replicated]
    ranks = {rank for p in lost for rank in p.all_ranks}
    others = {
        s.rank for part in parts for _, t in tensors_in(part.value) for s in t.found if s.rank is not None
    } - ranks
    if not lost or not others:
        return []
    more = and_others(len(lost) - 1)
    return [f"{named_ranks(others)} also have what {named_ranks(ranks)} had: {printable(str(lost[0]))}{more}"]


def check_rounding(checkpoint: Checkpoint, part: str) -> None:
    """Refuse to write tensors whose values contradict the layout.

    Raises:
        NotWholeError: an fp32 copy does not round to its weight.
    """
    if part not in ("optimizer", "all") and getattr(checkpoint.options, "weights", "") == "module":
        return
    problems, _ = replicas.compare_rounded(checkpoint.rounded)
    if problems:
        raise NotWholeError(checkpoint.path, f"{problems[0]}{and_others(len(problems) - 1)}", problems)


def check_copies(checkpoint: Checkpoint, tensors: Iterable[tuple[str, Tensor]], files: OpenFiles) -> None:
    """Refuse to write from a file that is a copy of another rank's and has replaced its own.

    Raises:
        NotWholeError: a file is such a copy.
        ReadError: a file cannot be read.
    """
    problems = copied_files(tensors, files)
    if problems:
        raise NotWholeError(checkpoint.path, f"{problems[0]}{and_others(len(problems) - 1)}", problems)


def summary(checkpoint: Checkpoint, problems: Sequence[Problem]) -> str:
    """Summarize in one line: the verdict, the first problem, the number of others, and what to do."""
    verdict = verdict_of(checkpoint)
    cause = f"{verdict.headline}; " if verdict.level == "bad" or verdict.joinable is False else "not whole: "
    more = and_others(len(problems) - 1)
    gaps_only = all(p.kind.lacks != "nothing" for p in problems)
    way = "; --allow-missing writes what is whole" if gaps_only else ""
    return f"{cause}{printable(str(problems[0]))}{more}{way}"
