"""Incidents: problems grouped by culprit, each with the evidence and the user's next step; no message is parsed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from ckptools.model.problems import Code, Problem, Severity, remedy_of
from ckptools.model.records import displayed, grouped
from ckptools.text import and_more, and_others, clip, clip_middle, few, is_within, named_ranks, plural, printable

MAX_NAME = 60
"""Characters of a name in an incident."""

MAX_PHRASE = 57
"""Characters of a phrase, as far as the name of a tensor can be cut; a headline has 80."""

MIN_NAME = 24
"""Characters to which the name of a tensor is cut at most in a phrase; that of a file is cut to `MIN_FILE`."""

MIN_FILE = 40

MAX_STEPS = 32
"""Most characters of two values in a phrase."""

MAX_WHAT = 400
"""Characters of a message as evidence."""

MAX_FILES = 3
"""At most this many files without a rank are named."""

PHRASES = {
    Code.FILE_MISSING: "missing",
    Code.FILE_CUT: "cut short or damaged",
    Code.ODD_FILE_SIZE: "of an odd size",
    Code.BAD_CHECKSUM: "damaged (bad CRC-32)",
    Code.VALUE_LOST: "damaged inside",
    Code.MIXED_SAVES: "of another save",
    Code.LEFT_OVER: "left over from an interrupted write",
    Code.STRAY_FILE: "stray or duplicate",
    Code.NAME_CONTRADICTS: "not what the name says",
    Code.MANIFEST_DIFFERS: "at odds with the manifest",
    Code.FILE_UNREADABLE: "not readable",
    Code.NEVER_WRITTEN: "with bytes that were never written",
    Code.FILE_CONTRADICTS: "at odds with the metadata",
    Code.NAMED_AS_ANOTHER_RANK: "under the name of another rank",
    Code.TENSOR_GAP: "with gaps",
    Code.WORLD_SIZES_DISAGREE: "of another world size",
    Code.LAYOUT_DISAGREES: "of another layout",
    Code.COPIES_DIFFER: "at odds with other copies",
}
"""The phrase that follows the culprit of a problem of each kind: `rank 3 missing`."""

LOSSES = (Code.FILE_MISSING, Code.FILE_CUT, Code.FILE_UNREADABLE)
"""Kinds of problems that take a whole file away; they come before other errors."""

CONSEQUENCES = {
    Code.TENSOR_GAP: ("tensor has gaps", "tensors have gaps"),
    Code.VALUE_LOST: ("value is lost", "values are lost"),
}
"""Problems that follow from the loss of a rank's file, and the phrase that counts them."""

OF_VALUES = (Code.VALUE_LOST, Code.MIXED_SAVES, Code.LEFT_OUT)
"""Problems that may concern a plain value as well as a tensor."""

COUNTERS = ("step", "global_step", "iteration", "batch")
"""Names of values that count the steps of a run, which tell two steps apart best."""

OF_A_SECTION = (Code.PLACEHOLDERS,)
"""Problems of a whole section, whose message is more informative than the section's name."""


