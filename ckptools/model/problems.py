"""The problems of a checkpoint: the one table of their codes, the record of one of them, and the remedy for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from ckptools.model.records import Rows, displayed, to_dict
from ckptools.option import spelled
from ckptools.text import plural

Severity = Literal["error", "warning", "note"]

Forbids = Literal["nothing", "complete output", "any output"]
"""What an error forbids `consolidate` to write. `--allow-missing` permits `complete output`; no option permits
`any output`, because the files are not of one checkpoint or contradict each other.
"""

Lacks = Literal["nothing", "file", "part", "value", "tensor", "elements"]
"""What a problem makes unavailable: a whole file, a part with unknown names, a plain value, a tensor, or some
elements of a tensor.
"""


class Code(Enum):
    """Every problem that a checkpoint can have, with its code and usual severity.

    Attributes:
        code: stable, such as `CK001`; printed in messages and accepted by `--ignore`.
        meaning: a description in a few words.
        severity: an error is surely wrong; a warning may be; a note is for information.
        forbids: output that an error of this kind forbids `consolidate` to write.
        lacks: part of the checkpoint that the problem makes unavailable.
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
    # CK208 is given to no problem.
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
        """Whether an error of this kind makes a checkpoint not whole: data is missing, or is of another save."""
        return self.forbids != "nothing"


class Differing(NamedTuple):
    """The values that ranks have of a thing that all ranks should share.

    Attributes:
        name: name of the thing, in a word or two: `lr`.
        values: the values in words, each with its ranks; without the usual one.
        usual: the value that more than half of the ranks have; "" without such a majority.
        plain: whether it is a plain value; else a tensor, of which `consolidate` can take one copy.
    """

    name: str
    values: tuple[tuple[str, tuple[int, ...]], ...]
    usual: str = ""
    plain: bool = True

    @property
    def few_words(self) -> str:
        """The first value and the usual one, without ranks: `last_epoch 3, others 6`; else two values."""
        (first, _), *more = self.values
        other = f", others {self.usual}" if self.usual else f" or {more[0][0]}" if more else ""
        return f"{self.name} {first}{other}"


@displayed
@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a checkpoint, or a note for its user.

    Attributes:
        kind: its entry in the table of known problems.
        message: one line: expected, found, what to do.
        rank: the rank it is about.
        tensor: fqn of the tensor it is about.
        severity: that of its kind, unless this problem is more or less grave.
        files: names of the files it is about, including those that the message only counts.
        ranks: the ranks it is about, if there are several, including those that the message only counts.
        replicated: whether other files hold undamaged copies of the affected values.
        differing: each rank's value, where ranks should share one.
        contents: the last part of the message, which states the content of a lost file; problems that follow from
            the loss repeat it.
        found: the rank, name or size that the file's content states.
        expected: the rank, name or size that the file should have.
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
    contents: str = ""
    found: int | str | None = None
    expected: int | str | None = None

    def __post_init__(self) -> None:
        if not self.severity:
            object.__setattr__(self, "severity", self.kind.severity)

    @property
    def code(self) -> str:
        """The problem's code, such as `CK001`."""
        return self.kind.code

    @property
    def fact(self) -> str:
        """The message without the part about a lost file's content."""
        return self.message.removesuffix(self.contents)

    def to_dict(self) -> dict[str, Any]:
        """The problem's code, severity, rank, tensor, message and files."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        names = ("code", "severity", "rank", "tensor", "message", "files")
        return {name: getattr(self, name) for name in names}

    def _summary(self) -> str:
        return f"{self.severity} {self}"

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """Every rank that the problem concerns; empty if it concerns no rank's own files."""
        return self.ranks or (() if self.rank is None else (self.rank,))

    def __str__(self) -> str:
        where = [f"rank {self.rank}"] if self.rank is not None else []
        where += [self.tensor] if self.tensor is not None else []
        return "  ".join([self.code, *where, self.message])


def worst_first(problems: Iterable[Problem]) -> Rows[Problem]:
    """Sort problems: errors, then warnings, then notes, each in the order in which they were found."""
    return Rows(sorted(problems, key=lambda p: ("error", "warning", "note").index(p.severity)))


# -- remedies: the user's next step for each kind of problem, with the ranks' values where they differ -----------------


NO_OBJECT = "no object"
"""The fact `found` of a file in which torch.save failed before it wrote the object."""

