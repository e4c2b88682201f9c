"""Choice of the output's contents: the sections to write, and the reasons to refuse a checkpoint.

Everything is checked here, before the first byte is written, and all problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptools.consolidate.picking import FILLS, LEFT_OUT, Picking
from ckptools.consolidate.provenance import NOT_SAVED
from ckptools.consolidate.writers.layout import FromReplicas, OutputContents
from ckptools.display.lines import cause_words
from ckptools.errors import NotWholeError, RefusedError, UsageError
from ckptools.files.opening import OpenFiles
from ckptools.formats.rank_search.stage_signs import SLICES
from ckptools.formats.shared.merge import empty_like
from ckptools.model.causes import FATES, Cause, causes_of, consequences_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of, is_within
from ckptools.tensor_io import replicas
from ckptools.tensor_io.checksums import Record
from ckptools.tensor_io.copied_partitions import copies_without_checksums
from ckptools.text import and_others, named_ranks, plural, printable
from ckptools.training_state.judgement import is_of_one_rank, may_concern, stands_in_the_way, verdict_of
from ckptools.training_state.rank_values import own_paths
from ckptools.training_state.sections import Section, sections_of, sections_of_kind, tensors_of

if TYPE_CHECKING:
    from ckptools.consolidate.fill_from import Donor

ONLY = ("model", "optimizer", "all")
ONE_COPY = "--only-this-file with the file of a rank takes its copy"


def select(
    checkpoint: Checkpoint,
    only: str,
    holes: str | None,
    prefer_rank: int | None,
    files: OpenFiles,
    damage: Mapping[Record, int] | None,
    dequantize: bool = False,
    donor: Donor | None = None,
    right: bool = False,
) -> OutputContents:
    """Choose the parts named by `only` from a checkpoint whose ranks have all been read.

    `holes` is None to refuse tensors that are not whole, `leave` to leave them out, `nan` or `zero` to fill them.
    `damage` has the records whose checksums do not match, with the CRC-32 that they have; their bytes count as missing.
    It is None if checksums are not compared. They are `right` if each was compared and none is wrong. `donor` is
    another checkpoint of the run that fills gaps first.

    Raises:
        NotWholeError: something is missing, overlaps or contradicts; lists everything.
        UsageError: there is no such section.
    """
    sections = _sections_to_write(checkpoint, only)
    if prefer_rank is not None and prefer_rank not in checkpoint.ranks:
        raise UsageError(checkpoint.path, f"--prefer-rank {prefer_rank}: there is no file of that rank here")
    if prefer_rank is not None and (unlike := next((p for p in checkpoint.problems if SLICES in p.message), None)):
        text = f"--prefer-rank {prefer_rank} would write one rank's values for all: {unlike.message}"
        raise NotWholeError(checkpoint.path, f"{text}; {ONE_COPY}", [unlike])
    picking = Picking(checkpoint, holes, prefer_rank, files, damage, dequantize, donor)
    errors = [p for p in checkpoint.problems if p.severity == "error"]
    concerned = [p for p in errors if _concerns(p, sections.values(), only)]
    written = {fqn_of(path): tensor for path, tensor in tensors_of(sections.values())}
    of_tensors = [p for p in concerned if p.kind in (Code.COPIES_DIFFER, Code.LAYOUT_DISAGREES) and p.tensor in written]
    # Copies are compared below, and a tensor with a piece that does not fit it has its problem there.
    judged = [p for p in of_tensors if p.kind is Code.COPIES_DIFFER or written[p.tensor or ""].contradictions]
    concerned = [p for p in concerned if p not in judged]
    picking.problems += [p for p in concerned if _refuses(checkpoint, p, holes)]
    # Parts without a gap in a tensor: their names are unknown, or their file belongs to no single rank.
    without = [p for p in concerned if p.kind.lacks in ("file", "part") and stands_in_the_way(checkpoint, p)]
    if only == "model":
        without = [p for p in without if not _is_of_an_optimizer(checkpoint, p)]
    unsure = [p for p in checkpoint.problems if p.kind is Code.SIZE_UNSTATED]
    picking.problems += [] if holes else [*without, *unsure]
    picking.lose({(p.tensor or p.code,): p.message for p in without})
    picking.ranks.expect(tensors_of(sections.values()), right)
    trees = {name: picking.copy(s.value, s.path, (name,) if name else ()) for name, s in sections.items()}
    if picking.problems:
        gaps = any(p.kind.lacks == "elements" for p in picking.problems)
        lost = [p for p in errors if p.kind is Code.FILE_UNREADABLE or (gaps and p.kind.lacks == "file")]
        problems = list(dict.fromkeys([*lost, *picking.problems]))
        raise NotWholeError(checkpoint.path, _summary(checkpoint, problems), problems)
    contents, parts = picking.contents, list(sections.values())
    if any(t is LEFT_OUT for t in trees.values()):
        why = next(iter(contents.left_out.values()))
        raise RefusedError(checkpoint.path, f"is nothing that can be written, but {why}")
    picking.lose(_own_values_lost(checkpoint, parts))
    contents.from_replicas, notes = _from_replicas(checkpoint, parts)
    warnings = [p for p in checkpoint.problems if p.severity == "warning" and _concerns(p, parts, only)]
    exchanged = (p for p in checkpoint.problems if p.kind is Code.NAMED_AS_ANOTHER_RANK)
    contents.notes += [*_notes_on_warnings([*warnings, *exchanged]), *picking.notes_for(checkpoint, parts), *notes]
    contents.notes += [] if only in ONLY else [_note_on_glob(checkpoint, parts, only)]
    contents.tree = trees[""] if list(trees) == [""] else trees
    contents.part = only
    if donor is not None:
        contents.notes.append(donor.note())
    contents.filled = holes if holes in FILLS else ""
    named = ((s, (name,) if name else ()) for name, s in sections.items())
    contents.places = tuple(((s, s.path) for s in sections_of(checkpoint)) if only == "all" else named)
    contents.unsure = tuple(p for p in warnings if p.kind.lacks == "part" and p.tensor is None)
    contents.passed_over = tuple(p for p in concerned if p.kind.lacks == "value" and p.kind not in NOT_SAVED)
    return contents


# -- the parts that the user asked for --------------------------------------------------------------------------------


def tensors_to_write(checkpoint: Checkpoint, only: str) -> Iterator[tuple[str, Tensor]]:
    """Fqn and tensor of everything that `only` selects, as in `select`."""
    return ((fqn_of(path), tensor) for path, tensor in places_to_write(checkpoint, only))


def places_to_write(checkpoint: Checkpoint, only: str) -> Iterator[tuple[KeyPath, Tensor]]:
    """Key path in the checkpoint and tensor of everything that `only` selects."""
    return tensors_of(_sections_to_write(checkpoint, only).values())


def _sections_to_write(checkpoint: Checkpoint, only: str) -> dict[str, Section]:
    """The sections to write by their name in the output; a single section has no name there."""
    if not isinstance(only, str):
        raise UsageError(checkpoint.path, f"--only {only!r}: expected a name or a glob")
    if only == "all":
        return {"": Section("other", "", (), checkpoint.tree)}
    found = sections_of_kind(checkpoint, only) if only in ONLY else _matching(checkpoint, only)
    if not found:
        here = ", ".join(sorted({s.kind for s in sections_of(checkpoint)})) or "nothing"
        raise UsageError(checkpoint.path, f"holds no {only}; it holds {here}")
    return {"": found[0]} if len(found) == 1 else {s.name: s for s in found}


def _matching(checkpoint: Checkpoint, glob: str) -> list[Section]:
    """The models of a checkpoint with the names that match a glob, alone or after the name of their section."""
    from ckptools.keys.entries import pattern

    wanted, found = pattern((glob,)), []
    for section in sections_of_kind(checkpoint, "model"):
        kept = empty_like(section.value)
        for key, value in section.value.items():
            if wanted.fullmatch(key) or wanted.fullmatch(f"{section.name}.{key}"):
                kept[key] = value
        found += [section._replace(value=kept)] if kept else []
    if not found:
        text = f"--only {glob}: choose one of {', '.join(ONLY)}; or a glob that names of the model match"
        raise UsageError(checkpoint.path, text)
    return found


OPTIMIZER_FILES = ("optim", "optimizer")
"""Parts whose files hold an optimizer alone, or a copy of the model that leaves gaps where it is lost."""


def _is_of_an_optimizer(checkpoint: Checkpoint, problem: Problem) -> bool:
    """Whether a problem is about a lost file of a rank whose other files are here, and it is the optimizer's."""
    lost = [f.part for f in checkpoint.files if f.rank == problem.rank and not f.is_here]
    return problem.rank is not None and bool(lost) and all(part in OPTIMIZER_FILES for part in lost)


