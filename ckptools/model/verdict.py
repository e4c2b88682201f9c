"""The verdict on a checkpoint: whether it is whole, recoverable and joinable, why not, and how deep the check went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from ckptools.model.incidents import Cause, Consequence, Incident, incidents_of
from ckptools.model.problems import Code
from ckptools.model.records import displayed, to_dict
from ckptools.text import clip, clip_middle, plural

Depth = Literal["nothing", "listed", "structure", "bytes"]
"""How deep the check went: not at all; names and layout, which rely on present files; every rank's structure;
every byte, compared with its checksum if there is one.
"""

Level = Literal["good", "doubtful", "bad"]

EXCHANGED = Code.NAMED_AS_ANOTHER_RANK.code

NOT_JOINED = Code.TENSOR_NOT_JOINED.code

MAX_HEADLINE = 80
"""Characters of a headline; the names of tensors in it have at most `MAX_ABOUT`."""

MAX_ABOUT = 59


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
    def incidents(self) -> tuple[Incident, ...]:
        """The causes by culprit, the worst first."""
        return incidents_of(self.causes)

    @property
    def headline(self) -> str:
        """The verdict in at most 80 characters, the worst incident first."""
        errors = [one for one in self.incidents if one.severity == "error"]
        warnings = [one for one in self.incidents if one.severity == "warning"]
        if self.whole is False:
            return _fitted("NOT WHOLE", errors) if errors else "NOT WHOLE: nothing of it can be read"
        if self.whole is None:
            return _counted("not proven whole; ", errors or warnings) if self.causes else self.extent
        if self.resumable is False:
            exchanged = [one for one in errors if any(cause.code == EXCHANGED for cause in one.causes)]
            others = [one for one in errors if one not in exchanged]
            return _fitted("whole, not resumable as the files lie", exchanged + others)
        if errors:
            return _counted("whole, but ", errors)
        if not self.joinable:
            named = (clip_middle(c.about, MAX_ABOUT) or c.what for c in self.causes if c.code == NOT_JOINED)
            return clip(": ".join(["whole, not joinable", *islice(named, 1)]), MAX_HEADLINE)
        return _counted("whole, ", warnings) if warnings else f"whole: {self.extent}"

    @property
    def remark(self) -> str:
        """A second line: the files found, if nothing more is proven; the recoverable part of a broken checkpoint."""
        if self.whole is None and self.causes:
            return self.extent
        if self.whole is False and self.recoverable and self.joinable:
            lost = f", but not {self.lost[0]}" if self.lost else ""
            return f"recoverable: the whole model and optimizer are here{lost}"
        return ""

    @property
    def in_one_line(self) -> str:
        """The headline and the remark."""
        return "; ".join(filter(None, (self.headline, self.remark)))

    def to_dict(self) -> dict[str, Any]:
        """The verdict's fields, with `level` and `headline`."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        fields = ("whole", "recoverable", "joinable", "resumable", "depth", "level", "headline", "remark")
        found = {name: getattr(self, name) for name in fields}
        return {
            **found,
            "incidents": [_incident_record(one) for one in self.incidents],
            "causes": [cause._asdict() for cause in self.causes],
            "consequences": [{**one._asdict(), "causes": list(one.causes)} for one in self.consequences],
            "lost": list(self.lost),
        }

    def _summary(self) -> str:
        return self.headline


def _incident_record(one: Incident) -> dict[str, Any]:
    return {**one._asdict(), "causes": [cause.code for cause in one.causes]}


def _counted(start: str, incidents: Sequence[Incident]) -> str:
    """Count incidents of one severity, and name them: `whole, 2 warnings: …`."""
    return _fitted(f"{start}{plural(len(incidents), incidents[0].severity)}", incidents)


def _fitted(start: str, incidents: Sequence[Incident]) -> str:
    """Name as many incidents as a headline has room for, at least the first, and count the others.

    Values in parentheses, such as `(batch 3, others 6)`, are left out before an incident is.
    """
    texts = [one.text for one in incidents]
    plain = [text.partition(" (")[0] for text in texts]
    for named in range(len(texts), 0, -1):
        more = f"; {len(texts) - named} more" if named < len(texts) else ""
        for shown in (texts, plain):
            line = f"{start}: {'; '.join(shown[:named])}{more}"
            if len(line) <= MAX_HEADLINE:
                return line
    return f"{start}: {clip_middle(texts[0], MAX_HEADLINE - len(start) - 2 - len(more))}{more}"