ORIGIN = "where it was saved"
AGAIN = f"copy {{files}} again from {ORIGIN}"
BY_DEEP = "verify --deep finds a damaged copy, "
"""Part of a remedy that the record of verify --deep leaves out, because it has read every copy."""
WHICH_COPY = f"; {BY_DEEP}{{prefer_rank}} takes one"
BACK = "consolidate again once the files that were lost are back"
EARLIER = "go back to an earlier checkpoint"
REMEDIES = {
    Code.FILE_MISSING: "put {files} beside the others; {allow_missing} writes what is whole",
    Code.FILE_CUT: f"{AGAIN}; {{allow_missing}} writes what is whole",
    Code.ODD_FILE_SIZE: f"compare its size with the one where it was saved; if that differs, {AGAIN}",
    Code.BAD_CHECKSUM: f"{AGAIN}; {{allow_missing}} leaves out what is damaged",
    Code.VALUE_LOST: f"{AGAIN}; {{allow_missing}} leaves out what is damaged",
    Code.MIXED_SAVES: f"put the files of one save together: {AGAIN}",
    Code.METADATA_CONTRADICTS: "copy the metadata again from where it was saved",
    Code.LEFT_OVER: "delete it, once no process writes there",
    Code.STRAY_FILE: "move what does not belong here away; give files that changed places their names back",
    Code.NAME_CONTRADICTS: "rename what has the wrong name, if you trust the content",
    Code.ONE_OF_SEVERAL: "open its files together, by their folder; `ckptools formats` lists what is joined",
    Code.MANIFEST_DIFFERS: f"{AGAIN}, or write the manifest anew",
    Code.FILE_UNREADABLE: "make {files} readable",
    Code.TRACKER_ASTRAY: "let the tracker name the newest whole checkpoint: ckptools ls",
    Code.NEVER_WRITTEN: f"{AGAIN}; {{allow_missing}} leaves out what was never written",
    Code.FILE_CONTRADICTS: "put the data files back under the names that they had, or copy {files} again",
    Code.FILLED: BACK,
    Code.LEFT_OUT: BACK,
    Code.ORIGIN_UNREADABLE: "consolidate again",
    Code.NAMED_AS_ANOTHER_RANK: "give {files} the names of the ranks that they hold; consolidate goes by the content",
    Code.TENSOR_GAP: "find the file that holds it; {allow_missing} leaves it out, or fills it with {fill}",
    Code.TENSOR_OVERLAP: "put the files of one save together",
    Code.WORLD_SIZES_DISAGREE: "put the files of one save together",
    Code.LAYOUT_DISAGREES: f"put the files of one save together: {AGAIN}",
    Code.COPIES_DIFFER: f"{AGAIN}{WHICH_COPY}",
    Code.TENSOR_NOT_JOINED: "give what the message names; {allow_missing} leaves such tensors out",
    Code.MODEL_PART_MISSING: "put the missing part beside it",
    Code.PLACEHOLDERS: "consolidate the folder of ZeRO-3's rank files; to save a model, gather its parameters first"
    " (stage3_gather_16bit_weights_on_model_save)",
    Code.SIZE_UNSTATED: "give the shapes with {shapes}, or {allow_missing} if you know that no rank is missing",
    Code.NOT_FINITE: EARLIER,
    Code.ZEROS: EARLIER,
    Code.VALUES_ODD: "compare with an earlier checkpoint: ckptools diff --values",
    Code.NO_OPTIMIZER_STATE: "freeze it when you resume, or expect its moments to begin at zero",
    Code.STEPS_DISAGREE: "compare with an earlier checkpoint: ckptools diff",
    Code.LEARNING_RATES_DISAGREE: "set the learning rate by hand when you resume",
    Code.RNG_STATES_EQUAL: "seed each rank anew when you resume",
    Code.PARAM_GROUPS: "correct the param groups before the optimizer is loaded",
    Code.OPTIMIZER_STATE_SHAPE: EARLIER,
    Code.OPTIMIZER_STATE_UNNAMED: "give the names with {names}",
    Code.UNSAFE_NAME: "do not load it with torch.load(weights_only=False); ckptools runs nothing of it",
}
"""The user's next step by kind of problem; `{files}` stands for the culprit's files, other names for options."""

WITHOUT_MAJORITY = {
    Code.MIXED_SAVES: "put the files of one save together",
    Code.COPIES_DIFFER: f"find out which is right{WHICH_COPY}",
}
"""The next step if no value has a majority among the ranks."""


def remedy_of(kind: Code, group: Sequence[Problem]) -> str:
    """The next step for problems of one kind with one culprit; "" if none is known."""
    ranks = {rank for p in group for rank in p.all_ranks}
    several = len(ranks or {name for p in group for name in p.files}) > 1
    files = "the files" if several else "the file"
    remedy = REMEDIES.get(kind, "")
    if any(p.differing for p in group) and not ranks:
        remedy = WITHOUT_MAJORITY.get(kind, remedy)
    if any(p.differing and p.differing.plain for p in group):
        remedy = remedy.removesuffix(WHICH_COPY)
    if kind is Code.FILE_CUT and all(p.found == NO_OBJECT for p in group):
        remedy = f"{EARLIER}, as ckptools ls lists them; {{allow_missing}} writes what is whole"
    if kind is Code.NEVER_WRITTEN and all(p.severity == "warning" for p in group):  # zeros are written as they are
        remedy = AGAIN
    if kind is Code.STRAY_FILE and all(p.severity == "warning" for p in group):
        remedy = f"compare {{files}} with {ORIGIN}, and move away a file that does not belong here"
    elif kind is Code.STRAY_FILE and len({name for p in group for name in p.files}) == 1:
        remedy = f"move it away if it does not belong here; else {AGAIN.replace('{files}', 'it')}"
    if kind is Code.COPIES_DIFFER and all(p.severity == "warning" for p in group):  # as running statistics may
        remedy = "{prefer_rank} takes the copies of another rank"
    if kind is Code.FILE_MISSING and len(ranks) * 2 > max(ranks, default=0) + 1 > 2:  # most of them are not here
        files = f"the other {plural(len(ranks), 'rank file')}"
        remedy = remedy.replace("the others", "what is here")
    return remedy.replace(ORIGIN, "where they were saved" if several else ORIGIN).format(
        files=files,
        allow_missing=spelled("allow-missing", True),
        prefer_rank=spelled("prefer-rank"),
        fill=spelled("fill"),
        shapes=f"{spelled('shapes')} FROM",
        names=spelled("names"),
    )
