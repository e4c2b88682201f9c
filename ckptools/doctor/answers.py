"""Answers of `doctor` that follow from `verify`: is it whole, are values right, do facts agree, is it in step?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptools.display.page import PagedRecord, ScreenPage
from ckptools.display.screen import mark_of
from ckptools.display.tables import MAX_LINE
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.incidents import causes_of, consequences_of
from ckptools.model.problems import Code, Problem
from ckptools.model.records import Rows, displayed
from ckptools.model.verdict import Verdict
from ckptools.text import and_others, clip_middle, few, printable
from ckptools.training_state.adapters import adapter_lines
from ckptools.training_state.steps import contradiction
from ckptools.verify.record import Check, Verification
from ckptools.verify.run import CHECKSUMS, IN_LINE, IN_RANGE, RANKS_AGREE, STRUCTURE

# -- the record of `doctor`: an answer to each question, and the next commands -----------------------------------------


WHOLE, VALUES, NEWEST, FACTS, LOADS, IN_STEP = (
    "whole?",
    "bytes and values right?",
    "newest whole here?",
    "do step, name and world size agree?",
    "does it load?",
    "optimizer and scheduler in step?",
)
"""The questions, in their order; the second is asked only with `--deep`, which reads every byte."""

WORDS = {True: "ok", False: "BAD", None: "-"}


@displayed
@dataclass(frozen=True)
class Finding:
    """The answer to one question, with its evidence.

    Attributes:
        ok: False if something is wrong; None if the answer is unknown or doubtful, or the question was not asked.
        doubtful: True if there are warnings but no error.
    """

    question: str
    ok: bool | None
    answer: str
    evidence: str
    doubtful: bool = False

    def _summary(self) -> str:
        return f"{self.question} {self.answer}"


@displayed
@dataclass(frozen=True)
class Diagnosis(PagedRecord):
    """The state of a checkpoint, question by question.

    Attributes:
        ok: True if no answer is bad.
        readable: whether the checkpoint could be opened.
        verdict: on the checkpoint; None if it could not be opened.
        next: the next commands, at most three.
        seconds: wall time.
    """

    path: Path
    ok: bool
    readable: bool
    verdict: Verdict | None
    rows: Rows[Finding]
    next: tuple[str, ...] = ()
    seconds: float = 0.0

    def _fill(self, page: ScreenPage) -> None:
        page.line(str(self.path), "heading")
        page.gap()
        above = ""
        if self.verdict is not None and self.verdict.causes:
            above = self.verdict.headline
            page.verdict(self.verdict)
            page.incidents(self.verdict.causes, self.verdict.consequences)
            page.gap()
        width = max((len(row.question) for row in self.rows), default=0)
        for row in self.rows:
            word = "warn" if row.doubtful else WORDS[row.ok]
            label = f"{word:4} {printable(row.question).ljust(width)}  "
            answer = "as above" if row.answer == above else clip_middle(printable(row.answer), MAX_LINE)
            page.line(answer, label=label, label_mark=mark_of(word) or "heading")
            if row.answer != above or row.ok:  # the incidents above are the evidence of a broken checkpoint
                page.line(clip_middle(printable(row.evidence), MAX_LINE), "dim", label="     ")
        if self.next:
            page.gap()
            page.line("next:", "heading")
            page.lines(f"  {command}" for command in self.next)

    def _summary(self) -> str:
        wrong = [row.question for row in self.rows if row.ok is False]
        doubtful = [row.question for row in self.rows if row.doubtful]
        words = f"worth a look: {few(doubtful)}" if doubtful else "nothing wrong was found"
        words = f"BAD: {few(wrong)}" if wrong else words
        return f"{clip_middle(str(self.path), 60)}: {words}"


# -- the answers -------------------------------------------------------------------------------------------------------


MOST = 3
"""At most this many causes are listed in an answer."""

VALUE_CHECKS = (CHECKSUMS, "finite values", IN_RANGE, IN_LINE)
IN_STEP_CHECKS = ("optimizer covers params", "step counters", "lr: scheduler = groups")
OUT_OF_STEP = (Code.STEPS_DISAGREE, Code.LEARNING_RATES_DISAGREE)
LOOK = "worth a look"
CONTRADICTIONS = (
    Code.NAME_CONTRADICTS, Code.NAMED_AS_ANOTHER_RANK, Code.MIXED_SAVES, Code.METADATA_CONTRADICTS,
    Code.WORLD_SIZES_DISAGREE,
)  # fmt: skip


def whole_finding(verified: Verification, checkpoint: Checkpoint) -> Finding:
    """Answer whether all files and tensors are complete, with the causes if they are not."""
    errors = _errors(verified.problems)
    if errors or not verified.verdict.whole or not verified.verdict.joinable:
        whole = None if verified.verdict.whole is None and not errors else False
        unjoined = [p for p in verified.problems if p.kind is Code.TENSOR_NOT_JOINED]
        evidence = "; ".join(filter(None, (verified.verdict.remark, _named(errors or unjoined))))
        return Finding(WHOLE, whole, verified.verdict.headline, evidence)
    files = next(check.detail for check in verified.checks if check.name == "files")
    sums = next(check for check in verified.checks if check.name == CHECKSUMS)
    depth = f"every rank read; {CHECKSUMS}: {sums.not_ok}" if sums.not_ok else "every byte read"
    structure = [check for check in verified.checks if check.name in STRUCTURE and check.of and check.not_ok]
    partly = [f"{check.title}: {check.not_ok}" for check in structure]
    evidence = "; ".join([f"{checkpoint.path}: {files}; {depth}", *partly])
    return Finding(WHOLE, None if partly else True, verified.verdict.headline, evidence)


def values_finding(verified: Verification) -> Finding:
    """Answer whether bytes and values are right, naming faults and oddities."""
    checks = [check for check in verified.checks if check.name in VALUE_CHECKS]
    found = [problem for check in checks for problem in check.problems]
    if found:
        return _judged(VALUES, found, "no" if _errors(found) else LOOK)
    return _as_far_as_looked(VALUES, checks)


def _as_far_as_looked(question: str, checks: Sequence[Check]) -> Finding:
    """Make the answer for checks that found no fault: `yes` only if each check looked at everything."""
    ok = [check for check in checks if check.result == "ok"]
    answer = "yes" if len(ok) == len(checks) else "partly" if any(c.looked_at for c in checks) else "not judged"
    words = [f"{check.title}: {check.detail}" for check in ok]
    words += [f"{check.title}: {check.not_ok}" for check in checks if check.not_ok]
    return Finding(question, True if answer == "yes" else None, answer, "; ".join(words))


def _errors(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.severity == "error"]


def _judged(question: str, problems: Sequence[Problem], answer: str) -> Finding:
    """Make an answer with problems as its evidence; `ok` is False if a problem is an error, as in `verify`."""
    wrong = bool(_errors(problems))
    return Finding(question, False if wrong else None, answer, _named(problems), doubtful=not wrong)


def _named(problems: Sequence[Problem]) -> str:
    """List the causes of problems, then the consequences of missing files."""
    lines = [f"{cause.code} {cause.words}" for cause in causes_of(problems)]
    following = [one.text for one in consequences_of(problems)]
    return "; ".join([*lines[:MOST], *following]) + and_others(len(lines) - MOST)


def facts_finding(checkpoint: Checkpoint, verified: Verification) -> Finding:
    """Answer whether the sources of the step, and of the world size, agree."""
    step, world = checkpoint.step, checkpoint.world_size
    found = [problem for problem in verified.problems if problem.kind in CONTRADICTIONS]
    facts = [f"step {step.value}: {', '.join(step.sources)}"] if step.value is not None else ["no file states a step"]
    facts += [f"world size {world.words}: {', '.join(world.sources)}"] if world.value is not None else []
    facts += [f"quantized: {scheme.words}" for scheme in checkpoint.quantized]
    facts += [f"adapter: {words} {where}" for words, where in adapter_lines(checkpoint)]
    if found:
        return _judged(FACTS, found, "no")
    if not step.agree or not world.agree:
        return Finding(FACTS, None, "no", "; ".join(facts if step.agree else [contradiction(step)]), doubtful=True)
    if len(step.sources) < 2:
        alone = f"nothing else states the step; {facts[0]}" if step.sources else facts[0]
        return Finding(FACTS, None, "not judged", "; ".join([alone, *facts[1:]]))
    ranks = next(check for check in verified.checks if check.name == RANKS_AGREE)
    if ranks.of and ranks.not_ok:
        return Finding(FACTS, None, "partly", "; ".join([*facts, f"{ranks.title}: {ranks.not_ok}"]))
    return Finding(FACTS, True, "yes", "; ".join(facts))


def in_step_finding(verified: Verification) -> Finding:
    """Answer whether optimizer, scheduler and trainer count the same steps and learning rates."""
    checks = [check for check in verified.checks if check.name in IN_STEP_CHECKS]
    found = [problem for check in checks if check.result in ("FAIL", "warn") for problem in check.problems]
    named = [problem for problem in found if problem.kind is not Code.OPTIMIZER_STATE_UNNAMED]
    if named:
        apart = _errors(named) or any(problem.kind in OUT_OF_STEP for problem in named)
        return _judged(IN_STEP, named, "no" if apart else LOOK)
    if found:
        return _judged(IN_STEP, found, "not judged")
    return _as_far_as_looked(IN_STEP, checks)
