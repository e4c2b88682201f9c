"""The answers of `doctor` that follow from `verify`: whole? bytes and values right? do the facts agree? in step?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptools.display.lines import cause_words
from ckptools.doctor.record import FACTS, IN_STEP, VALUES, WHOLE, Finding
from ckptools.model.causes import causes_of, consequences_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.text import and_others
from ckptools.training_state.steps import contradiction
from ckptools.verify.record import Check, Verification
from ckptools.verify.run import CHECKSUMS, IN_LINE, IN_RANGE, RANKS_AGREE, STRUCTURE

MOST = 3
"""Causes that an answer names."""

VALUE_CHECKS = (CHECKSUMS, "finite values", IN_RANGE, IN_LINE)
IN_STEP_CHECKS = ("optimizer covers params", "step counters", "lr: scheduler = groups")
OUT_OF_STEP = (Code.STEPS_DISAGREE, Code.LEARNING_RATES_DISAGREE)
LOOK = "worth a look"
CONTRADICTIONS = (
    Code.NAME_CONTRADICTS, Code.NAMED_AS_ANOTHER_RANK, Code.MIXED_SAVES, Code.METADATA_CONTRADICTS,
    Code.WORLD_SIZES_DISAGREE,
)  # fmt: skip


def whole_finding(verified: Verification, checkpoint: Checkpoint) -> Finding:
    """Whether all is here, and the causes where it is not."""
    errors = _errors(verified.problems)
    if errors or not verified.verdict.whole or not verified.verdict.joinable:
        whole = None if verified.verdict.whole is None and not errors else False
        unjoined = [p for p in verified.problems if p.kind is Code.TENSOR_NOT_JOINED]
        return Finding(WHOLE, whole, verified.verdict.headline, _named(errors or unjoined))
    files = next(check.detail for check in verified.checks if check.name == "files")
    sums = next(check for check in verified.checks if check.name == CHECKSUMS)
    depth = f"every rank read; {CHECKSUMS}: {sums.not_ok}" if sums.not_ok else "every byte read"
    structure = [check for check in verified.checks if check.name in STRUCTURE and check.of and check.not_ok]
    partly = [f"{check.name}: {check.not_ok}" for check in structure]
    evidence = "; ".join([f"{checkpoint.path}: {files}; {depth}", *partly])
    return Finding(WHOLE, None if partly else True, verified.verdict.headline, evidence)


def values_finding(verified: Verification) -> Finding:
    """What is wrong with bytes and values, or worth a look, by name."""
    checks = [check for check in verified.checks if check.name in VALUE_CHECKS]
    found = [problem for check in checks for problem in check.problems]
    if found:
        return _judged(VALUES, found, "no" if _errors(found) else LOOK)
    return _as_far_as_looked(VALUES, checks)


def _as_far_as_looked(question: str, checks: Sequence[Check]) -> Finding:
    """The answer where no check found anything: `yes` only if each of them looked at everything."""
    ok = [check for check in checks if check.result == "ok"]
    answer = "yes" if len(ok) == len(checks) else "partly" if any(c.looked_at for c in checks) else "not judged"
    words = [f"{check.name}: {check.detail}" for check in ok]
    words += [f"{check.name}: {check.not_ok}" for check in checks if check.not_ok]
    return Finding(question, True if answer == "yes" else None, answer, "; ".join(words))


def _errors(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.severity == "error"]


def _judged(question: str, problems: Sequence[Problem], answer: str) -> Finding:
    """An answer with problems as its evidence; bad where one of them is an error, as in the exit code of `verify`."""
    wrong = bool(_errors(problems))
    return Finding(question, False if wrong else None, answer, _named(problems), doubtful=not wrong)


def _named(problems: Sequence[Problem]) -> str:
    """The causes behind problems, then what follows from lost files."""
    lines = [f"{cause.code} {cause_words(cause)}" for cause in causes_of(problems)]
    following = [one.text for one in consequences_of(problems)]
    return "; ".join([*lines[:MOST], *following]) + and_others(len(lines) - MOST)


def facts_finding(checkpoint: Checkpoint, verified: Verification) -> Finding:
    """Whether step, name and world size agree."""
    step, world = checkpoint.step, checkpoint.world_size
    found = [problem for problem in verified.problems if problem.kind in CONTRADICTIONS]
    facts = [f"step {step.value}: {', '.join(step.sources)}"] if step.value is not None else ["no file states a step"]
    facts += [f"world size {world.words}: {', '.join(world.sources)}"] if world.value is not None else []
    facts += [f"quantized: {scheme.words}" for scheme in checkpoint.quantized]
    if found:
        return _judged(FACTS, found, "no")
    if not step.agree or not world.agree:
        return Finding(FACTS, None, "no", "; ".join(facts if step.agree else [contradiction(step)]), doubtful=True)
    if len(step.sources) < 2:
        alone = f"nothing else states the step; {facts[0]}" if step.sources else facts[0]
        return Finding(FACTS, None, "not judged", "; ".join([alone, *facts[1:]]))
    ranks = next(check for check in verified.checks if check.name == RANKS_AGREE)
    if ranks.of and ranks.not_ok:
        return Finding(FACTS, None, "partly", "; ".join([*facts, f"{ranks.name}: {ranks.not_ok}"]))
    return Finding(FACTS, True, "yes", "; ".join(facts))


def in_step_finding(verified: Verification) -> Finding:
    """Whether optimizer, scheduler and training count the same steps and learning rates."""
    checks = [check for check in verified.checks if check.name in IN_STEP_CHECKS]
    found = [problem for check in checks if check.result in ("FAIL", "warn") for problem in check.problems]
    named = [problem for problem in found if problem.kind is not Code.OPTIMIZER_STATE_UNNAMED]
    if named:
        apart = _errors(named) or any(problem.kind in OUT_OF_STEP for problem in named)
        return _judged(IN_STEP, named, "no" if apart else LOOK)
    if found:
        return _judged(IN_STEP, found, "not judged")
    return _as_far_as_looked(IN_STEP, checks)
