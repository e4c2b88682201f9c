"""Rules: each finds one kind of problem in a checkpoint's structure, whatever its format; `RULES` lists them.

A rule examines a `Checkpoint` and yields problems; `verdict` follows from these. A format finds only what no rule can
find: problems of its files, and the location of tensors in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem, worst_first
from ckptools.model.tree import tensors_in
from ckptools.pickles.foreign_names import unsafe_names
from ckptools.rules.optimizers import optimizer_problems, step_problems
from ckptools.rules.stated_model import model_problems
from ckptools.rules.tensors import copy_problems, cover_problems, unjoined_problems, with_placeholders
from ckptools.tensor_io.copies import check_copies
from ckptools.training_state.adapters import adapter_problems
from ckptools.training_state.quantized_weights import quantization_problems, with_quantized


class Rule(NamedTuple):
    """A rule on checkpoints.

    Attributes:
        find: yields its problems; the checkpoint has only the problems that its format found.
        every_rank: whether it needs the structure of every rank's file.
    """

    find: Callable[[Checkpoint], Iterable[Problem]]
    every_rank: bool = False


RULES = (
    Rule(quantization_problems, every_rank=True),
    Rule(adapter_problems, every_rank=True),
    Rule(cover_problems, every_rank=True),
    Rule(lambda ck: check_copies(tensors_in(ck.tree)), every_rank=True),
    Rule(unjoined_problems),
    Rule(copy_problems),
    Rule(optimizer_problems),
    Rule(step_problems),
    Rule(model_problems, every_rank=True),
    Rule(lambda ck: unsafe_names(ck.names, ck.tree)),
)


def with_problems(ck: Checkpoint) -> Checkpoint:
    """Mark codes and placeholders among the tensors, and add the problems that the rules find."""
    ck = with_quantized(with_placeholders(ck))
    rules = [rule for rule in RULES if ck.structure_read or not rule.every_rank]
    known = set(ck.problems)
    found = dict.fromkeys(problem for rule in rules for problem in rule.find(ck) if problem not in known)
    made = replace(ck, problems=worst_first(_without_proven_copies([*ck.problems, *found])))
    made.worked_out.update(ck.worked_out)
    made.worked_out.pop("verdict", None)  # it depends on the problems
    return made


def _without_proven_copies(problems: Sequence[Problem]) -> Iterator[Problem]:
    """Drop warnings that a file may be a copy if an error names the file's true rank."""
    errors = [p for p in problems if p.kind is Code.STRAY_FILE and p.severity == "error"]
    ranks, names = {p.rank for p in errors} - {None}, {name for p in errors for name in p.files}
    for problem in problems:
        doubt = problem.kind is Code.STRAY_FILE and problem.severity == "warning" and problem.files
        if not (doubt and (problem.rank in ranks or not names.isdisjoint(problem.files))):
            yield problem
