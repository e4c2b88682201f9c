"""The verdict on a checkpoint: whether it is whole, recoverable and joinable, why not, and how deep the check went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckptools.model.causes import Cause, Consequence
from ckptools.model.problems import Code
from ckptools.model.records import displayed, to_dict
from ckptools.text import plural

Depth = Literal["nothing", "listed", "structure", "bytes"]
"""How deep the check went: not at all; names and layout, which promise files that are here; every rank's structure;
every byte, compared with its checksum where there is one."""

Level = Literal["good", "doubtful", "bad"]

EXCHANGED = Code.NAMED_AS_ANOTHER_RANK.code

MAX_CAUSES = 4
"""Causes that a headline names."""


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
        causes: what is wrong or doubtful, the worst first.
        consequences: what follows from lost files, and is no cause.
        lost: what only lost or damaged files had, where everything else can be recovered.
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
        """False where files have the names of other ranks, so that a resume by rank would load shards of others.

        None where nothing of the kind was found.
        """
        return False if any(cause.code == EXCHANGED and cause.severity == "error" for cause in self.causes) else None

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
        """Its fields, with `level` and `headline`."""
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
