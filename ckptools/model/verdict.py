"""The verdict on a checkpoint: whether it is whole, recoverable and joinable, why not, and how deep the check went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ckptools.model.problems import Code, Problem, Severity
from ckptools.model.records import displayed, to_dict
from ckptools.text import and_more, and_others, clip, clip_middle, named_ranks, plural, printable

Depth = Literal["nothing", "listed", "structure", "bytes"]
"""How deep the check went: not at all; names and layout, which promise files that are here; every rank's structure;
every byte, compared with its checksum where there is one."""

Level = Literal["good", "doubtful", "bad"]

FATES = {
    Code.FILE_MISSING: "missing",
    Code.FILE_CUT: "cut short or damaged",
    Code.FILE_UNREADABLE: "not readable",
}
"""The fate of a rank's file, in a word behind the rank."""

MAX_WORDS = 60
"""Characters of a name in a cause."""

MAX_MESSAGE = 120
"""Characters of a message in a cause."""

MAX_CAUSES = 4
"""Causes that a headline names."""

REMEDIES = {
    Code.FILE_MISSING: "put the file beside the others; --allow-missing writes what is here",
    Code.FILE_CUT: "copy the file again from where it was saved; --allow-missing writes what is here",
    Code.FILE_UNREADABLE: "make the file readable",
    Code.BAD_CHECKSUM: "copy the file again; --allow-missing leaves out what is damaged",
    Code.VALUE_LOST: "copy the file again; --allow-missing leaves out what is damaged",
    Code.MIXED_SAVES: "put the files of one save together",
    Code.STRAY_FILE: "move the file that does not belong here out of the folder",
    Code.FILE_CONTRADICTS: "put the data files back under the names that they had",
    Code.ONE_OF_SEVERAL: "put the other files beside it",
    Code.TENSOR_GAP: "find the file that holds it; --allow-missing leaves it out, or fills it with --fill",
    Code.COPIES_DIFFER: "verify --deep finds the damaged copy; --prefer-rank takes one",
    Code.TENSOR_NOT_JOINED: "give what the message names; --allow-missing leaves such tensors out",
    Code.FILLED: "consolidate again once the files that were lost are back",
    Code.LEFT_OUT: "consolidate again once the files that were lost are back",
    Code.ORIGIN_UNREADABLE: "consolidate again",
    Code.NEVER_WRITTEN: "copy the file again; --allow-missing leaves out what was never written",
    Code.NOT_FINITE: "go back to an earlier checkpoint",
    Code.OPTIMIZER_STATE_UNNAMED: "give the names with --names",
}
"""The way out of a cause, where there is one."""


CONSEQUENCES = (Code.TENSOR_GAP, Code.VALUE_LOST)
"""Problems that follow from a lost file of a rank."""


@displayed
class Cause(NamedTuple):
    """Problems of one kind that make a verdict what it is.

    Attributes:
        code: their code.
        severity: theirs.
        text: which they are, in a few words: `rank 2 missing`, `NaN or infinity in layers.17.down`.
        problems: how many there are.
        remedy: the way out; "" where none is known.
    """

    code: str
    severity: Severity
    text: str
    problems: int
    remedy: str