class Culprit(NamedTuple):
    """The ranks, or else the files, to blame; without both, the problem is about the run or its tensors."""

    ranks: tuple[int, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Name the ranks or the files: `ranks 1..63`, `a.pt, b.pt and 2 more`; "" without both."""
        return named_ranks(self.ranks) if self.ranks else _named(self.files)


@displayed
class Cause(NamedTuple):
    """Problems of one kind with one culprit.

    Attributes:
        code: their code.
        severity: their severity.
        text: a summary in a few words: `rank 2 missing`, `NaN or infinity: layers.17.down`.
        problems: number of problems.
        remedy: the user's next step; "" if none is known.
        where: the ranks and tensors that they are about; "" if they are about the whole checkpoint.
        what: the fact in one line: `no file ep0-ba6-rank2.pt`.
        culprit: the ranks or files to blame; "" if the problems are about the run or its tensors.
        about: the tensors or values that they are about: `w and 3 other tensors`; "" if none is named. Their ranks
            come first if these are not all of the culprit's.
    """

    code: str
    severity: Severity
    text: str
    problems: int
    remedy: str
    where: str = ""
    what: str = ""
    culprit: str = ""
    about: str = ""

    @property
    def words(self) -> str:
        """The ranks and tensors, or else the file, and the fact: `rank 3, w: is cut short`."""
        return ": ".join(filter(None, (self.where or self.culprit, self.what)))

    @property
    def evidence(self) -> str:
        """The fact, with the tensors or values that it is about: `w and 3 other tensors: 1 NaN, first at [24, 12]`."""
        return ": ".join(filter(None, (self.about, self.what)))


@displayed
class Incident(NamedTuple):
    """The causes with one culprit, the worst first.

    Attributes:
        culprit: the ranks or files to blame: `rank 3`, `ranks 1..63`; "" if it is about the run or its tensors.
        severity: of the worst cause.
        text: the worst cause in a few words: `rank 3 of another save`.
        causes: the evidence, a cause for each code.
        remedy: the user's next step; "" if none is known.
    """

    culprit: str
    severity: Severity
    text: str
    causes: tuple[Cause, ...]
    remedy: str


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


# -- grouping ----------------------------------------------------------------------------------------------------------


def incidents_of(causes: Iterable[Cause]) -> tuple[Incident, ...]:
    """Group causes by culprit; a cause without a culprit is an incident of its own."""
    groups = grouped(causes, lambda cause: cause.culprit or cause)
    return tuple(
        Incident(first.culprit, first.severity, first.text, (first, *others), first.remedy)
        for first, *others in groups.values()
    )


def causes_of(problems: Iterable[Problem], severities: Sequence[Severity] = ("error", "warning")) -> tuple[Cause, ...]:
    """Group problems by culprit and code; consequences of lost files are left out.

    The culprit with the worst problem comes first: errors before warnings, lost files before other errors, then by
    code. The causes with one culprit follow each other.
    """
    return tuple(cause for cause, _ in problems_by_cause(problems, severities))


def problems_by_cause(
    problems: Iterable[Problem], severities: Sequence[Severity] = ("error", "warning")
) -> tuple[tuple[Cause, tuple[Problem, ...]], ...]:
    """Group problems as `causes_of` does, and return each cause with its problems."""
    kept = without_consequences(problem for problem in problems if problem.severity in severities)
    mixed = {rank for p in kept if p.kind is Code.MIXED_SAVES and p.severity == "error" for rank in p.all_ranks}
    blamed = grouped(sorted(kept, key=_worst_first), lambda problem: _culprit_and_subject(problem, mixed))
    # Ranks with the same kinds of problems, or whose files are lost, are one culprit: `ranks 1..63 missing`.
    alike = grouped(blamed.items(), lambda item: (item[0][1], *_likeness(item[0][0], item[1])))
    found: list[tuple[Cause, tuple[Problem, ...]]] = []
    for group in alike.values():
        ranks = {rank for (culprit, _), _ in group for rank in culprit.ranks}
        files = dict.fromkeys(name for (culprit, _), _ in group for name in culprit.files)
        culprit = Culprit(tuple(sorted(ranks)), tuple(files))
        kinds = grouped(sorted((p for _, several in group for p in several), key=_worst_first), _kind)
        found += [(_cause(same, culprit), tuple(same)) for same in kinds.values()]
    return tuple(found)


def _kind(problem: Problem) -> tuple[Severity, Code]:
    return problem.severity, problem.kind


def _likeness(culprit: Culprit, problems: Sequence[Problem]) -> tuple[bool, frozenset[tuple[Severity, Code]]]:
    """Whether the culprit is a rank, and the kinds of its problems; of a rank whose file is lost, that kind alone."""
    lost = culprit.ranks and problems[0].kind in LOSSES and problems[0].severity == "error"
    return bool(culprit.ranks), frozenset(map(_kind, problems[:1] if lost else problems))


def _culprit_and_subject(problem: Problem, mixed: Set[int]) -> tuple[Culprit, str]:
    """The ranks or files to blame for a problem, or else its subject: its code; its message if it is a note.

    Values and classes in a file are what the run saved, so they blame no rank. Where two ranks differ, and one of them
    is of another save (`mixed`), that one is to blame.
    """
    if problem.severity == "note":
        return Culprit(), problem.message
    if problem.code >= Code.NOT_FINITE.code:
        return Culprit(), problem.code
    ranks = tuple(sorted(set(problem.all_ranks)))
    if not ranks and problem.differing is not None:
        differing = {rank for _, having in problem.differing.values for rank in having}
        ranks = tuple(sorted(differing & mixed)) if differing - mixed else ()
    culprit = Culprit(ranks, () if ranks else problem.files)
    return culprit, "" if any(culprit) else problem.code


def without_consequences(problems: Iterable[Problem]) -> list[Problem]:
    """Drop problems that follow from another: gaps, and values of a lost file."""
    return _split(problems)[0]


def consequences_of(problems: Iterable[Problem]) -> tuple[Consequence, ...]:
    """Gaps and lost values that follow from lost files, one record for each code."""
    kept, following = _split(problems)
    causes = tuple(dict.fromkeys(p.code for p in sorted(kept, key=_worst_first) if _loses_a_file(p)))
    groups = grouped(following, lambda problem: problem.kind)
    return tuple(
        Consequence(kind.code, causes, plural_of(len(group), kind), len(group), clip(str(group[0]), MAX_WHAT))
        for kind, group in groups.items()
    )


def plural_of(count: int, kind: Code) -> str:
    """Count consequences of a kind: `126 tensors have gaps`."""
    one, several = CONSEQUENCES[kind]
    return f"{count:,} {one if count == 1 else several}"


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
    return ("error", "warning", "note").index(problem.severity), "" if problem.kind in LOSSES else problem.code


# -- words -------------------------------------------------------------------------------------------------------------


def _cause(group: Sequence[Problem], culprit: Culprit) -> Cause:
    kind, severity = group[0].kind, group[0].severity
    ranks, about = {rank for p in group for rank in p.all_ranks}, _about(group)
    where = ", ".join(filter(None, (named_ranks(ranks) if ranks else "", about)))
    about = about if ranks == set(culprit.ranks) else where
    text, remedy = _phrase(group, culprit), remedy_of(kind, group)
    return Cause(kind.code, severity, text, len(group), remedy, where, _what(group, culprit), culprit.words, about)


def _telling(group: Sequence[Problem]) -> Problem:
    """The problem that tells most: about a counter of steps, or else the first."""
    return next((p for p in group if p.differing and p.differing.name in COUNTERS), group[0])


def _about(group: Sequence[Problem]) -> str:
    """The tensors or values that problems are about: `w and 3 other tensors`; "" if no problem names one."""
    first = _telling(group)
    names = list(dict.fromkeys(p.tensor for p in (first, *group) if p.tensor is not None))
    plain = first.differing.plain if first.differing else first.kind in OF_VALUES
    more = f" and {plural(len(names) - 1, 'other value' if plain else 'other tensor')}" if len(names) > 1 else ""
    return clip_middle(printable(names[0]), MAX_NAME) + more if names else ""


def _what(group: Sequence[Problem], culprit: Culprit) -> str:
    """The fact that one of the problems states, and the number of others if they name no tensor.

    The name of the file to blame, with which a message may begin, is left out: it stands beside the fact.
    """
    first = _telling(group)
    said = dict.fromkeys(p.fact for p in group)
    more = "" if first.tensor is not None else and_others(len(said) - 1)
    fact = first.fact.removeprefix(f"{culprit.words}: ")
    return clip_middle(printable(fact), MAX_WHAT) + (f"; {SWAPPED}" if _swapped(group) else more)


SWAPPED = "and the other way round: the two files seem to have changed places"


def _swapped(group: Sequence[Problem]) -> bool:
    """Whether the contents of two files state each other's rank or name."""
    pairs = [(p.found, p.expected) for p in group]
    return len(pairs) == 2 and None not in pairs[0] and pairs[0] == pairs[1][::-1] and pairs[0] != pairs[1]


def _phrase(group: Sequence[Problem], culprit: Culprit) -> str:
    """Blame in a few words: `ranks 1, 3 missing`, `a.pt stray or duplicate`, `gap in a tensor: w and 2 more`."""
    kind = group[0].kind
    if kind in LOSSES:
        return f"{' and '.join(_lost_files(group))} {PHRASES[kind]}"
    if kind is Code.STRAY_FILE and culprit.ranks and all(len(p.files) > 1 for p in group):
        return f"{culprit.words} in several files"
    if kind is Code.NAMED_AS_ANOTHER_RANK and _swapped(group):
        return f"the files of {culprit.words} are exchanged"
    differing = _telling(group).differing if kind is Code.MIXED_SAVES else None
    at = f" ({differing.few_words})" if differing and len(differing.few_words) <= MAX_STEPS else ""
    if any(culprit):
        blamed = named_ranks(culprit.ranks) if culprit.ranks else _first_of(culprit.files)
        perhaps = "perhaps " if kind is Code.MIXED_SAVES and group[0].severity == "warning" else ""
        return f"{blamed} {perhaps}{PHRASES[kind]}{at}" if kind in PHRASES else f"{blamed}: {kind.meaning}"
    if at:
        return f"{kind.meaning}{at}"
    ranks = {rank for p in group for rank in p.all_ranks}
    names = list(dict.fromkeys(p.tensor for p in group if p.tensor is not None))
    if names and kind not in OF_A_SECTION:
        more = and_more(len(names) - 1) + (f" ({named_ranks(ranks)})" if ranks else "")
        room = MAX_PHRASE - len(kind.meaning) - len(more)
        return f"{kind.meaning}: {clip_middle(printable(names[0]), max(room, MIN_NAME))}{more}"
    message = printable(group[0].message)
    if not ranks and len(group) == 1 and len(message) <= MAX_PHRASE:
        return message
    return f"{kind.meaning} ({named_ranks(ranks)})" if ranks else kind.meaning


def _lost_files(group: Sequence[Problem]) -> Iterator[str]:
    """Name the ranks, and the parts of ranks, whose files are lost, and further files."""
    whole = {rank for p in group if p.tensor is None for rank in p.all_ranks}
    parts: dict[str, set[int]] = {}
    for problem in group:
        if problem.tensor is not None:
            parts.setdefault(problem.tensor, set()).update(set(problem.all_ranks) - whole)
    if whole:
        yield named_ranks(whole)
    for part, ranks in parts.items():
        if ranks:
            yield f"{clip_middle(printable(part), MAX_NAME)} of {named_ranks(ranks)}"
    others = [p for p in group if not p.all_ranks]
    if others:
        named = all(p.files for p in others)
        files = list(dict.fromkeys(name for p in others for name in p.files))
        yield _first_of(files) if named else plural(len(others), "file")


def _first_of(files: Sequence[str]) -> str:
    return clip_middle(printable(files[0]), MIN_FILE) + and_more(len(files) - 1)


def _named(files: Iterable[str]) -> str:
    return few([clip_middle(printable(name), MAX_NAME) for name in dict.fromkeys(files)], MAX_FILES)
