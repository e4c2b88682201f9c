"""The problems of a checkpoint: the one table of their codes, and the record of one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from ckptools.model.records import displayed, to_dict

Severity = Literal["error", "warning", "note"]

Forbids = Literal["nothing", "complete output", "any output"]
"""What an error forbids `consolidate` to write: `complete output` is left to `--allow-missing`; nothing talks away what
forbids `any output`, since the files are not of one checkpoint or contradict each other."""

Lacks = Literal["nothing", "file", "part", "value", "tensor", "elements"]
"""What of a checkpoint cannot be had: a whole file, a part whose names are not even known, a plain value, a tensor, or
some elements of one."""


class Code(Enum):
    """Every problem that a checkpoint can have, with its code and usual severity.

    Attributes:
        code: stable, such as `CK001`; what is printed, and what `--ignore` takes.
        meaning: what it stands for, in a few words.
        severity: an error is something wrong; a warning may be; a note is for information.
        forbids: what an error of this kind forbids `consolidate` to write.
        lacks: what cannot be had because of it.
    """

    FILE_MISSING = "CK001", "file missing", "error", "complete output", "file"
    FILE_CUT = "CK002", "file cut short or damaged", "error", "complete output", "file"
    ODD_FILE_SIZE = "CK003", "file of an odd size", "warning"
    BAD_CHECKSUM = "CK004", "bad CRC-32", "error", "complete output", "elements"
    VALUE_LOST = "CK005", "value lost or damaged inside a file", "error", "complete output", "value"
    MIXED_SAVES = "CK006", "files of different steps or saves", "error", "any output"
    METADATA_CONTRADICTS = "CK007", "metadata that contradicts itself", "error", "any output"
    LEFT_OVER = "CK008", "left over from an interrupted write", "warning"
    STRAY_FILE = "CK009", "stray or duplicate rank file", "error", "any output"
    NAME_CONTRADICTS = "CK010", "file name and content disagree", "warning"
    ONE_OF_SEVERAL = "CK011", "one file of several", "error", "complete output", "part"
    KEPT_AS_SAVED = "CK012", "kept as the framework has it", "note"
    NOT_READ = "CK013", "file beside it that is not read", "note"
    MANIFEST_DIFFERS = "CK014", "differs from the manifest", "error"
    FILE_UNREADABLE = "CK015", "file that may not be read, or whose disk fails", "error", "complete output", "file"
    TRACKER_ASTRAY = "CK016", "tracker that names no newest whole checkpoint", "error"
    NEVER_WRITTEN = "CK017", "bytes that were never written to the disk", "error", "complete output", "value"
    FILE_CONTRADICTS = "CK018", "data file that contradicts the metadata", "error", "complete output", "file"
    FILLED = "CK019", "values that consolidate filled in", "error", "complete output", "value"
    LEFT_OUT = "CK020", "left out by consolidate", "error", "complete output", "value"
    ORIGIN_UNREADABLE = "CK021", "record of origin that cannot be read", "error", "complete output", "value"
    NAMED_AS_ANOTHER_RANK = "CK022", "rank file under the name of another rank", "error"
    TENSOR_GAP = "CK101", "gap in a tensor", "error", "complete output", "elements"
    TENSOR_OVERLAP = "CK102", "overlap in a tensor", "error", "complete output"
    WORLD_SIZES_DISAGREE = "CK103", "world sizes disagree", "error", "any output"
    LAYOUT_DISAGREES = "CK104", "ranks disagree on layout, shape or dtype", "error", "any output"
    COPIES_DIFFER = "CK105", "copies that should be equal differ", "error", "any output"
    TENSOR_NOT_JOINED = "CK106", "tensor that cannot be put together", "warning", "complete output", "tensor"
    MODEL_PART_MISSING = "CK107", "part of the model missing", "error", "complete output", "part"
    LAYOUT_INFERRED = "CK108", "layout that the files do not state", "note"
    PLACEHOLDERS = "CK109", "placeholders in the place of tensors", "error", "complete output", "part"
    SIZE_UNSTATED = "CK110", "tensors whose size no file states", "warning", "complete output", "part"
    NOT_FINITE = "CK201", "NaN or infinity", "error"
    ZEROS = "CK202", "zeros where there should be values", "error"
    NO_OPTIMIZER_STATE = "CK203", "no optimizer state for a parameter", "warning"
    STEPS_DISAGREE = "CK204", "step counters disagree", "warning"
    LEARNING_RATES_DISAGREE = "CK205", "scheduler and param groups have different learning rates", "warning"
    RNG_STATES_EQUAL = "CK206", "RNG states equal on several ranks", "warning"
    PARAM_GROUPS = "CK207", "parameter in no param group, or in two", "error"
    OPTIMIZER_STATE_SHAPE = "CK209", "optimizer state of another shape than its parameter", "error"
    OPTIMIZER_STATE_UNNAMED = "CK210", "optimizer state without a sure name", "warning"
    VALUES_ODD = "CK211", "values that are worth a look", "warning"
    FOREIGN_CLASSES = "CK301", "foreign classes, kept as data", "note"
    UNSAFE_NAME = "CK302", "name that could run code", "warning"
    WHOLE_MODULE = "CK303", "whole module instead of a state dict", "note"

    def __init__(
        self, code: str, meaning: str, severity: Severity, forbids: Forbids = "nothing", lacks: Lacks = "nothing"
    ) -> None:
        self.code, self.meaning, self.severity = code, meaning, severity
        self.forbids, self.lacks = forbids, lacks

    @property
    def spoils(self) -> bool:
        """Whether a checkpoint with an error of this kind is not whole: not all that was saved is here, or of it."""
        return self.forbids != "nothing"


class Differing(NamedTuple):
    """What ranks have of one thing that should be the same on all of them.

    Attributes:
        name: of the thing, in a word or two: `lr`.
        values: the values in words, each with its ranks; without the usual one.
        usual: the value that more than half of the ranks have; "" where no value has so many.
        hidden: how many more ranks have values that are not listed.
        plain: whether it is a plain value; else it is of a tensor, of which `consolidate` can take one copy.
    """

    name: str
    values: tuple[tuple[str, tuple[int, ...]], ...]
    usual: str = ""
    hidden: int = 0
    plain: bool = True


@displayed
@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with a checkpoint, or that its user should know.

    Attributes:
        kind: which of the known problems it is.
        message: one line: expected, found, what to do.
        rank: the rank it is about.
        tensor: fqn of the tensor it is about.
        severity: as the kind has it, unless this one is more or less grave.
        files: names of files that it is about, also of those that the message only counts.
        ranks: ranks that it is about, where they are several; also those that the message only counts.
        replicated: whether other files hold what it is about, unharmed.
        differing: what each rank has, where ranks should have the same.
    """

    kind: Code
    message: str
    rank: int | None = None
    tensor: str | None = None
    severity: Severity = None  # type: ignore[assignment]  # from here on, as the kind has it
    files: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    replicated: bool = False
    differing: Differing | None = None

    def __post_init__(self) -> None:
        if not self.severity:
            object.__setattr__(self, "severity", self.kind.severity)

    @property
    def code(self) -> str:
        """Its code, such as `CK001`."""
        return self.kind.code

    def to_dict(self) -> dict[str, Any]:
        """Its code, severity, rank, tensor, message and files."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        names = ("code", "severity", "rank", "tensor", "message", "files")
        return {name: getattr(self, name) for name in names}

    def _summary(self) -> str:
        return f"{self.severity} {self}"

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """Every rank that it is about; none where it is about no rank's own files."""
        return self.ranks or (() if self.rank is None else (self.rank,))

    def __str__(self) -> str:
        where = [f"rank {self.rank}"] if self.rank is not None else []
        where += [self.tensor] if self.tensor is not None else []
        return "  ".join([self.code, *where, self.message])


def worst_first(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Errors, then warnings, then notes, each in the order in which they were found."""
    return tuple(sorted(problems, key=lambda p: ("error", "warning", "note").index(p.severity)))
