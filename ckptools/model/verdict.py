"""The verdict on a checkpoint: whether it is whole, recoverable and joinable, why not, and how deep the check went."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ckptools.model.problems import Code, Problem, Severity, remedy_of
from ckptools.model.records import displayed, to_dict
from ckptools.text import and_more, and_others, clip, clip_middle, few, is_within, named_ranks, plural, printable

# -- causes: problems grouped by their cause, each with its remedy; consequences of lost files apart -------------------


FATES = {
    Code.FILE_MISSING: "missing",
    Code.FILE_CUT: "cut short or damaged",
    Code.FILE_UNREADABLE: "not readable",
}
"""A word for the state of a rank's file, shown after the rank."""

CONSEQUENCES = {
    Code.TENSOR_GAP: ("tensor has gaps", "tensors have gaps"),
    Code.VALUE_LOST: ("value is lost", "values are lost"),
}
"""Problems that follow from the loss of a rank's file, and the phrase that counts them."""

MAX_WORDS = 60
"""Characters of a name in a cause."""

MAX_MESSAGE = 120
"""Characters of a message in the headline."""

MAX_WHAT = 400
"""Characters of a message in the list below the headline."""

OF_VALUES = (Code.VALUE_LOST, Code.MIXED_SAVES, Code.LEFT_OUT)
"""Problems that may concern a plain value as well as a tensor."""

MAX_FILES = 3
"""At most this many files without a rank are named."""

OF_A_SECTION = (Code.PLACEHOLDERS,)
"""Problems of a whole section, whose message is more informative than the section's name."""

MAX_KEY = 1000
"""Characters of a message that are compared with other messages."""


@displayed
class Cause(NamedTuple):
    """Problems of one kind with one cause.

    Attributes:
        code: their code.
        severity: their severity.
        text: a summary in a few words: `rank 2 missing`, `NaN or infinity in layers.17.down`.
        problems: number of problems.
        remedy: the user's next step; "" if none is known.
        where: the ranks and tensors that they are about; "" if they are about the whole checkpoint.
        what: the fact in one line; `R` stands for the rank if only the rank differs: `no file __R_0.distcp`.
    """

    code: str
    severity: Severity
    text: str
    problems: int
    remedy: str
    where: str = ""
    what: str = ""


@displayed
class Consequence(NamedTuple):
    """Problems that follow from lost files.

    Attributes:
        code: the code of the problems.
        causes: codes of the causes that it follows from.
        text: a count in words: `126 tensors have gaps`.
        problems: the same count.
        first: the message of the first problem.
    """

    code: str
    causes: tuple[str, ...]
    text: str
    problems: int
    first: str


def causes_of(problems: Iterable[Problem], severities: Sequence[Severity] = ("error", "warning")) -> tuple[Cause, ...]:
    """Group problems by cause; consequences of lost files are left out.

    Errors come first; within a severity, problems with files come first, then by code.
    """
    return tuple(cause for cause, _ in problems_by_cause(problems, severities))


def problems_by_cause(
    problems: Iterable[Problem], severities: Sequence[Severity] = ("error", "warning")
) -> tuple[tuple[Cause, tuple[Problem, ...]], ...]:
    """Group problems as `causes_of` does, and return each cause with its problems."""
    kept = _split(problem for problem in problems if problem.severity in severities)[0]
    groups: dict[tuple[Severity, Code, str], list[Problem]] = {}
    for problem in sorted(kept, key=_worst_first):
        groups.setdefault((problem.severity, problem.kind, _alike(problem)), []).append(problem)
    return tuple((_cause(kind, severity, group), tuple(group)) for (severity, kind, _), group in groups.items())


def consequences_of(problems: Iterable[Problem]) -> tuple[Consequence, ...]:
    """Gaps and lost values that follow from lost files, one record for each code."""
    kept, following = _split(problems)
    causes = tuple(dict.fromkeys(p.code for p in sorted(kept, key=_worst_first) if _loses_a_file(p)))
    groups: dict[Code, list[Problem]] = {}
    for problem in following:
        groups.setdefault(problem.kind, []).append(problem)
    return tuple(
        Consequence(kind.code, causes, plural_of(len(group), kind), len(group), clip(str(group[0]), MAX_WHAT))
        for kind, group in groups.items()
    )


def plural_of(count: int, kind: Code) -> str:
    """Count consequences of a kind: `126 tensors have gaps`."""
    one, several = CONSEQUENCES[kind]
    return f"{count:,} {one if count == 1 else several}"


def without_consequences(problems: Iterable[Problem]) -> list[Problem]:
    """Drop problems that follow from another: gaps, and values of a lost file."""
    return _split(problems)[0]


