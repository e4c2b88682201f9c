"""Causes: problems grouped by what is behind them, each with the way out, and the consequences of lost files apart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckptools.model.problems import Code, Problem, Severity
from ckptools.model.records import displayed
from ckptools.text import and_more, and_others, clip, clip_middle, named_ranks, plural, printable

FATES = {
    Code.FILE_MISSING: "missing",
    Code.FILE_CUT: "cut short or damaged",
    Code.FILE_UNREADABLE: "not readable",
}
"""The fate of a rank's file, in a word behind the rank."""

CONSEQUENCES = {
    Code.TENSOR_GAP: ("tensor has gaps", "tensors have gaps"),
    Code.VALUE_LOST: ("value is lost", "values are lost"),
}
"""Problems that follow from a lost file of a rank, and how they are counted."""

MAX_WORDS = 60
"""Characters of a name in a cause."""

MAX_MESSAGE = 120
"""Characters of a message in the headline."""

MAX_WHAT = 400
"""Characters of a message below it."""

MAX_KEY = 1000
"""Characters of a message that are compared with others."""

AGAIN = "copy {files} again from where it was saved"
BACK = "consolidate again once the files that were lost are back"
EARLIER = "go back to an earlier checkpoint"
REMEDIES = {
    Code.FILE_MISSING: "put {files} beside the others; --allow-missing writes what is here",
    Code.FILE_CUT: f"{AGAIN}; --allow-missing writes what is here",
    Code.ODD_FILE_SIZE: f"compare its size with the one where it was saved; if that differs, {AGAIN}",
    Code.BAD_CHECKSUM: f"{AGAIN}; --allow-missing leaves out what is damaged",
    Code.VALUE_LOST: f"{AGAIN}; --allow-missing leaves out what is damaged",
    Code.MIXED_SAVES: f"put the files of one save together: {AGAIN}",
    Code.METADATA_CONTRADICTS: "copy the metadata again from where it was saved",
    Code.LEFT_OVER: "delete it, once no process writes there",
    Code.STRAY_FILE: "move the file that does not belong here out of the folder",
    Code.NAME_CONTRADICTS: "rename what has the wrong name, if you trust the content",
    Code.ONE_OF_SEVERAL: "open its files together, by their folder; `ckptools formats` lists what is joined",
    Code.MANIFEST_DIFFERS: f"{AGAIN}, or write the manifest anew",
    Code.FILE_UNREADABLE: "make {files} readable",
    Code.TRACKER_ASTRAY: "let the tracker name the newest whole checkpoint: ckptools ls",
    Code.NEVER_WRITTEN: f"{AGAIN}; --allow-missing leaves out what was never written",
    Code.FILE_CONTRADICTS: "put the data files back under the names that they had, or copy {files} again",
    Code.FILLED: BACK,
    Code.LEFT_OUT: BACK,
    Code.ORIGIN_UNREADABLE: "consolidate again",
    Code.TENSOR_GAP: "find the file that holds it; --allow-missing leaves it out, or fills it with --fill",
    Code.TENSOR_OVERLAP: "put the files of one save together",
    Code.WORLD_SIZES_DISAGREE: "put the files of one save together",
    Code.LAYOUT_DISAGREES: f"put the files of one save together: {AGAIN}",
    Code.COPIES_DIFFER: f"{AGAIN}; verify --deep finds a damaged copy, --prefer-rank takes one",
    Code.TENSOR_NOT_JOINED: "give what the message names; --allow-missing leaves such tensors out",
    Code.MODEL_PART_MISSING: "put the missing part beside it",
    Code.NOT_FINITE: EARLIER,
    Code.ZEROS: EARLIER,
    Code.VALUES_ODD: "compare with an earlier checkpoint: ckptools diff --values",
    Code.NO_OPTIMIZER_STATE: "freeze it when you resume, or expect its moments to begin at zero",
    Code.STEPS_DISAGREE: "compare with an earlier checkpoint: ckptools diff",
    Code.LEARNING_RATES_DISAGREE: "set the learning rate by hand when you resume",
    Code.RNG_STATES_EQUAL: "seed each rank anew when you resume",
    Code.PARAM_GROUPS: "correct the param groups before the optimizer is loaded",
    Code.OPTIMIZER_STATE_SHAPE: EARLIER,
    Code.OPTIMIZER_STATE_UNNAMED: "give the names with --names",
    Code.UNSAFE_NAME: "do not load it with torch.load(weights_only=False); ckptools runs nothing of it",
}
"""The way out of a cause; `{files}` stands for the files of its ranks."""


