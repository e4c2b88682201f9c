"""What is wrong with a checkpoint: each code once, with what it says, and the record of one finding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with a checkpoint, or that its user should know.

    Attributes:
        code: stable, such as `CK001`; see `PROBLEM_CODES`.
        severity: an error makes the checkpoint not whole; a warning may; a note is for information.
        message: one line: expected, found, what to do.
        rank: the rank it is about.
        tensor: fqn of the tensor it is about.
    """

    code: str
    severity: Severity
    message: str
    rank: int | None = None
    tensor: str | None = None

    def __str__(self) -> str:
        where = [f"rank {self.rank}"] if self.rank is not None else []
        where += [self.tensor] if self.tensor is not None else []
        return "  ".join([self.code, *where, self.message])


def worst_first(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Errors, then warnings, then notes, each in the order in which they were found."""
    return tuple(sorted(problems, key=lambda p: ("error", "warning", "note").index(p.severity)))


PROBLEM_CODES: dict[str, str] = {
    "CK001": "rank file missing",
    "CK002": "rank file cut short",
    "CK003": "rank file of an odd size",
    "CK004": "bad CRC-32",
    "CK005": "value lost or damaged inside a file",
    "CK006": "files of different steps or saves",
    "CK007": "metadata that contradicts itself",
    "CK008": "left over from an interrupted write",
    "CK009": "stray or duplicate rank file",
    "CK010": "file name and content disagree",
    "CK011": "one file of several",
    "CK012": "kept as the framework has it",
    "CK013": "file beside it that is not read",
    "CK014": "differs from the manifest",
    "CK015": "file that may not be read, or whose disk fails",
    "CK101": "gap in a tensor",
    "CK102": "overlap in a tensor",
    "CK103": "world sizes disagree",
    "CK104": "ranks disagree on layout, shape or dtype",
    "CK105": "copies that should be equal differ",
    "CK106": "tensor that cannot be put together",
    "CK107": "part of the model missing",
    "CK108": "layout that the files do not state, found as the only one that fits",
    "CK201": "NaN or infinity",
    "CK203": "no optimizer state for a parameter",
    "CK204": "step counters disagree",
    "CK205": "scheduler and param groups have different learning rates",
    "CK206": "RNG states equal on several ranks",
    "CK207": "parameter in no param group, or in two",
    "CK209": "optimizer state of another shape than its parameter",
    "CK210": "optimizer state without a sure name",
    "CK301": "foreign classes, kept as data",
    "CK302": "name that could run code",
    "CK303": "whole module instead of a state dict",
}


CONTRADICTIONS = ("CK006", "CK007", "CK009", "CK103", "CK104", "CK105")


"""Problems that no option talks away: the files are not of one checkpoint, or contradict each other."""