def _split(problems: Iterable[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Split distinct problems into causes and problems that follow from lost files."""
    found = list(dict.fromkeys(problems))
    gone: dict[int | None, set[str | None]] = {}
    for problem in found:
        if _loses_a_file(problem) and problem.rank is not None:
            gone.setdefault(problem.rank, set()).add(problem.tensor)
            gone.setdefault(None, set()).add(problem.tensor)
    follows = [p.kind in CONSEQUENCES and p.rank in gone and _was_in(p.tensor, gone[p.rank]) for p in found]
    kept = [p for p, is_one in zip(found, follows, strict=True) if not is_one]
    return kept, [p for p, is_one in zip(found, follows, strict=True) if is_one]


def _was_in(tensor: str | None, parts: Collection[str | None]) -> bool:
    """Whether a tensor was in a lost part; the part None stands for a file with all parts."""
    return None in parts or any(is_within(tensor or "", part) for part in parts if part is not None)


def _loses_a_file(problem: Problem) -> bool:
    return problem.kind.lacks == "file" and problem.severity == "error"


def _worst_first(problem: Problem) -> tuple[int, str]:
    return ("error", "warning", "note").index(problem.severity), "" if problem.kind in FATES else problem.code


NUMBERS = re.compile(r"\[[^\]\[]{0,200}\]|\b[0-9a-f]{8,}\b|(?:(?<=\s)-)?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
"""Text that may differ between problems with one cause: positions, checksums, numbers."""


def _alike(problem: Problem) -> str:
    """The key that problems with one cause share: empty for lost files and gaps, else the message without numbers."""
    return "" if problem.kind.lacks in ("file", "elements") else NUMBERS.sub("#", problem.fact[:MAX_KEY])


def _cause(kind: Code, severity: Severity, group: Sequence[Problem]) -> Cause:
    text, remedy = _words(kind, group), remedy_of(kind, group)
    return Cause(kind.code, severity, text, len(group), remedy, where_of(group), _what(group))


def where_of(group: Sequence[Problem]) -> str:
    """The ranks and tensors that problems are about: `ranks 1..255`, `rank 2, w and 3 other tensors`."""
    ranks = {rank for p in group for rank in p.all_ranks}
    tensors = list(dict.fromkeys(p.tensor for p in group if p.tensor is not None))
    words = [named_ranks(ranks)] if ranks else []
    if tensors:
        first = group[0]
        plain = first.differing.plain if first.differing else first.kind in OF_VALUES
        kind = "other value" if plain else "other tensor"
        more = f" and {plural(len(tensors) - 1, kind)}" if len(tensors) > 1 else ""
        words.append(clip_middle(printable(tensors[0]), MAX_WORDS) + more)
    return ", ".join(words)


def _what(group: Sequence[Problem]) -> str:
    """The message that problems with one cause share, or the first of their messages."""
    facts = [(p.rank, p.fact) for p in group]
    said = list(dict.fromkeys(text for _, text in facts))
    shared = said[0] if len(said) == 1 else _template([(rank, text) for rank, text in facts if rank is not None])
    if shared is not None and (len(said) == 1 or all(rank is not None for rank, _ in facts)):
        return clip_middle(printable(shared), MAX_WHAT)
    more = f"; {SWAPPED}" if _swapped(group) else and_others(len(group) - 1)
    return clip_middle(printable(said[0]), MAX_WHAT) + more


SWAPPED = "and the other way round: the two files seem to have changed places"


def _swapped(group: Sequence[Problem]) -> bool:
    """Whether the contents of two files state each other's rank or name."""
    pairs = [(p.found, p.expected) for p in group]
    return len(pairs) == 2 and None not in pairs[0] and pairs[0] == pairs[1][::-1] and pairs[0] != pairs[1]


def _template(said: Sequence[tuple[int, str]]) -> str | None:
    """The ranks' messages with `R` in place of the rank, if nothing else differs; leading zeros may."""
    if not said:
        return None
    last, text = said[-1]
    for found in re.finditer(rf"(?<!\d)0*{last}(?!\d)", text):
        before, after, width = text[: found.start()], text[found.end() :], len(found[0])
        if all(other in (f"{before}{n}{after}", f"{before}{n:0{width}d}{after}") for n, other in said):
            return f"{before}R{after}"
    return None


def _words(kind: Code, group: Sequence[Problem]) -> str:
    """Describe problems of one kind: `ranks 1, 3 missing`, `gap in a tensor: a.weight and 2 more`."""
    ranks = {rank for p in group for rank in p.all_ranks}
    whose = f" ({named_ranks(ranks)})" if ranks else ""
    fate = FATES.get(kind)
    if fate:
        return f"{' and '.join(_lost_files(group))} {fate}"
    if kind is Code.NAMED_AS_ANOTHER_RANK and ranks:
        if _swapped(group):
            return f"the files of {named_ranks(ranks)} are exchanged"
        return f"{plural(len(group), 'file')} ({named_ranks(ranks)}) under the name of another rank"
    names = list(dict.fromkeys(p.tensor for p in group if p.tensor is not None))
    if names and kind not in OF_A_SECTION:
        return f"{kind.meaning}: {clip_middle(printable(names[0]), MAX_WORDS)}{and_more(len(names) - 1)}{whose}"
    files = list(dict.fromkeys(name for p in group for name in p.files))
    if files and not ranks:
        return f"{kind.meaning}: {clip_middle(printable(files[0]), MAX_WORDS)}{and_more(len(files) - 1)}"
    if ranks:
        return f"{kind.meaning}{whose}"
    return clip(printable(group[0].message), MAX_MESSAGE) + and_others(len(group) - 1)


def _lost_files(group: Sequence[Problem]) -> Iterator[str]:
    """Name the ranks, and the parts of ranks, whose files are lost, and count further files."""
    whole = {rank for p in group if p.tensor is None for rank in p.all_ranks}
    parts: dict[str, set[int]] = {}
    for problem in group:
        if problem.tensor is not None:
            parts.setdefault(problem.tensor, set()).update(set(problem.all_ranks) - whole)
    if whole:
        yield named_ranks(whole)
    for part, ranks in parts.items():
        if ranks:
            yield f"{clip_middle(printable(part), MAX_WORDS)} of {named_ranks(ranks)}"
    others = [p for p in group if not p.all_ranks]
    if others:
        named = all(p.files for p in others)
        names = dict.fromkeys(printable(name) for p in others for name in p.files)
        yield few([clip_middle(name, MAX_WORDS) for name in names], MAX_FILES) if named else plural(len(others), "file")


# -- the verdict -------------------------------------------------------------------------------------------------------


Depth = Literal["nothing", "listed", "structure", "bytes"]
"""How deep the check went: not at all; names and layout, which rely on present files; every rank's structure;
every byte, compared with its checksum if there is one.
"""

Level = Literal["good", "doubtful", "bad"]

EXCHANGED = Code.NAMED_AS_ANOTHER_RANK.code

MAX_CAUSES = 4
"""At most this many causes are named in a headline."""


@displayed
@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is whole, recoverable and joinable, as far as it was checked.

    Attributes:
        whole: everything that was saved is present and of one save; None where that is not proven.
        recoverable: every value of the model and the optimizer is present, if need be as a replica in another
            file; None if not every rank was read.
        joinable: the present shards can be put together; None if not every rank was read.
        depth: how deep the check went.
        extent: the files found, in words: `all 4 rank files are here, all read`.
        causes: the causes of errors and warnings, the worst first.
        consequences: problems that follow from lost files.
        lost: values that only lost or damaged files had, if the model and the optimizer are recoverable.
    """

    whole: bool | None
    recoverable: bool | None
    joinable: bool | None
    depth: Depth
    extent: str
    causes: tuple[Cause, ...] = ()
    lost: tuple[str, ...] = ()
    consequences: tuple[Consequence, ...] = ()

    @property
    def resumable(self) -> bool | None:
        """False if files have the names of other ranks, so that a resume by rank would load other ranks' shards.

        None if no such file was found.
        """
        return False if any(cause.code == EXCHANGED and cause.severity == "error" for cause in self.causes) else None

    @property
    def level(self) -> Level:
        """`bad` for an error, `good` if it is proven whole and without a warning."""
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
        if self.resumable is False:
            others = [cause for cause in errors if cause.code != EXCHANGED]
            more = f"; {_counted(others)}" if others else ""
            return f"whole, not resumable as the files lie: {_named(c for c in errors if c.code == EXCHANGED)}{more}"
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
        """The verdict's fields, with `level` and `headline`."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        fields = ("whole", "recoverable", "joinable", "resumable", "depth", "level", "headline")
        causes = [cause._asdict() for cause in self.causes]
        following = [{**one._asdict(), "causes": list(one.causes)} for one in self.consequences]
        found = {name: getattr(self, name) for name in fields}
        return {**found, "causes": causes, "consequences": following, "lost": list(self.lost)}

    def _summary(self) -> str:
        return self.headline


def _named(causes: Iterable[Cause]) -> str:
    texts = [cause.text for cause in causes]
    more = f", {plural(len(texts) - MAX_CAUSES, 'other cause')}" if len(texts) > MAX_CAUSES else ""
    return ", ".join(texts[:MAX_CAUSES]) + more


def _counted(causes: Sequence[Cause]) -> str:
    """Count the causes of one severity, and name them: `2 warnings: …`."""
    return f"{plural(len(causes), causes[0].severity)}: {_named(causes)}"