@displayed
@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is whole, can be recovered and put together, as far as it was checked.

    Attributes:
        whole: everything that was saved is here and of one save; None where that is not proven.
        recoverable: every value of the model and the optimizer is here, in a replica of a file that is lost or damaged
            too; None where not every rank was read.
        joinable: the pieces that are here can be put together; None where not every rank was read.
        depth: how deep the check went.
        extent: what is here, in words: `all 4 rank files are here, all read`.
        causes: what is wrong or doubtful, the worst first; consequences of another are left out.
        lost: what only lost or damaged files had, where everything else can be recovered.
    """

    whole: bool | None
    recoverable: bool | None
    joinable: bool | None
    depth: Depth
    extent: str
    causes: tuple[Cause, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def level(self) -> Level:
        """`bad` where something is wrong, `good` where it is proven whole and nothing is doubtful."""
        if self.whole is False or any(cause.severity == "error" for cause in self.causes):
            return "bad"
        return "good" if self.whole and self.joinable and not self.causes else "doubtful"

    @property
    def headline(self) -> str:
        """The verdict in one line, the worst cause first."""
        errors = [cause for cause in self.causes if cause.severity == "error"]
        warnings = [cause for cause in self.causes if cause.severity == "warning"]
        if self.whole is False:
            return f"NOT WHOLE: {_named(errors) or 'nothing of it can be read'}{self._way_out}"
        if self.whole is None:
            return f"{self.extent}; {_counted(errors or warnings)}" if errors or warnings else self.extent
        if errors:
            return f"whole, but {_counted(errors)}"
        if not self.joinable:
            return f"whole, not joinable: {_named(c for c in warnings if c.code == Code.TENSOR_NOT_JOINED.code)}"
        return f"whole, {_counted(warnings)}" if warnings else f"whole: {self.extent}"

    @property
    def _way_out(self) -> str:
        if self.recoverable and self.joinable:
            lost = f", but not {self.lost[0]}" if self.lost else ""
            return f"; recoverable: the whole model and optimizer are here{lost}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Its fields, with `level` and `headline`."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        fields = ("whole", "recoverable", "joinable", "depth", "level", "headline")
        causes = [cause._asdict() for cause in self.causes]
        return {**{name: getattr(self, name) for name in fields}, "causes": causes, "lost": list(self.lost)}

    def _summary(self) -> str:
        return self.headline


def without_consequences(problems: Iterable[Problem]) -> list[Problem]:
    """Drop problems that follow from another: gaps, and values that were in a lost file."""
    found = list(dict.fromkeys(problems))
    gone = {p.rank for p in found if p.kind.lacks == "file" and p.severity == "error"} - {None}
    return [p for p in found if not (p.kind in CONSEQUENCES and gone and p.rank in {None, *gone})]


def causes_of(problems: Iterable[Problem]) -> tuple[Cause, ...]:
    """The causes behind problems, one for each code; consequences of lost files are left out.

    Errors come first; within a severity, problems with files come first, then they go by code.
    """
    kept = without_consequences(problem for problem in problems if problem.severity != "note")
    groups: dict[tuple[Severity, Code], list[Problem]] = {}
    for problem in sorted(kept, key=_worst_first):
        groups.setdefault((problem.severity, problem.kind), []).append(problem)
    return tuple(
        Cause(kind.code, severity, _words(kind, group), len(group), REMEDIES.get(kind, ""))
        for (severity, kind), group in groups.items()
    )


def _worst_first(problem: Problem) -> tuple[bool, str]:
    return problem.severity != "error", "" if problem.kind in FATES else problem.code


def _words(kind: Code, group: Sequence[Problem]) -> str:
    """Describe problems of one kind: `ranks 1, 3 missing`, `gap in a tensor: a.weight and 2 more`."""
    ranks = {rank for p in group for rank in p.all_ranks}
    whose = f" ({named_ranks(ranks)})" if ranks else ""
    fate = FATES.get(kind)
    if fate:
        others = sum(not p.all_ranks for p in group)
        words = [named_ranks(ranks)] if ranks else []
        return f"{' and '.join([*words, *([plural(others, 'file')] if others else [])])} {fate}"
    names = list(dict.fromkeys(p.tensor for p in group if p.tensor is not None))
    if names:
        return f"{kind.meaning}: {clip_middle(printable(names[0]), MAX_WORDS)}{and_more(len(names) - 1)}{whose}"
    files = list(dict.fromkeys(name for p in group for name in p.files))
    if files and not ranks:
        return f"{kind.meaning}: {clip_middle(printable(files[0]), MAX_WORDS)}{and_more(len(files) - 1)}"
    if ranks:
        return f"{kind.meaning}{whose}"
    return clip(printable(group[0].message), MAX_MESSAGE) + and_others(len(group) - 1)


def _named(causes: Iterable[Cause]) -> str:
    texts = [cause.text for cause in causes]
    more = f", {plural(len(texts) - MAX_CAUSES, 'other cause')}" if len(texts) > MAX_CAUSES else ""
    return ", ".join(texts[:MAX_CAUSES]) + more


def _counted(causes: Sequence[Cause]) -> str:
    """Count the causes of one severity, and name them: `2 warnings: …`."""
    return f"{plural(len(causes), causes[0].severity)}: {_named(causes)}"