def _concerns(problem: Problem, parts: Iterable[Section], only: str) -> bool:
    """Whether a problem is about a part to write."""
    if problem.tensor is None or problem.kind is Code.MIXED_SAVES:
        return True
    paths = [path for s in parts for path in ([s.path] if only in ONLY else [(*s.path, key) for key in s.value])]
    return any(not fqn or is_within(problem.tensor, fqn) for fqn in map(fqn_of, paths))


def _note_on_glob(checkpoint: Checkpoint, parts: Iterable[Section], glob: str) -> str:
    written = sum(len(part.value) for part in parts)
    others = sum(len(section.value) for section in sections_of_kind(checkpoint, "model")) - written
    return f"--only {glob}: {plural(written, 'name')} of the model, without {plural(others, 'other')}"


# -- reasons to refuse ------------------------------------------------------------------------------------------------


def _refuses(checkpoint: Checkpoint, problem: Problem, holes: str | None) -> bool:
    """Whether an error prevents writing by itself, whatever the state of the tensors."""
    if problem.kind.forbids == "any output":
        return True
    return not holes and problem.kind.lacks == "value" and stands_in_the_way(checkpoint, problem)


def _own_values_lost(checkpoint: Checkpoint, parts: Sequence[Section]) -> dict[KeyPath, str]:
    """The ranks' own values in lost files, by key path and rank, with the reason; no tensor has a gap for them."""
    own = [*own_paths(sections_of(checkpoint), checkpoint.world_size.exact), *checkpoint.differing]
    own = [path for path in own if any(part.holds(path) for part in parts)]
    own = [path for path in own if not any(path[: len(other)] == other != path for other in own)]
    errors = [p for p in checkpoint.problems if p.severity == "error" and p.kind.lacks in ("file", "value")]
    lost = [p for p in errors if p.rank is not None and not stands_in_the_way(checkpoint, p)]
    found = ((path, p) for p in lost for path in own if may_concern(p, path))
    return {(*path, p.rank): f"what rank {p.rank} had for itself: {printable(p.message)}" for path, p in found}