@displayed
class Cause(NamedTuple):
    """Problems of one kind with one cause.

    Attributes:
        code: their code.
        severity: theirs.
        text: which they are, in a few words: `rank 2 missing`, `NaN or infinity in layers.17.down`.
        problems: how many there are.
        remedy: the way out; "" where none is known.
        where: the ranks and tensors that they are about; "" where they are about the whole.
        what: the fact in one line; `R` stands for the rank where only that differs: `no file __R_0.distcp`.
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
    """What follows from lost files.

    Attributes:
        code: the code of its problems.
        causes: codes of the causes that it follows from.
        text: how many there are: `126 tensors have gaps`.
        problems: the same as a number.
        first: the first of them in full.
    """

    code: str
    causes: tuple[str, ...]
    text: str
    problems: int
    first: str


def causes_of(problems: Iterable[Problem], severities: Sequence[Severity] = ("error", "warning")) -> tuple[Cause, ...]:
    """The causes behind problems; consequences of lost files are left out.

    Errors come first; within a severity, problems with files come first, then they go by code.
    """
    return tuple(cause for cause, _ in problems_by_cause(problems, severities))


def problems_by_cause(
    problems: Iterable[Problem], severities: Sequence[Severity] = ("error", "warning")
) -> tuple[tuple[Cause, tuple[Problem, ...]], ...]:
    """The causes of `causes_of`, each with its problems."""
    kept = _split(problem for problem in problems if problem.severity in severities)[0]
    groups: dict[tuple[Severity, Code, str], list[Problem]] = {}
    for problem in sorted(kept, key=_worst_first):
        groups.setdefault((problem.severity, problem.kind, _alike(problem)), []).append(problem)
    return tuple((_cause(kind, severity, group), tuple(group)) for (severity, kind, _), group in groups.items())


def consequences_of(problems: Iterable[Problem]) -> tuple[Consequence, ...]:
    """Gaps and values that follow from lost files, one record for each of their codes."""
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
    """Drop problems that follow from another: gaps, and values that were in a lost file."""
    return _split(problems)[0]


def _split(problems: Iterable[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Distinct problems: those that are causes, and those that follow from lost files."""
    found = list(dict.fromkeys(problems))
    gone = {p.rank for p in found if _loses_a_file(p)} - {None}
    follows = [p.kind in CONSEQUENCES and bool(gone) and p.rank in {None, *gone} for p in found]
    kept = [p for p, is_one in zip(found, follows, strict=True) if not is_one]
    return kept, [p for p, is_one in zip(found, follows, strict=True) if is_one]


def _loses_a_file(problem: Problem) -> bool:
    return problem.kind.lacks == "file" and problem.severity == "error"


def _worst_first(problem: Problem) -> tuple[int, str]:
    return ("error", "warning", "note").index(problem.severity), "" if problem.kind in FATES else problem.code


NUMBERS = re.compile(r"\[[^\]\[]{0,200}\]|\b[0-9a-f]{8,}\b|\d+(?:\.\d+)?(?:e[+-]?\d+)?")
"""What differs between problems with one cause: positions, checksums, numbers."""


def _alike(problem: Problem) -> str:
    """The key that problems with one cause share: nothing for lost files and gaps, else the message without numbers."""
    return "" if problem.kind.lacks in ("file", "elements") else NUMBERS.sub("#", _fact(problem)[:MAX_KEY])


HELD = re.compile(r"[,;] (?:which|it) (?:should )?holds? .*$")
"""What a lost file held; the consequences name it."""


def _fact(problem: Problem) -> str:
    return HELD.sub("", problem.message) if problem.kind.lacks == "file" else problem.message


def _cause(kind: Code, severity: Severity, group: Sequence[Problem]) -> Cause:
    ranks = {rank for p in group for rank in p.all_ranks}
    several = len(ranks or {name for p in group for name in p.files}) > 1
    files = f"the file{'s' if several else ''}" + (f" of {named_ranks(ranks)}" if ranks else "")
    remedy = REMEDIES.get(kind, "")
    if kind is Code.FILE_MISSING and len(ranks) * 2 > max(ranks, default=0) + 1 > 2:  # most of them are not here
        files = f"the other {plural(len(ranks), 'rank file')}"
        remedy = remedy.replace("the others", "what is here")
    remedy = remedy.replace("{files}", files)
    remedy = remedy.replace("where it was saved", "where they were saved") if several else remedy
    return Cause(kind.code, severity, _words(kind, group), len(group), remedy, where_of(group), _what(group))


def where_of(group: Sequence[Problem]) -> str:
    """The ranks and tensors that problems are about: `ranks 1..255`, `rank 2, w and 3 other tensors`."""
    ranks = {rank for p in group for rank in p.all_ranks}
    tensors = list(dict.fromkeys(p.tensor for p in group if p.tensor is not None))
    words = [named_ranks(ranks)] if ranks else []
    if tensors:
        kind = "other value" if group[0].kind in (Code.VALUE_LOST, Code.MIXED_SAVES, Code.LEFT_OUT) else "other tensor"
        more = f" and {plural(len(tensors) - 1, kind)}" if len(tensors) > 1 else ""
        words.append(clip_middle(printable(tensors[0]), MAX_WORDS) + more)
    return ", ".join(words)


def _what(group: Sequence[Problem]) -> str:
    """The message of problems with one cause: the one that they share, or the first."""
    facts = [(p.rank, _fact(p)) for p in group]
    said = list(dict.fromkeys(text for _, text in facts))
    shared = said[0] if len(said) == 1 else _template([(rank, text) for rank, text in facts if rank is not None])
    if shared is not None and (len(said) == 1 or all(rank is not None for rank, _ in facts)):
        return clip_middle(printable(shared), MAX_WHAT)
    more = f"; {SWAPPED}" if group[0].kind in NAMED_OTHERWISE and _swapped(said) else and_others(len(group) - 1)
    return clip_middle(printable(said[0]), MAX_WHAT) + more


NAMED_OTHERWISE = (Code.NAME_CONTRADICTS, Code.FILE_CONTRADICTS)
"""Problems of files whose content is not what their name promises."""

SWAPPED = "and the other way round: the two files seem to have changed places"


def _swapped(said: Sequence[str]) -> bool:
    """Whether two messages end in the same two numbers, in turn: found and expected."""
    numbers = [re.findall(r"\d+", text)[-2:] for text in said]
    return len(said) == 2 and len(set(numbers[0])) == 2 and numbers[0] == numbers[1][::-1]


def _template(said: Sequence[tuple[int, str]]) -> str | None:
    """The text of all ranks with `R` for the rank, if nothing else differs; zeros before it may."""
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
