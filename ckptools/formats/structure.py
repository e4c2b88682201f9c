"""Problems that a checkpoint's structure shows in any format: gaps, overlaps, optimizers, steps, classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckptools.formats.shared.merge import PLACEHOLDER, with_placeholders
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem, worst_first
from ckptools.model.shards import shard_ranks
from ckptools.model.tensor import cover_problem
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.pickles.foreign_names import unsafe_names
from ckptools.tensor_io.copies import check_copies
from ckptools.text import few
from ckptools.training_state.judgement import copy_problems, is_placed, optimizer_problems, step_problems
from ckptools.training_state.quantized_weights import quantization_problems, with_quantized
from ckptools.training_state.sections import sections_of, tensors_of
from ckptools.training_state.stated_model import model_problems

OF_TENSORS = (Code.TENSOR_GAP, Code.TENSOR_OVERLAP, Code.TENSOR_NOT_JOINED, Code.LAYOUT_DISAGREES, Code.COPIES_DIFFER)
"""Kinds of problems that already report a tensor."""


def with_structure_problems(ck: Checkpoint) -> Checkpoint:
    """Add the problems that the structure shows; those of tensors once every rank was read."""
    ck = with_quantized(with_placeholders(ck))
    found = [*ck.problems, *quantization_problems(ck)]
    found += _tensor_problems(ck, {p.tensor for p in found if p.kind in OF_TENSORS}) if ck.structure_read else []
    found += check_copies(tensors_in(ck.tree)) if ck.structure_read else []
    found += _unjoined(ck, [p.message for p in found if p.kind is Code.TENSOR_NOT_JOINED])
    found += copy_problems(ck)
    found += optimizer_problems(ck)
    found += step_problems(ck)
    found += model_problems(ck)
    found += unsafe_names(ck.names, ck.tree)
    seen = set(ck.problems)
    new = dict.fromkeys(p for p in found[len(ck.problems) :] if p not in seen)
    made = replace(ck, problems=worst_first(_without_proven_copies([*ck.problems, *new])))
    made.worked_out.update(ck.worked_out)
    made.worked_out.pop("verdict", None)
    return made


def _tensor_problems(ck: Checkpoint, known: set[str | None]) -> Iterator[Problem]:
    """Incomplete tensors: a line for each section and kind, as there may be thousands.

    A gap in a lost file follows from that loss, which has its own problem.
    """
    causes = [p for p in ck.problems if p.severity == "error" and p.kind.lacks in ("file", "part")]
    lost = {None, *(p.rank for p in causes)} if causes else set()
    if None in lost:
        lost |= {rank for _, t in tensors_in(ck.tree) for rank in shard_ranks(t.shards)} - set(ck.ranks)
    for section in sections_of(ck):
        groups: dict[Code, list[Problem]] = {}
        for path, tensor in tensors_of([section]):
            fqn = fqn_of(path)
            if fqn in known or tensor.note or tensor.kind == "meta" or not is_placed(ck, tensor):
                continue
            problem = cover_problem(tensor, fqn)
            if problem is not None and not (problem.kind is Code.TENSOR_GAP and problem.rank in lost):
                groups.setdefault(problem.kind, []).append(problem)
        for first, *others in groups.values():
            more = f"; and {len(others)} more tensors of {section.name or 'it'}" if others else ""
            yield replace(first, message=f"{first.message}{more}")


def _without_proven_copies(problems: Sequence[Problem]) -> Iterator[Problem]:
    """Drop warnings that a file may be a copy where an error says whose file it is."""
    errors = [p for p in problems if p.kind is Code.STRAY_FILE and p.severity == "error"]
    ranks, names = {p.rank for p in errors} - {None}, {name for p in errors for name in p.files}
    for problem in problems:
        doubt = problem.kind is Code.STRAY_FILE and problem.severity == "warning" and problem.files
        if not (doubt and (problem.rank in ranks or not names.isdisjoint(problem.files))):
            yield problem


def _unjoined(ck: Checkpoint, messages: Iterable[str]) -> Iterator[Problem]:
    """One warning for each reason why tensors cannot be put together."""
    reasons: dict[str, list[str]] = {}
    for path, tensor in tensors_of(sections_of(ck)):
        if tensor.note in ("", PLACEHOLDER) or tensor.kind == "meta":
            continue
        if not any(tensor.note in text for text in messages):
            reasons.setdefault(tensor.note, []).append(fqn_of(path))
    for why, names in reasons.items():
        yield Problem(Code.TENSOR_NOT_JOINED, f"{few(names, 1)}: {why}")