def _from_replicas(checkpoint: Checkpoint, parts: Iterable[Section]) -> tuple[FromReplicas | None, list[str]]:
    """The ranks whose lost or damaged files replicas make up for, and the note that says so."""
    verdict = verdict_of(checkpoint)
    if verdict.whole is not False or not verdict.recoverable:
        return None, []
    errors = [p for p in checkpoint.problems if p.severity == "error" and p.all_ranks]
    lost = [p for p in errors if p.kind.lacks == "file" or p.replicated]
    lost = [p for p in lost if p.tensor is None or not is_of_one_rank(checkpoint, p.tensor)]
    if not lost:
        return None, []
    ranks = {rank for p in lost for rank in p.all_ranks}
    others = {s.rank for _, t in tensors_of(parts) for s in t.found if s.rank is not None} - ranks
    if not others:
        return None, []
    more = and_others(len(lost) - 1)
    note = f"what {named_ranks(ranks)} shared is read from {named_ranks(others)}: {printable(str(lost[0]))}{more}"
    return FromReplicas(tuple(sorted(ranks)), tuple(sorted(others))), [note]


DOUBTFUL = (
    Code.FILE_MISSING, Code.FILE_CUT, Code.ODD_FILE_SIZE, Code.MIXED_SAVES, Code.METADATA_CONTRADICTS,
    Code.STRAY_FILE, Code.NAME_CONTRADICTS, Code.NAMED_AS_ANOTHER_RANK, Code.NEVER_WRITTEN, Code.LAYOUT_DISAGREES,
    Code.COPIES_DIFFER, Code.LAYOUT_INFERRED,
)  # fmt: skip
"""Warnings that the files, or what is put together from them, may not be what was saved."""


def _notes_on_warnings(warnings: Sequence[Problem]) -> Iterator[str]:
    """What may be wrong with the source, and so with the output."""
    yield from (p.message for p in warnings if p.kind.lacks == "part")
    for cause in causes_of(p for p in warnings if p.kind in DOUBTFUL):
        yield f"warning of the source: {cause.code} {cause_words(cause)}"


def check_files(checkpoint: Checkpoint, part: str, files: OpenFiles, unchecked: bool) -> list[str]:
    """Refuse a source with values that contradict the layout; note files that may be copies of another rank's.

    The module's own weights alone may be written `unchecked`, such as where somebody changed them.
    """
    taken = unchecked and part == "model" and getattr(checkpoint.options, "weights", "") == "module"
    problems, _ = replicas.compare_rounded(() if taken else checkpoint.rounded)
    if problems:
        raise NotWholeError(checkpoint.path, f"{problems[0]}{and_others(len(problems) - 1)}", problems)
    return [*_notes_on_warnings(copies_without_checksums(tensors_to_write(checkpoint, part), files))]


def _summary(checkpoint: Checkpoint, problems: Sequence[Problem]) -> str:
    """Summarize in one line: the verdict, the first cause but lost ranks that it names, what follows, what to do."""
    verdict = verdict_of(checkpoint)
    named = verdict.headline if verdict.level == "bad" or verdict.joinable is False else ""
    others = [cause for cause in causes_of(problems) if not _names_lost_ranks(named, cause)]
    first = f"{others[0].code}  {cause_words(others[0])}{and_others(len(others) - 1)}" if others else ""
    following = ", ".join(one.text for one in consequences_of(problems))
    gaps_only = all(p.kind.lacks != "nothing" for p in problems)
    way = "--allow-missing writes what is whole" if gaps_only else ""
    return "; ".join(filter(None, (named, first if named else f"not whole: {first}", following, way)))


def _names_lost_ranks(headline: str, cause: Cause) -> bool:
    """Whether a headline says all there is to a cause: `ranks 1, 3 missing`; the name of a file of no rank is more."""
    lost = {kind.code for kind in FATES}
    return cause.code in lost and cause.where.startswith("rank") and cause.text in headline
